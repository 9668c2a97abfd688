"""Node transport for ranks with one GPU each: NCCL on a separate stream, during backward.

A full bucket is summed in place. Within a node, later kernels wait for the sum on the device, and
the host does not wait. For an exchange between nodes, each lane's part is copied to the host,
exchanged, copied back, and broadcast to the node.

All ranks of a node must launch the same sums in the same order: buckets start in one order and are
published in one order. So this transport does not serve reducers that run in other threads.

NCCL sums 16-bit gradients in 16 bits, as with DDP; the exchange between nodes sums in fp32.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from daso import trace
from daso.comm.control import gather_in_node
from daso.comm.device.cuda import FIRST, CudaCopies
from daso.comm.device.nccl_library import start
from daso.comm.device.staging import Arrived
from daso.comm.node.base import Span
from daso.comm.reduction import accumulator
from daso.comm.step_timer import StepTimer, wait_until
from daso.kernels.rows import divide_

if TYPE_CHECKING:
    from daso.comm.topology import Topology

CLOSING_SECONDS = 10.0  # limit for the last sums in `NcclNode.free`
TYPES = {
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
}


class NcclBucket:
    """A buffer of gradients on a GPU; see `daso.comm.node.base.NodeBucket`."""

    def __init__(self, node: "NcclNode", flat: torch.Tensor) -> None:
        self.flat = flat
        self._node = node
        self._parts: Sequence[Span] = ()
        self._host_part: torch.Tensor | None = None  # this rank's part on the host
        self._onward = False  # the part is exchanged between nodes
        self._out: Arrived | None = None  # the copy to the host under way
        self._event: Any = None  # when the whole node has the result
        self._sum = flat  # this rank's sum if it stays on the device
        self.device_ready: Arrived | None = None

    def mark_ready(
        self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False
    ) -> None:
        """Launch the sum; copy this rank's part to the host if it goes onward and does not stay."""
        node = self._node
        if self._event is not None:  # of the previous round: raises if a rank is late
            node.wait_event(self._event)
        self._parts, self._event, self._out, self._onward = parts, None, None, onward
        self.device_ready = None
        with node.on_stream_in_order():
            node.all_reduce(self.flat)
            if not onward:
                return
            self._sum = self._own.to(accumulator(self.flat.dtype))
            if stay:
                self.device_ready = partial(self._is_summed, node.copies.completion())
            else:
                self._out = node.copies.to_host(self._sum, self._host_memory(self._sum))

    def _is_summed(self, summed: Arrived) -> bool:
        """Return whether the sum is finished; raise an asynchronous error of NCCL."""
        self._node.check()
        return summed()

    @property
    def _own(self) -> torch.Tensor:
        """This rank's part."""
        return self.flat[slice(*self._parts[self._node.rank])]

    def _host_memory(self, part: torch.Tensor) -> torch.Tensor:
        """Return host memory for this rank's part, reused in every round."""
        if self._host_part is None or self._host_part.numel() != part.numel():
            self._host_part = self._node.copies.host_memory(part.nbytes).view(part.dtype)
        return self._host_part

    def filled(self) -> bool:
        """Return whether an exchanged part is on the host; the device waits for the others."""
        self._node.check()
        return self._out is None or self._out()

    def wait_filled(self) -> None:
        """Block until an exchanged part is on the host."""
        self._node.wait(self.filled)

    def reduce(self) -> torch.Tensor | None:
        """Return the sum of this rank's part, on the host or the device; empty unless exchanged."""
        if not self.filled():
            return None
        if self.device_ready is not None:
            return self._sum
        return self._host_part if self._onward else self.flat[:0]

    def publish(self, divisor: int) -> None:
        """Divide the sum, or broadcast the exchanged parts to the node."""
        node = self._node
        with node.on_stream():
            if not self._onward:
                divide_(self.flat, divisor)
            else:
                assert divisor == 1, "an exchanged sum is already a mean"
                back = self._sum
                if self.device_ready is None:
                    assert self._host_part is not None, "the part was copied to the host"
                    back = self._host_part.to(self.flat.device, non_blocking=True)
                self._own.copy_(back)
                self._sum = self.flat  # frees the fp32 sum of 16-bit gradients
                node.broadcast_parts([self.flat[slice(*span)] for span in self._parts])
            self._event = node.event()

    def published(self) -> bool:
        """Return whether the result is ready for every kernel that is launched from now on."""
        if self._event is None:
            return False
        self._node.order_after(self._event)
        return True

    def missing(self) -> str:
        """Describe the missing sum; NCCL does not name the late rank."""
        return "" if self.filled() else _late_sum()

    def wait(self) -> None:
        """Order later kernels after the result. Does not block the host."""
        published = self.published()
        assert published, "publish() must precede wait(), on every rank"


