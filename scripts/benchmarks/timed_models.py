"""Models whose layers take a known time and no core, as on a device; and cores that are busy."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from daso.cli.bench.models import Case

__all__ = ["CASES", "EVEN", "Pace", "Paced", "paced", "shared_core"]

Pace = tuple[int, float, float]  # numbers in the weight, seconds of forward, of backward
CELLS, CLASSES = 14 * 14, 10
# Layers of the CNN with the times that they took of a core (2 ranks on 2 cores, 2026-11-22), on a
# device that leaves the core alone; half of the numbers in the first layer; and as many numbers in
# equal layers.
DEVICE = ((384, 0.0107, 0.0105), (18_624, 0.0088, 0.0093), (4_548_650, 0.0069, 0.0101))
EARLY = ((2_280_000, 0.0107, 0.0105), (18_624, 0.0088, 0.0093), (2_280_000, 0.0069, 0.0101))
EVEN = ((72_000, 0.0004, 0.001),) * 64


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


def _plain(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02)


CASES = {
    "device": Case(lambda: paced(*DEVICE), 64, text=False, optimizer=_plain),
    "device-early": Case(lambda: paced(*EARLY), 64, text=False, optimizer=_plain),
    "device-even": Case(lambda: paced(*EVEN), 64, text=False, optimizer=_plain),
}


# Ends by itself if the process that started it is killed.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


@contextmanager
def shared_core(number: int, busy: int) -> Iterator[None]:
    """Run this process and as many busy ones on one core of the machine."""
    os.sched_setaffinity(0, {number % (os.cpu_count() or 1)})
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
