"""Who chooses skip and wait: the policies. All pure; frozen records checked when made.

- `Fixed`: the same all the time.
- `Plateau`: the paper's phases, by epochs and the loss.
- `Qsr`: skip from the learning rate.
- `Auto`: wait from measured times, skip from what exchanges cost; drift bounds it.
- `Replay`: what another policy decided in a run, from its log.
"""

import math
from dataclasses import dataclass, replace

from daso.checks import NONE, Rule, check, either, number, positive, validated_record, whole
from daso.errors import ConfigError
from daso.plan.schedule import Measurements, PlateauState, State
from daso.plan.small_tensors import SMALL_PERIOD, SMALL_WAIT, SmallTensors
from daso.plan.wires import BUDGET

__all__ = ["Auto", "Fixed", "Plateau", "Qsr", "Replay", "observe"]

DRIFT, NORMALIZED_DRIFT = 0.025, 0.005  # that `Auto` allows; the latter with a restored step
OVERLAP = 0.5  # of a step: behind which gradients are averaged while backward goes on
# Of a step that synchronous training may stand still where it saves accuracy. Held-out loss of a
# byte-level transformer (8 simulated nodes, AdamW, 1,000 steps, one seed): synchronous 1.799, after
# 3,000 steps 1.552; exchanges at every batch after 0, 100 or 300 synchronous ones 1.884, 1.804 and
# 1.800, at every 4th 2.101, 1.855 and 1.821.
EXPOSED = 0.1
EARLY, HOPELESS = 300, 3.0  # batches at the start, which decide most, and as long as these last
AGAIN = 1000  # batches after which synchronous training is tried again
# That exchanges of small tensors may take beside others: each takes 1 ms of the training thread and
# 2 of the other one, whatever there is to send.
SMALL_BUDGETS = 4.0
# Waits from one exchange of everything to the next, at least, where small tensors go alone and it
# takes longer than they do: they stay meanwhile. With exchanges that take 3 batches, 1,404 steps of
# a CNN ended 0.43 points below synchronous with 1, 0.08 with 4 and 0.03 with 8; with such that take
# 1.5, 0.05 with 1 (scripts/figures/selective.json).
ROOM = 8
# Times what an exchange takes. Where it takes 0.9 batches and steps differ by 10 %, a fifth leaves
# 1 % of a step exposed, a tenth 3 % (`daso.predict`). But with an optimizer that normalizes each
# batch that a mean comes later costs accuracy (scripts/figures/accuracy-text.json): where it takes
# 1.7, a fifth 0.51 points on 4 simulated nodes, a tenth none.
SPARE, NORMALIZED_SPARE = 1.2, 1.1
SLACK = 8  # `Auto` waits for skip // SLACK batches, and more where an exchange takes longer


