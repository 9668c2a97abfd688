"""The default policy: `Auto` chooses skip and wait from measured times. Pure."""

import math
from dataclasses import dataclass, replace

from daso.checks import NONE, check, either, positive, validated_record, whole
from daso.plan.schedule import MEASURE_EVERY, Measurements, State
from daso.plan.small_tensors import SMALL_WAIT

# Batches of the synchronous start with a normalizing optimizer, and the batches of computation
# that it may cost. Held-out loss of a byte-level transformer (8 simulated nodes, AdamW, 1,000
# steps, one seed) with exchanges at every batch after 0, 100 or 300 synchronous ones: 1.884, 1.804
# and 1.800; synchronous training 1.799. After 60 instead of 100 test accuracy was 0.4 points lower
# (two seeds, 2 bits). On 16 nodes it was 1.5 points below synchronous training after 100 batches,
# and equal to it after 200: between 8 and 16 nodes both grow (scripts/figures/accuracy-tried.json).
START_BATCHES, START_COST, START_NODES = 100, 120.0, (8, 16)
# Gradients of models with up to SMALL_NUMEL parameters are sent in 8 bits, and those of other
# models if 4 bits cost at most WIDE_COST of a step, until 8 bits cost more than NARROW_COST. A
# character GPT (0.4 M, AdamW, clipped at 1, 2 nodes, 400 steps, 3 seeds) ended 0.005, 0.011 and
# 0.007 above full precision in 4 bits, 0.0002, 0.0004 and 0.0007 in 8.
SMALL_NUMEL, WIDE_COST, NARROW_COST = 4_000_000, 0.02, 0.05
OVERLAP = 0.5  # of a step: averages of gradients that take less are hidden behind backward
# Synchronous batches are tried again when the estimated seconds of averages fall to this share of
# those at the end of the last phase (the minimum over a few batches), or after RETRY_AFTER batches.
FASTER, REFERENCE_BATCHES, RETRY_AFTER = 0.5, 10, 1000
FAILED_WITHIN = 100  # batches; a trial that ends earlier shows that the link is no faster
DRIFT = 0.025  # relative distance between nodes that SGD may reach before an exchange
# Factors of the seconds of an exchange. If it takes 0.9 batches and steps vary by 10 %, a margin of
# a fifth leaves 1 % of a step exposed, a tenth 3 % (`daso.predict`). With a normalizing optimizer,
# each batch by which a mean is late costs accuracy: if an exchange takes 1.7 batches, a fifth costs
# 0.51 points on 4 simulated nodes, a tenth none (scripts/figures/accuracy-text.json).
MARGIN, NORMALIZED_MARGIN = 1.2, 1.05
MAX_SKIP_OVER_WAIT = 8  # wait is at least skip / 8, so that a short delay exposes nothing
# Exchanges of small tensors alone: each takes 3 ms of a core, independent of its size.
SMALL_BUDGETS = 4.0  # of `Auto.budget`
# Minimum waits between exchanges of everything, if they hold back those of small tensors. With
# exchanges of 3 batches, 1,404 steps of a CNN ended 0.43 points below synchronous with 1, 0.08 with
# 4 and 0.03 with 8 (scripts/figures/selective.json).
MIN_WAITS_BETWEEN = 8


