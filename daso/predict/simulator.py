"""A schedule on many nodes, batch by batch, on virtual time.

The policy, the schedule and the choice of wires are those of real runs: `daso.plan`. What they are
told, a step's time, an exchange's, drift, comes from the nodes that are simulated.
"""

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from daso.checks import check, whole
from daso.errors import ConfigError
from daso.plan.exchange import ExchangeRules, Sent
from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.policies import Plateau
from daso.plan.schedule import (
    Action,
    Measurements,
    Policy,
    State,
    after_batch,
    after_exchange,
    begin,
)
from daso.predict.cluster import (
    Cluster,
    Job,
    exchange_cost,
    exchange_plan,
    exchange_seconds,
    synchronous_seconds,
)

__all__ = ["Outcome", "simulate"]

STATE = "fp32"  # in what the inner optimizer's state crosses


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run would have taken."""

    step_seconds: float  # of all batches but the first quarter, in which a schedule finds its place
    exposed_seconds: float  # per step: mean over nodes of standing still for others
    bytes_per_step: float  # sent by a node
    exchanges: int  # of everything
    small_exchanges: int  # of small tensors alone
    skip: int  # at the end
    wait: int  # at the end: how many batches old a mean is when it is merged
    wire: str  # at the end: of exchanges, or of gradients where nodes average these
    plan: str  # of exchanges at the end: how nodes take a mean

    def efficiency(self, job: Job) -> float:
        """Return computing alone over a step."""
        return job.step_seconds / self.step_seconds


@dataclass(slots=True)
class _Flight:
    """An exchange under way."""

    begins: float  # when the last node has sent
    ends: float
    lost: float = 0.0  # of computing, where cores are short
    own: float = 0.0  # of the training thread, to merge it
    # None of small tensors alone. Else with the numbers of its header: of the step of the fastest
    # node until then, the median, and what small ones took from training since the one before.
    sent: Sent | None = None
    agreed: Measurements = field(default_factory=Measurements)


@dataclass(frozen=True, slots=True)
class _Costs:
    """What things take of a node, in seconds."""

    step: float  # of computing
    own: float  # of the training thread to pack an exchange of everything, and to merge it
    lost: float  # of computing to an exchange of everything, where cores are short
    small_own: float  # of the training thread to pack small tensors, and to merge them
    # Of waiting, in a step that averages gradients, on each of their wires.
    synchronous: Mapping[str, float]

    @classmethod
    def of(cls, job: Job, cluster: Cluster, settings: Settings) -> "_Costs":
        """Return those of a job's steps and exchanges."""
        step = job.step_seconds * cluster.stretch
        slowest = step * max([1.0, *cluster.slower.values()])
        slow_job = replace(job, step_seconds=slowest)
        kinds = ((False, False), (True, False), (True, True))
        wires = {settings.gradient_wire(hidden=hidden, wide=wide) for hidden, wide in kinds}
        return cls(
            step=step,
            own=job.own_seconds * job.parameters * cluster.stretch / 2,
            lost=job.host_seconds * job.parameters * cluster.stretch * cluster.taken,
            small_own=job.small_seconds * cluster.stretch / 2,
            synchronous={
                wire: synchronous_seconds(slow_job, cluster, wire) - slowest for wire in wires
            },
        )


@dataclass(slots=True)
class _Totals:
    """What was counted so far."""

    exposed: float = 0.0  # seconds, summed over nodes
    nbytes: float = 0.0  # sent by a node
    exchanges: int = 0
    small_exchanges: int = 0


