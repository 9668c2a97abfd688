"""Where every tensor lies in a flat buffer: the only offset arithmetic in the project.

A `Layout` lists tensors one after the other in one flat row of elements. A `Span` is a part of such
a row. Everything else here cuts rows into spans and finds which tensors a span touches.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, takewhile
from math import prod
from typing import NamedTuple

__all__ = [
    "LEAST_BUCKET_BYTES",
    "Layout",
    "Piece",
    "Slot",
    "Span",
    "aligned",
    "chunk_parts",
    "first_difference",
    "fit_buckets",
    "flagged",
    "fragments",
    "last_layer",
    "lay_out",
    "pieces",
    "small_tensors",
    "split",
]


ALIGNMENT = 8  # bytes: of every tensor in a message
SMALL_SHARE = 16  # small tensors are together at most one of so many numbers
LAST_BUCKET_BYTES = 1 << 20  # down to which the last buckets are halved
LEAST_BUCKET_BYTES = 64 << 10  # for the sake of which the last layer goes by itself


class Span(NamedTuple):
    """A run of elements in a flat row: from ``start`` up to, not including, ``stop``."""

    start: int  # elements
    stop: int  # elements

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a row: what it is, and how many elements it takes."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[
        int, ...
    ]  # elements; two ranks with different strides would exchange other cells
    dtype: str

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty tensor."""
        return prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Tensors one after the other in one flat row."""

    slots: tuple[Slot, ...]

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """Where each slot ends, in order."""
        return tuple(accumulate(slot.numel for slot in self.slots))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The span of each slot, in order."""
        return tuple(
            Span(stop - slot.numel, stop) for slot, stop in zip(self.slots, self.stops, strict=True)
        )

    @property
    def numel(self) -> int:
        """Elements in the whole row."""
        return self.spans[-1].stop if self.spans else 0

    @cached_property
    def digest(self) -> int:
        """48 bits that differ when any name, shape, stride, dtype or the order differs.

        48 bits, because the number travels in a float64 header and must survive there exactly.
        """
        return int.from_bytes(hashlib.sha256(repr(self.slots).encode()).digest()[:6], "big")

    def slot_at(self, index: int) -> int:
        """Return the index of the tensor that holds element ``index`` of the row."""
        for slot, span in enumerate(self.spans):
            if span.start <= index < span.stop:
                return slot
        raise IndexError(f"element {index} is outside this layout of {self.numel} elements")

    def name_at(self, index: int) -> str:
        """Return the name of the tensor that holds element ``index`` of the row."""
        return self.slots[self.slot_at(index)].name

    def element_of(self, part: "Layout", index: int) -> int:
        """Return an element of the same tensor as element ``index`` of a row of parts of these."""
        slot = part.slot_at(index)
        return self.spans[slot].start + index - part.spans[slot].start


class Piece(NamedTuple):
    """The part of one tensor that lies in a span."""

    slot: int  # index of the tensor in the layout
    inside: Span  # elements of the flattened tensor
    at: Span  # elements counted from the start of the span asked for


def lay_out(slots: Sequence[Slot]) -> Layout:
    """Put ``slots`` one after the other."""
    return Layout(tuple(slots))


def first_difference(mine: Layout, other: Layout) -> str | None:
    """Say where two layouts differ first, or None when they agree."""
    for a, b in zip(mine.slots, other.slots, strict=False):
        if a != b:
            return f"{_describe(a)} against {_describe(b)}"
    if len(mine.slots) != len(other.slots):
        return f"{len(mine.slots)} parameters against {len(other.slots)}"
    return None


def _describe(slot: Slot) -> str:
    return f"{slot.name} {slot.shape} {slot.dtype} strides {slot.strides}"


