"""Layout of tensors in flat buffers: the only offset arithmetic in the project.

A `Layout` lists consecutive tensors in one flat buffer. A `Span` is a part of such a buffer. All
other functions cut buffers into spans, or find the tensors of a span.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, takewhile
from math import prod
from typing import NamedTuple

ALIGNMENT = 8  # bytes: of each tensor in a message
SMALL_SHARE = 16  # all small tensors together have at most 1/16 of all numbers
LAST_BUCKET_BYTES = 1 << 20  # the last buckets are halved down to this size
MIN_BUCKET_BYTES = 64 << 10  # in front of the last layer, for which it is split off


class Span(NamedTuple):
    """A range of elements in a flat buffer: from ``start`` up to, not including, ``stop``."""

    start: int  # elements
    stop: int  # elements

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of a layout: its name, shape, strides and dtype."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements; ranks with different strides would mix up elements
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Consecutive tensors in one flat buffer."""

    slots: tuple[Slot, ...]

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The end of each slot, in order."""
        return tuple(accumulate(slot.numel for slot in self.slots))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of each slot, in order."""
        return tuple(
            Span(stop - slot.numel, stop) for slot, stop in zip(self.slots, self.stops, strict=True)
        )

    @property
    def numel(self) -> int:
        """Number of elements of the buffer."""
        return self.spans[-1].stop if self.spans else 0

    @cached_property
    def digest(self) -> int:
        """48-bit hash of all names, shapes, strides, dtypes and their order.

        48 bits, because a float64 header must hold the number exactly.
        """
        return int.from_bytes(hashlib.sha256(repr(self.slots).encode()).digest()[:6], "big")

    def slot_at(self, index: int) -> int:
        """Return the index of the tensor that holds element ``index`` of the buffer."""
        for slot, span in enumerate(self.spans):
            if span.start <= index < span.stop:
                return slot
        raise IndexError(f"element {index} is outside this layout of {self.numel} elements")

    def name_at(self, index: int) -> str:
        """Return the name of the tensor that holds element ``index`` of the buffer."""
        return self.slots[self.slot_at(index)].name

    def element_of(self, part: "Layout", index: int) -> int:
        """Return an element of the tensor that holds element ``index`` of a layout of parts."""
        slot = part.slot_at(index)
        return self.spans[slot].start + index - part.spans[slot].start


class Piece(NamedTuple):
    """The part of one tensor in a span."""

    slot: int  # index of the tensor in the layout
    inside: Span  # elements of the flattened tensor
    at: Span  # elements relative to the start of the span


def lay_out(slots: Sequence[Slot]) -> Layout:
    """Return the layout of consecutive ``slots``."""
    return Layout(tuple(slots))


def first_difference(layout: Layout, other: Layout) -> str | None:
    """Return the first difference of two layouts, or None if they are equal."""
    for a, b in zip(layout.slots, other.slots, strict=False):
        if a != b:
            return f"{_describe(a)} against {_describe(b)}"
    if len(layout.slots) != len(other.slots):
        return f"{len(layout.slots)} parameters against {len(other.slots)}"
    return None


def _describe(slot: Slot) -> str:
    return f"{slot.name} {slot.shape} {slot.dtype} strides {slot.strides}"


