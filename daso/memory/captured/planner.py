"""Offsets of memory blocks with known lifetimes in one arena.

Blocks with overlapping lifetimes must not overlap in memory; the arena's size depends on their
placement. Optimal placement (dynamic storage allocation) is NP-complete; the heuristics here are
close to a lower bound, which is reported.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from daso.errors import ConfigError
from daso.plan.layout import ALIGNMENT

EXACT_MOST = 10  # maximum number of blocks for way exact


class Block(NamedTuple):
    """Memory with a lifetime.

    Args:
        nbytes: Size in bytes.
        begin: First step in which it is needed.
        end: Step after the last in which it is needed.
    """

    nbytes: int
    begin: int
    end: int

    def overlaps(self, other: "Block") -> bool:
        """Return whether both are needed in some step."""
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets of blocks in an arena.

    Args:
        offsets: Offset of each block, in bytes.
        nbytes: Size of the arena.
        bound: Lower bound of the size: most bytes needed in one step.
        way: Name of the heuristic that found it, of `WAYS`.
    """

    offsets: tuple[int, ...]
    nbytes: int
    bound: int
    way: str


def pack(blocks: Sequence[Block], way: str = "best", *, alignment: int = ALIGNMENT) -> Arena:
    """Place blocks in an arena, by one heuristic or the best of all."""
    _check(blocks, way)
    sized = [block._replace(nbytes=-(-block.nbytes // alignment)) for block in blocks]
    bound = lower_bound(sized)
    best: tuple[int, str, list[int]] | None = None
    for name in [name for name in WAYS if name != "exact"] if way == "best" else [way]:
        offsets = WAYS[name](sized)
        size = _size(sized, offsets)
        if best is None or size < best[0]:
            best = size, name, offsets
        if size == bound:
            break
    assert best is not None
    size, name, offsets = best
    where = tuple(offset * alignment for offset in offsets)
    return Arena(where, size * alignment, bound * alignment, name)


def _check(blocks: Sequence[Block], way: str) -> None:
    if way != "best" and way not in WAYS:
        raise ConfigError(
            f"way must be best, {', '.join(WAYS)}, not {way!r}", code="unknown-packing-way"
        )
    for block in blocks:
        if block.nbytes < 0 or block.begin >= block.end:
            raise ConfigError(
                f"a block must have a size of at least 0, and end after it begins, not {block}",
                code="block-without-extent",
            )
    if way == "exact" and len(blocks) > EXACT_MOST:
        raise ConfigError(
            f"way exact can place at most {EXACT_MOST} blocks, not {len(blocks)}; use another way",
            code="too-many-blocks",
        )


def lower_bound(blocks: Sequence[Block]) -> int:
    """Return the most bytes that are needed in one step."""
    changes = sorted(
        change
        for nbytes, begin, end in blocks
        for change in ((begin, 1, nbytes), (end, 0, -nbytes))
    )
    most = now = 0
    for _, _, nbytes in changes:
        now += nbytes
        most = max(most, now)
    return most


def _by_size(blocks: Sequence[Block]) -> list[int]:
    """Return the indices of blocks, the largest first; ties by begin."""
    return sorted(
        range(len(blocks)), key=lambda index: (-blocks[index].nbytes, blocks[index].begin, index)
    )


def _size(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((at + block.nbytes for block, at in zip(blocks, offsets, strict=True)), default=0)


# --- segments that blocks share -------------------------------------------------------------------


def segments(blocks: Sequence[Block]) -> list[list[tuple[int, int]]]:
    """Group blocks into segments that share memory; return blocks and offsets of each segment.

    The largest block owns a segment. Blocks that do not overlap its lifetime share its memory, side
    by side. Their parts are shared in the same way with further blocks (US10782897B2, claim 1,
    repeated).
    """
    left = _by_size(blocks)
    result = []
    while left:
        owner, left = left[0], left[1:]
        segment = [(owner, 0)]
        parts = deque([_Part(0, blocks[owner].nbytes, (blocks[owner][1:],))])
        while parts:
            left = _fill(blocks, left, parts.popleft(), parts, segment)
        result.append(segment)
    return result


class _Part(NamedTuple):
    """A part of a segment's memory.

    Args:
        start: First offset.
        stop: End offset, exclusive.
        busy: Lifetimes of the blocks that use it, sorted and disjoint.
    """

    start: int
    stop: int
    busy: tuple[tuple[int, int], ...]

    def is_free(self, block: Block) -> bool:
        """Return whether no block uses it during the lifetime of another block."""
        after = bisect_left(self.busy, (block.end, block.end))
        return after == 0 or self.busy[after - 1][1] <= block.begin


def _fill(
    blocks: Sequence[Block],
    left: Sequence[int],
    part: _Part,
    parts: deque[_Part],
    segment: list[tuple[int, int]],
) -> list[int]:
    """Place blocks side by side in a part, each as a new part; return the remaining ones."""
    at, others = part.start, []
    for index in left:
        block = blocks[index]
        if at + block.nbytes > part.stop or not part.is_free(block):
            others.append(index)
            continue
        segment.append((index, at))
        busy = tuple(sorted((*part.busy, block[1:])))
        parts.append(_Part(at, at + block.nbytes, busy))
        at += block.nbytes
    return others


def _greedy(blocks: Sequence[Block]) -> list[int]:
    offsets, at = [0] * len(blocks), 0
    for segment in segments(blocks):
        for index, offset in segment:
            offsets[index] = at + offset
        at += blocks[segment[0][0]].nbytes
    return offsets


# --- one after the other --------------------------------------------------------------------------


def _lowest(blocks: Sequence[Block], offsets: Mapping[int, int], index: int, *, tight: bool) -> int:
    """Return the lowest (or tightest) free offset for a block among the placed ones."""
    block = blocks[index]
    spans = sorted(
        (at, at + blocks[o].nbytes) for o, at in offsets.items() if blocks[o].overlaps(block)
    )
    best: tuple[int, int] | None = None
    at = 0
    for begin, end in spans:
        gap = begin - at
        if gap >= block.nbytes and (best is None or (tight and gap < best[0])):
            best = gap, at
        at = max(at, end)
    return at if best is None else best[1]


def _in_order(blocks: Sequence[Block], order: Sequence[int], *, tight: bool) -> list[int]:
    offsets: dict[int, int] = {}
    for index in order:
        offsets[index] = _lowest(blocks, offsets, index, tight=tight)
    return [offsets[index] for index in range(len(blocks))]


def _greedy_size(blocks: Sequence[Block]) -> list[int]:
    """Largest first, each into the tightest gap (Pisarchyk and Lee, arXiv 2001.03288)."""
    order = sorted(
        range(len(blocks)), key=lambda index: (-blocks[index].nbytes, blocks[index].begin, index)
    )
    return _in_order(blocks, order, tight=True)


class _Line(NamedTuple):
    """Height of used memory during some steps."""

    begin: int
    end: int
    height: int


def _best_fit(blocks: Sequence[Block]) -> list[int]:
    """Place the longest-lived block at the lowest offset (Sekiyama et al., arXiv 1804.10001)."""
    offsets, left = [0] * len(blocks), set(range(len(blocks)))
    begin = min((block.begin for block in blocks), default=0)
    lines = [_Line(begin, max((block.end for block in blocks), default=0), 0)]
    while left:
        where = min(range(len(lines)), key=lambda index: (lines[index].height, lines[index].begin))
        line = lines[where]
        fitting = [
            index
            for index in left
            if line.begin <= blocks[index].begin and blocks[index].end <= line.end
        ]
        if not fitting:
            lines = _lifted(lines, where)
            continue
        index = max(fitting, key=lambda o: (blocks[o].end - blocks[o].begin, blocks[o].nbytes, -o))
        left.remove(index)
        offsets[index] = line.height
        begin, end = blocks[index].begin, blocks[index].end
        parts = [
            _Line(line.begin, begin, line.height),
            _Line(begin, end, line.height + blocks[index].nbytes),
            _Line(end, line.end, line.height),
        ]
        lines[where : where + 1] = [part for part in parts if part.begin < part.end]
    return offsets


def _lifted(lines: list[_Line], where: int) -> list[_Line]:
    """Raise a line that no block fits to the lower of its neighbours, and join them."""
    neighbours = [lines[at].height for at in (where - 1, where + 1) if 0 <= at < len(lines)]
    raised = [*lines]
    raised[where] = lines[where]._replace(height=min(neighbours))
    joined: list[_Line] = []
    for line in raised:
        if joined and joined[-1].height == line.height:
            joined[-1] = joined[-1]._replace(end=line.end)
        else:
            joined.append(line)
    return joined


# --- all orders -----------------------------------------------------------------------------------


def _exact(blocks: Sequence[Block]) -> list[int]:
    """Try all orders, each block at its lowest offset; this includes an optimal order."""
    bound = lower_bound(blocks)
    best = _greedy_size(blocks)
    while (size := _size(blocks, best)) > bound:
        better = _better(blocks, {}, size, 0)
        if better is None:
            break
        best = better
    return best


def _better(
    blocks: Sequence[Block], offsets: dict[int, int], size: int, last: int
) -> list[int] | None:
    """Return offsets with a smaller total than a size; None if none exist."""
    if len(offsets) == len(blocks):
        return [offsets[index] for index in range(len(blocks))]
    tried: set[Block] = set()
    for index, block in enumerate(blocks):
        if index in offsets or block in tried:
            continue
        tried.add(block)
        at = _lowest(blocks, offsets, index, tight=False)
        if last <= at and at + block.nbytes < size:
            result = _better(blocks, {**offsets, index: at}, size, at)
            if result is not None:
                return result
    return None


WAYS: Mapping[str, Callable[[Sequence[Block]], list[int]]] = {
    "greedy": _greedy,
    "greedy_size": _greedy_size,
    "best_fit": _best_fit,
    "exact": _exact,
}
