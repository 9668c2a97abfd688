import itertools
import json
import math
from dataclasses import FrozenInstanceError, asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.policies import Fixed, Plateau
from daso.plan.rejoin import Progress, rejoin
from daso.plan.schedule import Action, State, after_batch, after_epoch, drain

checked = settings(derandomize=True, max_examples=100, deadline=None)

ANCHOR, SEND, RECEIVE, JOIN = Action.ANCHOR, Action.SEND, Action.RECEIVE, Action.JOIN
SETTLE = Action.SETTLE
SEND_ALL = Action.SEND_ALL
PAIRS = [(skip, wait) for skip in range(1, 9) for wait in range(skip + 1)]
SKIPPING = [pair for pair in PAIRS if pair != (1, 0)]


def play(policy, epochs, losses=None):
    """Train epochs of these many batches; return each call's acts, as (batch, acts), and the state.

    Every epoch but the last is ended with end_epoch.
    """
    state, calls = policy.start(), []
    for number, batches in enumerate(epochs):
        if number:
            acts, state = after_epoch(policy, state, losses[number - 1] if losses else 1.0)
            calls.append((state.batch, acts))
        for _ in range(batches):
            acts, state = after_batch(policy, state)
            calls.append((state.batch, acts))
    return calls, state


def flat(calls):
    return [(batch, act) for batch, acts in calls for act in acts]


def exchanges(events):
    """Pair each send with the receive after it: (batch sent, batch received or None).

    Anything but send, receive, send, receive, ... is two in flight or a receipt of nothing.
    """
    sends = {SEND: SEND, SEND_ALL: SEND, RECEIVE: RECEIVE, SETTLE: RECEIVE}
    traffic = [(batch, sends[act]) for batch, act in events if act in sends]
    assert [act for _, act in traffic] == [SEND, RECEIVE] * (len(traffic) // 2) + [SEND] * (
        len(traffic) % 2
    )
    batches = [batch for batch, _ in traffic]
    return list(itertools.zip_longest(batches[::2], batches[1::2]))


def expected_exchanges(skip, wait, epochs):
    """The same pairs, from the words of the documentation, for epochs that are all ended."""
    pairs, start = [], 0
    for batches in epochs:
        end = start + batches
        sends = list(range(start + skip, end + 1, skip))  # counted from the epoch's start
        pairs += [(sent, min(sent + wait, end)) for sent in sends]
        if batches % skip:
            pairs.append((end, end))  # work since the last send goes into one more
        start = end
    return pairs


# --- Fixed: every skip, wait, length and place of an epoch's end ------------------------------


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_each_send_is_received_after_wait_batches(skip, wait):
    calls, state = play(Fixed(skip, wait), [40])
    pairs = exchanges(flat(calls))
    assert [sent for sent, _ in pairs] == list(range(skip, 41, skip))
    for sent, received in pairs:
        assert received == (sent + wait if sent + wait <= 40 else None)
    in_flight = [sent for sent, received in pairs if received is None]
    assert state.sent == (in_flight[0] if in_flight else None)


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_drain_after_any_batch_leaves_nothing_in_flight(skip, wait):
    policy = Fixed(skip, wait)
    for batches in range(41):
        calls, state = play(policy, [batches])
        acts, drained = drain(state)
        assert exchanges([*flat(calls), *((batches, act) for act in acts)]) == expected_exchanges(
            skip, wait, [batches]
        )
        assert (drained.sent, drained.agreed, drained.batch) == (None, batches, batches)
        assert drain(drained) == ((), drained)


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_an_epoch_may_end_anywhere_and_the_grid_starts_again_from_there(skip, wait):
    for first in range(41):
        epochs = [first, 40 - first]
        calls, state = play(Fixed(skip, wait), [*epochs, 0])
        assert exchanges(flat(calls)) == expected_exchanges(skip, wait, epochs)
        assert (state.epoch, state.batch, state.sent, state.agreed) == (2, 40, None, 40)


