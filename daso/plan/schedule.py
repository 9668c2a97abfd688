"""When nodes exchange: a pure state machine over counted batches.

A policy (`daso.plan.policies`) chooses two numbers. ``skip`` is the number of batches from one
global exchange to the next, ``wait`` the number of batches between the start of an exchange and its
merge.
With skip=1 and wait=0 the phase is *synchronous*: gradients are averaged over all ranks at every
batch, and there is nothing to send. In every other phase `after_batch` says which acts are due.

With fragments, an exchange carries one part of the parameters, and the parts take turns (Streaming
DiLoCo, Douillard et al. 2025, arXiv 2501.18512). In a selective schedule the small tensors of the
model are exchanged by themselves too, several times between two exchanges of everything.

`State` is all there is to remember; ``dataclasses.asdict`` of it is the checkpoint.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol

from daso.plan.small_tensors import SMALL_WAIT, SmallTensors
from daso.plan.step_restoration import next_gain, next_noise_share, shared_gain

__all__ = [
    "MEASURE_EVERY",
    "Action",
    "Measurements",
    "PlateauState",
    "Policy",
    "Progress",
    "Rejoined",
    "State",
    "SyncPhase",
    "after_batch",
    "after_epoch",
    "after_exchange",
    "batches_to_next_vote",
    "begin",
    "drain",
    "rejoin",
]


MEASURE_EVERY = 20  # batches of a synchronous phase that `Auto` may leave
SECONDS = 0.5  # from one vote on whether the job has to end to the next; a request waits for two
MOST_BATCHES = 64
MEASURE_FIRST = (2, 5)  # batches of a run after which that is measured too


class Action(Enum):
    """What the mechanism has to do now."""

    ANCHOR = "anchor"  # parameters agree everywhere: take them as the reference
    SEND = "send"  # start an exchange of deltas: of one fragment, where there are several
    SEND_ALL = "send_all"  # start an exchange of all that is not agreed yet
    SEND_SMALL = "send_small"  # start an exchange of small tensors alone
    RECEIVE = "receive"  # finish the exchange in flight and merge it
    SETTLE = "settle"  # RECEIVE before SEND_ALL: later work stays whole
    JOIN = "join"  # nodes go in step from here: average the inner optimizer's state
    MEASURE = "measure"  # agree on how long synchronous steps stand still for others


@dataclass(frozen=True, slots=True)
class Measurements:
    """What all ranks agreed on with an exchange: measured, the same numbers everywhere.

    Zero means not measured yet.
    """

    step_seconds: float = 0.0  # from step to step without waiting, of the fastest rank
    exchange_seconds: float = 0.0  # of an exchange, of the rank that came last
    lr: float = 0.0  # largest learning rate of any group and rank
    # Mean square distance of a node from the mean of all nodes, made in one batch, relative to the
    # mean square of the parameters.
    drift: float = 0.0
    own_seconds: float = 0.0  # that an exchange takes from training, of the rank that loses most
    required_gain: float = 0.0  # see `daso.plan.step_restoration`
    # Of averaging gradients between nodes on the wire they would cross in, estimated; 0: they
    # cannot be averaged while backward goes on.
    gradient_seconds: float = 0.0
    # Of a synchronous step, that averages between nodes take from the rank that loses least: it
    # stands still, or their work takes its core.
    exposed_seconds: float = 0.0
    # That an exchange of small tensors alone takes from training: of the rank that loses most, and
    # what the rank that waits least waits for others: who waits for a slower one loses nothing.
    small_seconds: float = 0.0
    clipped_gain: float = 0.0  # required where gradients are clipped, of a linear optimizer

    def batches(self, seconds: float) -> float:
        """Return seconds in steps; 0 if steps were not measured."""
        return seconds / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SyncPhase:
    """Synchronous batches of `Auto`: their cost, and when they are tried again."""

    start: int = 0  # batches of the first phase, unless these cost too much
    cost: float | None = None  # share of a step, at the last measurement
    spent: float = 0.0  # batches of computing that they cost so far
    began: int = 0  # batch after which the last phase began
    measured: int = 0  # batch of the last measurement
    left: int = 0  # batch after which it was left
    # Least estimate of the seconds of gradients over those of a step, soon after it was left.
    gradients: float = 0.0
    wide: bool = False  # gradients cross in 8 bits
    settled: bool = False  # `wide` is final


@dataclass(frozen=True, slots=True)
class PlateauState:
    """What the detector of a loss that stalls remembers between epochs."""

    best: float | None = None  # lowest loss that counted as an improvement
    bad_epochs: int = 0  # epochs in a row without an improvement


@dataclass(frozen=True, slots=True)
class State:
    """Where the schedule stands. The same on every rank at every batch."""

    batch: int = 0  # batches (calls of step) since the start
    epoch: int = 0  # calls of end_epoch since the start
    skip: int = 1  # batches from one send to the next
    wait: int = 0  # batches from a send to its merge; 0 = blocking
    sent: int | None = None  # batch after which the exchange in flight was sent
    sent_wait: int = 0  # batches that it was to take then, whatever is chosen since
    last: int = 0  # batch after which the last exchange was sent
    sends: int = 0  # exchanges of one fragment so far
    agreed: int = 0  # batch up to which all work was put into an exchange
    fragments: int = 1  # parts of the parameters that take turns
    gain: float = 1.0  # of the inner optimizer's rate between exchanges
    # Of the inner optimizer's memory of squares, see `daso.plan.step_restoration`: its decay, and
    # the share of it that saw the noise of single nodes.
    memory: float = 0.0
    noise_share: float = 1.0
    sparse: bool = False  # an exchange leaves work behind; one of everything does not
    hidden: bool = False  # synchronous as long as `Auto` finds that cheap
    sync: SyncPhase = field(default_factory=SyncPhase)
    small: SmallTensors = field(default_factory=SmallTensors)
    plateau: PlateauState = field(default_factory=PlateauState)
    measurements: Measurements = field(default_factory=Measurements)

    @property
    def synchronous(self) -> bool:
        """Whether gradients are averaged over all ranks at every batch."""
        return self.skip == 1 and self.wait == 0

    @property
    def alike(self) -> bool:
        """Whether all nodes hold the same parameters now."""
        return self.synchronous or (self.sent is None and self.agreed == self.batch)

    @property
    def step_gain(self) -> float:
        """What the inner optimizer's rate is multiplied by in the next step."""
        return shared_gain(self.gain, self.noise_share)

    @property
    def fragment(self) -> int:
        """The fragment that the last exchange of one fragment carried."""
        return (self.sends - 1) % self.fragments

    @classmethod
    def lacking(cls, values: Any) -> list[str]:
        """Return the fields that values of a checkpoint do not have: another version wrote it."""
        values = values if isinstance(values, Mapping) else {}
        parts = (
            (cls, values),
            (SmallTensors, values.get("small")),
            (SyncPhase, values.get("sync")),
            (PlateauState, values.get("plateau")),
            (Measurements, values.get("measurements")),
        )
        return [
            one.name
            for part, its in parts
            for one in fields(part)
            if not isinstance(its, Mapping) or one.name not in its
        ]

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> "State":
        """Return the state whose ``dataclasses.asdict`` these are."""
        known = {one.name: values[one.name] for one in fields(cls)}
        parts = {
            "small": SmallTensors(**values["small"]),
            "sync": SyncPhase(**values["sync"]),
            "plateau": PlateauState(**values["plateau"]),
            "measurements": Measurements(**values["measurements"]),
        }
        return cls(**known | parts)


