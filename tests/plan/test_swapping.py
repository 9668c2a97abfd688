"""Keep, swap or recompute: what plans come to, by hand, and against all plans."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.swapping import (
    EXACT_MOST,
    KEEP,
    POLICIES,
    RECOMPUTE,
    SWAP,
    WAYS,
    Link,
    Unit,
    choose,
    floor,
    foretell,
)

FAST = Link(1e9)
checked = settings(derandomize=True, max_examples=150, deadline=None)


@st.composite
def chains(draw, most=8):
    number = st.integers(0, 20)
    units = [
        Unit(draw(number), draw(st.integers(0, 5)), *(draw(number) / 4 for _ in range(3)))
        for _ in range(draw(st.integers(1, most)))
    ]
    link = Link(draw(st.sampled_from([0.5, 2.0, 8.0])), draw(st.sampled_from([0.0, 0.5])))
    return units, floor(units) + draw(st.integers(0, 60)), link


def computing(units, ways):
    return sum(
        u.forward_seconds + u.backward_seconds + (u.recompute_seconds if way == RECOMPUTE else 0)
        for u, way in zip(units, ways, strict=True)
    )


# --- by hand --------------------------------------------------------------------------------------

TWO = [Unit(8, 1, 1.0, 2.0, 0.5), Unit(4, 1, 1.0, 2.0, 0.5)]


def test_what_is_kept_costs_nothing_but_room():
    assert foretell(TWO, (KEEP, KEEP), 14, FAST) == (6.0, 14, 0)
    assert foretell(TWO, (KEEP, KEEP), 13, FAST) is None


def test_what_is_recomputed_is_there_in_its_own_backward_alone():
    assert foretell(TWO, (RECOMPUTE, KEEP), 14, FAST) == (6.5, 9, 0)
    assert foretell(TWO, (RECOMPUTE, RECOMPUTE), 14, FAST) == (7.0, 9, 0)
    assert foretell(TWO, (RECOMPUTE, RECOMPUTE), 8, FAST) is None


def test_copies_go_beside_computing():
    # Out in the second's forward (0.5 s); back while its backward computes.
    assert foretell(TWO, (SWAP, KEEP), 14, Link(16.0)) == (6.0, 14, 8)


def test_who_needs_room_waits_for_a_copy():
    # 8 bytes go out from 1 to 5 s: the second's forward begins then. It is recomputed at 6 s and
    # backward until 8.5 s; for the first there is room only then, and it takes 4 s to come back.
    assert foretell(TWO, (SWAP, RECOMPUTE), 13, Link(2.0)) == (14.5, 9, 8)


def test_who_needs_what_was_swapped_waits_until_it_is_back():
    one = [Unit(8, 0, 1.0, 1.0, 0.0)]
    # Out in 2 s, back in 2 s, one after the other.
    assert foretell(one, (SWAP,), 16, Link(4.0)) == (1 + 2 + 2 + 1, 16, 8)


def test_room_is_left_for_what_is_recomputed_between():
    units = [Unit(6, 0, 1.0, 1.0, 0.1), Unit(6, 0, 1.0, 1.0, 0.1), Unit(4, 0, 1.0, 1.0, 0.1)]
    # The first may not come back so early that the second cannot be recomputed.
    course = foretell(units, (SWAP, RECOMPUTE, KEEP), 12, FAST)
    assert course is not None
    assert course.peak_bytes <= 12


# --- any ------------------------------------------------------------------------------------------


@checked
@given(chains(), st.randoms(use_true_random=False))
def test_no_plan_takes_more_room_than_there_is_or_less_time_than_computing(chain, draw):
    units, capacity, link = chain
    ways = tuple(draw.choice(WAYS) for _ in units)
    course = foretell(units, ways, capacity, link)
    if course is None:
        return
    assert course.peak_bytes <= capacity
    assert course.seconds >= computing(units, ways) - 1e-9
    swapped = sum(u.nbytes for u, way in zip(units, ways, strict=True) if way == SWAP)
    assert course.swapped_bytes == swapped


@checked
@given(chains())
def test_swapping_or_recomputing_all_fits_wherever_anything_does(chain):
    units, capacity, link = chain
    for policy in ("all_swap", "all_recompute", "patent", "pooch"):
        assert choose(units, capacity, link, policy).course.peak_bytes <= capacity
    if floor(units) > 0:
        with pytest.raises(ConfigError, match=f"no plan needs less than {floor(units):,}"):
            choose(units, floor(units) - 1, link)


@checked
@given(chains(most=5))
def test_all_plans_are_the_measure_of_the_others(chain):
    units, capacity, link = chain
    best = choose(units, capacity, link, "exact").course.seconds
    pooch = choose(units, capacity, link, "pooch").course.seconds
    assert best <= pooch + 1e-9
    for policy in POLICIES:
        try:
            seconds = choose(units, capacity, link, policy).course.seconds
        except ConfigError:
            assert policy == "all_keep"
            continue
        assert best <= seconds + 1e-9
        if policy != "exact":
            assert pooch <= seconds + 1e-9


def test_single_changes_come_close_to_the_best_of_all_plans():
    draw = random.Random(0)
    ratios = []
    for _ in range(40):
        units = [
            Unit(draw.randint(1, 20), 1, *(draw.random() for _ in range(2)), draw.random() / 4)
            for _ in range(7)
        ]
        capacity = floor(units) + draw.randint(0, 40)
        link = Link(draw.choice([20.0, 60.0]))
        exact = choose(units, capacity, link, "exact").course.seconds
        ratios.append(choose(units, capacity, link).course.seconds / exact)
    assert max(ratios) < 1.05


def test_what_fits_is_kept():
    units = [Unit(10, 2, 1.0, 2.0, 0.5)] * 4
    assert choose(units, 48, FAST).ways == (KEEP,) * 4
    plan = choose(units, 47, Link(1e-3))  # no link to speak of
    assert sorted(plan.ways) == [KEEP, KEEP, KEEP, RECOMPUTE]
    assert plan.course.seconds == 12.5


@pytest.mark.parametrize(
    ("policy", "count", "part"),
    [("best", 1, "policy must be one of"), ("exact", EXACT_MOST + 1, f"of {EXACT_MOST} units")],
)
def test_what_cannot_be_planned_is_told(policy, count, part):
    with pytest.raises(ConfigError, match=part):
        choose([Unit(1, 0, 1.0, 1.0, 1.0)] * count, 100, FAST, policy)
