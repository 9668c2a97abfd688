"""Updates, lanes of instances through replicas, and logs: records and decisions of a flow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from daso.checks import check, choice, flag, validated_record, whole

Unit = Literal["instance", "message"]
Weights = Literal["current", "stashed"]


@validated_record
@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """When and how the layers of a flow update their weights.

    Args:
        min_update_interval: Number of gradients after which a layer takes an optimizer step with
            their mean.
        unit: What counts as a gradient. ``"instance"``: all gradients of an instance, when it is
            finished; the step includes those that instances under way have added by then.
            ``"message"``: each one.
        weights: Weights that backward computes with. ``"current"``: the newest ones.
            ``"stashed"``: copies of those that forward computed with (PipeDream).
        scale_by_staleness: Divide a gradient by 1 + its age, in updates since its forward.

    Raises:
        ConfigError: An argument is out of range.
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
    """Return the factor of a gradient of this age, in updates."""
    return 1 / (1 + age) if scale_by_staleness else 1.0


# --- lanes ----------------------------------------------------------------------------


def rank_of(ranks: Sequence[int], lane: int) -> int:
    """Return the rank of a node that computes the instances of a lane."""
    return ranks[lane % len(ranks)]


def count_lanes(ranks_of: Sequence[Sequence[int]]) -> int:
    """Return the number of lanes: assignments of instances to replicas."""
    return math.lcm(*(len(ranks) for ranks in ranks_of))


def ranks_of_lane(ranks_of: Sequence[Sequence[int]], lane: int) -> tuple[int, ...]:
    """Return the ranks that compute instances of a lane, in ascending order."""
    return tuple(sorted({rank_of(ranks, lane) for ranks in ranks_of}))


def choose_lane(under_way: Sequence[int], admitted: int) -> int:
    """Return the lane of the next instance: the least busy one, ties in turn."""
    lanes = range(len(under_way))
    return min(lanes, key=lambda lane: (under_way[lane], (lane - admitted) % len(lanes)))


# --- logs -------------------------------------------------------------------------------


class TaskRecord(NamedTuple):
    """Log entry of a rank: a computed node, or a finished instance."""

    node: int  # -1: the instance is finished
    back: bool
    keys: tuple[tuple[int, ...], ...]  # of the messages: number of the instance, and its state


@dataclass(frozen=True, slots=True)
class Log:
    """Computations of one rank in an epoch, in order; `replay` needs those of all ranks."""

    rank: int
    updates: Updates
    seed: int  # of random numbers in this epoch
    ranks_of: tuple[tuple[int, ...], ...]  # of every node
    lanes: tuple[int, ...]  # of every instance; on the rank where these come in
    tasks: tuple[TaskRecord, ...]
    digests: tuple[tuple[int, str], ...]  # of the weights of this rank's nodes, after the epoch
