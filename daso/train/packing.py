"""Which way rows on a device are packed and taken in: by torch's operations, or kernels of our own.

Kernels are taken where Triton is there, they give the same bits, and are faster; tried once for
each device of a process, on a row of a few million numbers.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from daso.comm.compress import codec_named, pieces
from daso.comm.copies import Copies
from daso.train.fused import Fused
from daso.train.part import DEVICE_PIECE, Part, Way

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Choice", "choose", "pack", "take", "views"]

ROUNDS = 5
CODEC = codec_named("bf16")
# Of tensors on trial, which begin evenly and not; together a piece, and one that does not end so:
# what is compiled for them need not be while training goes on.
NUMELS = (DEVICE_PIECE // 2, 1_000, DEVICE_PIECE // 2 - 1_007, 7, 7)


@dataclass(frozen=True, slots=True)
class Choice:
    """What packs rows on a device.

    Args:
        kernels: `daso.comm.kernels`; None: torch's operations.
        told: Which, and why; for reports.
    """

    kernels: "ModuleType | None"
    told: str


def choose(device: torch.device, copies: Copies) -> Choice:
    """Return what packs rows on a device. Blocks: it is tried, the first time in a process.

    Args:
        device: A CUDA device.
        copies: Between it and the host.
    """
    return _chosen(device, _Clock(copies))


class _Clock:
    """A device's, whoever asks: equal to all others, so that nothing is tried again for it."""

    def __init__(self, copies: Copies) -> None:
        self.stamp = copies.stamp

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Clock)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _chosen(device: torch.device, clock: _Clock) -> Choice:
    try:
        from daso.comm import kernels
    except ImportError as error:
        return Choice(None, f"torch's operations ({error})")
    try:
        ratio = _trial(kernels, device, clock)
    except Exception as error:  # Triton needs a C compiler, Python's headers, a folder to write to
        return Choice(None, f"torch's operations (kernels do not start: {_line(error)})")
    if ratio is None:
        return Choice(None, "torch's operations (kernels give other bits here)")
    told = f"kernels (Triton {kernels.version()}), {ratio:.2f} of the time of torch's operations"
    if ratio >= 1:
        return Choice(None, f"torch's operations (kernels take {ratio:.2f} of their time)")
    return Choice(kernels, told)


def _line(error: Exception) -> str:
    """Return an error's kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _trial(kernels: "ModuleType", device: torch.device, clock: _Clock) -> float | None:
    """Return the time of kernels over that of torch's operations; None: they give other bits."""
    # Not random: the user's numbers are drawn from the same generator.
    params = [torch.arange(numel, device=device).mul(0.37).sin_() for numel in NUMELS]
    seconds, ended = [], []
    for fused in (None, Fused(kernels, lambda: views(params))):
        part = Part(torch.zeros(sum(NUMELS), device=device), Way(), on_device=True, fused=fused)
        mean = torch.full((part.piece,), 1e-3, device=device)
        taken = []
        for _ in range(1 + ROUNDS):
            begun = clock.stamp()
            pack(part, params)
            take(part, mean)
            over = clock.stamp()
            while not over.over():
                time.sleep(1e-4)
            taken.append(over.since(begun))
        seconds.append(statistics.median(taken[1:]))
        numel = part.shown.numel()
        sent = CODEC.fields(part.outbox.memory, numel, 0, numel)
        ended.append((*sent, part.reference, part.shown))
    if not all(map(torch.equal, *ended)):
        return None
    return seconds[1] / seconds[0]


def views(params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return flat tensors, and where each begins in the row of all."""
    starts = accumulate((p.numel() for p in params), initial=0)
    return list(zip(params, starts, strict=False))


def pack(part: Part, params: Sequence[torch.Tensor]) -> None:
    """Launch what starts an exchange of a part that holds flat tensors, one after the other."""

    def gather(start: int, stop: int, row: torch.Tensor) -> None:
        pairs = [
            (
                row[max(at, start) - start : at + p.numel() - start],
                p[max(0, start - at) : stop - at],
            )
            for p, at in views(params)
            if at < stop and start < at + p.numel()
        ]
        torch._foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])

    part.send(CODEC, [(0, part.shown.numel())], gather, keeps=True)
    part.checks()


def take(part: Part, mean: torch.Tensor) -> None:
    """Launch what takes a mean in that lies on the device, once it was packed.

    Args:
        part: Of which all was packed.
        mean: Of the first numbers (at least a piece of the part); taken for all others too.
    """
    ((_, numel), payload), *_ = part.outbox.items()
    for a, b in pieces(numel, part.piece):
        part.deliver(a, b, mean[: b - a], CODEC.fields(payload, numel, a, b))
    part.finish()
