"""Decisions of asynchronous model parallelism: when weights change, and who computes what."""

from dataclasses import FrozenInstanceError, asdict

import pytest
from expected_errors import raises
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.flow.plan import Updates, age_factor, choose_lane, count_lanes, rank_of, ranks_of_lane

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


def test_errors_list_the_valid_choices():
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


def test_updates_are_immutable_and_equal_by_keywords():
    updates = Updates()
    assert updates == Updates(
        min_update_interval=1, unit="instance", weights="current", scale_by_staleness=False
    )
    with pytest.raises(FrozenInstanceError):
        updates.scale_by_staleness = True
    with raises("argument-without-name"):
        Updates(4)


@given(st.integers(0, 1000))
def test_gradient_is_divided_by_its_age_plus_one(age):
    assert age_factor(age, scale_by_staleness=False) == 1.0
    assert age_factor(age, scale_by_staleness=True) == 1 / (age + 1)


# --- who has an instance -------------------------------------------------------------------------


@checked
@given(st.lists(st.integers(0, 100), unique=True, min_size=1, max_size=9), st.integers(0, 10**9))
def test_replicas_take_turns(ranks, first):
    turns = [rank_of(ranks, first + more) for more in range(2 * len(ranks))]
    assert sorted(turns[: len(ranks)]) == sorted(ranks)
    assert turns[: len(ranks)] == turns[len(ranks) :]


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
