"""The mean of a flat row over the ranks of one communicator, as work for the engine.

Two ways. `iallreduce` leaves the sum to MPI. `ordered` adds in rank order in fp32 (fp64 for fp64
rows): bit for bit the sequential sum of what the wire carried, and the only way for a wire that MPI
cannot add. Two ranks send each other the whole row (`Pairwise`); more send each peer its part of
the row, add the parts, and send the means back (`TwoPhase`). Wires that round number by number give
the same bits for any chunking. All work chunk by chunk: while one chunk is added, the next one is
on its way.

A row is read and written through a `Source` (`daso.comm.means`), so that a delta is computed where
it is needed and never stored.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.compress import PIECE, Codec
from daso.comm.dtypes import accumulator, byte_buffer, sum_buffer
from daso.comm.means import Adder, Buffers, Chunks, Source, add_and_deliver, deliver, encode, whole

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Ordered", "Pairwise", "TwoPhase", "iallreduce", "ordered"]

Requests = Generator[Sequence["MPI.Request"], None, int]

SCATTER, RETURN, SWAP = 1, 2, 3  # tags: the two phases; whole chunks


def iallreduce(
    comm: "MPI.Comm", source: Source, chunks: Chunks, weight: int, total: int
) -> Requests:
    """Take the weighted mean of a row by MPI's own sum.

    Args:
        comm: Communicator of the engine.
        source: The row, fp32 or fp64.
        chunks: From `plan.layout.chunk_parts`.
        weight: Weight of this rank's row.
        total: Sum of all ranks' weights.

    Returns:
        Bytes sent by this rank. MPI hides its algorithm; this is a ring's 2 (P-1)/P of the row.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    previous: tuple[int, int, torch.Tensor, MPI.Request] | None = None
    nbytes = 0
    for parts in chunks:
        start, stop = parts[0][0], parts[-1][1]
        values = source.values(start, stop)
        source.sent(start, stop, values, values)
        if weight != 1:
            values *= weight
        request = comm.Iallreduce(_in_place(), sum_buffer(values))
        nbytes += 2 * (len(parts) - 1) * values.nbytes // len(parts)
        if previous is not None:
            yield [previous[3]]
            source.deliver(*previous[:2], previous[2].div_(total))
        previous = (start, stop, values, request)
    if previous is not None:
        yield [previous[3]]
        source.deliver(*previous[:2], previous[2].div_(total))
    return nbytes


def _in_place() -> object:
    from daso.comm.mpi import load

    return load().IN_PLACE


def ordered(
    comm: "MPI.Comm",
    codec: Codec,
    weights: Sequence[int],
    total: int,
    rounded: dict[int, torch.Tensor] | None = None,
) -> "Ordered":
    """Return the way to take means in rank order over so many ranks.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part; kept by the caller.
    """
    if len(weights) == 2:
        return Pairwise(comm, codec, weights, total)
    return TwoPhase(comm, codec, weights, total, rounded)


