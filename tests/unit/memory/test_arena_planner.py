"""Blocks in one piece of memory: never over each other, and close to as small as can be."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.memory.captured.planner import EXACT_MOST, WAYS, Block, lower_bound, pack, segments

QUICK = [way for way in WAYS if way != "exact"]


@st.composite
def blocks(draw, most=30, nbytes=200, steps=12):
    found = []
    for _ in range(draw(st.integers(0, most))):
        begin = draw(st.integers(0, steps - 1))
        end = draw(st.integers(begin + 1, steps))
        found.append(Block(draw(st.integers(0, nbytes)), begin, end))
    return found


def needed(some):
    """Count what is needed in each step."""
    last = max((one.end for one in some), default=0)
    return max(
        (sum(one.nbytes for one in some if one.begin <= at < one.end) for at in range(last)),
        default=0,
    )


def check(some, arena, alignment):
    for (a, at), (b, bt) in combinations(zip(some, arena.offsets, strict=True), 2):
        apart = at + a.nbytes <= bt or bt + b.nbytes <= at
        assert apart or not a.overlaps(b) or 0 in {a.nbytes, b.nbytes}
    assert all(at % alignment == 0 for at in arena.offsets)
    ends = [at + one.nbytes for one, at in zip(some, arena.offsets, strict=True)]
    assert max(ends, default=0) <= arena.nbytes < max(ends, default=0) + alignment
    assert arena.bound <= arena.nbytes


@given(blocks(), st.sampled_from([*QUICK, "best"]), st.sampled_from([1, 16, 64]))
def test_blocks_with_overlapping_lifetimes_do_not_overlap(some, way, alignment):
    arena = pack(some, way, alignment=alignment)
    check(some, arena, alignment)
    assert arena.way in QUICK
    if alignment == 1:
        assert arena.bound == needed(some)


@given(blocks(most=6, nbytes=20, steps=6))
@settings(deadline=None)
def test_exact_is_never_larger_than_the_heuristics(some):
    exact = pack(some, "exact", alignment=1)
    check(some, exact, 1)
    for way in QUICK:
        assert exact.nbytes <= pack(some, way, alignment=1).nbytes


@given(blocks(most=4, nbytes=3, steps=4))
@settings(deadline=None, max_examples=50)
def test_exact_finds_the_smallest_arena(some):
    exact = pack(some, "exact", alignment=1).nbytes

    def fits(size):
        places = [range(size - one.nbytes + 1) for one in some]
        return any(
            all(
                at + a.nbytes <= bt or bt + b.nbytes <= at
                for (a, at), (b, bt) in combinations(zip(some, offsets, strict=True), 2)
                if a.overlaps(b)
            )
            for offsets in product(*places)
        )

    assert fits(exact)
    assert exact == 0 or not fits(exact - 1)


def test_the_largest_shares_its_memory_with_those_needed_at_other_times():
    some = [
        Block(100, 0, 4),  # the largest
        Block(60, 4, 8),  # after it
        Block(30, 4, 6),  # beside that
        Block(30, 6, 8),  # in the place of the one before
        Block(50, 2, 6),  # while it is needed: a segment of its own
        Block(20, 0, 2),  # before that
    ]
    assert segments(some) == [[(0, 0), (1, 0), (2, 60), (3, 60)], [(4, 0), (5, 0)]]
    arena = pack(some, "greedy", alignment=1)
    assert arena.offsets == (0, 0, 60, 60, 100, 100)
    assert (arena.nbytes, arena.bound) == (150, 150)


def test_a_gap_that_fits_tightly_is_taken_first():
    # From below: 40 that are needed at first, 41, 30 needed at first, 42. Then 30 and 40 fit.
    some = [
        Block(43, 0, 9),
        Block(42, 0, 1),
        Block(41, 0, 9),
        Block(31, 0, 1),
        Block(30, 0, 9),
        Block(29, 1, 9),
        Block(28, 1, 9),
    ]
    arena = pack(some, "greedy_size", alignment=1)
    check(some, arena, 1)
    assert arena.offsets == (0, 43, 85, 126, 157, 126, 43)


def test_steps_forward_and_back_need_what_is_needed_at_once():
    # Layer by layer: kept for backward, with something that is dropped at once in each.
    layers = 20
    kept = [Block(100 + n, n, 2 * layers - n) for n in range(layers)]
    passing = [Block(150, n, n + 1) for n in range(2 * layers)]
    arena = pack([*kept, *passing], alignment=1)
    assert arena.nbytes == arena.bound == lower_bound([*kept, *passing])


@pytest.mark.parametrize(
    ("some", "way", "part"),
    [
        ([Block(1, 0, 1)], "first", "way must be best, greedy"),
        ([Block(-1, 0, 1)], "best", "must have a size"),
        ([Block(1, 3, 3)], "best", "end after it begins"),
        ([Block(1, 0, 1)] * (EXACT_MOST + 1), "exact", f"at most {EXACT_MOST} blocks"),
    ],
)
def test_what_cannot_be_placed_is_told(some, way, part):
    with pytest.raises(ConfigError, match=part):
        pack(some, way)


def test_no_blocks_need_no_bytes():
    assert pack([]).nbytes == 0
    assert pack([Block(0, 0, 1)]).nbytes == 0
    assert lower_bound([]) == 0
