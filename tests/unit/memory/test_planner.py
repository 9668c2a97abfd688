"""Keep, swap or recompute: what plans come to, by hand, and against all plans."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.memory.course import (
    BOTH,
    KEEP,
    RECOMPUTE,
    SWAP,
    WAYS,
    Group,
    Link,
    Part,
    StepProfile,
    Unit,
    decision,
    floor,
    is_internal,
    simulate_plan,
    valid_ways,
)
from daso.memory.planner import EXACT_MOST, POLICIES, choose

FAST = Link(1e9)
checked = settings(derandomize=True, max_examples=150, deadline=None)


def chain(*rows):
    """Units whose storages no other unit uses.

    Bytes that are computed again and bytes of inputs, seconds of forward, backward, recomputing.
    """
    units, groups = [], []
    for number, (again, inputs, forward, backward, recompute) in enumerate(rows):
        units.append(Unit(forward, backward, recompute, again, recompute_bytes=again))
        if again:
            groups.append(Group(again, 1, number, (number,)))
        if inputs:
            groups.append(Group(inputs, 1, number, (number,), (number,) if again else ()))
    return StepProfile(tuple(units), tuple(groups))


@st.composite
def cases(draw, most=8):
    number, count = st.integers(0, 20), draw(st.integers(1, most))
    units, groups = [], []
    for one in range(count):
        later = st.integers(one, min(one + 2, count - 1))
        again, seconds = draw(number), (draw(number) / 4 for _ in range(3))
        working = draw(number), draw(number), draw(number), again + draw(number)
        units.append(Unit(*seconds, again, *working, draw(st.integers(0, 2)) if again else 0))
        if again:
            groups.append(Group(again, draw(st.integers(1, 2)), one, (one,)))
        for _ in range(draw(st.integers(0, 2))):  # what others use, too
            saved = tuple(sorted({one, draw(later)}))
            inputs = tuple(unit for unit in saved if draw(st.booleans()))
            leaves = max(*saved, draw(later))
            groups.append(Group(1 + draw(number), 1, leaves, saved, inputs))
    groups = [
        group._replace(inputs=tuple(unit for unit in group.inputs if units[unit].recomputed_bytes))
        for group in groups
    ]
    link = Link(draw(st.sampled_from([0.5, 2.0, 8.0])), draw(st.sampled_from([0.0, 0.5])))
    profile = StepProfile(tuple(units), tuple(groups))
    return profile, floor(profile) + draw(st.integers(0, 60)), link


def recomputes(profile, ways):
    pairs = zip(profile.units, valid_ways(profile.units, ways), strict=True)
    return [way in (RECOMPUTE, BOTH) for _, way in pairs]


def computing(profile, ways):
    return sum(
        unit.forward_seconds + unit.backward_seconds + unit.recompute_seconds * again
        for unit, again in zip(profile.units, recomputes(profile, ways), strict=True)
    )


class Ledger:
    """What is there in each moment if copies end as late as the plan allows."""

    def __init__(self, profile, ways, course):
        self.units, self.simulated = profile.units, course
        self.ways = valid_ways(profile.units, ways)
        self.again = recomputes(profile, ways)
        self.groups = [g for g in profile.groups if not is_internal(g, self.ways)]
        self.there, self.out, self.found = set(), set(), []  # indices of groups

    def decision(self, index):
        return decision(self.groups[index], self.ways)

    def indices(self, of):
        return {index for index, group in enumerate(self.groups) if of(index, group)}

    def moment(self, working, states):
        for part in self.simulated.waits[len(self.found)]:
            gone = {index for index in self.out if self.decision(index).part == part}
            assert gone  # it was sent
            self.out -= gone
        here = sum(self.groups[index].nbytes for some in (self.there, self.out) for index in some)
        self.found.append(here + working + states)

    def states(self, upto):
        pairs = list(zip(self.units, self.again, strict=True))[: upto + 1]
        return sum(unit.state_bytes for unit, again in pairs if again)

    def forward(self, number):
        unit = self.units[number]
        self.there |= self.indices(lambda _, group: group.first == number)
        working = unit.lean_bytes if self.again[number] else unit.forward_bytes
        self.moment(working, self.states(number))
        over = self.indices(lambda index, group: group.leaves == number)
        dropped = {index for index in over if self.decision(index) is None}
        sent = self.part_ends(number)
        self.there -= dropped | sent
        self.out |= sent

    def part_ends(self, number):
        """Groups whose part is complete, and out of the model's hands, with this unit."""
        swapped = self.indices(
            lambda index, _: self.decision(index) and self.decision(index).way == SWAP
        )
        leaves = {}
        for index in swapped:
            part = self.decision(index).part
            leaves[part] = max(leaves.get(part, 0), self.groups[index].leaves)
        return {index for index in swapped if leaves[self.decision(index).part] == number}

    def backward(self, number):
        unit, fetched = self.units[number], set(self.simulated.fetches[len(self.found)])
        back = self.indices(lambda i, _: self.decision(i) and self.decision(i).part in fetched)
        assert not back & self.there
        assert all(self.decision(index).way == SWAP for index in back)
        self.there |= back
        read = self.indices(
            lambda i, _: self.decision(i) and number == self.decision(i).part.returns
        )
        assert read <= self.there
        working = unit.recompute_bytes if self.again[number] else unit.backward_bytes
        self.moment(working, self.states(number))
        self.there -= self.indices(
            lambda i, _: self.decision(i) and number == self.decision(i).part.owner
        )


