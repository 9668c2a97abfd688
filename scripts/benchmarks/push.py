"""All push to all, one message at a time: in the same order, and in slots."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from daso.cli.bench.rounds import over, take_turns
from daso.comm.mpi import load
from daso.comm.reduction import byte_buffer
from daso.comm.topology import Topology
from daso.plan.cost_model import slots
from daso.predict.links import Link, push_seconds

__all__ = ["Plan", "figures", "measure", "orders", "table"]

SAME, SLOTS, AT_ONCE = "same order", "slots", "all at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        nbytes: Of each message.
        rounds: Of each order.
        link: For people.
        bits_per_second: Of every link; 0 where there is no limit.
    """

    nbytes: int
    rounds: int
    link: str
    bits_per_second: float


def orders(ranks: int, rank: int) -> dict[str, list[int]]:
    """Return to whom a rank pushes, in which order, one at a time or at once."""
    others = [to for to in range(ranks) if to != rank]
    in_slots = [slot[rank] for slot in slots(ranks)]
    return {SAME: others, SLOTS: in_slots, AT_ONCE: in_slots}


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Push in all orders in turn, one rank on every node.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    world, rank_info = topology.world_comm, topology.rank_info
    mine = torch.ones(plan.nbytes, dtype=torch.uint8)
    rows = {
        rank: torch.empty(plan.nbytes, dtype=torch.uint8)
        for rank in range(rank_info.world_size)
        if rank != rank_info.rank
    }
    ways = orders(rank_info.world_size, rank_info.rank)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name in [*ways, *take_turns(list(ways), plan.rounds)]:  # the first opens connections
        receives = [world.Irecv(byte_buffer(row), rank) for rank, row in rows.items()]
        world.Barrier()
        start = time.perf_counter()
        sends = []
        for rank in ways[name]:
            # Of messages that large a send is over when they have come: that is the credit for
            # the next one.
            sends.append(world.Issend(byte_buffer(mine), rank))
            if name != AT_ONCE:
                sends.pop().Wait()
        load().Request.Waitall([*sends, *receives])
        seconds[name].append(max(world.allgather(time.perf_counter() - start)))
    return {
        "plan": asdict(plan),
        "nodes": list(rank_info.node_sizes),
        "rows": [{"name": name, "seconds": taken[1:]} for name, taken in seconds.items()],
    }


def _limit(found: Mapping[str, Any]) -> float | None:
    """Return the seconds that a link is occupied by what a rank pushes; None without a rate."""
    plan = found["plan"]
    if not plan["bits_per_second"]:
        return None
    return float((len(found["nodes"]) - 1) * 8 * plan["nbytes"] / plan["bits_per_second"])


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan, ranks, limit = found["plan"], len(found["nodes"]), _limit(found)
    lines = [
        f"{ranks} nodes push {plan['nbytes'] / 1e6:.1f} MB to each other, link {plan['link']}, "
        f"medians of {plan['rounds']} alternating rounds",
        f"{'':<14}{'ms':>10}{'x limit':>9}{'predicted':>11}",
    ]
    for row in found["rows"]:
        taken = statistics.median(row["seconds"])
        beside = "-" if limit is None else f"{taken / limit:.3f}"
        told = "-" if row["name"] == AT_ONCE else f"{_predicted(row['name'], ranks):.3f}"
        lines.append(f"{row['name']:<14}{1e3 * taken:>10.1f}{beside:>9}{told:>11}")
    return "\n".join(lines)


def _predicted(name: str, ranks: int) -> float:
    """Return how many times the limit cards take that receive one message at a time."""
    found: Sequence[Sequence[int]] = [orders(ranks, rank)[name] for rank in range(ranks)]
    return push_seconds(found, 1.0, Link(1.0, headers=1.0)) / (ranks - 1)


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figure, named as everywhere."""
    seconds = {row["name"]: row["seconds"] for row in found["rows"]}
    link = found["plan"]["link"]
    return {
        f"staggered_ratio_{len(found['nodes'])}_{link}": {
            "value": statistics.median(over(seconds[SAME], seconds[SLOTS])),
            "unit": "ratio of seconds, the same order over slots",
            "conditions": table(found).splitlines()[0],
        }
    }
