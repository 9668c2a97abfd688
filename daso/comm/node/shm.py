"""CPU ranks of a node average in shared memory: every rank adds its part of all rows in place.

Each rank's row lies in its own segment of an MPI shared window. When all rows are filled, rank i
adds part i of every row, in rank order, and writes the mean into part i of every row. Nothing is
copied in or out, and the bits are those of a sequential sum. Ranks tell each other where they are
by counters in shared memory that only grow.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.dtypes import accumulator
from daso.comm.mpi import load
from daso.comm.node.base import Span, wait_until
from daso.comm.shared_memory import ALIGN, SharedWindow
from daso.kernels.choice import kernels_for

if TYPE_CHECKING:
    from daso.comm.topology import Topology

__all__ = ["ShmBucket", "ShmNode", "ShmRow", "ShmShare"]

Stages = np.ndarray[tuple[int], np.dtype[np.int64]]
STAGES = ALIGN // 8  # one cache line of int64 counters for each rank


class Line:
    """How far each rank of a node is with one bucket or share: counters in shared memory."""

    def __init__(self, group: "ShmNode", window: SharedWindow, stages: "list[Stages]") -> None:
        self.group, self.window, self.stages = group, window, stages
        self.rank = group.rank

    def reach(self, stage: int, count: int) -> None:
        """Tell that this rank has reached ``count`` in ``stage``, and wrote what goes with it."""
        self.window.sync()
        self.stages[self.rank][stage] = count

    def at(self, stage: int) -> int:
        """Return how far this rank is."""
        return int(self.stages[self.rank][stage])

    def reached(self, stage: int, count: int) -> bool:
        """Return whether all ranks have reached ``count``; what they wrote is visible then."""
        if any(row[stage] < count for row in self.stages):
            return False
        self.window.sync()
        return True

    def wait(self, stage: int, count: int) -> None:
        """Block until all ranks have reached ``count``."""
        self.group.waited_seconds += wait_until(
            lambda: self.reached(stage, count),
            lambda: self.missing(stage, count),
            self.group.timeout_seconds,
            self.group.late,
            self.group.recorded_as,
        )

    def missing(self, stage: int, count: int) -> str:
        """Say which ranks have not reached ``count``."""
        late = [rank for rank, row in enumerate(self.stages) if row[stage] < count]
        ranks = ", ".join(str(self.group.world_ranks[rank]) for rank in late)
        return f"world rank {ranks} did not"


class ShmBucket:
    """A row of gradients in shared memory; see `daso.comm.node.base.NodeBucket`."""

    FILLED, DELIVERED = 0, 1

    def __init__(self, line: Line, rows: Sequence[torch.Tensor]) -> None:
        self.line = line
        self.rows = list(rows)  # every local rank's row (numel)
        self.flat = self.rows[line.rank]
        self.round = line.at(self.FILLED)
        self.part: Span = (0, 0)
        self.left: Arrived | None = None
        self.total = self.flat[:0]

    def start(self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False) -> None:  # noqa: ARG002
        """Say that this rank's row is filled."""
        self.round += 1
        self.part = parts[self.line.rank]
        self.line.reach(self.FILLED, self.round)

    def filled(self) -> bool:
        """Return whether every rank of the node has started."""
        return self.line.reached(self.FILLED, self.round)

    def wait_filled(self) -> None:
        """Block until every rank of the node has started."""
        self.line.wait(self.FILLED, self.round)

    def add(self) -> torch.Tensor | None:
        """Return the sum of this rank's part of all rows, added in rank order in fp32 or fp64."""
        if not self.filled():
            return None
        parts = [row[slice(*self.part)] for row in self.rows]
        self.total = self._room()
        if len(parts) > 1 or self.total.data_ptr() != parts[0].data_ptr():
            kernels_for(self.flat.device).mean_rows(parts, total=self.total)
        return self.total

    def _room(self) -> torch.Tensor:
        """Return where the sum may be written: in place, unless that would lose a term."""
        mine = self.flat[slice(*self.part)]
        wide = accumulator(mine.dtype)
        if wide == mine.dtype and (self.line.rank == 0 or len(self.rows) == 2):
            return mine
        if self.total.dtype == wide and self.total.numel() == mine.numel():
            return self.total
        return torch.empty_like(mine, dtype=wide)

    def deliver(self, divisor: int) -> None:
        """Write the part, divided, into every row."""
        parts = [row[slice(*self.part)] for row in self.rows]
        others = [part for part in parts if part.data_ptr() != self.total.data_ptr()]
        if others or divisor != 1:
            kernels_for(self.flat.device).mean_rows(
                [self.total], divisor, total=self.total, to=others
            )
        self.line.reach(self.DELIVERED, self.round)

    def missing(self) -> str:
        """Say which ranks of the node have not started; empty where all have."""
        return "" if self.filled() else self.line.missing(self.FILLED, self.round)

    def delivered(self) -> bool:
        """Return whether every part was delivered."""
        return self.line.reached(self.DELIVERED, self.round)

    def wait(self) -> None:
        """Block until every part was delivered."""
        self.line.wait(self.DELIVERED, self.round)


