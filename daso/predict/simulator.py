"""Simulation of a schedule on many nodes, batch by batch, on virtual time. Pure.

The policy, the schedule and the choice of wires are those of real runs: `daso.plan`. Their
measurements come from the simulated nodes.
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
    exchange_cost,
    exchange_plan,
    exchange_seconds,
    synchronous_seconds,
)
from daso.predict.jobs import Job

STATE = "fp32"  # the wire of the inner optimizer's state


@dataclass(frozen=True, slots=True)
class Outcome:
    """Predicted costs of a run."""

    step_seconds: float  # without the first quarter of batches, in which a schedule settles
    exposed_seconds: float  # per step: mean wait of nodes for others
    bytes_per_step: float  # sent by a node
    exchanges: int  # of everything
    small_exchanges: int  # of small tensors only
    skip: int  # at the end
    wait: int  # at the end: age of a mean, in batches, when it is merged
    wire: str  # at the end: of exchanges, or of gradients if nodes average these
    plan: str  # at the end: the all-reduce plan of exchanges

    def efficiency(self, job: Job) -> float:
        """Return the fraction of a step spent on computing."""
        return job.step_seconds / self.step_seconds


@dataclass(slots=True)
class _Flight:
    """An exchange in flight."""

    begins: float  # when the last node sends
    ends: float
    lost: float = 0.0  # of computing, due to too few cores
    own: float = 0.0  # of the training thread, to merge it
    # None for small tensors only. Otherwise with its header's values: the median step of the
    # fastest node, and the cost of small exchanges since the previous exchange.
    sent: Sent | None = None
    agreed: Measurements = field(default_factory=Measurements)


@dataclass(frozen=True, slots=True)
class _Costs:
    """Seconds that steps and exchanges cost a node."""

    step: float  # of computing
    own: float  # of the training thread to pack an exchange of everything, and to merge it
    lost: float  # of computing to an exchange of everything, due to too few cores
    small_own: float  # of the training thread to pack small tensors, and to merge them
    # Waiting, in a step that averages gradients, by wire.
    synchronous: Mapping[str, float]

    @classmethod
    def of(cls, job: Job, cluster: Cluster, settings: Settings) -> "_Costs":
        """Return the costs of a job's steps and exchanges."""
        step = job.step_seconds * cluster.stretch
        slowest = step * max([1.0, *cluster.slower.values()])
        slow_job = replace(job, step_seconds=slowest)
        kinds = ((False, False), (True, False), (True, True))
        wires = {settings.gradient_wire(hidden=hidden, wide=wide) for hidden, wide in kinds}
        return cls(
            step=step,
            own=job.own_seconds * job.parameters * cluster.stretch / 2,
            lost=job.host_seconds * job.parameters * cluster.stretch * cluster.contention,
            small_own=job.small_seconds * cluster.stretch / 2,
            synchronous={
                wire: synchronous_seconds(slow_job, cluster, wire) - slowest for wire in wires
            },
        )


@dataclass(slots=True)
class _Totals:
    """Sums over the batches so far."""

    exposed: float = 0.0  # seconds, summed over nodes
    nbytes: float = 0.0  # sent by a node
    exchanges: int = 0
    small_exchanges: int = 0


