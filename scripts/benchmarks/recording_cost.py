"""What recording costs a step, and how well clocks of ranks are brought to one."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from daso import trace
from daso.cli.bench.baselines import Daso, start
from daso.cli.bench.models import CASES
from daso.cli.bench.names import size_of_nodes
from daso.cli.bench.rounds import over
from daso.comm.topology import Topology
from daso.plan.policies import Fixed
from daso.timeline.clock_offsets import Loop, Reading, clocks, close_loop
from daso.timeline.clock_sync import ask_round

__all__ = ["Plan", "figures", "measure", "table"]

STALL_SECONDS = 60.0
LOOPS_APART = 1.1  # seconds
ADDED = 100_000  # spans whose cost is measured by themselves
# What is added to each rank's clock: seconds, and parts of the time that goes by.
AHEAD: tuple[float, ...] = tuple(13.7 * rank * (-1) ** rank for rank in range(64))
DRIFT: tuple[float, ...] = tuple(2e-5 * (rank % 5 - 2) * (rank > 0) for rank in range(64))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        models: Of `CASES`, which are trained with and without recording in turn.
        rounds: Of each.
        seconds: That a round lasts, at least.
        link: For people.
    """

    models: tuple[str, ...]
    rounds: int
    seconds: float
    link: str


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Train with and without recording, and compare clocks that are wrong by a known amount.

    Returns:
        Rows for JSON, the same on every rank.

    Collective over the world; blocking.
    """
    torch.set_num_threads(1)
    return {
        "plan": asdict(plan),
        "nodes": list(topology.node_sizes),
        "clocks": [_clocks(topology) for _ in range(plan.rounds)],
        "span_ns": _span_ns(),
        "rows": [_row(model, plan, topology) for model in plan.models],
    }


def _clocks(topology: Topology) -> dict[str, Any]:
    """Return how far off each rank's clock still is after it was brought to rank 0's.

    Hosts of this bench are one machine, whose clock all ranks share: what is added is all there is.
    """
    rank, ahead, drift = topology.rank, AHEAD, DRIFT
    begun: float = topology.world_comm.bcast(time.perf_counter())

    def shown(of: int, at: float) -> float:
        return at + ahead[of % 64] + drift[of % 64] * (at - begun)

    def now() -> float:
        return shown(rank, time.perf_counter())

    loops: list[Loop] = []
    for _ in range(2):
        readings = ask_round(topology, STALL_SECONDS, now)
        loops.append(close_loop([Reading(*one) for one in readings]))
        time.sleep(LOOPS_APART)
    middle, found = begun + LOOPS_APART / 2, clocks(loops)
    ranks = range(1, topology.world_size)
    errors = [abs(found[of].first(shown(of, middle)) - shown(0, middle)) for of in ranks]
    bounds = [max(loop.bounds[of] for loop in loops) for of in ranks]
    return {
        "error_us": [1e6 * one for one in errors],
        "bound_us": [1e6 * one for one in bounds],
        "closure_us": [1e6 * abs(loop.closure) for loop in loops],
        "closure_bound_us": [1e6 * loop.bound for loop in loops],
    }


def _span_ns() -> float:
    """Return what a span takes by itself, in nanoseconds."""
    trace.start(trace.Recorder())
    begins = time.perf_counter()
    for key in range(ADDED):
        trace.record(trace.STEP, begins, key=key)
    trace.stop()
    return 1e9 * (time.perf_counter() - begins) / ADDED


def _row(name: str, plan: Plan, topology: Topology) -> dict[str, Any]:
    case = CASES[name]
    model, inner = start(case)
    ours = Daso(model, inner, topology, policy=Fixed(4, 1))
    batches, recorder = case.batches(topology.rank), trace.Recorder()

    def run(least: int) -> float:
        """Return seconds of a step, on the slowest rank."""
        topology.world_comm.Barrier()
        begun, steps = time.perf_counter(), 0
        while steps < least or not ours.may_end_round():
            ours.step(next(batches))
            steps += 1
        seconds = (time.perf_counter() - begun) / steps
        ours.drain()
        return float(max(topology.world_comm.allgather(seconds)))

    steps = _steps(run, plan.seconds)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    spans = 0
    for number in range(2 * plan.rounds):
        traced = number % 2 == (number // 2) % 2  # who is first changes from round to round
        if traced:
            trace.start(recorder)
        seconds[traced].append(run(steps))
        trace.stop()
        found, lost = recorder.take()
        spans += len(found) + lost
    ours.close()
    return {
        "model": name,
        "step_ms": 1e3 * statistics.median(seconds[False]),
        "traced_ms": 1e3 * statistics.median(seconds[True]),
        "ratios": over(seconds[True], seconds[False]),
        "spans_per_step": spans / (plan.rounds * steps),
    }


def _steps(run: Callable[[int], float], seconds: float) -> int:
    """Return how many steps last so long, the same on every rank."""
    run(4)
    return max(4, round(seconds / run(4)))


def table(found: Mapping[str, Any]) -> str:
    """Return the rows as aligned lines."""
    plan = found["plan"]
    lines = [
        f"{size_of_nodes(found['nodes'])}, link {plan['link']}, medians of {plan['rounds']} "
        f"alternating rounds",
        f"{'':<8}{'ms/step':>10}{'recorded':>10}{'ratio':>9}{'from':>8}{'to':>8}"
        f"{'spans/step':>12}{'x span cost':>13}",
    ]
    for row in found["rows"]:
        ratios = row["ratios"]
        lines.append(
            f"{row['model']:<8}{row['step_ms']:>10.3f}{row['traced_ms']:>10.3f}"
            f"{statistics.median(ratios):>9.4f}{min(ratios):>8.3f}{max(ratios):>8.3f}"
            f"{row['spans_per_step']:>12.1f}{_by_spans(found, row):>13.4%}"
        )
    worst, bound = _worst(found["clocks"])
    closure = max(max(one["closure_us"]) for one in found["clocks"])
    return "\n".join(
        [
            *lines,
            f"a span takes {found['span_ns']:.0f} ns",
            f"clocks: off by {worst:.2f} us at most where trips allow {bound:.2f}; round the ring "
            f"offsets add up to {closure:.2f} us at most",
        ]
    )


def _by_spans(found: Mapping[str, Any], row: Mapping[str, Any]) -> float:
    """Return what spans take of a step, by what one takes."""
    return float(row["spans_per_step"] * found["span_ns"] * 1e-6 / row["step_ms"])


def _worst(found: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return the error that is largest beside what trips allow, and that, in microseconds."""
    pairs = [pair for one in found for pair in zip(one["error_us"], one["bound_us"], strict=True)]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def figures(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures, named as everywhere."""
    head = table(found).splitlines()[0]
    worst, bound = _worst(found["clocks"])
    named = {
        "clock_error_over_half_rtt": {
            "value": worst / bound,
            "unit": "largest error of injected offset and drift, over what trips allow",
            "conditions": head,
        }
    }
    for row in found["rows"]:
        suffix = "" if row["model"] == "cnn" else f"_{row['model']}"
        named[f"tracing_overhead{suffix}"] = {
            "value": statistics.median(row["ratios"]) - 1,
            "unit": "part of a step",
            "conditions": f"{row['model']}, Fixed(4, 1): {head}",
        }
    return named
