"""When nodes exchange: a pure state machine over counted batches.

A policy (`daso.plan.policies`) chooses two numbers. ``skip`` is the number of batches from one
global exchange to the next, ``wait`` the number of batches between the start of an exchange and its
merge.
With skip=1 and wait=0 the phase is *synchronous*: gradients are averaged over all ranks at every
batch, and no deltas are sent. In every other phase `after_batch` returns the actions that are due.

With fragments, each exchange carries one part of the parameters, in rotation (Streaming DiLoCo,
Douillard et al. 2025, arXiv 2501.18512). In a selective schedule the small tensors of the model are
also exchanged alone, several times between two exchanges of everything.

`State` is the complete state; its ``dataclasses.asdict`` is the checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Protocol

from daso.plan.small_tensors import SMALL_WAIT, SmallTensors

MEASURE_EVERY = 20  # batches of a synchronous phase that `Auto` may leave
VOTE_SECONDS = 0.5  # between votes on ending the job; a request takes two votes
MAX_VOTE_BATCHES = 64
SMOOTHING = 0.3  # weight of a new measurement in the gain, at each exchange
MEASURE_FIRST = (2, 5)  # first batches of a run that are measured too


class Action(Enum):
    """An action that is due after a batch."""

    ANCHOR = "anchor"  # parameters agree everywhere: take them as the reference
    SEND = "send"  # start an exchange of deltas, of one fragment
    SEND_ALL = "send_all"  # start an exchange of all work that is in no exchange yet
    SEND_SMALL = "send_small"  # start an exchange of small tensors alone
    RECEIVE = "receive"  # finish the exchange in flight and merge it
    SETTLE = "settle"  # RECEIVE before SEND_ALL: work after the send is kept
    JOIN = "join"  # a synchronous phase starts: average the inner optimizer's state
    MEASURE = "measure"  # agree on the exposed time of synchronous steps


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements that all ranks agreed on with an exchange, equal on every rank.

    Zero means not measured yet.
    """

    step_seconds: float = 0.0  # from step to step without waiting, of the fastest rank
    exchange_seconds: float = 0.0  # of an exchange, of the slowest rank
    lr: float = 0.0  # largest learning rate of any group and rank
    # Mean square distance of a node from the mean of all nodes, gained in one batch, relative to
    # the mean square of the parameters.
    drift: float = 0.0
    own_seconds: float = 0.0  # training time lost to an exchange, of the rank that loses most
    required_gain: float = 0.0  # see `daso.plan.step_restoration`
    # Estimated time to average gradients between nodes, on their wire; 0: they cannot be averaged
    # during backward.
    gradient_seconds: float = 0.0
    # Time of a synchronous step lost to averages between nodes, of the rank that loses least: it is
    # blocked, or its core is shared.
    exposed_seconds: float = 0.0
    # Training time lost to an exchange of small tensors alone: core time of the rank that loses
    # most, plus the wait of the rank that waits least (waiting for a slower rank is not a loss).
    small_seconds: float = 0.0
    clipped_gain: float = 0.0  # required by a linear optimizer with clipped gradients

    def batches(self, seconds: float) -> float:
        """Return a time in steps; 0 if steps were not measured."""
        return seconds / self.step_seconds if self.step_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class SyncPhase:
    """Synchronous batches of `Auto`: their cost, and the state of the next trial."""

    start: int = 0  # batches of the first phase, unless they cost too much
    cost: float | None = None  # share of a step, at the last measurement
    spent: float = 0.0  # their cost so far, in batches of computation
    began: int = 0  # batch after which the last phase began
    measured: int = 0  # batch of the last measurement
    left: int = 0  # batch after which the phase was left
    # Minimum estimate of gradient seconds over step seconds, soon after the phase was left.
    gradients: float = 0.0
    wide: bool = False  # gradients are sent in 8 bits
    settled: bool = False  # `wide` is final


@dataclass(frozen=True, slots=True)
class PlateauState:
    """State of the detector of a stalled loss, between epochs."""

    best: float | None = None  # lowest loss that counted as an improvement
    bad_epochs: int = 0  # epochs in a row without an improvement


