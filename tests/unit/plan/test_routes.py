"""Plans for links that are unequal, from what each pair of ranks measured."""

import random
import time
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan, restored, stored
from daso.plan.layout import chunk_parts
from daso.plan.routes import has_changed, plan_routes, racks, ring_order, seconds_of, shares_of

checked = settings(derandomize=True, max_examples=60, deadline=None)


def rates_of(ranks, rate):
    """Return a matrix of rates, from a function of two ranks."""
    return [
        [0.0 if one == other else float(rate(one, other)) for other in range(ranks)]
        for one in range(ranks)
    ]


def planned(rates):
    """Return the plan for links whose rates do not change between rounds."""
    return plan_routes([rates] * 5)


def in_racks(ranks, rack_of, uplink):
    return rates_of(ranks, lambda a, b: 1.0 if rack_of(a) == rack_of(b) else uplink)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_where_links_are_alike_all_send_to_all(ranks):
    assert planned(rates_of(ranks, lambda a, b: 1e8)) == direct_plan(ranks)
    noisy = rates_of(ranks, lambda a, b: 1e8 * (1 + 0.1 * ((7 * a + 3 * b) % 5) / 5))
    assert planned(noisy) == direct_plan(ranks)


@pytest.mark.parametrize(
    ("ranks", "rack_of", "groups"),
    [
        (8, lambda rank: rank // 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, lambda rank: rank % 2, [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (6, lambda rank: rank % 3, [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_sums_are_made_in_racks_and_cross_once(ranks, rack_of, groups):
    rates = in_racks(ranks, rack_of, 0.05)
    plan = planned(rates)
    assert racks(rates) == groups
    assert plan.levels[0] == Level(len(groups[0]))
    assert {plan.group(rank, 0) for rank in range(ranks)} == set(map(tuple, groups))
    assert seconds_of(plan, rates) < 0.55 * seconds_of(direct_plan(ranks), rates)


def over_uplinks(racks, uplink):
    """Return rates as probes measure them: the messages of a slot share the uplink of a rack."""
    rack_of = [rack for rack, size in enumerate(racks) for _ in range(size)]
    ranks = len(rack_of)

    def rate(sender, receiver):
        if rack_of[sender] == rack_of[receiver]:
            return 1.0
        turn = (receiver - sender) % ranks
        ends = [(rack_of[rank], rack_of[(rank + turn) % ranks]) for rank in range(ranks)]
        out = sum(a == rack_of[sender] != b for a, b in ends)
        into = sum(b == rack_of[receiver] != a for a, b in ends)
        return uplink / max(out, into)

    return rates_of(ranks, rate)


@pytest.mark.parametrize("racks", [(3, 2), (2, 3), (4, 3), (5, 2)])
def test_racks_of_unequal_sizes_are_on_a_ring_that_crosses_each_uplink_once(racks):
    rates = over_uplinks(racks, 0.05)
    plan, ranks = planned(rates), sum(racks)
    assert plan.levels == (Level(ranks, "ring"),)
    assert seconds_of(plan, rates) == pytest.approx(2 * (ranks - 1) / ranks / 0.05)
    assert seconds_of(plan, rates) < 0.8 * seconds_of(direct_plan(ranks), rates)
    ends = [(a < racks[0], b < racks[0]) for a, b in pairwise([*plan.order, plan.order[0]])]
    assert ends.count((True, False)) == ends.count((False, True)) == 1


@pytest.mark.parametrize("racks", [(3, 1), (1, 3), (7, 1)])
def test_a_rank_alone_in_its_rack_adds_nothing(racks):
    rates, ranks = over_uplinks(racks, 0.05), sum(racks)
    plan = planned(rates)
    assert [share == 0 for share in plan.shares].index(True) == (0 if racks[0] == 1 else ranks - 1)
    assert list(plan.shares).count(0) == 1
    assert seconds_of(plan, rates) == pytest.approx(1 / 0.05)


def test_racks_of_unequal_sizes_among_many_nodes_have_a_plan():
    assert planned(in_racks(70, lambda rank: rank // 40, 0.05)) == direct_plan(70)


def noisy(ranks, noise, slow=lambda a, b: False):
    """Return rates of five rounds; some links have half the rate of the others."""
    return [rates_of(ranks, lambda a, b: (0.5 if slow(a, b) else 1.0) * noise()) for _ in range(5)]


@checked
@given(st.integers(3, 8), st.data())
def test_noise_of_a_fifth_on_equal_links_keeps_the_order_of_ranks(ranks, data):
    """Whatever it is, also the same in all rounds, and of all links of a rank."""
    noise = st.floats(0.81, 1.2)
    of_rank = data.draw(st.lists(noise, min_size=ranks, max_size=ranks))
    assert planned(rates_of(ranks, lambda a, b: min(of_rank[a], of_rank[b]))) == direct_plan(ranks)
    assert planned(rates_of(ranks, lambda a, b: data.draw(noise))) == direct_plan(ranks)
    slow = rates_of(ranks, lambda a, b: 0.81 if 1 in (a, b) else 1.2)
    assert planned(slow) == direct_plan(ranks)


@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
@pytest.mark.parametrize("noise", [0.3, 0.6])
def test_links_that_differ_in_each_round_keep_the_order_of_ranks(ranks, noise):
    """A busy machine: rates differ by factors of 1.9 and 4."""
    rng = random.Random(ranks)
    for _ in range(50):
        rounds = noisy(ranks, lambda: rng.uniform(1 - noise, 1 + noise))
        assert plan_routes(rounds) == direct_plan(ranks)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_rank_on_a_link_of_half_the_rate_is_found_through_noise(ranks):
    rng = random.Random(ranks)
    for _ in range(20):
        rounds = noisy(ranks, lambda: rng.uniform(0.9, 1.1), lambda a, b: 1 in (a, b))
        shares = [*plan_routes(rounds).shares]
        assert shares.pop(1) < min(shares)


@pytest.mark.parametrize("ranks", [4, 5])
def test_a_ring_avoids_a_link_of_half_the_rate_through_noise(ranks):
    rng = random.Random(ranks)
    for _ in range(20):
        rounds = noisy(ranks, lambda: rng.uniform(0.9, 1.1), lambda a, b: {a, b} == {1, 2})
        plan = plan_routes(rounds)
        assert plan.levels == (Level(ranks, "ring"),)
        assert {1, 2} not in [{a, b} for a, b in pairwise([*plan.order, plan.order[0]])]


def test_a_plan_is_kept_until_another_is_faster_by_a_fifth_in_every_round():
    slow = rates_of(4, lambda a, b: 0.5 if {a, b} == {1, 2} else 1.0)
    ring, equal = planned(slow), rates_of(4, lambda a, b: 1.0)
    as_fast = AllReducePlan(ring.levels, (0, *reversed(ring.order[1:])))
    assert plan_routes([slow] * 5, as_fast) == as_fast
    over_the_link = AllReducePlan(ring.levels, (0, 3, 1, 2))
    assert plan_routes([slow] * 5, over_the_link) == ring
    assert plan_routes([slow] * 4 + [equal]) == direct_plan(4)
    assert plan_routes([slow] * 4 + [equal], ring) == ring
    assert plan_routes([equal] * 5, ring) == direct_plan(4)
    assert plan_routes([equal] * 5, AllReducePlan((Level(8, "ring"),))) == direct_plan(4)


@pytest.mark.parametrize("ranks", [3, 4, 8, 16])
def test_a_rank_on_a_slow_link_adds_nothing(ranks):
    """It sends its row once and receives the mean once: no exchange takes less of its link."""
    rates = rates_of(ranks, lambda a, b: 0.1 if 2 in (a, b) else 1.0)
    plan = planned(rates)
    assert plan == AllReducePlan((Level(ranks),), shares=plan.shares)
    assert plan.shares[2] == 0
    assert len({*plan.shares} - {0}) == 1
    assert seconds_of(plan, rates) == pytest.approx(1 / 0.1)
    assert seconds_of(direct_plan(ranks), rates) == pytest.approx(2 * (ranks - 1) / ranks / 0.1)
    assert [span.numel for span in plan.chunks(ranks, 1000)[0]][2] == 0


@pytest.mark.parametrize(("ranks", "slow"), [(4, 2), (8, 3), (16, 6)])
def test_several_ranks_on_slow_links_add_nothing(ranks, slow):
    rates = rates_of(ranks, lambda a, b: 0.1 if min(a, b) < slow else 1.0)
    plan = planned(rates)
    assert [share == 0 for share in plan.shares] == [True] * slow + [False] * (ranks - slow)
    assert seconds_of(plan, rates) == pytest.approx(1 / 0.1)


def test_shares_are_for_links_of_ranks_and_not_for_links_between_racks():
    assert planned(in_racks(6, lambda rank: rank // 3, 0.05)).shares == ()
    assert planned(in_racks(7, lambda rank: rank // 4, 0.05)).shares == ()


@checked
@given(
    st.lists(st.floats(0.1, 10.0), min_size=3, max_size=9),
    st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9),
)
def test_no_shares_keep_the_busiest_link_busy_for_less(widths, others):
    """A rank that adds share s sends and receives 1 + s (p - 2) rows over a link of its width."""
    rates = rates_of(len(widths), lambda a, b: min(widths[a], widths[b]))
    links = [max(row) for row in rates]  # what a rank's link is seen to do: the widest has no equal

    def busiest(shares):
        parts = [share / sum(shares) for share in shares]
        return max(
            (1 + part * (len(widths) - 2)) / link for part, link in zip(parts, links, strict=True)
        )

    found = shares_of(rates)
    assert all(share >= 0 for share in found)
    assert sum(found) > 0
    rounding = 1 + len(widths) / (2 * 16)
    assert busiest(found) <= rounding * busiest([other + 1e-9 for other in others[: len(widths)]])


@checked
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(any),
    st.integers(0, 5000),
    st.sampled_from([1, 64]),
)
def test_parts_are_as_shares_and_hold_a_chunk_once(shares, numel, even):
    for chunk in chunk_parts(numel, len(shares), 700, even, shares):
        first, last = chunk[0].start, chunk[-1].stop
        assert [one.start for one in chunk[1:]] == [one.stop for one in chunk[:-1]]
        for part, share in zip(chunk, shares, strict=True):
            assert abs(part.numel - (last - first) * share / sum(shares)) < 2 * even
            assert share or not part.numel


@checked
@given(st.lists(st.floats(0.1, 10.0), min_size=10, max_size=10))
def test_a_ring_is_nearly_as_wide_as_the_widest(rates):
    found = iter(rates)
    half = {(a, b): next(found) for a in range(5) for b in range(a)}
    matrix = rates_of(5, lambda a, b: half[max(a, b), min(a, b)])

    def width(order):
        return min(matrix[a][b] for a, b in pairwise([*order, order[0]]))

    order = ring_order(matrix)
    assert sorted(order) == list(range(5))
    widest = max(width((0, *rest)) for rest in permutations(range(1, 5)))
    assert width(order) >= 0.5 * widest


def test_a_ring_goes_through_each_rack_once():
    matrix = in_racks(8, lambda rank: rank % 2, 0.1)
    order = ring_order(matrix)
    assert sum(a % 2 != b % 2 for a, b in pairwise([*order, order[0]])) == 2
    ring = AllReducePlan((Level(8, "ring"),), order)
    assert seconds_of(ring, matrix) <= seconds_of(AllReducePlan((Level(8, "ring"),)), matrix)


def test_seconds_by_hand():
    """Four ranks, one byte: halves and quarters over links of 1 and of 0.25 bytes a second."""
    rates = in_racks(4, lambda rank: rank // 2, 0.25)
    assert seconds_of(direct_plan(4), rates) == pytest.approx(2 * (4 + 4 + 4) / 4)
    levels = AllReducePlan((Level(2), Level(2, "whole")))
    assert seconds_of(levels, rates) == pytest.approx(2 * 0.5 + 0.5 * 4)
    ring = AllReducePlan((Level(4, "ring"),))
    assert seconds_of(ring, rates) == pytest.approx(2 * 3 / 4 * 4)


@pytest.mark.parametrize(
    ("seconds", "changed"),
    [
        ([], False),
        ([1.0, 9.0], False),
        ([1.0, 9.0, 9.0], False),  # the first ones may be slow, or fast, by chance
        ([1.0, 1.0, 1.0, 1.0, 1.0, 1.0], False),
        ([1.0, 1.1, 0.9, 1.0, 1.0, 9.0], False),  # once is chance
        ([1.0, 1.1, 0.9, 1.0, 1.6, 1.7], True),
        ([1.0, 1.1, 0.9, 1.0, 1.4, 1.7], False),
        ([1.0, 1.1, 0.9, 1.0, 0.5, 0.6], True),
    ],
)
def test_two_slower_or_faster_exchanges_mean_another_link(seconds, changed):
    assert has_changed(seconds) == changed


def test_plans_come_back_from_plain_values():
    for plan in (
        direct_plan(3),
        AllReducePlan((Level(2), Level(2, "ring")), (0, 2, 1, 3)),
        AllReducePlan((Level(3),), shares=(0, 2, 1)),
    ):
        assert restored(stored(plan)) == plan


def test_an_order_changes_who_is_whose_neighbour_and_no_number_of_messages():
    plan = AllReducePlan((Level(2), Level(2, "whole")), (0, 2, 1, 3))
    assert [plan.group(rank, 0) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [plan.group(rank, 1) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [plan.below(rank, 1) for rank in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert plan.name == "2 x 2 whole of 0 2 1 3"


def test_chunks_are_short_where_plans_follow_links():
    """What comes before and after a thin link takes the first and the last chunk's time."""
    for plan in (
        AllReducePlan((Level(4), Level(2, "whole")), tuple(range(8))),
        AllReducePlan((Level(8),), shares=(0, *[1] * 7)),
    ):
        most = max(span.numel for chunk in plan.chunks(1 << 20, 65536) for span in chunk)
        assert 65536 // 4 <= most <= 65536 // 2
    assert len(AllReducePlan((Level(4), Level(2, "whole"))).chunks(1 << 20, 65536)) == 4


def test_routes_among_many_nodes_are_found_in_time():
    for ranks, rack in ((64, 16), (256, 32)):
        rates = in_racks(ranks, lambda one, rack=rack: one // rack, 0.1)
        begun = time.perf_counter()
        plan = planned(rates)
        assert time.perf_counter() - begun < 20
        assert plan.levels[0].size == rack
