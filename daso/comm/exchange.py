"""The mean of a flat row over the ranks of one communicator, as work for the engine.

Two ways. `iallreduce` leaves the sum to MPI. `TwoPhase` sends each peer its part of the row, adds
the parts in rank order in fp32 (fp64 for fp64 rows), and sends the means back: bit for bit the
sequential sum, for any chunking, and the only way for a wire that MPI cannot add. Both work chunk
by chunk: while one chunk is added and sent back, the next one is on its way.

A row is read and written through a `Source`, chunk by chunk, so that a delta is computed where it
is needed and never stored.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from daso.comm.compress import Codec
from daso.comm.dtypes import accumulator, byte_buffer, sum_buffer

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Chunks", "Deltas", "Row", "Source", "TwoPhase", "iallreduce"]

# One span (start, stop) for each peer, for each chunk; the spans of a chunk follow one another.
Chunks = Sequence[Sequence[tuple[int, int]]]
Requests = Generator[Sequence["MPI.Request"], None, int]


class Source(Protocol):
    """A row that an exchange reads from and delivers to."""

    dtype: torch.dtype

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return the numbers of elements ``start`` to ``stop``; the exchange may overwrite them."""
        ...

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Take note that for ``values`` the wire carried ``carried`` (only for inexact codecs)."""
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


class Deltas:
    """What a node did since all nodes agreed: snapshot minus reference, with the wire's residual.

    What the wire rounds away is kept in the residual and added to the next delta, so that a 16-bit
    wire never freezes a weight.

    Args:
        snapshot: Parameters when the exchange was sent (numel).
        reference: What the nodes agreed on last (numel); moved by the mean delta.
        residual: What was not sent yet (numel); None for an exact codec.
    """

    def __init__(
        self, snapshot: torch.Tensor, reference: torch.Tensor, residual: torch.Tensor | None
    ) -> None:
        self.snapshot, self.reference, self.residual = snapshot, reference, residual
        self.dtype = reference.dtype

    def values(self, start: int, stop: int) -> torch.Tensor:
        """Return delta + residual."""
        values = self.snapshot[start:stop] - self.reference[start:stop]
        return values if self.residual is None else values.add_(self.residual[start:stop])

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Keep what the wire rounded away."""
        if self.residual is not None:
            torch.sub(values, carried, out=self.residual[start:stop])

    def deliver(self, start: int, stop: int, mean: torch.Tensor) -> None:
        """Move the reference by the mean delta."""
        self.reference[start:stop].add_(mean)


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


