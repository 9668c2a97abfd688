"""When nodes exchange: a pure state machine over counted batches.

A policy chooses two numbers. ``skip`` is the number of batches from one global exchange to the
next, ``wait`` the number of batches between the start of an exchange and its merge. With skip=1
and wait=0 the phase is *synchronous*: gradients are averaged over all ranks at every batch, and
there is nothing to send. In every other phase `after_batch` says which acts are due.

`State` is all there is to remember; ``dataclasses.asdict`` of it is the checkpoint.
"""

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from daso.errors import ConfigError
from daso.plan.plateau import PlateauState, observe

__all__ = ["Act", "Fixed", "Plateau", "Policy", "State", "after_batch", "after_epoch", "drain"]


class Act(Enum):
    """What the mechanism has to do now."""

    ANCHOR = "anchor"  # parameters agree everywhere: take them as the reference
    SEND = "send"  # start an exchange of deltas
    RECEIVE = "receive"  # finish the exchange in flight and merge it
    JOIN = "join"  # nodes go in step from here: average the inner optimizer's state


@dataclass(frozen=True, slots=True)
class State:
    """Where the schedule stands. The same on every rank at every batch."""

    batch: int = 0  # batches (calls of step) since the start
    epoch: int = 0  # calls of end_epoch since the start
    skip: int = 1  # batches from one send to the next
    wait: int = 0  # batches from a send to its merge; 0 = blocking
    sent: int | None = None  # batch after which the exchange in flight was sent
    agreed: int = 0  # batch up to which all work was put into an exchange
    plateau: PlateauState = field(default_factory=PlateauState)

    @property
    def synchronous(self) -> bool:
        """Whether gradients are averaged over all ranks at every batch."""
        return self.skip == 1 and self.wait == 0


class Policy(Protocol):
    """Chooses skip and wait; every rank asks with the same numbers and gets the same answer."""

    def start(self) -> State:
        """Return the state before the first batch."""
        ...

    def tune_batch(self, state: State) -> State:
        """Return the state with skip and wait for the batches to come; asked after each batch."""
        ...

    def tune_epoch(self, state: State, loss: float) -> State:
        """Return the state with skip and wait for the epoch to come; ``loss`` is the mean."""
        ...


def after_batch(policy: Policy, state: State) -> tuple[tuple[Act, ...], State]:
    """Return the acts that are due after one more batch, in order, and the next state.

    Args:
        policy: Chooses skip and wait.
        state: The state before this batch was counted.

    Returns:
        The acts and the next state. A send is received exactly once, before the next send.
    """
    state = replace(state, batch=state.batch + 1)
    if state.synchronous:
        state = replace(state, agreed=state.batch)
        acts: tuple[Act, ...] = ()
    else:
        acts, state = _exchange(state)
    more, state = _turn(state, policy.tune_batch(state))
    return acts + more, state


def after_epoch(policy: Policy, state: State, loss: float) -> tuple[tuple[Act, ...], State]:
    """Return the acts at the end of an epoch, and the state for the next one.

    All work goes into an exchange and every exchange is received, as at the last batch of an epoch
    in the paper; then the policy chooses.

    Args:
        policy: Chooses skip and wait.
        state: The state after the last batch.
        loss: The epoch's loss, averaged over all ranks.

    Returns:
        The acts and the next state.
    """
    acts, state = drain(state)
    more, state = _turn(state, policy.tune_epoch(replace(state, epoch=state.epoch + 1), loss))
    return acts + more, state


def drain(state: State) -> tuple[tuple[Act, ...], State]:
    """Return the acts after which nothing is in flight and all nodes agree.

    Args:
        state: Any state.

    Returns:
        The acts and the state after them.
    """
    acts: tuple[Act, ...] = () if state.sent is None else (Act.RECEIVE,)
    # Work done after the last send is in no exchange yet; a late merge leaves it on its node.
    if state.agreed != state.batch:
        acts = (*acts, Act.SEND, Act.RECEIVE)
    return acts, replace(state, sent=None, agreed=state.batch)


def _exchange(state: State) -> tuple[tuple[Act, ...], State]:
    acts: tuple[Act, ...] = ()
    if state.sent is not None and state.batch - state.sent >= state.wait:
        acts, state = (Act.RECEIVE,), replace(state, sent=None)
    if state.sent is None and state.batch - state.agreed >= state.skip:
        acts = (*acts, Act.SEND)
        state = replace(state, sent=state.batch, agreed=state.batch)
        if state.wait == 0:
            acts, state = (*acts, Act.RECEIVE), replace(state, sent=None)
    return acts, state