@pytest.mark.parametrize(("skip", "wait"), [pair for pair in SKIPPING if pair[0] <= 4])
def test_any_number_of_epochs_may_end_anywhere(skip, wait):
    for ends in itertools.product([False, True], repeat=7):
        cuts = [0, *(batch for batch, end in enumerate(ends, 1) if end), 8]
        epochs = [b - a for a, b in itertools.pairwise(cuts)]
        calls, _ = play(Fixed(skip, wait), [*epochs, 0])
        assert exchanges(flat(calls)) == expected_exchanges(skip, wait, epochs)


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_no_rank_drifts_longer_than_skip_batches_without_a_send(skip, wait):
    state = Fixed(skip, wait).start()
    for _ in range(40):
        _, state = after_batch(Fixed(skip, wait), state)
        assert state.batch - state.agreed < skip


def test_wait_equal_to_skip_receives_before_it_sends():
    calls, _ = play(Fixed(skip=2, wait=2), [6])
    assert [acts for _, acts in calls] == [(), (SEND,), (), (RECEIVE, SEND), (), (RECEIVE, SEND)]


def test_a_blocking_exchange_is_sent_and_received_after_the_same_batch():
    calls, _ = play(Fixed(skip=3, wait=0), [7])
    assert [acts for _, acts in calls] == [(), (), (SEND, RECEIVE), (), (), (SEND, RECEIVE), ()]


def test_drain_receives_then_exchanges_later_work():
    _, state = play(Fixed(skip=4, wait=2), [5])
    acts, _ = drain(state)
    assert acts == (SETTLE, SEND_ALL, RECEIVE)


def test_a_drain_right_after_a_send_only_receives_it():
    _, state = play(Fixed(skip=4, wait=2), [4])
    acts, _ = drain(state)
    assert acts == (RECEIVE,)


def test_drain_after_a_late_receipt_exchanges():
    _, state = play(Fixed(skip=4, wait=1), [5])
    assert state.sent is None
    acts, _ = drain(state)
    assert acts == (SEND_ALL, RECEIVE)


def test_epochs_without_batches_need_no_acts_and_are_counted():
    calls, state = play(Fixed(skip=4, wait=1), [0, 0, 3, 0, 0])
    assert [acts for _, acts in calls] == [(), (), (), (), (), (SEND_ALL, RECEIVE), ()]
    assert (state.epoch, state.batch) == (4, 3)


def test_send_grid_restarts_with_each_epoch():
    epochs = [7, 9, 7, 4, 11, 1, 7]
    calls, _ = play(Fixed(skip=4, wait=1), [*epochs, 0])
    starts = [0, *itertools.accumulate(epochs)]
    offsets = [
        [sent - start for sent, _ in exchanges(flat(calls)) if start < sent <= stop]
        for start, stop in itertools.pairwise(starts)
    ]
    assert offsets == [[4, 7], [4, 8, 9], [4, 7], [4], [4, 8, 11], [1], [4, 7]]


def test_ending_an_epoch_on_the_grid_sends_nothing_more():
    calls, _ = play(Fixed(skip=4, wait=1), [8, 8, 0])
    assert exchanges(flat(calls)) == [(4, 5), (8, 8), (12, 13), (16, 16)]


@pytest.mark.parametrize("warmup", [0, 5])
def test_skip_1_wait_0_is_synchronous_and_has_nothing_to_do(warmup):
    calls, state = play(Fixed(skip=1, wait=0, warmup=warmup), [7, 0, 6, 0])
    assert flat(calls) == []
    assert state.synchronous
    assert (state.batch, state.agreed, state.sent) == (13, 13, None)


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_every_other_phase_is_not_synchronous(skip, wait):
    assert not Fixed(skip, wait).start().synchronous


@pytest.mark.parametrize(("skip", "wait"), SKIPPING)
def test_warmup_is_synchronous_then_anchors_once(skip, wait):
    calls, _ = play(Fixed(skip, wait, warmup=10), [40])
    events = flat(calls)
    assert events[0] == (10, ANCHOR)
    assert [act for _, act in events].count(ANCHOR) == 1
    assert [sent for sent, _ in exchanges(events)] == list(range(10 + skip, 41, skip))


