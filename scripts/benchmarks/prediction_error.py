"""What `daso.predict` predicts, beside what was measured on hosts whose links have a known rate.

One run calibrates it: two hosts, links unshaped. From it come what an exchange and what averaged
gradients take of the processor, and drift. The step of computing alone is given: it is measured
beside the rounds that are predicted, for it changes by more than predictions are off.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from daso.cli.bench import train
from daso.cli.bench.names import COMPUTE, OURS
from daso.cli.bench.places import RankStarter
from daso.cli.predict import TYPICAL_DRIFT
from daso.cli.train.report import versions
from daso.plan.auto import Auto
from daso.plan.options import Exchange, Gradients, Settings, Wire
from daso.plan.policies import Fixed
from daso.plan.schedule import Policy
from daso.predict.cluster import GRADIENTS, PORTIONS, Cluster, exchange_cost
from daso.predict.jobs import Job
from daso.predict.links import Link, parse_rate, vote_seconds
from daso.predict.simulator import simulate

__all__ = ["CALIBRATION", "SETTINGS", "compare", "figures", "job_of", "judge", "pace", "table"]

LATENCY_SECONDS = 1e-4  # of a message between two hosts
CALIBRATION = ("none", 2)
SETTINGS = (  # link and nodes
    ("1gbit", 2),
    ("300mbit", 2),
    ("100mbit", 2),
    ("1gbit", 3),
    ("100mbit", 3),
    ("1gbit", 4),
)
STEPS = 1200  # of each simulated run


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train that is predicted, and measured by the contender of that name."""

    policy: Policy
    wire: Wire


SYNCHRONOUS, OFTEN = "DASO synchronous", "DASO Fixed(4, 1), bf16"
WAYS: Mapping[str, Way] = {
    SYNCHRONOUS: Way(Fixed(1, 0), "auto"),
    OFTEN: Way(Fixed(4, 1), "bf16"),
    OURS: Way(Auto(), "auto"),
}


def job_of(found: Mapping[str, Any]) -> Job:
    """Return what the calibrating run tells of its job.

    On a machine of two cores its two ranks have one each, so that all an exchange takes of the
    processor is in its steps; with more cores some of it is hidden, here and elsewhere. Its links
    take next to nothing.

    Args:
        found: What `daso.cli.bench.train.measure` returned.
    """
    rows = {row["name"]: row for row in found["rows"]}
    step: float = rows[COMPUTE]["step_ms"] / 1e3
    count: int = found["parameters"]

    def work(name: str) -> float:
        """Return what a step takes beside computing, as of the machine's usual speed."""
        row = rows[name]
        taken: float = row["step_ms"] / 1e3 - _base(row)
        return max(0.0, taken) * step / _base(row)

    seen, nodes = rows[OURS]["report"]["measurements"], len(found["nodes"])
    votes = PORTIONS * vote_seconds(Link(math.inf, LATENCY_SECONDS), nodes)
    own: float = rows[OFTEN]["report"]["own_seconds"]
    return Job(
        parameters=count,
        step_seconds=step,
        host_seconds=max(0.0, 4 * work(OFTEN) - own) / count,
        own_seconds=own / count,
        small_parameters=_small_parameters(rows[OURS]["report"]),
        small_seconds=seen.get("small_seconds", 0.0),
        gradient_seconds=max(0.0, work(SYNCHRONOUS) - votes) / count,
        lr=seen["lr"],
        drift=seen["drift"] / (1 - 1 / nodes),
    )


def _small_parameters(report: Mapping[str, Any]) -> int:
    """Return how many numbers went alone; reports of before 2026-11-28 do not tell of any."""
    first = report.get("small_tensors", "none").split()[0]
    return int(first) if first.isdecimal() else 0


def _base(row: Mapping[str, Any]) -> float:
    """Return the step of compute only, in seconds, beside the rounds of a contender."""
    return float(statistics.median(one["base_seconds"] for one in row["rounds"]))