class NcclRow:
    """Gradient memory; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, node: "NcclNode", flat: torch.Tensor) -> None:
        self.flat = flat
        self._node = node

    def cut(self, spans: Sequence[Span]) -> list[NcclBucket]:
        """Return one bucket for each span."""
        # .data: writing the mean must not change the gradients' version counters.
        return [NcclBucket(self._node, self.flat[slice(*span)].data) for span in spans]


class NcclShare:
    """Parts that every GPU of a node holds; see `daso.comm.node.base.NodeShare`."""

    def __init__(self, node: "NcclNode", parts: Sequence[torch.Tensor]) -> None:
        self.parts = list(parts)
        self.own = self.parts[node.rank] if node.rank < len(parts) else self.parts[0][:0]
        self._node = node

    def publish(self) -> None:
        """Do nothing: the device runs later kernels in order."""

    def wait(self) -> None:
        """Order later kernels after the broadcast of all parts. Does not block the host."""
        node = self._node
        with node.on_stream_in_order():
            node.broadcast_parts(self.parts)
            event = node.event()
        node.order_after(event)

    def release(self) -> None:
        """Do nothing: the kernels that write parts are launched after those that read them."""

    def wait_released(self) -> None:
        """Do nothing, as in `release`."""


class NcclNode:
    """A node whose ranks have one GPU each; see `daso.comm.node.base.NodeTransport`.

    Args:
        topology: The ranks and their nodes.
        device: This rank's GPU.
        timeout_seconds: Maximum wait for a sum.
        late: Called repeatedly once a wait takes long.
        nccl: cupy's NCCL.
        cuda: ``torch.cuda``, or a substitute for tests.

    Raises:
        RuntimeError: NCCL does not start.

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
        self.reduces_on_device = True
        self.waited_seconds = 0.0
        self._nccl, self._cuda, self._device = nccl, cuda, device
        self._timeout_seconds, self._late = timeout_seconds, late
        problem, parts = None, None
        try:
            copies = CudaCopies(device, cuda)
            parts = copies, cuda.Stream(device, priority=FIRST), StepTimer(copies.timestamp)
        except Exception as error:
            problem = str(error)
        reports = gather_in_node(topology, problem, timeout_seconds)
        problems = [report for report in reports if report is not None]
        if parts is None or problems:
            raise RuntimeError(problems[0])
        self.copies, self._stream, self._watch = parts
        self._comm = start(topology, nccl, lambda: cuda.device(device), timeout_seconds)

    def row(self, numel: int, dtype: torch.dtype, most: int) -> NcclRow:  # noqa: ARG002
        """Allocate gradient memory."""
        return NcclRow(self, torch.zeros(numel, dtype=dtype, device=self._device))

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NcclShare:
        """Allocate a shared buffer; every GPU holds all of it."""
        sizes = [stop - start for start, stop in spans]
        parts = [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        return NcclShare(self, parts)

    # --- on the stream -----------------------------------------------------------------------

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Launch on the stream of NCCL."""
        with self._cuda.device(self._device), self._cuda.stream(self._stream):
            yield

    @contextmanager
    def on_stream_in_order(self) -> Iterator[None]:
        """Launch on the stream of NCCL, after the kernels that this thread launched so far."""
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self.on_stream():
            yield

    def event(self) -> Any:
        """Return an event recorded on the stream of NCCL."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def order_after(self, event: Any) -> None:
        """Order the kernels that this thread launches from now on after an event."""
        self._cuda.current_stream(self._device).wait_event(event)

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Launch the sum of all ranks' buffers, in place. Collective over the node."""
        at, kind = flat.data_ptr(), getattr(self._nccl, TYPES[flat.dtype])
        stream = self._stream.cuda_stream
        self._comm.allReduce(at, at, flat.numel(), kind, self._nccl.NCCL_SUM, stream)

    def broadcast_parts(self, parts: Sequence[torch.Tensor]) -> None:
        """Launch the broadcast of part i from local rank i. Collective over the node."""
        self._nccl.groupStart()
        try:
            for root, part in enumerate(parts):
                if part.numel():
                    at, kind = part.data_ptr(), getattr(self._nccl, TYPES[part.dtype])
                    stream = self._stream.cuda_stream
                    self._comm.broadcast(at, at, part.numel(), kind, root, stream)
        finally:  # an open group would launch nothing
            self._nccl.groupEnd()

    # --- on the host -------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an asynchronous error of NCCL."""
        comm = self._comm  # another thread may set it to None
        if comm is not None:
            comm.check_async_error()

    def wait(self, arrived: Arrived) -> None:
        """Block until ``arrived()`` returns True."""
        if arrived():
            return
        with self._watch.waiting(trace.WAIT_INTRA_NODE):
            self.waited_seconds += wait_until(arrived, _late_sum, self._timeout_seconds, self._late)

    def wait_event(self, event: Any) -> None:
        """Block until the device has passed an event; not counted as a wait for other ranks."""
        wait_until(event.query, _late_sum, self._timeout_seconds, self._late)

    @property
    def idle_seconds(self) -> float:
        """Seconds of `waited_seconds` in which the GPU was idle."""
        return self._watch.idle_seconds(trace.WAIT_INTRA_NODE)

    def free(self) -> None:
        """Destroy the communicator, before MPI ends; idempotent."""
        if self._comm is None:
            return
        deadline = time.perf_counter() + CLOSING_SECONDS
        while not self._stream.query() and time.perf_counter() < deadline:
            time.sleep(1e-3)
        if self._stream.query():
            comm, self._comm = self._comm, None
            comm.destroy()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Abort pending sums, so that nothing waits for lost ranks; idempotent."""
        if self._comm is not None:
            comm, self._comm = self._comm, None
            comm.abort()


def _late_sum() -> str:
    return "a sum over NCCL did not end: a rank of the node is late"
