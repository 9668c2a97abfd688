"""Nodes that train: what a step and an exchange take of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from daso.checks import Rule, check, instance_of, number, positive, validated_record, whole
from daso.errors import ConfigError
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.cost_model import (
    AllReduceCost,
    Layers,
    LinkCosts,
    allreduce_cost,
    choose_plan,
    fitted_costs,
    step_seconds,
)
from daso.plan.options import BITS
from daso.predict.network import Link, vote_seconds

__all__ = [
    "GRADIENTS",
    "PORTIONS",
    "Cluster",
    "Job",
    "exchange_cost",
    "exchange_plan",
    "exchange_seconds",
    "synchronous_seconds",
]

GRADIENTS = "fp32"  # in what synchronous ones cross unless `Gradients` has another wire
PORTIONS = 16  # into which backward is cut for what crosses beside it
MESSAGE_BYTES = 512 << 10  # of a message by which training measures links
FORWARD = 1 / 3  # of a step's computing; backward takes the rest
MOST_PARAMETERS, MOST_NODES, MOST_CORES, MOST_RATE = 1e15, 1_000_000, 1e6, 1e6


@validated_record
@dataclass(frozen=True, slots=True)
class Job:
    """A model and what training it costs a node.

    Args:
        parameters: Numbers of the model.
        step_seconds: Of computing a batch, gradients averaged inside the node.
        host_seconds: Of the host's own work on an exchange, per parameter; it goes on beside the
            transfer, so the longer of both counts.
        own_seconds: Of the training thread, per parameter and exchange: half of it packs what is
            sent, half merges what came, and nothing goes on beside.
        small_parameters: Of these, those of small tensors, which `Auto` exchanges alone, too; 0: it
            does not.
        small_seconds: Of the training thread, for each of these exchanges, as ``own_seconds``.
        message_seconds: Of the host, for each message that it sends or receives.
        gradient_seconds: As ``host_seconds``, of gradients that are averaged in a synchronous step.
        jitter: Spread of step times: standard deviation of their logarithm.
        lr: Learning rate.
        drift: Mean square distance that many nodes make from their mean in one batch, relative to
            the parameters' mean square, at ``lr``; 0: not known, and `Auto` keeps its skip.
        normalizes: Whether its inner optimizer divides by the size of gradients, as Adam and its
            kin: `Auto` begins synchronous, and stays so while that is cheap.
    """

    parameters: float
    step_seconds: float
    host_seconds: float = 0.0
    own_seconds: float = 0.0
    small_parameters: float = 0.0
    small_seconds: float = 0.0
    message_seconds: float = 0.0
    gradient_seconds: float = 0.0
    jitter: float = 0.0
    lr: float = 0.1
    drift: float = 0.0
    normalizes: bool = False

    def __post_init__(self) -> None:
        check("parameters", self.parameters, positive(MOST_PARAMETERS))
        check("step_seconds", self.step_seconds, positive())
        check("small_parameters", self.small_parameters, number(0, self.parameters))
        for name in (
            *("host_seconds", "own_seconds", "small_seconds"),
            *("message_seconds", "gradient_seconds"),
        ):
            check(name, getattr(self, name), number(0, 1))
        for name in ("lr", "drift"):
            check(name, getattr(self, name), number(0, MOST_RATE))
        below_one = Rule("a part of a step from 0 to 1", lambda one: number(0, 0.999).holds(one))
        check("jitter", self.jitter, below_one)


@validated_record
@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes and what joins them.

    Args:
        nodes: How many.
        link: Of each node.
        slower: Factors of step times, for nodes that are slower than the others.
        cores: Of each rank: one computes, another works on exchanges. With fewer than two, what
            exchanges take of them is lost to computing; with less than one, all goes slower.
    """

    nodes: int
    link: Link
    slower: Mapping[int, float] = field(default_factory=dict)
    cores: float = 2.0

    def __post_init__(self) -> None:
        check("nodes", self.nodes, whole(1, MOST_NODES))
        check("link", self.link, instance_of(Link))
        check("cores", self.cores, positive(MOST_CORES))
        check("slower", self.slower, Rule("factors by node", lambda one: isinstance(one, Mapping)))
        for node, factor in self.slower.items():
            if not (whole(0, self.nodes - 1).holds(node) and positive().holds(factor)):
                raise ConfigError(
                    f"a slower node must be one of 0 to {self.nodes - 1} with a factor above 0, "
                    f"not {node} with {factor}"
                )

    @property
    def stretch(self) -> float:
        """How many times as long all computing takes for want of a core."""
        return max(1.0, 1 / self.cores)

    @property
    def taken(self) -> float:
        """Part of the host's work on exchanges that computing goes without meanwhile."""
        return min(1.0, max(0.0, 2 - self.cores))


