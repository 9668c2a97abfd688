"""Ranks that have a GPU each average over NCCL, on a stream of its own, while backward goes on.

A bucket that is full is added where it lies. Inside a node that is all: what is launched later
waits for the sum on the device, and the host for nothing. Where sums go on between nodes, each
lane's part is copied to the host, exchanged, copied back, and shown to the node.

All ranks of a node must launch the same sums in the same order. Buckets start in one order and are
delivered in one, on every rank; so gradients that other threads carry are not for this node.

The sum of 16-bit gradients is NCCL's, as with DDP; elsewhere it is taken in fp32.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from daso import trace
from daso.comm.device.cuda import FIRST, CudaCopies
from daso.comm.device.nccl_library import start
from daso.comm.device.staging import Arrived
from daso.comm.dtypes import accumulator
from daso.comm.node.base import Span, wait_until
from daso.comm.step_timer import StepTimer
from daso.kernels.rows import divide_

if TYPE_CHECKING:
    from daso.comm.topology import Topology

__all__ = ["NcclBucket", "NcclNode", "NcclRow", "NcclShare"]

CLOSING_SECONDS = 10.0  # that the last sums may take
TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
}


class NcclBucket:
    """A row of gradients on a GPU; see `daso.comm.node.base.NodeBucket`."""

    def __init__(self, node: "NcclNode", flat: torch.Tensor) -> None:
        self.flat = flat
        self._node = node
        self._parts: Sequence[Span] = ()
        self._room: torch.Tensor | None = None  # for this rank's part, on the host
        self._onward = False  # it goes there
        self._out: Arrived | None = None  # on its way there
        self._event: Any = None  # when the whole node has the result
        self._sum = flat  # where this rank's part of it is left on the device
        self.left: Arrived | None = None

    def start(self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False) -> None:
        """Add this rank's row to the others'; copy this rank's part to the host to go onward."""
        node = self._node
        if self._event is not None:  # of the round before: who is late is not waited for in vain
            node.keep_up(self._event)
        self._parts, self._event, self._out, self._onward = parts, None, None, onward
        self.left = None
        with node.in_turn():
            node.add(self.flat)
            if not onward:
                return
            self._sum = self._own.to(accumulator(self.flat.dtype))
            if stay:
                self.left = partial(self._is_made, node.copies.mark())
            else:
                self._out = node.copies.out(self._sum, self._host(self._sum))

    def _is_made(self, made: Arrived) -> bool:
        """Return whether the sum is made; raise what NCCL says went wrong."""
        self._node.check()
        return made()

    @property
    def _own(self) -> torch.Tensor:
        """The part that goes onward from this rank."""
        return self.flat[slice(*self._parts[self._node.rank])]

    def _host(self, part: torch.Tensor) -> torch.Tensor:
        """Return memory on the host, kept from round to round, for this rank's part."""
        if self._room is None or self._room.numel() != part.numel():
            self._room = self._node.copies.memory(part.nbytes).view(part.dtype)
        return self._room

    def filled(self) -> bool:
        """Return whether what goes onward is on the host; the device waits for the others."""
        self._node.check()
        return self._out is None or self._out()

    def wait_filled(self) -> None:
        """Block until what goes onward is on the host."""
        self._node.wait(self.filled)

    def add(self) -> torch.Tensor | None:
        """Return this rank's part if it goes onward, on the host or left; else nothing of it."""
        if not self.filled():
            return None
        if self.left is not None:
            return self._sum
        return self._room if self._onward else self.flat[:0]

    def deliver(self, divisor: int) -> None:
        """Divide the sum, or show what came back to the whole node."""
        node = self._node
        with node.beside():
            if not self._onward:
                divide_(self.flat, divisor)
            else:
                assert divisor == 1, "what goes onward comes back a mean"
                back = self._sum
                if self.left is None:
                    assert self._room is not None, "it went to the host"
                    back = self._room.to(self.flat.device, non_blocking=True)
                self._own.copy_(back)
                self._sum = self.flat  # of 16-bit gradients it was memory of its own
                node.show([self.flat[slice(*span)] for span in self._parts])
            self._event = node.event()

    def delivered(self) -> bool:
        """Return whether the result is there, or will be for whatever is launched from now on."""
        if self._event is None:
            return False
        self._node.follow(self._event)
        return True

    def missing(self) -> str:
        """Say what is missing; NCCL does not tell who."""
        return "" if self.filled() else "a sum over NCCL did not end: a rank of the node is late"

    def wait(self) -> None:
        """Let whatever is launched from now on wait for the result. Does not block the host."""
        there = self.delivered()
        assert there, "deliver comes first, on every rank alike"