def _turn(before: State, after: State) -> tuple[tuple[Act, ...], State]:
    """Add the acts that a change between synchronous and skipping phases needs."""
    if before.synchronous == after.synchronous:
        return (), after
    if before.synchronous:
        return (Act.ANCHOR,), after
    acts, after = drain(after)
    return (*acts, Act.JOIN), after


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same skip and wait all the time, after an optional synchronous warm-up.

    Args:
        skip: Batches from one global exchange to the next; at least 1.
        wait: Batches an exchange may take in the background; 0 = blocking, at most ``skip``.
        warmup: Synchronous batches at the start (post-local SGD, Lin et al. 2020).
    """

    skip: int = 4
    wait: int = 1
    warmup: int = 0

    def __post_init__(self) -> None:
        _check_int("Fixed.skip", self.skip, 1)
        _check_int("Fixed.wait", self.wait, 0)
        _check_int("Fixed.warmup", self.warmup, 0)
        if self.wait > self.skip:
            raise ConfigError(
                f"Fixed.wait must not exceed skip={self.skip} (one exchange is in flight at a "
                f"time), not {self.wait}; lower wait or raise skip"
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        return State() if self.warmup else State(skip=self.skip, wait=self.wait)

    def tune_batch(self, state: State) -> State:
        """Leave the warm-up when its batches are over."""
        if self.warmup and state.batch == self.warmup:
            return replace(state, skip=self.skip, wait=self.wait)
        return state

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state


@dataclass(frozen=True, slots=True)
class Plateau:
    """The paper's schedule: warm-up, cycling, cool-down, by epochs and the loss.

    Warm-up and cool-down are synchronous. Cycling starts at ``max_skip`` with a wait of a quarter
    of it. When the loss stalls, skip is halved and wait goes down by one, both at least 1; when it
    stalls at skip 1 the cycle starts again from the top. The caller reports epochs with
    ``optimizer.end_epoch(loss)``. Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1.

    Args:
        epochs: Epochs in all; the cool-down is counted back from here.
        warmup: Synchronous epochs at the start.
        cooldown: Synchronous epochs at the end.
        max_skip: Largest number of batches between exchanges.
        threshold: Relative improvement of the loss that counts.
        patience: Epochs in a row without improvement after which the loss has stalled.
    """

    epochs: int
    warmup: int = 4
    cooldown: int = 4
    max_skip: int = 4
    threshold: float = 0.05
    patience: int = 2

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("warmup", 0), ("cooldown", 0), ("max_skip", 1)):
            _check_int(f"Plateau.{name}", getattr(self, name), least)
        _check_int("Plateau.patience", self.patience, 1)
        if not isinstance(self.threshold, int | float) or not 0 <= self.threshold < 1:
            raise ConfigError(
                f"Plateau.threshold must be a number in [0, 1), not {self.threshold!r}"
            )
        if self.warmup + self.cooldown > self.epochs:
            raise ConfigError(
                f"Plateau.warmup + cooldown must not exceed epochs={self.epochs}, not "
                f"{self.warmup} + {self.cooldown}; shorten them"
            )

    @property
    def max_wait(self) -> int:
        """Wait at the top of a cycle: a quarter of max_skip, at least 1."""
        return max(1, self.max_skip // 4)

    def start(self) -> State:
        """Return the state before the first batch."""
        if self.warmup or self.cooldown >= self.epochs:
            return State()
        return State(skip=self.max_skip, wait=self.max_wait)

    def tune_batch(self, state: State) -> State:
        """Change nothing: this policy works by epochs."""
        return state

    def tune_epoch(self, state: State, loss: float) -> State:
        """Choose the next epoch's phase, skip and wait."""
        if state.epoch < self.warmup or state.epoch >= self.epochs - self.cooldown:
            return replace(state, skip=1, wait=0)
        if state.epoch == self.warmup:
            return replace(state, skip=self.max_skip, wait=self.max_wait)
        stalled, plateau = observe(
            state.plateau, loss, threshold=self.threshold, patience=self.patience
        )
        state = replace(state, plateau=plateau)
        if not stalled:
            return state
        if state.skip == 1:
            return replace(state, skip=self.max_skip, wait=self.max_wait)
        skip = state.skip // 2
        return replace(state, skip=skip, wait=min(skip, max(1, state.wait - 1)))


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}")
