"""The mean of a flat row over the ranks of one communicator, as work for the engine.

Two ways. `iallreduce` leaves the sum to MPI. `deterministic_allreduce` adds in rank order in fp32
(fp64 for fp64 rows): bit for bit the sequential sum of what the wire carried, and the only way for
a wire that MPI cannot add. Two ranks send each other the whole row (`PairwiseExchange`); more send
each peer its part of the row, add the parts, and send the means back (`ReduceScatterAllGather`).
Wires that round number by number give the same bits for any chunking. All work chunk by chunk, and
a few chunks are on their way at a time, so that the link is busy while one is added.

A row is read and written through a `ReduceBuffer` (`daso.comm.reduction`), which has encoded it
when the exchange starts.

Where MPI takes the memory of a device, what crosses is added there (`OnDevice`): beside training,
and nothing crosses before what makes it is over.
"""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from daso import trace
from daso.comm.compression import PIECE, Cast, Codec, pieces
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.dtypes import accumulator, byte_buffer, device_buffer, sum_buffer
from daso.comm.mpi import load
from daso.comm.reduction import (
    CPU,
    BufferPool,
    Chunks,
    ReduceBuffer,
    WeightedMean,
    add_and_deliver,
    deliver,
    whole,
)

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "DeterministicAllReduce",
    "OnDevice",
    "PairwiseExchange",
    "ReduceScatterAllGather",
    "deterministic_allreduce",
    "iallreduce",
]

Requests = Generator["Sequence[MPI.Request] | Arrived", None, int]
Waits = Generator["Sequence[MPI.Request] | Arrived", None, None]
Finish = Callable[[int], Waits]

SCATTER, RETURN, SWAP = 1, 2, 3  # tags: the two phases; whole chunks
NOTHING = 4  # a tag that no message has
MESSAGES = 8  # under way to and from a rank, about


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where rows are added that MPI sends from a device.

    Args:
        device: Which.
        copies: Lets launches run beside training, and tells when they are over.
        piece: Numbers that are added at a time, a multiple of `PIECE`.
    """

    device: torch.device
    copies: DeviceStaging
    piece: int


def window(peers: int) -> int:
    """Return how many chunks are under way at a time, between so many ranks."""
    return max(2, MESSAGES // peers)


def _in_window(
    count: int, window: int, start: Callable[[int], "list[MPI.Request]"], finish: Finish
) -> Waits:
    """Start chunks 0 to count - 1, and finish each in order with a window of them under way."""
    crossing: deque[tuple[float, list[MPI.Request]]] = deque()
    for index in range(count + window):
        if index >= window and crossing:
            begun, requests = crossing.popleft()
            yield requests
            trace.record(trace.MESSAGES, begun, key=index - window)
            yield from finish(index - window)
        if index < count:
            crossing.append((time.perf_counter(), start(index)))
            # Messages of the size of ours do not leave before the library is called again.
            load().Request.Testall(crossing[0][1])


def iallreduce(
    comm: "MPI.Comm",
    source: ReduceBuffer,
    chunks: Chunks,
    weight: int,
    total: int,
    kept: BufferPool | None = None,
) -> Requests:
    """Take the weighted mean of a row by MPI's own sum.

    Args:
        comm: Communicator of the engine.
        source: The row, fp32 or fp64.
        chunks: From `plan.layout.chunk_parts`.
        weight: Weight of this rank's row.
        total: Sum of all ranks' weights.
        kept: Memory from exchange to exchange.

    Returns:
        Bytes sent by this rank. MPI hides its algorithm; this is a ring's 2 (P-1)/P of the row.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    peers, spans = comm.Get_size(), [whole(parts) for parts in chunks]
    codec, rooms = Cast(source.dtype, source.dtype), kept or BufferPool(window(peers))
    crossing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(index: int) -> "list[MPI.Request]":
        first, last = spans[index]
        (payload,) = source.payloads(codec, [spans[index]])
        sums = rooms.row("sums", index, last - first, source.dtype)
        torch.mul(payload.view(source.dtype), weight, out=sums)
        crossing[index] = sums, payload
        return [comm.Iallreduce(load().IN_PLACE, sum_buffer(sums))]

    def finish(index: int) -> Waits:
        first, last = spans[index]
        sums, payload = crossing.pop(index)
        for a, b in pieces(last - first):
            fields = codec.fields(payload, last - first, a, b)
            source.deliver(first + a, first + b, sums[a:b].div_(total), fields)
        yield from ()

    yield from _in_window(len(chunks), rooms.window, start, finish)
    numel = spans[-1][1] - spans[0][0] if spans else 0
    return 2 * (peers - 1) * numel * source.dtype.itemsize // peers


