"""All-reduce of a flat buffer over the ranks of one communicator, as work for the engine.

`iallreduce` leaves the sum to MPI. `deterministic_allreduce` adds in rank order in fp32 (fp64 for
fp64 buffers), with the bits of a sequential sum of the payloads; it also serves wires that MPI
cannot add. Two ranks send each other the whole buffer (`PairwiseExchange`); more ranks send each
peer its part, add the parts, and send the means back (`ReduceScatterAllGather`); many ranks do so
in groups, or in a ring (`daso.comm.allreduce.levels`).
All of them work chunk by chunk, with a few chunks in flight, so that the link is busy while a chunk
is reduced. Wires that round each number separately give the same bits for any chunking.

A buffer is read and written through a `ReduceBuffer` (`daso.comm.reduction`), which has encoded it
when the exchange starts.

Buffers on a device are reduced there (`DeviceContext`), on a separate stream. Messages start after
the kernels that compute them. MPI reads device memory, or pinned copies on the host.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from daso.comm.allreduce.ordered import (
    DeviceContext,
    OrderedAllReduce,
    PairwiseExchange,
    Requests,
    Waits,
    in_window,
    peer_order,
    window,
)
from daso.comm.allreduce.runners import MultiLevelAllReduce
from daso.comm.mpi import load
from daso.comm.reduction import (
    BufferPool,
    Chunks,
    ReduceBuffer,
    deliver,
    sum_buffer,
    whole,
)
from daso.kernels.codecs import Codec, exact_codec
from daso.kernels.rows import Mean
from daso.plan.allreduce_plan import AllReducePlan, direct_plan

if TYPE_CHECKING:
    from mpi4py import MPI

SCATTER, RETURN = 1, 2  # tags: the two phases


def iallreduce(
    comm: "MPI.Comm",
    source: ReduceBuffer,
    chunks: Chunks,
    weight: int,
    total: int,
    pool: BufferPool | None = None,
    where: DeviceContext | None = None,
) -> Requests:
    """Replace a buffer by the weighted mean, summed by MPI.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    peers, spans = comm.Get_size(), [whole(parts) for parts in chunks]
    codec, buffers = exact_codec(source.dtype), pool or BufferPool(window(peers))
    in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def start(index: int) -> "list[MPI.Request]":
        first, last = spans[index]
        (payload,) = source.outgoing([spans[index]])
        sums = buffers.row("sums", index, last - first, source.dtype)
        torch.mul(payload.view(source.dtype), weight, out=sums)
        in_flight[index] = sums, payload
        return [comm.Iallreduce(load().IN_PLACE, sum_buffer(sums))]

    def finish(index: int) -> Waits:
        first, last = spans[index]
        sums, payload = in_flight.pop(index)
        means = sums.div_(total)
        if where is not None:
            (payload,) = source.payloads([spans[index]])
            with where.copies.side_stream():
                means = torch.empty(last - first, dtype=source.dtype, device=where.device)
                allocated = where.copies.completion()
            yield allocated
            yield where.copies.to_device(sums, means)
        with nullcontext() if where is None else where.copies.side_stream():
            source.deliver(first, last, Mean(codec, [means.view(torch.uint8)]), payload)
            over = None if where is None else where.copies.completion()
        if over is not None:
            yield over

    yield from in_window(chunks, buffers.window, load().Request.Testall, start, finish)
    numel = spans[-1][1] - spans[0][0] if spans else 0
    return 2 * (peers - 1) * numel * source.dtype.itemsize // peers


def deterministic_allreduce(
    comm: "MPI.Comm",
    codec: Codec,
    weights: Sequence[int],
    total: int,
    rounded: dict[int, torch.Tensor] | None = None,
    where: DeviceContext | None = None,
    *,
    of_gradients: bool = False,
    plan: AllReducePlan | None = None,
) -> "DeterministicAllReduce":
    """Return an all-reduce that adds in a fixed order; without a plan, a direct one."""
    plan, errors = plan or direct_plan(len(weights)), {} if rounded is None else rounded
    if not plan.flat:
        return MultiLevelAllReduce(
            comm, plan, codec, weights, total, errors, where, of_gradients=of_gradients
        )
    if plan.peers == 2:
        return PairwiseExchange(comm, codec, weights, total, {}, where)
    return ReduceScatterAllGather(
        comm, codec, weights, total, errors, where, of_gradients=of_gradients
    )


