"""Every exchange is received once and none is left in flight: all cases, then random ones."""

import json
from dataclasses import asdict, replace
from itertools import chain, cycle, pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.auto import Auto
from daso.plan.exchange import Tally
from daso.plan.header import Header
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import (
    Action,
    Measurements,
    State,
    after_batch,
    after_epoch,
    after_exchange,
    drain,
)
from daso.plan.small_tensors import SMALL_PERIOD, SMALL_WAIT, SmallTensors
from daso.plan.step_restoration import required_gain

checked = settings(derandomize=True, max_examples=100, deadline=None)

SEND, SEND_ALL, RECEIVE, MEASURE = Action.SEND, Action.SEND_ALL, Action.RECEIVE, Action.MEASURE
SETTLE = Action.SETTLE
SEND_SMALL = Action.SEND_SMALL
# By the last act after measurements: whether all were in step before, and are afterwards.
TURNS = {
    (): [(False, False), (True, True)],
    (Action.JOIN,): [(False, True)],
    (Action.ANCHOR,): [(True, False)],
}

# --- every skip, wait and length ---------------------------------------------------------------


def walk(skip, wait, batches):
    """Train for so many batches, and after each also end there; return how many lengths that was.

    The expected acts come from the numbers alone: ranks with the same ones cannot differ.
    """
    policy, flight, sends = Fixed(skip, wait), None, 0
    state = policy.start()
    for batch in range(1, batches + 1):
        acts, state = after_batch(policy, state)
        for act in acts:
            if act is RECEIVE:
                assert flight is not None  # received once
                assert batch == flight + wait
                flight = None
            else:
                assert act is SEND
                assert flight is None  # before the next is sent
                flight, sends = batch, sends + 1
        assert sends == batch // skip
        acts, ended = drain(state)
        late = batch % skip != 0  # work that is in no exchange yet
        receives = (SETTLE if late else RECEIVE,) * (flight is not None)
        assert acts == receives + (SEND_ALL, RECEIVE) * late
        assert ended.sent is None
        assert ended.agreed == batch
    return batches


@pytest.mark.later("half a million cases")
def test_every_case_receives_each_exchange_once():
    pairs = [(skip, wait) for skip in range(1, 65) for wait in range(skip + 1)]
    pairs.remove((1, 0))  # synchronous: nothing is sent
    assert sum(walk(skip, wait, 240) for skip, wait in pairs) > 500_000


def walk_fragments(skip, wait, fragments, batches):
    """The same with fragments: they take turns, and an end exchanges all of them."""
    policy, flight, sends = Fixed(skip, wait), None, 0
    state = replace(policy.start(), fragments=fragments)
    for batch in range(1, batches + 1):
        acts, state = after_batch(policy, state)
        for act in acts:
            if act is RECEIVE:
                assert flight is not None
                assert batch == flight + wait
                flight = None
            else:
                assert act is SEND
                assert flight is None
                assert state.fragment == sends % fragments
                flight, sends = batch, sends + 1
        assert sends == batch // skip
        acts, ended = drain(state)
        # No send of one fragment makes all agree.
        assert acts == (SETTLE,) * (flight is not None) + (SEND_ALL, RECEIVE)
        assert (ended.sent, ended.agreed, ended.last) == (None, batch, batch)
        assert ended.sends == sends  # the turn goes on where it was
    return batches


@pytest.mark.parametrize("fragments", [2, 3, 5])
def test_with_fragments_each_is_sent_in_turn_and_an_end_makes_all_agree(fragments):
    pairs = [(skip, wait) for skip in range(1, 17) for wait in range(skip + 1) if skip + wait > 1]
    cases = sum(walk_fragments(skip, wait, fragments, 12 * skip + 1) for skip, wait in pairs)
    assert cases > 15_000


@pytest.mark.parametrize("fragments", [2, 3, 5])
def test_next_fragment_follows_after_an_epoch_end(fragments):
    policy = Fixed(skip=3, wait=1)
    state = replace(policy.start(), fragments=fragments)
    sent = []
    for batch in range(1, 61):
        acts, state = after_batch(policy, state)
        if SEND in acts:
            sent.append((batch, state.fragment))
        if batch % 10 == 0:
            _, state = drain(state)
    batches = [10 * ten + offset for ten in range(6) for offset in (3, 6, 9)]
    assert sent == [(batch, turn % fragments) for turn, batch in enumerate(batches)]


