"""Instances a second where the control flow depends on the instance, and what more ranks would do.

All contenders train the same layers with the same optimizer, and take as many steps for so many
instances: where layers have replicas, each steps after its share of an update's. Rounds alternate;
those of plain programs are one process's, while the other ranks rest.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import flow_learning
from benchmarks.flow_baselines import (
    EAGER,
    LAYOUTS,
    Contender,
    flow_name,
    make_contender,
    plain_names,
    rest,
    seeded,
)
from benchmarks.flow_simulator import Costs, Task, run_flow
from benchmarks.flow_tasks import tasks_of
from benchmarks.plain_torch import MAKERS
from daso.cli.bench.rounds import over, take_turns
from daso.comm.p2p.packets import Messages
from daso.comm.topology import Topology
from daso.flow.measuring import Measured
from daso.flow.measuring import measure as measure_nodes
from daso.flow.messages import NO_ADMISSION, Message, Post
from daso.flow.model.checks import wire
from daso.flow.placement import choose_homes

__all__ = ["Plan", "figures", "measure", "simulated_speed", "spread_figures", "table"]

WARMED_BY = 64  # instances
MEASURED = 64  # instances at most; each simulated rank goes once through those measured
PINGS = 300
SIMULATED = (1, 2, 4, 8, 16)  # ranks


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        task: One of `benchmarks.plain_torch.MAKERS`.
        width: Of states.
        at_once: Instances under way, of every flow.
        interval: Instances of an update.
        count: Instances of a round.
        rounds: Of every contender.
        courses: Whole trainings of lists; None: none.
        learned: Trainings of as many instances for all; None: none.
    """

    task: str
    width: int
    at_once: Sequence[int]
    interval: int
    count: int
    rounds: int
    courses: Mapping[str, Any] | None
    learned: Mapping[str, Any] | None = None

    @property
    def most(self) -> int:
        """Instances under way, of flows that are there once."""
        return max(self.at_once)

    @property
    def names(self) -> list[str]:
        """Contenders."""
        return [
            *plain_names(self.task),
            *(flow_name("replicas", most) for most in self.at_once),
            *(flow_name(layout, self.most) for layout in ("spread", "1 rank")),
            *(flow_name(layout, self.most, batched=False) for layout in LAYOUTS),
        ]


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Measure, simulate, train.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {"plan": asdict(plan), "ranks": topology.world_size}
    found |= _speeds(plan, topology)
    found["courses"] = None
    if plan.courses:
        courses = flow_learning.Plan(plan.task, plan.width, plan.interval, **plan.courses)
        found["courses"] = flow_learning.measure(courses, topology)
    found["learned"] = None
    if plan.learned:
        equal = flow_learning.Equal(plan.task, plan.width, plan.interval, plan.most, **plan.learned)
        found["learned"] = flow_learning.compare(equal, topology)
    return found


def _speeds(plan: Plan, topology: Topology) -> dict[str, Any]:
    instances = MAKERS[plan.task](plan.count, seed=1)
    contenders: dict[str, Contender] = {}
    for name in plan.names:
        contenders[name] = one = make_contender(
            plan.task, name, plan.width, plan.interval, 0, topology
        )
        one.train(instances[:WARMED_BY])
    seconds: dict[str, list[float]] = {name: [] for name in plan.names}
    for name in take_turns(plan.names, plan.rounds):
        rest(topology)
        start = time.perf_counter()
        contenders[name].train(instances)
        seconds[name].append(topology.world_comm.bcast(time.perf_counter() - start))
    for one in contenders.values():
        one.close()
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "seconds": taken,
            "per_second": plan.count / statistics.median(taken),
            "ratio": statistics.median(over(seconds[EAGER], taken)),
        }
        for name, taken in seconds.items()
    ]
    predicted = _predicted(plan, {row["name"]: row["per_second"] for row in rows}, topology)
    return {"rows": rows, **predicted}


# --- simulated ------------------------------------------------------------------------------------


def _predicted(plan: Plan, measured: Mapping[str, float], topology: Topology) -> dict[str, Any]:
    """Return what simulations say of the measured ranks, and of more.

    One setting calibrates them: one rank. Messages are not batched there, nor here.
    """
    message_seconds = _crossing_seconds(plan.width, topology)
    wiring = wire(seeded(plan.task, plan.width, 1, 0))
    take = MAKERS[plan.task](MEASURED, seed=1).__getitem__
    tasks, nodes = tasks_of(wiring, take, MEASURED), measure_nodes(wiring, take, MEASURED, 2.0)
    tasks, nodes = topology.world_comm.bcast((tasks, nodes))
    single = measured[flow_name("1 rank", plan.most, batched=False)]
    sums = sum(task.seconds for some in tasks for task in some) / len(tasks)
    costs = Costs(message_seconds=message_seconds, stretch=1 / single / sums)

    def speed(layout: str, ranks: int, most: int) -> float:
        where = _where(wiring, nodes, layout, ranks)
        return simulated_speed(tasks, where, ranks, most, costs)

    ranks = topology.world_size
    checked = [
        {
            "layout": layout,
            "measured": measured[flow_name(layout, plan.most, batched=False)],
            "predicted": speed(layout, ranks, plan.most),
        }
        for layout in LAYOUTS[:2]
    ]
    simulated = [
        {
            "layout": layout,
            "ranks": many,
            "per_second": speed(layout, many, max(plan.most, 4 * many)),
        }
        for layout in ("spread", "heaviest replicated", "replicas")
        for many in SIMULATED
    ]
    rest(topology)
    return {"costs": asdict(costs), "checked": checked, "simulated": simulated}