@pytest.mark.parametrize(
    "epochs", [[30], [3] * 10, [10, 20], [9, 1, 1, 19], [0, 0, 10, 0, 20], [11, 19]]
)
def test_a_warmup_counts_batches_wherever_epochs_end(epochs):
    calls, _ = play(Fixed(skip=4, wait=1, warmup=10), epochs)
    assert [batch for batch, act in flat(calls) if act is ANCHOR] == [10]
    assert all(batch >= 10 for batch, _ in flat(calls))


def test_a_loss_changes_nothing_for_fixed():
    assert play(Fixed(), [3, 3, 3], [1.0, 2.0]) == play(Fixed(), [3, 3, 3], [math.nan, -1.0])


# --- any policy: changes between phases --------------------------------------------------------


class Scripted:
    """A policy that follows a list of (skip, wait), one for each time it is asked."""

    def __init__(self, script):
        self.script = script
        self.asked = 0

    def _next(self, state):
        skip, wait = self.script[self.asked % len(self.script)]
        self.asked += 1
        return replace(state, skip=skip, wait=wait)

    def start(self):
        return self._next(State())

    def tune_batch(self, state):
        return self._next(state)

    def tune_exchange(self, state, seen):
        return self._next(state)

    def tune_epoch(self, state, loss):
        return self._next(state)


scripts = st.lists(
    st.sampled_from([(1, 0), *PAIRS[:20]]).flatmap(
        lambda pair: st.integers(1, 4).map(lambda times: [pair] * times)
    ),
    min_size=1,
    max_size=15,
).map(lambda runs: list(itertools.chain(*runs)))
lengths = st.lists(st.integers(0, 12), min_size=1, max_size=5)


def steps(policy, epochs):
    """Yield (state before, acts, state after) of every call, epochs ended."""
    state = policy.start()
    for batches in epochs:
        for _ in range(batches):
            before = state
            acts, state = after_batch(policy, state)
            yield before, acts, state
        before = state
        acts, state = after_epoch(policy, state, 1.0)
        yield before, acts, state


@checked
@given(scripts, lengths)
def test_any_policy_receives_each_send_before_the_next(script, epochs):
    events = [
        (after.batch, act) for _, acts, after in steps(Scripted(script), epochs) for act in acts
    ]
    pairs = exchanges(events)
    assert all(received is not None for _, received in pairs)


@checked
@given(scripts, lengths)
def test_anchor_comes_exactly_on_leaving_a_synchronous_phase_and_alone(script, epochs):
    for before, acts, after in steps(Scripted(script), epochs):
        leaves = before.synchronous and not after.synchronous
        assert (ANCHOR in acts) == leaves
        if leaves:
            assert acts == (ANCHOR,)


@checked
@given(scripts, lengths)
def test_join_comes_exactly_on_entering_a_synchronous_phase_and_last(script, epochs):
    for before, acts, after in steps(Scripted(script), epochs):
        enters = not before.synchronous and after.synchronous
        assert (JOIN in acts) == enters
        if enters:
            assert acts.index(JOIN) == len(acts) - 1


@checked
@given(scripts, lengths)
def test_in_a_synchronous_phase_nothing_is_sent_or_in_flight_and_all_agree(script, epochs):
    for before, acts, after in steps(Scripted(script), epochs):
        if before.synchronous:
            assert not {SEND, SEND_ALL, RECEIVE}.intersection(acts)
        if after.synchronous:
            assert after.sent is None
            assert after.agreed == after.batch