class TwoPhase:
    """Ialltoallv, add in rank order, Iallgatherv; the buffers are kept between exchanges.

    Not to be run twice at the same time: the engine carries out one work after the other.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
    """

    def __init__(self, comm: "MPI.Comm", codec: Codec, weights: Sequence[int], total: int) -> None:
        self.comm, self.codec = comm, codec
        self.weights, self.total = tuple(weights), total
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._rounded: dict[int, torch.Tensor] = {}  # owner's residual, by start of the part

    def run(self, source: Source, chunks: Chunks) -> Requests:
        """Take the mean of a row.

        Args:
            source: The row.
            chunks: From `plan.layout.chunk_parts` with one part per rank; the same on every rank.

        Returns:
            Bytes sent by this rank to other ranks.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        if not chunks:
            return 0
        nbytes = 0
        scattered = self._scatter(source, chunks[0], 0)
        back: MPI.Request | None = None
        for index, parts in enumerate(chunks):
            following = (
                self._scatter(source, chunks[index + 1], index + 1)
                if index + 1 < len(chunks)
                else None
            )
            yield [scattered]
            gathered = self._add_and_gather(source, parts, index)
            nbytes += self._sent_bytes(parts)
            if back is not None:
                yield [back]
                self._deliver(source, chunks[index - 1], index - 1)
            back = gathered
            if following is not None:
                scattered = following
        if back is not None:
            yield [back]
        self._deliver(source, chunks[-1], len(chunks) - 1)
        return nbytes

    def forget(self) -> None:
        """Drop what the owner of a part rounded away, as after a new reference."""
        self._rounded.clear()

    def _sent_bytes(self, parts: Sequence[tuple[int, int]]) -> int:
        sizes = self._sizes(parts)
        mine = sizes[self.comm.Get_rank()]
        return sum(sizes) - mine + mine * (len(parts) - 1)

    def _sizes(self, parts: Sequence[tuple[int, int]]) -> list[int]:
        return [self.codec.nbytes(stop - start) for start, stop in parts]

    def _buffer(self, name: str, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for chunk ``index``; two chunks are under way at most."""
        key = (f"{name} {dtype}", index & 1)
        if key not in self._buffers or self._buffers[key].numel() < numel:
            self._buffers[key] = torch.empty(numel, dtype=dtype)
        return self._buffers[key][:numel]

    def _scatter(
        self, source: Source, parts: Sequence[tuple[int, int]], index: int
    ) -> "MPI.Request":
        start, stop = parts[0][0], parts[-1][1]
        sizes = self._sizes(parts)
        payload = self._buffer("send", index, sum(sizes), torch.uint8)
        values = source.values(start, stop)
        self._encode_parts(values, payload, parts, sizes)
        if not self.codec.exact:
            carried = self._buffer("carried", 0, stop - start, source.dtype)
            self._decode_parts(payload, carried, parts, sizes)
            source.sent(start, stop, values, carried)
        mine = sizes[self.comm.Get_rank()]
        received = self._buffer("receive", index, mine * len(parts), torch.uint8)
        from_each = [mine] * len(parts)
        return self.comm.Ialltoallv(
            [byte_buffer(payload), sizes, _starts(sizes), _byte()],
            [byte_buffer(received), from_each, _starts(from_each), _byte()],
        )

    def _add_and_gather(
        self, source: Source, parts: Sequence[tuple[int, int]], index: int
    ) -> "MPI.Request":
        start, stop = parts[self.comm.Get_rank()]
        sizes = self._sizes(parts)
        mine = sizes[self.comm.Get_rank()]
        received = self._buffer("receive", index, mine * len(parts), torch.uint8)
        mean = self._add(received, mine, stop - start, accumulator(source.dtype))
        own = self._buffer("own", index, mine, torch.uint8)
        self._encode_mean(mean, own, start)
        back = self._buffer("back", index, sum(sizes), torch.uint8)
        return self.comm.Iallgatherv(
            [byte_buffer(own), mine, _byte()],
            [byte_buffer(back), sizes, _starts(sizes), _byte()],
        )

    def _add(
        self, received: torch.Tensor, nbytes: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the weighted mean of the ranks' parts, added in rank order."""
        total = self._buffer("sum", 0, numel, dtype)
        term = self._buffer("term", 0, numel, dtype)
        for rank, weight in enumerate(self.weights):
            out = total if rank == 0 else term
            self.codec.decode(received[rank * nbytes : (rank + 1) * nbytes], out)
            if weight != 1:
                out *= weight
            if rank > 0:
                total += term
        return total.div_(self.total)

    def _encode_mean(self, mean: torch.Tensor, own: torch.Tensor, start: int) -> None:
        """Write the mean for the wire; what is rounded away goes into the next mean."""
        if self.codec.exact:
            self.codec.encode(mean, own)
            return
        rounded = self._rounded.get(start)
        if rounded is not None and rounded.numel() == mean.numel():
            mean += rounded
        self.codec.encode(mean, own)
        carried = torch.empty_like(mean)
        self.codec.decode(own, carried)
        self._rounded[start] = mean - carried

    def _deliver(self, source: Source, parts: Sequence[tuple[int, int]], index: int) -> None:
        start, stop = parts[0][0], parts[-1][1]
        sizes = self._sizes(parts)
        back = self._buffer("back", index, sum(sizes), torch.uint8)
        mean = self._buffer("mean", 0, stop - start, source.dtype)
        self._decode_parts(back, mean, parts, sizes)
        source.deliver(start, stop, mean)

    def _encode_parts(
        self,
        values: torch.Tensor,
        payload: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        sizes: Sequence[int],
    ) -> None:
        base = parts[0][0]
        for (start, stop), at, size in zip(parts, _starts(sizes), sizes, strict=True):
            self.codec.encode(values[start - base : stop - base], payload[at : at + size])

    def _decode_parts(
        self,
        payload: torch.Tensor,
        out: torch.Tensor,
        parts: Sequence[tuple[int, int]],
        sizes: Sequence[int],
    ) -> None:
        base = parts[0][0]
        for (start, stop), at, size in zip(parts, _starts(sizes), sizes, strict=True):
            self.codec.decode(payload[at : at + size], out[start - base : stop - base])


def _byte() -> object:
    from daso.comm.mpi import load

    return load().BYTE


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts
