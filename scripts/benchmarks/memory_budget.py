"""Training in less memory: time against budget for ways to fit, and a step in one arena.

All contenders train the same model on the same batches; rounds alternate. The second memory is the
host's own, at its own rate and held to slower ones, as a link to it would be: what a plan is worth
depends on that.
"""

import copy
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import daso
from daso.cli.bench.models import CASES, Residual
from daso.cli.bench.rounds import over, take_turns
from daso.comm.topology import Topology
from daso.examples.transformer import Block
from daso.memory.course import floor
from daso.memory.meter import open_meter
from daso.memory.tiers import HostTier, PendingCopy

__all__ = ["MODELS", "Plan", "figures", "measure", "resident", "table"]

MODELS = ("resnet18", "gpt", "tiny")
SAMPLES = {"resnet18": 32, "gpt": 4, "tiny": 512}  # of a batch
PLAIN, AGAIN = "plain", "torch checkpoint"
PURE = ("all_swap", "all_recompute")
HYBRID = "search"
POLICIES = (*PURE, "greedy", HYBRID)
BLOCKS = (Residual, Block)  # that torch's checkpoint takes one by one
MiB = 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Args:
        model: One of `MODELS`.
        rounds: Of every contender.
        steps: Of a round.
        parts: Budgets: parts of the way from the least that any plan needs to what all needs.
        rates: Bytes per second of the way to the second memory; 0: as it is.
        captured: Whether a step in one arena is measured too.
        folder: For the file that memory of the process is measured with; empty: it is not.
    """

    model: str
    rounds: int
    steps: int
    parts: Sequence[float]
    rates: Sequence[float]
    captured: bool
    folder: str


class PacedTier(HostTier):
    """The host's memory, reached at a rate.

    Args:
        rate: Bytes per second.
    """

    def __init__(self, rate: float) -> None:
        super().__init__(None)
        self._rate = rate

    def out(self, source: torch.Tensor, at: int) -> PendingCopy:
        """Begin to copy a row of bytes to it."""
        return self.begin(partial(self._paced, self.row(at, source.numel()), inward=False), source)

    def back(self, target: torch.Tensor, at: int) -> PendingCopy:
        """Begin to copy from it into a row of bytes."""
        return self.begin(partial(self._paced, self.row(at, target.numel()), inward=True), target)

    def _paced(self, there: torch.Tensor, row: torch.Tensor, *, inward: bool) -> None:
        start = time.perf_counter()
        _ = row.copy_(there) if inward else there.copy_(row)
        time.sleep(max(0.0, there.numel() / self._rate - (time.perf_counter() - start)))


class Contender:
    """One way to train.

    Args:
        name: To be told.
        model: Its own.
        batch: Inputs and targets.
        around: Context of a round.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        batch: tuple[torch.Tensor, torch.Tensor],
        around: Callable[[nn.Module], AbstractContextManager[Any]],
    ) -> None:
        self.name, self.model, self.batch, self._around = name, model, batch, around
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.seconds: list[float] = []
        self.live_bytes = 0

    def step(self) -> float:
        """Take one step; return its loss."""
        inputs, targets = self.batch
        self.optimizer.zero_grad(set_to_none=False)
        output = self.model(inputs)
        loss = cross_entropy(output.flatten(0, -2), targets.flatten())
        del output
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def look(self) -> None:
        """Take steps, and measure the memory of the second, as the allocator counts it."""
        with self._around(self.model):
            self.step()
            gc.collect()
            with open_meter(torch.device("cpu")) as meter:
                self.step()
        self.live_bytes = max(interval.peak for interval in meter.intervals)

    def round(self, steps: int) -> None:
        """Take steps; note what one took."""
        with self._around(self.model):
            self.step()
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            self.seconds.append((time.perf_counter() - start) / steps)

    def row(self, **more: Any) -> dict[str, Any]:
        """Return what was found."""
        return {
            "name": self.name,
            "seconds": self.seconds,
            "live_bytes": self.live_bytes,
            **more,
        }


def _made(plan: Plan, rank: int = 0) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    case = CASES[plan.model]
    model = case.build()
    inputs, targets = next(replace(case, batch=SAMPLES[plan.model]).batches(rank))
    return model, (inputs, targets)