@checked
@given(scripts, lengths)
def test_a_drain_at_any_moment_leaves_nothing_in_flight_and_all_agreed(script, epochs):
    for _, _, after in steps(Scripted(script), epochs):
        acts, drained = drain(after)
        late = after.agreed != after.batch  # work that is in no exchange yet
        last = after.batch if late else after.last
        assert drained == replace(after, sent=None, agreed=after.batch, last=last)
        assert (RECEIVE in acts) == (after.sent is not None or late)
        assert (SEND_ALL in acts) == late
        assert (SETTLE in acts) == (late and after.sent is not None)
        assert drain(drained) == ((), drained)


def test_joining_in_the_middle_of_an_epoch_drains_first():
    policy = Scripted([(4, 2)] * 6 + [(1, 0)] * 9)
    calls, _ = play(policy, [8])
    assert flat(calls) == [(4, SEND), (6, RECEIVE), (6, SEND_ALL), (6, RECEIVE), (6, JOIN)]


# --- Plateau: the paper's four phases ----------------------------------------------------------

# What the paper and its implementation do with the largest skip: (skip, wait), stall by stall.
LADDERS = {
    1: [(1, 1)],
    2: [(2, 1), (1, 1)],
    3: [(3, 1), (1, 1)],
    4: [(4, 1), (2, 1), (1, 1)],
    5: [(5, 1), (2, 1), (1, 1)],
    8: [(8, 2), (4, 1), (2, 1), (1, 1)],
    12: [(12, 3), (6, 2), (3, 1), (1, 1)],
    16: [(16, 4), (8, 3), (4, 2), (2, 1), (1, 1)],
}


def model_of_the_paper(policy, losses):
    """Return (skip, wait) of every epoch: a ladder to walk down, and a list of losses to look at.

    Epoch number n is trained before losses[n] is known.
    """
    phases, rung = [], 0
    ladder = LADDERS[policy.max_skip]
    since = []  # losses of the cycling phase, from the last improvement or stall on
    best = None
    for epoch in range(len(losses) + 1):
        warming = epoch < policy.warmup
        cooling = epoch >= policy.epochs - policy.cooldown
        if warming or cooling:
            phases.append((1, 0))
            continue
        if epoch > policy.warmup:  # an epoch of cycling is over
            loss = losses[epoch - 1]
            if math.isfinite(loss) and (best is None or loss < best - policy.threshold * best):
                best, since = loss, []
            else:
                since.append(loss)
            if len(since) == policy.patience:
                rung, since = (rung + 1) % len(ladder), []
        phases.append(ladder[rung])
    return phases


def phases_of(policy, losses):
    state = policy.start()
    phases = [(state.skip, state.wait)]
    for loss in losses:
        _, state = after_epoch(policy, state, loss)
        phases.append((state.skip, state.wait))
    return phases


@st.composite
def plateaus(draw):
    epochs = draw(st.integers(1, 30))
    warmup = draw(st.integers(0, min(epochs, 6)))
    return Plateau(
        epochs,
        warmup=warmup,
        cooldown=draw(st.integers(0, min(epochs - warmup, 6))),
        max_skip=draw(st.sampled_from(list(LADDERS))),
        threshold=draw(st.sampled_from([0.0, 0.05, 0.5])),
        patience=draw(st.integers(1, 3)),
    )


# Few different values, so that improvements, ties and stalls all happen.
some_losses = st.lists(
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 0.1, 0.3, 0.98, 1.0, 1.02, 4.0, 16.0]),
    max_size=35,
)


@checked
@given(plateaus(), some_losses)
def test_plateau_goes_through_the_papers_four_phases(policy, losses):
    assert phases_of(policy, losses) == model_of_the_paper(policy, losses)


@pytest.mark.parametrize("max_skip", list(LADDERS))
def test_plateau_halves_skip_at_each_stall_then_restarts(max_skip):
    policy = Plateau(epochs=100, warmup=0, cooldown=0, max_skip=max_skip, patience=1)
    ladder = LADDERS[max_skip]
    first_loss_improves = ladder[:1]
    phases = phases_of(policy, [1.0] * (3 * len(ladder)))
    assert phases == first_loss_improves + ladder * 3


def test_plateau_as_the_paper_sets_it():
    losses = [2.0, 1.5, 1.2, 1.1] + [1.0] * 8  # the fifth is the first of the cycling phase
    policy = Plateau(epochs=16)
    assert phases_of(policy, losses + [1.0] * 3) == (
        [(1, 0)] * 4 + [(4, 1)] * 3 + [(2, 1)] * 2 + [(1, 1)] * 2 + [(4, 1)] + [(1, 0)] * 4
    )


@pytest.mark.parametrize("max_skip", [1, 2, 3, 4, 8, 16, 24, 32, 64])
def test_cycling_never_waits_0_batches(max_skip):
    policy = Plateau(epochs=60, warmup=1, cooldown=1, max_skip=max_skip, patience=1)
    cycling = phases_of(policy, [1.0] * 58)[1:59]
    assert cycling[0] == (max_skip, max(1, max_skip // 4))
    assert min(wait for _, wait in cycling) >= 1


@pytest.mark.parametrize("max_skip", [1, 4, 16, 24, 32, 64])
def test_cycling_never_waits_longer_than_skip(max_skip):
    # Fixed refuses such a pair: the exchange in flight would hold the next send back.
    policy = Plateau(epochs=60, warmup=1, cooldown=1, max_skip=max_skip, patience=1)
    cycling = phases_of(policy, [1.0] * 58)[1:59]
    assert {(skip, wait) for skip, wait in cycling if wait > skip} == set()


@pytest.mark.parametrize(("warmup", "cooldown"), [(0, 6), (6, 0), (2, 4), (3, 3)])
def test_plateau_without_middle_epochs_stays_synchronous(warmup, cooldown):
    policy = Plateau(epochs=6, warmup=warmup, cooldown=cooldown)
    calls, state = play(policy, [5] * 7, [1.0] * 6)
    assert flat(calls) == []
    assert state.synchronous


def test_without_a_warmup_plateau_cycles_from_the_first_batch():
    assert Plateau(epochs=8, warmup=0).start() == State(skip=4, wait=1)


def test_without_a_cooldown_plateau_cycles_to_the_end():
    phases = phases_of(Plateau(epochs=8, warmup=0, cooldown=0), [1.0] * 8)
    assert (1, 0) not in phases[:8]
    assert phases[8:] == [(1, 0)]  # trained longer than it was told


def test_plateau_stays_in_cooldown_after_its_epochs():
    policy = Plateau(epochs=10, warmup=2, cooldown=2)
    assert phases_of(policy, [1.0] * 20)[8:] == [(1, 0)] * 13


def test_losses_of_the_warmup_do_not_count_as_a_best_for_cycling():
    policy = Plateau(epochs=20, warmup=2, cooldown=0, patience=1)
    assert phases_of(policy, [0.1, 0.1, 5.0, 4.0, 3.0])[2:] == [(4, 1)] * 4


@pytest.mark.parametrize("batches", [1, 5, 8])
def test_plateau_anchors_and_joins_once(batches):
    policy = Plateau(epochs=9, warmup=2, cooldown=3, max_skip=4)
    calls, state = play(policy, [batches] * 9 + [0], [1.0] * 9)
    events = flat(calls)
    turns = [(batch, act) for batch, act in events if act in (ANCHOR, JOIN)]
    assert turns == [(2 * batches, ANCHOR), (6 * batches, JOIN)]
    sends = [batch for batch, act in events if act in (SEND, SEND_ALL)]
    assert sends
    assert all(2 * batches < batch <= 6 * batches for batch in sends)
    assert (state.epoch, state.sent, state.agreed) == (9, None, 9 * batches)


def test_phases_of_plateau_follow_counted_epochs_whatever_their_lengths():
    policy = Plateau(epochs=6, warmup=2, cooldown=2, patience=1)
    losses = [1.0] * 6
    _, even = play(policy, [4] * 7, losses)
    _, uneven = play(policy, [0, 9, 1, 4, 0, 30, 2], losses)
    counts = {"batch": 0, "last": 0, "sends": 0, "agreed": 0}
    assert replace(even, **counts) == replace(uneven, **counts)


# --- State -------------------------------------------------------------------------------------


def resumed(state):
    """Take a state through a file."""
    values = json.loads(json.dumps(asdict(state)))
    return State.load(values)


policies = st.one_of(
    plateaus(),
    st.builds(
        lambda pair, warmup: Fixed(*pair, warmup=warmup), st.sampled_from(PAIRS), st.integers(0, 9)
    ),
)


@checked
@given(policies, st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.5, 1.0, math.nan]))))
def test_a_run_resumed_from_its_state_in_a_file_takes_the_same_acts(policy, epochs):
    state = other = policy.start()
    for batches, loss in epochs:
        for _ in range(batches):
            acts, state = after_batch(policy, state)
            again, other = after_batch(policy, resumed(other))
            assert (again, other) == (acts, state)
        acts, state = after_epoch(policy, state, loss)
        again, other = after_epoch(policy, resumed(other), loss)
        assert (again, other) == (acts, state)


