"""What it brings to let gradients that are needed first cross first, and no step wait for all."""

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.contenders import BUCKETS, FIFO, ORDERS, PRIORITIZED, PRIORITY
from benchmarks.timed_models import CASES
from daso.cli.bench import train
from daso.comm.topology import Topology

__all__ = ["Plan", "figures", "measure", "table"]

Plan = train.Plan


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with all in turn. Collective over the world; blocking."""
    return train.measure(plan, topology, ORDERS, CASES)


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines, each also over first-in-first-out with a barrier."""
    ratios = _over(FIFO, found)
    head, columns, *lines = train.table(found).splitlines()
    rows = zip(lines, found["rows"], strict=True)
    return "\n".join(
        [head, f"{columns}{'x fifo':>9}"]
        + [f"{line.partition('  skip')[0]}{ratios[row['name']]:>9.3f}" for line, row in rows]
    )


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this model and link."""
    plan, head = found["plan"], train.table(found).splitlines()[0]
    where = plan["link"] if plan["model"] == "cnn" else f"{plan['model']}_{plan['link']}"
    names = {row["name"] for row in found["rows"]}
    kinds = (
        ("priority_ratio", PRIORITY, FIFO, "portions of 1 MiB"),
        ("prioritized_over_default", PRIORITIZED, BUCKETS, "portions as large as the link needs"),
    )
    return {
        f"{name}_{where}": {
            "value": _over(base, found)[one],
            "unit": f"ratio of step times, over {base}",
            "conditions": f"synchronous gradients in {what}: {head}",
        }
        for name, one, base, what in kinds
        if {one, base} <= names
    }


def _over(base: str, found: Mapping[str, Any]) -> dict[str, float]:
    """Return step times over those of another contender, medians over rounds.

    Both are taken over compute only right before and after them, for the machine is not equally
    fast at every moment.
    """
    rows = {row["name"]: row["rounds"] for row in found["rows"]}
    paced = {
        name: [one["seconds"] / one["base_seconds"] for one in rounds]
        for name, rounds in rows.items()
    }
    count = len(paced[base])
    return {
        name: statistics.median(
            one / other for one, other in zip(mine[:count], paced[base], strict=True)
        )
        for name, mine in paced.items()
    }