def exchange_plan(parameters: float, wire: str, cluster: Cluster) -> AllReducePlan:
    """Return how nodes take the mean of so many numbers on a wire, as in training."""
    return choose_plan("auto", cluster.nodes, parameters * BITS[wire] / 8, _costs(cluster.link))


def _costs(link: Link) -> LinkCosts:
    """Return what training would measure of such a link."""
    large_seconds = link.latency_seconds + link.seconds(MESSAGE_BYTES)
    return fitted_costs(link.latency_seconds, large_seconds, MESSAGE_BYTES)


def exchange_cost(parameters: float, wire: str, cluster: Cluster) -> AllReduceCost:
    """Return messages, bytes and rounds of each node for one exchange of so many numbers."""
    plan = exchange_plan(parameters, wire, cluster)
    return allreduce_cost(plan, parameters * BITS[wire] / 8, _costs(cluster.link))


def exchange_seconds(job: Job, cluster: Cluster, wire: str) -> float:
    """Return how long an exchange takes from when the last node has sent.

    All agree first; then payloads cross while the host encodes, adds and decodes others, and works
    on messages.
    """
    link, cost = cluster.link, exchange_cost(job.parameters, wire, cluster)
    crossing = link.seconds(cost.sent_bytes)
    messages = 2 * cost.messages * job.message_seconds
    work = (job.host_seconds * job.parameters + messages) * cluster.stretch
    there = max(crossing, work) + cost.rounds * link.latency_seconds
    return vote_seconds(link, cluster.nodes) + there


def synchronous_seconds(job: Job, cluster: Cluster, wire: str = GRADIENTS) -> float:
    """Return how long a step takes that waits for the mean gradient, jitter apart.

    The step is the job's, whatever cores there are. Where the thread that exchanges has no core of
    its own, next to nothing crosses while backward computes: it gets one when that waits.

    Gradients of the last layers cross while those of the first are computed, first come, first
    served, as with DDP: the bytes of a ring, and the latency of a tree, of whatever is better. On a
    narrow wire the host works on them as on an exchange.
    """
    if cluster.nodes == 1:
        return job.step_seconds
    link, nodes = cluster.link, cluster.nodes
    portion = exchange_cost(job.parameters / PORTIONS, wire, cluster)
    crossing = PORTIONS * link.seconds(portion.sent_bytes)
    messages = PORTIONS * 2 * portion.messages * job.message_seconds
    own_seconds = job.gradient_seconds if wire == GRADIENTS else job.host_seconds
    work = (own_seconds * job.parameters + messages) * cluster.stretch
    takes, vote = max(crossing, work), vote_seconds(link, nodes)
    layers = Layers(
        forward_seconds=(FORWARD * job.step_seconds / PORTIONS,) * PORTIONS,
        backward_seconds=((1 - FORWARD) * job.step_seconds / PORTIONS,) * PORTIONS,
        transfer_seconds=(takes / PORTIONS + vote,) * PORTIONS,
    )
    beside = step_seconds(layers, order="fifo", portions=[1] * PORTIONS, barrier=True)
    after = job.step_seconds + takes + PORTIONS * vote
    return cluster.taken * after + (1 - cluster.taken) * beside
