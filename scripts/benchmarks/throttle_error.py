"""What `simulate_target` estimates, beside the target itself: ranks with less of their cores.

The target's cores are taken away by the system, a quota of a control group (Linux, root), of which
the emulation knows nothing but the factor. The link between the two ranks of this machine is
imitated in both, by the engine: it is the same.
"""

import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import daso
from daso.cli.train.report import versions
from daso.comm.emulation import LinkModel, throttled
from daso.comm.mpi import library
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.predict.emulate import simulate_target
from daso.predict.throttle_plan import Machine, ThrottlePlan, estimate

__all__ = ["POLICIES", "Plan", "figures", "mean", "measure", "quota", "table", "train"]

GROUPS = Path("/sys/fs/cgroup/cpu")  # version 1
PERIOD_US = 10_000  # in which a quota is used up
BATCH, WIDTH, LAYERS = 128, 512, 3
POLICIES = {"synchronous": (1, 0), "Fixed(4, 1)": (4, 1)}
LATENCY_SECONDS = 1e-4


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        factors: How many times as long the target computes.
        rates: Bytes per second of the link.
        steps: Of a run.
    """

    factors: Sequence[float]
    rates: Sequence[float]
    steps: int


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train as it is, throttled, and with a quota, for each setting.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    rows = [
        _row(topology, policy, rate, factor, plan.steps)
        for rate in plan.rates
        for policy in POLICIES
        for factor in plan.factors
    ]
    return {
        "plan": asdict(plan),
        "nodes": list(topology.node_sizes),
        "rows": rows,
        "versions": versions(library()),
    }


def _row(topology: Topology, policy: str, rate: float, factor: float, steps: int) -> dict[str, Any]:
    link = Machine(factor, rate, LATENCY_SECONDS)
    target = ThrottlePlan(link, Machine(1.0, rate, LATENCY_SECONDS))
    real = LinkModel(rate, LATENCY_SECONDS)
    with throttled(real):
        now = mean(train(topology, policy, steps))
    with simulate_target(target, topology):
        found = estimate(target, train(topology, policy, steps))
    with throttled(real), quota(topology.rank, factor):
        there = mean(train(topology, policy, steps))
    told = topology.world_comm.allgather((now, found.seconds, there))
    now, estimated, there = (1e3 * statistics.fmean(column) for column in zip(*told, strict=True))
    return {
        "policy": policy,
        "mbytes_per_second": rate / 1e6,
        "factor": factor,
        "now_ms": now,
        "estimated_ms": estimated,
        "measured_ms": there,
    }


@contextmanager
def quota(rank: int, factor: float) -> Iterator[None]:
    """Leave this process one part in so many of a core."""
    group = GROUPS / f"daso-bench-{os.getppid()}-{rank}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(PERIOD_US / factor)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise ConfigError(
            f"a quota of a core must be settable, but {error}; run this as root where control "
            f"groups are of version 1"
        ) from error
    try:
        yield
    finally:
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def train(topology: Topology, policy: str, steps: int) -> list[float]:
    """Return the seconds of steps."""
    torch.manual_seed(topology.rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model, batch = torch.nn.Sequential(*layers), torch.randn(BATCH, WIDTH)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    skip, wait = POLICIES[policy]
    optimizer = daso.DASO(
        inner, module=model, topology=topology, policy=daso.Fixed(skip, wait), wire="fp32"
    )
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun)
    optimizer.synchronize()
    optimizer.close()
    return seconds


def mean(seconds: Sequence[float]) -> float:
    """Return the mean of a run's steps but for its first quarter."""
    return statistics.fmean(seconds[len(seconds) // 4 :])


RULES = {
    "estimated": lambda row: row["estimated_ms"],
    "unchanged": lambda row: row["now_ms"],
    "all times the factor": lambda row: row["now_ms"] * row["factor"],
}


def errors(rows: Sequence[Mapping[str, Any]], rule: str) -> list[float]:
    """Return how far off a rule is of each setting, in parts of what was measured."""
    return [RULES[rule](row) / row["measured_ms"] - 1 for row in rows]


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    rows = found["rows"]
    lines = [
        f"{'policy':<14}{'link MB/s':>10}{'slower':>8}{'now ms':>9}{'target ms':>11}"
        + "".join(f"{rule:>22}" for rule in RULES)
    ]
    for at, row in enumerate(rows):
        lines.append(
            f"{row['policy']:<14}{row['mbytes_per_second']:>10.0f}{row['factor']:>7g}x"
            f"{row['now_ms']:>9.1f}{row['measured_ms']:>11.1f}"
            + "".join(f"{errors(rows, rule)[at]:>22.1%}" for rule in RULES)
        )
    return "\n".join(lines)


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures over all settings."""
    rows, plan = found["rows"], found["plan"]
    off = [abs(one) for one in errors(rows, "estimated")]
    conditions = (
        f"{len(rows)} settings: 2 ranks of one machine, each a node, whose cores a quota makes "
        f"{', '.join(f'{one:g}' for one in plan['factors'])} times as slow; link of "
        f"{', '.join(f'{one / 1e6:g}' for one in plan['rates'])} MB/s, imitated in both; "
        f"{', '.join(POLICIES)}; {plan['steps']} steps"
    )
    values = {"median": statistics.median(off), "worst": max(off)}
    return {
        f"throttle_prediction_error_{name}": {
            "value": value,
            "unit": "part of the measured step time",
            "conditions": conditions,
        }
        for name, value in values.items()
    }
