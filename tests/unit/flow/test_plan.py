"""Decisions of asynchronous model parallelism: when weights change, and who computes what."""

from dataclasses import FrozenInstanceError, asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.flow.plan import (
    DIGITS,
    Edge,
    Updates,
    age_factor,
    choose_lane,
    count_lanes,
    place,
    rank_of,
    ranks_of_lane,
)

checked = settings(derandomize=True, max_examples=200, deadline=None)


# --- when weights change -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"min_update_interval": 0},
        {"min_update_interval": -3},
        {"min_update_interval": 1.0},
        {"min_update_interval": True},
        {"min_update_interval": "2"},
        {"min_update_interval": None},
        {"unit": "batch"},
        {"unit": None},
        {"weights": "old"},
        {"weights": ["current"]},
    ],
    ids=str,
)
def test_bad_keywords_are_named_with_their_value(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ConfigError, match=name) as error:
        Updates(**bad)
    assert repr(value) in str(error.value)


def test_what_may_be_is_said():
    with pytest.raises(ConfigError, match="instance, message"):
        Updates(unit="batch")
    with pytest.raises(ConfigError, match="current, stashed"):
        Updates(weights="old")


@checked
@given(
    st.integers(1, 10**6),
    st.sampled_from(["instance", "message"]),
    st.sampled_from(["current", "stashed"]),
    st.booleans(),
)
def test_good_keywords_are_kept(interval, unit, weights, scale_by_staleness):
    keywords = {
        "min_update_interval": interval,
        "unit": unit,
        "weights": weights,
        "scale_by_staleness": scale_by_staleness,
    }
    assert asdict(Updates(**keywords)) == keywords


def test_updates_stay_as_they_were_made_and_are_equal_where_their_keywords_are():
    updates = Updates()
    assert updates == Updates(
        min_update_interval=1, unit="instance", weights="current", scale_by_staleness=False
    )
    with pytest.raises(FrozenInstanceError):
        updates.scale_by_staleness = True
    with pytest.raises(ConfigError, match="by name"):
        Updates(4)


@given(st.integers(0, 1000))
def test_a_gradient_is_divided_by_one_more_than_its_age_where_that_is_asked(age):
    assert age_factor(age, scale_by_staleness=False) == 1.0
    assert age_factor(age, scale_by_staleness=True) == 1 / (age + 1)


# --- who has an instance -------------------------------------------------------------------------


@checked
@given(st.lists(st.integers(0, 100), unique=True, min_size=1, max_size=9), st.integers(0, 10**9))
def test_replicas_take_turns(ranks, first):
    turns = [rank_of(ranks, first + more) for more in range(2 * len(ranks))]
    assert sorted(turns[: len(ranks)]) == sorted(ranks)
    assert turns[: len(ranks)] == turns[len(ranks) :]


# --- who computes what ---------------------------------------------------------------------------


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
    placed = place(*flow)
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
    assert place(*flow) == placed


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
    placed = place(seconds, edges, ranks, {}, 0, {})
    highest = max(loads_of(placed, seconds, ranks))
    bound = 4 / 3 - 1 / (3 * ranks)  # Graham, 1969
    assert highest <= bound * least_of_all(times, ranks) + 1e-9


@checked
@given(st.lists(st.floats(1.0, 3.0), min_size=1, max_size=30), st.integers(1, 5))
def test_no_load_is_higher_than_the_mean_by_more_than_a_node_and_what_is_taken_for_equal(
    times, ranks
):
    seconds = [0.0, *times]
    placed = place(seconds, [], ranks, {}, 0, {})
    mean = sum(times) / ranks
    # Two loads with the same first digits are no further from each other than this.
    equal = 10 ** (1 - DIGITS)
    assert max(loads_of(placed, seconds, ranks)) <= (1 + equal) * mean + max(times)


@pytest.mark.parametrize("nodes", [8, 64, 128, 512])
def test_many_small_nodes_are_spread_as_few_large_ones_are(nodes):
    seconds = [0.0, *[1.0] * nodes]
    edges = [Edge(node, node + 1, 1.0) for node in range(nodes)]
    placed = place(seconds, edges, 4, {}, 0, {}, single=range(nodes + 1))
    assert loads_of(placed, seconds, 4) == pytest.approx([nodes / 4] * 4, rel=0.1)


def test_the_longest_come_first_each_where_least_is_to_do():
    seconds = [0.0, 2.0, 7.0, 5.0, 4.0, 3.0]
    placed = place(seconds, [], 2, {}, 0, {})
    # 7 | 5; 7 | 5 4; 7 3 | 5 4; 7 3 | 5 4 2
    assert placed == ((0,), (1,), (0,), (1,), (1,), (0,))


