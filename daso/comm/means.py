"""The arithmetic of an exchange, without MPI: what is read, encoded, added and delivered.

Everything goes piece by piece, since a piece that a core's cache holds goes through many passes at
the price of one. `in_process` does with it what `daso.comm.exchange.ordered` does between ranks.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from daso.comm.compress import PIECE, Codec, Fields, pieces

__all__ = [
    "Adder",
    "Buffers",
    "Chunks",
    "Row",
    "Source",
    "add_and_deliver",
    "deliver",
    "encode",
    "in_process",
    "whole",
]

# One span (start, stop) for each peer, for each chunk; the spans of a chunk follow one another.
Chunks = Sequence[Sequence[tuple[int, int]]]


class Source(Protocol):
    """A row that an exchange reads from and delivers to."""

    dtype: torch.dtype

    def values(self, start: int, stop: int, room: torch.Tensor) -> torch.Tensor:
        """Return the numbers of elements ``start`` to ``stop``, in place or in ``room``.

        The exchange may overwrite them.
        """
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

    def values(self, start: int, stop: int, room: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Return the numbers in place."""
        return self.flat[start:stop]

    def sent(self, start: int, stop: int, values: torch.Tensor, carried: torch.Tensor) -> None:
        """Keep nothing: a plain row has no residual."""

    def deliver(self, start: int, stop: int, mean: torch.Tensor) -> None:
        """Write the mean in place."""
        self.flat[start:stop].copy_(mean)


class Buffers:
    """Rows that are kept from exchange to exchange, because new memory costs more than the sum.

    Args:
        window: Chunks that are under way at most.
    """

    def __init__(self, window: int = 1) -> None:
        self.window = window
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def row(self, name: str, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for chunk ``index``."""
        key = (f"{name} {dtype}", index % self.window)
        if key not in self._rows or self._rows[key].numel() < numel:
            self._rows[key] = torch.empty(numel, dtype=dtype)
        return self._rows[key][:numel]

    def room(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory to work in (2, `PIECE`)."""
        return self.row("room", 0, 2 * PIECE, dtype).view(2, PIECE)


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
            mean = self.mean([codec.fields(one, numel, a, b) for one in versions], b - a, dtype)
            fields = codec.fields(payload, numel, a, b)
            if rounded is not None:
                mean += rounded[a:b]
            codec.encode(mean, fields)
            if rounded is not None:
                codec.decode(fields, rounded[a:b])
                torch.sub(mean, rounded[a:b], out=rounded[a:b])

    def mean(self, versions: Sequence[Fields], numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weighted mean of a piece, added in rank order.

        Args:
            versions: The ranks' fields of the piece.
            numel: Numbers of the piece, at most `PIECE`.
            dtype: In which is added, fp32 or fp64.

        Returns:
            The mean (numel), in memory that the next call writes.
        """
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
    """Do what `daso.comm.exchange.ordered` does, bit for bit, for rows all in this process.

    Args:
        sources: One row for each rank, in rank order.
        adder: Adds them.
        chunks: From `plan.layout.chunk_parts` with one part per rank.

    Returns:
        Bytes that all ranks together would have sent.
    """
    if len(sources) == 2:
        return _pairwise_in_process(sources, adder, chunks)
    nbytes, peers, codec = 0, len(sources) - 1, adder.codec
    for parts in chunks:
        sizes = [codec.nbytes(end - begin) for begin, end in parts]
        nbytes += 2 * peers * sum(sizes)
        payloads = [torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes) for _ in sources]
        room = torch.empty(2, PIECE, dtype=sources[0].dtype)
        for source, payload in zip(sources, payloads, strict=True):
            encode(codec, source, payload, parts, room)
        means = [payloads[owner][owner] for owner in range(len(sources))]
        for owner, part in enumerate(parts):
            adder.add([one[owner] for one in payloads], means[owner], part, sources[0].dtype)
        for source in sources:
            deliver(codec, means, source, parts, room[0])
    return nbytes


def _pairwise_in_process(sources: Sequence[Source], adder: Adder, chunks: Chunks) -> int:
    nbytes, codec, dtype = 0, adder.codec, sources[0].dtype
    for parts in chunks:
        start, stop = span = whole(parts)
        versions = [torch.empty(codec.nbytes(stop - start), dtype=torch.uint8) for _ in sources]
        room = torch.empty(2, PIECE, dtype=dtype)
        for source, version in zip(sources, versions, strict=True):
            encode(codec, source, [version], [span], room)
        for source in sources:
            add_and_deliver(adder, versions, source, span, dtype)
        nbytes += sum(version.numel() for version in versions)
    return nbytes


def whole(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the span of a chunk."""
    return parts[0][0], parts[-1][1]


def encode(
    codec: Codec,
    source: Source,
    payload: Sequence[torch.Tensor],
    parts: Sequence[tuple[int, int]],
    room: torch.Tensor,
) -> None:
    """Write a chunk of a row for the wire, and let the row know what the wire carries.

    Args:
        codec: What crosses.
        source: The row.
        payload: Where each part goes.
        parts: Spans of the row.
        room: Memory to work in (2, `PIECE`), of the row's type.
    """
    for (start, stop), one in zip(parts, payload, strict=True):
        for a, b in pieces(stop - start):
            values = source.values(start + a, start + b, room[0, : b - a])
            fields = codec.fields(one, stop - start, a, b)
            codec.encode(values, fields)
            known = values
            if not codec.exact:
                known = room[1, : b - a]
                codec.decode(fields, known)
            source.sent(start + a, start + b, values, known)


def deliver(
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


def add_and_deliver(
    adder: Adder,
    versions: Sequence[torch.Tensor],
    source: Source,
    span: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Give a row the mean of what all ranks sent of a span.

    Args:
        adder: Adds.
        versions: The ranks' payloads of the span, in rank order.
        source: The row.
        span: Where.
        dtype: In which is added, fp32 or fp64.
    """
    codec, start, numel = adder.codec, span[0], span[1] - span[0]
    for a, b in pieces(numel):
        fields = [codec.fields(one, numel, a, b) for one in versions]
        source.deliver(start + a, start + b, adder.mean(fields, b - a, dtype))
