"""The mean of a flat row over the ranks of one communicator, as work for the engine.

Two ways. `iallreduce` leaves the sum to MPI. `deterministic_allreduce` adds in rank order in fp32
(fp64 for fp64 rows): bit for bit the sequential sum of what the wire carried, and the only way for
a wire that MPI cannot add. Two ranks send each other the whole row (`PairwiseExchange`); more send
each peer its part of the row, add the parts, and send the means back (`ReduceScatterAllGather`);
many do so in groups, or in a ring (`daso.comm.allreduce.levels`).
Wires that round number by number give the same bits for any chunking. All work chunk by chunk, and
a few chunks are on their way at a time, so that the link is busy while one is added.

A row is read and written through a `ReduceBuffer` (`daso.comm.reduction`), which has encoded it
when the exchange starts.

What lies on a device is added there (`OnDevice`): beside training, and nothing crosses before what
makes it is over. MPI takes the memory of the device, or pinned copies of what crosses on the host.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from daso.comm.allreduce.ordered import (
    OnDevice,
    OrderedAllReduce,
    Requests,
    Waits,
    in_window,
    outgoing,
    turns_of,
    window,
)
from daso.comm.allreduce.runners import MultiLevelAllReduce
from daso.comm.dtypes import sum_buffer
from daso.comm.mpi import load
from daso.comm.reduction import (
    BufferPool,
    Chunks,
    ReduceBuffer,
    deliver,
    whole,
)
from daso.kernels.codecs import Codec, exact_codec
from daso.kernels.rows import Mean
from daso.plan.allreduce_plan import AllReducePlan, direct_plan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "DeterministicAllReduce",
    "PairwiseExchange",
    "ReduceScatterAllGather",
    "deterministic_allreduce",
    "iallreduce",
]

SCATTER, RETURN, SWAP = 1, 2, 3  # tags: the two phases; whole chunks


def iallreduce(
    comm: "MPI.Comm",
    source: ReduceBuffer,
    chunks: Chunks,
    weight: int,
    total: int,
    kept: BufferPool | None = None,
    where: OnDevice | None = None,
) -> Requests:
    """Take the weighted mean of a row by MPI's own sum.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    peers, spans = comm.Get_size(), [whole(parts) for parts in chunks]
    codec, rooms = exact_codec(source.dtype), kept or BufferPool(window(peers))
    crossing: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(index: int) -> "list[MPI.Request]":
        first, last = spans[index]
        (payload,) = outgoing(source, [spans[index]])
        sums = rooms.row("sums", index, last - first, source.dtype)
        torch.mul(payload.view(source.dtype), weight, out=sums)
        crossing[index] = sums, payload
        return [comm.Iallreduce(load().IN_PLACE, sum_buffer(sums))]

    def finish(index: int) -> Waits:
        first, last = spans[index]
        sums, payload = crossing.pop(index)
        means = sums.div_(total)
        if where is not None:
            (payload,) = source.payloads([spans[index]])
            with where.copies.beside():
                means = torch.empty(last - first, dtype=source.dtype, device=where.device)
                made = where.copies.mark()
            yield made
            yield where.copies.back(sums, means)
        with nullcontext() if where is None else where.copies.beside():
            source.deliver(first, last, Mean(codec, [means.view(torch.uint8)]), payload)
            over = None if where is None else where.copies.mark()
        if over is not None:
            yield over

    yield from in_window(chunks, rooms.window, start, finish)
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
    plan: AllReducePlan | None = None,
) -> "DeterministicAllReduce":
    """Return what takes means over a communicator in a fixed order; without a plan directly."""
    plan, kept = plan or direct_plan(len(weights)), {} if rounded is None else rounded
    if not plan.flat:
        return MultiLevelAllReduce(
            comm, plan, codec, weights, total, kept, where, of_gradients=of_gradients
        )
    if plan.peers == 2:
        return PairwiseExchange(comm, codec, weights, total, {}, where)
    return ReduceScatterAllGather(
        comm, codec, weights, total, kept, where, of_gradients=of_gradients
    )