def followed(profile, ways, course):
    ledger = Ledger(profile, ways, course)
    for number in range(len(profile.units)):
        ledger.forward(number)
    for number in reversed(range(len(profile.units))):
        ledger.backward(number)
    return ledger.found


# --- by hand --------------------------------------------------------------------------------------

TWO = chain((8, 1, 1.0, 2.0, 0.5), (4, 1, 1.0, 2.0, 0.5))


def seen(profile, ways, capacity, link):
    course = simulate_plan(profile, ways, capacity, link)
    return None if course is None else course[:3]


def test_keeping_costs_only_memory():
    assert seen(TWO, (KEEP, KEEP), 14, FAST) == (6.0, 14, 0)
    assert simulate_plan(TWO, (KEEP, KEEP), 13, FAST) is None


def test_recomputed_bytes_count_only_in_their_own_backward():
    assert seen(TWO, (RECOMPUTE, KEEP), 14, FAST) == (6.5, 9, 0)
    assert seen(TWO, (RECOMPUTE, RECOMPUTE), 14, FAST) == (7.0, 9, 0)
    assert simulate_plan(TWO, (RECOMPUTE, RECOMPUTE), 8, FAST) is None


def test_groups_count_until_the_model_releases_them():
    units = chain((8, 1, 1.0, 2.0, 0.5), (4, 1, 1.0, 2.0, 0.5)).units
    groups = (Group(8, 1, 1, (0,)), Group(1, 1, 0, (0,), (0,)), Group(5, 1, 1, (1,)))
    profile = StepProfile(units, groups)
    assert seen(profile, (RECOMPUTE, KEEP), 14, FAST) == (6.5, 14, 0)
    assert simulate_plan(profile, (RECOMPUTE, KEEP), 13, FAST) is None
    assert floor(profile) == 9  # what the second computes again is not there in its forward


def test_the_first_holder_decides_on_a_shared_group():
    group = Group(8, 1, 1, (0, 1), (1,))
    assert decision(group, (KEEP, SWAP)) == (KEEP, (0, 1, 1))
    assert decision(group, (SWAP, KEEP)) == (SWAP, (0, 1, 1))
    assert decision(group, (RECOMPUTE, SWAP)) == (SWAP, (1, 1, 1))
    assert decision(group, (RECOMPUTE, RECOMPUTE)) == (KEEP, (1, 1, 1))
    assert decision(group, (RECOMPUTE, BOTH)) == (SWAP, (1, 1, 1))
    assert decision(Group(8, 1, 0, (0,)), (BOTH, KEEP)) is None


def test_what_cannot_be_recomputed_is_kept_or_swapped():
    units = chain((0, 8, 1.0, 2.0, 0.5), (4, 1, 1.0, 2.0, 0.5)).units
    assert valid_ways(units, (RECOMPUTE, RECOMPUTE)) == (KEEP, RECOMPUTE)
    assert valid_ways(units, (BOTH, BOTH)) == (SWAP, BOTH)


def test_copies_overlap_computation():
    # Out in the second's forward (0.5 s); back while its backward computes.
    assert seen(chain((0, 8, 1, 2, 0.5), (4, 1, 1, 2, 0.5)), (SWAP, KEEP), 13, Link(16.0)) == (
        6.0,
        13,
        8,
    )


def test_inputs_may_go_while_the_rest_is_recomputed():
    profile = chain((8, 4, 1.0, 2.0, 0.5), (1, 1, 1.0, 2.0, 0.5))
    course = simulate_plan(profile, (BOTH, KEEP), 14, Link(16.0))
    assert course[:4] == (6.5, 12, 4, 0.0)
    assert course.fetches == ((), (), (Part(0, 0, 0),), ())


def test_a_unit_without_room_waits_for_a_copy_out():
    # 8 bytes go out from 1 to 5 s: the second's forward begins then, and ends at 6 s. Its backward
    # lasts until 8.5 s; for the first there is room only then, and it takes 4 s to come back.
    profile = chain((0, 8, 1, 2, 0.5), (0, 5, 1, 2.5, 0.5))
    course = simulate_plan(profile, (SWAP, KEEP), 12, Link(2.0))
    assert course[:4] == (14.5, 8, 8, 8.0)
    assert course.waits == ((), (Part(0, 0, 0),), (), ())


def test_a_backward_waits_for_the_copy_back():
    one = chain((0, 8, 1.0, 1.0, 0.0))
    # Out in 2 s, back in 2 s, one after the other.
    assert seen(one, (SWAP,), 16, Link(4.0)) == (1 + 2 + 2 + 1, 16, 8)


