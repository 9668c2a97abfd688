"""Gradient clipping by the owners of rows: by value at once, by norm one step late."""

import math
from collections.abc import Iterable, Mapping

import torch

from daso.comm.reduction import accumulator

EPSILON = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


class LastNorm:
    """L2 norm of the last complete step's gradient, from squared norms of its parts."""

    def __init__(self, parts: int) -> None:  # pairs of an owner and a layer
        self.last: float | None = None  # None before the first complete step
        self.steps = 0  # complete steps since `begin`
        self._parts = parts
        self._squares: dict[tuple[int, int], float] = {}  # of the current step

    def begin(self) -> None:
        """Restart the count of steps; the last norm stays."""
        self.steps = 0

    def add(self, owner: int, squares: Mapping[int, float]) -> None:
        """Add the squared norms of an owner's rows, by layer."""
        self._squares.update({(owner, layer): square for layer, square in squares.items()})
        if len(self._squares) == self._parts:
            # In a fixed order: all ranks get the same bits.
            self.last = math.sqrt(sum(self._squares[part] for part in sorted(self._squares)))
            self._squares = {}
            self.steps += 1

    def factor(self, limit: float | None) -> float:
        """Return the factor of the current step's gradients."""
        if limit is None or self.last is None:
            return 1.0
        return min(1.0, limit / (self.last + EPSILON))


def squared_norm(tensors: Iterable[torch.Tensor]) -> float:
    """Return the squared L2 norm of some tensors together."""
    norms = [
        torch.linalg.vector_norm(tensor, dtype=accumulator(tensor.dtype)).item()
        for tensor in tensors
    ]
    return math.fsum(norm * norm for norm in norms)


def clip(grads: Iterable[torch.Tensor], factor: float, limit: float | None) -> None:
    """Scale gradients in place, then limit their values; None: no limit."""
    for grad in grads:
        if factor != 1.0:
            grad.mul_(factor)
        if limit is not None:
            grad.clamp_(-limit, limit)
