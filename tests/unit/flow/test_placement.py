"""Placement: the longest nodes first, then a local search in which messages count."""

import pytest
from flows import refused, small_loop
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.flow.model.checks import wire
from daso.flow.placement import DIGITS, Edge, balance, place_longest_first, requested_homes

checked = settings(derandomize=True, max_examples=200, deadline=None)


# --- longest first -------------------------------------------------------------------------------


@st.composite
def flows(draw):
    """Draw arguments of place: the source is node 0."""
    nodes, ranks = draw(st.integers(2, 20)), draw(st.integers(1, 5))
    some = st.integers(0, nodes - 1)
    seconds = draw(st.lists(st.just(0.0) | st.floats(1e-6, 100.0), min_size=nodes, max_size=nodes))
    edges = draw(st.lists(st.builds(Edge, some, some, st.floats(0.0, 1e9)), max_size=3 * nodes))
    others = st.integers(1, nodes - 1)
    copies = draw(st.dictionaries(others, st.integers(1, ranks), max_size=3))
    homes = st.lists(st.integers(0, ranks - 1), unique=True, min_size=1).map(tuple)
    fixed = draw(st.dictionaries(others, homes, max_size=3))
    single = draw(st.sets(some))
    return seconds, edges, ranks, copies, 0, fixed, single


@checked
@given(flows())
def test_every_node_is_placed_as_it_must_be(flow):
    seconds, _, ranks, copies, first, fixed, single = flow
    placed = place_longest_first(*flow)
    assert len(placed) == len(seconds)
    assert placed[first] == (0,)
    for node, where in enumerate(placed):
        assert where
        assert len(set(where)) == len(where)
        assert set(where) <= set(range(ranks))
        if node in fixed:
            assert where == fixed[node]
        elif node in copies:
            assert len(where) == copies[node]
        elif node in single:
            assert len(where) == 1
    assert place_longest_first(*flow) == placed


def loads_of(placed, seconds, ranks):
    loads = [0] * ranks
    for where, taken in zip(placed, seconds, strict=True):
        for rank in where:
            loads[rank] += taken / len(where)
    return loads


def least_of_all(seconds, ranks):
    """Return the highest load of the best placement, found by trying all."""
    found = {(0,) * ranks}
    for taken in seconds:
        found = {
            tuple(sorted((*loads[:rank], loads[rank] + taken, *loads[rank + 1 :])))
            for loads in found
            for rank in range(ranks)
        }
    return min(loads[-1] for loads in found)


@checked
@given(
    # So few and small that no sum has more digits than loads are compared by.
    st.lists(st.integers(1, 9), min_size=1, max_size=10),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 10), st.integers(0, 10)), max_size=10),
)
def test_loads_are_within_the_bound_of_longest_processing_time_first(times, ranks, pairs):
    assert sum(times) < 10**DIGITS
    seconds = [0, *times]
    edges = [Edge(a % len(seconds), b % len(seconds), 1.0) for a, b in pairs]
    placed = place_longest_first(seconds, edges, ranks, {}, 0, {})
    highest = max(loads_of(placed, seconds, ranks))
    bound = 4 / 3 - 1 / (3 * ranks)  # Graham, 1969
    assert highest <= bound * least_of_all(times, ranks) + 1e-9


@checked
@given(st.lists(st.floats(1.0, 3.0), min_size=1, max_size=30), st.integers(1, 5))
def test_no_load_exceeds_the_mean_by_more_than_one_node_and_the_rounding(times, ranks):
    seconds = [0.0, *times]
    placed = place_longest_first(seconds, [], ranks, {}, 0, {})
    mean = sum(times) / ranks
    # Two loads with the same first digits are no further from each other than this.
    equal = 10 ** (1 - DIGITS)
    assert max(loads_of(placed, seconds, ranks)) <= (1 + equal) * mean + max(times)


@pytest.mark.parametrize("nodes", [8, 64, 128, 512])
def test_many_small_nodes_are_spread_as_few_large_ones_are(nodes):
    seconds = [0.0, *[1.0] * nodes]
    edges = [Edge(node, node + 1, 1.0) for node in range(nodes)]
    placed = place_longest_first(seconds, edges, 4, {}, 0, {}, single=range(nodes + 1))
    assert loads_of(placed, seconds, 4) == pytest.approx([nodes / 4] * 4, rel=0.1)


def test_the_longest_come_first_each_where_least_is_to_do():
    seconds = [0.0, 2.0, 7.0, 5.0, 4.0, 3.0]
    placed = place_longest_first(seconds, [], 2, {}, 0, {})
    # 7 | 5; 7 | 5 4; 7 3 | 5 4; 7 3 | 5 4 2
    assert placed == ((0,), (1,), (0,), (1,), (1,), (0,))


