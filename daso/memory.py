"""Bigger models in the memory there is.

`plan` decides from one watched step what of a model's activations is kept, goes to a second memory
and comes back, or is computed once more; `apply` carries that out around a training loop, bit for
bit as without.
"""

from daso.train.memory.apply import Applied, MemoryPlan, apply, plan

__all__ = ["Applied", "MemoryPlan", "apply", "plan"]