def compare(
    place: RankStarter,
    plan: train.Plan,
    settings: Sequence[tuple[str, int]],
    cores: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Calibrate, then measure and predict; yield rows of each setting.

    Args:
        place: Hosts, as many as the largest setting asks for.
        plan: How each setting is measured; names and link are given to it.
        settings: Link and nodes of each.
        cores: Of the machine that all hosts share; counted if None.
    """
    cores = cores or len(os.sched_getaffinity(0))
    first: Mapping[str, Any] | None = None
    for link, nodes in (CALIBRATION, *settings):
        named = replace(plan, names=tuple(WAYS), link=link)
        found = place.run("daso.cli.bench.train", asdict(named), link=link, nodes=nodes, ranks=1)
        first = first or found
        yield judge(first, found, cores)


def judge(first: Mapping[str, Any], found: Mapping[str, Any], cores: int) -> dict[str, Any]:
    """Return what was predicted of a setting beside what was measured.

    How fast this machine computes changes from minute to minute, by more than predictions are off:
    each is of the speed that compute only had beside the rounds it is held against.

    Args:
        first: What was measured of the setting that calibrates.
        found: What was measured of this one.
        cores: Of the machine that all hosts share.
    """
    job, link, nodes = job_of(first), found["plan"]["link"], len(found["nodes"])
    cluster = Cluster(nodes, _link(link), cores=cores / nodes)
    calibrated = {row["name"]: row for row in first["rows"]}
    rows = {row["name"]: row for row in found["rows"]}
    return {
        "plan": found["plan"],
        "nodes": found["nodes"],
        "job": asdict(job),
        "calibrates": found is first,
        "rows": [_row(name, job, cluster, rows[name], calibrated[name]) for name in WAYS],
        "measured": found,
        "versions": found["versions"],
    }


def pace(nodes: int = 10_000, steps: int = 1000) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """Return what simulating so many nodes takes: for JSON, as text, and as a figure."""
    job = Job(25.6e6, 0.1, jitter=0.02, drift=TYPICAL_DRIFT)
    cluster, way = Cluster(nodes, Link(1.25e9, 2e-5)), WAYS[OURS]
    settings = Settings(wire=way.wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    begun = time.process_time()
    outcome = simulate(job, cluster, way.policy, settings, steps=steps)
    seconds = time.process_time() - begun
    text = f"{nodes:,} nodes, {steps:,} steps of {OURS} on virtual time: {seconds:.1f} s of a core"
    figure = {"value": seconds, "unit": "s of a core", "conditions": text}
    found = {"nodes": nodes, "steps": steps, "seconds": seconds, "outcome": asdict(outcome)}
    return found | {"versions": versions("none")}, text, {f"simulate_{nodes}_nodes_seconds": figure}


def _link(word: str) -> Link:
    bits = parse_rate(word)
    return Link(math.inf if bits is None else bits / 8, LATENCY_SECONDS)


def _row(
    name: str,
    job: Job,
    cluster: Cluster,
    measured: Mapping[str, Any],
    calibrated: Mapping[str, Any],
) -> dict[str, Any]:
    way = WAYS[name]
    settings = Settings(wire=way.wire, merge="auto", exchange=Exchange(), gradients=Gradients())
    speed = _base(measured) / (job.step_seconds * cluster.stretch)
    job = replace(
        job,
        step_seconds=job.step_seconds * speed,
        host_seconds=job.host_seconds * speed,
        own_seconds=job.own_seconds * speed,
        small_seconds=job.small_seconds * speed,
        gradient_seconds=job.gradient_seconds * speed,
    )
    outcome = simulate(job, cluster, way.policy, settings, steps=STEPS)
    synchronous = name == SYNCHRONOUS
    sent = exchange_cost(
        job.parameters, GRADIENTS if synchronous else outcome.wire, cluster
    ).sent_bytes
    added = cluster.link.seconds(sent) / (1 if synchronous else outcome.skip)
    return {
        "name": name,
        "measured_ms": measured["step_ms"],
        "predicted_ms": 1e3 * outcome.step_seconds,
        "compute_ms": 1e3 * _base(measured),
        # Two rules of thumb: it stays as it is here; all that crosses is waited for.
        "unchanged_ms": 1e3 * _base(measured) * calibrated["step_ms"] / (1e3 * _base(calibrated)),
        "added_ms": 1e3 * (_base(measured) + added),
        "skip": outcome.skip,
        "wait": outcome.wait,
        "wire": outcome.wire,
    }


def _error(row: Mapping[str, Any], of: str = "predicted_ms") -> float:
    return float(row[of] / row["measured_ms"] - 1)


def table(found: Mapping[str, Any]) -> str:
    """Return the rows of a setting as aligned lines."""
    plan, job = found["plan"], found["job"]
    title = f"link {plan['link']}, {len(found['nodes'])} hosts"
    if found["calibrates"]:
        title += (
            f", which calibrates: {1e3 * job['step_seconds']:.1f} ms of computing, an exchange "
            f"takes {1e3 * job['host_seconds'] * job['parameters']:.1f} ms of it beside and "
            f"{1e3 * job['own_seconds'] * job['parameters']:.1f} between, gradients "
            f"{1e3 * job['gradient_seconds'] * job['parameters']:.1f}"
        )
    columns = f"{'compute':>10}{'measured':>10}{'predicted':>11}{'error':>8}"
    lines = [title, f"{'':<24}{columns}{'unchanged':>11}{'added':>8}"]
    for row in found["rows"]:
        errors = [_error(row, of) for of in ("predicted_ms", "unchanged_ms", "added_ms")]
        lines.append(
            f"{row['name']:<24}{row['compute_ms']:>10.1f}{row['measured_ms']:>10.1f}"
            f"{row['predicted_ms']:>11.1f}"
            f"{errors[0]:>8.1%}{errors[1]:>11.0%}{errors[2]:>8.0%}"
        )
    return "\n".join(lines)


def figures(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures over all settings but the one that calibrates; none of less than 8."""
    rows = [row for one in found if not one["calibrates"] for row in one["rows"]]
    if len(rows) < 8:
        return {}
    named = {}
    for name, of in (
        ("prediction_error", "predicted_ms"),
        ("unchanged_error", "unchanged_ms"),
        ("added_error", "added_ms"),
    ):
        errors = [abs(_error(row, of)) for row in rows]
        for kind, value in (("median", statistics.median(errors)), ("worst", max(errors))):
            named[f"{name}_{kind}"] = {
                "value": value,
                "unit": "part of the measured step time",
                "conditions": f"{len(rows)} settings: "
                + ", ".join(
                    f"{one['plan']['link']} on {len(one['nodes'])} hosts"
                    for one in found
                    if not one["calibrates"]
                )
                + f", each with {', '.join(WAYS)}",
            }
    return named
