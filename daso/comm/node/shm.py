"""Node transport for CPU ranks: gradients are averaged in place, in shared memory.

Each rank's buffer is its own segment of an MPI shared window. When all buffers are filled, rank i
adds part i of every buffer, in rank order, and writes the mean into part i of every buffer.
Nothing is copied in or out, and the bits are those of a sequential sum. Ranks announce their
progress by counters in shared memory that only grow.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from daso import trace
from daso.comm.control import gather_in_node
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.mpi import load
from daso.comm.node.base import Span
from daso.comm.reduction import accumulator
from daso.comm.step_timer import wait_until
from daso.errors import TopologyError
from daso.kernels.choice import kernels_for

if TYPE_CHECKING:
    from mpi4py import MPI

    from daso.comm.topology import Topology

ALIGN = 64  # bytes: a cache line
SHM_DIRECTORY = "/dev/shm"

Counters = np.ndarray[tuple[int], np.dtype[np.int64]]
COUNTERS_PER_RANK = ALIGN // 8  # int64, one cache line


class SharedWindow:
    """Shared memory of a node: one segment for each rank.

    Tensors made from it must not be used after `free`.

    Args:
        node: Communicator of the node.
        nbytes: Size of this rank's segment; may differ between ranks.

    Collective over the node; blocking.
    """

    def __init__(self, node: "MPI.Comm", nbytes: int) -> None:
        mpi = load()
        self._window: MPI.Win | None = None
        self.segments: list[torch.Tensor] = []
        if node.Get_size() == 1:
            # mmap, not MPI, so that a single rank's memory starts at a page and can be pinned.
            self.segments = [torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)]
            return
        self._check_room(node, max(nbytes, ALIGN))
        try:
            self._window = mpi.Win.Allocate_shared(max(nbytes, ALIGN), 1, comm=node)
        except mpi.Exception as error:
            raise _too_small(nbytes, f"MPI allocated none: {error}") from error
        self._map(node, nbytes)

    def _map(self, node: "MPI.Comm", nbytes: int) -> None:
        """Map all segments as tensors; free the window if that fails on any rank.

        Collective over the node; blocking.
        """
        assert self._window is not None
        # MPI_Win_sync, the memory barrier used below, is legal only inside an access epoch.
        self._window.Lock_all()
        error: Exception | None = None
        try:
            self.segments = [self._segment(rank) for rank in range(node.Get_size())]
            self.segments[node.Get_rank()].zero_()
        except Exception as caught:
            error = caught
        if not node.allreduce(int(error is not None)):  # also a barrier after zeroing
            return
        self.free()
        raise error or _too_small(nbytes, "another rank of the node could not map it")

    def _check_room(self, node: "MPI.Comm", nbytes: int) -> None:
        """Raise if the segments do not fit: writing to a window that is too large ends the process.

        Collective over the node; blocking.
        """
        needed, available = node.allreduce(nbytes), node.bcast(free_bytes())
        if available is not None and needed > available:
            raise _too_small(nbytes, f"{needed} in all are more than the {available} that are free")

    def _segment(self, rank: int) -> torch.Tensor:
        assert self._window is not None
        memory, _ = self._window.Shared_query(rank)
        return torch.from_numpy(np.asarray(memory).view(np.uint8))

    def sync(self) -> None:
        """Make this rank's writes visible and its later reads current. Does not block."""
        assert self.segments, "used after free"
        if self._window is not None:
            self._window.Sync()

    def free(self) -> None:
        """Free the memory. Collective over the node; blocking; idempotent."""
        self.segments = []
        if self._window is None:
            return
        self._window.Unlock_all()
        self._window.Free()
        self._window = None


def free_bytes() -> int | None:
    """Return the bytes of shared memory that are free on this host, or None if unknown."""
    try:
        filesystem = os.statvfs(SHM_DIRECTORY)
    except OSError:
        return None
    return filesystem.f_bavail * filesystem.f_frsize


def _too_small(nbytes: int, why: str) -> TopologyError:
    return TopologyError(
        f"a node needs {nbytes} bytes of shared memory per rank, but {why}; enlarge "
        f"{SHM_DIRECTORY} (containers: --shm-size) or use fewer ranks per node",
        code="too-little-shared-memory",
    )


