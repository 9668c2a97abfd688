"""What an exchange does to a row on a device, in one pass over memory instead of torch's several.

Numbers are gathered, the reference is taken from them, a residual added, the result rounded for the
wire and looked at for NaN while they are read once: 10 bytes of memory for each number on a bf16
wire, where torch's operations take 38. A mean is taken in with 18 bytes for torch's 46. Which is
faster, `daso.train.deltas.kernel_choice` tries on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

from daso.comm.compression import EVEN, Cast, Codec
from daso.plan.layout import Piece, Span, blocks

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["Fused", "Table"]

Spans = Sequence[tuple[int, int]]
Views = Callable[[], Sequence[tuple[torch.Tensor, int]]]
NOWHERE = 1 << 62  # a place behind all others
WIDTH = 16  # bytes that a thread of a device reads and writes at once


@dataclass(frozen=True, slots=True)
class Table:
    """What one launch packs."""

    number: torch.dtype
    aligned: bool
    jobs: torch.Tensor  # (jobs, 4), on the device; see `daso.comm.device.triton_kernels.pack`


class Fused:
    """Packs a row and takes its mean in, by kernels of our own.

    Args:
        kernels: `daso.comm.device.triton_kernels`.
        views: Returns flat views of the parameters of the row, fp32 or 16-bit, and where each
            begins in it; in order and without a gap.
    """

    def __init__(self, kernels: "ModuleType", views: Views) -> None:
        self._kernels, self._views = kernels, views
        self._known: dict[tuple[object, ...], list[Table]] = {}
        self._addresses: tuple[int, ...] = ()

    def handles(self, codec: Codec) -> TypeGuard[Cast]:
        """Return whether there are kernels for a wire."""
        return isinstance(codec, Cast) and codec.dtype in self._kernels.WIRES

    def pack(
        self,
        codec: Cast,
        spans: Spans,
        memory: torch.Tensor,
        reference: torch.Tensor,
        residual: torch.Tensor | None,
        lost: torch.Tensor | None,
    ) -> torch.Tensor:
        """Write parameters - reference + residual for the wire."""
        first = torch.full((), NOWHERE, dtype=torch.int64, device=reference.device)
        wire = memory.view(codec.dtype)
        for table in self._tables(codec, spans, reference.device):
            self._kernels.pack(
                *(table.jobs, table.number, wire, reference, residual, lost, first),
                aligned=table.aligned,
            )
        return torch.where(first < NOWHERE, first, -1)

    def take(
        self,
        mean: torch.Tensor,
        sent: torch.Tensor,
        reference: torch.Tensor,
        residual: torch.Tensor | None,
        shown: torch.Tensor | None,
    ) -> torch.Tensor:
        """Move the reference, and write mean - sent + residual; see `triton_kernels.take`."""
        sums: torch.Tensor = self._kernels.take(mean, sent, reference, residual, shown)
        return sums

    def _tables(self, codec: Cast, spans: Spans, device: torch.device) -> list[Table]:
        """Return what to launch; made when it is first asked for, and where parameters moved."""
        views = self._views()
        addresses = tuple(view.data_ptr() for view, _ in views)
        if addresses != self._addresses:
            self._known, self._addresses = {}, addresses
        key = (codec.dtype, *spans)
        if key not in self._known:
            self._known[key] = list(self._make(codec, spans, views, device))
        return self._known[key]

    def _make(
        self,
        codec: Cast,
        spans: Spans,
        views: Sequence[tuple[torch.Tensor, int]],
        device: torch.device,
    ) -> Iterator[Table]:
        starts, there = [], 0
        for start, stop in spans:
            starts.append((Span(start, stop), there // codec.dtype.itemsize))
            there += codec.nbytes(stop - start)
        tensors = [
            Piece(slot, Span(0, view.numel()), Span(at, at + view.numel()))
            for slot, (view, at) in enumerate(views)
        ]
        runs: dict[torch.dtype, list[tuple[int, int, int, int]]] = {}
        for slot, inside, at, place, numel in blocks(tensors, starts):
            view = views[slot][0]
            address = view.data_ptr() + inside * view.element_size()
            runs.setdefault(view.dtype, []).append((address, at, place, numel))
        for number, found in runs.items():
            jobs = _cut(torch.tensor(found, device="cpu"), number.itemsize, self._kernels.BLOCK)
            even = (jobs % torch.tensor([WIDTH, EVEN, EVEN, EVEN], device="cpu") == 0).all(1)
            for aligned in (True, False):
                if some := int((even == aligned).sum()):
                    mine = torch.empty(
                        some, 4, dtype=jobs.dtype, device="cpu", pin_memory=device.type == "cuda"
                    )
                    mine.copy_(jobs[even == aligned])
                    yield Table(number, aligned, mine.to(device, non_blocking=True))


def _cut(runs: torch.Tensor, itemsize: int, most: int) -> torch.Tensor:
    """Cut runs of numbers into jobs."""
    metrics = (runs[:, 3] + most - 1) // most
    jobs = runs.repeat_interleave(metrics, 0)
    firsts = (metrics.cumsum(0) - metrics).repeat_interleave(metrics)
    past = (torch.arange(len(jobs), device="cpu") - firsts) * most  # in its run
    jobs += past.unsqueeze(1) * torch.tensor([itemsize, 1, 1, -1], device="cpu")
    jobs[:, 3].clamp_(max=most)
    return jobs