@dataclass(frozen=True, slots=True)
class State:
    """State of the schedule. The same on every rank at every batch."""

    batch: int = 0  # batches (calls of step) since the start
    epoch: int = 0  # calls of end_epoch since the start
    skip: int = 1  # batches from one send to the next
    wait: int = 0  # batches from a send to its merge; 0 = blocking
    sent: int | None = None  # batch after which the exchange in flight was sent
    sent_wait: int = 0  # value of wait when it was sent
    last: int = 0  # batch after which the last exchange was sent
    sends: int = 0  # exchanges of one fragment so far
    agreed: int = 0  # batch up to which all work is in an exchange
    fragments: int = 1  # parts of the parameters that are exchanged in rotation
    gain: float = 1.0  # factor of the inner optimizer's rate between exchanges
    # Of the inner optimizer's running mean of squares (`daso.plan.step_restoration`): its decay,
    # and the share of it that contains the noise of single nodes.
    memory: float = 0.0
    noise_share: float = 1.0
    sparse: bool = False  # an exchange leaves out work, except one of everything
    hidden: bool = False  # synchronous while `Auto` finds that cheap
    sync: SyncPhase = field(default_factory=SyncPhase)
    small: SmallTensors = field(default_factory=SmallTensors)
    plateau: PlateauState = field(default_factory=PlateauState)
    measurements: Measurements = field(default_factory=Measurements)

    @property
    def synchronous(self) -> bool:
        """True if gradients are averaged over all ranks at every batch."""
        return self.skip == 1 and self.wait == 0

    @property
    def alike(self) -> bool:
        """True if all nodes hold the same parameters now."""
        return self.synchronous or (self.sent is None and self.agreed == self.batch)

    @property
    def step_gain(self) -> float:
        """Factor of the inner optimizer's learning rate in the next step."""
        return shared_gain(self.gain, self.noise_share)

    @property
    def fragment(self) -> int:
        """The fragment that the last exchange of one fragment carried."""
        return (self.sends - 1) % self.fragments

    @classmethod
    def lacking(cls, values: Any) -> list[str]:
        """Return the fields that are missing from the values of a checkpoint."""
        values = values if isinstance(values, Mapping) else {}
        parts = (
            (cls, values),
            (SmallTensors, values.get("small")),
            (SyncPhase, values.get("sync")),
            (PlateauState, values.get("plateau")),
            (Measurements, values.get("measurements")),
        )
        return [
            each.name
            for part, stored in parts
            for each in fields(part)
            if not isinstance(stored, Mapping) or each.name not in stored
        ]

    @classmethod
    def load(cls, values: Mapping[str, Any]) -> "State":
        """Return the state from its ``dataclasses.asdict``."""
        known = {each.name: values[each.name] for each in fields(cls)}
        parts = {
            "small": SmallTensors(**values["small"]),
            "sync": SyncPhase(**values["sync"]),
            "plateau": PlateauState(**values["plateau"]),
            "measurements": Measurements(**values["measurements"]),
        }
        return cls(**known | parts)


