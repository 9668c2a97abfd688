"""A schedule on many nodes, batch by batch, on virtual time.

The policy, the schedule and the choice of wires are those of real runs: `daso.plan`. What they are
told, a step's time, an exchange's, drift, comes from the nodes that are simulated. Exchanges of
small tensors alone are left out: they take 2 to 3 ms of a core at every second batch.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daso.errors import ConfigError
from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.policies import Plateau
from daso.plan.schedule import Action, Measurements, Policy, State, after_batch, after_exchange
from daso.predict.cluster import (
    GRADIENTS,
    Cluster,
    Job,
    exchange_cost,
    exchange_plan,
    exchange_seconds,
    synchronous_seconds,
)

__all__ = ["Outcome", "simulate"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run would have taken."""

    step_seconds: float  # of all batches but the first quarter, in which a schedule finds its place
    exposed_seconds: float  # per step: mean over nodes of standing still for others
    bytes_per_step: float  # sent by a node
    exchanges: int
    skip: int  # at the end
    wait: int  # at the end: how many batches old a mean is when it is merged
    wire: str  # at the end
    plan: str  # of exchanges at the end: how nodes take a mean

    def efficiency(self, job: Job) -> float:
        """Return computing alone over a step."""
        return job.step_seconds / self.step_seconds


@dataclass(slots=True)
class _Flight:
    """An exchange under way."""

    begins: float  # when the last node has sent
    ends: float
    fastest: float  # step of the fastest node until then, the median of each


class _Nodes:
    """Nodes, each at a time of its own."""

    def __init__(self, job: Job, cluster: Cluster, settings: Settings, seed: int) -> None:
        self.job, self.cluster, self.settings = job, cluster, settings
        self.times = [0.0] * cluster.nodes
        self.exposed = 0.0  # seconds, summed over nodes
        self.nbytes, self.exchanges = 0.0, 0
        self.wire = settings.wires[0]
        self._random = random.Random(seed)
        self._flight: _Flight | None = None
        self._taken = 0.0  # by the exchange before
        self._steps: list[list[float]] = []  # of all nodes, since the exchange before
        self._step_seconds = job.step_seconds * cluster.stretch
        self._lost = job.host_seconds * job.parameters * cluster.stretch * cluster.taken
        self._own = job.own_seconds * job.parameters * cluster.stretch / 2
        slowest = self._step_seconds * max([1.0, *cluster.slower.values()])
        waits_for = replace(job, step_seconds=slowest)
        self._extra = synchronous_seconds(waits_for, cluster) - slowest

    def compute(self) -> None:
        """Let every node compute a batch."""
        job, slower = self.job, self.cluster.slower
        base = [self._step_seconds] * len(self.times)
        for node, factor in slower.items():
            base[node] *= factor
        if job.jitter:
            spread, gauss, exp = job.jitter, self._random.gauss, math.exp
            base = [seconds * exp(spread * gauss(0.0, 1.0)) for seconds in base]
        self._steps.append(base)
        self.times = [at + seconds for at, seconds in zip(self.times, base, strict=True)]

    def average_gradients(self) -> None:
        """End a synchronous step: all wait for the last, and for what crosses between them."""
        at = max(self.times) + self._extra
        self.exposed += sum(at - time for time in self.times)
        self.times = [at] * len(self.times)
        self.nbytes += exchange_cost(self.job.parameters, GRADIENTS, self.cluster).sent_bytes
        self._steps.clear()  # of steps that wait nobody is told

    def send(self) -> None:
        """Start an exchange; it goes on when the last node has sent."""
        self.times = [at + self._own for at in self.times]
        begins = max(self.times)
        ends = begins + exchange_seconds(self.job, self.cluster, self.wire)
        middle = len(self._steps) // 2
        fastest = min(sorted(steps)[middle] for steps in zip(*self._steps, strict=True))
        self._flight, self._steps = _Flight(begins, ends, fastest), []
        self.nbytes += exchange_cost(self.job.parameters, self.wire, self.cluster).sent_bytes
        self.exchanges += 1

    def receive(self) -> Measurements:
        """Let every node wait for the exchange; return what all agree on with it."""
        flight, self._flight = self._flight, None
        assert flight is not None, "the schedule receives only what was sent"
        # Where cores are short, the exchange took some of what was computed since it began.
        self.times = [at + self._lost for at in self.times]
        late = [max(0.0, flight.ends - at) for at in self.times]
        self.exposed += sum(late)
        self.times = [at + wait + self._own for at, wait in zip(self.times, late, strict=True)]
        nodes = self.cluster.nodes
        drift, own = self.job.drift * (1 - 1 / nodes), 2 * self._own + self._lost
        measurements = Measurements(flight.fastest, self._taken, self.job.lr, drift, own)
        # What the node that came last saw of it, which is told with the next one.
        self._taken = flight.ends - flight.begins
        self.wire = self.settings.next_wire(self.wire, measurements, numel=int(self.job.parameters))
        return measurements


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
        settings: Wires, the rest is not simulated; None: those that are usual.
        steps: Batches.
        seed: Of the spread of step times.

    Returns:
        What it took.

    Raises:
        ConfigError: The policy goes by epochs and the loss.
    """
    if isinstance(policy, Plateau):
        raise ConfigError("a policy must not go by the loss of epochs to be predicted, as Plateau")
    if settings is None:
        settings = Settings(wire="auto", merge="auto", exchange=Exchange(), gradients=Gradients())
    nodes, state = _Nodes(job, cluster, settings, seed), policy.start()
    state = replace(state, sparse=settings.sparse)
    settled, before = steps // 4, (0.0, 0.0, 0.0)
    for batch in range(steps):
        if batch == settled:
            before = statistics.fmean(nodes.times), nodes.exposed, nodes.nbytes
        nodes.compute()
        if state.synchronous and cluster.nodes > 1:
            nodes.average_gradients()
        acts, state = after_batch(policy, state)
        if cluster.nodes > 1:
            state = _carry_out(nodes, acts, state, policy)
    time, exposed, nbytes = before
    counted = steps - settled
    return Outcome(
        step_seconds=(statistics.fmean(nodes.times) - time) / counted,
        exposed_seconds=(nodes.exposed - exposed) / counted / cluster.nodes,
        bytes_per_step=(nodes.nbytes - nbytes) / counted,
        exchanges=nodes.exchanges,
        skip=state.skip,
        wait=state.wait,
        wire=nodes.wire,
        plan=exchange_plan(job.parameters, nodes.wire, cluster).name,
    )


def _carry_out(nodes: _Nodes, acts: Sequence[Action], state: State, policy: Policy) -> State:
    """Do what is due after a batch; return the state for the next."""
    measurements = None
    for act in acts:
        if act is Action.SEND:
            nodes.send()
        elif act is Action.RECEIVE:
            measurements = nodes.receive()
    # No policy here turns synchronous again: what it takes to agree is not due.
    return state if measurements is None else after_exchange(policy, state, measurements)[1]