def test_what_is_fixed_counts_before_the_rest_is_placed():
    placed = place_longest_first([0.0, 9.0, 4.0, 4.0], [], 2, {}, 0, {1: (0,)})
    assert placed == ((0,), (0,), (1,), (1,))
    placed = place_longest_first([0.0, 9.0, 4.0, 2.0], [], 3, {}, 0, {1: (0, 2)}, single=(1, 2, 3))
    assert placed == ((0,), (0, 2), (1,), (1,))


def test_the_source_counts_on_its_rank():
    assert place_longest_first([5.0, 4.0, 3.0], [], 2, {}, 0, {}) == ((0,), (1,), (1,))
    assert place_longest_first([4.0, 3.0, 5.0], [], 2, {}, 2, {}) == ((1,), (1,), (0,))


def test_replicas_share_the_load():
    placed = place_longest_first([0.0, 6.0, 5.0, 3.0], [], 3, {1: 2}, 0, {}, single=(1, 2, 3))
    assert placed == ((0,), (0, 1), (2,), (0,))


def test_equal_loads_are_decided_by_traffic():
    seconds = [0.0, 5.0, 5.0, 3.0, 3.0]
    for near, expected in (
        (1, ((0,), (0,), (1,), (0,), (1,))),
        (2, ((0,), (0,), (1,), (1,), (0,))),
    ):
        edges = [Edge(0, 1, 9.0), Edge(3, near, 9.0), Edge(3, 3 - near, 8.0)]
        assert place_longest_first(seconds, edges, 2, {}, 0, {}) == expected


@pytest.mark.parametrize("seconds", [0.0, 1e-3], ids=["none", "next to none"])
def test_nodes_of_negligible_time_follow_most_of_their_traffic(seconds):
    # 0 - 3 - 1 and 2: most of what 3 exchanges comes from 2; 4 follows 3; 5 exchanges nothing.
    edges = [Edge(0, 3, 1.0), Edge(3, 1, 2.0), Edge(2, 3, 7.0), Edge(3, 4, 5.0)]
    placed = place_longest_first([0.0, 5.0, 4.0, seconds, seconds, seconds], edges, 2, {}, 0, {})
    assert placed == ((0,), (0,), (1,), (1,), (1,), (0,))


def test_nodes_of_negligible_time_are_on_all_replica_ranks_unless_single():
    edges = [Edge(0, 1, 1.0), Edge(1, 2, 5.0), Edge(1, 3, 5.0)]
    placed = place_longest_first([0.0, 5.0, 0.0, 0.0], edges, 3, {1: 3}, 0, {}, single=(1, 3))
    assert placed == ((0,), (0, 1, 2), (0, 1, 2), (0,))


def test_a_node_that_takes_no_time_may_have_replicas():
    assert place_longest_first([0.0, 0.0, 5.0], [], 3, {1: 2}, 0, {}, single=(1, 2))[1] != (0,)
    assert len(place_longest_first([0.0, 0.0, 5.0], [], 3, {1: 2}, 0, {}, single=(1, 2))[1]) == 2


def test_nodes_that_may_follow_replicas_do():
    edges = [Edge(0, 1, 1.0), Edge(1, 2, 5.0), Edge(2, 3, 4.0)]
    placed = place_longest_first([0.0, 6.0, 3.0, 2.0], edges, 2, {1: 2}, 0, {}, single=(1, 3))
    assert placed[1:3] == ((0, 1), (0, 1))
    assert len(placed[3]) == 1


@pytest.mark.parametrize("count", [0, -1, 4])
def test_more_replicas_than_ranks_are_refused(count):
    with pytest.raises(ConfigError, match=f"1 to 3, not {count}"):
        place_longest_first([0.0, 1.0], [], 3, {1: count}, 0, {})


def test_one_rank_gets_every_node():
    assert place_longest_first([1.0, 5.0, 0.0], [Edge(0, 1, 1.0)], 1, {1: 1}, 0, {}) == ((0,),) * 3


def test_nodes_of_negligible_time_follow_any_number_of_replicas():
    # A loop of 10 turns around a cell, after a source that is on rank 0.
    source, begin, phi, cell, after = range(5)
    edges = [
        Edge(source, begin, 1.0),
        Edge(begin, phi, 1.0),
        Edge(phi, cell, 10.0),
        Edge(cell, after, 10.0),
        Edge(after, phi, 9.0),
    ]
    seconds = [0.0, 0.0, 0.0, 1.0, 0.0]
    for ranks in (2, 16, 100):
        placed = place_longest_first(seconds, edges, ranks, {cell: ranks}, source, {}, {cell})
        everywhere = tuple(range(ranks))
        assert placed[cell] == placed[phi] == placed[after] == everywhere