class ReduceScatterAllGather(OrderedAllReduce):
    """All-reduce in two phases: each rank reduces one part in rank order and returns its mean.

    Point-to-point, because MPICH 5.0 moves 16 KiB of an Ialltoallv per `Test`: 9 MB between two
    ranks of one machine took 99 ms under the polling engine, and 0.6 ms as two messages.
    """

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Replace a buffer by the mean; return the bytes sent.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        returning: deque[tuple[int, list[MPI.Request]]] = deque()

        def accept_means() -> Waits:
            index, requests = returning.popleft()
            yield requests
            yield from self._copy_in(*self._rows("back", chunks[index], index))
            with self._side_stream():
                self._deliver(source, chunks[index], index)
            yield from self._wait_computed()

        def finish(index: int) -> Waits:
            self._count_received(chunks[index], index)
            yield from self._copy_in(*self._rows("receive", chunks[index], index))
            with self._side_stream():
                self._add(source, chunks[index], index)
            yield from self._wait_computed()
            leaving, mean = self._own_mean(chunks[index], index)
            yield from self._copy_out(mean, leaving)
            returning.append((index, self._return_mean(chunks[index], index)))
            if len(returning) == self.local_buffers.window:
                yield from accept_means()

        yield from self._allocate(
            len(chunks),
            lambda index: [self._rows(name, chunks[index], index) for name in ("receive", "back")],
        )
        yield from in_window(
            chunks,
            self.local_buffers.window,
            self.test,
            start=lambda index: self._scatter(source, chunks[index], index),
            finish=finish,
        )
        while returning:
            yield from accept_means()
        return sum(map(self._sent_bytes, chunks))

    def _sent_bytes(self, parts: Sequence[tuple[int, int]]) -> int:
        sizes = self._sizes(parts)
        own = sizes[self.comm.Get_rank()]
        return sum(sizes) - own + own * (len(parts) - 1)

    def _sizes(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return [self.codec.nbytes(stop - start) for start, stop in parts]

    def _swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], tag: int
    ) -> "list[MPI.Request]":
        """Start sending one buffer to each peer and receiving one from each."""
        peers = peer_order(self.comm.Get_rank(), len(outgoing))
        receives = [self.comm.Irecv(self.buffer(incoming[peer]), peer, tag) for peer in peers]
        return receives + [self.comm.Isend(self.buffer(outgoing[p]), p, tag) for p in peers]

    def _scatter(
        self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Start sending each peer its part of a chunk."""
        outgoing = self._outgoing(source, parts)
        if self._sums is not None:
            for peer in peer_order(self.comm.Get_rank(), len(parts)):
                self._sums.send(peer, outgoing[peer], index)
        return self._swap(outgoing, self._incoming(parts, index), tag=SCATTER)

    def _incoming(self, parts: Sequence[tuple[int, int]], index: int) -> Sequence[torch.Tensor]:
        """Return memory for the payloads of all ranks of this rank's part, for MPI."""
        own_nbytes = self._sizes(parts)[self.comm.Get_rank()]
        arriving, _ = self._rows("receive", parts, index)
        return torch.split(arriving, [own_nbytes] * len(parts))

    def _count_received(self, parts: Sequence[tuple[int, int]], index: int) -> None:
        if self._sums is not None:
            incoming = self._incoming(parts, index)
            for peer in peer_order(self.comm.Get_rank(), len(parts)):
                self._sums.receive(peer, incoming[peer], index)

    def _rows(
        self, name: str, parts: Sequence[tuple[int, int]], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for received payloads or means: for MPI, and to reduce in."""
        sizes = self._sizes(parts)
        nbytes = sum(sizes) if name == "back" else sizes[self.comm.Get_rank()] * len(parts)
        arriving, local = (
            pool.row(name, index, nbytes, torch.uint8)
            for pool in (self.mpi_buffers, self.local_buffers)
        )
        return arriving, local

    def _own_mean(
        self, parts: Sequence[tuple[int, int]], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the mean of this rank's part: to send from, and to reduce in."""
        sizes, rank = self._sizes(parts), self.comm.Get_rank()
        leaving, mean = (torch.split(row, sizes)[rank] for row in self._rows("back", parts, index))
        return leaving, mean

    def _add(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        """Reduce this rank's part."""
        rank, (_, received) = self.comm.Get_rank(), self._rows("receive", parts, index)
        nbytes = self._sizes(parts)[rank]
        versions = list(torch.split(received, [nbytes] * len(parts)))
        versions[rank] = source.payloads(parts)[rank]
        _, mean = self._own_mean(parts, index)
        self.adder.add(versions, mean, parts[rank])

    def _return_mean(self, parts: Sequence[tuple[int, int]], index: int) -> "list[MPI.Request]":
        """Start sending the mean of this rank's part to every peer."""
        arriving, _ = self._rows("back", parts, index)
        returned = torch.split(arriving, self._sizes(parts))
        own = returned[self.comm.Get_rank()]
        return self._swap([own] * len(parts), returned, tag=RETURN)

    def _deliver(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> None:
        _, row = self._rows("back", parts, index)
        means, sent = torch.split(row, self._sizes(parts)), source.payloads(parts)
        deliver(self.codec, means, source, parts, sent)


DeterministicAllReduce = PairwiseExchange | ReduceScatterAllGather | MultiLevelAllReduce
