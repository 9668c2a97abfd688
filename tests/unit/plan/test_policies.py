import itertools
import math
import sys
from dataclasses import FrozenInstanceError, fields, replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.errors import ConfigError
from daso.plan.auto import (
    DRIFT,
    MARGIN,
    NORMALIZED_MARGIN,
    START_BATCHES,
    Auto,
)
from daso.plan.exchange import Tally
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import (
    MEASURE_EVERY,
    Action,
    Measurements,
    State,
    SyncPhase,
    after_batch,
    after_exchange,
    begin,
)
from daso.plan.small_tensors import SMALL_PERIOD, SmallTensors

checked = settings(derandomize=True, max_examples=100, deadline=None)

ALL = [Fixed(), Plateau(epochs=20), Qsr(0.4), Auto()]

amounts = st.one_of(st.just(0.0), st.floats(1e-9, 1e9), st.floats(0, allow_infinity=False))
seens = st.builds(Measurements, amounts, amounts, amounts, amounts)


def tuned(policy, skip, wait, measurements, *, before=None, fragments=1):
    """What a policy chooses at one exchange, as the state machine carries it out."""
    state = State(skip=skip, wait=wait, fragments=fragments, measurements=before or Measurements())
    acts, state = after_exchange(policy, state, measurements)
    assert acts == ()
    assert state.measurements == measurements
    return state


def trained(policy, exchanges, drift_of, *, skip=1, lr=lambda batch: 1.0, seconds=0.5, fragments=1):
    """Train, and return the skip that is chosen at each exchange, with the batch of the choice.

    As in training, an exchange tells what drift the exchange before it measured. ``drift_of``
    (batches, lr) is one batch's, when nodes were apart for so many.
    """
    state = replace(policy.start(), skip=skip, wait=1, fragments=fragments)
    flight, measured, chosen = None, 0.0, []
    since = [0] * fragments  # batch of the last send of each
    while len(chosen) < exchanges:
        acts, state = after_batch(policy, state)
        told = None
        for act in acts:
            if act is Action.RECEIVE:
                told, measured = flight
            else:
                batches, rate = state.batch - since[state.fragment], lr(state.batch)
                flight = Measurements(1.0, seconds, rate, measured), drift_of(batches, rate)
                since[state.fragment] = state.batch
        if told is not None:
            acts, state = after_exchange(policy, state, told)
            assert acts == ()
            chosen.append((state.batch, state.skip))
    return chosen


# --- Qsr ---------------------------------------------------------------------------------------


def settled(policy, skip, wait, measurements):
    """What it chooses where the rate was higher before."""
    return tuned(policy, skip, wait, measurements, before=Measurements(lr=math.inf))


def quadratic(alpha, lr, skip, max_skip):
    """The rule in fractions, which do not round."""
    if lr == 0:
        return max_skip
    return min(max_skip, max(skip, math.floor((Fraction(alpha) / Fraction(lr)) ** 2)))


@pytest.mark.parametrize("max_skip", [4, 100, 128, 256, 10**6])
@pytest.mark.parametrize("alpha", [0.0175, 0.3, 1.0, 7.5])
def test_qsr_is_the_quadratic_rule_at_every_rate(alpha, max_skip):
    policy = Qsr(alpha, skip=4, max_skip=max_skip)
    rates = [alpha * 1.003**-step for step in range(-500, 3000)]
    for lr in rates:
        # A rate within rounding of the next whole number may be taken for it, either way.
        near = {quadratic(alpha * (1 + off), lr, 4, max_skip) for off in (-1e-15, 0, 1e-15)}
        assert settled(policy, 4, 1, Measurements(lr=lr)).skip in near


@checked
@given(st.integers(1, 300), st.sampled_from([0.5, 1.0, 0.0078125]), st.integers(1, 300))
def test_qsr_hits_whole_numbers_exactly(root, lr, max_skip):
    policy = Qsr(root * lr, skip=1, max_skip=max_skip)
    assert settled(policy, 1, 1, Measurements(lr=lr)).skip == min(max_skip, root**2)


def test_qsr_in_the_papers_numbers():
    # H_base 4 at the peak rate 0.008: alpha 0.0175 gives H = 4 until the rate is 0.00875.
    chosen = [
        settled(Qsr(0.0175), 4, 1, Measurements(lr=lr)).skip
        for lr in (0.008, 0.0078, 0.005, 0.001, 1e-5)
    ]
    assert chosen == [4, 5, 12, 256, 256]


@checked
@given(seens, st.integers(2, 64))
def test_qsr_looks_at_the_rate_alone_and_keeps_wait(measurements, skip):
    policy = Qsr(0.5, skip=skip, wait=2, max_skip=100)
    state = settled(policy, skip, 2, measurements)
    alone = settled(policy, skip, 2, Measurements(lr=measurements.lr))
    assert (state.skip, state.wait) == (alone.skip, 2)
    assert skip <= state.skip <= 100


@pytest.mark.parametrize("lr", [0.0, 5e-324, 1e-300])
def test_a_rate_of_nothing_gives_qsr_the_most(lr):
    assert settled(Qsr(0.1, max_skip=99), 4, 1, Measurements(lr=lr)).skip == 99


@pytest.mark.parametrize("lr", [1e300, math.inf])
def test_a_huge_rate_gives_qsr_the_least(lr):
    assert tuned(Qsr(0.1), 4, 1, Measurements(lr=lr)).skip == 4