# --- local search --------------------------------------------------------------------------------


def busiest(homes, seconds, crossing, ranks):
    load = [0.0] * ranks
    for rank, taken in zip(homes, seconds, strict=True):
        load[rank] += taken
    for source, target, taken in crossing:
        if homes[source] != homes[target]:
            load[homes[source]] += taken
            load[homes[target]] += taken
    return max(load)


def test_a_chain_is_cut_where_least_crosses():
    seconds = [0.0, 3.0, 3.0, 3.0, 3.0]
    crossing = [Edge(n, n + 1, taken) for n, taken in enumerate([0.1, 1.0, 0.1, 1.0])]
    start = dict(enumerate([0, 0, 1, 0, 1]))  # as loads alone would have it
    assert balance(seconds, crossing, 2, {0: 0}, start) == (0, 0, 0, 1, 1)


def test_nodes_stay_on_one_rank_if_messages_cost_more_than_they_save():
    crossing = [Edge(0, 1, 5.0), Edge(1, 2, 5.0)]
    assert balance([0.0, 1.0, 1.0], crossing, 2, {0: 0}, {0: 0, 1: 0, 2: 1}) == (0, 0, 0)


def test_nodes_of_negligible_time_are_with_their_heaviest_neighbour():
    crossing = [Edge(1, 2, 0.1), Edge(2, 3, 0.2)]
    start = {0: 0, 1: 0, 2: 0, 3: 1}
    assert balance([0.0, 4.0, 0.0, 4.0], crossing, 2, {0: 0}, start)[1:] in {(0, 1, 1), (1, 0, 0)}


def test_cluster_of_nodes_moves_as_a_whole():
    # 1 - 2 - 3 and 4 - 5 - 6, which exchange much among themselves, and little with each other.
    seconds = [0.0, *[1.0] * 6]
    among = [(1, 2), (2, 3), (4, 5), (5, 6)]
    crossing = [*(Edge(*pair, 5.0) for pair in among), Edge(0, 1, 0.1), Edge(3, 4, 0.1)]
    start = dict(enumerate([0, 0, 1, 0, 1, 0, 1]))
    assert balance(seconds, crossing, 2, {0: 0}, start) == (0, 0, 0, 0, 1, 1, 1)


def test_messages_also_cost_the_receiving_rank():
    seconds, fixed = [4.2, 3.0, 0.4], {0: 0, 1: 1}
    for begin in (0, 1):
        start = fixed | {2: begin}
        # 4.6 and 3.0, or 4.2 and a message, 4.7, and 3.9
        assert balance(seconds, [Edge(2, 0, 0.5)], 2, fixed, start) == (0, 1, 0)


def test_what_the_caller_placed_stays():
    fixed = {0: 0, 1: 1, 2: 1}
    found = balance([0.0, 5.0, 5.0, 2.0], [], 2, fixed, {0: 0, 1: 1, 2: 1, 3: 1})
    assert found == (0, 1, 1, 0)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(0.5, 3.0), min_size=1, max_size=7),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.floats(0, 1.0)), max_size=10),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_no_placement_gets_worse(times, ranks, pairs, begin):
    seconds = [0.0, *times]
    count = len(seconds)
    crossing = [Edge(a % count, b % count, taken) for a, b, taken in pairs]
    start = {node: begin[node] % ranks if node else 0 for node in range(count)}
    found = balance(seconds, crossing, ranks, {0: 0}, start)
    before = busiest([start[node] for node in range(count)], seconds, crossing, ranks)
    assert busiest(found, seconds, crossing, ranks) <= before * (1 + 1e-12)
    assert found[0] == 0
    assert set(found) <= set(range(ranks))


# --- by the caller's word -------------------------------------------------------------------------


def test_nodes_are_placed_by_their_names():
    wiring = wire(small_loop())
    assert requested_homes(wiring, {"linear": [2, 0], "loop cond": 1}, 3) == {4: (2, 0), 3: (1,)}


@pytest.mark.parametrize("wanted", [3, -1, [0, 0], []], ids=str)
def test_a_rank_outside_the_world_is_refused(wanted):
    with refused("'linear'", "from 0 to 2", repr(wanted)):
        requested_homes(wire(small_loop()), {"linear": wanted}, 3)


def test_only_layers_can_have_replicas():
    with refused("'loop cond'", "a cond"):
        requested_homes(wire(small_loop()), {"loop cond": [0, 1]}, 3)


def test_the_source_must_be_on_rank_0():
    assert requested_homes(wire(small_loop()), {"source": 0}, 3) == {0: (0,)}
    with refused("'source'"):
        requested_homes(wire(small_loop()), {"source": 1}, 3)