class NcclRow:
    """Memory for gradients; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, node: "NcclNode", flat: torch.Tensor) -> None:
        self.flat = flat
        self._node = node

    def cut(self, spans: Sequence[Span]) -> list[NcclBucket]:
        """Return one bucket for each span of the row."""
        # .data: what is added here shall not look as if somebody had changed a gradient.
        return [NcclBucket(self._node, self.flat[slice(*span)].data) for span in spans]


class NcclShare:
    """Parts that every GPU of the node holds; see `daso.comm.node.base.NodeShare`."""

    def __init__(self, node: "NcclNode", parts: Sequence[torch.Tensor]) -> None:
        self.parts = list(parts)
        self.mine = self.parts[node.rank] if node.rank < len(parts) else self.parts[0][:0]
        self._node = node

    def publish(self) -> None:
        """Do nothing: what follows on the device is in turn."""

    def wait(self) -> None:
        """Let whatever is launched from now on wait for every part. Does not block the host."""
        node = self._node
        with node.in_turn():
            node.show(self.parts)
            event = node.event()
        node.follow(event)

    def release(self) -> None:
        """Do nothing: parts are written again by what is launched after those who read them."""

    def wait_released(self) -> None:
        """Do nothing, as in `release`."""


class NcclNode:
    """The GPUs of a node, one for each rank; see `daso.comm.node.base.NodeTransport`.

    Args:
        topology: Who is where.
        device: This rank's GPU.
        timeout_seconds: How long to wait for a sum that goes onward.
        late: Called once a wait takes long.
        nccl: cupy's NCCL.
        cuda: What launches on the device.

    Raises:
        RuntimeError: It does not start.

    Collective over the node; blocking.
    """

    def __init__(
        self,
        topology: "Topology",
        device: torch.device,
        timeout_seconds: float,
        late: Callable[[], None],
        *,
        nccl: Any,
        cuda: Any = torch.cuda,
    ) -> None:
        self.name, self.rank = f"NCCL, {device}", topology.local_rank
        self.sums_stay = True
        self.waited_seconds = 0.0
        self._nccl, self._cuda, self._device = nccl, cuda, device
        self._timeout_seconds, self._late = timeout_seconds, late
        problem, mine = None, None
        try:
            copies = CudaCopies(device, cuda)
            mine = copies, cuda.Stream(device, priority=FIRST), StepTimer(copies.stamp)
        except Exception as error:
            problem = str(error)
        problems = [one for one in topology.node_comm.allgather(problem) if one is not None]
        if mine is None or problems:
            raise RuntimeError(problems[0])
        self.copies, self._stream, self._watch = mine
        self._comm = start(topology.node_comm, nccl, lambda: cuda.device(device), timeout_seconds)

    def row(self, numel: int, dtype: torch.dtype, most: int) -> NcclRow:  # noqa: ARG002
        """Make a row for gradients."""
        return NcclRow(self, torch.zeros(numel, dtype=dtype, device=self._device))

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NcclShare:
        """Make a row that every GPU holds."""
        sizes = [stop - start for start, stop in spans]
        parts = [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        return NcclShare(self, parts)

    # --- on the stream -----------------------------------------------------------------------

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch on the stream of sums."""
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            yield

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Launch on the stream of sums, after what this thread launched so far."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self.beside():
            yield

    def event(self) -> Any:
        """Return an event behind what was launched on the stream of sums."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def follow(self, event: Any) -> None:
        """Let what this thread launches from now on come after an event."""
        self._cuda.current_stream(self._device).wait_event(event)

    def add(self, flat: torch.Tensor) -> None:
        """Launch the sum of all ranks' rows, in place. Collective over the node."""
        at, kind = flat.data_ptr(), getattr(self._nccl, TYPES[flat.dtype])
        stream = self._stream.cuda_stream
        self._comm.allReduce(at, at, flat.numel(), kind, self._nccl.NCCL_SUM, stream)

    def show(self, parts: Sequence[torch.Tensor]) -> None:
        """Launch what gives every rank part i of local rank i. Collective over the node."""
        self._nccl.groupStart()
        try:
            for root, part in enumerate(parts):
                if part.numel():
                    at, kind = part.data_ptr(), getattr(self._nccl, TYPES[part.dtype])
                    stream = self._stream.cuda_stream
                    self._comm.broadcast(at, at, part.numel(), kind, root, stream)
        finally:  # in an open group nothing is launched any more
            self._nccl.groupEnd()

    # --- on the host -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what NCCL says went wrong since, if anything."""
        comm = self._comm  # another thread may end it
        if comm is not None:
            comm.check_async_error()

    def wait(self, arrived: Arrived) -> None:
        """Block until something has arrived on the host."""
        if arrived():
            return
        with self._watch.waiting(trace.WAIT_INTRA_NODE):
            self.waited_seconds += wait_until(arrived, _late_sum, self._timeout_seconds, self._late)

    def keep_up(self, event: Any) -> None:
        """Block until the device is through with an event; this rank's own work counts too."""
        wait_until(event.query, _late_sum, self._timeout_seconds, self._late)

    @property
    def idle_seconds(self) -> float:
        """Seconds of these waits in which the GPU had nothing to do."""
        return self._watch.idle_seconds(trace.WAIT_INTRA_NODE)

    def free(self) -> None:
        """Destroy the communicator, before MPI ends; idempotent."""
        if self._comm is None:
            return
        patience = time.perf_counter() + CLOSING_SECONDS
        while not self._stream.query() and time.perf_counter() < patience:
            time.sleep(1e-3)
        if self._stream.query():
            comm, self._comm = self._comm, None
            comm.destroy()
        else:
            self.abandon()

    def abandon(self) -> None:
        """End what is under way, so that nothing waits for ranks that are gone; idempotent."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            comm.abort()


def _late_sum() -> str:
    return "a sum over NCCL did not end: a rank of the node is late"
