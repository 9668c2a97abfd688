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

from daso.comm.compression import EVEN, codec_named
from daso.comm.device.cuda import CudaCopies
from daso.errors import told
from daso.plan.layout import split
from daso.train.deltas.fused import Fused
from daso.train.deltas.shard import DEVICE_PIECE, DeltaShard, MergeOptions

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Choice", "choose", "pack", "take", "views"]

ROUNDS = 5
CODEC = codec_named("bf16")
TYPE = torch.float32
# Tensors on trial, which begin evenly and not; six million numbers, in so many payloads.
TENSORS = (
    *((DEVICE_PIECE, TYPE), (1_000, torch.bfloat16), (DEVICE_PIECE // 2 - 1_007, TYPE)),
    *((7, TYPE), (9, TYPE)),
)
SPANS = 3
BACKLOG = 16  # products of matrices of as many numbers: some milliseconds of a fast device


@dataclass(frozen=True, slots=True)
class Choice:
    """What packs rows on a device.

    Args:
        kernels: `daso.comm.device.triton_kernels`; None: torch's operations.
        told: Which, and why; for reports.
    """

    kernels: "ModuleType | None"
    told: str


@functools.cache
def choose(device: torch.device) -> Choice:
    """Return what packs rows on a device. Blocks: it is tried, the first time in a process."""
    try:  # Triton needs a C compiler, Python's headers, a folder to write to
        from daso.comm.device import triton_kernels as kernels

        if kernels.interpreted():
            return Choice(None, "torch's operations (Triton interprets: TRITON_INTERPRET)")
        ratio = _trial(kernels, device)
    except Exception as error:
        return Choice(None, f"torch's operations (kernels do not start: {told(error)})")
    if ratio is None:
        return Choice(None, "torch's operations (kernels give other bits here)")
    if ratio >= 1:
        return Choice(None, f"torch's operations (kernels take {ratio:.2f} of their time)")
    said = f"kernels (Triton {kernels.version()}), {ratio:.2f} of the time of torch's operations"
    return Choice(kernels, said)


def _trial(kernels: "ModuleType", device: torch.device) -> float | None:
    """Return the time of kernels over that of torch's operations; None: they give other bits."""
    copies = CudaCopies(device)
    # Not random: the user's numbers are drawn from the same generator.
    params = [
        torch.arange(numel, dtype=TYPE, device=device).mul_(0.37).sin_().to(dtype)
        for numel, dtype in TENSORS
    ]
    numel = sum(p.numel() for p in params)
    made = Fused(kernels, lambda: views(params))
    parts = [
        DeltaShard(torch.zeros(numel, dtype=TYPE, device=device), MergeOptions(), on_device=True)
        for _ in range(2)
    ]
    parts[1].fused = made
    mean = torch.full((parts[0].piece,), 1e-3, dtype=TYPE, device=device)
    for keeps in (False, False, True, True):  # with what the wire lost before, and without
        for part in parts:
            pack(part, params, keeps=keeps)
        sent = [[fields[0] for *_, fields in part.sent()] for part in parts]
        same = all(map(torch.equal, *sent))
        for part in parts:
            take(part, mean)
        pairs = [(part.reference, part.shown) for part in parts]
        if not same or not all(map(torch.equal, *pairs)):
            return None
    return _time(parts, params, mean, copies)


def _time(
    parts: Sequence[DeltaShard],
    params: Sequence[torch.Tensor],
    mean: torch.Tensor,
    copies: CudaCopies,
) -> float:
    """Return how long the second part takes over the first.

    The device has enough to do when all of it is launched, as in training: what is asked is how
    long it takes there, not how long launching takes.
    """
    side = int(max(p.numel() for p in params) ** 0.5)
    square = params[0][: side * side].view(side, side).to(TYPE)
    product = torch.empty_like(square)
    for _ in range(BACKLOG):
        torch.mm(square, square, out=product)
    stamps = []
    for _ in range(ROUNDS):
        for part in parts:
            begun = copies.stamp()
            pack(part, params, keeps=True)
            take(part, mean)
            stamps.append((begun, copies.stamp()))
    while not stamps[-1][1].over():
        time.sleep(1e-4)
    taken = [over.since(begun) for begun, over in stamps]
    torchs, ours = (statistics.median(taken[at::2]) for at in (0, 1))
    return ours / torchs


def views(params: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return flat tensors, and where each begins in the row of all."""
    starts = accumulate((p.numel() for p in params), initial=0)
    return list(zip(params, starts, strict=False))


def pack(part: DeltaShard, params: Sequence[torch.Tensor], *, keeps: bool) -> None:
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

    part.encode(CODEC, split(part.shown.numel(), SPANS, EVEN), gather, keeps=keeps)
    part.checks()


def take(part: DeltaShard, mean: torch.Tensor) -> None:
    """Launch what takes a mean in that lies on the device, once it was packed."""
    for start, stop, fields in part.sent():
        part.deliver(start, stop, mean[: stop - start], fields)
    part.finish()