def deterministic_allreduce(
    comm: "MPI.Comm",
    codec: Codec,
    weights: Sequence[int],
    total: int,
    rounded: dict[int, torch.Tensor] | None = None,
    where: OnDevice | None = None,
    *,
    of_gradients: bool = False,
) -> "DeterministicAllReduce":
    """Return the way to take means in rank order over so many ranks.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part; kept by the caller.
        where: Rows lie there and MPI takes its memory; None: on the host.
        of_gradients: What owners rounded away waits as `encode_gradients` says.
    """
    if len(weights) == 2:
        return PairwiseExchange(comm, codec, weights, total, {}, where)
    kept = {} if rounded is None else rounded
    return ReduceScatterAllGather(
        comm, codec, weights, total, kept, where, of_gradients=of_gradients
    )


class _InRankOrder:
    """What both ways have: where they add, in memory that is kept, and when that is over.

    Not to be run twice at the same time: what crosses beside it takes one of its own.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part.
        where: As in `deterministic_allreduce`.
        of_gradients: As there.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        where: OnDevice | None,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.comm, self.codec = comm, codec
        self._copies = None if where is None else where.copies
        self._buffer = byte_buffer if where is None else device_buffer
        device, piece = (CPU, PIECE) if where is None else (where.device, where.piece)
        self.adder = WeightedMean(
            codec, weights, total, rounded, device, piece, of_gradients=of_gradients
        )
        self.kept = BufferPool(window(len(weights)), device)

    def _beside(self) -> AbstractContextManager[None]:
        """Let what is computed meanwhile run beside training."""
        return nullcontext() if self._copies is None else self._copies.beside()

    def _made(self, count: int, rows: Callable[[int], object]) -> Waits:
        """Make what MPI will write on a device, and wait until whoever had that memory is done.

        Args:
            count: Of chunks.
            rows: Makes those of one chunk.
        """
        if self._copies is not None:
            with self._copies.beside():
                for index in range(min(count, self.kept.window)):
                    rows(index)
            yield from self._computed()

    def _computed(self) -> Waits:
        """Wait until that is over: MPI and others may take what it made, and write what it read."""
        if self._copies is not None:
            with self._copies.beside():
                over = self._copies.mark()
            # Other chunks' messages move only while MPI is asked for something.
            yield lambda: self.comm.Iprobe(tag=NOTHING) or over()


class PairwiseExchange(_InRankOrder):
    """Two ranks send each other the whole row, and each adds both; buffers are kept.

    As many bytes as in two phases, in one: the mean is not rounded for the wire once more, and is
    added where it is delivered.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Take the mean of a row; as `ReduceScatterAllGather.run`."""
        spans = [whole(parts) for parts in chunks]

        rank = self.comm.Get_rank()

        def finish(index: int) -> Waits:
            (sent,) = source.payloads(self.codec, [spans[index]])
            other = self._other(spans[index], index)
            versions = [sent, other] if rank == 0 else [other, sent]
            with self._beside():
                add_and_deliver(self.adder, versions, source, spans[index], sent)
            yield from self._computed()

        yield from self._made(len(spans), lambda at: self._other(spans[at], at))
        yield from _in_window(
            len(spans), self.kept.window, lambda at: self._swap(source, spans[at], at), finish
        )
        return sum(self.codec.nbytes(stop - start) for start, stop in spans)

    def _other(self, span: tuple[int, int], index: int) -> torch.Tensor:
        """Return where the other rank's version of a chunk arrives."""
        return self.kept.row("other", index, self.codec.nbytes(span[1] - span[0]), torch.uint8)

    def _swap(self, source: ReduceBuffer, span: tuple[int, int], index: int) -> "list[MPI.Request]":
        """Start sending a chunk to the other rank."""
        (sent,), peer = source.payloads(self.codec, [span]), 1 - self.comm.Get_rank()
        receive = self.comm.Irecv(self._buffer(self._other(span, index)), peer, SWAP)
        return [receive, self.comm.Isend(self._buffer(sent), peer, SWAP)]