class _Nodes:
    """Nodes, each at a time of its own."""

    def __init__(self, job: Job, cluster: Cluster, settings: Settings, seed: int) -> None:
        self.job, self.cluster, self.settings = job, cluster, settings
        self.times = [0.0] * cluster.nodes
        self.totals = _Totals()
        self.restores = job.normalizes and settings.may_restore_steps
        self.rules = ExchangeRules(settings, cluster.nodes, _parts(job, settings))
        self.exchanged = self.rules.start()
        self._costs = _Costs.of(job, cluster, settings)
        self._random = random.Random(seed)
        self._flight: _Flight | None = None
        self._taken, self._own = 0.0, 0.0  # by the exchange before
        self._steps: list[list[float]] = []  # of all nodes, since the exchange before
        self._small_waits: list[list[float]] = []  # for small tensors since then, likewise
        # Of synchronous steps since ranks last agreed on what these take: computing, and waiting.
        self._waiting_steps: list[tuple[list[float], list[float]]] = []

    def compute(self) -> None:
        """Let every node compute a batch."""
        job, slower = self.job, self.cluster.slower
        base = [self._costs.step] * len(self.times)
        for node, factor in slower.items():
            base[node] *= factor
        if job.jitter:
            spread, gauss, exp = job.jitter, self._random.gauss, math.exp
            base = [seconds * exp(spread * gauss(0.0, 1.0)) for seconds in base]
        if self.cluster.nodes > 1:  # one alone tells nobody of them
            self._steps.append(base)
        self.times = [at + seconds for at, seconds in zip(self.times, base, strict=True)]

    def average_gradients(self, *, hidden: bool, wide: bool) -> None:
        """End a synchronous step: all wait for the last, and for what crosses between them."""
        wire = self.settings.gradient_wire(hidden=hidden, wide=wide)
        waits = self._wait_until(max(self.times) + self._costs.synchronous[wire])
        self.totals.nbytes += exchange_cost(self.job.parameters, wire, self.cluster).sent_bytes
        if hidden:
            self._waiting_steps += [(steps, waits) for steps in self._steps]
        self._steps.clear()  # of steps that wait no exchange is told

    def measure(self) -> Measurements:
        """Return what all agree on about synchronous steps."""
        computing, waits = zip(*self._waiting_steps, strict=True)
        self._waiting_steps = []
        return Measurements(
            min(statistics.median(steps) for steps in zip(*computing, strict=True)),
            lr=self.job.lr,
            exposed_seconds=min(map(statistics.fmean, zip(*waits, strict=True))),
        )

    def join(self) -> None:
        """Average the inner optimizer's state, two numbers for each parameter, before all go on."""
        state = replace(self.job, parameters=2 * self.job.parameters)
        self._wait_until(max(self.times) + exchange_seconds(state, self.cluster, STATE))
        self.totals.nbytes += exchange_cost(state.parameters, STATE, self.cluster).sent_bytes

    def _wait_until(self, at: float) -> list[float]:
        """Let every node wait until then; return how long each waited."""
        waits = [at - time for time in self.times]
        self.totals.exposed += sum(waits)
        self.times = [at] * len(self.times)
        return waits

    def anchor(self, batch: int) -> None:
        """Begin exchanges of deltas: all nodes hold the same parameters."""
        self.exchanged = self.rules.start(batch, self.exchanged)

    def send(self, batch: int, fragment: int | None, *, wait: int) -> None:
        """Start an exchange; it goes on when the last node has sent."""
        fastest = 0.0
        if self._steps:
            middle = len(self._steps) // 2
            fastest = min(sorted(steps)[middle] for steps in zip(*self._steps, strict=True))
        small_seconds = 0.0
        if self._small_waits:  # the node that waits least waits for nobody who is slow
            waits = map(statistics.fmean, zip(*self._small_waits, strict=True))
            small_seconds = 2 * self._costs.small_own + min(waits)
        job, costs, nodes = self.job, self._costs, self.cluster.nodes
        agreed = Measurements(
            *(fastest, self._taken, job.lr, job.drift * (1 - 1 / nodes), self._own),
            required_gain=math.sqrt(nodes) if self.restores else 0.0,  # as where all is noise
            small_seconds=small_seconds,
        )
        sent = self.rules.send(self.exchanged, batch, fragment, wait=wait)
        numels = self.rules.numels
        part = (sum(numels) if fragment is None else numels[fragment]) / max(1, sum(numels))
        own, lost = part * costs.own, part * costs.lost
        self._start(part * job.parameters, sent.wire, own)
        assert self._flight is not None
        self._flight = replace(self._flight, lost=lost, own=own, sent=sent, agreed=agreed)
        self._steps, self._small_waits = [], []
        self.totals.exchanges += 1

    def send_small(self) -> None:
        """Start an exchange of small tensors alone."""
        self._start(self.job.small_parameters, self.settings.wires[0], self._costs.small_own)
        self.totals.small_exchanges += 1

    def _start(self, parameters: float, wire: str, own: float) -> None:
        # A fragment without parameters costs what a single number does: the vote.
        job = replace(self.job, parameters=max(1.0, parameters), small_parameters=0.0)
        self.times = [at + own for at in self.times]
        begins = max(self.times)
        ends = begins + exchange_seconds(job, self.cluster, wire)
        self._flight = _Flight(begins, ends, own=own)
        self.totals.nbytes += exchange_cost(job.parameters, wire, self.cluster).sent_bytes

    def receive(self) -> Measurements | None:
        """Let every node wait for the exchange; return what all agree on with it, if anything."""
        flight, self._flight = self._flight, None
        assert flight is not None, "the schedule receives only what was sent"
        if flight.sent is None:
            self._small_waits.append(self._wait_for(flight))
            return None
        # Where cores are short, the exchange took some of what was computed since it began.
        self.times = [at + flight.lost for at in self.times]
        self._wait_for(flight)
        # The next one tells how long the node that came last had to wait for it.
        self._taken, self._own = flight.ends - flight.begins, 2 * flight.own + flight.lost
        self.exchanged, measurements = self.rules.learn(self.exchanged, flight.sent, flight.agreed)
        return measurements

    def _wait_for(self, flight: _Flight) -> list[float]:
        """Let every node wait for an exchange, and merge it; return how long each waited."""
        late = [max(0.0, flight.ends - at) for at in self.times]
        self.totals.exposed += sum(late)
        self.times = [at + wait + flight.own for at, wait in zip(self.times, late, strict=True)]
        return late