@pytest.mark.parametrize("period", [SMALL_PERIOD, 3, 7, 40])
@pytest.mark.parametrize("skip", [1, 2, 3, 4, 8, 15, 16, 46, 128])
def test_small_exchanges_delay_no_full_exchange(skip, period):
    for wait in {min(skip, wait) for wait in (1, 2, 3, skip)}:
        policy = Fixed(skip, wait)
        plain, small = policy.start(), []
        state = replace(plain, small=SmallTensors(0.8 * SMALL_WAIT / skip, period))
        for batch in range(1, 4 * skip + 1):
            without, plain = after_batch(policy, plain)
            acts, state = after_batch(policy, state)
            rest = list(acts)
            if small and batch == small[-1] + SMALL_WAIT:
                assert rest.pop(0) is RECEIVE
            if SEND_SMALL in rest:
                assert rest.pop() is SEND_SMALL
                small.append(batch)
            assert tuple(rest) == without  # what goes with everything goes as if there were no more
            assert state.last == plain.last
        gaps = [later - batch for batch, later in pairwise(small)]
        assert all(gap >= period for gap in gaps)
        assert all(period <= batch % skip <= skip - period for batch in small)
        # While everything is in flight, for `wait` batches, they do not go by themselves.
        rounds = [[at for at in small if at // skip == number] for number in range(4)]
        assert rounds[0] == list(range(period, skip - period + 1, period))
        first = period if wait < period else wait + 1  # not in the batch that merges everything
        grids = [range(first, skip - period + 1, period)] * 3
        assert [[at % skip for at in one] for one in rounds[1:]] == list(map(list, grids))


@pytest.mark.parametrize(
    ("share", "wait", "period", "goes"),
    [(0.2, 8, 2, True), (0.2, 9, 2, False), (0, 1, 2, False), (0.2, 8, 0, False)],
)
def test_small_tensors_that_take_longer_than_they_may_do_not_go_alone(share, wait, period, goes):
    policy = Fixed(32, wait)
    state, small = replace(policy.start(), small=SmallTensors(share, period)), 0
    for _ in range(64):
        acts, state = after_batch(policy, state)
        small += SEND_SMALL in acts
    assert (small > 0) == goes


# --- any policy, whatever is measured ----------------------------------------------------------


class Training:
    """One rank's schedule, and the exchange that is in flight as its acts say."""

    def __init__(self, policy, fragments, told):
        self.policy, self.told = policy, cycle(told)
        share = 0.05 if isinstance(policy, Auto) and fragments == 1 else 0.0
        small = SmallTensors(share)
        self.state = replace(policy.start(), fragments=fragments, small=small)
        self.small = False  # what is in flight is small tensors alone
        self.flight, self.sends, self.log = None, 0, []
        self.waits = []  # since the exchange in flight was sent

    def _perform(self, acts, state):
        small = self.small
        self._carry_out(acts, state)
        if sum(act in (RECEIVE, SETTLE) for act in acts) > small or MEASURE in acts:
            self._learn()

    def _carry_out(self, acts, state):
        self.state = state
        self.log.append((state.batch, acts))
        for act in acts:
            if act in (RECEIVE, SETTLE):
                assert self.flight is not None, "received once"
                self.flight, self.small = None, False
            if act in (SEND, SEND_ALL, SEND_SMALL):
                assert self.flight is None, "received before the next is sent"
                self.flight, self.waits = state.batch, []
                self.small = act is SEND_SMALL
            if act is SEND:
                assert state.fragment == self.sends % state.fragments
                self.sends += 1
        self.waits.append(SMALL_WAIT if self.small else state.wait)
        assert (self.flight is None) == (state.sent is None)
        assert not (state.synchronous and self.flight is not None)

    def _learn(self):
        measurements, before = next(self.told), self.state.synchronous
        acts, state = after_exchange(self.policy, self.state, measurements)
        assert (before, state.synchronous) in TURNS[acts[-1:]]
        self._carry_out(acts, state)
        assert self.state.measurements == measurements
        self.waits.append(SMALL_WAIT if self.small else self.state.wait)

    def step(self):
        flight, waits = self.flight, list(self.waits)
        self._perform(*after_batch(self.policy, self.state))
        if flight is not None and flight == self.flight:
            assert self.state.batch - flight < max(waits)
        elif flight is not None:  # wait may have changed in between
            assert min(waits) <= self.state.batch - flight <= max(waits)

    def end_epoch(self, loss):
        self._perform(*after_epoch(self.policy, self.state, loss))
        self._at_rest()

    def drain(self):
        self._perform(*drain(self.state))
        self._at_rest()

    def _at_rest(self):
        assert self.flight is None
        assert (self.state.sent, self.state.agreed) == (None, self.state.batch)
        assert drain(self.state) == ((), self.state)

    def go(self, what):
        kind, value = what
        if kind == "batches":
            for _ in range(value):
                self.step()
        elif kind == "epoch":
            self.end_epoch(value)
        else:
            self.drain()


@st.composite
def fixed(draw):
    skip = draw(st.integers(1, 12))
    return Fixed(skip, draw(st.integers(0, skip)), warmup=draw(st.integers(0, 9)))


@st.composite
def quadratic(draw):
    skip = draw(st.integers(1, 8))
    wait = draw(st.integers(1 if skip == 1 else 0, skip))
    return Qsr(draw(st.sampled_from([0.01, 0.3, 1.0])), skip, wait, draw(st.integers(skip, 20)))


plateaus = st.builds(
    Plateau,
    epochs=st.integers(6, 12),
    warmup=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    max_skip=st.integers(1, 16),
    patience=st.integers(1, 2),
)
autos = st.builds(
    Auto,
    drift=st.sampled_from([1e-3, 0.03, 1.0]),
    max_skip=st.integers(1, 40),
    warmup=st.integers(0, 9),
)
policies = st.one_of(fixed(), plateaus, quadratic(), autos)
amounts = st.one_of(st.sampled_from([0.0, 1e-300, 1e300]), st.floats(1e-6, 10.0))
measured = st.lists(st.builds(Measurements, *[amounts] * 8), min_size=1, max_size=12)
whole = st.one_of(
    st.tuples(st.just("batches"), st.one_of(st.integers(1, 40), st.integers(100, 140))),
    st.tuples(st.just("epoch"), st.sampled_from([0.5, 1.0, 2.0])),
    st.just(("drain", None)),
)
plans = st.lists(whole, min_size=1, max_size=12)
fragments_of_any = st.sampled_from([1, 1, 2, 3, 5])


@settings(checked, max_examples=400)
@given(policies, fragments_of_any, measured, plans)
def test_any_measurement_receives_each_send_once(policy, fragments, told, plan):
    training = Training(policy, fragments, told)
    for what in plan:
        training.go(what)
    training.drain()


@checked
@given(policies, fragments_of_any, measured, plans)
def test_a_run_resumed_from_a_file_takes_the_same_acts_whatever_was_seen(
    policy, fragments, told, plan
):
    straight, resumed = Training(policy, fragments, told), Training(policy, fragments, told)
    for what in plan:
        straight.go(what)
        resumed.state = State.load(json.loads(json.dumps(asdict(resumed.state))))
        resumed.go(what)
    assert resumed.log == straight.log
    assert resumed.state == straight.state


@checked
@given(policies, st.integers(1, 5), measured)
def test_a_state_goes_through_a_file_unchanged_and_keeps_its_types(policy, fragments, told):
    training = Training(policy, fragments, told)
    training.go(("batches", 30))
    loaded = State.load(json.loads(json.dumps(asdict(training.state))))
    assert loaded == training.state
    assert type(loaded.measurements) is Measurements
    assert type(loaded.plateau) is type(training.state.plateau)


def test_a_file_without_one_of_the_numbers_is_refused():
    values = asdict(State())
    for name in values:
        with pytest.raises(KeyError, match=name):
            State.load({other: value for other, value in values.items() if other != name})


# --- all ranks ---------------------------------------------------------------------------------

of_a_rank = st.tuples(
    st.floats(1e-3, 10.0),
    st.floats(1e-3, 10.0),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(1, 2),
    st.floats(0, 1),
)
of_an_exchange = st.tuples(of_a_rank, of_a_rank, of_a_rank)


def agreed(said, order):
    """What a rank sees when MPI reduces in this order."""
    most, sums = Header(), Tally()
    for rank in order:
        step, exchange, lr, distance, norm, moved = said[rank]
        header = Header(minus_step_seconds=-step, minus_exchange_seconds=-exchange, lr=lr)
        pairs = zip(most.encode(), header.encode(), strict=True)
        most = Header.decode([max(pair) for pair in pairs])
        sums += Tally.measured(distance, norm, moved, 2.0)
    drift = sums.drift(nodes=len(said), batches=3)
    lacked = required_gain(sums.distance, sums.moved, nodes=len(said), batches=3, momentum=0.9)
    return Measurements(most.step_seconds, most.exchange_seconds, most.lr, drift, lacked)


@checked
@given(policies, fragments_of_any, st.lists(of_an_exchange, min_size=1, max_size=8))
def test_ranks_that_measure_differently_decide_the_same(policy, fragments, exchanges):
    ranks = [
        Training(policy, fragments, [agreed(said, order) for said in exchanges])
        for order in permutations(range(3))
    ]
    for rank in ranks:
        rank.go(("batches", 60))
        rank.drain()
    assert all(rank.log == ranks[0].log and rank.state == ranks[0].state for rank in ranks)
    assert ranks[0].flight is None
    assert {type(act) for act in chain(*(acts for _, acts in ranks[0].log))} <= {Action}
