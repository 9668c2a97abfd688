"""Step times of training methods for the same model, on the same link and in the same run."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from daso.cli.bench.baselines import CONTENDERS, Contender, Make
from daso.cli.bench.models import CASES, Batch, Case
from daso.cli.bench.names import COMPUTE, DDP, OURS, size_of_nodes
from daso.cli.bench.rounds import (
    Clock,
    Round,
    median_of,
    over,
    sent_bytes,
    take_turns,
)
from daso.comm.control import barrier, gather
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology

MOST = 6  # times the planned steps: limit on waiting for the end of a round


@dataclass(frozen=True, slots=True)
class Plan:
    """Case of the benchmark.

    Args:
        model: One of `CASES`.
        names: Contenders besides compute only.
        rounds: Rounds of every contender.
        seconds: Minimum duration of a round.
        settle: Seconds of training before the first round, in which schedules settle; 0: rounds
            begin with the first batch.
        link: Label of the link in tables.
    """

    model: str
    names: tuple[str, ...]
    rounds: int
    seconds: float
    settle: float
    link: str


def measure(
    plan: Plan,
    topology: Topology,
    more: Mapping[str, Make] | None = None,
    cases: Mapping[str, Case] | None = None,
) -> dict[str, Any]:
    """Train with all contenders in turn, and with compute only before and after every turn.

    Args:
        plan: Case of the benchmark.
        topology: All ranks.
        more: Contenders besides those of the package.
        cases: Models besides those of the package.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    case = {**CASES, **(cases or {})}[plan.model]
    batches = case.batches(topology.rank)
    names = [COMPUTE, *(name for name in plan.names if name != COMPUTE)]
    join_process_group(topology, "gloo")
    makers = {**CONTENDERS, **(more or {})}
    contenders = {name: makers[name](case, topology) for name in names}
    rounds: dict[str, list[Round]] = {name: [] for name in names}
    steps = {name: 1 for name in names}
    for name, contender in contenders.items():
        if plan.settle == 0 and name != COMPUTE:
            steps[name] = steps[COMPUTE]  # its own step time is unknown yet
            continue
        # Only contenders with a schedule settle. The last run gives the steps of a round.
        settle = (plan.settle,) if contender.report() else ()
        for seconds in (0.0, *settle, plan.seconds):
            warmup = _run(contender, batches, topology, steps[name])
            steps[name] = max(1, math.ceil((seconds or 1.0) / warmup.seconds))

    def turn(name: str) -> Round:
        return _run(contenders[name], batches, topology, steps[name])

    rounds[COMPUTE].append(turn(COMPUTE))
    for name in take_turns(names[1:], plan.rounds):
        measured = turn(name)
        before, after = rounds[COMPUTE][-1], turn(COMPUTE)
        base = (before.seconds + after.seconds) / 2
        rounds[name].append(replace(measured, base_seconds=base))
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
    """Train at least `least` steps, until a round may end; the same number on all ranks."""
    contender.begin_round()
    exposed, sent = contender.report().get("exposed_seconds", 0.0), sent_bytes(topology)
    barrier(topology)
    clock, steps = Clock(), 0
    while steps < least or (steps < MOST * least and not contender.may_end_round()):
        contender.step(next(batches))
        steps += 1
    wall, cpu = clock.read()
    exposed = contender.report().get("exposed_seconds", 0.0) - exposed
    rows = gather(topology, (wall, cpu, exposed))
    contender.drain()
    barrier(topology)
    after = sent_bytes(topology)
    seconds = max(wall for wall, _, _ in rows) / steps
    return Round(
        steps=steps,
        seconds=seconds,
        cpu_seconds=statistics.mean(cpu for _, cpu, _ in rows) / steps,
        nbytes=None if after is None or sent is None else (after - sent) / steps,
        exposed_seconds=max(exposed for _, _, exposed in rows) / steps,
        base_seconds=seconds,
        whole=contender.may_end_round(),
    )


def _row(name: str, rounds: Mapping[str, Sequence[Round]], contender: Contender) -> dict[str, Any]:
    own_rounds = rounds[name]
    return {
        "name": name,
        "step_ms": 1e3 * median_of(own_rounds, "seconds"),
        "over_compute": median_of(own_rounds, "ratio"),
        "cpu_ms": 1e3 * median_of(own_rounds, "cpu_seconds"),
        "exposed_ms": 1e3 * median_of(own_rounds, "exposed_seconds"),
        "mbytes": None if own_rounds[0].nbytes is None else median_of(own_rounds, "nbytes") / 1e6,
        "rounds": [asdict(measured) for measured in own_rounds],
        "report": dict(contender.report()),
    }


LEGEND = """\
x compute: step time over that of compute only, measured just before and after; 1.000: no cost.
exposed: milliseconds of a step in which training waits for other ranks. MB/step: sent by network
interfaces; -: nothing was sent, or the contender does not report it.
"""


def table(result: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = result["plan"]
    head = (
        f"{plan['model']}, {result['parameters'] / 1e6:.2f} M parameters, batch {result['batch']}, "
        f"{size_of_nodes(result['nodes'])}, link {plan['link']}, medians of "
        f"{plan['rounds']} alternating rounds of {plan['seconds']:g} s, {_since(plan['settle'])}"
    )
    columns = f"{'':<26}{'ms/step':>10}{'x compute':>11}{'exposed':>9}{'CPU ms':>9}{'MB/step':>9}"
    lines = [head, columns]
    for row in result["rows"]:
        ours = row["report"]
        exposed = f"{row['exposed_ms']:.2f}" if "exposed_seconds" in ours else "-"
        sent = "-" if row["mbytes"] is None else f"{row['mbytes']:.3f}"
        chosen = _chosen(ours) if ours.get("skip_history") else ""
        cut = sum(not measured["whole"] for measured in row["rounds"])
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
    wire = report.get("wire")  # recordings made before 2026-11-22 have none
    return f"  skip {skip}, wait {wait}" + (f", {wire}" if wire else "")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.{1 if milliseconds >= 10 else 3}f}"


def _where(result: Mapping[str, Any]) -> str:
    """Return the suffix of figures of this model and link."""
    model, link = result["plan"]["model"], result["plan"]["link"]
    if (model, link) == ("tiny", "none"):
        return "no_gain"
    return str(link if model == "cnn" else f"{model}_{link}")


def figures(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of this link, by name."""
    named = {OURS: "step_ratio", DDP: "step_ratio_ddp"}
    head = table(result).splitlines()[0]
    return {
        f"{named[row['name']]}_{_where(result)}": {
            "value": row["over_compute"],
            "unit": "ratio of step times, over compute only",
            "conditions": f"{row['name']}: {head}",
        }
        for row in result["rows"]
        if row["name"] in named
    }


def ratios(result: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the per-round ratios behind the figures; DASO over DDP too, if both were measured."""
    seconds = {
        row["name"]: [measured["seconds"] for measured in row["rounds"]] for row in result["rows"]
    }
    bases = {
        row["name"]: [measured["base_seconds"] for measured in row["rounds"]]
        for row in result["rows"]
    }
    pairs = {
        "step_ratio": (seconds.get(OURS), bases.get(OURS)),
        "step_ratio_ddp": (seconds.get(DDP), bases.get(DDP)),
        "step_ratio_over_ddp": (seconds.get(OURS), seconds.get(DDP)),
    }
    return {
        f"{name}_{_where(result)}": over(own, other)
        for name, (own, other) in pairs.items()
        if own is not None and other is not None
    }
