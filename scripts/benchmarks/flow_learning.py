"""Whole trainings of flows and of plain programs: to an accuracy, and by as many instances.

A plain program steps after every few instances with what they all bring: synchronously. A flow's
layers step by themselves, behind each other. After as many instances both are tested.
"""

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.flow_baselines import (
    BATCHES,
    EAGER,
    flow_name,
    make_contender,
    plain_names,
    rest,
)
from benchmarks.plain_torch import MAKERS
from daso.comm.topology import Topology

__all__ = [
    "METRICS",
    "Equal",
    "Plan",
    "compare",
    "compared_figures",
    "compared_table",
    "figures",
    "measure",
    "table",
]

# What a task is tested by, and whether more of it is better.
METRICS = {
    "lists": ("accuracy", True),
    "trees": ("accuracy", True),
    "deductions": ("accuracy", True),
    "molecules": ("error", False),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained.

    Args:
        task: One of `benchmarks.plain_torch.MAKERS`, with an accuracy.
        width: Of states.
        interval: Instances of an update.
        at_once: Instances under way, of every flow; the last one trains to the end.
        samples: To train with.
        tests: To test with.
        epochs: At most.
        every: Instances from one test to the next.
        seeds: Trainings of each contender.
        target: Accuracy that is to be reached.
    """

    task: str
    width: int
    interval: int
    at_once: Sequence[int]
    samples: int
    tests: int
    epochs: int
    every: int
    seeds: int
    target: float

    @property
    def names(self) -> list[str]:
        """Contenders."""
        plain = [EAGER, *(name for name in plain_names(self.task) if name == BATCHES)]
        return [*plain, *(flow_name("replicas", most) for most in self.at_once)]

    @property
    def whole(self) -> str:
        """The contender that trains to the end."""
        return flow_name("replicas", self.at_once[-1])


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with every contender once for each seed.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    samples = MAKERS[plan.task](plan.samples, seed=1)
    tests = MAKERS[plan.task](plan.tests, seed=2)
    rows: list[dict[str, Any]] = [{"name": name, "courses": []} for name in plan.names]
    for seed in range(plan.seeds):
        for row in rows:
            course = _course(plan, row["name"], seed, samples, tests, topology)
            row["courses"].append(course)
    return {"plan": asdict(plan), "whole": plan.whole, "rows": rows}


def _course(
    plan: Plan,
    name: str,
    seed: int,
    samples: Sequence[Any],
    tests: Sequence[Any],
    topology: Topology,
) -> list[dict[str, float]]:
    """Train until the target is reached, or to the end; return what was found at every test."""
    one = make_contender(plan.task, name, plan.width, plan.interval, seed, topology)
    course: list[dict[str, float]] = []
    seconds, seen = 0.0, 0
    for epoch in range(plan.epochs):
        order = random.Random(f"{seed} {epoch}").sample(samples, len(samples))
        for at in range(0, len(order), plan.every):
            rest(topology)
            start = time.perf_counter()
            one.train(order[at : at + plan.every])
            seconds += topology.world_comm.bcast(time.perf_counter() - start)
            seen += len(order[at : at + plan.every])
            tested = one.test(tests)
            accuracy = topology.world_comm.bcast(tested and tested.metrics["accuracy"])
            course.append({"instances": seen, "seconds": seconds, "accuracy": accuracy})
            if accuracy >= plan.target and name != plan.whole:
                one.close()
                return course
    one.close()
    return course


def _to_target(course: Sequence[Mapping[str, float]], target: float, of: str) -> float | None:
    return next((at[of] for at in course if at["accuracy"] >= target), None)


def _medians(row: Mapping[str, Any], target: float) -> tuple[float, float] | None:
    """Return instances and seconds to the target; None if one training did not reach it."""
    found = [
        [_to_target(course, target, of) for course in row["courses"]]
        for of in ("instances", "seconds")
    ]
    if any(one is None for of in found for one in of):
        return None
    instances, seconds = (statistics.median(of) for of in found)  # type: ignore[type-var]
    return instances, seconds  # type: ignore[return-value]


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = found["plan"]
    lines = [
        f"to {plan['target']:.0%} of {plan['tests']:,} tests, {plan['samples']:,} to train with, "
        f"medians of {plan['seeds']}",
        f"{'':<44}{'epochs':>8}{'seconds':>9}{'last':>12}",
    ]
    for row in found["rows"]:
        reached = _medians(row, plan["target"])
        last = statistics.median(course[-1]["accuracy"] for course in row["courses"])
        said = (
            f"{'-':>8}{'-':>9}"
            if reached is None
            else f"{reached[0] / plan['samples']:>8.2f}{reached[1]:>9.1f}"
        )
        lines.append(f"{row['name']:<44}{said}{last:>12.3f}")
    return "\n".join(lines)


def figures(found: Mapping[str, Any], conditions: str) -> dict[str, dict[str, Any]]:
    """Return the figures; none of a target that was not reached."""
    plan = found["plan"]
    rows = {row["name"]: row for row in found["rows"]}
    reached = {name: _medians(row, plan["target"]) for name, row in rows.items()}
    eager, ours = reached[EAGER], reached[found["whole"]]
    last = [course[-1]["accuracy"] for course in rows[found["whole"]]["courses"]]
    conditions += f"; median of {plan['seeds']} seeds, at most {plan['epochs']} epochs"
    named = {"list_reduction_accuracy": (statistics.median(last), "of tests, at the end")}
    if eager and ours:
        to = f"eager torch's, to {plan['target']:.0%}"
        named["epochs_ratio"] = (ours[0] / eager[0], f"x {to}")
        named["seconds_ratio"] = (ours[1] / eager[1], f"x {to}")
    return {
        name: {"value": value, "unit": unit, "conditions": conditions}
        for name, (value, unit) in named.items()
    }


# --- as many instances for all -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Equal:
    """What is trained with the same instances by all.

    Args:
        task: One of `METRICS`.
        width: Of states.
        interval: Instances of an update.
        most: Instances under way, of every flow.
        samples: To train with.
        tests: To test with.
        epochs: Of each training.
        seeds: Trainings of each contender.
    """

    task: str
    width: int
    interval: int
    most: int
    samples: int
    tests: int
    epochs: int
    seeds: int

    @property
    def names(self) -> list[str]:
        """Contenders."""
        return [EAGER, *(flow_name(layout, self.most) for layout in ("replicas", "spread"))]


def compare(plan: Equal, topology: Topology) -> dict[str, Any]:
    """Train with every contender once for each seed, and test it in the end.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    samples = MAKERS[plan.task](plan.samples, seed=1)
    tests = MAKERS[plan.task](plan.tests, seed=2)
    rows: list[dict[str, Any]] = [{"name": name, "last": []} for name in plan.names]
    for seed in range(plan.seeds):
        for row in rows:
            one = make_contender(plan.task, row["name"], plan.width, plan.interval, seed, topology)
            for epoch in range(plan.epochs):
                one.train(random.Random(f"{seed} {epoch}").sample(samples, len(samples)))
            tested = one.test(tests)
            value = tested and tested.metrics[METRICS[plan.task][0]]
            row["last"].append(topology.world_comm.bcast(value))
            one.close()
    return {"plan": asdict(plan), "rows": rows}


def compared_table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = found["plan"]
    metric, _ = METRICS[plan["task"]]
    lines = [
        f"{metric} of {plan['tests']:,} tests after {plan['epochs']} epochs of "
        f"{plan['samples']:,}, by seeds",
    ]
    lines += [
        f"{row['name']:<44}" + "".join(f"{last:>9.3f}" for last in row["last"])
        for row in found["rows"]
    ]
    return "\n".join(lines)


def compared_figures(found: Mapping[str, Any], conditions: str) -> dict[str, dict[str, Any]]:
    """Return by how much flows are worse than the plain program, means of pairs of seeds."""
    plan = found["plan"]
    metric, more_is_better = METRICS[plan["task"]]
    rows = {row["name"]: row["last"] for row in found["rows"]}
    sign = 1 if more_is_better else -1
    figures = {}
    for layout in ("replicas", "spread"):
        pairs = zip(rows[EAGER], rows[flow_name(layout, plan["most"])], strict=True)
        worse = [sign * (eager - ours) for eager, ours in pairs]
        figures[f"flow_{layout}_{metric}_gap_{plan['task']}"] = {
            "value": statistics.fmean(worse),
            "unit": f"{metric} of tests, worse than eager torch's after as many instances",
            "conditions": f"{conditions}; mean of {plan['seeds']} seeds after {plan['epochs']} "
            f"epochs of {plan['samples']}, eager {statistics.fmean(rows[EAGER]):.3f}, by seeds "
            + ", ".join(f"{one:.3f}" for one in worse),
        }
    return figures
