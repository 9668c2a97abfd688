"""Ways to average gradients inside a node at every step: who adds them, and when."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.contenders import ALLREDUCE, HOST, INSIDE
from benchmarks.timed_models import CASES
from daso.cli.bench import train
from daso.cli.bench.rounds import over
from daso.comm.topology import Topology

__all__ = ["Plan", "figures", "measure", "table"]

Plan = train.Plan
table = train.table


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with all in turn. Collective over the world; blocking."""
    return train.measure(plan, topology, INSIDE, CASES)


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the step time with sums on the host over that of MPI's Allreduce after backward."""
    plan, rows = found["plan"], {row["name"]: row["rounds"] for row in found["rows"]}
    if HOST not in rows or ALLREDUCE not in rows:
        return {}
    paced = {
        name: [one["seconds"] / one["base_seconds"] for one in rows[name]]
        for name in (HOST, ALLREDUCE)
    }
    where = "" if plan["model"] == "cnn" else f"_{plan['model']}"
    return {
        f"host_accumulation_over_allreduce{where}": {
            "value": statistics.median(over(paced[HOST], paced[ALLREDUCE])),
            "unit": f"ratio of step times, {HOST!r} over {ALLREDUCE!r}",
            "conditions": train.table(found).splitlines()[0],
        }
    }
