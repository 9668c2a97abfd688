"""Keep, swap or recompute: what plans come to, by hand, and against all plans."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.memory.planner import (
    BOTH,
    EXACT_MOST,
    KEEP,
    POLICIES,
    RECOMPUTE,
    SWAP,
    WAYS,
    Group,
    Link,
    Part,
    Unit,
    choose,
    decision,
    floor,
    parts,
    simulate_plan,
)

FAST = Link(1e9)
checked = settings(derandomize=True, max_examples=150, deadline=None)


def chain(*rows):
    """Units whose groups nobody else reads: bytes of tail and head, seconds of the three."""
    return [
        Unit(Group(head, number, number), Group(tail, number, number), *seconds)
        for number, (tail, head, *seconds) in enumerate(rows)
    ]


@st.composite
def cases(draw, most=8):
    number, count = st.integers(0, 20), draw(st.integers(1, most))
    units = []
    for one in range(count):
        later = st.integers(one, min(one + 2, count - 1))
        tail = Group(draw(number), draw(later), draw(later))
        head = Group(draw(number), draw(later), max(draw(later), tail.returns))
        seconds = (draw(number) / 4 for _ in range(3))
        units.append(Unit(head, tail, *seconds, draw(number), draw(number)))
    link = Link(draw(st.sampled_from([0.5, 2.0, 8.0])), draw(st.sampled_from([0.0, 0.5])))
    return units, floor(units) + draw(st.integers(0, 60)), link


def computing(units, ways):
    return sum(
        u.forward_seconds
        + u.backward_seconds
        + (u.recompute_seconds if u.tail.nbytes and decision(way, "tail") == RECOMPUTE else 0)
        for u, way in zip(units, ways, strict=True)
    )


class Ledger:
    """What is there in each moment if copies end as late as the plan allows."""

    def __init__(self, units, ways, course):
        self.units, self.course = units, course
        self.groups = dict(parts(units))
        self.decisions = {part: decision(ways[part.unit], part.name) for part in self.groups}
        self.there, self.out, self.found = set(), set(), []

    def some(self, way, of, number):
        return {
            part
            for part, group in self.groups.items()
            if self.decisions[part] == way and of(group) == number
        }

    def moment(self, working):
        for part in self.course.waits[len(self.found)]:
            self.out.remove(part)  # it was sent
        here = [self.groups[part].nbytes for some in (self.there, self.out) for part in some]
        self.found.append(sum(here) + working)

    def forward(self, number):
        self.there |= {part for part in self.groups if part.unit == number}
        self.moment(self.units[number].forward_bytes)
        sent = self.some(SWAP, lambda group: group.leaves, number)
        self.there -= sent | self.some(RECOMPUTE, lambda group: group.leaves, number)
        self.out |= sent

    def backward(self, number):
        fetched = set(self.course.fetches[len(self.found)])
        assert not fetched & self.there
        assert all(self.decisions[part] == SWAP for part in fetched)
        self.there |= fetched | self.some(RECOMPUTE, lambda group: group.returns, number)
        read = {p for p, group in self.groups.items() if p.unit <= number <= group.returns}
        assert read <= self.there
        self.moment(self.units[number].backward_bytes)
        self.there -= {part for part in self.groups if part.unit == number}


def followed(units, ways, course):
    ledger = Ledger(units, ways, course)
    for number in range(len(units)):
        ledger.forward(number)
    for number in reversed(range(len(units))):
        ledger.backward(number)
    return ledger.found


# --- by hand --------------------------------------------------------------------------------------

TWO = chain((8, 1, 1.0, 2.0, 0.5), (4, 1, 1.0, 2.0, 0.5))


def seen(units, ways, capacity, link):
    course = simulate_plan(units, ways, capacity, link)
    return None if course is None else course[:3]


def test_what_is_kept_costs_nothing_but_room():
    assert seen(TWO, (KEEP, KEEP), 14, FAST) == (6.0, 14, 0)
    assert simulate_plan(TWO, (KEEP, KEEP), 13, FAST) is None


def test_what_is_recomputed_is_there_in_its_own_backward_alone():
    assert seen(TWO, (RECOMPUTE, KEEP), 14, FAST) == (6.5, 9, 0)
    assert seen(TWO, (RECOMPUTE, RECOMPUTE), 14, FAST) == (7.0, 9, 0)
    assert simulate_plan(TWO, (RECOMPUTE, RECOMPUTE), 8, FAST) is None


def test_what_the_next_unit_reads_is_there_until_then_and_when_its_backward_begins():
    units = [
        Unit(Group(1, 0, 1), Group(8, 1, 1), 1.0, 2.0, 0.5),
        Unit(Group(1, 1, 1), Group(4, 1, 1), 1.0, 2.0, 0.5),
    ]
    assert seen(units, (RECOMPUTE, KEEP), 14, FAST) == (6.5, 14, 0)
    assert simulate_plan(units, (RECOMPUTE, KEEP), 13, FAST) is None
    assert floor(units) == 14


def test_copies_go_beside_computing():
    # Out in the second's forward (0.5 s); back while its backward computes.
    assert seen(chain((8, 0, 1, 2, 0.5), (4, 1, 1, 2, 0.5)), (SWAP, KEEP), 13, Link(16.0)) == (
        6.0,
        13,
        8,
    )


def test_a_head_may_go_while_its_tail_is_recomputed():
    units = chain((8, 4, 1.0, 2.0, 0.5), (1, 1, 1.0, 2.0, 0.5))
    course = simulate_plan(units, (BOTH, KEEP), 14, Link(16.0))
    assert course[:4] == (6.5, 12, 4, 0.0)
    assert course.fetches == ((), (), (Part(0, "head"),), ())


def test_who_needs_room_waits_for_a_copy():
    # 8 bytes go out from 1 to 5 s: the second's forward begins then. It is recomputed at 6 s and
    # backward until 8.5 s; for the first there is room only then, and it takes 4 s to come back.
    units = chain((8, 0, 1, 2, 0.5), (4, 1, 1, 2, 0.5))
    course = simulate_plan(units, (SWAP, RECOMPUTE), 12, Link(2.0))
    assert course[:4] == (14.5, 8, 8, 8.0)
    assert course.waits == ((), (Part(0, "tail"),), (), ())


def test_who_needs_what_was_swapped_waits_until_it_is_back():
    one = chain((8, 0, 1.0, 1.0, 0.0))
    # Out in 2 s, back in 2 s, one after the other.
    assert seen(one, (SWAP,), 16, Link(4.0)) == (1 + 2 + 2 + 1, 16, 8)


def test_every_copy_takes_its_latency_besides():
    one = chain((8, 0, 1.0, 1.0, 0.0))
    assert seen(one, (SWAP,), 16, Link(4.0, 0.5)) == (1 + 2.5 + 2.5 + 1, 16, 8)
    # As many bytes in two copies: a latency for each, out and back.
    two = chain((4, 4, 1.0, 1.0, 0.0))
    assert seen(two, (SWAP,), 16, Link(4.0, 0.5)) == (1 + 3 + 3 + 1, 16, 8)


def test_what_is_small_is_recomputed_where_copies_have_a_latency():
    units = chain(*[(8, 0, 1.0, 1.0, 0.25)] * 4)
    assert SWAP in choose(units, 24, Link(64.0)).ways
    plan = choose(units, 24, Link(64.0, 4.0))
    assert SWAP not in plan.ways
    assert plan.course.seconds == 8.25


def test_room_is_left_for_what_is_recomputed_between():
    units = chain((6, 0, 1.0, 1.0, 0.1), (6, 0, 1.0, 1.0, 0.1), (4, 0, 1.0, 1.0, 0.1))
    # The first may not come back so early that the second cannot be recomputed.
    course = simulate_plan(units, (SWAP, RECOMPUTE, KEEP), 12, FAST)
    assert course is not None
    assert course.peak_bytes <= 12


# --- any ------------------------------------------------------------------------------------------


@checked
@given(cases(), st.randoms(use_true_random=False))
def test_no_plan_takes_more_room_than_there_is_or_less_time_than_computing(case, draw):
    units, capacity, link = case
    ways = tuple(draw.choice(WAYS) for _ in units)
    course = simulate_plan(units, ways, capacity, link)
    if course is None:
        return
    assert course.peak_bytes <= capacity
    assert course.seconds == pytest.approx(computing(units, ways) + course.stalled_seconds)
    swapped = [g.nbytes for p, g in parts(units) if decision(ways[p.unit], p.name) == SWAP]
    assert course.swapped_bytes == sum(swapped)


@checked
@given(cases(), st.randoms(use_true_random=False))
def test_who_follows_a_plan_has_no_more_than_it_predicts_however_slow_copies_are(case, draw):
    units, capacity, link = case
    ways = tuple(draw.choice(WAYS) for _ in units)
    course = simulate_plan(units, ways, capacity, link)
    if course is not None:
        assert followed(units, ways, course) == list(course.there)
        assert max(course.there) == course.peak_bytes


@checked
@given(cases())
def test_swapping_all_fits_wherever_anything_does(case):
    units, capacity, link = case
    for policy in ("all_swap", "keep_late_both", "greedy", "search"):
        assert choose(units, capacity, link, policy).course.peak_bytes <= capacity
    if floor(units) > 0:
        with pytest.raises(ConfigError, match=f"no plan needs less than {floor(units):,}"):
            choose(units, floor(units) - 1, link)


@checked
@given(cases(most=4))
def test_all_plans_are_the_measure_of_the_others(case):
    units, capacity, link = case
    best = choose(units, capacity, link, "exact").course.seconds
    searched = choose(units, capacity, link, "search").course.seconds
    assert best <= searched + 1e-9
    for policy in POLICIES:
        try:
            seconds = choose(units, capacity, link, policy).course.seconds
        except ConfigError:
            assert policy in ("all_keep", "all_recompute", "keep_late_recompute")
            continue
        assert best <= seconds + 1e-9
        if policy != "exact":
            assert searched <= seconds + 1e-9


def test_single_changes_come_close_to_the_best_of_all_plans():
    draw = random.Random(0)
    ratios = []
    for _ in range(12):
        units = chain(
            *(
                (
                    draw.randint(1, 20),
                    draw.randint(1, 20),
                    draw.random(),
                    draw.random(),
                    draw.random() / 4,
                )
                for _ in range(6)
            )
        )
        capacity = floor(units) + draw.randint(0, 60)
        link = Link(draw.choice([20.0, 60.0]))
        exact = choose(units, capacity, link, "exact").course.seconds
        ratios.append(choose(units, capacity, link).course.seconds / exact)
    assert max(ratios) < 1.05


def test_what_fits_is_kept():
    units = chain(*[(10, 2, 1.0, 2.0, 0.5)] * 4)
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
        choose(chain(*[(1, 0, 1.0, 1.0, 1.0)] * count), 100, FAST, policy)
