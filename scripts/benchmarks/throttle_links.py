"""What `simulate_target` estimates of a slower link, beside the link itself, shaped by ``tc``.

Two hosts joined by a fast link are given a slower one in the plan of a throttle; then their link
gets that rate from the system.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.hosts import Hosts
from benchmarks.throttle_error import POLICIES, mean, train
from daso.comm.topology import Topology
from daso.predict.emulate import simulate_target
from daso.predict.links import parse_rate
from daso.predict.measure import link_rate
from daso.predict.throttle_plan import Machine, ThrottlePlan, estimate

__all__ = ["Plan", "compare", "figures", "measure", "table"]

FAST, TARGETS = "1gbit", ("500mbit", "250mbit", "100mbit")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured on one link.

    Args:
        targets: Bytes per second of links that are imitated; none: steps are taken as they are.
        steps: Of a run.
    """

    targets: Sequence[float]
    steps: int


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train for each policy, as it is or over each imitated link; return milliseconds a step.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    bytes_per_second, latency_seconds = link_rate(topology)
    current = Machine(1.0, bytes_per_second, latency_seconds)
    found: dict[str, list[float]] = {}
    for policy in POLICIES:
        steps = [mean(train(topology, policy, plan.steps))]
        for rate in plan.targets:
            target = ThrottlePlan(current, Machine(1.0, rate, latency_seconds))
            with simulate_target(target, topology):
                steps.append(estimate(target, train(topology, policy, plan.steps)).seconds)
        told = topology.world_comm.allgather(steps)
        found[policy] = [1e3 * statistics.fmean(column) for column in zip(*told, strict=True)]
    return {"link_bytes_per_second": bytes_per_second, "latency_seconds": latency_seconds} | {
        "milliseconds": found
    }


def compare(place: Hosts, steps: int, targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """Estimate slower links on a fast one, and measure them; blocking."""

    def run(link: str, rates: Sequence[float]) -> Any:
        plan = asdict(Plan(rates, steps))
        return place.run("benchmarks.throttle_links", plan, link=link, nodes=2, ranks=1)

    fast = run(FAST, [(parse_rate(link) or 0) / 8 for link in targets])
    there = {link: run(link, [])["milliseconds"] for link in targets}
    rows = [
        {
            "policy": policy,
            "link": link,
            "now_ms": fast["milliseconds"][policy][0],
            "estimated_ms": fast["milliseconds"][policy][1 + at],
            "measured_ms": there[link][policy][0],
        }
        for policy in POLICIES
        for at, link in enumerate(targets)
    ]
    return {**fast, "steps": steps, "rows": rows}


def _errors(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [row["estimated_ms"] / row["measured_ms"] - 1 for row in rows]


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    rate = found["link_bytes_per_second"] / 1e6
    lines = [
        f"two hosts, estimated on a link of {FAST} ({rate:.0f} MB/s as exchanges find it), and "
        f"measured on links that tc shapes",
        f"{'policy':<14}{'link':>10}{'now ms':>10}{'target ms':>11}{'estimated ms':>14}{'off':>9}",
    ]
    for row, off in zip(found["rows"], _errors(found["rows"]), strict=True):
        lines.append(
            f"{row['policy']:<14}{row['link']:>10}{row['now_ms']:>10.1f}{row['measured_ms']:>11.1f}"
            f"{row['estimated_ms']:>14.1f}{off:>9.1%}"
        )
    return "\n".join(lines)


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures over all links."""
    off = [abs(one) for one in _errors(found["rows"])]
    links = ", ".join(dict.fromkeys(row["link"] for row in found["rows"]))
    conditions = (
        f"{len(off)} settings: 2 hosts, links of {links} that tc shapes, estimated on {FAST}; "
        f"{', '.join(POLICIES)}; {found['steps']} steps"
    )
    return {
        f"throttle_link_error_{name}": {
            "value": value,
            "unit": "part of the measured step time",
            "conditions": conditions,
        }
        for name, value in (("median", statistics.median(off)), ("worst", max(off)))
    }