@pytest.mark.parametrize("warmup", [30, 100])
def test_qsr_takes_no_rate_that_rises_for_one_that_has_decayed(warmup):
    """A small rate in warm-up, or after a restart, is no reason for nodes to train apart."""
    chosen = trained(
        Qsr(0.2), 60, lambda *_: 0.0, skip=4, lr=lambda b: 0.1 * min(1, b / warmup, 30 / (b + 1))
    )
    assert {skip for batch, skip in chosen if batch <= min(warmup, 30)} == {4}
    assert max(skip for _, skip in chosen) > 4


def test_qsr_starts_at_its_least_and_follows_a_decaying_rate():
    chosen = trained(Qsr(2.0, max_skip=64), 40, lambda b, lr: 0.0, skip=4, lr=lambda b: 0.99**b)
    skips = [skip for _, skip in chosen]
    assert Qsr(2.0).start() == State(skip=4, wait=1)
    assert skips == sorted(skips)
    assert (skips[0], skips[-1]) == (4, 64)


# --- Auto: wait --------------------------------------------------------------------------------

skips = st.integers(1, 128)


@st.composite
def pairs(draw):
    skip = draw(skips)
    return skip, draw(st.integers(1, skip))


@checked
@given(pairs(), seens, st.integers(1, 200))
def test_an_exchange_has_some_of_its_time_to_spare_unless_wait_is_capped(
    pair, measurements, max_skip
):
    state = tuned(Auto(max_skip=max_skip), *pair, measurements)
    spare = NORMALIZED_MARGIN if measurements.required_gain else MARGIN
    capped = state.wait in (2 * pair[1], max_skip)
    if measurements.step_seconds and measurements.exchange_seconds and not capped:
        assert state.wait * measurements.step_seconds >= spare * measurements.exchange_seconds * (
            1 - 1e-12
        )
        assert state.wait >= state.skip // 8
        # and no batch more than that
        taken = (
            state.wait - 1
        ) * measurements.step_seconds <= spare * measurements.exchange_seconds * (1 + 1e-12)
        assert taken or state.wait == state.skip // 8


@pytest.mark.parametrize(
    ("step", "exchange", "wait", "normalized"),
    [
        (1.0, 0.5, 1, 1),
        (1.0, 0.95, 2, 1),
        (1.0, 1.0, 2, 2),
        (1.0, 1.7, 3, 2),
        (0.5, 4.7, 12, 10),
        (1e9, 1e-9, 1, 1),
    ],
)
def test_wait_in_numbers(step, exchange, wait, normalized):
    assert tuned(Auto(), 15, 15, Measurements(step, exchange)).wait == wait
    late = Measurements(step, exchange, required_gain=1.5)
    assert tuned(Auto(), 15, 15, late).wait == normalized


