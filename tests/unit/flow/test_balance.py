"""Placements that are made better: the busiest rank has less to do, messages counted."""

from hypothesis import given, settings
from hypothesis import strategies as st

from daso.flow.balance import balanced
from daso.flow.plan import Edge

checked = settings(derandomize=True, max_examples=100, deadline=None)


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
    assert balanced(seconds, crossing, 2, {0: 0}, start) == (0, 0, 0, 1, 1)


def test_nothing_is_spread_where_messages_take_longer_than_what_they_save():
    crossing = [Edge(0, 1, 5.0), Edge(1, 2, 5.0)]
    assert balanced([0.0, 1.0, 1.0], crossing, 2, {0: 0}, {0: 0, 1: 0, 2: 1}) == (0, 0, 0)


def test_what_takes_no_time_is_with_what_it_exchanges_most_with():
    crossing = [Edge(1, 2, 0.1), Edge(2, 3, 0.2)]
    start = {0: 0, 1: 0, 2: 0, 3: 1}
    assert balanced([0.0, 4.0, 0.0, 4.0], crossing, 2, {0: 0}, start)[1:] in {(0, 1, 1), (1, 0, 0)}


def test_a_cluster_is_moved_as_a_whole_where_each_of_its_nodes_alone_would_cost():
    # 1 - 2 - 3 and 4 - 5 - 6, which exchange much among themselves, and little with each other.
    seconds = [0.0, *[1.0] * 6]
    among = [(1, 2), (2, 3), (4, 5), (5, 6)]
    crossing = [*(Edge(*pair, 5.0) for pair in among), Edge(0, 1, 0.1), Edge(3, 4, 0.1)]
    start = dict(enumerate([0, 0, 1, 0, 1, 0, 1]))
    assert balanced(seconds, crossing, 2, {0: 0}, start) == (0, 0, 0, 0, 1, 1, 1)


def test_who_gets_a_message_has_to_do_with_it_too():
    seconds, fixed = [4.2, 3.0, 0.4], {0: 0, 1: 1}
    for begin in (0, 1):
        start = fixed | {2: begin}
        # 4.6 and 3.0, or 4.2 and a message, 4.7, and 3.9
        assert balanced(seconds, [Edge(2, 0, 0.5)], 2, fixed, start) == (0, 1, 0)


def test_what_the_caller_placed_stays():
    fixed = {0: 0, 1: 1, 2: 1}
    found = balanced([0.0, 5.0, 5.0, 2.0], [], 2, fixed, {0: 0, 1: 1, 2: 1, 3: 1})
    assert found == (0, 1, 1, 0)


@checked
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
    found = balanced(seconds, crossing, ranks, {0: 0}, start)
    before = busiest([start[node] for node in range(count)], seconds, crossing, ranks)
    assert busiest(found, seconds, crossing, ranks) <= before * (1 + 1e-12)
    assert found[0] == 0
    assert set(found) <= set(range(ranks))
