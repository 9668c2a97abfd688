"""Models whose layers take a known time and no core: what a device leaves to its host."""

import time
from typing import Any

import torch
from torch import nn

__all__ = ["Pace", "Paced", "paced"]

Pace = tuple[int, float, float]  # numbers in the weight, seconds of forward, of backward
CELLS, CLASSES = 14 * 14, 10


class _Pause(torch.autograd.Function):
    """Passes its input on, and sleeps both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: "Paced") -> torch.Tensor:
        time.sleep(layer.forward_seconds)
        ctx.layer, ctx.shape = layer, weight.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.layer.backward_seconds)
        return grad, torch.zeros(ctx.shape), None


class Paced(nn.Module):
    """A layer whose forward and backward take a known time and no core.

    Args:
        numel: Numbers in its weight; the gradient is zero.
        forward_seconds: Of forward.
        backward_seconds: Of backward.
    """

    def __init__(self, numel: int, forward_seconds: float, backward_seconds: float) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds = forward_seconds, backward_seconds
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, later."""
        y: torch.Tensor = _Pause.apply(x, self.weight, self)  # type: ignore[no-untyped-call]
        return y


def paced(*paces: Pace) -> nn.Module:
    """Return such layers behind a small real one, for images of 28 x 28 pixels."""
    stem = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(CELLS, CLASSES)]
    return nn.Sequential(*stem, *(Paced(*pace) for pace in paces))
