"""The mean of a buffer over the ranks of one node."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from daso.cli.bench.rounds import over, take_turns
from daso.comm.control import barrier, gather
from daso.comm.node.shm import ShmNode
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology
from daso.plan.layout import split
from daso.plan.options import Exchange

REPEATS = 10  # in a row, so that caches stay warm
OURS, MPI, GLOO = "shared memory, in place", "MPI Allreduce", "gloo"


@dataclass(frozen=True, slots=True)
class Plan:
    """Case of the benchmark.

    Args:
        mebibytes: Size of the buffer, fp32.
        rounds: Turns of each kind, of 10 averages.
    """

    mebibytes: float
    rounds: int


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Average a buffer inside the node with each method in turn.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    numel = int(plan.mebibytes * 2**18)
    world, size = topology.world_comm, topology.local_size
    node = ShmNode(topology, Exchange().timeout_seconds)
    (bucket,) = node.row(numel, torch.float32, 1).cut([(0, numel)])
    bucket.flat.fill_(topology.rank)
    parts = split(numel, size)
    values, sums = torch.zeros(numel), torch.empty(numel)  # sums stay finite
    join_process_group(topology, "gloo")

    def ours() -> None:
        bucket.mark_ready(parts)
        bucket.wait_filled()
        bucket.reduce()
        bucket.publish(size)
        bucket.wait()

    kinds: dict[str, Callable[[], object]] = {
        OURS: ours,
        MPI: lambda: world.Allreduce(values.numpy(), sums.numpy()),
        GLOO: lambda: dist.all_reduce(values),
    }
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for name in [*kinds, *take_turns(list(kinds), plan.rounds)]:
        barrier(topology)
        start = time.perf_counter()
        for _ in range(REPEATS):
            kinds[name]()
        seconds[name].append((time.perf_counter() - start) / REPEATS)
    by_rank = gather(topology, seconds)
    node.free()
    dist.destroy_process_group()
    slowest = {
        name: [
            max(times)
            for times in zip(*(rank_seconds[name][1:] for rank_seconds in by_rank), strict=True)
        ]
        for name in kinds
    }
    rows = [
        {"name": name, "ms": 1e3 * statistics.median(times), "seconds": times}
        for name, times in slowest.items()
    ]
    return {"plan": asdict(plan), "nodes": list(topology.node_sizes), "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan, ranks = result["plan"], result["nodes"][0]
    lines = [
        f"{plan['mebibytes']:g} MiB of fp32 over {ranks} ranks of a node, medians of "
        f"{plan['rounds']} alternating rounds"
    ]
    return "\n".join(
        [*lines, *(f"{row['name']:<26}{row['ms']:>8.3f} ms" for row in result["rows"])]
    )


def figures(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figure of the default size, by name."""
    if result["plan"]["mebibytes"] != 8:
        return {}
    head = table(result).splitlines()[0]
    value = next(row["ms"] for row in result["rows"] if row["name"] == OURS)
    return {"node_average_8mib_ms": {"value": value, "unit": "ms", "conditions": head}}


def ratios(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return daso's seconds over those of MPI's Allreduce, one ratio per round."""
    seconds = {row["name"]: row["seconds"] for row in result["rows"]}
    name = f"node_average_{result['plan']['mebibytes']:g}mib_over_mpi"
    return {name: over(seconds[OURS], seconds[MPI])}