class ShmRow:
    """Memory for gradients; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, lines: Sequence[Line], rows: Sequence[torch.Tensor]) -> None:
        self._lines, self._rows = lines, rows  # for each bucket; every local rank's row (numel)
        self.flat = rows[lines[0].rank]

    def cut(self, spans: Sequence[Span]) -> list[ShmBucket]:
        """Return one bucket for each span of the row."""
        assert len(spans) <= len(self._lines), "no more buckets than were asked for"
        # .data: what is added here shall not look as if somebody had changed a gradient.
        return [
            ShmBucket(line, [row[slice(*span)].data for row in self._rows])
            for line, span in zip(self._lines, spans, strict=False)
        ]


class ShmShare:
    """Parts that all ranks of the node read in place; see `daso.comm.node.base.NodeShare`."""

    PUBLISHED, RELEASED = 0, 1

    def __init__(self, line: Line, parts: Sequence[torch.Tensor]) -> None:
        self.line = line
        self.parts = list(parts)
        rank = line.rank
        self.mine = self.parts[rank] if rank < len(self.parts) else self.parts[0][:0]
        self.round = 0

    def publish(self) -> None:
        """Say that this rank's part is written."""
        self.round += 1
        self.line.reach(self.PUBLISHED, self.round)

    def wait(self) -> None:
        """Block until every part is published."""
        self.line.wait(self.PUBLISHED, self.round)

    def release(self) -> None:
        """Say that this rank has read all parts."""
        self.line.reach(self.RELEASED, self.round)

    def wait_released(self) -> None:
        """Block until all ranks have read."""
        self.line.wait(self.RELEASED, self.round)


def _nothing() -> None: ...


class ShmNode:
    """The ranks of a node in shared memory; see `daso.comm.node.base.NodeTransport`.

    Args:
        topology: Who is where.
        timeout_seconds: How long to wait for a rank before naming it in an error.
        late: Called once a wait takes long.

    Collective over the node; blocking.
    """

    def __init__(
        self, topology: "Topology", timeout_seconds: float, late: Callable[[], None] = _nothing
    ) -> None:
        self.late, self.name = late, "shared memory"
        self.copies: DeviceStaging | None = None
        self.sums_stay = False
        self.comm = topology.node_comm.Dup()
        self.rank = topology.local_rank
        self.world_ranks: list[int] = topology.node_comm.allgather(topology.rank)
        self.timeout_seconds = timeout_seconds
        self.waited_seconds = 0.0
        self.recorded_as: int | None = trace.WAIT_INTRA_NODE  # of waits
        self._windows: list[SharedWindow] = []

    @property
    def idle_seconds(self) -> float:
        """Seconds this rank stood still for others of the node."""
        return self.waited_seconds

    def row(self, numel: int, dtype: torch.dtype, most: int) -> ShmRow:
        """Make a row for gradients."""
        window = self._window(numel * dtype.itemsize)
        rows = [_typed(segment, 0, numel, dtype) for segment in window.segments]
        return ShmRow(self._lines(most), rows)

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> ShmShare:
        """Make a shared row; local rank i owns the i-th span."""
        sizes = [stop - start for start, stop in spans]
        mine = sizes[self.rank] if self.rank < len(sizes) else 0
        window = self._window(mine * dtype.itemsize)
        parts = [
            _typed(segment, 0, size, dtype)
            for segment, size in zip(window.segments, sizes, strict=False)
        ]
        return ShmShare(self._lines(1)[0], parts)

    def _window(self, nbytes: int) -> SharedWindow:
        window = SharedWindow(self.comm, nbytes)
        self._windows.append(window)
        return window

    def _lines(self, count: int) -> list[Line]:
        window = self._window(count * ALIGN)
        stages = [segment.view(torch.int64).numpy() for segment in window.segments]
        return [
            Line(self, window, [row[at : at + STAGES] for row in stages])
            for at in range(0, count * STAGES, STAGES)
        ]

    def free(self) -> None:
        """Give the memory back; tensors made from it must not be used afterwards."""
        for window in self._windows:
            window.free()
        self._windows = []
        if self.comm != load().COMM_NULL:
            self.comm.Free()

    def abandon(self) -> None:
        """Do nothing: nobody waits in a thread."""


def _typed(segment: torch.Tensor, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``numel`` elements of a segment, from byte ``at`` on."""
    return segment[at : at + numel * dtype.itemsize].view(dtype)