def simulate(
    job: Job,
    cluster: Cluster,
    policy: Policy,
    settings: Settings | None = None,
    *,
    steps: int,
    seed: int = 0,
) -> Outcome:
    """Train for so many batches on virtual time.

    Args:
        job: What is trained.
        cluster: On what.
        policy: Chooses skip and wait.
        settings: Wires, fragments and gradients, the rest is not simulated; None: the default.
        steps: Batches.
        seed: Of the spread of step times.

    Returns:
        What it took.

    Raises:
        ConfigError: The policy goes by epochs and the loss, or there is no step.
    """
    check("steps", steps, whole(1))
    if isinstance(policy, Plateau):
        raise ConfigError("a policy must not go by the loss of epochs to be predicted, as Plateau")
    if settings is None:
        settings = Settings(wire="auto", merge="auto", exchange=Exchange(), gradients=Gradients())
    settings = replace(settings, selective=getattr(policy, "selective", None))
    nodes = _Nodes(job, cluster, settings, seed)
    state = _begin(job, policy, settings, cluster.nodes)
    totals = nodes.totals
    settled, before = steps // 4, (0.0, 0.0, 0.0)
    for batch in range(steps):
        if batch == settled:
            before = statistics.fmean(nodes.times), totals.exposed, totals.nbytes
        nodes.compute()
        if state.synchronous and cluster.nodes > 1:
            nodes.average_gradients(hidden=state.hidden, wide=state.sync.wide)
        acts, state = after_batch(policy, state)
        if cluster.nodes > 1:
            state = _carry_out(nodes, acts, state, policy)
    time, exposed, nbytes = before
    counted = steps - settled
    return Outcome(
        step_seconds=(statistics.fmean(nodes.times) - time) / counted,
        exposed_seconds=(totals.exposed - exposed) / counted / cluster.nodes,
        bytes_per_step=(totals.nbytes - nbytes) / counted,
        exchanges=totals.exchanges,
        small_exchanges=totals.small_exchanges,
        skip=state.skip,
        wait=state.wait,
        wire=_wire_of(state, settings, nodes),
        plan=exchange_plan(max(nodes.rules.numels), nodes.exchanged.wire, cluster).name,
    )


def _wire_of(state: State, settings: Settings, nodes: _Nodes) -> str:
    if state.hidden:
        return settings.gradient_wire(hidden=True, wide=state.sync.wide)
    return nodes.exchanged.wire


def _parts(job: Job, settings: Settings) -> tuple[int, ...]:
    """Return the numbers of each fragment: a model is cut into parts of about the same size."""
    count = settings.exchange.fragments
    least, more = divmod(int(job.parameters), count)
    return tuple(least + (number < more) for number in range(count))


def _begin(job: Job, policy: Policy, settings: Settings, nodes: int) -> State:
    """Return the state before the first batch."""
    restored = job.normalizes and settings.may_restore_steps
    taken = settings.sends_small_tensors(job.parameters) and not restored
    share = settings.small_share(job.small_parameters, job.parameters) if taken else 0.0
    fragments = settings.exchange.fragments
    state = replace(policy.start(), sparse=settings.sparse, fragments=fragments)
    may_hide = restored and settings.may_hide
    return begin(
        policy,
        state,
        nodes=nodes,
        memory=0.0,
        may_hide=may_hide,
        small_share=share,
        numel=int(job.parameters),
    )


def _carry_out(nodes: _Nodes, acts: Sequence[Action], state: State, policy: Policy) -> State:
    """Do what is due after a batch; return the state for the next."""
    measurements = None
    for act in acts:
        measurements = _act(nodes, act, state) or measurements
    if measurements is None:
        return state
    acts, state = after_exchange(policy, state, measurements)
    for act in acts:
        _act(nodes, act, state)
    return state


def _act(nodes: _Nodes, act: Action, state: State) -> Measurements | None:
    """Do one thing; return what all agree on with it, if anything."""
    if act is Action.ANCHOR:
        nodes.anchor(state.batch)
    elif act is Action.SEND:
        nodes.send(state.batch, state.fragment, wait=state.sent_wait)
    elif act is Action.SEND_ALL:
        nodes.send(state.batch, None, wait=0)
    elif act is Action.SEND_SMALL:
        nodes.send_small()
    elif act in (Action.RECEIVE, Action.SETTLE):
        return nodes.receive()
    elif act is Action.MEASURE:
        return nodes.measure()
    elif act is Action.JOIN:
        nodes.join()
    return None
