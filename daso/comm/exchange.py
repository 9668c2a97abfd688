"""The mean of a flat row over the ranks of one communicator, as work for the engine.

Two ways. `iallreduce` leaves the sum to MPI. `TwoPhase` sends each peer its part of the row, adds
the parts in rank order in fp32 (fp64 for fp64 rows), and sends the means back: bit for bit the
sequential sum of what the wire carried, and the only way for a wire that MPI cannot add. Wires that
round number by number give the same bits for any chunking. Both work chunk by chunk: while one
chunk is added and sent back, the next one is on its way.

A row is read and written through a `Source`, chunk by chunk, so that a delta is computed where it
is needed and never stored. `in_process` does what `TwoPhase` does for rows that are all here.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from daso.comm.compress import PIECE, Codec, Fields, pieces
from daso.comm.dtypes import accumulator, byte_buffer, sum_buffer

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Adder", "Chunks", "Row", "Source", "TwoPhase", "iallreduce", "in_process"]

# One span (start, stop) for each peer, for each chunk; the spans of a chunk follow one another.
Chunks = Sequence[Sequence[tuple[int, int]]]
Requests = Generator[Sequence["MPI.Request"], None, int]

SCATTER, RETURN = 1, 2  # tags of the two phases


class Source(Protocol):
    """A row that an exchange reads from and delivers to."""

    dtype: torch.dtype

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of elements ``start`` to ``stop``; the exchange may overwrite them."""
        ...

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Take note that for ``values`` the wire carried ``carried``."""
        ...

    def deliver(self, start: int, stop: int, mean: torch.Tensor) -> None:
        """Take the mean of elements ``start`` to ``stop``."""
        ...


class Row:
    """A plain row of numbers, replaced by its mean.

    Args:
        flat: The row (numel), on the CPU.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.dtype = flat.dtype

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers in place."""
        return self.flat[start:stop]

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Keep nothing: a plain row has no residual."""

    def deliver(self, start: int, stop: int, mean: torch.Tensor) -> None:
        """Write the mean in place."""
        self.flat[start:stop].copy_(mean)


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


class Buffers:
    """Rows that are kept from exchange to exchange, because new memory costs more than the sum."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def row(self, name: str, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for chunk ``index``; two chunks are under way at most."""
        key = (f"{name} {dtype}", index & 1)
        if key not in self._rows or self._rows[key].numel() < numel:
            self._rows[key] = torch.empty(numel, dtype=dtype)
        return self._rows[key][:numel]


class Adder:
    """Adds the ranks' versions of a part, and rounds the mean for the wire.

    Args:
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part.
    """

    def __init__(
        self, codec: Codec, weights: Sequence[int], total: int, rounded: dict[int, torch.Tensor]
    ) -> None:
        self.codec, self.weights, self.total = codec, tuple(weights), total
        self.rounded = rounded
        self._buffer = Buffers().row

    def add(
        self,
        versions: Sequence[torch.Tensor],
        payload: torch.Tensor,
        span: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """Write the weighted mean of a part, added in rank order, for the wire.

        What is rounded away goes into the next mean.

        Args:
            versions: The ranks' payloads of the part.
            payload: Where the mean goes; may be one of them.
            span: The part.
            dtype: In which is added, fp32 or fp64.
        """
        codec, start, numel = self.codec, span[0], span[1] - span[0]
        if start not in self.rounded and not codec.exact:
            self.rounded[start] = torch.zeros(numel, dtype=dtype)
        rounded = self.rounded.get(start)
        for a, b in pieces(numel):
            mean = self._mean([codec.fields(one, numel, a, b) for one in versions], b - a, dtype)
            fields = codec.fields(payload, numel, a, b)
            if rounded is not None:
                mean += rounded[a:b]
            codec.encode(mean, fields)
            if rounded is not None:
                codec.decode(fields, rounded[a:b])
                torch.sub(mean, rounded[a:b], out=rounded[a:b])

    def _mean(self, versions: Sequence[Fields], numel: int, dtype: torch.dtype) -> torch.Tensor:
        total, term = (self._buffer(name, 0, numel, dtype) for name in ("sum", "term"))
        for rank, weight in enumerate(self.weights):
            out = total if rank == 0 else term
            self.codec.decode(versions[rank], out)
            if weight != 1:
                out *= weight
            if rank > 0:
                total += term
        return total.div_(self.total)


def in_process(sources: Sequence[Source], adder: Adder, chunks: Chunks) -> int:
    """Do what `TwoPhase` does, bit for bit, for rows that are all in this process.

    Args:
        sources: One row for each rank, in rank order.
        adder: Adds them.
        chunks: From `plan.layout.chunk_parts` with one part per rank.

    Returns:
        Bytes that all ranks together would have sent.
    """
    nbytes, peers, codec = 0, len(sources) - 1, adder.codec
    for parts in chunks:
        sizes = [codec.nbytes(end - begin) for begin, end in parts]
        nbytes += 2 * peers * sum(sizes)
        payloads = [torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes) for _ in sources]
        carried = torch.empty(PIECE, dtype=sources[0].dtype)
        for source, payload in zip(sources, payloads, strict=True):
            _encode(codec, source, payload, parts, carried)
        means = [payloads[owner][owner] for owner in range(len(sources))]
        for owner, part in enumerate(parts):
            adder.add([one[owner] for one in payloads], means[owner], part, sources[0].dtype)
        for source in sources:
            _deliver(codec, means, source, parts, carried)
    return nbytes


def _encode(
    codec: Codec,
    source: Source,
    payload: Sequence[torch.Tensor],
    parts: Sequence[tuple[int, int]],
    carried: torch.Tensor,
) -> None:
    """Write a chunk of a row for the wire, and let the row know what the wire carries."""
    for (start, stop), one in zip(parts, payload, strict=True):
        for a, b in pieces(stop - start):
            values = source.values(start + a, start + b)
            fields = codec.fields(one, stop - start, a, b)
            codec.encode(values, fields)
            known = values
            if not codec.exact:
                known = carried[: b - a]
                codec.decode(fields, known)
            source.sent(start + a, start + b, values, known)


def _deliver(
    codec: Codec,
    means: Sequence[torch.Tensor],
    source: Source,
    parts: Sequence[tuple[int, int]],
    mean: torch.Tensor,
) -> None:
    """Give a row the mean of a chunk."""
    for (start, stop), one in zip(parts, means, strict=True):
        for a, b in pieces(stop - start):
            codec.decode(codec.fields(one, stop - start, a, b), mean[: b - a])
            source.deliver(start + a, start + b, mean[: b - a])


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
        _encode(self.codec, source, payload, parts, self._piece(source))
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
        _deliver(self.codec, self._returned(parts, index), source, parts, self._piece(source))