@lru_cache(maxsize=4096)  # asked of every bucket at every step
def split(span: Span | int, parts: int, even: int = 1) -> tuple[Span, ...]:
    """Cut a span into ``parts`` contiguous spans whose sizes differ by at most one element."""
    start, stop = (0, span) if isinstance(span, int) else span
    size, longer = divmod(-(-(stop - start) // even), parts)
    cuts = [min(stop, start + even * (i * size + min(i, longer))) for i in range(parts + 1)]
    return tuple(Span(a, b) for a, b in pairwise(cuts))


def split_by(span: Span, shares: Sequence[int], even: int = 1) -> tuple[Span, ...]:
    """Cut a span into contiguous spans whose sizes are as ``shares``, to an element."""
    start, stop = span
    units, total = -(-(stop - start) // even), sum(shares)
    ends = [units * until // total for until in accumulate(shares, initial=0)]
    return tuple(Span(*(min(stop, start + even * end) for end in one)) for one in pairwise(ends))


def chunk_parts(
    numel: int, parts: int, chunk: int, even: int = 1, shares: Sequence[int] = ()
) -> tuple[tuple[Span, ...], ...]:
    """Cut a row into chunks and every chunk into one part per peer, equal unless shares tell."""
    count = -(-numel // max(chunk, 1))
    if not count:
        return ()
    return tuple(
        split_by(piece, shares, even) if shares else split(piece, parts, even)
        for piece in split(numel, count, even)
    )


def pieces(layout: Layout, span: Span) -> Iterator[Piece]:
    """List the parts of tensors that lie in a span of the row, in order."""
    for index in range(bisect_right(layout.stops, span.start), len(layout.spans)):
        there = layout.spans[index]
        if there.start >= span.stop:
            return
        start, stop = max(there.start, span.start), min(there.stop, span.stop)
        if start < stop:
            yield Piece(
                index,
                Span(start - there.start, stop - there.start),
                Span(start - span.start, stop - span.start),
            )


def small_tensors(numels: Sequence[int]) -> list[int]:
    """Return which tensors are small: with all of their sizes, a 16th of all numbers at most."""
    total, small = 0, set()
    for numel in sorted(set(numels)):
        total += numel * numels.count(numel)
        if total > sum(numels) // SMALL_SHARE:
            break
        small.add(numel)
    return [at for at, numel in enumerate(numels) if numel in small]


def fragments(numels: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """Group tensors that follow one another into fragments of about the same size."""
    total = max(1, sum(numels))
    groups: list[list[int]] = [[] for _ in range(count)]
    start = 0
    for index, numel in enumerate(numels):
        middle = 2 * start + numel
        groups[min(count - 1, middle * count // (2 * total))].append(index)
        start += numel
    return tuple(map(tuple, groups))


def flagged(numels: Sequence[int]) -> tuple[Span, ...]:
    """Put tensors one after the other, each with one number more behind it: its flag."""
    stops = accumulate(numel + 1 for numel in numels)
    return tuple(
        Span(stop - 1 - numel, stop - 1) for numel, stop in zip(numels, stops, strict=True)
    )


def last_layer(names: Sequence[str]) -> int:
    """Return how many of the last tensors, in the order of readiness, are of one module."""
    modules = [name.rpartition(".")[0] for name in reversed(names)]
    return sum(1 for _ in takewhile(lambda module: module == modules[0], modules))


def fit_buckets(
    nbytes: Sequence[int], capacity: int, *, last: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Group tensors, in the order given, into buckets of about ``capacity`` bytes.

    A bucket is closed by the tensor that fills it, so a tensor is never cut and one larger than
    the capacity closes its bucket alone or with what came before. The last buckets get smaller, to
    half of what is left and 1 MiB: less is still to be averaged when backward ends.

    The last layer has nothing to hide behind: backward ends with it. So it shares no bucket with
    layers that could leave while its gradient is computed (after US 11164079 B2, whose chunks are
    of layers "other than a last layer"), unless these are too little for a bucket.

    Args:
        nbytes: Of each tensor, in the order in which gradients become ready.
        capacity: Bytes from which a bucket counts as full.
        last: How many tensors at the end are the last layer's; 0: it is none by itself.
    """
    buckets = _filled(nbytes, capacity)
    first = len(nbytes) - last
    return tuple(
        part
        for bucket in buckets
        for part in _without_last(bucket, first, sum(nbytes[at] for at in bucket if at < first))
    )


def _without_last(bucket: tuple[int, ...], first: int, before: int) -> list[tuple[int, ...]]:
    """Cut a bucket before a tensor, where so many bytes come before it."""
    parts = [tuple(at for at in bucket if at < first), tuple(at for at in bucket if at >= first)]
    return parts if before >= LEAST_BUCKET_BYTES and all(parts) else [bucket]


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
    """Put tensors one after the other in a message, so that each can be read where it lies."""
    sizes = [-(-size // ALIGNMENT) * ALIGNMENT for size in nbytes]
    starts = accumulate(sizes, initial=0)
    return tuple(Span(at, at + size) for at, size in zip(starts, nbytes, strict=False))
