"""Decisions of the eager server: who owns which rows, when gradients leave, how old rows may be."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.options import Exchange
from daso.server.plan import (
    FLOOR_BYTES,
    Plan,
    age,
    first_pace,
    is_fresh,
    leaves,
    next_pace,
    rows_of,
)

GOOD = {
    "mode": "sharded",
    "staleness": 0,
    "push_every": "auto",
    "scale_by_staleness": False,
    "wire": None,
    "transport": "messages",
    "exchange": Exchange(),
}


@given(st.integers(0, 1000), st.integers(1, 40))
def test_every_row_has_one_owner_and_shares_are_even(rows, ranks):
    spans = rows_of(rows, ranks, whole=False)
    assert [row for start, stop in spans for row in range(start, stop)] == [*range(rows)]
    sizes = [span.numel for span in spans]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 1000), st.integers(1, 40))
def test_replicas_own_all_rows(rows, ranks):
    assert set(rows_of(rows, ranks, whole=True)) == {(0, rows)}


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10))
@example(clock=8, step=10, staleness=3)
@example(clock=7, step=10, staleness=3)
@example(clock=6, step=10, staleness=3)
@example(clock=10, step=10, staleness=0)
@example(clock=9, step=10, staleness=0)
def test_rows_are_fresh_unless_they_lie_further_behind_than_may_be(clock, step, staleness):
    assert is_fresh(clock, step, staleness) == (step - clock <= staleness)
    assert is_fresh(clock, step, None)
    assert is_fresh(math.inf, step, staleness)  # nobody will add to them


def test_a_gradient_ages_by_a_step_when_all_ranks_have_updated_once():
    assert age(version=12, read=4, ranks=4) == 2.0


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(1, 10**6))),
)
def test_the_pace_stays_within_the_model(layers, seen):
    pace = first_pace("auto", layers)
    for backlog, nbytes in seen:
        pace = next_pace(pace, backlog_bytes=backlog, layer_bytes=nbytes)
        assert 1 <= pace.layers <= layers


@given(st.integers(1, 100), st.integers(1, 50), st.lists(st.integers(0, 10**7)))
def test_a_given_pace_stays(every, layers, backlogs):
    pace = first_pace(every, layers)
    assert pace.layers == min(every, layers)
    for backlog in backlogs:
        assert next_pace(pace, backlog_bytes=backlog, layer_bytes=1) == pace


def test_gradients_leave_seldom_while_more_than_a_layer_waits_and_often_when_none_does():
    pace = first_pace("auto", 32)
    seen = []
    for backlog in [100, 100, 100, 10, 0, 0, 0, 0, 0, 0, 0]:
        pace = next_pace(pace, backlog_bytes=backlog, layer_bytes=10)
        seen.append(pace.layers)
    assert seen == [2, 4, 8, 8, 8, 4, 4, 2, 2, 1, 1]


def test_small_layers_wait_for_others_unless_the_pace_was_given():
    auto, given_pace = first_pace("auto", 8), first_pace(1, 8)
    assert not leaves(auto, layers=1, nbytes=FLOOR_BYTES - 1)
    assert leaves(auto, layers=1, nbytes=FLOOR_BYTES)
    assert leaves(given_pace, layers=1, nbytes=1)
    assert not leaves(first_pace(2, 8), layers=1, nbytes=10**9)


@pytest.mark.parametrize(
    "bad",
    [
        {"mode": "server"},
        {"staleness": -1},
        {"staleness": 1.5},
        {"staleness": True},
        {"push_every": 0},
        {"push_every": "always"},
        {"scale_by_staleness": True},
        {"scale_by_staleness": True, "staleness": None, "mode": "local_rows"},
        {"transport": "pigeons"},
        {"wire": "auto"},
        {"wire": "bf16", "mode": "local_rows"},
        {"exchange": Exchange(fragments=2)},
        {"exchange": Exchange(algorithm="mpi")},
        {"exchange": Exchange(gpu_direct=True)},
    ],
    ids=str,
)
def test_bad_keywords_are_named(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Plan(**{**GOOD, **bad})


@pytest.mark.parametrize(
    ("mode", "expected"), [("sharded", (0, 1, 2)), ("local_rows", (1,)), ("replicated", (1,))]
)
def test_owners_take_in_all_ranks_gradients_and_others_their_own(mode, expected):
    assert Plan(**{**GOOD, "mode": mode}).contributors(1, 3) == expected