@validated_record
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
        check("Fixed.skip", self.skip, whole(1))
        check("Fixed.wait", self.wait, whole(0))
        check("Fixed.warmup", self.warmup, whole(0))
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
            and torch's ReduceLROnPlateau bear that many and stall with the next: 2 there is 3 here.
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
        below_one = Rule("a number in [0, 1)", lambda one: number(0, 1).holds(one) and one < 1)
        check("Plateau.threshold", self.threshold, below_one)
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
    """Take in one epoch's loss.

    An epoch improves when ``loss < best * (1 - threshold)`` for a positive best, and when it lies
    below best by ``threshold * |best|`` in general. A loss that is not finite is a bad epoch.
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
    """Quadratic synchronization rule: the smaller the learning rate, the rarer the exchanges.

    H = max(skip, floor((alpha / lr)**2)), chosen anew at every exchange from the learning rate that
    all ranks agreed on with it. Gu et al. 2023, arXiv 2310.14423. Needs a learning rate that
    decays (while it rises, as in warm-up, H is skip), and an alpha that is tuned: start from the
    peak rate times the square root of skip.

    Args:
        alpha: Learning rate at which H is 1.
        skip: Least batches between exchanges (the paper's H_base).
        wait: Batches an exchange may take in the background; at most ``skip``, and at least 1 where
            skip is 1: in a synchronous phase there is no exchange at which to choose.
        max_skip: Most batches between exchanges; H grows without bound as the rate goes to 0.
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
                "skip is chosen at exchanges), not 0; raise wait or skip"
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        return State(skip=self.skip, wait=self.wait)

    def tune_batch(self, state: State) -> State:
        """Change nothing between exchanges."""
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Choose skip for the round that begins; before the rate has fallen, the least."""
        before = state.measurements.lr
        if not before or measurements.lr > before:  # it is small where it warms up, too
            return replace(state, skip=self.skip)
        if self.alpha >= measurements.lr * math.sqrt(self.max_skip):
            return replace(state, skip=self.max_skip)
        return replace(state, skip=max(self.skip, int((self.alpha / measurements.lr) ** 2)))

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing."""
        return state


@validated_record
@dataclass(frozen=True, slots=True)
class Auto:
    """Exchanges as often as nobody waits for it, and as drift asks for; needs no settings.

    Wait is the number of batches that an exchange takes, by times measured on all ranks, and at
    least an eighth of skip: ranks are not equally fast at every moment, and the faster one is not
    to stand still for that; or 2, where small tensors (see below) keep ranks together. Skip is
    never below wait. Above it, skip is what keeps the work of exchanges, of a core that training
    wants too, within ``budget`` of the steps' time: on GPUs next to nothing. Where that would be
    seldom, skip is no more than the batches in which nodes drift apart by ``drift``: the root mean
    square distance of a node from the mean of all nodes, relative to that of the parameters from
    zero (consensus distance, Kong et al. 2021, arXiv 2102.04828). It is measured at every exchange
    and expected to grow with the learning rate. Where gradient noise drives nodes apart, its square
    grows as lr**2 * skip, so a fixed ``drift`` gives the quadratic rule of `Qsr` without its alpha;
    where nodes see different data it grows faster, and skip comes down.

    Skip begins at 1 and at most doubles with each exchange, so that the first, steepest steps are
    averaged often.

    Where skip is long, nodes that train by SGD drift apart first, and lose most by it, in the small
    tensors of a model: early convolutions, norms, biases. So those of the smallest sizes that make
    up a 16th of its numbers at most are exchanged by themselves, too, at every second or third
    batch, where that is over within two and takes no more than four times ``budget``, beside what
    exchanges of everything take: each takes some 3 ms of a core, whatever there is to send. Not
    where steps are restored, as Adam's are. Where wait is more than 2, skip is then eight waits at
    least, for small tensors stay while everything is on its way.

    Adam and its kin lose accuracy by averages that come after their step, most of it in the first
    batches. So with such an inner optimizer training begins synchronous, with gradients on a narrow
    wire (``Gradients(wire=...)``), for 300 batches where that takes less than four times as long,
    and stays so while that takes less than a tenth of a step: while backward hides it, and its work
    takes no core that training wants. Elsewhere exchanges go on as above, and where one comes to
    take less than half a step, it is tried again a thousand batches later.

    Args:
        drift: Relative distance between nodes to aim at, right before an exchange, where exchanges
            cost more than ``budget``. None: 0.025, or 0.005 where the inner optimizer normalizes:
            its steps are longer between exchanges (`daso.plan.step_restoration`), noise with them.
        max_skip: Most batches between exchanges.
        warmup: Synchronous batches at the start.
        budget: Part of the steps' time that exchanges of everything may take from training.
        selective: Numbers of a model from which on its small tensors are exchanged more often than
            the others: of smaller models everything costs little more; None: never.
    """

    drift: float | None = None
    max_skip: int = 128
    warmup: int = 0
    budget: float = BUDGET
    selective: int | None = 2_000_000

    def __post_init__(self) -> None:
        check("Auto.selective", self.selective, either(whole(1, of=" of numbers"), NONE))
        check("Auto.drift", self.drift, either(positive(), NONE))
        check("Auto.max_skip", self.max_skip, whole(1))
        check("Auto.warmup", self.warmup, whole(0))
        check("Auto.budget", self.budget, positive())

    def start(self) -> State:
        """Return the state before the first batch."""
        return State() if self.warmup else State(skip=1, wait=1)

    def tune_batch(self, state: State) -> State:
        """Leave the warm-up when its batches are over."""
        warming = self.warmup and state.synchronous and not state.hidden
        if warming and state.batch >= self.warmup:
            return replace(state, skip=1, wait=1)
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Choose wait and skip for the round that begins."""
        if state.hidden:
            return self._while_hidden(state, measurements)
        if self._can_hide(state, measurements):
            return replace(state, skip=1, wait=0, hidden=True)
        most = min(2 * state.wait, self.max_skip)
        wait = min(self._wait(state, measurements), most)
        affordable = min(self._affordable(measurements), 2 * state.skip)
        period = state.small.period_within(SMALL_BUDGETS * self.budget * measurements.step_seconds)
        small = replace(state.small, period=period)
        # Not for most of the time.
        least = min(ROOM * wait, 2 * state.skip) if small.stay_behind(wait) else wait
        wanted = max(least, min(affordable, self._skip(state, measurements)))
        skip = max(wait, min(wanted, self.max_skip))
        slack = skip // SLACK
        if small.go_alone(wait):  # which keep ranks together, and stay meanwhile
            slack = min(slack, SMALL_WAIT)
        wait = min(max(wait, slack), most)
        return replace(state, skip=skip, wait=wait, small=small)

    def why(self, state: State) -> str:
        """Return what keeps skip from being 1, in words: of the last exchange's numbers."""
        measurements = state.measurements
        if state.hidden:
            share = (
                measurements.exposed_seconds / measurements.step_seconds
                if measurements.step_seconds > 0
                else 0.0
            )
            return f"nodes average gradients at every batch, which takes {100 * share:.0f} % of it"
        if state.skip == 1:
            return "exchanges cost next to nothing" if measurements.step_seconds > 0 else "it began"
        if state.skip <= state.wait:
            return "an exchange takes that many batches"
        work = f"an exchange takes {1e3 * measurements.own_seconds:.3g} ms of training"
        if self._affordable(measurements) <= state.skip:
            return f"{work}: {100 * self.budget:g} % of that many batches"
        needed = self._wait(state, measurements)
        if state.small.stay_behind(needed) and state.skip <= ROOM * needed:
            return f"{work}; small tensors go alone in between, but not while it is on its way"
        return f"{work}; nodes drift apart by as much as they may in that many batches"

    def begin(self, state: State) -> State:
        """Return the state before the first batch, with an optimizer that loses by exchanges."""
        return state if self.warmup else replace(state, skip=1, wait=0, hidden=True)

    def _can_hide(self, state: State, measurements: Measurements) -> bool:
        """Tell whether synchronous training costs next to no time, and accuracy without it."""
        return (
            state.batch >= state.hide_again
            and measurements.required_gain > 0
            and 0 < measurements.gradient_seconds <= OVERLAP * measurements.step_seconds
            and state.fragments * measurements.own_seconds <= EXPOSED * measurements.step_seconds
        )

    def _while_hidden(self, state: State, measurements: Measurements) -> State:
        """Leave synchronous training where it stands still for others."""
        most = EXPOSED if state.batch >= EARLY else HOPELESS
        step = measurements.step_seconds
        if step <= 0 or measurements.exposed_seconds <= most * step:
            return state
        again = state.batch + AGAIN
        return replace(state, skip=1, wait=1, hidden=False, hide_again=again)

    def _wait(self, state: State, measurements: Measurements) -> int:
        """Batches that an exchange takes, with some time to spare; as it is if unmeasured."""
        # No step is measured between two exchanges after the same batch (a drain, a repeat).
        if measurements.step_seconds <= 0 or measurements.exchange_seconds <= 0:
            return state.wait
        spare = NORMALIZED_SPARE if measurements.required_gain else SPARE
        batches = min(
            spare * measurements.exchange_seconds / measurements.step_seconds, self.max_skip
        )
        return max(1, math.ceil(batches))

    def _affordable(self, measurements: Measurements) -> int:
        """Batches between exchanges whose work is within budget; many if unmeasured."""
        batches = min(measurements.affordable_skip(self.budget), self.max_skip)
        return max(1, math.ceil(batches)) if batches else self.max_skip

    def _skip(self, state: State, measurements: Measurements) -> int:
        """Go half of the way, in logarithms, from skip to what drift allows; at most double it."""
        before = state.measurements
        ratio = measurements.lr / before.lr if before.lr > 0 else 1.0
        growth = ratio * ratio  # `ratio**2` would raise where it overflows; this is infinite
        if not measurements.drift * growth > 0:
            return state.skip
        drift = self.drift or (NORMALIZED_DRIFT if measurements.required_gain else DRIFT)
        allowed = drift**2 / (measurements.drift * growth) / state.fragments
        # Half of the way, because drift that grows with skip itself would swing for ever otherwise.
        half = math.sqrt(state.skip * min(allowed, 4.0 * state.skip))
        return max(1, math.ceil(half) if math.ceil(half) <= allowed else math.floor(half))

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: loss and epochs are not needed."""
        return state


@dataclass(frozen=True, slots=True)
class Replay:
    """Repeats what a policy decided in a run, so that one process can go through it again.

    Args:
        history: ``report()["skip_history"]`` of the run: (batch, skip, wait), first for batch 0.
        hidden: Batches from which on the run was synchronous because backward hid it: of `Auto`,
            those with skip 1 and wait 0 but for its warm-up.
        selective: As the run's policy had it.
        small: ``report()["small_history"]`` of the run: (batch, batches from one exchange of small
            tensors to the next).
    """

    history: tuple[tuple[int, int, int], ...]
    hidden: tuple[int, ...] = ()
    selective: int | None = None
    small: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.selective is None and any(period for _, period in self.small):
            raise ConfigError(
                "Replay.selective must be as the run's policy had it, since small tensors went "
                "alone in that run, but it is left out; pass selective=policy.selective"
            )

    def start(self) -> State:
        """Return the state before the first batch."""
        _, skip, wait = self.history[0]
        period = self.small[0][1] if self.small else SMALL_PERIOD
        small = SmallTensors(period=period)
        return State(skip=skip, wait=wait, hidden=0 in self.hidden, small=small)

    def tune_batch(self, state: State) -> State:
        """Do after a batch what was done after it."""
        for batch, skip, wait in self.history[1:]:
            if batch == state.batch:
                state = replace(state, skip=skip, wait=wait, hidden=batch in self.hidden)
        for batch, period in self.small[1:]:
            if batch == state.batch:
                state = replace(state, small=replace(state.small, period=period))
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: the log says it for the batch."""
        return state

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: the log says it for the batch."""
        return state


def _check_order(name: str, value: int, other: str, limit: int) -> None:
    if value > limit:
        raise ConfigError(f"{name} must not exceed {other}={limit}, not {value}; lower it")
