"""What asynchronous model parallelism decides: when weights change, and who computes what.

The mechanism is that of AMPNet (arXiv 1705.09786): instances of different shapes are under way at
once, and each part of the model updates its own weights when it has gathered enough gradients.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from daso.checks import check, choice, flag, validated_record, whole
from daso.errors import ConfigError

__all__ = [
    "NEGLIGIBLE",
    "Edge",
    "Log",
    "Task",
    "TaskRecord",
    "Updates",
    "age_factor",
    "check_copies",
    "choose_lane",
    "count_lanes",
    "follow",
    "neighbours",
    "place",
    "rank_of",
    "ranks_of_lane",
]

Unit = Literal["instance", "message"]
Weights = Literal["current", "stashed"]


@validated_record
@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """When and how the parts of a flow update their weights.

    Args:
        min_update_interval: After how many gradients of its own a part takes an optimizer step,
            with their mean.
        unit: What counts as a gradient. ``"instance"``: all of an instance's, when it is finished;
            the step takes what has come by then of others under way too. ``"message"``: each one.
        weights: What backward computes with. ``"current"``: the weights of that moment.
            ``"stashed"``: those that forward computed with, of which copies are kept (PipeDream).
        scale_by_staleness: Divide a gradient by 1 + its age, in updates since its forward.

    Raises:
        ConfigError: An argument has no such value.
    """

    min_update_interval: int = 1
    unit: Unit = "instance"
    weights: Weights = "current"
    scale_by_staleness: bool = False

    def __post_init__(self) -> None:
        check("min_update_interval", self.min_update_interval, whole(1))
        check("unit", self.unit, choice(*get_args(Unit)))
        check("weights", self.weights, choice(*get_args(Weights)))
        check("scale_by_staleness", self.scale_by_staleness, flag())


def age_factor(age: int, *, scale_by_staleness: bool) -> float:
    """Return by what a gradient of this age, in updates, is multiplied."""
    return 1 / (1 + age) if scale_by_staleness else 1.0


# --- who computes what ----------------------------------------------------------------------------


class Task(NamedTuple):
    """One node computed something for an instance.

    Args:
        node: Which.
        back: Gradients, or forward.
        seconds: That it took.
        after: Numbers of the tasks of this instance that it waited for.
    """

    node: int
    back: bool
    seconds: float
    after: tuple[int, ...]


class Edge(NamedTuple):
    """What crosses from one node of a graph to another."""

    source: int
    target: int
    weight: float  # how much


def rank_of(ranks: Sequence[int], lane: int) -> int:
    """Return which of a node's ranks an instance of a lane goes to."""
    return ranks[lane % len(ranks)]


def count_lanes(ranks_of: Sequence[Sequence[int]]) -> int:
    """Return in how many ways instances can go through replicas: each stays on one, its lane."""
    return math.lcm(*(len(ranks) for ranks in ranks_of))


def ranks_of_lane(ranks_of: Sequence[Sequence[int]], lane: int) -> tuple[int, ...]:
    """Return the ranks that have to do with instances of a lane, in their order."""
    return tuple(sorted({rank_of(ranks, lane) for ranks in ranks_of}))


def choose_lane(under_way: Sequence[int], admitted: int) -> int:
    """Return the lane of the next instance: where fewest are under way, else in turn."""
    lanes = range(len(under_way))
    return min(lanes, key=lambda lane: (under_way[lane], (lane - admitted) % len(lanes)))