class PairwiseExchange(OrderedAllReduce):
    """Two ranks send each other the whole row, and each adds both; buffers are kept.

    As many bytes as in two phases, in one: the mean is not rounded for the wire once more, and is
    added where it is delivered.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Take the mean of a row; as `ReduceScatterAllGather.run`."""
        spans = [whole(parts) for parts in chunks]

        rank = self.comm.Get_rank()

        def finish(index: int) -> Waits:
            (sent,) = source.payloads([spans[index]])
            other = self._other(spans[index], index, self.kept)
            yield from self._fetch(self._other(spans[index], index, self.crossing), other)
            versions = [sent, other] if rank == 0 else [other, sent]
            with self._beside():
                source.deliver(*spans[index], self.adder.mean(versions), sent)
            yield from self._computed()

        yield from self._made(len(spans), lambda at: self._other(spans[at], at, self.kept))
        yield from in_window(
            *(chunks, self.kept.window),
            lambda at: self._swap(source, spans[at], at),
            finish,
        )
        return sum(self.codec.nbytes(stop - start) for start, stop in spans)

    def _other(self, span: tuple[int, int], index: int, rows: BufferPool) -> torch.Tensor:
        """Return where the other rank's version of a chunk arrives, or is added."""
        return rows.row("other", index, self.codec.nbytes(span[1] - span[0]), torch.uint8)

    def _swap(self, source: ReduceBuffer, span: tuple[int, int], index: int) -> "list[MPI.Request]":
        """Start sending a chunk to the other rank."""
        (sent,), peer = self._sent(source, [span]), 1 - self.comm.Get_rank()
        receive = self.comm.Irecv(self.buffer(self._other(span, index, self.crossing)), peer, SWAP)
        return [receive, self.comm.Isend(self.buffer(sent), peer, SWAP)]


class ReduceScatterAllGather(OrderedAllReduce):
    """Send each peer its part, add in rank order, send the means back; buffers are kept.

    Peer to peer, because MPICH 5.0 moves 16 KiB of an Ialltoallv per `Test`: 9 MB between two ranks
    of one machine took 99 ms under the polling engine, and 0.6 ms as two messages.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Take the mean of a row.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        returning: deque[tuple[int, list[MPI.Request]]] = deque()

        def take_back() -> Waits:
            index, requests = returning.popleft()
            yield requests
            yield from self._fetch(*self._rows("back", chunks[index], index))
            with self._beside():
                self._deliver(source, chunks[index], index)
            yield from self._computed()

        def finish(index: int) -> Waits:
            yield from self._fetch(*self._rows("receive", chunks[index], index))
            with self._beside():
                self._add(source, chunks[index], index)
            yield from self._computed()
            leaving, mean = self._means_here(chunks[index], index)
            yield from self._bring(mean, leaving)
            returning.append((index, self._return(chunks[index], index)))
            if len(returning) == self.kept.window:
                yield from take_back()

        yield from self._made(
            len(chunks),
            lambda at: [self._rows(name, chunks[at], at) for name in ("receive", "back")],
        )
        yield from in_window(
            *(chunks, self.kept.window),
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
        peers = turns_of(self.comm.Get_rank(), len(outgoing))
        receives = [self.comm.Irecv(self.buffer(incoming[peer]), peer, tag) for peer in peers]
        return receives + [self.comm.Isend(self.buffer(outgoing[p]), p, tag) for p in peers]

    def _scatter(
        self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Start sending each peer its part of a chunk."""
        mine = self._sizes(parts)[self.comm.Get_rank()]
        arriving, _ = self._rows("receive", parts, index)
        incoming = torch.split(arriving, [mine] * len(parts))
        return self._swap(self._sent(source, parts), incoming, tag=SCATTER)

    def _rows(
        self, name: str, parts: Sequence[tuple[int, int]], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for peers' versions of this rank's part, or means: MPI's, and to add in."""
        sizes = self._sizes(parts)
        nbytes = sum(sizes) if name == "back" else sizes[self.comm.Get_rank()] * len(parts)
        arriving, here = (
            rows.row(name, index, nbytes, torch.uint8) for rows in (self.crossing, self.kept)
        )
        return arriving, here

    def _means_here(
        self, parts: Sequence[tuple[int, int]], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where the mean of this rank's part is sent from, and where it is added."""
        sizes, rank = self._sizes(parts), self.comm.Get_rank()
        leaving, mean = (torch.split(row, sizes)[rank] for row in self._rows("back", parts, index))
        return leaving, mean

    def _add(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        """Add this rank's part."""
        rank, (_, received) = self.comm.Get_rank(), self._rows("receive", parts, index)
        mine = self._sizes(parts)[rank]
        versions = list(torch.split(received, [mine] * len(parts)))
        versions[rank] = source.payloads(parts)[rank]
        _, mean = self._means_here(parts, index)
        self.adder.add(versions, mean, parts[rank])

    def _return(self, parts: Sequence[tuple[int, int]], index: int) -> "list[MPI.Request]":
        """Start sending the mean of this rank's part to every peer."""
        arriving, _ = self._rows("back", parts, index)
        returned = torch.split(arriving, self._sizes(parts))
        mine = returned[self.comm.Get_rank()]
        return self._swap([mine] * len(parts), returned, tag=RETURN)

    def _deliver(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        _, row = self._rows("back", parts, index)
        means, sent = torch.split(row, self._sizes(parts)), source.payloads(parts)
        deliver(self.codec, means, source, parts, sent)


DeterministicAllReduce = PairwiseExchange | ReduceScatterAllGather | MultiLevelAllReduce
