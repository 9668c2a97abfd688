"""Memory plans: train larger models within a budget, or in one preplanned arena.

`plan` observes a step and decides which activations of a model are kept, swapped to a second memory
or recomputed; `apply` follows the plan in a training loop, with bitwise equal results. A
`CapturedStep` is a whole training step of fixed structure that runs in one arena of memory, planned
in advance.
"""

from typing import TYPE_CHECKING

from daso.public_names import on_first_use

if TYPE_CHECKING:
    from daso.memory.api import Applied, MemoryPlan, apply, plan
    from daso.memory.captured.step import CapturedReport, CapturedStep

__all__ = ["Applied", "CapturedReport", "CapturedStep", "MemoryPlan", "apply", "plan"]

__getattr__, __dir__ = on_first_use(
    __name__,
    dict.fromkeys(("Applied", "MemoryPlan", "apply", "plan"), "daso.memory.api")
    | dict.fromkeys(("CapturedReport", "CapturedStep"), "daso.memory.captured.step"),
)