def _loss_for(targets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda output: cross_entropy(output.flatten(0, -2), targets.flatten())


@contextmanager
def _checkpointed(model: nn.Module) -> Iterator[None]:
    """Compute every block once more in backward, by torch's own means."""
    blocks: list[nn.Module] = [one for one in model.modules() if isinstance(one, BLOCKS)]
    blocks = blocks or list(model.children())
    for block in blocks:
        vars(block)["forward"] = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del vars(block)["forward"]


def _rivals(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> list[Contender]:
    def nothing(_: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    return [
        Contender(PLAIN, copy.deepcopy(model), batch, nothing),
        Contender(AGAIN, copy.deepcopy(model), batch, _checkpointed),
    ]


def _fitted(
    policy: str,
    budget: int,
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    rate: float,
) -> tuple[Contender, dict[str, Any]] | None:
    """Return a contender with a plan, and what was predicted; None where it does not fit."""
    own = copy.deepcopy(model)
    second = (lambda _: PacedTier(rate)) if rate else "host"
    try:
        made = daso.memory.plan(
            own, batch[0], budget, loss=_loss_for(batch[1]), policy=policy, second=second
        )
    except daso.errors.ConfigError:
        return None
    course = made.chosen.simulated
    told = {
        "policy": policy,
        "planned_bytes": made.peak_bytes - made.static.total,
        "rehearsed_bytes": made.measured_bytes - made.static.total,
        "predicted": made.slowdown,
        "swapped_bytes": course.swapped_bytes,
        "recomputed_bytes": made.bytes_of("recompute"),
        "kept_bytes": made.bytes_of("keep"),
    }
    return Contender(policy, own, batch, lambda _: daso.memory.apply(made)), told


def measure(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Measure on one rank; on several, a step in one arena under `daso.DASO`.

    Args:
        plan: What is measured.
        topology: Of the ranks.
    """
    torch.set_num_threads(1)
    if topology.world_size > 1:
        return _captured_daso(plan, topology)
    model, batch = _made(plan)
    whole = daso.memory.plan(model, batch[0], 1 << 50, loss=_loss_for(batch[1]))
    least = floor(whole.profile)
    most = whole.plain.peak_bytes
    found: dict[str, Any] = {
        "model": plan.model,
        "batch": len(batch[0]),
        "units": len(whole.profile.units),
        "static_bytes": whole.static.total,
        "floor_bytes": least,
        "plain_bytes": most,
        "budgets": [
            _at_budget(plan, rate, whole, int(least + (most - least) * part), model, batch)
            | {"part": part, "rate": rate}
            for rate in plan.rates
            for part in plan.parts
        ],
        "captured": _captured(plan) if plan.captured else None,
        "resident": _residents(plan, whole.static.total, least) if plan.folder else None,
    }
    return found


def _at_budget(
    plan: Plan,
    rate: float,
    whole: daso.memory.MemoryPlan,
    capacity: int,
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
) -> dict[str, Any]:
    """Let all ways that fit a budget take turns."""
    rivals = _rivals(model, batch)
    budget = whole.static.total + capacity
    fitted = [_fitted(one, budget, model, batch, rate) for one in POLICIES]
    ours = [one for one in fitted if one is not None]
    told: dict[str, Mapping[str, Any]] = {one.name: more for one, more in ours}
    by_name = {one.name: one for one in (*rivals, *(one for one, _ in ours))}
    for one in by_name.values():
        one.look()
    for name in take_turns(list(by_name), plan.rounds):
        by_name[name].round(plan.steps)
    base = by_name[PLAIN].seconds
    return {
        "capacity_bytes": capacity,
        "rows": [
            one.row(ratio=statistics.median(over(one.seconds, base)), **told.get(one.name, {}))
            for one in by_name.values()
        ],
    }


# --- a step in one arena --------------------------------------------------------------------------


def _captured(plan: Plan) -> dict[str, Any]:
    """Let ordinary steps and one in an arena take turns."""
    model, batch = _made(plan)
    model.zero_grad(set_to_none=True)
    step = daso.memory.CapturedStep(model, _loss, *batch)
    return _step_turns(plan, model, batch, step, model.zero_grad, lambda: None)


def _captured_daso(plan: Plan, topology: Topology) -> dict[str, Any]:
    """Let them take turns where gradients are averaged at every batch; collective."""
    model, batch = _made(plan, topology.rank)
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:
        step = daso.memory.CapturedStep(model, _loss, *batch)
        return {
            "ranks": topology.world_size,
            "nodes": topology.nodes,
            **_step_turns(plan, model, batch, step, optimizer.zero_grad, optimizer.step),
        }


def _loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.flatten(0, -2), targets.flatten())


def _step_turns(
    plan: Plan,
    model: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    step: daso.memory.CapturedStep,
    before: Callable[[], object],
    after: Callable[[], object],
) -> dict[str, Any]:
    """Return seconds of ordinary and captured steps, and their ratio."""
    inputs, targets = batch
    runs: dict[str, Callable[[], object]] = {
        "plain": lambda: _loss(model(inputs), targets).backward(),
        "captured": lambda: step(inputs, targets),
    }

    def once(name: str) -> None:
        before()
        runs[name]()
        after()

    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for name in take_turns([*runs], 3 * plan.rounds):
        once(name)
        start = time.perf_counter()
        for _ in range(plan.steps):
            once(name)
        seconds[name].append((time.perf_counter() - start) / plan.steps)
    ratio = statistics.median(over(seconds["captured"], seconds["plain"]))
    return {"seconds": seconds, "ratio": ratio, **asdict(step.report())}


# --- memory of the process ------------------------------------------------------------------------


def _residents(plan: Plan, static: int, least: int) -> dict[str, int]:
    """Return by how much processes grow that train plainly, and with a file as second memory."""
    budgets = {"plain": 0, "file": static + least + least // 20}
    return {
        name: json.loads(
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import sys; from benchmarks.memory_budget import resident; "
                    "resident(*sys.argv[1:])",
                    *(plan.model, str(budget), plan.folder),
                ],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for name, budget in budgets.items()
    }


def resident(model: str, budget: str, folder: str) -> None:
    """Train in this process; print by how many bytes that made it grow at most.

    Args:
        model: One of `MODELS`.
        budget: Bytes; 0: plain training.
        folder: Of the file that is the second memory.
    """
    torch.set_num_threads(1)
    plan = Plan(model, 1, 1, (), (), captured=False, folder=folder)
    own, batch = _made(plan)
    around: AbstractContextManager[Any] = nullcontext()
    if int(budget):
        made = daso.memory.plan(
            own, batch[0], int(budget), loss=_loss_for(batch[1]), second=f"file:{folder}"
        )
        around = daso.memory.apply(made)
    one = Contender(model, own, batch, lambda _: nullcontext())
    before = _status("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("5")  # the peak begins anew
    with around:
        for _ in range(3):
            one.step()
    print(_status("VmHWM") - before)


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
        lines = dict(line.split(":", 1) for line in file)
    return int(lines[field].split()[0]) * 1024


# --- what is told ---------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    """Return what was found as text."""
    lines = [
        f"{found['model']}, {found['batch']} samples, {found['units']} units: activations "
        f"{found['plain_bytes'] / MiB:.1f} MiB plainly, at least {found['floor_bytes'] / MiB:.1f}"
    ]
    for one in found["budgets"]:
        rate = f"{one['rate'] / 1e9:g} GB/s" if one["rate"] else "as it is"
        capacity = one["capacity_bytes"] / MiB
        lines.append(f"  {capacity:.1f} MiB for activations, second memory {rate}")
        lines += [_line(row) for row in one["rows"]]
    if found["captured"] is not None:
        step = found["captured"]
        lines.append(
            f"  one arena: {step['ratio']:.3f} of an ordinary step's time, "
            f"{step['arena'] / MiB:.2f} MiB, bound {step['bound'] / MiB:.2f}, "
            f"one by one {step['one_by_one'] / MiB:.2f}; "
            f"{step['direct'] + step['in_place']} of {step['ops']} operations allocate nothing, "
            f"the others {step['allocated'] / MiB:.2f} MiB at once"
        )
    if found.get("captured_daso") is not None:
        step = found["captured_daso"]
        lines.append(
            f"  under daso.DASO, {step['ranks']} ranks in {step['nodes']} node(s): "
            f"{step['ratio']:.3f} of an ordinary step's time"
        )
    if found["resident"] is not None:
        grown = {name: nbytes / MiB for name, nbytes in found["resident"].items()}
        lines.append(
            f"  the process grows by {grown['plain']:.0f} MiB plainly, with a file by "
            f"{grown['file']:.0f}"
        )
    return "\n".join(lines)


def _line(row: Mapping[str, Any]) -> str:
    text = f"    {row['name']:<18} {row['ratio']:6.3f} of plain, {row['live_bytes'] / MiB:7.1f} MiB"
    if "policy" in row:
        text += (
            f" (planned {row['planned_bytes'] / MiB:.1f}), predicted {row['predicted']:.3f}, "
            f"swapped {row['swapped_bytes'] / MiB:.1f}, recomputed "
            f"{row['recomputed_bytes'] / MiB:.1f}"
        )
    return text


def figures(found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures that are kept, over all models."""
    hybrids, swapped, over_budget = [], [], []
    for model in found:
        for one in model["budgets"]:
            rows = {row["name"]: row for row in one["rows"]}
            budget = model["static_bytes"] + one["capacity_bytes"]
            over_budget += [
                (model["static_bytes"] + row["live_bytes"]) / budget
                for row in one["rows"]
                if "policy" in row
            ]
            if HYBRID in rows:
                pure = [rows[name]["ratio"] for name in PURE if name in rows]
                hybrids.append(rows[HYBRID]["ratio"] / min(pure))
                if one["part"] >= 0.5 and one["rate"]:
                    part = rows[HYBRID]["swapped_bytes"] / rows["all_swap"]["swapped_bytes"]
                    swapped.append(part)
    steps = [model["captured"] for model in found if model["captured"] is not None]
    worst = {
        "memory_plan_over_budget_worst": over_budget,
        "hybrid_over_best_pure_worst": hybrids,
        "swapped_bytes_ratio": swapped,
        "planned_peak_over_bound": [step["arena"] / step["bound"] for step in steps],
        "captured_step_time_ratio": [step["ratio"] for step in steps],
        "captured_step_time_ratio_daso": [
            model["captured_daso"]["ratio"]
            for model in found
            if model.get("captured_daso") is not None
        ],
    }
    conditions = ", ".join(f"{one['model']} with {one['batch']} samples" for one in found)
    return {
        name: {"value": max(values), "unit": "ratio", "conditions": f"the worst of {conditions}"}
        for name, values in worst.items()
        if values
    }