def test_every_copy_adds_its_latency():
    one = chain((0, 8, 1.0, 1.0, 0.0))
    assert seen(one, (SWAP,), 16, Link(4.0, 0.5)) == (1 + 2.5 + 2.5 + 1, 16, 8)
    # As many bytes in two copies: a latency for each, out and back.
    two = one._replace(groups=(one.groups[0]._replace(copies=2),))
    assert seen(two, (SWAP,), 16, Link(4.0, 0.5)) == (1 + 3 + 3 + 1, 16, 8)


def test_what_is_small_is_recomputed_where_copies_have_a_latency():
    profile = chain(*[(8, 0, 1.0, 1.0, 0.25)] * 4)
    assert SWAP in choose(profile, 24, Link(64.0)).ways
    plan = choose(profile, 24, Link(64.0, 4.0))
    assert SWAP not in plan.ways
    assert plan.simulated.seconds == 8.25


def test_early_copies_back_leave_room_for_recomputation():
    profile = chain((6, 0, 1.0, 1.0, 0.1), (6, 0, 1.0, 1.0, 0.1), (4, 0, 1.0, 1.0, 0.1))
    # The first may not come back so early that the second cannot be recomputed.
    course = simulate_plan(profile, (SWAP, RECOMPUTE, KEEP), 12, FAST)
    assert course is not None
    assert course.peak_bytes <= 12


# --- any ------------------------------------------------------------------------------------------


@checked
@given(cases(), st.randoms(use_true_random=False))
def test_simulated_steps_respect_capacity_and_compute_time(case, draw):
    profile, capacity, link = case
    ways = valid_ways(profile.units, [draw.choice(WAYS) for _ in profile.units])
    course = simulate_plan(profile, ways, capacity, link)
    if course is None:
        return
    assert course.peak_bytes <= capacity
    assert course.seconds == pytest.approx(computing(profile, ways) + course.stalled_seconds)
    fates = [(decision(group, ways), group.nbytes) for group in profile.groups]
    assert course.swapped_bytes == sum(size for one, size in fates if one and one.way == SWAP)


@checked
@given(cases(), st.randoms(use_true_random=False))
def test_resident_bytes_match_a_ledger_that_waits_for_copies(case, draw):
    profile, capacity, link = case
    ways = [draw.choice(WAYS) for _ in profile.units]
    course = simulate_plan(profile, ways, capacity, link)
    if course is not None:
        assert followed(profile, ways, course) == list(course.resident_bytes)
        assert max(course.resident_bytes) == course.peak_bytes


@checked
@given(cases())
def test_some_plan_fits_wherever_one_can(case):
    profile, capacity, link = case
    for policy in ("least", "greedy", "search"):
        assert choose(profile, capacity, link, policy).simulated.peak_bytes <= capacity
    if floor(profile) > 0:
        with pytest.raises(ConfigError, match=f"every plan needs at least {floor(profile):,}"):
            choose(profile, floor(profile) - 1, link, "least")


@checked
@given(cases(most=4))
def test_no_policy_beats_exact(case):
    profile, capacity, link = case
    best = choose(profile, capacity, link, "exact").simulated.seconds
    searched = choose(profile, capacity, link, "search").simulated.seconds
    assert best <= searched + 1e-9
    for policy in POLICIES:
        try:
            seconds = choose(profile, capacity, link, policy).simulated.seconds
        except ConfigError:
            assert policy.startswith(("all_", "keep_late_"))
            continue
        assert best <= seconds + 1e-9
        if policy != "exact":
            assert searched <= seconds + 1e-9


def test_single_changes_come_close_to_the_best_of_all_plans():
    draw = random.Random(0)
    ratios = []
    for _ in range(12):
        sizes, seconds = (lambda: draw.randint(1, 20)), draw.random
        rows = ((sizes(), sizes(), seconds(), seconds(), seconds() / 4) for _ in range(6))
        profile = chain(*rows)
        capacity = floor(profile) + draw.randint(0, 60)
        link = Link(draw.choice([20.0, 60.0]))
        exact = choose(profile, capacity, link, "exact").simulated.seconds
        ratios.append(choose(profile, capacity, link).simulated.seconds / exact)
    assert max(ratios) < 1.05


def test_search_keeps_everything_that_fits():
    profile = chain(*[(10, 2, 1.0, 2.0, 0.5)] * 4)
    assert choose(profile, 48, FAST).ways == (KEEP,) * 4
    plan = choose(profile, 47, Link(1e-3))  # no link to speak of
    assert sorted(plan.ways) == [KEEP, KEEP, KEEP, RECOMPUTE]
    assert plan.simulated.seconds == 12.5


@pytest.mark.parametrize(
    ("policy", "count", "part"),
    [
        ("best", 1, "policy must be one of"),
        ("exact", EXACT_MOST + 1, f"at most {EXACT_MOST} units"),
    ],
)
def test_what_cannot_be_planned_is_told(policy, count, part):
    with pytest.raises(ConfigError, match=part):
        choose(chain(*[(1, 0, 1.0, 1.0, 1.0)] * count), 100, FAST, policy)