@validated_record
@dataclass(frozen=True, slots=True)
class Auto:
    """Chooses skip and wait from measured times; needs no settings.

    With an optimizer that normalizes (Adam and similar), training starts with gradients averaged at
    every batch, in 8 bits if that is cheap, otherwise in 4. The start lasts 100 batches, fewer if
    it would cost the time of 120, and twice as many on 16 nodes or more. Gradients stay averaged
    while that costs at most ``sync_cost`` of a step. Otherwise nodes exchange parameters as often
    as the link carries them, and scale the learning rate by a measured gain
    (`daso.plan.step_restoration`). Synchronous batches return once they are cheap.

    With other optimizers (SGD) nodes exchange parameters from the first batch. Wait is the number
    of batches that an exchange takes, with a margin. Skip keeps the processor time of exchanges
    within ``budget``, and the distance between nodes within ``drift``: the root mean square
    distance of a node from the mean of all nodes, relative to the parameters (consensus distance,
    Kong et al. 2021, arXiv 2102.04828). It is measured at every exchange and assumed to grow with
    the learning rate. Skip starts at 1 and at most doubles with each exchange. Small tensors
    (convolutions near the input, norms, biases) are exchanged at every second or third batch if
    that is cheap: drift of these tensors costs most accuracy.

    Args:
        drift: Target of the relative distance between nodes before an exchange, with optimizers
            that do not normalize; None: 0.025.
        max_skip: Maximum batches between exchanges.
        warmup: Synchronous batches at the start, in full precision; they replace the start above.
        budget: Share of the step time that exchanges may take, with optimizers that do not
            normalize.
        selective: Parameters of a model from which on its small tensors are exchanged more often;
            None: never.
        sync_cost: Share of a step that synchronous batches may cost, with optimizers that
            normalize; the processor time of exchanges stays within it too.
    """

    drift: float | None = None
    max_skip: int = 128
    warmup: int = 0
    budget: float = 0.01
    selective: int | None = 2_000_000
    sync_cost: float = 0.1

    def __post_init__(self) -> None:
        check("Auto.selective", self.selective, either(whole(1, of=" of numbers"), NONE))
        check("Auto.drift", self.drift, either(positive(), NONE))
        check("Auto.max_skip", self.max_skip, whole(1))
        check("Auto.warmup", self.warmup, whole(0))
        check("Auto.budget", self.budget, positive())
        check("Auto.sync_cost", self.sync_cost, positive())

    def start(self) -> State:
        """Return the state before the first batch."""
        return State() if self.warmup else State(skip=1, wait=1)

    def begin(self, state: State, nodes: int, numel: int) -> State:
        """Return the state before the first batch, with an optimizer that normalizes."""
        if self.warmup:
            return state
        few, many = START_NODES
        start = START_BATCHES * min(max(few, nodes), many) // few
        small = numel <= SMALL_NUMEL
        sync = replace(state.sync, start=start, wide=small, settled=small)
        return replace(state, skip=1, wait=0, hidden=True, sync=sync)

    def tune_batch(self, state: State) -> State:
        """Leave the warm-up after its batches."""
        warming = self.warmup and state.synchronous and not state.hidden
        if warming and state.batch >= self.warmup:
            return replace(state, skip=1, wait=1)
        return state

    def tune_exchange(self, state: State, measurements: Measurements) -> State:
        """Choose wait and skip for the next round."""
        if state.hidden:
            return self._stay_synchronous(state, measurements)
        if state.memory > 0 or measurements.required_gain > 0:
            return self._tune_normalized(state, measurements)
        return self._tune_linear(state, measurements)

    def tune_epoch(self, state: State, loss: float) -> State:  # noqa: ARG002 - the protocol's
        """Change nothing: loss and epochs are not needed."""
        return state

    def why(self, state: State) -> str:
        """Return the choice and its reason in words."""
        if state.hidden:
            return f"gradients at every batch: {_cost_of(state)}"
        if state.synchronous:
            return "gradients at every batch, in full precision: the warm-up"
        often = f"every {state.skip} batches" if state.skip > 1 else "at every batch"
        return f"parameters {often}, merged {state.wait} later: {self._reason(state)}"

    def _reason(self, state: State) -> str:
        """Return the reason why parameters are not exchanged more often."""
        measurements, cost = state.measurements, state.sync.cost or 0.0
        if cost > self.sync_cost:
            return f"gradients would cost {100 * cost:.0f} % of a step"
        if measurements.step_seconds <= 0:
            return "nothing is measured yet"
        if state.skip <= state.wait:
            return "an exchange takes that many batches"
        return f"an exchange takes {1e3 * measurements.own_seconds:.3g} ms of training"

    # --- optimizers that normalize -----------------------------------------------------------

    def _stay_synchronous(self, state: State, measurements: Measurements) -> State:
        """Leave synchronous batches if they cost too much."""
        if measurements.step_seconds <= 0:
            return state
        before = state.sync
        if before.measured == before.began:  # the first batches wait for late ranks
            return replace(state, sync=replace(before, measured=state.batch))
        cost = measurements.batches(measurements.exposed_seconds)
        spent = before.spent + cost * (state.batch - before.measured)
        sync = replace(before, cost=cost, spent=spent, measured=state.batch)
        if not sync.settled:
            back = sync.wide and cost > NARROW_COST
            wide = not back and (sync.wide or cost <= WIDE_COST)
            sync = replace(sync, wide=wide, settled=back)
            if back:  # 4 bits may be cheap enough
                return replace(state, sync=sync)
        more = cost * (MEASURE_EVERY - state.batch % MEASURE_EVERY)  # until the next measurement
        most = before.start * START_COST / START_BATCHES
        started = state.batch >= before.start or spent + more > most
        if cost <= self.sync_cost or not started:
            return replace(state, sync=sync)
        failed = sync.began > 0 and state.batch - sync.began <= FAILED_WITHIN
        sync = replace(sync, left=state.batch, gradients=sync.gradients if failed else 0.0)
        return replace(state, skip=1, wait=1, hidden=False, sync=sync)

    def _tune_normalized(self, state: State, measurements: Measurements) -> State:
        """Exchange at the rate of the link, or return to synchronous batches."""
        gradients = measurements.batches(measurements.gradient_seconds)
        sync, since = state.sync, state.batch - state.sync.left
        least = sync.gradients or gradients
        if since <= REFERENCE_BATCHES and gradients:
            least = min(least, gradients)
        work = measurements.batches(measurements.own_seconds)
        cheap = 0 < gradients <= OVERLAP and state.fragments * work <= self.sync_cost
        untried = sync.left == 0 or since >= RETRY_AFTER
        if cheap and (untried or gradients <= FASTER * least):
            least = min(least, gradients)
            sync = replace(sync, cost=None, began=state.batch, measured=state.batch)
            # The seconds of gradients are estimated for 4 bits.
            sync = replace(sync, gradients=least, wide=sync.wide and sync.settled)
            return replace(state, skip=1, wait=0, hidden=True, sync=sync)
        state = replace(state, sync=replace(sync, gradients=least))
        wait = min(self._wait(state, measurements, NORMALIZED_MARGIN), self._most_wait(state))
        affordable = math.ceil(min(work / self.sync_cost, self.max_skip)) if work else state.skip
        return replace(state, skip=max(wait, min(affordable, 2 * state.skip)), wait=wait)

    # --- optimizers that do not --------------------------------------------------------------

    def _tune_linear(self, state: State, measurements: Measurements) -> State:
        """Choose skip from the budget and the drift, and the period of small tensors."""
        most = self._most_wait(state)
        wait = min(self._wait(state, measurements, MARGIN), most)
        period = state.small.period_within(SMALL_BUDGETS * self.budget * measurements.step_seconds)
        small = replace(state.small, period=period)
        # Small tensors must not be held back most of the time.
        least = min(MIN_WAITS_BETWEEN * wait, 2 * state.skip) if small.are_held_back(wait) else wait
        affordable = min(self._affordable(measurements), 2 * state.skip)
        target = max(least, min(affordable, self._skip_by_drift(state, measurements)))
        skip = max(wait, min(target, self.max_skip))
        slack = skip // MAX_SKIP_OVER_WAIT
        if small.are_separate(wait):  # a long wait would hold them back
            slack = min(slack, SMALL_WAIT)
        return replace(state, skip=skip, wait=min(max(wait, slack), most), small=small)

    def _affordable(self, measurements: Measurements) -> int:
        """Return the batches between exchanges within the budget; the maximum if not measured."""
        batches = min(measurements.batches(measurements.own_seconds) / self.budget, self.max_skip)
        return max(1, math.ceil(batches)) if batches else self.max_skip

    def _skip_by_drift(self, state: State, measurements: Measurements) -> int:
        """Return the geometric mean of skip and the skip that drift permits; at most twice skip."""
        before = state.measurements
        ratio = measurements.lr / before.lr if before.lr > 0 else 1.0
        growth = ratio * ratio  # `ratio**2` would raise where it overflows; this is infinite
        if not measurements.drift * growth > 0:
            return state.skip
        allowed = (self.drift or DRIFT) ** 2 / (measurements.drift * growth) / state.fragments
        # The geometric mean damps oscillation, because drift per batch depends on skip itself.
        half = math.sqrt(state.skip * min(allowed, 4.0 * state.skip))
        return max(1, math.ceil(half) if math.ceil(half) <= allowed else math.floor(half))

    # --- both --------------------------------------------------------------------------------

    def _most_wait(self, state: State) -> int:
        """Return the maximum of the next wait: one slow exchange must not change it much."""
        return min(2 * max(1, state.wait), self.max_skip)

    def _wait(self, state: State, measurements: Measurements, margin: float) -> int:
        """Return the batches that an exchange takes, with a margin; unmeasured, the old wait."""
        # Two exchanges after the same batch (a drain, a repeat) have no measured step between them.
        batches = measurements.batches(measurements.exchange_seconds)
        if batches <= 0:
            return max(1, state.wait)
        return max(1, math.ceil(min(margin * batches, self.max_skip)))


def _cost_of(state: State) -> str:
    """Return the cost of synchronous batches in words."""
    if state.sync.cost is not None:
        return f"they cost {100 * state.sync.cost:.0f} % of a step"
    return "tried again" if state.sync.began else "the start"
