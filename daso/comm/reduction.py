"""The arithmetic of an exchange, without MPI: what is read, encoded, added and delivered.

Everything goes piece by piece, since a piece that a core's cache holds goes through many passes at
the price of one. `in_process` does with it what `deterministic_allreduce` does between ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from daso.comm.compression import PIECE, Codec, Fields, divide_, encode_gradients, pieces
from daso.comm.dtypes import accumulator
from daso.errors import ExchangeError

__all__ = [
    "CPU",
    "BufferPool",
    "Chunks",
    "EncodeProgress",
    "OverlappedBuffer",
    "ReduceBuffer",
    "Row",
    "SendBuffer",
    "Spans",
    "StagedBuffer",
    "Terms",
    "WeightedMean",
    "add_and_deliver",
    "deliver",
    "in_process",
    "whole",
]

CPU = torch.device("cpu")

LEVEL = 1 << 48  # numbers: no row has as many, so that a part of each level has a key of its own

# For each chunk a span (start, stop) for each payload; the spans of a chunk follow one another.
Chunks = Sequence[Sequence[tuple[int, int]]]
Spans = Sequence[tuple[int, int]]


class ReduceBuffer(Protocol):
    """A row that an exchange reads from and delivers to."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        ...

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what crosses of spans, a payload (bytes) for each; it stays until delivered."""
        ...

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:
        """Take the mean of elements ``start`` to ``stop``; ``sent`` is what crossed of them."""
        ...


@runtime_checkable
class StagedBuffer(ReduceBuffer, Protocol):
    """A row on a device, of which copies of what crosses lie on the host."""

    def outgoing(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what `payloads` does, on the host."""
        ...


@runtime_checkable
class OverlappedBuffer(ReduceBuffer, Protocol):
    """A row of which what crosses may be encoded while what is before it crosses."""

    @property
    def progress(self) -> "EncodeProgress":
        """How far that is."""
        ...


@dataclass(slots=True)
class EncodeProgress:
    """How far what crosses of a row is encoded: from one thread to another.

    Attributes:
        until: Element before which all is; infinity: all, NaN: that was broken off.
        waited_seconds: For which the one that sends waited.
    """

    until: float = 0
    waited_seconds: float = 0.0

    def begin(self) -> None:
        """Say that nothing is encoded yet, and nobody waited."""
        self.until, self.waited_seconds = 0, 0.0

    def break_off(self) -> None:
        """Let nobody wait for what will not be encoded."""
        self.until = math.nan

    def ready(self, stop: int) -> bool:
        """Return whether what crosses of elements before ``stop`` is there."""
        if math.isnan(self.until):
            raise ExchangeError("what an exchange carries must be encoded, but that was broken off")
        return stop <= self.until


class Row:
    """A plain row of numbers, which cross as they are and are replaced by their mean.

    Args:
        flat: The row (numel), on the CPU.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.dtype = flat.dtype

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the numbers as they lie there."""
        assert codec.exact, "a plain row has nowhere to keep what a wire rounds away"
        return [self.flat[start:stop].view(torch.uint8) for start, stop in spans]

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:  # noqa: ARG002
        """Write the mean in place."""
        self.flat[start:stop].copy_(mean)