@pytest.mark.parametrize("skip", [8, 64, 128])
def test_ranks_may_come_apart_by_an_eighth_of_skip(skip):
    fast = Measurements(step_seconds=1.0, exchange_seconds=0.01)
    assert tuned(Auto(), skip, skip, fast).wait == skip // 8
    assert tuned(Auto(), skip, 1, fast).wait == min(2, skip // 8)


@pytest.mark.parametrize(
    ("skip", "share", "period", "wait"),
    [
        (8, 0.1, 2, 1),
        (64, 0.1, 2, 2),
        (128, 0.1, 2, 2),
        (128, 0.1, 0, 16),  # they cost too much
        (128, 0.0, 2, 16),  # there are none
    ],
)
def test_small_tensors_keep_ranks_together(skip, share, period, wait):
    seconds = 0.0 if period else 9.0
    state = State(skip=skip, wait=skip, small=SmallTensors(share, period, seconds))
    fast = Measurements(step_seconds=1.0, exchange_seconds=0.01)
    assert after_exchange(Auto(), state, fast)[1].wait == wait


def test_small_tensors_that_would_not_go_give_no_less_time():
    state = State(skip=128, wait=16, small=SmallTensors(0.5))  # half of all bytes
    slow = Measurements(step_seconds=1.0, exchange_seconds=2.6)
    assert after_exchange(Auto(), state, slow)[1].wait == 16


@pytest.mark.parametrize(("step", "exchange"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_wait_stays_where_nothing_was_measured(step, exchange):
    # Two exchanges after one batch, as in a drain, have no step between them.
    assert tuned(Auto(), 64, 12, Measurements(step, exchange)).wait == 12


def test_wait_at_most_doubles_and_is_at_most_max_skip():
    slow = Measurements(step_seconds=0.01, exchange_seconds=60.0)
    assert tuned(Auto(), 16, 3, slow).wait == 6
    assert tuned(Auto(max_skip=5), 5, 3, slow).wait == 5


# --- Auto: skip --------------------------------------------------------------------------------


@checked
@given(pairs(), seens, seens, st.integers(1, 200), st.integers(1, 8))
def test_auto_chooses_whole_numbers_in_bounds_whatever_is_measured(
    pair, measurements, before, max_skip, fragments
):
    skip, wait = pair
    state = tuned(
        Auto(max_skip=max_skip), skip, wait, measurements, before=before, fragments=fragments
    )
    assert (type(state.skip), type(state.wait)) == (int, int)
    assert 1 <= state.wait <= state.skip <= max_skip
    assert state.skip <= 2 * skip or state.skip == state.wait


EXTREMES = [0.0, 5e-324, 1e-300, 1.0, 1e300, sys.float_info.max, math.inf]


@pytest.mark.parametrize("lr", EXTREMES)
@pytest.mark.parametrize("drift", EXTREMES)
@pytest.mark.parametrize("before", EXTREMES)
def test_no_number_is_too_small_or_too_large_for_auto(lr, drift, before):
    for seconds in EXTREMES[:-1]:
        measurements = Measurements(seconds, 1.0, lr, drift)
        state = tuned(Auto(), 16, 4, measurements, before=Measurements(lr=before))
        assert 1 <= state.wait <= state.skip <= 32


@pytest.mark.parametrize(
    ("own", "skip"),
    [(0.001, 1), (0.01, 1), (0.021, 3), (0.11, 11), (0.4, 32), (1e9, 32), (0.0, 32)],
)
def test_exchanges_are_as_frequent_as_their_work_is_within_budget(own, skip):
    """A step takes a second; nodes hardly drift; skip was 16."""
    measurements = Measurements(1.0, 0.5, 0.1, DRIFT**2 / 1e6, own_seconds=own)
    assert tuned(Auto(), 16, 1, measurements, before=Measurements(lr=0.1)).skip == skip
    assert tuned(Auto(budget=0.02), 16, 1, measurements, before=Measurements(lr=0.1)).skip == (
        32 if own == 0 else min(32, max(1, math.ceil(own / 0.02)))
    )


def test_what_exchanges_cost_counts_by_the_steps_time():
    measurements = Measurements(0.1, 0.05, 0.1, DRIFT**2 / 1e6, own_seconds=0.0095)
    assert tuned(Auto(), 8, 1, measurements, before=Measurements(lr=0.1)).skip == 10


def test_drift_bounds_what_is_dear_and_wait_comes_first():
    dear = Measurements(1.0, 0.5, 0.1, DRIFT**2 / 4.5, own_seconds=1.0)
    assert tuned(Auto(), 4, 1, dear, before=Measurements(lr=0.1)).skip == 4
    slow = replace(dear, exchange_seconds=6.0)
    assert tuned(Auto(), 8, 8, slow, before=Measurements(lr=0.1)).skip == 8


LEFT = SyncPhase(cost=0.48)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (State(hidden=True), "gradients at every batch: the start"),
        (
            State(hidden=True, sync=SyncPhase(cost=0.06, measured=5)),
            "gradients at every batch: they cost 6 % of a step",
        ),
        (
            State(hidden=True, sync=SyncPhase(began=700, measured=700)),
            "gradients at every batch: tried again",
        ),
        (State(), "gradients at every batch, in full precision: the warm-up"),
        (
            State(skip=4, wait=2, sync=LEFT),
            "parameters every 4 batches, merged 2 later: gradients would cost 48 % of a step",
        ),
        (
            State(skip=1, wait=1),
            "parameters at every batch, merged 1 later: nothing is measured yet",
        ),
        (
            State(skip=6, wait=6, measurements=Measurements(1.0, 5.0)),
            "parameters every 6 batches, merged 6 later: an exchange takes that many batches",
        ),
        (
            State(skip=8, wait=1, measurements=Measurements(1.0, 0.5, own_seconds=0.08)),
            "parameters every 8 batches, merged 1 later: an exchange takes 80 ms of training",
        ),
    ],
)
def test_auto_explains_its_choice(state, why):
    assert Auto().why(state) == why


# Cheap exchanges with an optimizer that normalizes, on a link on which backward hides gradients.
FAST = Measurements(1.0, 0.5, 0.1, 1e-6, own_seconds=0.01, required_gain=2.0, gradient_seconds=0.5)
BEFORE = State(
    batch=1200, skip=1, wait=1, sent=1200, last=1200, agreed=1200, sync=SyncPhase(left=201)
)
COST = Auto().sync_cost


@pytest.mark.parametrize(
    ("sync", "state", "measurements", "returns"),
    [
        ({}, {}, {}, False),
        ({"left": 200}, {}, {}, True),  # a thousand batches ago
        ({"gradients": 0.99}, {}, {}, False),
        ({"gradients": 1.0}, {}, {}, True),  # half of what they took when the phase was left
        ({"gradients": 1.0, "left": 1190}, {}, {}, False),  # the first estimates were long ones
        ({"gradients": 1.0, "left": 1189}, {}, {}, True),
        ({}, {}, {"required_gain": 0.0}, False),
        ({}, {}, {"gradient_seconds": 0.0}, False),
        ({}, {}, {"gradient_seconds": 0.501}, False),
        ({}, {}, {"step_seconds": 0.9}, False),
        ({}, {}, {"own_seconds": COST}, True),
        ({}, {}, {"own_seconds": 1.01 * COST}, False),
        ({}, {"fragments": 4}, {"own_seconds": COST / 4}, True),
        ({}, {"fragments": 4}, {"own_seconds": COST / 3}, False),
    ],
)
def test_auto_returns_to_gradients_where_they_are_cheap(sync, state, measurements, returns):
    sync = {"gradients": 1.0} | sync if measurements or state else sync
    state = replace(BEFORE, sync=replace(BEFORE.sync, **sync), **state)
    acts, after = after_exchange(Auto(), state, replace(FAST, **measurements))
    assert after.hidden == after.synchronous == returns
    assert acts == ((Action.RECEIVE, Action.JOIN) if returns else ())
    assert returns == (after.sent is None)


def start(cost, batches, policy=None, nodes=8):
    """Begin with an optimizer that normalizes; return the batch after which the start is left."""
    policy = policy or Auto()
    state = begin(policy, policy.start(), nodes=nodes, memory=0.999, may_hide=True)
    for _ in range(batches):
        acts, state = after_batch(policy, state)
        if acts:
            assert acts == (Action.MEASURE,)
            measured = Measurements(1.0, exposed_seconds=cost)
            acts, state = after_exchange(policy, state, measured)
            if acts:
                assert acts == (Action.ANCHOR,)
                assert (state.skip, state.wait, state.hidden) == (1, 1, False)
                assert state.sync.left == state.batch
                return state.batch
    return None


@pytest.mark.parametrize(
    ("cost", "left"),
    [
        (COST, None),
        (1.01 * COST, START_BATCHES),
        (0.3, START_BATCHES),
        (1.0, START_BATCHES),
        (2.3, 40),  # measured at every 20th batch
        (9.0, 5),  # where it would cost too much until the 20th
        (30.0, 5),  # the first measurement, after the 2nd, does not count
    ],
)
def test_the_start_is_synchronous_until_it_has_cost_a_hundred_batches(cost, left):
    assert start(cost, 1000) == left


@pytest.mark.parametrize(
    ("nodes", "cost", "left"),
    [(2, 0.3, 100), (8, 0.3, 100), (10, 0.3, 140), (16, 0.3, 200), (100, 0.3, 200), (16, 2.3, 100)],
)
def test_the_start_is_longer_on_many_nodes(nodes, cost, left):
    assert start(cost, 1000, nodes=nodes) == left


@pytest.mark.parametrize(
    ("numel", "costs", "found"),
    [
        (4_000_000, [0.9], "8"),  # so few cross in 8 bits whatever they cost
        (4_000_001, [0.021] * 9, "4"),
        (4_000_001, [0.02] * 9, "48"),
        (4_000_001, [0.02, 0.05, 0.05], "48"),
        (4_000_001, [0.02, 0.051, 0.0, 0.0], "484"),  # tried once
        (4_000_001, [0.02, 0.9, 0.0], "484"),  # before the phase is left 4 bits are tried again
    ],
)
def test_gradients_cross_in_8_bits_where_that_is_cheap(numel, costs, found):
    policy, wires = Auto(), []
    state = begin(policy, policy.start(), nodes=2, memory=0.999, may_hide=True, numel=numel)
    for batch, cost in enumerate([0.0, *costs], start=1):
        wires.append("8" if state.sync.wide else "4")
        state = replace(state, batch=batch)
        state = policy.tune_exchange(state, Measurements(1.0, exposed_seconds=cost))
    wires.append("8" if state.sync.wide else "4")
    assert state.hidden
    assert "".join(wire for wire, _ in itertools.groupby(wires)) == found


def test_the_cost_of_synchronous_batches_is_a_setting():
    assert start(0.3, 1000, Auto(sync_cost=0.31)) is None
    assert start(0.05, 1000, Auto(sync_cost=0.04)) == START_BATCHES


def phases(batches, gradients_of, *, extra=0.0):
    """Train with an optimizer that normalizes; return for each batch whether it is synchronous.

    Gradients take ``gradients_of(batch, since)`` steps, so many batches after exchanges began; half
    of a step is hidden, and ``extra`` is not.
    """
    policy = Auto()
    state = begin(policy, policy.start(), nodes=2, memory=0.99, may_hide=True)
    found, last, now = [], 0.0, 0.0
    for batch in range(1, batches + 1):
        acts, state = after_batch(policy, state)
        for act in acts:
            told = None
            if act is Action.MEASURE:
                exposed = extra + max(0.0, gradients_of(batch, 0) - 0.5)
                told, now = Measurements(1.0, exposed_seconds=exposed), 0.0  # nothing is timed yet
            elif act is Action.SEND:
                last, now = now, gradients_of(batch, batch - state.sync.left)
            elif act is Action.RECEIVE:
                told = Measurements(*(1.0, last, 0.1, 1e-6, 0.01, 1.4), gradient_seconds=last)
            if told is not None:
                _, state = after_exchange(policy, state, told)
        found.append(state.synchronous)
    return found


def test_auto_follows_a_changing_link_within_50_batches():
    """From 1 Gbit/s to 20 Mbit/s and back: gradients take a quarter of a step, then 12."""
    slow = {*range(401, 701), *range(1101, 1301)}
    found = phases(1500, lambda batch, _: 12.0 if batch in slow else 0.25)
    fast = [*range(400), *range(750, 1100), *range(1350, 1500)]
    assert all(found[batch] for batch in fast)
    assert not any(found[450:700] + found[1150:1300])


def test_a_failed_trial_does_not_make_the_next_one_easier():
    told = replace(FAST, gradient_seconds=0.45)
    state = replace(BEFORE, sync=SyncPhase(left=200, gradients=0.2))
    _, state = after_exchange(Auto(), state, told)  # a thousand batches later
    assert state.hidden
    assert (state.sync.gradients, state.sync.cost) == (0.2, None)


def test_fragments_are_exchanged_as_often_as_one_costs():
    told = Measurements(1.0, 0.9, 0.1, own_seconds=0.08, required_gain=1.5)
    assert [tuned(Auto(), 4, 1, told, fragments=parts).skip for parts in (1, 4, 16)] == [1, 1, 1]


def test_a_trial_of_synchronous_batches_that_fails_is_not_repeated_soon():
    """Exchanges are slow for a while after the phase was left; the link is never faster."""
    found = phases(1000, lambda _, since: 0.48 if since < 15 else 0.2, extra=0.2)
    changes = [at for at, (one, after) in enumerate(pairwise(found)) if one != after]
    assert len(changes) == 3  # left, tried, left


@pytest.mark.parametrize(
    ("policy", "may_hide", "state", "hides"),
    [
        (Auto(), True, {}, True),
        (Auto(), False, {}, False),
        (Auto(warmup=3), True, {}, False),
        (Auto(), True, {"batch": 1}, False),
        (Auto(), True, {"epoch": 1}, False),
        (Fixed(2, 1), True, {}, False),
        (Fixed(1, 0), True, {}, False),
    ],
)
def test_only_auto_begins_in_step_and_only_before_the_first_batch(policy, may_hide, state, hides):
    before = replace(policy.start(), **state)
    after = begin(policy, before, nodes=8, memory=0.99, may_hide=may_hide)
    assert after.memory == 0.99
    assert after.hidden == hides
    if not hides:
        assert after == replace(before, memory=0.99, small=SmallTensors(period=0))


@pytest.mark.parametrize(
    ("share", "before", "after"), [(0.1, 2, 2), (0.1, 3, 3), (0.1, 0, 2), (0.0, 2, 0), (0.0, 0, 0)]
)
def test_where_there_are_no_small_tensors_they_do_not_go(share, before, after):
    state = State(skip=9, wait=2, small=SmallTensors(period=before))
    state = begin(Auto(), state, nodes=8, memory=0.0, may_hide=False, small_share=share)
    assert state.small.period == after
    state = after_exchange(Auto(), state, Measurements(0.1, 0.1, 0.1, 1e-9))[1]
    assert (state.small.period > 0) == (share > 0)


@pytest.mark.parametrize(("nodes", "gain"), [(16, 3.9), (4, 2.0), (2, math.sqrt(2)), (1, 1.0)])
def test_a_gain_of_more_nodes_is_no_longer_than_these_allow(nodes, gain):
    state = State(skip=9, wait=2, gain=3.9)
    assert begin(Auto(), state, nodes=nodes, memory=0.99, may_hide=True).gain == gain


def test_after_a_warm_up_gradients_are_tried_by_what_exchanges_take():
    policy = Auto(warmup=20)
    state = replace(policy.start(), skip=1, wait=0)
    for batch in range(1, 400):
        _, state = after_batch(policy, state)
        if not state.hidden and batch >= 22:
            _, state = after_exchange(policy, state, FAST)
    assert state.hidden
    assert state.synchronous
    for batch in (399, 419):  # the first measurement does not count
        assert state.hidden
        _, state = after_batch(policy, replace(state, batch=batch))
        _, state = after_exchange(policy, state, Measurements(1.0, exposed_seconds=0.5))
    assert (state.skip, state.wait, state.hidden) == (1, 1, False)


def test_other_synchronous_phases_are_not_measured():
    state = Fixed(1, 0).start()
    for _ in range(2 * MEASURE_EVERY):
        acts, state = after_batch(Fixed(1, 0), state)
        assert acts == ()


@pytest.mark.parametrize(
    ("exchange", "own", "skip", "wait"),
    [
        (0.9, 0.01, 1, 1),
        (1.8, 0.01, 2, 2),
        (0.9, 0.25, 3, 1),  # its work stays within a tenth of a step
        (0.9, 9.0, 8, 1),  # at most twice as rare as before
        (0.9, 0.0, 4, 1),  # not measured
        (7.0, 0.01, 8, 8),
    ],
)
def test_restored_steps_exchange_as_often_as_the_link_allows(exchange, own, skip, wait):
    """Drift does not count: the mean is to come early and often."""
    told = Measurements(1.0, exchange, 0.1, DRIFT**2, own_seconds=own, required_gain=1.5)
    after = tuned(Auto(), 4, 4, told)
    assert (after.skip, after.wait) == (skip, wait)


def test_without_a_measured_drift_skip_stays():
    assert tuned(Auto(), 16, 1, Measurements(1.0, 0.5, 0.1, 0.0)).skip == 16


def test_nodes_that_hardly_drift_let_skip_grow():
    tally = Tally.measured(1e-13, 1.0, 0.0, 1.0)  # too small to count, as in fine-tuning
    drift = tally.drift(nodes=2, batches=1)
    assert tuned(Auto(), 1, 1, Measurements(1.0, 0.5, 1e-6, drift)).skip == 2


def test_skip_is_never_below_wait():
    far = Measurements(step_seconds=1.0, exchange_seconds=10.0, lr=0.1, drift=1e6)
    state = tuned(Auto(), 12, 12, far)
    assert (state.skip, state.wait) == (12, 12)


@pytest.mark.parametrize("start", [1, 2, 3, 5, 12, 31, 64, 100, 127, 128])
def test_auto_settles_at_the_skip_that_noise_allows(start):
    policy, few = Auto(), 2 * math.log2(128)  # up by doubling, then half of the rest each time
    for allowed in range(1, 150):
        measurements = Measurements(1.0, 0.5, 0.1, drift=DRIFT**2 / (allowed + 0.5))
        state, chosen = State(skip=start, wait=1), []
        while state.skip not in chosen[-1:]:
            chosen.append(state.skip)
            _, state = after_exchange(policy, state, measurements)
        assert state.skip == min(allowed, 128)
        assert len(chosen) - 1 <= few
        assert chosen in (sorted(chosen), sorted(chosen, reverse=True))  # never past it


@pytest.mark.parametrize("drift", [0.003, 0.03, 0.3])
@pytest.mark.parametrize("skip", [1, 16, 128])
def test_before_an_exchange_nodes_are_apart_by_the_drift_aimed_at(drift, skip):
    policy, rate = Auto(drift=drift), drift**2 / 40.5
    _, last = trained(policy, 30, lambda batches, lr: rate, skip=skip)[-1]
    assert last == 40
    assert math.sqrt(last * rate) == pytest.approx(drift, rel=0.02)


@pytest.mark.parametrize("fragments", [2, 3, 5])
def test_fragments_share_the_batches_that_drift_allows(fragments):
    policy = Auto()
    rate = DRIFT**2 / 60.5
    _, last = trained(policy, 40, lambda batches, lr: rate, fragments=fragments)[-1]
    assert last == 60 // fragments  # each fragment is exchanged every 60 batches


@pytest.mark.parametrize("seconds", [0.5, 3.0, 10.0])
@pytest.mark.parametrize("start", [1, 7, 128])
def test_skip_settles_when_drift_grows_with_it(start, seconds):
    policy, least = Auto(), math.ceil(1.2 * seconds)
    for target in [*range(1, 20), 31, 50, 64, 99, 128]:
        rate = DRIFT**2 / target**2
        chosen = trained(policy, 60, lambda b, lr, r=rate: r * b, skip=start, seconds=seconds)
        settled = {skip for _, skip in chosen[-15:]}
        assert all(abs(skip - max(target, least)) <= 1 for skip in settled)


def noise(policy, allowed):
    """Drift of gradient noise: grows as the square of the rate; ``allowed`` batches at rate 1."""
    return lambda batches, lr: DRIFT**2 / (allowed + 0.5) * lr**2


def test_half_the_rate_makes_skip_four_times_as_long():
    def lr(batch):
        return 1.0 if batch < 400 else 0.5

    chosen = trained(Auto(), 60, noise(Auto(), 16), lr=lr)
    before = [skip for batch, skip in chosen if batch < 400]
    assert (before[-1], chosen[-1][1]) == (16, 66)
    rising = [skip for batch, skip in chosen if batch >= 400]
    assert rising[0] == 32  # at the first exchange that knows the rate
    assert rising == sorted(rising)


def test_higher_rate_shortens_skip_at_once():
    before = Measurements(1.0, 0.5, lr=0.1, drift=DRIFT**2 / 64)
    calm = tuned(Auto(), 64, 1, before, before=before)
    jump = tuned(Auto(), 64, 1, replace(before, lr=0.4), before=before)
    assert (calm.skip, jump.skip) == (64, 16)


def test_twice_the_rate_makes_skip_a_quarter_and_never_less_on_the_way():
    chosen = trained(Auto(), 60, noise(Auto(), 64), lr=lambda batch: 1.0 if batch < 800 else 2.0)
    after = [skip for batch, skip in chosen if batch >= 864]
    assert after[0] <= 32
    assert set(after[-20:]) == {16}
    assert min(after) >= 15


def test_a_rate_that_was_0_tells_nothing_about_growth():
    measurements = Measurements(1.0, 0.5, lr=0.1, drift=DRIFT**2 / 16)
    assert tuned(Auto(), 16, 1, measurements, before=Measurements(lr=0.0)).skip == 16


def test_a_rate_of_0_leaves_skip_as_it_is():
    measurements = Measurements(1.0, 0.5, lr=0.0, drift=1.0)
    assert tuned(Auto(), 16, 1, measurements, before=Measurements(lr=0.1)).skip == 16


def test_auto_begins_with_an_exchange_at_every_batch_and_doubles():
    chosen = trained(Auto(), 10, lambda batches, lr: 1e-12)
    assert Auto().start() == State(skip=1, wait=1)
    # The first exchange tells of no drift yet.
    assert [skip for _, skip in chosen] == [1, 2, 4, 8, 16, 32, 64, 128, 128, 128]


@pytest.mark.parametrize("warmup", [1, 5])
def test_the_warmup_of_auto_is_synchronous_and_then_anchors(warmup):
    policy = Auto(warmup=warmup)
    state = policy.start()
    assert state.synchronous
    for batch in range(1, warmup + 1):
        acts, state = after_batch(policy, state)
        assert acts == ((Action.ANCHOR,) if batch == warmup else ())
    assert (state.skip, state.wait) == (1, 1)
    acts, state = after_batch(policy, state)
    assert acts == (Action.SEND,)


# --- all policies ------------------------------------------------------------------------------


@checked
@given(pairs(), seens, seens, st.sampled_from(ALL))
def test_a_choice_is_a_function_of_state_and_what_was_seen(pair, measurements, before, policy):
    state = State(skip=pair[0], wait=pair[1], measurements=before)
    twin = State(skip=pair[0], wait=pair[1], measurements=replace(before))
    assert after_exchange(policy, state, measurements) == after_exchange(
        policy, twin, replace(measurements)
    )
    assert state == twin


@pytest.mark.parametrize("policy", [Fixed(), Plateau(epochs=20)])
def test_fixed_and_plateau_do_not_look_at_what_was_seen(policy):
    state = State(skip=4, wait=1)
    assert policy.tune_exchange(state, Measurements(1.0, 9.0, 0.1, 5.0)) is state


@pytest.mark.parametrize("policy", [Fixed(), Qsr(0.4), Auto()])
def test_a_loss_changes_nothing_but_for_plateau(policy):
    for loss in (1.0, math.nan):
        assert policy.tune_epoch(State(), loss) == State()


@pytest.mark.parametrize("policy", ALL)
def test_policies_are_frozen_and_say_their_settings(policy):
    with pytest.raises(FrozenInstanceError):
        setattr(policy, fields(policy)[0].name, 1)
    assert eval(repr(policy), vars(sys.modules[type(policy).__module__])) == policy


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"skip": 0}, "Fixed.skip must be a whole number of at least 1, not 0"),
        ({"skip": True}, "Fixed.skip must be a whole number of at least 1, not True"),
        ({"skip": 2.0}, "Fixed.skip must be a whole number of at least 1, not 2.0"),
        ({"skip": "4"}, "Fixed.skip must be a whole number of at least 1, not '4'"),
        ({"wait": -1}, "Fixed.wait must be a whole number of at least 0, not -1"),
        ({"wait": None}, "Fixed.wait must be a whole number of at least 0, not None"),
        ({"warmup": -1}, "Fixed.warmup must be a whole number of at least 0, not -1"),
        ({"skip": 4, "wait": 5}, "must not exceed skip=4 .* not 5; lower wait or raise skip"),
    ],
)
def test_fixed_refuses_with_rule_value_and_remedy(values, match):
    with pytest.raises(ConfigError, match=match):
        Fixed(**values)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"epochs": 0}, "Plateau.epochs must be a whole number of at least 1, not 0"),
        ({"epochs": 9.0}, "Plateau.epochs must be a whole number of at least 1, not 9.0"),
        ({"warmup": -1}, "Plateau.warmup must be a whole number of at least 0, not -1"),
        ({"cooldown": -1}, "Plateau.cooldown must be a whole number of at least 0, not -1"),
        ({"max_skip": 0}, "Plateau.max_skip must be a whole number of at least 1, not 0"),
        ({"patience": 0}, "Plateau.patience must be a whole number of at least 1, not 0"),
        ({"threshold": -0.1}, r"Plateau.threshold must .* \[0, 1\), not -0.1"),
        ({"threshold": 1}, r"Plateau.threshold must .* \[0, 1\), not 1"),
        ({"threshold": math.nan}, r"Plateau.threshold must .* \[0, 1\), not nan"),
        ({"threshold": "0.05"}, r"Plateau.threshold must .* \[0, 1\), not '0.05'"),
        ({"warmup": 5, "cooldown": 6}, "must not exceed epochs=10, not 5 \\+ 6; shorten them"),
    ],
)
def test_plateau_refuses_with_rule_value_and_remedy(values, match):
    with pytest.raises(ConfigError, match=match):
        Plateau(**{"epochs": 10} | values)