def simulated_speed(
    tasks: Sequence[Sequence[Task]],
    where: Sequence[Sequence[int]],
    ranks: int,
    most: int,
    costs: Costs,
) -> float:
    """Return instances a second: each rank's share is one pass through all measured instances.

    Measuring may end early. Whole passes are the same mixture of short and long instances on any
    number of ranks; with any other count, a speedup over one rank can exceed the ranks.
    """
    course = run_flow(tasks, where, ranks, count=len(tasks) * ranks, most=most, costs=costs)
    return course.instances_per_second


def _where(wiring: Any, nodes: Measured, layout: str, ranks: int) -> Sequence[Sequence[int]]:
    layers = [node.index for node in wiring.layers]
    copied = {
        "spread": [],
        "heaviest replicated": [max(layers, key=nodes.seconds.__getitem__)],
        "replicas": layers,
    }[layout]
    costs = nodes.seconds, nodes.traffic, nodes.crossing
    return choose_homes(wiring, *costs, ranks, {}, dict.fromkeys(copied, ranks))


def _crossing_seconds(width: int, topology: Topology) -> float:
    """Return what a message between two ranks takes of each, as they send one to and fro."""
    comm = topology.world_comm.Dup()
    post = Post(dict.fromkeys(range(comm.size), Messages(comm)), torch.device("cpu"))
    message = Message(0, False, 0, (0, 0), (torch.zeros(1, width),), NO_ADMISSION)
    rank, found = topology.rank, 0.0
    if rank < 2 <= topology.world_size:
        start = time.perf_counter()
        for turn in range(2 * PINGS):
            if turn % 2 == rank:
                post.put(1 - rank, message)
                post.send()
            else:
                while not list(post.arrived()):
                    pass
        found = (time.perf_counter() - start) / (2 * PINGS) / 2
        post.drain()
    rest(topology)
    comm.Free()
    seconds: float = topology.world_comm.bcast(found)
    return seconds


# --- said -----------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan, ranks = found["plan"], found["ranks"]
    lines = [
        f"{plan['task']}, width {plan['width']}, {ranks} ranks of one machine, an update every "
        f"{plan['interval']} instances",
        f"{'':<44}{'instances/s':>12}{'over eager':>12}",
    ]
    lines += [
        f"{row['name']:<44}{row['per_second']:>12.0f}{row['ratio']:>11.2f}x"
        for row in found["rows"]
    ]
    lines += ["", f"{'simulated, unbatched':<24}{'measured':>10}{'predicted':>11}{'error':>8}"]
    for row in found["checked"]:
        error = row["predicted"] / row["measured"] - 1
        lines.append(
            f"{row['layout']:<24}{row['measured']:>10.0f}{row['predicted']:>11.0f}{error:>8.1%}"
        )
    lines += ["", f"{'speedup on ranks':<24}" + "".join(f"{many:>8}" for many in SIMULATED)]
    for layout in dict.fromkeys(row["layout"] for row in found["simulated"]):
        of = {r["ranks"]: r["per_second"] for r in found["simulated"] if r["layout"] == layout}
        lines.append(f"{layout:<24}" + "".join(f"{of[many] / of[1]:>7.2f}x" for many in SIMULATED))
    if found["courses"]:
        lines += ["", flow_learning.table(found["courses"])]
    if found.get("learned"):
        lines += ["", flow_learning.compared_table(found["learned"])]
    return "\n".join(lines)


SPREAD_TASKS = ("trees", "molecules")


def spread_figures(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the worst ratios of trees and molecules whose layers are spread; {} without both."""
    of_task = {run["plan"]["task"]: run for run in runs}
    if not of_task.keys() >= set(SPREAD_TASKS):
        return {}
    runs = [of_task[task] for task in SPREAD_TASKS]
    rows = [{row["name"]: row["ratio"] for row in run["rows"]} for run in runs]
    most = max(runs[0]["plan"]["at_once"])
    return {
        name: {
            "value": min(of[flow_name("spread", most, batched=batched)] for of in rows),
            "unit": "x instances/s of eager torch, instance by instance in one process; each layer "
            "on one of the ranks",
            "conditions": f"the worse of {' and '.join(SPREAD_TASKS)}, width "
            f"{runs[0]['plan']['width']}, {runs[0]['ranks']} ranks of one machine, "
            f"{most} under way",
        }
        for name, batched in (("flow_spread_ratio", True), ("flow_spread_unbatched_ratio", False))
    }


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures; those of lists have no task in their names."""
    plan = found["plan"]
    rows = {row["name"]: row["ratio"] for row in found["rows"]}
    of = {(row["layout"], row["ranks"]): row["per_second"] for row in found["simulated"]}
    conditions = (
        f"{plan['task']}, width {plan['width']}, {found['ranks']} ranks of one machine, Adam every "
        f"{plan['interval']} instances (of all replicas together), {max(plan['at_once'])} under way"
    )
    most = max(plan["at_once"])
    replicas = flow_name("replicas", most)
    alone = next(
        row["per_second"]
        for row in found["rows"]
        if row["name"] == flow_name("1 rank", most, batched=False)
    )
    suffix = "" if plan["task"] == "lists" else f"_{plan['task']}"
    named = {
        "throughput_ratio_2_ranks": (
            rows[replicas],
            "x instances/s of eager torch, instance by instance in one process; layers on both",
        ),
        "simulated_speedup_16_workers": (
            of["replicas", 16] / alone,
            "x instances/s of one rank, measured; simulated from measured nodes, layers on all 16",
        ),
    }
    figures = {
        name + suffix: {"value": value, "unit": unit, "conditions": conditions}
        for name, (value, unit) in named.items()
    }
    if found["courses"]:
        figures |= flow_learning.figures(found["courses"], conditions)
    if found.get("learned"):
        figures |= flow_learning.compared_figures(found["learned"], conditions)
    return figures
