"""Base classes of all-reduces in rank order, and the pairwise exchange of two ranks."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from daso import trace
from daso.comm.allreduce.message_sums import MessageSums
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.mpi import load
from daso.comm.reduction import (
    CPU,
    BufferPool,
    Chunks,
    ReduceBuffer,
    Spans,
    WeightedMean,
    byte_buffer,
    device_buffer,
    whole,
)
from daso.kernels.codecs import Codec

if TYPE_CHECKING:
    from mpi4py import MPI

Requests = Generator["Sequence[MPI.Request] | Arrived", None, int]
Waits = Generator["Sequence[MPI.Request] | Arrived", None, None]
Arrivals = Generator[Arrived, None, None]
Finish = Callable[[int], Waits]

SWAP, PROBE_TAG = 3, 4  # tags: whole chunks of two ranks; a tag that no message has
MESSAGES = 8  # approximate number of messages in flight per rank


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """Device on which buffers are reduced.

    Args:
        device: A CUDA device, or an emulated one.
        copies: Copies to and from the host, and the stream for reductions.
        staged: MPI sends host copies (`ReduceBuffer.outgoing`); otherwise device memory.
    """

    device: torch.device
    copies: DeviceStaging
    staged: bool = False


def window(peers: int) -> int:
    """Return the number of chunks in flight between a number of ranks."""
    return max(2, MESSAGES // peers)


def in_window(
    chunks: Sequence[Spans],
    window: int,
    test: "Callable[[list[MPI.Request]], object]",
    start: Callable[[int], "list[MPI.Request]"],
    finish: Finish,
) -> Waits:
    """Start the chunks of a buffer, and finish them in order, with a window of them in flight.

    Args:
        chunks: Of the buffer.
        window: Number of chunks in flight.
        test: `MPI.Request.Testall`.
        start: Starts the messages of a chunk.
        finish: Called for each chunk in order, once its messages have arrived.
    """
    count = len(chunks)
    in_flight: deque[tuple[float, list[MPI.Request]]] = deque()
    for index in range(count + window):
        if index >= window and in_flight:
            start_seconds, requests = in_flight.popleft()
            yield requests
            trace.record(trace.MESSAGES, start_seconds, key=index - window)
            yield from finish(index - window)
        if index < count:
            in_flight.append((time.perf_counter(), start(index)))
            # MPI sends messages of this size only when it is called again.
            test(in_flight[0][1])


def peer_order(local: int, size: int) -> list[int]:
    """Return the other ranks of a group in the order in which rank ``local`` sends to them.

    Each rank starts with its successor, so that ranks do not all send to the same peer at a time.
    """
    return [(local + distance) % size for distance in range(1, size)]


def make_weighted_mean(
    codec: Codec,
    weights: Sequence[int],
    total: int,
    rounded: dict[int, torch.Tensor],
    where: DeviceContext | None,
    *,
    of_gradients: bool,
) -> WeightedMean:
    """Return a `WeightedMean` on the device of the buffers."""
    device = CPU if where is None else where.device
    return WeightedMean(codec, weights, total, rounded, device, of_gradients=of_gradients)


class ExchangeMemory:
    """Reusable memory of an all-reduce: to reduce in, and for MPI to read and write.

    Args:
        codec: Wire format.
        chunks: Number of chunks in flight.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        poll: Lets MPI progress during waits for the device.
    """

    def __init__(
        self, codec: Codec, chunks: int, where: DeviceContext | None, poll: Callable[[], object]
    ) -> None:
        self.codec, self.where, self._poll = codec, where, poll
        self._copies: DeviceStaging | None = None if where is None else where.copies
        self._staged = where is not None and where.staged
        self.mpi_is_on_host = where is None or where.staged
        self.buffer = byte_buffer if self.mpi_is_on_host else device_buffer
        self.device = CPU if where is None else where.device
        self.local_buffers = BufferPool(chunks, self.device)
        # Memory that MPI reads and writes: the same, or pinned host memory.
        self.mpi_buffers = self.local_buffers
        if where is not None and where.staged:
            self.mpi_buffers = BufferPool(chunks, CPU, where.copies.host_memory)

    def _outgoing(self, source: ReduceBuffer, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the payloads of spans in memory that MPI can read."""
        return source.outgoing(spans) if self._staged else source.payloads(spans)

    def _copy_in(self, arrived: torch.Tensor, target: torch.Tensor) -> Arrivals:
        """Copy a received payload to the device, if it was received on the host."""
        if self._staged and self._copies is not None:
            yield self._polled(self._copies.to_device(arrived, target))

    def _copy_out(self, source: torch.Tensor, leaving: torch.Tensor) -> Arrivals:
        """Copy a computed payload to the host, if MPI sends from there."""
        if self._staged and self._copies is not None:
            with self._copies.side_stream():
                over = self._copies.to_host(source, leaving)
            yield self._polled(over)

    def _polled(self, over: Arrived) -> Arrived:
        """Return ``over``, with MPI progress for the messages of other chunks at each call."""
        return lambda: bool(self._poll()) or over()

    def _side_stream(self) -> AbstractContextManager[None]:
        """Launch kernels on a stream that overlaps with training."""
        return nullcontext() if self._copies is None else self._copies.side_stream()

    def _allocate(self, count: int, rows: Callable[[int], object]) -> Arrivals:
        """Allocate receive memory on the device; wait for kernels that still use that memory."""
        if self._copies is not None:
            with self._copies.side_stream():
                for index in range(min(count, self.local_buffers.window)):
                    rows(index)
            yield from self._wait_computed()

    def _wait_computed(self) -> Arrivals:
        """Wait for kernels, before MPI reads their results or overwrites their inputs."""
        if self._copies is not None:
            with self._copies.side_stream():
                over = self._copies.completion()
            yield self._polled(over)