PAIRS = [(skip, wait) for skip in range(1, 9) for wait in range(skip + 1)]


@pytest.mark.parametrize("pair", [*PAIRS, (1000, 1000)])
def test_fixed_takes_every_wait_up_to_skip(pair):
    state = Fixed(*pair).start()
    assert (state.skip, state.wait) == pair


def test_the_defaults_are_written_down():
    assert Fixed() == Fixed(skip=4, wait=1, warmup=0)
    assert Plateau(9) == Plateau(
        epochs=9, warmup=4, cooldown=4, max_skip=4, threshold=0.05, patience=2
    )
    assert Qsr(0.4) == Qsr(alpha=0.4, skip=4, wait=1, max_skip=256)
    usual = Auto(
        drift=None, max_skip=128, warmup=0, budget=0.01, selective=2_000_000, sync_cost=0.1
    )
    assert Auto() == usual


def test_plateau_takes_the_edges_of_its_ranges():
    policy = Plateau(epochs=1, warmup=1, cooldown=0, max_skip=1, threshold=0, patience=1)
    assert policy.max_wait == 1


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"alpha": 0}, "Qsr.alpha must be a positive number, not 0"),
        ({"alpha": -0.1}, "Qsr.alpha must be a positive number, not -0.1"),
        ({"alpha": math.nan}, "Qsr.alpha must be a positive number, not nan"),
        ({"alpha": math.inf}, "Qsr.alpha must be a positive number, not inf"),
        ({"alpha": True}, "Qsr.alpha must be a positive number, not True"),
        ({"alpha": "0.1"}, "Qsr.alpha must be a positive number, not '0.1'"),
        ({"skip": 0}, "Qsr.skip must be a whole number of at least 1, not 0"),
        ({"skip": 2.0}, "Qsr.skip must be a whole number of at least 1, not 2.0"),
        ({"wait": -1}, "Qsr.wait must be a whole number of at least 0, not -1"),
        ({"wait": True}, "Qsr.wait must be a whole number of at least 0, not True"),
        ({"max_skip": 0}, "Qsr.max_skip must be a whole number of at least 1, not 0"),
        ({"wait": 5}, "Qsr.wait must not exceed skip=4, not 5; lower it"),
        ({"max_skip": 3}, "Qsr.skip must not exceed max_skip=3, not 4; lower it"),
        ({"skip": 1, "wait": 0}, "Qsr.wait must be at least 1 where skip is 1 .* not 0; raise"),
    ],
)
def test_qsr_refuses_with_rule_value_and_remedy(values, match):
    with pytest.raises(ConfigError, match=match):
        Qsr(**{"alpha": 0.1} | values)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"drift": 0.0}, "Auto.drift must be a positive number, or None, not 0.0"),
        ({"drift": math.nan}, "Auto.drift must be a positive number, or None, not nan"),
        ({"budget": 0.0}, "Auto.budget must be a positive number, not 0.0"),
        ({"sync_cost": 0}, "Auto.sync_cost must be a positive number, not 0"),
        ({"budget": None}, "Auto.budget must be a positive number, not None"),
        ({"max_skip": 0}, "Auto.max_skip must be a whole number of at least 1, not 0"),
        ({"max_skip": 1.5}, "Auto.max_skip must be a whole number of at least 1, not 1.5"),
        ({"warmup": -1}, "Auto.warmup must be a whole number of at least 0, not -1"),
        ({"warmup": False}, "Auto.warmup must be a whole number of at least 0, not False"),
    ],
)
def test_auto_refuses_with_rule_and_value(values, match):
    with pytest.raises(ConfigError, match=match):
        Auto(**values)


