"""The decision core of exchanges: the wire, the merge and what is learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daso.plan.exchange import ExchangeRules, Sent, Tally, keeps_local, merge_rule
from daso.plan.options import MERGES, Exchange, Gradients, Settings
from daso.plan.schedule import Measurements

MANY = 1_000_000


def rules(numels=(MANY,), *, momentum=0.9, nodes=4, **options):
    how = {"wire": "auto", "merge": "auto", "exchange": Exchange(), "gradients": Gradients()}
    return ExchangeRules(Settings(**how | options), nodes, numels, momentum)


def exchange(made, state, batch, seconds, fragment=None, *, gain=1.5):
    """Exchange once; the seconds are told with the next exchange."""
    sent = made.send(state, batch, fragment, wait=1)
    return made.learn(state, sent, Measurements(1.0, seconds, required_gain=gain))


@pytest.mark.parametrize("merge", ["auto", "delta", "eager"])
@pytest.mark.parametrize("outer", [False, True])
def test_topk_keeps_all_local_work_however_far_nodes_drift(merge, outer):
    made = rules(wire="topk", merge=merge, outer=outer)
    state, _ = made.learn(made.start(), Sent(1, 1, None, keeps=True, wire="topk"), FAR)
    assert made.keeps(state, wait=3)


FAR = Measurements(1.0, 1.0, drift=9.0)


@pytest.mark.parametrize("merge", [*MERGES, 0, 0.3, 1])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("drift", [0.001, 9.0])
@pytest.mark.parametrize("waited", [1, 7])
def test_exchanges_merge_by_the_rule_of_the_settings(merge, outer, drift, waited):
    made = rules(wire="fp32", merge=merge, outer=outer)
    told = Measurements(1.0, 1.0, drift=drift)
    state, _ = made.learn(made.start(), Sent(1, 1, None, keeps=True, wire="fp32"), told)
    keeps = keeps_local(merge, wait=waited, drift=drift, outer=outer)
    assert made.send(state, 5, None, wait=waited).keeps == keeps
    rule = merge_rule(merge, waited=waited, nodes=4, keeps=keeps)
    assert made.merge(waited=waited, keeps=keeps) == rule


def test_a_blocking_exchange_keeps_nothing():
    made = rules(merge="delta")
    assert not made.send(made.start(), 1, None, wait=0).keeps


def test_an_exchange_carries_the_batches_since_the_last_of_its_fragment():
    made = rules((MANY, MANY))
    state = made.start(10)
    state, _ = exchange(made, state, 13, 0.0, 0)
    assert state.batches == 3
    assert made.send(state, 15, 1, wait=1).batches == 5
    assert made.send(state, 15, 0, wait=1).batches == 2
    assert made.send(state, 15, None, wait=1).batches == 5  # all that is not agreed yet


def test_seconds_come_with_the_next_exchange():
    made = rules()
    state, _ = exchange(made, made.start(), 1, 99.0)  # nothing was timed yet
    wires = [state.wire]
    for batch, seconds in enumerate((1.5, 0.75, 0.42, 0.53, 0.53), start=2):
        state, _ = exchange(made, state, batch, seconds)
        wires.append(state.wire)
    # The exchanges that took these: int4, int4, int2, int4, int4.
    assert wires == ["int4", "int2", "int4", "int4", "int4", "int4"]


def test_a_dropped_exchange_chooses_no_wire():
    made = rules()
    state, _ = exchange(made, made.start(), 1, 0.0)
    state, measured = exchange(made, made.drop(state), 2, 9.0)
    assert (state.wire, measured.gradient_seconds) == ("int4", 0.0)
    assert exchange(made, state, 3, 9.0)[0].wire == "int2"


@given(st.floats(1e-3, 1e3), st.integers(1, 8))
def test_gradients_take_as_long_as_all_fragments_in_4_bits(seconds, fragments):
    made = rules((MANY,) * fragments)
    state, first = exchange(made, made.start(), 1, 99.0, 0)
    _, measured = exchange(made, state, 2, seconds, fragments - 1)
    assert first.gradient_seconds == 0.0  # nothing was timed yet
    assert measured.gradient_seconds == pytest.approx(seconds * fragments)
    small = rules((MANY, MANY // 3))
    state, _ = exchange(small, small.start(), 1, 0.0, 1)
    assert exchange(small, state, 2, seconds, 0)[1].gradient_seconds == 0.0


def test_statistics_are_over_the_batches_of_the_last_exchange():
    made, tally = rules(nodes=2), Tally.measured(1e-6, 1.0, 1e-6, 1.0)
    state, _ = exchange(made, made.start(), 4, 0.0)
    drift, gain, clipped = made.statistics(state, tally)
    assert drift == tally.drift(nodes=2, batches=4)
    assert gain > 1
    assert clipped == 0
    assert rules(nodes=2, momentum=None).statistics(state, tally) == (drift, 0.0, 0.0)