class SendBuffer:
    """Memory for what crosses of a row: a payload for each span.

    Args:
        device: Where the row lies.
    """

    codec: Codec

    def __init__(self, device: torch.device = CPU) -> None:
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self.memory = self._own  # all payloads, in order (bytes)
        self.progress = EncodeProgress()
        self._payloads: dict[tuple[int, int], torch.Tensor] = {}

    def open(
        self, codec: Codec, spans: Spans, memory: torch.Tensor | None = None
    ) -> Sequence[torch.Tensor]:
        """Forget what was there, and return memory for spans."""
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        if memory is None:
            if self._own.numel() < sum(sizes):
                self._own = self._own.new_empty(sum(sizes))
            memory = self._own
        self.memory = memory[: sum(sizes)]
        found = torch.split(self.memory, sizes)
        self._payloads = {(a, b): one for (a, b), one in zip(spans, found, strict=True)}
        self.codec = codec
        return found

    def release(self) -> None:
        """Forget what was there, and give the memory back until `open`."""
        self.memory = self._own = self._own.new_empty(0)
        self._payloads = {}

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was written for spans, all of them among those of `open`."""
        return [self._payloads[start, stop] for start, stop in spans]

    def items(self) -> Iterable[tuple[tuple[int, int], torch.Tensor]]:
        """Return all spans, in order, and their payloads."""
        return self._payloads.items()


class BufferPool:
    """Rows that are kept from exchange to exchange, because new memory costs more than the sum.

    Args:
        window: Chunks that are under way at most.
        device: Where rows lie.
        memory: Makes them, of so many bytes; None: torch.
    """

    def __init__(
        self,
        window: int = 1,
        device: torch.device = CPU,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.window, self.device, self._memory = window, device, memory
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def row(self, name: str, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for chunk ``index``."""
        key = (f"{name} {dtype}", index % self.window)
        if key not in self._rows or self._rows[key].numel() < numel:
            self._rows[key] = self._make(numel, dtype)
        return self._rows[key][:numel]

    def _make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is not None:
            return self._memory(numel * dtype.itemsize).view(dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def room(self, dtype: torch.dtype, numel: int = PIECE) -> torch.Tensor:
        """Return memory to work in (numel)."""
        return self.row("room", 0, numel, dtype)


class Terms(NamedTuple):
    """How versions are added that are not the ranks' own.

    Args:
        weights: Of each version.
        total: What their sum is divided by.
        level: On which the sum is rounded, from 1; 0: it is the mean.
    """

    weights: Sequence[int]
    total: int
    level: int = 0


class WeightedMean:
    """Adds the ranks' versions of a part, and rounds the mean for the wire.

    Args:
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part.
        device: Where is added.
        piece: Numbers that are added at a time, a multiple of `PIECE`.
        of_gradients: What was rounded away waits as `encode_gradients` says.
    """

    def __init__(
        self,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        device: torch.device = CPU,
        piece: int = PIECE,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.codec, self.weights, self.total = codec, tuple(weights), total
        self._of_gradients = of_gradients
        self.rounded, self.device, self.piece = rounded, device, piece
        self._buffer = BufferPool(device=device).row
        self._terms = Terms(self.weights, total)

    def add(
        self,
        versions: Sequence[torch.Tensor],
        payload: torch.Tensor,
        span: tuple[int, int],
        dtype: torch.dtype,
        *,
        within: tuple[int, int] | None = None,
        terms: Terms | None = None,
    ) -> None:
        """Write the weighted mean of a part, added in rank order, for the wire.

        What is rounded away goes into the next mean. Versions are of the part, or of one within
        which it begins at a number that every codec can begin at.
        """
        codec, start, numel = self.codec, span[0], span[1] - span[0]
        if not numel:
            return
        first, stop = within or span
        at, whole_numel, terms = start - first, stop - first, terms or self._terms
        key = start + terms.level * LEVEL
        rounded = self.rounded.get(key)
        if not codec.exact and (rounded is None or len(rounded) != numel):  # or cut anew
            rounded = torch.zeros(numel, dtype=dtype, device=self.device)
            self.rounded[key] = rounded
        for a, b in pieces(numel, self.piece):
            fields_of = [codec.fields(one, whole_numel, at + a, at + b) for one in versions]
            mean = self.mean(fields_of, b - a, dtype, terms)
            fields = codec.fields(payload, numel, a, b)
            if rounded is not None and self._of_gradients:
                encode_gradients(codec, mean, rounded[a:b], fields)
                continue
            if rounded is not None:
                mean += rounded[a:b]
            codec.encode(mean, fields)
            if rounded is not None:
                codec.decode(fields, rounded[a:b])
                torch.sub(mean, rounded[a:b], out=rounded[a:b])

    def mean(
        self,
        versions: Sequence[Fields],
        numel: int,
        dtype: torch.dtype,
        terms: Terms | None = None,
    ) -> torch.Tensor:
        """Return the weighted mean of a piece, added in rank order."""
        terms = terms or self._terms
        total, term = (self._buffer(name, 0, numel, dtype) for name in ("sum", "term"))
        for rank, weight in enumerate(terms.weights):
            out = total if rank == 0 else term
            self.codec.decode(versions[rank], out)
            if weight != 1:
                out *= weight
            if rank > 0:
                total += term
        return total if terms.total == 1 else divide_(total, terms.total)


def in_process(sources: Sequence[ReduceBuffer], adder: WeightedMean, chunks: Chunks) -> int:
    """Do what `deterministic_allreduce` does between ranks, for rows all in this process."""
    nbytes, peers, codec = 0, len(sources), adder.codec
    for spans in chunks:
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        payloads = [source.payloads(codec, spans) for source in sources]
        if peers == 2:
            versions = [one[0].clone() for one in payloads]  # a row's own memory is written below
            for source, own in zip(sources, versions, strict=True):
                add_and_deliver(adder, versions, source, spans[0], own)
            nbytes += 2 * sum(sizes)
            continue
        means = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for owner, span in enumerate(spans):
            adder.add([one[owner] for one in payloads], means[owner], span, sources[0].dtype)
        for source, sent in zip(sources, payloads, strict=True):
            deliver(codec, means, source, spans, sent)
        nbytes += 2 * (peers - 1) * sum(sizes)
    return nbytes


def whole(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the span of a chunk."""
    return parts[0][0], parts[-1][1]


def deliver(
    codec: Codec,
    means: Sequence[torch.Tensor],
    source: ReduceBuffer,
    spans: Spans,
    sent: Sequence[torch.Tensor],
    room: torch.Tensor | None = None,
    piece: int = PIECE,
) -> None:
    """Give a row the mean of a chunk."""
    row = torch.empty(piece, dtype=source.dtype, device="cpu") if room is None else room
    for (start, stop), one, own in zip(spans, means, sent, strict=True):
        for a, b in pieces(stop - start, piece):
            codec.decode(codec.fields(one, stop - start, a, b), row[: b - a])
            fields = codec.fields(own, stop - start, a, b)
            source.deliver(start + a, start + b, row[: b - a], fields)


def add_and_deliver(
    adder: WeightedMean,
    versions: Sequence[torch.Tensor],
    source: ReduceBuffer,
    span: tuple[int, int],
    sent: torch.Tensor,
    terms: Terms | None = None,
) -> None:
    """Give a row the mean of what all ranks sent of a span."""
    codec, start, numel = adder.codec, span[0], span[1] - span[0]
    for a, b in pieces(numel, adder.piece):
        fields = [codec.fields(one, numel, a, b) for one in versions]
        mean = adder.mean(fields, b - a, accumulator(source.dtype), terms)
        source.deliver(start + a, start + b, mean, codec.fields(sent, numel, a, b))