class ReduceScatterAllGather(_InRankOrder):
    """Send each peer its part, add in rank order, send the means back; buffers are kept.

    Peer to peer, because MPICH 5.0 moves 16 KiB of an Ialltoallv per `Test`: 9 MB between two ranks
    of one machine took 99 ms under the polling engine, and 0.6 ms as two messages.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Take the mean of a row.

        Args:
            source: The row.
            chunks: From `plan.layout.chunk_parts` with one part per rank; the same on every rank.

        Returns:
            Bytes sent by this rank to other ranks.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        returning: deque[tuple[int, list[MPI.Request]]] = deque()

        def take_back() -> Waits:
            index, requests = returning.popleft()
            yield requests
            with self._beside():
                self._deliver(source, chunks[index], index)
            yield from self._computed()

        def finish(index: int) -> Waits:
            with self._beside():
                self._add(source, chunks[index], index)
            yield from self._computed()
            returning.append((index, self._return(chunks[index], index)))
            if len(returning) == self.kept.window:
                yield from take_back()

        yield from self._made(
            len(chunks), lambda at: (self._received(chunks[at], at), self._returned(chunks[at], at))
        )
        yield from _in_window(
            len(chunks),
            self.kept.window,
            lambda index: self._scatter(source, chunks[index], index),
            finish,
        )
        while returning:
            yield from take_back()
        return sum(map(self._sent_bytes, chunks))

    def _sent_bytes(self, parts: Sequence[tuple[int, int]]) -> int:
        sizes = self._sizes(parts)
        mine = sizes[self.comm.Get_rank()]
        return sum(sizes) - mine + mine * (len(parts) - 1)

    def _sizes(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return [self.codec.nbytes(stop - start) for start, stop in parts]

    def _swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], tag: int
    ) -> "list[MPI.Request]":
        """Start sending one buffer to each peer and receiving one from each."""
        rank, size = self.comm.Get_rank(), len(outgoing)
        # Each begins with the rank after it: in the same order all would send to one at a time.
        peers = [(rank + turn) % size for turn in range(1, size)]
        receives = [self.comm.Irecv(self._buffer(incoming[peer]), peer, tag) for peer in peers]
        return receives + [self.comm.Isend(self._buffer(outgoing[p]), p, tag) for p in peers]

    def _scatter(
        self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Start sending each peer its part of a chunk."""
        sent = source.payloads(self.codec, parts)
        return self._swap(sent, self._received(parts, index), tag=SCATTER)

    def _received(self, parts: Sequence[tuple[int, int]], index: int) -> Sequence[torch.Tensor]:
        """Return where each peer's version of this rank's part arrives."""
        mine = self._sizes(parts)[self.comm.Get_rank()]
        rows = self.kept.row("receive", index, mine * len(parts), torch.uint8)
        return torch.split(rows, [mine] * len(parts))

    def _returned(self, parts: Sequence[tuple[int, int]], index: int) -> Sequence[torch.Tensor]:
        """Return where the mean of each part arrives."""
        sizes = self._sizes(parts)
        return torch.split(self.kept.row("back", index, sum(sizes), torch.uint8), sizes)

    def _add(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        """Add this rank's part."""
        rank, versions = self.comm.Get_rank(), list(self._received(parts, index))
        versions[rank] = source.payloads(self.codec, parts)[rank]
        mean = self._returned(parts, index)[rank]
        self.adder.add(versions, mean, parts[rank], accumulator(source.dtype))

    def _return(self, parts: Sequence[tuple[int, int]], index: int) -> "list[MPI.Request]":
        """Start sending the mean of this rank's part to every peer."""
        returned = self._returned(parts, index)
        mine = returned[self.comm.Get_rank()]
        return self._swap([mine] * len(parts), returned, tag=RETURN)

    def _deliver(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        means, sent = self._returned(parts, index), source.payloads(self.codec, parts)
        room = self.kept.room(source.dtype, self.adder.piece)
        deliver(self.codec, means, source, parts, sent, room, self.adder.piece)


DeterministicAllReduce = PairwiseExchange | ReduceScatterAllGather