@lru_cache(maxsize=4096)  # called for every bucket at every step
def split(span: Span | int, parts: int, even: int = 1) -> tuple[Span, ...]:
    """Cut a span into ``parts`` contiguous spans whose sizes differ by at most one element."""
    start, stop = (0, span) if isinstance(span, int) else span
    size, longer = divmod(-(-(stop - start) // even), parts)
    cuts = [min(stop, start + even * (i * size + min(i, longer))) for i in range(parts + 1)]
    return tuple(Span(a, b) for a, b in pairwise(cuts))


def split_by(span: Span, shares: Sequence[int], even: int = 1) -> tuple[Span, ...]:
    """Cut a span into contiguous spans with sizes proportional to ``shares``."""
    start, stop = span
    units, total = -(-(stop - start) // even), sum(shares)
    ends = [units * until // total for until in accumulate(shares, initial=0)]
    cuts = [min(stop, start + even * end) for end in ends]
    return tuple(Span(a, b) for a, b in pairwise(cuts))


def chunk_parts(
    numel: int, parts: int, chunk: int, even: int = 1, shares: Sequence[int] = ()
) -> tuple[tuple[Span, ...], ...]:
    """Cut a buffer into chunks, and each chunk into one part per peer, equal without shares."""
    count = -(-numel // max(chunk, 1))
    if not count:
        return ()
    return tuple(
        split_by(piece, shares, even) if shares else split(piece, parts, even)
        for piece in split(numel, count, even)
    )


def pieces(layout: Layout, span: Span) -> Iterator[Piece]:
    """Yield the parts of tensors in a span of the buffer, in order."""
    for index in range(bisect_right(layout.stops, span.start), len(layout.spans)):
        slot = layout.spans[index]
        if slot.start >= span.stop:
            return
        start, stop = max(slot.start, span.start), min(slot.stop, span.stop)
        if start < stop:
            yield Piece(
                index,
                Span(start - slot.start, stop - slot.start),
                Span(start - span.start, stop - span.start),
            )


def small_tensors(numels: Sequence[int]) -> list[int]:
    """Return the indices of small tensors, which together have at most 1/16 of all numbers."""
    total, small = 0, set()
    for numel in sorted(set(numels)):
        total += numel * numels.count(numel)
        if total > sum(numels) // SMALL_SHARE:
            break
        small.add(numel)
    return [index for index, numel in enumerate(numels) if numel in small]


def fragments(numels: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Group consecutive tensors into fragments of about the same size."""
    total = max(1, sum(numels))
    groups: list[list[int]] = [[] for _ in range(count)]
    start = 0
    for index, numel in enumerate(numels):
        middle = 2 * start + numel
        groups[min(count - 1, middle * count // (2 * total))].append(index)
        start += numel
    return tuple(map(tuple, groups))


def flagged(numels: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of consecutive tensors, each followed by one number: its flag."""
    stops = accumulate(numel + 1 for numel in numels)
    return tuple(
        Span(stop - 1 - numel, stop - 1) for numel, stop in zip(numels, stops, strict=True)
    )


def last_layer(names: Sequence[str]) -> int:
    """Return the number of tensors of the last module, in the order of readiness."""
    modules = [name.rpartition(".")[0] for name in reversed(names)]
    return sum(1 for _ in takewhile(lambda module: module == modules[0], modules))


def fit_buckets(
    nbytes: Sequence[int], capacity: int, *, last: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Group tensors, in the order given, into buckets of about ``capacity`` bytes.

    A bucket is closed by the tensor that fills it, so that no tensor is cut, and a tensor larger
    than the capacity closes its bucket alone or with earlier tensors. The last buckets get smaller,
    down to half of the remaining bytes and 1 MiB, so that less is left to average when backward
    ends.

    The average of the last layer cannot overlap with backward. So it shares no bucket with layers
    that could be averaged while its gradient is computed (after US 11164079 B2, whose chunks are of
    layers "other than a last layer"), unless these are too small for a bucket.

    Args:
        nbytes: Of each tensor, in the order of readiness of gradients.
        capacity: Bytes of a full bucket.
        last: Number of tensors of the last layer; 0: no layer is split off.
    """
    buckets = _filled(nbytes, capacity)
    first = len(nbytes) - last
    return tuple(
        part
        for bucket in buckets
        for part in _without_last(
            bucket, first, sum(nbytes[index] for index in bucket if index < first)
        )
    )


def _without_last(bucket: tuple[int, ...], first: int, before: int) -> list[tuple[int, ...]]:
    """Cut a bucket before the last layer if ``before`` bytes are enough for a bucket."""
    parts = [
        tuple(index for index in bucket if index < first),
        tuple(index for index in bucket if index >= first),
    ]
    return parts if before >= MIN_BUCKET_BYTES and all(parts) else [bucket]


def _filled(nbytes: Sequence[int], capacity: int) -> tuple[tuple[int, ...], ...]:
    buckets: list[tuple[int, ...]] = []
    filling: list[int] = []
    filled, left = 0, sum(nbytes)
    for index, size in enumerate(nbytes):
        filling.append(index)
        filled += size
        if filled >= min(capacity, max(LAST_BUCKET_BYTES, left // 2)):
            buckets.append(tuple(filling))
            filling, filled, left = [], 0, left - filled
    if filling:
        buckets.append(tuple(filling))
    return tuple(buckets)


def aligned(nbytes: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of consecutive tensors in a message, each aligned for its dtype."""
    sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in nbytes]
    starts = accumulate(sizes, initial=0)
    return tuple(Span(at, at + size) for at, size in zip(starts, nbytes, strict=False))