class Pairwise:
    """Two ranks send each other the whole row, and each adds both; buffers are kept.

    As many bytes as in two phases, in one: the mean is not rounded for the wire once more, and is
    added where it is delivered.

    Not to be run twice at the same time: the engine carries out one work after the other.

    Args:
        comm: Communicator of the engine, of two ranks.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
    """

    def __init__(self, comm: "MPI.Comm", codec: Codec, weights: Sequence[int], total: int) -> None:
        self.comm, self.codec = comm, codec
        self.adder = Adder(codec, weights, total, {})
        self._buffer = Buffers().row

    def run(self, source: Source, chunks: Chunks) -> Requests:
        """Take the mean of a row; as `TwoPhase.run`."""
        nbytes = 0
        crossing = self._swap(source, chunks[0], 0) if chunks else []
        for index, parts in enumerate(chunks):
            ahead = index + 1
            following = self._swap(source, chunks[ahead], ahead) if ahead < len(chunks) else []
            yield crossing
            span, versions = whole(parts), self._versions(parts, index)
            add_and_deliver(self.adder, versions, source, span, accumulator(source.dtype))
            nbytes += versions[0].numel()
            crossing = following
        return nbytes

    def _versions(self, parts: Sequence[tuple[int, int]], index: int) -> list[torch.Tensor]:
        """Return both ranks' versions of a chunk, in rank order."""
        start, stop = whole(parts)
        size = self.codec.nbytes(stop - start)
        mine, other = (self._buffer(name, index, size, torch.uint8) for name in ("mine", "other"))
        return [mine, other] if self.comm.Get_rank() == 0 else [other, mine]

    def _swap(
        self, source: Source, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Encode a chunk and start sending it to the other rank."""
        rank, versions = self.comm.Get_rank(), self._versions(parts, index)
        peer = 1 - rank
        receive = self.comm.Irecv(byte_buffer(versions[peer]), peer, SWAP)
        carried = self._buffer("piece", 0, PIECE, source.dtype)
        encode(self.codec, source, [versions[rank]], [whole(parts)], carried)
        return [receive, self.comm.Isend(byte_buffer(versions[rank]), peer, SWAP)]


class TwoPhase:
    """Send each peer its part, add in rank order, send the means back; buffers are kept.

    Peer to peer, because MPICH 5.0 moves 16 KiB of an Ialltoallv per `Test`: 9 MB between two ranks
    of one machine took 99 ms under the polling engine, and 0.6 ms as two messages.

    Not to be run twice at the same time: the engine carries out one work after the other.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part; kept by the caller.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self.comm, self.codec = comm, codec
        self.adder = Adder(codec, weights, total, {} if rounded is None else rounded)
        self._buffer = Buffers().row

    def run(self, source: Source, chunks: Chunks) -> Requests:
        """Take the mean of a row.

        Args:
            source: The row.
            chunks: From `plan.layout.chunk_parts` with one part per rank; the same on every rank.

        Returns:
            Bytes sent by this rank to other ranks.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        nbytes = 0
        scattered = self._scatter(source, chunks[0], 0) if chunks else []
        returning: list[MPI.Request] = []
        for index, parts in enumerate(chunks):
            # The next chunk leaves before this one is added: the link is never idle.
            ahead = index + 1
            following = self._scatter(source, chunks[ahead], ahead) if ahead < len(chunks) else []
            yield scattered
            sent_back = self._add_and_return(source, parts, index)
            nbytes += self._sent_bytes(parts)
            if index > 0:
                yield returning
                self._deliver(source, chunks[index - 1], index - 1)
            scattered, returning = following, sent_back
        if chunks:
            yield returning
            self._deliver(source, chunks[-1], len(chunks) - 1)
        return nbytes

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
        rank = self.comm.Get_rank()
        peers = [peer for peer in range(len(outgoing)) if peer != rank]
        receives = [self.comm.Irecv(byte_buffer(incoming[peer]), peer, tag) for peer in peers]
        return receives + [self.comm.Isend(byte_buffer(outgoing[p]), p, tag) for p in peers]

    def _scatter(
        self, source: Source, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Encode a chunk and start sending each peer its part."""
        sizes = self._sizes(parts)
        payload = torch.split(self._buffer("send", index, sum(sizes), torch.uint8), sizes)
        encode(self.codec, source, payload, parts, self._piece(source))
        return self._swap(payload, self._received(parts, index), tag=SCATTER)

    def _piece(self, source: Source) -> torch.Tensor:
        return self._buffer("piece", 0, PIECE, source.dtype)

    def _received(self, parts: Sequence[tuple[int, int]], index: int) -> Sequence[torch.Tensor]:
        """Return where each peer's version of this rank's part arrives."""
        mine = self._sizes(parts)[self.comm.Get_rank()]
        whole = self._buffer("receive", index, mine * len(parts), torch.uint8)
        return torch.split(whole, [mine] * len(parts))

    def _returned(self, parts: Sequence[tuple[int, int]], index: int) -> Sequence[torch.Tensor]:
        """Return where the mean of each part arrives."""
        sizes = self._sizes(parts)
        return torch.split(self._buffer("back", index, sum(sizes), torch.uint8), sizes)

    def _add_and_return(
        self, source: Source, parts: Sequence[tuple[int, int]], index: int
    ) -> "list[MPI.Request]":
        """Add this rank's part and start sending the mean to every peer."""
        rank, sizes = self.comm.Get_rank(), self._sizes(parts)
        versions = list(self._received(parts, index))
        payload = self._buffer("send", index, sum(sizes), torch.uint8)
        versions[rank] = torch.split(payload, sizes)[rank]
        returned = self._returned(parts, index)
        self.adder.add(versions, returned[rank], parts[rank], accumulator(source.dtype))
        return self._swap([returned[rank]] * len(parts), returned, tag=RETURN)

    def _deliver(self, source: Source, parts: Sequence[tuple[int, int]], index: int) -> None:
        deliver(self.codec, self._returned(parts, index), source, parts, self._piece(source))


Ordered = Pairwise | TwoPhase