class Policy(Protocol):
    """Chooses skip and wait; every rank asks with the same numbers and gets the same answer."""

    def start(self) -> State:
        """Return the state before the first batch."""
        ...

    def tune_batch(self, state: State) -> State:
        """Return the state with skip and wait for the batches to come; asked after each batch."""
        ...

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Return the state with skip and wait after an exchange, told by ``state.measurements``."""
        ...

    def tune_epoch(self, state: State, loss: float) -> State:
        """Return the state with skip and wait for the epoch to come; ``loss`` is the mean."""
        ...


def begin(
    policy: Policy,
    state: State,
    *,
    nodes: int,
    memory: float,
    may_hide: bool,
    small_share: float = 0.0,
    numel: int = 0,
) -> State:
    """Return the state in which training begins, or goes on, with an inner optimizer.

    Args:
        policy: Chooses.
        state: The policy's first one, or that of a run that is resumed.
        nodes: Number of nodes.
        memory: Decay of the inner optimizer's memory of squares; 0: it has none.
        may_hide: Gradients may be averaged on a narrow wire.
        small_share: Share of the numbers that small tensors have.
        numel: Numbers of the model.
    """
    state = replace(
        state,
        memory=memory,
        small=state.small.begin(small_share),
        gain=min(state.gain, math.sqrt(nodes)),  # it may come from a larger world
    )
    choose = getattr(policy, "begin", None)
    if not may_hide or choose is None or state.batch or state.epoch:
        return state
    began: State = choose(state, nodes, numel)
    return began


def after_batch(policy: Policy, state: State) -> tuple[tuple[Action, ...], State]:
    """Return the actions that are due after one more batch, in order, and the next state."""
    batch, synchronous = state.batch + 1, state.synchronous
    share = next_noise_share(
        state.noise_share, batch=batch, memory=state.memory, synchronous=synchronous
    )
    state = replace(state, batch=batch, noise_share=share)
    if synchronous:
        state = replace(state, agreed=batch, last=batch)
        measures = state.hidden and (batch % MEASURE_EVERY == 0 or batch in MEASURE_FIRST)
        acts: tuple[Action, ...] = (Action.MEASURE,) if measures else ()
    else:
        acts, state = _exchange(state)
    more, state = _turn(state, policy.tune_batch(state))
    return acts + more, state


def after_exchange(
    policy: Policy, state: State, measurements: Measurements
) -> tuple[tuple[Action, ...], State]:
    """Return the acts after ranks agreed on measurements, and the state for the batches to come."""
    state = replace(state, small=state.small.measured(measurements.small_seconds))
    acts, state = _turn(state, policy.tune_exchange(state, measurements))
    required = measurements.required_gain or measurements.clipped_gain
    return acts, replace(state, measurements=measurements, gain=next_gain(state.gain, required))


def after_epoch(policy: Policy, state: State, loss: float) -> tuple[tuple[Action, ...], State]:
    """Return the actions at the end of an epoch, and the state for the next one.

    All work goes into an exchange and every exchange is received, as at the last batch of an epoch
    in the paper; then the policy chooses.
    """
    acts, state = drain(state)
    more, state = _turn(state, policy.tune_epoch(replace(state, epoch=state.epoch + 1), loss))
    return acts + more, state


def drain(state: State) -> tuple[tuple[Action, ...], State]:
    """Return the actions after which nothing is in flight and all nodes agree."""
    acts: tuple[Action, ...] = () if state.sent is None else (Action.RECEIVE,)
    # Work done after the last send is in no exchange yet; a late merge leaves it on its node.
    if state.agreed != state.batch:
        acts = tuple(Action.SETTLE for _ in acts)
        acts = (*acts, Action.SEND_ALL, Action.RECEIVE)
        state = replace(state, last=state.batch)
    return acts, replace(state, sent=None, agreed=state.batch)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a rank was when another one was lost."""

    node: int  # of those that go on
    state: State | None  # after the step, or the call, in which it learned of that; None: it is new


