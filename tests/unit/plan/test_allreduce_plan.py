"""Groups, parts and messages of means over many ranks, and what is chosen."""

from itertools import chain
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.allreduce_plan import (
    BLOCK,
    AllReducePlan,
    Level,
    candidate_plans,
    direct_plan,
    named_plan,
)
from daso.plan.cost_model import (
    LinkCosts,
    allreduce_cost,
    choose_plan,
    depends_on_costs,
    fitted_costs,
)
from daso.plan.layout import Span

checked = settings(derandomize=True, max_examples=100, deadline=None)
MiB = 1 << 20
NODE_COUNTS = (2, 3, 4, 8, 16, 17, 32, 64, 100, 128, 256, 512, 1000, 1024)


@st.composite
def any_plan(draw):
    levels = st.lists(
        st.builds(Level, st.integers(2, 5), st.sampled_from(["scatter", "whole", "ring"])),
        min_size=1,
        max_size=3,
    )
    return AllReducePlan(tuple(draw(levels)))


@checked
@given(any_plan())
def test_groups_of_a_level_hold_every_rank_once(plan):
    for depth, level in enumerate(plan.levels):
        groups = {plan.group(rank, depth) for rank in range(plan.peers)}
        assert sorted(chain(*groups)) == list(range(plan.peers))
        assert all(len(group) == level.size for group in groups)
        for group in groups:
            assert [plan.digit(rank, depth) for rank in group] == list(range(level.size))


@checked
@given(any_plan())
def test_what_a_rank_holds_before_a_level_is_of_the_groups_below(plan):
    for rank in range(plan.peers):
        held = {rank}
        for depth in range(len(plan.levels)):
            assert set(plan.below(rank, depth)) == held
            held = set(chain(*(plan.below(one, depth) for one in plan.group(rank, depth))))
        assert held == set(range(plan.peers))


@checked
@given(any_plan(), st.integers(0, 40 * BLOCK))
def test_leaves_hold_a_chunk_once_and_each_rank_ends_with_its_own(plan, numel):
    for chunk in plan.chunks(numel, 3 * BLOCK):
        assert len(chunk) == plan.parts
        leaves = plan.leaf_spans(chunk)
        assert len(leaves) == plan.leaves
        assert [at for leaf in leaves for at in range(*leaf)] == list(
            range(chunk[0].start, chunk[-1].stop)
        )
        for part in chunk:  # codecs begin at blocks of what was encoded
            inside = [leaf for leaf in leaves if part.start <= leaf.start < part.stop]
            assert all((leaf.start - part.start) % BLOCK == 0 for leaf in inside)
    last = len(plan.levels) - 1
    ends = [plan.leaf_range(rank, last) for rank in range(plan.peers)]
    assert all(stop - first == 1 for first, stop in ends)
    for leaf in range(plan.leaves):
        assert ends.count((leaf, leaf + 1)) == plan.peers // plan.leaves


@pytest.mark.parametrize(
    ("algorithm", "peers", "name"),
    [
        ("direct", 2, "swap"),
        ("ring", 2, "swap"),
        ("halving", 2, "swap"),
        ("direct", 8, "direct"),
        ("ring", 3, "ring"),
        ("ring", 8, "ring"),
        ("two-level", 16, "4 x 4"),
        ("two-level", 12, "4 x 3"),
        ("two-level", 13, "direct"),
        ("halving", 12, "3 x 2 x 2"),
        ("halving", 16, "2 x 2 x 2 x 2"),
    ],
)
def test_the_plan_of_a_name(algorithm, peers, name):
    plan = named_plan(algorithm, peers)
    assert (plan.name, plan.peers) == (name, peers)
    assert choose_plan(algorithm, peers, MiB) == plan


@pytest.mark.parametrize(
    ("peers", "chunk"),
    [(2, 10), (3, 30), (4, 40), (16, 160), (17, 160), (64, 160), (128, 320), (1024, 2560)],
)
def test_messages_do_not_shrink_up_to_sixteen_nodes_and_then_to_a_quarter(peers, chunk):
    (first, *_) = direct_plan(peers).chunks(5120, 10)
    assert first[-1].stop - first[0].start == pytest.approx(chunk, rel=0.06)
    if 2 < peers <= 16:
        assert {part.numel for part in first} == {10}


def test_what_each_plan_is_called():
    ways = [
        [(2, "whole")],
        [(3, "scatter")],
        [(3, "whole")],
        [(3, "ring")],
        [(4, "ring"), (2, "whole")],
    ]
    plans = [AllReducePlan(tuple(Level(*one) for one in levels)) for levels in ways]
    assert [one.name for one in plans] == ["swap", "direct", "3 whole", "ring", "4 ring x 2 whole"]
    assert [one.flat for one in plans] == [True, True, False, False, False]


def test_candidates_are_of_as_many_ranks_and_none_comes_twice():
    for peers in NODE_COUNTS:
        plans = candidate_plans(peers)
        assert len(set(plans)) == len(plans)
        assert {plan.peers for plan in plans} == {peers}
        assert all(len(plan.levels) <= 3 for plan in plans)


