"""Bigger models in the memory there is.

`plan` decides from one watched step what of a model's activations is kept, goes to a second memory
and comes back, or is computed once more; `apply` carries that out around a training loop, bit for
bit as without. A `CapturedStep` is a whole training step of fixed structure that runs in one piece
of memory, planned in advance.
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