def check_copies(count: object, ranks: int) -> None:
    """Raise unless a layer can be on so many of these ranks."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= ranks:
        raise ConfigError(
            f"a layer can have one replica on each rank, 1 to {ranks} of them, not {count!r}"
        )


def place(
    seconds: Sequence[float],
    edges: Sequence[Edge],
    ranks: int,
    copies: Mapping[int, int],
    first: int,
    fixed: Mapping[int, tuple[int, ...]],
    single: Container[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node: the longest first, each where least is to do so far.

    Ties, and nodes that take next to no time, go where most of what they exchange is already
    (longest processing time first; Graham, 1969). So does, where a node has replicas, whatever
    may: an instance then stays on its rank.
    """
    for count in copies.values():
        check_copies(count, ranks)
    load = [0.0] * ranks
    placed: dict[int, tuple[int, ...]] = {first: (0,), **fixed}
    for node, homes in placed.items():
        for rank in homes:
            load[rank] += seconds[node] / len(homes)
    near = neighbours(edges, len(seconds))
    negligible = NEGLIGIBLE * max(seconds, default=0.0)
    replicated = bool(copies) or any(len(homes) > 1 for homes in fixed.values())
    heavy = [
        node
        for node, taken in enumerate(seconds)
        if node not in placed
        and (node in copies or (taken > negligible and (node in single or not replicated)))
    ]
    for node in sorted(heavy, key=lambda one: (-seconds[one], one)):
        count = copies.get(node, 1)
        pull = _pull(near[node], placed, ranks)
        order = sorted(range(ranks), key=lambda rank: (_rounded(load[rank]), -pull[rank], rank))
        placed[node] = tuple(sorted(order[:count]))
        for rank in placed[node]:
            load[rank] += seconds[node] / count
    follow(placed, near, len(seconds), single)
    return tuple(placed[node] for node in range(len(seconds)))


NEGLIGIBLE = 0.02  # of the longest: where such a node is does not matter to the load
DIGITS = 2  # of a load: loads that differ by less are equal


def _rounded(load: float) -> float:
    return float(f"{load:.{DIGITS - 1}e}")


def neighbours(edges: Sequence[Edge], nodes: int) -> list[list[tuple[int, float]]]:
    """Return for each node with which others it exchanges how much."""
    near: list[list[tuple[int, float]]] = [[] for _ in range(nodes)]
    for source, target, weight in edges:
        near[source].append((target, weight))
        near[target].append((source, weight))
    return near


def _pull(
    near: Sequence[tuple[int, float]], placed: Mapping[int, Sequence[int]], ranks: int
) -> list[float]:
    """Return how much of what a node exchanges is on each rank."""
    pull = [0.0] * ranks
    for other, weight in near:
        homes = placed.get(other, ())
        for rank in homes:
            pull[rank] += weight / len(homes)
    return pull


def follow(
    placed: dict[int, tuple[int, ...]],
    near: Sequence[Sequence[tuple[int, float]]],
    nodes: int,
    single: Container[int],
) -> None:
    """Place what takes no time: next to what it exchanges most with, as far as that is placed."""
    left = [node for node in range(nodes) if node not in placed]
    while left:
        # What exchanges most goes first, with all copies of its neighbour: then no message leaves
        # its rank there.
        best = {node: _nearest(near[node], placed) for node in left}
        node = max(left, key=lambda one: (best[one][0], -one))
        left.remove(node)
        _, other = best[node]
        homes = (0,) if other is None else placed[other]
        placed[node] = homes[:1] if node in single else homes


def _nearest(
    near: Sequence[tuple[int, float]], placed: Mapping[int, Sequence[int]]
) -> tuple[float, int | None]:
    """Return how much a node exchanges with the placed one with which it exchanges most."""
    return max(
        ((weight, other) for other, weight in near if other in placed),
        key=lambda one: (one[0], -one[1]),
        default=(-1.0, None),
    )


# --- what is logged -------------------------------------------------------------------------------


class TaskRecord(NamedTuple):
    """A rank computed a node, or heard that an instance is finished."""

    node: int  # -1: the instance is finished
    back: bool
    keys: tuple[tuple[int, ...], ...]  # of the messages: number of the instance, and its state


@dataclass(frozen=True, slots=True)
class Log:
    """What one rank did in an epoch, in order; of those of all ranks together it is replayed."""

    rank: int
    updates: Updates
    seed: int  # of random numbers in this epoch
    ranks_of: tuple[tuple[int, ...], ...]  # of every node
    lanes: tuple[int, ...]  # of every instance; on the rank where these come in
    did: tuple[TaskRecord, ...]
    digests: tuple[tuple[int, str], ...]  # of the weights of this rank's nodes, after the epoch