class ProgressCounters:
    """Progress of each rank of a node with one bucket or share: counters in shared memory."""

    def __init__(self, node: "ShmNode", window: SharedWindow, counters: "list[Counters]") -> None:
        self.node, self.window, self.counters = node, window, counters
        self.rank = node.rank

    def announce(self, stage: int, count: int) -> None:
        """Set this rank's counter of ``stage``, after its earlier writes."""
        self.window.sync()
        self.counters[self.rank][stage] = count

    def own(self, stage: int) -> int:
        """Return this rank's counter of ``stage``."""
        return int(self.counters[self.rank][stage])

    def reached(self, stage: int, count: int) -> bool:
        """Return whether all ranks have reached ``count``; if so, their writes are visible."""
        if any(row[stage] < count for row in self.counters):
            return False
        self.window.sync()
        return True

    def wait(self, stage: int, count: int) -> None:
        """Block until all ranks have reached ``count``."""
        if self.reached(stage, count):
            return
        self.node.waited_seconds += wait_until(
            lambda: self.reached(stage, count),
            lambda: self.missing(stage, count),
            self.node.timeout_seconds,
            self.node.late,
            self.node.recorded_as,
        )

    def missing(self, stage: int, count: int) -> str:
        """Name the ranks that have not reached ``count``."""
        late = [rank for rank, row in enumerate(self.counters) if row[stage] < count]
        ranks = ", ".join(str(self.node.world_ranks[rank]) for rank in late)
        return f"world rank {ranks} did not"


class ShmBucket:
    """A buffer of gradients in shared memory; see `daso.comm.node.base.NodeBucket`."""

    FILLED, PUBLISHED = 0, 1

    def __init__(self, progress: ProgressCounters, rows: Sequence[torch.Tensor]) -> None:
        self.progress = progress
        self.rows = list(rows)  # every local rank's row (numel)
        self.flat = self.rows[progress.rank]
        self.round = progress.own(self.FILLED)
        self.part: Span = (0, 0)
        self.device_ready: Arrived | None = None
        self.total = self.flat[:0]
        self._wide, self._kernels = accumulator(self.flat.dtype), kernels_for(self.flat.device)

    def mark_ready(
        self,
        parts: Sequence[Span],
        *,
        onward: bool = False,  # noqa: ARG002
        stay: bool = False,  # noqa: ARG002
    ) -> None:
        """Mark this rank's buffer as filled."""
        self.round += 1
        self.part = parts[self.progress.rank]
        self.progress.announce(self.FILLED, self.round)

    def filled(self) -> bool:
        """Return whether every rank of the node has started."""
        return self.progress.reached(self.FILLED, self.round)

    def wait_filled(self) -> None:
        """Block until every rank of the node has started."""
        self.progress.wait(self.FILLED, self.round)

    def reduce(self) -> torch.Tensor | None:
        """Return the sum of this rank's part over the node, added in rank order in fp32 or fp64."""
        if not self.filled():
            return None
        parts = [row[slice(*self.part)] for row in self.rows]
        self.total = self._sum_memory()
        if len(parts) > 1 or self.total.data_ptr() != parts[0].data_ptr():
            self._kernels.mean_rows(parts, total=self.total)
        return self.total

    def _sum_memory(self) -> torch.Tensor:
        """Return memory for the sum: in place, unless that would overwrite a term."""
        own = self.flat[slice(*self.part)]
        wide = self._wide
        if wide == own.dtype and (self.progress.rank == 0 or len(self.rows) == 2):
            return own
        if self.total.dtype == wide and self.total.numel() == own.numel():
            return self.total
        return torch.empty_like(own, dtype=wide)

    def publish(self, divisor: int) -> None:
        """Write the divided sum into every rank's buffer."""
        parts = [row[slice(*self.part)] for row in self.rows]
        others = [part for part in parts if part.data_ptr() != self.total.data_ptr()]
        if others or divisor != 1:
            self._kernels.mean_rows([self.total], divisor, total=self.total, to=others)
        self.progress.announce(self.PUBLISHED, self.round)

    def missing(self) -> str:
        """Name the ranks of the node that have not started; an empty string if all have."""
        return "" if self.filled() else self.progress.missing(self.FILLED, self.round)

    def published(self) -> bool:
        """Return whether every part is published."""
        return self.progress.reached(self.PUBLISHED, self.round)

    def wait(self) -> None:
        """Block until every part is published."""
        self.progress.wait(self.PUBLISHED, self.round)