@dataclass(frozen=True, slots=True)
class Rejoined:
    """How a rank goes on together with ranks that were a few batches further."""

    state: State  # with this rank's count of batches
    aside_until: int  # batch up to which it lets batches pass: its node, or all, had them already
    meets_at: int  # batch from which it takes part in what is due; until then it trains alone


def rejoin(progress: Sequence[Progress], rank: int) -> Rejoined:
    """Return how a rank goes on once all hold the mean of their parameters.

    Every rank has a count of batches of its own, which it keeps: its program counts too. All go by
    the schedule of the rank that was furthest. In synchronous phases no rank trains alone. A rank
    that is new begins with the last batch of the one that was furthest, and lets it pass: it does
    what the others do behind that batch, whatever that is.

    Args:
        progress: Of every rank that goes on.
        rank: Whose way is asked for.
    """
    known = [(one.node, one.state) for one in progress if one.state is not None]
    mine, states = progress[rank], [state for _, state in known]
    first = max(states, key=lambda state: state.batch)
    least = first.batch if first.synchronous else min(state.batch for state in states)
    batch = max(0, first.batch - 1) if mine.state is None else mine.state.batch
    in_node = max((state.batch for node, state in known if node == mine.node), default=first.batch)
    state = replace(first, batch=batch, sent=None, last=first.batch, agreed=least)
    return Rejoined(state, first.batch if first.synchronous else in_node, first.batch)


def _exchange(state: State) -> tuple[tuple[Action, ...], State]:
    acts: tuple[Action, ...] = ()
    wait, idle = SMALL_WAIT if state.small.in_flight else state.wait, state.sent is None
    if state.sent is not None and state.batch - state.sent >= wait:
        acts, state = (Action.RECEIVE,), replace(state, sent=None)
    if state.sent is None and state.batch - state.last >= state.skip:
        acts = (*acts, Action.SEND)
        whole = state.fragments == 1 and not state.sparse
        agreed = state.batch if whole else state.agreed
        now, small = state.batch, replace(state.small, in_flight=False)
        state = replace(
            state,
            sent=now,
            sent_wait=state.wait,
            last=now,
            sends=state.sends + 1,
            agreed=agreed,
            small=small,
        )
        if state.wait == 0:
            acts, state = (*acts, Action.RECEIVE), replace(state, sent=None)
    elif (idle or state.small.in_flight) and _is_small_due(state):
        # Not in a batch that merges everything, which has enough to do.
        acts = (*acts, Action.SEND_SMALL)
        state = replace(state, sent=state.batch, small=state.small.sent(state.batch))
    return acts, state


def _is_small_due(state: State) -> bool:
    """Tell whether small tensors go after this batch."""
    due = state.small.is_due(state.batch, last=state.last, skip=state.skip, wait=state.wait)
    return due and state.sent is None


def _turn(before: State, after: State) -> tuple[tuple[Action, ...], State]:
    """Add the acts that a change between synchronous and skipping phases needs."""
    if before.synchronous == after.synchronous:
        return (), after
    if before.synchronous:
        return (Action.ANCHOR,), after
    acts, after = drain(after)
    return (*acts, Action.JOIN), after


def batches_to_next_vote(step_seconds: float) -> int:
    """Return after how many batches the next vote begins.

    A vote is received at the next one's begin, so that nobody waits for it: ranks are at most that
    many batches apart.
    """
    if not 0 < step_seconds < math.inf:
        return 1
    return max(1, min(MOST_BATCHES, math.ceil(SECONDS / step_seconds)))
