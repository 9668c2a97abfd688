"""Step times of ways to train the same model, on the same link and in the same run."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from daso.cli.bench.baselines import INSIDE, ORDERS, Contender, Make
from daso.cli.bench.models import CASES, Batch
from daso.cli.bench.names import COMPUTE, DDP, OURS
from daso.cli.bench.rounds import (
    Clock,
    Round,
    median_of,
    over,
    sent_bytes,
    take_turns,
)
from daso.cli.bench.third_party import EVERYBODY
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology

__all__ = ["Plan", "figures", "measure", "ratios", "table"]

MOST = 6  # times as many steps as planned may be taken until a round can end


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        model: One of `CASES`.
        names: Contenders besides compute only.
        rounds: Of every contender.
        seconds: That a round lasts, at least.
        settle: Seconds of training before the first round, for schedules to find their place; 0:
            rounds begin with the first batch.
        link: For people.
    """

    model: str
    names: tuple[str, ...]
    rounds: int
    seconds: float
    settle: float
    link: str


def measure(
    plan: Plan, topology: Topology, more: Mapping[str, Make] | None = None
) -> dict[str, Any]:
    """Train with all contenders in turn, and with compute only before and after every turn.

    Args:
        plan: What is measured.
        topology: All ranks.
        more: Contenders beside those of the package.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    case = CASES[plan.model]
    batches = case.batches(topology.rank)
    names = [COMPUTE, *(name for name in plan.names if name != COMPUTE)]
    join_process_group(topology, "gloo")
    makers = {**EVERYBODY, **ORDERS, **INSIDE, **(more or {})}
    contenders = {name: makers[name](case, topology) for name in names}
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    steps = {name: 1 for name in names}
    for name, contender in contenders.items():
        if plan.settle == 0 and name != COMPUTE:
            steps[name] = steps[COMPUTE]  # of which it has taken none yet
            continue
        # Who has no schedule has nothing to find. The last says how many steps a round has.
        settle = (plan.settle,) if contender.report() else ()
        for seconds in (0.0, *settle, plan.seconds):
            found = _run(contender, batches, topology, steps[name])
            steps[name] = max(1, math.ceil((seconds or 1.0) / found.seconds))

    def turn(name: str) -> Round:
        return _run(contenders[name], batches, topology, steps[name])

    rounds[COMPUTE].append(turn(COMPUTE))
    for name in take_turns(names[1:], plan.rounds):
        found = turn(name)
        before, after = rounds[COMPUTE][-1], turn(COMPUTE)
        base = (before.seconds + after.seconds) / 2
        rounds[name].append(replace(found, base_seconds=base))
        rounds[COMPUTE].append(after)
    rows = [_row(name, rounds, contenders[name]) for name in names]
    parameters = sum(p.numel() for p in contenders[COMPUTE].model.parameters())
    for contender in contenders.values():
        contender.close()
    dist.destroy_process_group()
    return {
        "plan": asdict(plan),
        "parameters": parameters,
        "batch": case.batch,
        "nodes": list(topology.node_sizes),
        "rows": rows,
    }


def _run(contender: Contender, batches: Iterator[Batch], topology: Topology, least: int) -> Round:
    """Train for so many steps, and until the contender is where it began; as long on all ranks."""
    world = topology.world_comm
    contender.wake()
    exposed, sent = contender.report().get("exposed_seconds", 0.0), sent_bytes(topology)
    world.Barrier()
    clock, steps = Clock(), 0
    while steps < least or (steps < MOST * least and not contender.settled()):
        contender.step(next(batches))
        steps += 1
    wall, cpu = clock.read()
    exposed = contender.report().get("exposed_seconds", 0.0) - exposed
    rows = world.allgather((wall, cpu, exposed))
    contender.rest()
    world.Barrier()
    after = sent_bytes(topology)
    seconds = max(wall for wall, _, _ in rows) / steps
    return Round(
        steps=steps,
        seconds=seconds,
        cpu_seconds=statistics.mean(cpu for _, cpu, _ in rows) / steps,
        nbytes=None if after is None or sent is None else (after - sent) / steps,
        exposed_seconds=max(exposed for _, _, exposed in rows) / steps,
        base_seconds=seconds,
        whole=contender.settled(),
    )


def _row(name: str, rounds: Mapping[str, Sequence[Round]], contender: Contender) -> dict[str, Any]:
    mine = rounds[name]
    return {
        "name": name,
        "step_ms": 1e3 * median_of(mine, "seconds"),
        "over_compute": median_of(mine, "ratio"),
        "cpu_ms": 1e3 * median_of(mine, "cpu_seconds"),
        "exposed_ms": 1e3 * median_of(mine, "exposed_seconds"),
        "mbytes": None if mine[0].nbytes is None else median_of(mine, "nbytes") / 1e6,
        "rounds": [asdict(one) for one in mine],
        "report": dict(contender.report()),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = found["plan"]
    head = (
        f"{plan['model']}, {found['parameters'] / 1e6:.2f} M parameters, batch {found['batch']}, "
        f"nodes of {', '.join(map(str, found['nodes']))} ranks, link {plan['link']}, medians of "
        f"{plan['rounds']} alternating rounds of {plan['seconds']:g} s, {_since(plan['settle'])}"
    )
    columns = f"{'':<26}{'ms/step':>10}{'x compute':>11}{'exposed':>9}{'CPU ms':>9}{'MB/step':>9}"
    lines = [head, columns]
    for row in found["rows"]:
        ours = row["report"]
        exposed = f"{row['exposed_ms']:.2f}" if "exposed_seconds" in ours else "-"
        sent = "-" if row["mbytes"] is None else f"{row['mbytes']:.3f}"
        chosen = _chosen(ours) if ours.get("skip_history") else ""
        cut = sum(not one["whole"] for one in row["rounds"])
        chosen += f", {cut} rounds cut an exchange" if cut else ""
        lines.append(
            f"{row['name']:<26}{_ms(row['step_ms']):>10}{row['over_compute']:>11.3f}{exposed:>9}"
            f"{_ms(row['cpu_ms']):>9}{sent:>9}{chosen}"
        )
    return "\n".join(lines)


def _since(settle: float) -> str:
    return f"after {settle:g} s" if settle else "from the first batch on"


def _chosen(report: Mapping[str, Any]) -> str:
    _, skip, wait = report["skip_history"][-1]
    wire = report.get("wire")  # recorded runs of before 2026-11-22 have none
    return f"  skip {skip}, wait {wait}" + (f", {wire}" if wire else "")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{1 if milliseconds >= 10 else 3}f}"


def _where(found: Mapping[str, Any]) -> str:
    """Return how figures of this model and link end."""
    model, link = found["plan"]["model"], found["plan"]["link"]
    if (model, link) == ("tiny", "none"):
        return "no_gain"
    return str(link if model == "cnn" else f"{model}_{link}")


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this link, named as everywhere."""
    named = {OURS: "step_ratio", DDP: "step_ratio_ddp"}
    head = table(found).splitlines()[0]
    return {
        f"{named[row['name']]}_{_where(found)}": {
            "value": row["over_compute"],
            "unit": "ratio of step times, over compute only",
            "conditions": f"{row['name']}: {head}",
        }
        for row in found["rows"]
        if row["name"] in named
    }


def ratios(found: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the ratios behind the figures, one of every round; DASO's over DDP's too, if taken."""
    seconds = {row["name"]: [one["seconds"] for one in row["rounds"]] for row in found["rows"]}
    bases = {row["name"]: [one["base_seconds"] for one in row["rounds"]] for row in found["rows"]}
    pairs = {
        "step_ratio": (seconds.get(OURS), bases.get(OURS)),
        "step_ratio_ddp": (seconds.get(DDP), bases.get(DDP)),
        "step_ratio_over_ddp": (seconds.get(OURS), seconds.get(DDP)),
    }
    return {
        f"{name}_{_where(found)}": over(mine, other)
        for name, (mine, other) in pairs.items()
        if mine is not None and other is not None
    }
