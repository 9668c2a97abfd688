"""Policies: when to exchange (skip) and how long to overlap (wait). Pure frozen records.

- `Fixed`: the same skip and wait at all times.
- `Plateau`: the paper's phases, by epochs and the loss.
- `Qsr`: skip from the learning rate.
- `Replay`: the decisions of an earlier run, from its log.

The default is `daso.plan.auto.Auto`.
"""

import math
from dataclasses import dataclass, replace

from daso.checks import Rule, check, number, positive, validated_record, whole
from daso.errors import ConfigError
from daso.plan.schedule import Measurements, PlateauState, State, SyncPhase
from daso.plan.small_tensors import SMALL_PERIOD, SmallTensors


@validated_record
@dataclass(frozen=True, slots=True)
class Fixed:
    """Constant skip and wait, after an optional synchronous warm-up.

    Args:
        skip: Batches from one global exchange to the next; at least 1.
        wait: Batches an exchange may take in the background; 0 = blocking, at most ``skip``.
        warmup: Synchronous batches at the start (post-local SGD, Lin et al. 2020).
    """

    skip: int = 4
    wait: int = 1
    warmup: int = 0

    def __post_init__(self) -> None:
        check("Fixed.skip", self.skip, whole(1))
        check("Fixed.wait", self.wait, whole(0))
        check("Fixed.warmup", self.warmup, whole(0))
        if self.wait > self.skip:
            raise ConfigError(
                f"Fixed.wait must not exceed skip={self.skip} (one exchange is in flight at a "
                f"time), not {self.wait}; lower wait or raise skip",
                code="wait-exceeds-skip",
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        return State() if self.warmup else State(skip=self.skip, wait=self.wait)

    def tune_batch(self, state: State) -> State:
        """Leave the warm-up after its batches."""
        if self.warmup and state.synchronous and state.batch >= self.warmup:
            return replace(state, skip=self.skip, wait=self.wait)
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state


@validated_record
@dataclass(frozen=True, slots=True)
class Plateau:
    """The paper's schedule: warm-up, cycling, cool-down, by epochs and the loss.

    Warm-up and cool-down are synchronous. Cycling starts at ``max_skip`` with a wait of a quarter
    of it. When the loss stalls, skip is halved and wait goes down by one, both at least 1; when it
    stalls at skip 1 the cycle starts again from the top. (In the authors' program, Heat's DASO, the
    first cycle starts at skip 4, wait 1, whatever the maximum is.) The caller reports epochs with
    ``optimizer.end_epoch(loss)``. Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1.

    Args:
        epochs: Epochs in all; the cool-down is counted back from here.
        warmup: Synchronous epochs at the start.
        cooldown: Synchronous epochs at the end.
        max_skip: Largest number of batches between exchanges.
        threshold: Relative improvement of the loss that counts.
        patience: Epochs in a row without improvement with which the loss has stalled. Heat's DASO
            and torch's ReduceLROnPlateau allow that many and stall at the next: 2 there is 3 here.
    """

    epochs: int
    warmup: int = 4
    cooldown: int = 4
    max_skip: int = 4
    threshold: float = 0.05
    patience: int = 2

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("warmup", 0), ("cooldown", 0), ("max_skip", 1)):
            check(f"Plateau.{name}", getattr(self, name), whole(least))
        check("Plateau.patience", self.patience, whole(1))
        below_one = Rule(
            "a number in [0, 1)", lambda value: number(0, 1).holds(value) and value < 1
        )
        check("Plateau.threshold", self.threshold, below_one)
        if self.warmup + self.cooldown > self.epochs:
            raise ConfigError(
                f"Plateau.warmup + cooldown must not exceed epochs={self.epochs}, not "
                f"{self.warmup} + {self.cooldown}; shorten them",
                code="warmup-exceeds-epochs",
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

    def tune_exchange(self, state: State, measurements: Measurements) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state

    def tune_epoch(self, state: State, loss: float) -> State:
        """Choose the next epoch's phase, skip and wait."""
        if state.epoch < self.warmup or state.epoch >= self.epochs - self.cooldown:
            return replace(state, skip=1, wait=0)
        if state.epoch == self.warmup or state.synchronous:
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


def observe(
    state: PlateauState, loss: float, *, threshold: float, patience: int
) -> tuple[bool, PlateauState]:
    """Return whether the loss has stalled after an epoch, and the detector's next state.

    An epoch improves if ``loss < best * (1 - threshold)`` for a positive best, and in general if it
    is below best by ``threshold * |best|``. A loss that is not finite is a bad epoch.
    """
    best = state.best
    improved = loss - loss == 0 and (best is None or loss < best - threshold * abs(best))
    if improved:
        return False, PlateauState(best=loss)
    bad = state.bad_epochs + 1
    if bad >= patience:
        return True, replace(state, bad_epochs=0)
    return False, replace(state, bad_epochs=bad)


@validated_record
@dataclass(frozen=True, slots=True)
class Qsr:
    """Quadratic synchronization rule: exchanges become less frequent as the learning rate falls.

    H = max(skip, floor((alpha / lr)**2)), chosen at every exchange from the learning rate that all
    ranks agreed on with it. Gu et al. 2023, arXiv 2310.14423. Needs a learning rate that decays
    (while it rises, as in warm-up, H is skip), and a tuned alpha: start from the peak rate times
    the square root of skip.

    Args:
        alpha: Learning rate at which H is 1.
        skip: Minimum batches between exchanges (the paper's H_base).
        wait: Batches an exchange may take in the background; at most ``skip``, and at least 1 if
            skip is 1: in a synchronous phase no exchange happens at which to choose.
        max_skip: Maximum batches between exchanges; H grows without bound as the rate goes to 0.
    """

    alpha: float
    skip: int = 4
    wait: int = 1
    max_skip: int = 256

    def __post_init__(self) -> None:
        check("Qsr.alpha", self.alpha, positive())
        check("Qsr.skip", self.skip, whole(1))
        check("Qsr.wait", self.wait, whole(0))
        check("Qsr.max_skip", self.max_skip, whole(1))
        _check_order("Qsr.wait", self.wait, "skip", self.skip)
        _check_order("Qsr.skip", self.skip, "max_skip", self.max_skip)
        if self.skip == 1 and self.wait == 0:
            raise ConfigError(
                "Qsr.wait must be at least 1 where skip is 1 (batches would be synchronous, and "
                "skip is chosen at exchanges), not 0; raise wait or skip",
                code="qsr-needs-wait",
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        return State(skip=self.skip, wait=self.wait)

    def tune_batch(self, state: State) -> State:
        """Change nothing between exchanges."""
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Choose skip for the next round; the minimum until the learning rate has fallen."""
        before = state.measurements.lr
        if not before or measurements.lr > before:  # the rate is small in its warm-up, too
            return replace(state, skip=self.skip)
        if self.alpha >= measurements.lr * math.sqrt(self.max_skip):
            return replace(state, skip=self.max_skip)
        return replace(state, skip=max(self.skip, int((self.alpha / measurements.lr) ** 2)))

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state


@dataclass(frozen=True, slots=True)
class Replay:
    """Repeats the decisions of a run, so that one process can replay it.

    Args:
        history: ``report()["skip_history"]`` of the run: (batch, skip, wait), first for batch 0.
        hidden: Batches at which the run became synchronous because that was cheap: with `Auto`,
            those with skip 1 and wait 0, except its warm-up.
        selective: Value of the run's policy.
        small: ``report()["small_history"]`` of the run: (batch, batches from one exchange of small
            tensors to the next).
        wide: ``report()["wide_history"]`` of the run: (batch, whether gradients are sent in 8
            bits).
    """

    history: tuple[tuple[int, int, int], ...]
    hidden: tuple[int, ...] = ()
    selective: int | None = None
    small: tuple[tuple[int, int], ...] = ()
    wide: tuple[tuple[int, bool], ...] = ()

    def __post_init__(self) -> None:
        if self.selective is None and any(period for _, period in self.small):
            raise ConfigError(
                "Replay.selective must be as the run's policy had it, since small tensors went "
                "alone in that run, but it is left out; pass selective=policy.selective",
                code="replay-needs-selective",
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        _, skip, wait = self.history[0]
        period = self.small[0][1] if self.small else SMALL_PERIOD
        small = SmallTensors(period=period)
        sync = SyncPhase(wide=bool(self.wide) and self.wide[0][1])
        return State(skip=skip, wait=wait, hidden=0 in self.hidden, small=small, sync=sync)

    def tune_batch(self, state: State) -> State:
        """Return the state that the run had after this batch."""
        for batch, skip, wait in self.history[1:]:
            if batch == state.batch:
                state = replace(state, skip=skip, wait=wait, hidden=batch in self.hidden)
        for batch, period in self.small[1:]:
            if batch == state.batch:
                state = replace(state, small=replace(state.small, period=period))
        for batch, wide in self.wide[1:]:
            if batch == state.batch:
                state = replace(state, sync=replace(state.sync, wide=wide))
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: `tune_batch` replays the decisions."""
        return state

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: `tune_batch` replays the decisions."""
        return state


def _check_order(name: str, value: int, other: str, limit: int) -> None:
    if value > limit:
        raise ConfigError(
            f"{name} must not exceed {other}={limit}, not {value}; lower it", code="limit-exceeded"
        )