@pytest.mark.parametrize("peers", range(1, 17))
@pytest.mark.parametrize("nbytes", [1, MiB, 1 << 32])
def test_up_to_sixteen_nodes_exchange_directly_whatever_links_cost(peers, nbytes):
    for costs in (None, LinkCosts(latency_seconds=1.0), LinkCosts(byte_seconds=1.0)):
        assert choose_plan("auto", peers, nbytes, costs) == direct_plan(peers)


@pytest.mark.parametrize("peers", NODE_COUNTS)
@pytest.mark.parametrize("numel", [25_000_000, 1_000_000_000])
def test_messages_stay_large_and_few_at_every_number_of_nodes(peers, numel):
    """64 KiB, or a node's share of the row where that is less; bytes and time near the least."""
    nbytes = 2 * numel
    cost = allreduce_cost(choose_plan("auto", peers, nbytes), nbytes, LinkCosts())
    assert cost.smallest_bytes >= min(63 << 10, 0.95 * nbytes / peers)
    halving = allreduce_cost(named_plan("halving", peers), nbytes, LinkCosts())
    direct = allreduce_cost(direct_plan(peers), nbytes, LinkCosts())
    assert cost.seconds <= 1.01 * min(halving.seconds, direct.seconds)
    assert cost.sent_bytes <= 1.03 * 2 * nbytes * (peers - 1) / peers
    if numel == 25_000_000 and peers & (peers - 1) == 0:
        assert cost.messages <= max(direct.messages / 4, 4 * halving.messages, 90)


@pytest.mark.parametrize("algorithm", ["direct", "two-level", "halving", "ring"])
def test_costs_in_numbers(algorithm):
    """16 nodes, 32 MiB, messages of 256 KiB: each algorithm sends 15/16 of it there and back."""
    costs = LinkCosts(latency_seconds=1e-3, byte_seconds=1e-8, message_seconds=0, add_seconds=0)
    cost = allreduce_cost(named_plan(algorithm, 16), 32 * MiB, costs)
    assert cost.sent_bytes == 2 * 15 / 16 * 32 * MiB
    assert cost.smallest_bytes == MiB // 4
    messages = {"direct": 2 * 15, "two-level": 2 * 6, "halving": 2 * 4, "ring": 2 * 15}
    rounds = {"direct": 2, "two-level": 4, "halving": 8, "ring": 30}
    assert cost.messages == 8 * messages[algorithm]
    assert cost.rounds == named_plan(algorithm, 16).rounds == rounds[algorithm]
    assert cost.seconds == pytest.approx(1e-3 * rounds[algorithm] + 1e-8 * cost.sent_bytes)


def test_whole_exchange_trades_bytes_for_messages():
    plan = AllReducePlan((Level(8), Level(4, "whole")))
    cost = allreduce_cost(plan, 8 * MiB, LinkCosts(), message_bytes=MiB)
    assert (cost.messages, cost.rounds, cost.smallest_bytes) == (7 + 3 + 7, 3, MiB)
    assert cost.sent_bytes == (7 + 3 + 7) * MiB
    assert prod(level.parts for level in plan.levels) == plan.leaves == 8


def test_spans_of_levels_in_numbers():
    plan = AllReducePlan((Level(2), Level(3)))
    (chunk,) = plan.chunks(6 * BLOCK + 5, 6 * BLOCK)
    assert chunk == (Span(0, 3 * BLOCK + 3), Span(3 * BLOCK + 3, 6 * BLOCK + 5))
    sizes = [leaf.numel for leaf in plan.leaf_spans(chunk)]
    assert sizes == [2 * BLOCK, BLOCK, 3, 2 * BLOCK, BLOCK, 2]


@pytest.mark.parametrize(
    ("small", "large", "latency", "per_byte"),
    [(4e-5, 4.4e-3, 2**-15, 2**-27), (1e-6, 5e-5, 2**-20, 2**-33), (0.0, 0.0, 2**-20, 2**-39)],
)
def test_costs_are_fitted_to_two_messages_in_powers_of_two(small, large, latency, per_byte):
    costs = fitted_costs(small, large, 1 << 19)
    assert (costs.latency_seconds, costs.byte_seconds) == (latency, per_byte)


def test_on_a_fast_link_messages_are_fewer():
    """What hosts do for a message counts for more there than its bytes."""
    slow, fast = (LinkCosts(byte_seconds=seconds) for seconds in (8e-9, 8e-11))
    plans = [choose_plan("auto", 512, 50e6, costs) for costs in (slow, fast)]
    messages = [allreduce_cost(plan, 50e6, fast).messages for plan in plans]
    assert messages[1] <= messages[0]
    assert depends_on_costs("auto", 17)
    assert not depends_on_costs("auto", 16)
    assert not depends_on_costs("ring", 512)


@pytest.mark.parametrize("nbytes", [1e4, 1e6, 4.3e6, 50e6, 70e6, 2e9])
def test_no_number_of_nodes_sends_much_more_than_any_mean_must(nbytes):
    """Primes and their multiples too, of which there are no groups, or few."""
    for peers in (*range(17, 200), 211, 251, 509, 513, 1021):
        cost = allreduce_cost(choose_plan("auto", peers, nbytes), nbytes, LinkCosts())
        direct = allreduce_cost(direct_plan(peers), nbytes, LinkCosts())
        assert cost.seconds <= direct.seconds
        if nbytes >= 1e6:
            assert cost.sent_bytes <= 1.2 * direct.sent_bytes, peers