def test_qsr_and_auto_take_the_edges_of_their_ranges():
    assert Qsr(1, skip=1, wait=1, max_skip=1).start() == State(skip=1, wait=1)
    assert Qsr(1, skip=2, wait=0, max_skip=2).start() == State(skip=2, wait=0)
    assert tuned(Auto(drift=1, max_skip=1), 1, 1, Measurements(1.0, 9.0, 0.1, 1e-9)).skip == 1


@pytest.mark.parametrize(
    ("seconds", "step", "budget", "period"),
    [
        (0.0, 0.1, 0.01, SMALL_PERIOD),
        (0.004, 0.07, 0.01, 2),
        (0.006, 0.07, 0.01, 3),
        (0.006, 0.07, 0.02, 2),
        (0.012, 0.1, 0.01, 3),
        (0.0121, 0.1, 0.01, 0),
        (0.003, 1e-6, 0.01, 0),
        (0.003, 0.0, 0.01, 9),
        (math.inf, 0.07, 0.01, 0),
    ],
)
def test_small_tensors_go_as_often_as_four_times_the_budget_pays_for(seconds, step, budget, period):
    state = State(skip=30, wait=2, small=SmallTensors(0.1, 9))
    told = Measurements(step, 0.1, 0.1, 1e-12, small_seconds=seconds)
    assert after_exchange(Auto(budget=budget), state, told)[1].small.period == period