class OrderedAllReduce(ExchangeMemory):
    """Base of all-reduces over one level of ranks, added in rank order.

    Must not run twice at the same time: a concurrent exchange needs its own object.

    Args:
        comm: Communicator of the engine.
        codec: Wire format.
        weights: Weight of each rank's buffer, in rank order.
        total: Divisor of the sum.
        rounded: Rounding errors of the parts that this rank reduces, by start of the part.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        of_gradients: As in `WeightedMean`.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        where: DeviceContext | None,
        *,
        of_gradients: bool = False,
    ) -> None:
        super().__init__(codec, window(len(weights)), where, lambda: comm.Iprobe(tag=PROBE_TAG))
        self.comm, self.test = comm, load().Request.Testall
        self._sums: MessageSums | None = None
        self.adder = make_weighted_mean(
            codec, weights, total, rounded, where, of_gradients=of_gradients
        )

    def count_messages(self, sums: MessageSums) -> None:
        """Count the payloads that another rank adds, if MPI reads host memory."""
        self._sums = sums if self.mpi_is_on_host else None


class PairwiseExchange(OrderedAllReduce):
    """All-reduce of two ranks: each sends its whole buffer and adds both.

    Sends as many bytes as reduce-scatter and all-gather, in one phase: the mean is not rounded a
    second time, and is computed where it is delivered.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Replace a buffer by the mean; as `ReduceScatterAllGather.run`."""
        spans = [whole(parts) for parts in chunks]
        rank, nbytes = self.comm.Get_rank(), 0

        def start(index: int) -> "list[MPI.Request]":
            nonlocal nbytes
            (sent,) = self._outgoing(source, [spans[index]])
            nbytes += sent.nbytes
            other = self.buffer(self._received(self.mpi_buffers, index, sent.nbytes))
            receive = self.comm.Irecv(other, 1 - rank, SWAP)
            return [receive, self.comm.Isend(self.buffer(sent), 1 - rank, SWAP)]

        def finish(index: int) -> Waits:
            (sent,) = source.payloads([spans[index]])
            other = self._received(self.local_buffers, index, sent.nbytes)
            yield from self._copy_in(self._received(self.mpi_buffers, index, sent.nbytes), other)
            versions = [sent, other] if rank == 0 else [other, sent]
            with self._side_stream():
                source.deliver(*spans[index], self.adder.mean(versions), sent)
            yield from self._wait_computed()

        yield from self._allocate(
            len(spans),
            lambda index: self._received(
                self.local_buffers, index, self.codec.nbytes(spans[index][1] - spans[index][0])
            ),
        )
        yield from in_window(chunks, self.local_buffers.window, self.test, start, finish)
        return nbytes

    def _received(self, rows: BufferPool, index: int, nbytes: int) -> torch.Tensor:
        """Return memory for the other rank's payload of a chunk."""
        return rows.row("other", index, nbytes, torch.uint8)