@checked
@given(policies, lengths)
def test_the_same_inputs_give_the_same_outputs_and_change_no_input(policy, epochs):
    for before, _, _ in steps(policy, epochs):
        kept = asdict(before)
        assert after_batch(policy, before) == after_batch(policy, before)
        assert after_epoch(policy, before, 1.0) == after_epoch(policy, before, 1.0)
        assert drain(before) == drain(before)
        assert asdict(before) == kept


@pytest.mark.parametrize("name", list(asdict(State())))
def test_a_state_is_frozen(name):
    with pytest.raises(FrozenInstanceError):
        setattr(State(), name, 3)


def test_a_state_holds_nothing_else():
    # A new field changes every checkpoint: make that a decision.
    assert list(asdict(State())) == [
        "batch",
        "epoch",
        "skip",
        "wait",
        "sent",
        "sent_wait",
        "last",
        "sends",
        "agreed",
        "fragments",
        "gain",
        "memory",
        "noise_share",
        "sparse",
        "hidden",
        "sync",
        "small",
        "plateau",
        "measurements",
    ]
    assert not hasattr(State(), "__dict__")


@checked
@given(policies, st.integers(0, 30), st.lists(st.integers(0, 3), min_size=1, max_size=5), st.data())
def test_ranks_that_are_left_come_into_step_with_the_one_that_was_furthest(
    policy, batches, behind, data
):
    """Each keeps its own count; from where all meet, all have one state and work to exchange."""
    states = [policy.start()]
    for _ in range(batches + 3):
        states.append(after_batch(policy, states[-1])[1])
    nodes = [data.draw(st.integers(0, rank)) for rank in range(len(behind))]
    progress = [
        Progress(node, states[batches + 3 - lag]) for node, lag in zip(nodes, behind, strict=True)
    ]
    ours = [rejoin(progress, rank) for rank in range(len(behind))]
    first = max((one.state for one in progress), key=lambda state: state.batch)
    for own, was, node in zip(ours, progress, nodes, strict=True):
        assert own.state.batch == was.state.batch
        assert own.meets_at == own.state.last == first.batch
        assert own.state.sent is None
        in_node = [one.state.batch for one in progress if one.node == node]
        assert own.aside_until == (first.batch if first.synchronous else max(in_node))
        same = {"batch": first.batch, "sent": None, "last": first.batch}
        assert replace(own.state, **same, agreed=0) == replace(first, **same, agreed=0)
    met = {replace(one.state, batch=one.meets_at) for one in ours}
    assert len(met) == 1
    apart = min(behind) != max(behind) and not first.synchronous
    assert met.copy().pop().alike is not apart
    new = rejoin([*progress, Progress(max(nodes) + 1, None)], len(progress))
    assert new.state.batch == max(0, new.meets_at - 1)  # the batch that the others are in passes
    assert new.aside_until == new.meets_at == first.batch
    assert replace(new.state, batch=first.batch) in met
