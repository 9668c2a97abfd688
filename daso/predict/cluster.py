"""Clusters of nodes: the predicted durations of steps and exchanges. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from daso.checks import Rule, check, instance_of, positive, validated_record, whole
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
from daso.predict.jobs import Job
from daso.predict.links import Link, vote_seconds

GRADIENTS = "fp32"  # the wire of synchronous gradients unless `Gradients` sets another
PORTIONS = 16  # parts of backward; gradients of each are sent during the next
MESSAGE_BYTES = 512 << 10  # message size of link measurements in training
FORWARD = 1 / 3  # of a step's computation; backward is the rest
MOST_NODES, MOST_CORES = 1_000_000, 1e6


@validated_record
@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes, and the links between them.

    Args:
        nodes: Number of nodes.
        link: Link of each node.
        slower: Factors of step times for slow nodes, by node.
        cores: Cores of each rank: one computes, another works on exchanges. With fewer than two,
            exchanges take time from computing; with less than one, everything is slower.
    """

    nodes: int
    link: Link
    slower: Mapping[int, float] = field(default_factory=dict)
    cores: float = 2.0

    def __post_init__(self) -> None:
        check("nodes", self.nodes, whole(1, MOST_NODES))
        check("link", self.link, instance_of(Link))
        check("cores", self.cores, positive(MOST_CORES))
        check(
            "slower", self.slower, Rule("factors by node", lambda value: isinstance(value, Mapping))
        )
        for node, factor in self.slower.items():
            if not (whole(0, self.nodes - 1).holds(node) and positive().holds(factor)):
                raise ConfigError(
                    f"a slower node must be one of 0 to {self.nodes - 1} with a factor above 0, "
                    f"not {node} with {factor}",
                    code="slower-node-invalid",
                )

    @property
    def stretch(self) -> float:
        """Return the slowdown of all computing if a rank has less than a core."""
        return max(1.0, 1 / self.cores)

    @property
    def contention(self) -> float:
        """Return the share of the host's work on exchanges that delays computing."""
        return min(1.0, max(0.0, 2 - self.cores))


def exchange_plan(parameters: float, wire: str, cluster: Cluster) -> AllReducePlan:
    """Return the all-reduce plan that training would choose for this many elements on a wire."""
    return choose_plan("auto", cluster.nodes, parameters * BITS[wire] / 8, _costs(cluster.link))


def _costs(link: Link) -> LinkCosts:
    """Return the link costs that training would measure."""
    large_seconds = link.latency_seconds + link.seconds(MESSAGE_BYTES)
    return fitted_costs(link.latency_seconds, large_seconds, MESSAGE_BYTES)


def exchange_cost(parameters: float, wire: str, cluster: Cluster) -> AllReduceCost:
    """Return messages, bytes and rounds of each node for one exchange."""
    plan = exchange_plan(parameters, wire, cluster)
    return allreduce_cost(plan, parameters * BITS[wire] / 8, _costs(cluster.link))


def exchange_seconds(job: Job, cluster: Cluster, wire: str) -> float:
    """Return the duration of an exchange: a vote, then transfer and host work concurrently."""
    link, cost = cluster.link, exchange_cost(job.parameters, wire, cluster)
    transfer = link.seconds(cost.sent_bytes)
    messages = 2 * cost.messages * job.message_seconds
    work = (job.host_seconds * job.parameters + messages) * cluster.stretch
    latency = cost.rounds * link.latency_seconds
    return vote_seconds(link, cluster.nodes) + max(transfer, work) + latency


def synchronous_seconds(job: Job, cluster: Cluster, wire: str = GRADIENTS) -> float:
    """Return the duration of a step that averages gradients during backward, as DDP does.

    Without a core of its own, the communication thread runs only while backward waits.
    """
    if cluster.nodes == 1:
        return job.step_seconds
    link, nodes = cluster.link, cluster.nodes
    portion = exchange_cost(job.parameters / PORTIONS, wire, cluster)
    transfer = PORTIONS * link.seconds(portion.sent_bytes)
    messages = PORTIONS * 2 * portion.messages * job.message_seconds
    own_seconds = job.gradient_seconds if wire == GRADIENTS else job.host_seconds
    work = (own_seconds * job.parameters + messages) * cluster.stretch
    takes, vote = max(transfer, work), vote_seconds(link, nodes)
    layers = Layers(
        forward_seconds=(FORWARD * job.step_seconds / PORTIONS,) * PORTIONS,
        backward_seconds=((1 - FORWARD) * job.step_seconds / PORTIONS,) * PORTIONS,
        transfer_seconds=(takes / PORTIONS + vote,) * PORTIONS,
    )
    overlapped = step_seconds(layers, order="fifo", portions=[1] * PORTIONS, barrier=True)
    after = job.step_seconds + takes + PORTIONS * vote
    return cluster.contention * after + (1 - cluster.contention) * overlapped