class _Nodes:
    """Simulated nodes, each with its own clock."""

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
        self._taken, self._own = 0.0, 0.0  # of the previous exchange
        self._steps: list[list[float]] = []  # of all nodes, since the previous exchange
        self._small_waits: list[list[float]] = []  # for small tensors since then, of all nodes
        # Of synchronous steps since ranks last agreed on their costs: computing, and waiting.
        self._waiting_steps: list[tuple[list[float], list[float]]] = []

    def compute(self) -> None:
        """Advance every node by computing a batch."""
        job, slower = self.job, self.cluster.slower
        base = [self._costs.step] * len(self.times)
        for node, factor in slower.items():
            base[node] *= factor
        if job.jitter:
            spread, gauss, exp = job.jitter, self._random.gauss, math.exp
            base = [seconds * exp(spread * gauss(0.0, 1.0)) for seconds in base]
        if self.cluster.nodes > 1:  # a single node exchanges no measurements
            self._steps.append(base)
        self.times = [at + seconds for at, seconds in zip(self.times, base, strict=True)]

    def average_gradients(self, *, hidden: bool, wide: bool) -> None:
        """End a synchronous step: every node waits for the slowest and for the gradients."""
        wire = self.settings.gradient_wire(hidden=hidden, wide=wide)
        waits = self._wait_until(max(self.times) + self._costs.synchronous[wire])
        self.totals.nbytes += exchange_cost(self.job.parameters, wire, self.cluster).sent_bytes
        if hidden:
            self._waiting_steps += [(steps, waits) for steps in self._steps]
        self._steps.clear()  # exchanges do not report steps that wait

    def measure(self) -> Measurements:
        """Return the measurements of synchronous steps that nodes agree on."""
        computing, waits = zip(*self._waiting_steps, strict=True)
        self._waiting_steps = []
        return Measurements(
            min(statistics.median(steps) for steps in zip(*computing, strict=True)),
            lr=self.job.lr,
            exposed_seconds=min(map(statistics.fmean, zip(*waits, strict=True))),
        )

    def join(self) -> None:
        """Average the inner optimizer's state, two numbers for each parameter; blocking."""
        state = replace(self.job, parameters=2 * self.job.parameters)
        self._wait_until(max(self.times) + exchange_seconds(state, self.cluster, STATE))
        self.totals.nbytes += exchange_cost(state.parameters, STATE, self.cluster).sent_bytes

    def _wait_until(self, at: float) -> list[float]:
        """Advance every node to a time; return the wait of each."""
        waits = [at - time for time in self.times]
        self.totals.exposed += sum(waits)
        self.times = [at] * len(self.times)
        return waits

    def send(self, batch: int, fragment: int | None, *, wait: int) -> None:
        """Start an exchange of parameters; it begins when the last node has sent."""
        fastest = 0.0
        if self._steps:
            middle = len(self._steps) // 2
            fastest = min(sorted(steps)[middle] for steps in zip(*self._steps, strict=True))
        small_seconds = 0.0
        if self._small_waits:  # the minimum excludes waits for slow nodes
            waits = map(statistics.fmean, zip(*self._small_waits, strict=True))
            small_seconds = 2 * self._costs.small_own + min(waits)
        job, costs, nodes = self.job, self._costs, self.cluster.nodes
        agreed = Measurements(
            step_seconds=fastest,
            exchange_seconds=self._taken,
            lr=job.lr,
            drift=job.drift * (1 - 1 / nodes),
            own_seconds=self._own,
            required_gain=math.sqrt(nodes) if self.restores else 0.0,  # the gain for pure noise
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
        """Start an exchange of small tensors only."""
        self._start(self.job.small_parameters, self.settings.wires[0], self._costs.small_own)
        self.totals.small_exchanges += 1

    def _start(self, parameters: float, wire: str, own: float) -> None:
        # A fragment without parameters costs as much as a single number: the vote.
        job = replace(self.job, parameters=max(1.0, parameters), small_parameters=0.0)
        self.times = [at + own for at in self.times]
        begins = max(self.times)
        ends = begins + exchange_seconds(job, self.cluster, wire)
        self._flight = _Flight(begins, ends, own=own)
        self.totals.nbytes += exchange_cost(job.parameters, wire, self.cluster).sent_bytes

    def receive(self) -> Measurements | None:
        """Wait on every node for the exchange; return its measurements, if any."""
        flight, self._flight = self._flight, None
        assert flight is not None, "the schedule receives only what was sent"
        if flight.sent is None:
            self._small_waits.append(self._wait_for(flight))
            return None
        # With too few cores, the exchange took time from computing since it began.
        self.times = [at + flight.lost for at in self.times]
        self._wait_for(flight)
        # The next exchange reports how long the last node had to wait for this one.
        self._taken, self._own = flight.ends - flight.begins, 2 * flight.own + flight.lost
        self.exchanged, measurements = self.rules.learn(self.exchanged, flight.sent, flight.agreed)
        return measurements

    def _wait_for(self, flight: _Flight) -> list[float]:
        """Wait on every node for an exchange, and merge it; return the wait of each."""
        waits = [max(0.0, flight.ends - at) for at in self.times]
        self.totals.exposed += sum(waits)
        self.times = [at + wait + flight.own for at, wait in zip(self.times, waits, strict=True)]
        return waits

    def perform(self, acts: Sequence[Action], state: State) -> Measurements | None:
        """Perform the actions due after a batch; return their measurements, if any."""
        measurements = None
        for act in acts:
            measurements = self._perform(act, state) or measurements
        return measurements

    def _perform(self, act: Action, state: State) -> Measurements | None:
        if act is Action.ANCHOR:  # all nodes have the same parameters
            self.exchanged = self.rules.start(state.batch, self.exchanged)
        elif act is Action.SEND:
            self.send(state.batch, state.fragment, wait=state.sent_wait)
        elif act is Action.SEND_ALL:
            self.send(state.batch, None, wait=0)
        elif act is Action.SEND_SMALL:
            self.send_small()
        elif act in (Action.RECEIVE, Action.SETTLE):
            return self.receive()
        elif act is Action.MEASURE:
            return self.measure()
        elif act is Action.JOIN:
            self.join()
        return None


def simulate(
    job: Job,
    cluster: Cluster,
    policy: Policy,
    settings: Settings | None = None,
    *,
    steps: int,
    seed: int = 0,
) -> Outcome:
    """Simulate training for `steps` batches on virtual time.

    Args:
        job: The model and its training costs.
        cluster: The nodes and their links.
        policy: Chooses skip and wait.
        settings: Wires, fragments and gradients; the rest is not simulated. None: the default.
        steps: Number of batches.
        seed: Seed of the spread of step times.

    Returns:
        The predicted costs.

    Raises:
        ConfigError: The policy depends on epochs and the loss, or `steps` is below 1.
    """
    check("steps", steps, whole(1))
    if isinstance(policy, Plateau):
        raise ConfigError(
            "a policy must not go by the loss of epochs to be predicted, as Plateau",
            code="policy-needs-losses",
        )
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
        if cluster.nodes > 1 and (measurements := nodes.perform(acts, state)):
            acts, state = after_exchange(policy, state, measurements)
            nodes.perform(acts, state)
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
        wire=settings.gradient_wire(hidden=True, wide=state.sync.wide)
        if state.hidden
        else nodes.exchanged.wire,
        plan=exchange_plan(max(nodes.rules.numels), nodes.exchanged.wire, cluster).name,
    )


def _parts(job: Job, settings: Settings) -> tuple[int, ...]:
    """Return the elements of each fragment; fragments are of about the same size."""
    count = settings.exchange.fragments
    least, more = divmod(int(job.parameters), count)
    return tuple(least + (number < more) for number in range(count))


def _begin(job: Job, policy: Policy, settings: Settings, nodes: int) -> State:
    """Return the state before the first batch."""
    restored = job.normalizes and settings.may_restore_steps
    sends_small = settings.sends_small_tensors(job.parameters) and not restored
    share = settings.small_share(job.small_parameters, job.parameters) if sends_small else 0.0
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
