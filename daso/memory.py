"""Bigger models in the memory there is.

`plan` decides from one watched step what of a model's activations is kept, goes to a second memory
and comes back, or is computed once more; `apply` carries that out around a training loop, bit for
bit as without. A `CapturedStep` is a whole training step of fixed structure that runs in one piece
of memory, planned in advance.
"""

from daso.train.memory.apply import Applied, MemoryPlan, apply, plan
from daso.train.memory.captured import CapturedReport, CapturedStep

__all__ = ["Applied", "CapturedReport", "CapturedStep", "MemoryPlan", "apply", "plan"]