class Policy(Protocol):
    """Chooses skip and wait. Deterministic: equal on all ranks, which pass the same numbers."""

    def start(self) -> State:
        """Return the state before the first batch."""
        ...

    def tune_batch(self, state: State) -> State:
        """Return the state with skip and wait for the next batches; called after each batch."""
        ...

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Return the state with skip and wait after an exchange.

        Args:
            state: The schedule, with the measurements of the exchange before.
            measurements: Of this exchange.
        """
        ...

    def tune_epoch(self, state: State, loss: float) -> State:
        """Return the state with skip and wait for the next epoch; ``loss`` is the mean."""
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
    """Return the state in which training starts, or is resumed, with an inner optimizer.

    Args:
        policy: Chooses skip and wait.
        state: The policy's initial state, or that of a resumed run.
        nodes: Number of nodes.
        memory: Decay of the inner optimizer's running mean of squares; 0: it has none.
        may_hide: Gradients may be averaged on a narrow wire.
        small_share: Share of small tensors in the model's numbers.
        numel: Number of parameters of the model.
    """
    state = replace(
        state,
        memory=memory,
        small=state.small.begin(small_share),
        gain=min(state.gain, math.sqrt(nodes)),  # the state may come from a larger world
    )
    choose = getattr(policy, "begin", None)
    if not may_hide or choose is None or state.batch or state.epoch:
        return state
    chosen: State = choose(state, nodes, numel)
    return chosen


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
        actions: tuple[Action, ...] = (Action.MEASURE,) if measures else ()
    else:
        actions, state = _exchange(state)
    more, state = _change_phase(state, policy.tune_batch(state))
    return actions + more, state


def after_exchange(
    policy: Policy, state: State, measurements: Measurements
) -> tuple[tuple[Action, ...], State]:
    """Return the actions after an exchange, and the state for the next batches."""
    if measurements.small_seconds or state.small.seconds:
        state = replace(state, small=state.small.measured(measurements.small_seconds))
    actions, state = _change_phase(state, policy.tune_exchange(state, measurements))
    required = measurements.required_gain or measurements.clipped_gain
    return actions, replace(state, measurements=measurements, gain=next_gain(state.gain, required))


def after_epoch(policy: Policy, state: State, loss: float) -> tuple[tuple[Action, ...], State]:
    """Return the actions at the end of an epoch, and the state for the next one.

    All work is sent and every exchange is received, as at the last batch of an epoch in the paper;
    then the policy chooses.
    """
    actions, state = drain(state)
    more, state = _change_phase(
        state, policy.tune_epoch(replace(state, epoch=state.epoch + 1), loss)
    )
    return actions + more, state


def drain(state: State) -> tuple[tuple[Action, ...], State]:
    """Return the actions after which nothing is in flight and all nodes agree."""
    actions: tuple[Action, ...] = () if state.sent is None else (Action.RECEIVE,)
    # Work after the last send is in no exchange yet; a late merge leaves it on its node.
    if state.agreed != state.batch:
        actions = tuple(Action.SETTLE for _ in actions)
        actions = (*actions, Action.SEND_ALL, Action.RECEIVE)
        state = replace(state, last=state.batch)
    return actions, replace(state, sent=None, agreed=state.batch)


def _exchange(state: State) -> tuple[tuple[Action, ...], State]:
    actions: tuple[Action, ...] = ()
    wait, idle = SMALL_WAIT if state.small.in_flight else state.wait, state.sent is None
    if state.sent is not None and state.batch - state.sent >= wait:
        actions, state = (Action.RECEIVE,), replace(state, sent=None)
    if state.sent is None and state.batch - state.last >= state.skip:
        actions = (*actions, Action.SEND)
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
            actions, state = (*actions, Action.RECEIVE), replace(state, sent=None)
    elif (idle or state.small.in_flight) and _is_small_due(state):
        # Not in a batch that merges everything, which already takes longer.
        actions = (*actions, Action.SEND_SMALL)
        state = replace(state, sent=state.batch, small=state.small.sent(state.batch))
    return actions, state


def _is_small_due(state: State) -> bool:
    """Return whether small tensors are sent alone after this batch."""
    due = state.small.is_due(state.batch, last=state.last, skip=state.skip, wait=state.wait)
    return due and state.sent is None


def _change_phase(before: State, after: State) -> tuple[tuple[Action, ...], State]:
    """Return the actions for a change between synchronous and skipping phases, and the state."""
    if before.synchronous == after.synchronous:
        return (), after
    if before.synchronous:
        return (Action.ANCHOR,), after
    actions, after = drain(after)
    return (*actions, Action.JOIN), after


def next_noise_share(share: float, *, batch: int, memory: float, synchronous: bool) -> float:
    """Return the share of a running mean of squares that contains the noise of single nodes."""
    retained = 1.0 - (1.0 - memory) / (1.0 - memory**batch)
    return share * retained if synchronous else 1.0 - (1.0 - share) * retained


def shared_gain(gain: float, share: float) -> float:
    """Return the gain if only a share of the mean of squares contains the noise of single nodes."""
    if share in (0.0, 1.0):  # exact results
        return gain if share else 1.0
    return math.sqrt(1.0 + (gain * gain - 1.0) * share)


def next_gain(gain: float, required: float) -> float:
    """Return the factor of the learning rate for the next steps."""
    return gain + SMOOTHING * (required - gain) if required else gain


def batches_to_next_vote(step_seconds: float) -> int:
    """Return the number of batches until the next vote starts.

    A vote is received when the next one starts, so that no rank waits for it: ranks are at most
    that many batches apart.
    """
    if not 0 < step_seconds < math.inf:
        return 1
    return max(1, min(MAX_VOTE_BATCHES, math.ceil(VOTE_SECONDS / step_seconds)))