class ShmRow:
    """Gradient memory; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, progress: Sequence[ProgressCounters], rows: Sequence[torch.Tensor]) -> None:
        self._progress, self._rows = progress, rows  # per bucket; per local rank (numel)
        self.flat = rows[progress[0].rank]

    def cut(self, spans: Sequence[Span]) -> list[ShmBucket]:
        """Return one bucket for each span."""
        assert len(spans) <= len(self._progress), "at most the number of buckets of `ShmNode.row`"
        # .data: writing the mean must not change the gradients' version counters.
        return [
            ShmBucket(progress, [row[slice(*span)].data for row in self._rows])
            for progress, span in zip(self._progress, spans, strict=False)
        ]


class ShmShare:
    """Parts that all ranks of a node read in place; see `daso.comm.node.base.NodeShare`."""

    PUBLISHED, RELEASED = 0, 1

    def __init__(self, progress: ProgressCounters, parts: Sequence[torch.Tensor]) -> None:
        self.progress = progress
        self.parts = list(parts)
        rank = progress.rank
        self.own = self.parts[rank] if rank < len(self.parts) else self.parts[0][:0]
        self.round = 0

    def publish(self) -> None:
        """Mark this rank's part as written."""
        self.round += 1
        self.progress.announce(self.PUBLISHED, self.round)

    def wait(self) -> None:
        """Block until every part is published."""
        self.progress.wait(self.PUBLISHED, self.round)

    def release(self) -> None:
        """Mark all parts as read by this rank."""
        self.progress.announce(self.RELEASED, self.round)

    def wait_released(self) -> None:
        """Block until all ranks have read."""
        self.progress.wait(self.RELEASED, self.round)


def _nothing() -> None: ...


class ShmNode:
    """A node whose ranks average in shared memory; see `daso.comm.node.base.NodeTransport`.

    Args:
        topology: The ranks and their nodes.
        timeout_seconds: Maximum wait for a rank before an error names it.
        late: Called repeatedly once a wait takes long.

    Collective over the node; blocking.
    """

    def __init__(
        self, topology: "Topology", timeout_seconds: float, late: Callable[[], None] = _nothing
    ) -> None:
        self.late, self.name = late, "shared memory"
        self.copies: DeviceStaging | None = None
        self.reduces_on_device = False
        self.comm = topology.node_comm.Dup()
        self.rank = topology.local_rank
        self.world_ranks: list[int] = gather_in_node(topology, topology.rank, timeout_seconds)
        self.timeout_seconds = timeout_seconds
        self.waited_seconds = 0.0
        self.recorded_as: int | None = trace.WAIT_INTRA_NODE  # kind of waits in a trace
        self._windows: list[SharedWindow] = []

    @property
    def idle_seconds(self) -> float:
        """Seconds this rank was idle while it waited for other ranks of the node."""
        return self.waited_seconds

    def row(self, numel: int, dtype: torch.dtype, most: int) -> ShmRow:
        """Allocate gradient memory."""
        window = self._window(numel * dtype.itemsize)
        rows = [_typed(segment, 0, numel, dtype) for segment in window.segments]
        return ShmRow(self._progress(most), rows)

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> ShmShare:
        """Allocate a shared buffer; local rank i owns the i-th span."""
        sizes = [stop - start for start, stop in spans]
        own_size = sizes[self.rank] if self.rank < len(sizes) else 0
        window = self._window(own_size * dtype.itemsize)
        parts = [
            _typed(segment, 0, size, dtype)
            for segment, size in zip(window.segments, sizes, strict=False)
        ]
        return ShmShare(self._progress(1)[0], parts)

    def _window(self, nbytes: int) -> SharedWindow:
        window = SharedWindow(self.comm, nbytes)
        self._windows.append(window)
        return window

    def _progress(self, count: int) -> list[ProgressCounters]:
        window = self._window(count * ALIGN)
        counters = [segment.view(torch.int64).numpy() for segment in window.segments]
        return [
            ProgressCounters(self, window, [row[at : at + COUNTERS_PER_RANK] for row in counters])
            for at in range(0, count * COUNTERS_PER_RANK, COUNTERS_PER_RANK)
        ]

    def free(self) -> None:
        """Free the memory; tensors made from it must not be used afterwards."""
        for window in self._windows:
            window.free()
        self._windows = []
        if self.comm != load().COMM_NULL:
            self.comm.Free()

    def abandon(self) -> None:
        """Do nothing: no thread waits for other ranks."""


def _typed(segment: torch.Tensor, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``numel`` elements of a segment, starting at byte ``at``."""
    return segment[at : at + numel * dtype.itemsize].view(dtype)
