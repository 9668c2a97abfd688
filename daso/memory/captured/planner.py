"""Where blocks lie in one piece of memory, when it is known in advance how long each is needed.

Blocks that are needed at the same time must not overlap; how large the piece becomes depends on how
they are stacked. The best is hard to find (dynamic storage allocation is NP-complete); what is here
comes close, and says how close.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from daso.errors import ConfigError
from daso.plan.layout import ALIGNMENT

__all__ = ["EXACT_MOST", "WAYS", "Arena", "Block", "lower_bound", "pack", "segments"]

EXACT_MOST = 10  # blocks of which all orders are tried


class Block(NamedTuple):
    """Memory that is needed for some time.

    Args:
        nbytes: How much.
        begin: First step in which it is needed.
        end: First step in which it is not needed any more.
    """

    nbytes: int
    begin: int
    end: int

    def meets(self, other: "Block") -> bool:
        """Whether both are needed in some step."""
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class Arena:
    """Where blocks lie.

    Args:
        offsets: Of each block, in bytes.
        nbytes: Of the whole piece.
        bound: That no piece can be smaller than: what is needed at once, at most.
        way: Who found it.
    """

    offsets: tuple[int, ...]
    nbytes: int
    bound: int
    way: str


def pack(blocks: Sequence[Block], way: str = "best", *, alignment: int = ALIGNMENT) -> Arena:
    """Return where blocks lie in one piece of memory."""
    _check(blocks, way)
    sized = [block._replace(nbytes=-(-block.nbytes // alignment)) for block in blocks]
    bound = lower_bound(sized)
    found: tuple[int, str, list[int]] | None = None
    for name in [one for one in WAYS if one != "exact"] if way == "best" else [way]:
        offsets = WAYS[name](sized)
        size = _size(sized, offsets)
        if found is None or size < found[0]:
            found = size, name, offsets
        if size == bound:
            break
    assert found is not None
    size, name, offsets = found
    where = tuple(one * alignment for one in offsets)
    return Arena(where, size * alignment, bound * alignment, name)


def _check(blocks: Sequence[Block], way: str) -> None:
    if way != "best" and way not in WAYS:
        raise ConfigError(f"way must be best, {', '.join(WAYS)}, not {way!r}")
    for block in blocks:
        if block.nbytes < 0 or block.begin >= block.end:
            raise ConfigError(f"a block must have bytes, and end after it begins, not {block}")
    if way == "exact" and len(blocks) > EXACT_MOST:
        raise ConfigError(
            f"all orders can be tried of {EXACT_MOST} blocks at most, not of {len(blocks)}"
        )


def lower_bound(blocks: Sequence[Block]) -> int:
    """Return the bytes that are needed at once, at most."""
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
    """Return who is largest, and of these first."""
    return sorted(range(len(blocks)), key=lambda one: (-blocks[one].nbytes, blocks[one].begin, one))


def _size(blocks: Sequence[Block], offsets: Sequence[int]) -> int:
    return max((at + one.nbytes for one, at in zip(blocks, offsets, strict=True)), default=0)


# --- segments that blocks share -------------------------------------------------------------------


def segments(blocks: Sequence[Block]) -> list[list[tuple[int, int]]]:
    """Return who shares the memory of whom: blocks and offsets of each segment.

    The largest block owns a segment; blocks that are not needed while it is lie in it, side by side
    where they are needed at once, and of what they leave, and while they are not needed, others
    are given likewise (US10782897B2, claim 1, repeated).
    """
    left = _by_size(blocks)
    found = []
    while left:
        owner, left = left[0], left[1:]
        segment = [(owner, 0)]
        parts = deque([_Part(0, blocks[owner].nbytes, (blocks[owner][1:],))])
        while parts:
            left = _fill(blocks, left, parts.popleft(), parts, segment)
        found.append(segment)
    return found


class _Part(NamedTuple):
    """A part of a segment.

    Args:
        start: Where it begins.
        stop: Where it ends.
        taken: When it is needed already: begins and ends, in their order, none over another.
    """

    start: int
    stop: int
    taken: tuple[tuple[int, int], ...]

    def is_free(self, block: Block) -> bool:
        """Whether it is not needed while a block is."""
        after = bisect_left(self.taken, (block.end, block.end))
        return after == 0 or self.taken[after - 1][1] <= block.begin


def _fill(
    blocks: Sequence[Block],
    left: Sequence[int],
    part: _Part,
    parts: deque[_Part],
    segment: list[tuple[int, int]],
) -> list[int]:
    """Put blocks side by side into a part, each of which is a part then; return who is left."""
    at, others = part.start, []
    for one in left:
        block = blocks[one]
        if at + block.nbytes > part.stop or not part.is_free(block):
            others.append(one)
            continue
        segment.append((one, at))
        taken = tuple(sorted((*part.taken, block[1:])))
        parts.append(_Part(at, at + block.nbytes, taken))
        at += block.nbytes
    return others


def _greedy(blocks: Sequence[Block]) -> list[int]:
    offsets, at = [0] * len(blocks), 0
    for segment in segments(blocks):
        for one, offset in segment:
            offsets[one] = at + offset
        at += blocks[segment[0][0]].nbytes
    return offsets


# --- one after the other --------------------------------------------------------------------------


def _lowest(blocks: Sequence[Block], placed: Mapping[int, int], one: int, *, tight: bool) -> int:
    """Return where a block may lie beside those that are placed."""
    block = blocks[one]
    spans = sorted(
        (at, at + blocks[o].nbytes) for o, at in placed.items() if blocks[o].meets(block)
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
    placed: dict[int, int] = {}
    for one in order:
        placed[one] = _lowest(blocks, placed, one, tight=tight)
    return [placed[one] for one in range(len(blocks))]


def _greedy_size(blocks: Sequence[Block]) -> list[int]:
    """Largest first, each into the tightest gap (Pisarchyk and Lee, arXiv 2001.03288)."""
    order = sorted(
        range(len(blocks)), key=lambda one: (-blocks[one].nbytes, blocks[one].begin, one)
    )
    return _in_order(blocks, order, tight=True)


class _Line(NamedTuple):
    """How high memory is taken during some time."""

    begin: int
    end: int
    height: int


def _best_fit(blocks: Sequence[Block]) -> list[int]:
    """Fill the lowest place with what is needed longest (Sekiyama et al., arXiv 1804.10001)."""
    offsets, left = [0] * len(blocks), set(range(len(blocks)))
    begin = min((block.begin for block in blocks), default=0)
    lines = [_Line(begin, max((block.end for block in blocks), default=0), 0)]
    while left:
        where = min(range(len(lines)), key=lambda one: (lines[one].height, lines[one].begin))
        line = lines[where]
        fitting = [
            one for one in left if line.begin <= blocks[one].begin and blocks[one].end <= line.end
        ]
        if not fitting:
            lines = _lifted(lines, where)
            continue
        one = max(fitting, key=lambda o: (blocks[o].end - blocks[o].begin, blocks[o].nbytes, -o))
        left.remove(one)
        offsets[one] = line.height
        begin, end = blocks[one].begin, blocks[one].end
        parts = [
            _Line(line.begin, begin, line.height),
            _Line(begin, end, line.height + blocks[one].nbytes),
            _Line(end, line.end, line.height),
        ]
        lines[where : where + 1] = [part for part in parts if part.begin < part.end]
    return offsets


def _lifted(lines: list[_Line], where: int) -> list[_Line]:
    """Raise a line that nothing fits on to the lower of its neighbours, and join them."""
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
    """Try all orders, each block as low as may be: that of the best's offsets is among them."""
    bound = lower_bound(blocks)
    best = _greedy_size(blocks)
    while (size := _size(blocks, best)) > bound:
        better = _better(blocks, {}, size, 0)
        if better is None:
            break
        best = better
    return best


def _better(
    blocks: Sequence[Block], placed: dict[int, int], size: int, last: int
) -> list[int] | None:
    """Return offsets with which all need less than a size; None if there are none."""
    if len(placed) == len(blocks):
        return [placed[one] for one in range(len(blocks))]
    seen: set[Block] = set()
    for one, block in enumerate(blocks):
        if one in placed or block in seen:
            continue
        seen.add(block)
        at = _lowest(blocks, placed, one, tight=False)
        if last <= at and at + block.nbytes < size:
            found = _better(blocks, {**placed, one: at}, size, at)
            if found is not None:
                return found
    return None


WAYS: Mapping[str, Callable[[Sequence[Block]], list[int]]] = {
    "greedy": _greedy,
    "greedy_size": _greedy_size,
    "best_fit": _best_fit,
    "exact": _exact,
}