@pytest.mark.parametrize(
    ("wait", "skip", "half", "share", "seconds", "max_skip", "expected"),
    [
        (3, 20, 4, 0.1, 0.0, 128, 24),  # eight times 3
        (3, 10, 4, 0.1, 0.0, 128, 20),  # no more than twice what it was
        (3, 20, 4, 0.1, 0.0, 11, 11),
        (3, 10, 4, 0.0, 0.0, 128, 4),
        (3, 10, 4, 0.1, 9.0, 128, 4),  # small tensors cost too much
        (3, 90, 70, 0.1, 0.0, 128, 70),
        (2, 20, 4, 0.1, 0.0, 128, 4),  # it is over as soon as they are
        (1, 20, 1, 0.1, 0.0, 128, 1),
    ],
)
def test_everything_leaves_small_tensors_room_to_go_alone(
    wait, skip, half, share, seconds, max_skip, expected
):
    """While it is on its way they stay. Drift alone would have it half of the way, at `half`."""
    drift = 0.025**2 * skip / half**2
    told = Measurements(0.1, 0.08 * wait, 0.1, drift, own_seconds=1.0)
    state = State(skip=skip, wait=wait, small=SmallTensors(share), measurements=told)
    policy, told = Auto(max_skip=max_skip), replace(told, small_seconds=seconds)
    state = after_exchange(policy, state, told)[1]
    assert state.skip == expected


def test_where_small_tensors_cost_too_much_they_are_tried_again():
    policy, told = Auto(), Measurements(0.1, 0.1, 0.1, 1e-12, own_seconds=1.0)
    state, periods = State(batch=300, skip=30, wait=2, small=SmallTensors(0.1)), []
    for seconds in (0.006, 0.014, *(9 * [0.0])):  # of one that took long half counts
        _, state = after_exchange(policy, state, replace(told, small_seconds=seconds))
        periods.append(state.small.period)
    assert periods == [2, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2]
    for seconds in (0.04, *(9 * [0.0])):
        _, state = after_exchange(policy, state, replace(told, small_seconds=seconds))
        periods.append(state.small.period)
    assert periods[11:] == [0, 0, 0, 0, 0, 0, 3, 3, 3, 3]
