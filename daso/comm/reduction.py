"""Buffers that an all-reduce reads and delivers to, and the weighted mean that it computes.

`in_process` does with them what `deterministic_allreduce` does between ranks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec
from daso.kernels.rows import Mean

__all__ = [
    "CPU",
    "BufferPool",
    "Chunks",
    "ReduceBuffer",
    "Row",
    "SendBuffer",
    "Spans",
    "StagedBuffer",
    "Terms",
    "WeightedMean",
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

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the encoded payload (bytes) of each span; it stays until delivered."""
        ...

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:
        """Take the mean of elements ``start`` to ``stop``, of which ``sent`` is the own payload."""
        ...


@runtime_checkable
class StagedBuffer(ReduceBuffer, Protocol):
    """A row on a device, whose payloads have copies on the host."""

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what `payloads` does, on the host."""
        ...


class Row:
    """A plain row of numbers, which are sent as they are and are replaced by their mean.

    Args:
        flat: The row (numel), on the CPU.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.dtype = flat.dtype

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return each span's raw bytes."""
        return [self.flat[start:stop].view(torch.uint8) for start, stop in spans]

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:  # noqa: ARG002
        """Write the mean in place."""
        assert mean.codec.exact, "a plain row has nowhere to keep what a wire rounds away"
        kernels_for(self.flat.device).reduce(mean, stop - start, row=self.flat[start:stop])


class SendBuffer:
    """Memory for the payloads of a row: one for each span.

    Args:
        device: Where the row lies.
    """

    codec: Codec

    def __init__(self, device: torch.device = CPU) -> None:
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self.memory = self._own  # all payloads, in order (bytes)
        self._payloads: dict[tuple[int, int], torch.Tensor] = {}

    def open(self, codec: Codec, spans: Spans, memory: torch.Tensor | None = None) -> None:
        """Make memory for the payloads of spans; earlier payloads are gone."""
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        if memory is None:
            if self._own.numel() < sum(sizes):
                self._own = self._own.new_empty(sum(sizes))
            memory = self._own
        self.memory = memory[: sum(sizes)]
        payloads = torch.split(self.memory, sizes)
        self._payloads = {(a, b): one for (a, b), one in zip(spans, payloads, strict=True)}
        self.codec = codec

    def release(self) -> None:
        """Release the memory until `open`."""
        self.memory = self._own = self._own.new_empty(0)
        self._payloads = {}

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the payloads of spans, which must be among those of `open`."""
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


class Terms(NamedTuple):
    """Weights and divisor of versions that are partial sums.

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
        codec: Layout of payloads.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part.
        device: Where is added.
        of_gradients: What was rounded away waits, as in `daso.kernels.torch_kernels.encode`.
    """

    def __init__(
        self,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        device: torch.device = CPU,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.codec, self.weights, self.total = codec, tuple(weights), total
        self.rounded, self.device = rounded, device
        self._of_gradients, self.kernels = of_gradients, kernels_for(device)

    def mean(self, versions: Sequence[torch.Tensor], terms: Terms | None = None) -> Mean:
        """Return the mean of all ranks' payloads of a span, to be computed where it is used."""
        if terms is None:
            return Mean(self.codec, versions, self.weights, self.total)
        return Mean(self.codec, versions, terms.weights, terms.total)

    def add(
        self,
        versions: Sequence[torch.Tensor],
        payload: torch.Tensor,
        span: tuple[int, int],
        *,
        within: tuple[int, int] | None = None,
        terms: Terms | None = None,
    ) -> None:
        """Write the weighted mean of a part, added in rank order, for the wire.

        What is rounded away goes into the next mean. Versions are of the part, or of one within
        which it begins at a number that every codec can begin at.
        """
        start, numel = span[0], span[1] - span[0]
        if not numel:
            return
        mean = self.mean(versions, terms)
        if within is not None:
            mean = mean.part(start - within[0], span[1] - within[0])
        key = start + (terms.level if terms else 0) * LEVEL
        self.kernels.reduce(
            mean,
            numel,
            payload=payload,
            carry=self._carry(key, numel),
            gradients=self._of_gradients,
        )

    def _carry(self, key: int, numel: int) -> torch.Tensor | None:
        """Return the rounding errors of earlier means of a part; zeros where the cut changed.

        An exact codec rounds nothing, but sends what a sparse one has held back.
        """
        rounded = self.rounded.get(key)
        if not self.codec.exact and (rounded is None or len(rounded) != numel):
            rounded = torch.zeros(numel, dtype=self.codec.row, device=self.device)
            self.rounded[key] = rounded
        return rounded


def in_process(sources: Sequence[ReduceBuffer], adder: WeightedMean, chunks: Chunks) -> int:
    """Do what `deterministic_allreduce` does between ranks, for rows all in this process."""
    nbytes, peers, codec = 0, len(sources), adder.codec
    for spans in chunks:
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        payloads = [source.payloads(spans) for source in sources]
        if peers == 2:
            versions = [one[0].clone() for one in payloads]  # a row's own memory is written below
            for source, own in zip(sources, versions, strict=True):
                source.deliver(*spans[0], adder.mean(versions), own)
            nbytes += 2 * sum(sizes)
            continue
        means = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for owner, span in enumerate(spans):
            adder.add([one[owner] for one in payloads], means[owner], span)
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
) -> None:
    """Give a row the mean of a chunk."""
    for (start, stop), one, own in zip(spans, means, sent, strict=True):
        source.deliver(start, stop, Mean(codec, [one]), own)