def test_what_is_fixed_counts_before_the_rest_is_placed():
    placed = place([0.0, 9.0, 4.0, 4.0], [], 2, {}, 0, {1: (0,)})
    assert placed == ((0,), (0,), (1,), (1,))
    placed = place([0.0, 9.0, 4.0, 2.0], [], 3, {}, 0, {1: (0, 2)}, single=(1, 2, 3))
    assert placed == ((0,), (0, 2), (1,), (1,))


def test_the_source_counts_on_its_rank():
    assert place([5.0, 4.0, 3.0], [], 2, {}, 0, {}) == ((0,), (1,), (1,))
    assert place([4.0, 3.0, 5.0], [], 2, {}, 2, {}) == ((1,), (1,), (0,))


def test_replicas_share_the_load():
    placed = place([0.0, 6.0, 5.0, 3.0], [], 3, {1: 2}, 0, {}, single=(1, 2, 3))
    assert placed == ((0,), (0, 1), (2,), (0,))


def test_equal_loads_are_told_apart_by_what_is_exchanged():
    seconds = [0.0, 5.0, 5.0, 3.0, 3.0]
    for near, expected in (
        (1, ((0,), (0,), (1,), (0,), (1,))),
        (2, ((0,), (0,), (1,), (1,), (0,))),
    ):
        edges = [Edge(0, 1, 9.0), Edge(3, near, 9.0), Edge(3, 3 - near, 8.0)]
        assert place(seconds, edges, 2, {}, 0, {}) == expected


@pytest.mark.parametrize("seconds", [0.0, 1e-3], ids=["none", "next to none"])
def test_what_takes_no_time_goes_where_most_of_what_it_exchanges_is(seconds):
    # 0 - 3 - 1 and 2: most of what 3 exchanges comes from 2; 4 follows 3; 5 exchanges nothing.
    edges = [Edge(0, 3, 1.0), Edge(3, 1, 2.0), Edge(2, 3, 7.0), Edge(3, 4, 5.0)]
    placed = place([0.0, 5.0, 4.0, seconds, seconds, seconds], edges, 2, {}, 0, {})
    assert placed == ((0,), (0,), (1,), (1,), (1,), (0,))


def test_what_takes_no_time_is_with_all_replicas_unless_it_is_on_one_rank():
    edges = [Edge(0, 1, 1.0), Edge(1, 2, 5.0), Edge(1, 3, 5.0)]
    placed = place([0.0, 5.0, 0.0, 0.0], edges, 3, {1: 3}, 0, {}, single=(1, 3))
    assert placed == ((0,), (0, 1, 2), (0, 1, 2), (0,))


def test_a_node_that_takes_no_time_may_have_replicas():
    assert place([0.0, 0.0, 5.0], [], 3, {1: 2}, 0, {}, single=(1, 2))[1] != (0,)
    assert len(place([0.0, 0.0, 5.0], [], 3, {1: 2}, 0, {}, single=(1, 2))[1]) == 2


def test_where_a_node_has_replicas_what_may_is_with_them():
    edges = [Edge(0, 1, 1.0), Edge(1, 2, 5.0), Edge(2, 3, 4.0)]
    placed = place([0.0, 6.0, 3.0, 2.0], edges, 2, {1: 2}, 0, {}, single=(1, 3))
    assert placed[1:3] == ((0, 1), (0, 1))
    assert len(placed[3]) == 1


@pytest.mark.parametrize("count", [0, -1, 4])
def test_more_replicas_than_ranks_are_refused(count):
    with pytest.raises(ConfigError, match=f"1 to 3 of them, not {count}"):
        place([0.0, 1.0], [], 3, {1: count}, 0, {})


def test_on_one_rank_everything_is_there():
    assert place([1.0, 5.0, 0.0], [Edge(0, 1, 1.0)], 1, {1: 1}, 0, {}) == ((0,),) * 3


def test_lanes_are_the_ways_through_replicas():
    ranks_of = [(0,), (0, 1), (2, 3, 4), (5,)]
    assert count_lanes(ranks_of) == 6
    assert ranks_of_lane(ranks_of, 0) == (0, 2, 5)
    assert ranks_of_lane(ranks_of, 5) == (0, 1, 4, 5)
    assert count_lanes([(0,), (1,)]) == 1


def test_the_next_instance_takes_the_lane_with_fewest_or_the_next_in_turn():
    assert [choose_lane([0, 0, 0], admitted) for admitted in range(5)] == [0, 1, 2, 0, 1]
    assert choose_lane([2, 1, 3], 0) == 1
    assert choose_lane([1, 0, 0], 2) == 2
    assert choose_lane([5], 7) == 0


def test_what_takes_no_time_follows_its_replicas_however_many():
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
        placed = place(seconds, edges, ranks, {cell: ranks}, source, {}, {cell})
        everywhere = tuple(range(ranks))
        assert placed[cell] == placed[phi] == placed[after] == everywhere
