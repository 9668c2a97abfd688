"""What seldom exchanges cost in accuracy: many simulated nodes against synchronous training.

Every setting trains the same model on the same samples in the same order, for as many epochs, once
for each seed. The nodes of a run are simulated in one process (`daso.train.simulated`): schedules,
wires, merges and bits are the real ones. Nothing is sent, so policies are told how long an exchange
takes, in batches.

    scripts/bench_accuracy --json accuracy.json --plot accuracy.png
    scripts/bench_accuracy --quick
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from daso.comm.mpi import library
from daso.data import ShardedSampler, find_fashion, load_digits, load_fashion, load_text
from daso.environment import data_folder
from daso.examples.cnn import CNN
from daso.examples.transformer import ByteTransformer
from daso.plan.options import Exchange, Gradients, Settings
from daso.plan.policy import Auto, Fixed, Plateau, Qsr
from daso.plan.schedule import Policy
from daso.run.bench.models import loss_of, score
from daso.run.report import versions
from daso.train.optimizer import DASO
from daso.train.outer import MakeOuter
from daso.train.simulated import SimulatedNodes, Times

__all__ = ["main"]

EXCHANGE = 0.5  # batches that an exchange takes: it is hidden, and merged one batch late
TEXT_BYTES = 1_100_000  # of Python's library
SYNCHRONOUS, AUTO = "synchronous, fp32", "Auto, int4"
Pairs = tuple[torch.Tensor, torch.Tensor]


def nesterov(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make an outer optimizer: DiLoCo's, with less momentum."""
    return torch.optim.SGD(params, lr=0.9, momentum=0.3, nesterov=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    policy: Callable[[int, float], Policy]  # of epochs and peak learning rate
    wire: str = "int4"
    merge: str | float = "auto"
    outer: MakeOuter | None = None

    def settings(self) -> Settings:
        """Return it as the optimizer takes it."""
        return Settings(
            wire=self.wire,
            merge=self.merge,
            exchange=Exchange(),
            gradients=Gradients(),
            outer=self.outer is not None,
        )


def fixed(skip: int, wait: int) -> Callable[[int, float], Policy]:
    """Return what makes a fixed policy."""
    return lambda *_: Fixed(skip, wait)


def plateau(epochs: int, _: float) -> Policy:
    """Return the paper's policy with an eighth of the epochs for warm-up and cool-down each."""
    edge = max(1, epochs // 8)
    return Plateau(max(epochs, 2 * edge), warmup=edge, cooldown=edge)


SETTINGS = (
    Setting(SYNCHRONOUS, fixed(1, 0), "fp32"),
    Setting(AUTO, lambda *_: Auto()),
    Setting("Qsr, int4", lambda _, peak: Qsr(1.5 * peak, skip=2, max_skip=64)),
    Setting("Plateau (DASO paper), bf16", plateau, "bf16", "daso"),
    Setting("Fixed(4, 1), delta, bf16", fixed(4, 1), "bf16", "delta"),
    Setting("Fixed(16, 1), int4", fixed(16, 1)),
    Setting("Fixed(32, 1), outer Nesterov, int4", fixed(32, 1), outer=nesterov),
)
QUICK = (SYNCHRONOUS, AUTO, "Plateau (DASO paper), bf16", "Fixed(16, 1), int4")


@dataclass(frozen=True, slots=True)
class Trial:
    """One model on one data set on so many nodes."""

    data: str  # "fashion", "digits" or "text"
    nodes: int
    epochs: int
    samples: int
    batch: int = 16  # samples per node and step

    @property
    def text(self) -> bool:
        """Whether it is the byte-level transformer."""
        return self.data == "text"

    @property
    def peak(self) -> float:
        """Peak learning rate; a cosine takes it to zero."""
        return 0.005 if self.text else 0.05

    @property
    def model(self) -> str:
        """What is trained, and by what."""
        if self.text:
            return "byte-level transformer of width 32, AdamW"
        return "CNN of width 8 with BatchNorm, SGD with momentum 0.9"

    def build(self, seed: int) -> torch.nn.Module:
        """Make the model."""
        torch.manual_seed(seed)
        if self.text:
            return ByteTransformer(64, width=32)
        return CNN(8 if self.data == "digits" else 28, width=8)

    def inner(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Make the inner optimizer."""
        if self.text:
            return torch.optim.AdamW(model.parameters(), lr=self.peak)
        return torch.optim.SGD(model.parameters(), lr=self.peak, momentum=0.9)

    def __str__(self) -> str:
        return f"{self.data}, {self.nodes} nodes"


@dataclass(frozen=True, slots=True)
class Result:
    """What one run gave."""

    score: float  # percent of test samples (bytes of text) right
    loss: float  # mean training loss of the last epoch
    nbytes: int  # between nodes, by all of them
    ddp_nbytes: int  # what averaging fp32 gradients at every batch sends
    exchanges: int
    steps: int
    seconds: float


@cache
def load(data: str, samples: int) -> tuple[Pairs, Pairs]:
    """Return training and test data as whole tensors."""
    return _whole(_data(data, train=True), samples), _whole(_data(data, train=False), 10_000)


def _data(data: str, *, train: bool) -> Any:
    if data == "text":
        return load_text(None, train=train, context=64, max_bytes=TEXT_BYTES)
    if data == "digits":
        return load_digits(train=train)
    return load_fashion(data_folder(), train=train)


def _whole(data: Any, most: int) -> Pairs:
    rows = [data[index] for index in range(min(most, len(data)))]
    return torch.stack([x for x, _ in rows]), torch.stack([torch.as_tensor(y) for _, y in rows])


def run(trial: Trial, name: str, seed: int) -> Result:
    """Train once; in a process of its own."""
    torch.set_num_threads(1)
    start, (train, test) = time.perf_counter(), load(trial.data, trial.samples)
    setting = next(one for one in SETTINGS if one.name == name)
    nodes = SimulatedNodes(
        lambda: trial.build(seed),
        trial.inner,
        trial.nodes,
        policy=setting.policy(trial.epochs, trial.peak),
        settings=setting.settings(),
        outer=setting.outer,
        times=Times(1.0, EXCHANGE),
    )
    losses = [_epoch(trial, nodes, train, seed, epoch) for epoch in range(trial.epochs)]
    numel = sum(p.numel() for p in nodes.models[0].parameters())
    steps = nodes.state.batch
    return Result(
        score=score(nodes.models[0], *test),
        loss=losses[-1],
        nbytes=nodes.global_bytes_sent,
        ddp_nbytes=steps * 2 * (trial.nodes - 1) * 4 * numel,
        exchanges=len(nodes.events),
        steps=steps,
        seconds=time.perf_counter() - start,
    )


def _epoch(trial: Trial, nodes: SimulatedNodes, train: Pairs, seed: int, epoch: int) -> float:
    """Train one epoch; return the mean loss."""
    inputs, targets = train
    samplers = [
        ShardedSampler(len(inputs), rank=rank, size=trial.nodes, batch_size=trial.batch, seed=seed)
        for rank in range(trial.nodes)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    total, length = 0.0, len(samplers[0])
    for number, batches in enumerate(zip(*samplers, strict=True)):
        rate = _rate(trial, (epoch * length + number) / (trial.epochs * length))
        for inner in nodes.inners:
            inner.param_groups[0]["lr"] = rate
        total += nodes.step([_loss(inputs[one], targets[one]) for one in batches])
    nodes.end_epoch(total / length)
    nodes.synchronize()
    return total / length


def _rate(trial: Trial, done: float) -> float:
    """Return the learning rate: 2 % linear warm-up, then a cosine to zero."""
    return trial.peak * min(1.0, done / 0.02 + 0.05) * (1 + math.cos(math.pi * done)) / 2


def _loss(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[torch.nn.Module], torch.Tensor]:
    return lambda model: loss_of(model, inputs, targets)


# --- the whole bench -----------------------------------------------------------------------------


def trials(*, quick: bool) -> Iterator[tuple[Trial, tuple[str, ...]]]:
    """List what is run, and with which settings."""
    images = "fashion" if find_fashion(data_folder()) else "digits"
    everything = tuple(setting.name for setting in SETTINGS)
    if quick:
        yield Trial(images, nodes=16, epochs=6, samples=10_000), QUICK
        return
    yield Trial(images, nodes=16, epochs=20, samples=15_000), everything
    yield Trial(images, nodes=2, epochs=8, samples=6_000), QUICK
    # A byte-level model leaves the frequencies of bytes behind after some 500 steps.
    yield Trial("text", nodes=16, epochs=4, samples=16_000, batch=4), QUICK


def overhead(steps: int) -> float:
    """Return the step time of the wrapped optimizer over the bare one's, on one rank.

    Medians of steps that alternate, so that what else the machine does meets both.
    """
    torch.set_num_threads(1)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(0, 10, (32,))
    runners: list[tuple[torch.nn.Module, torch.optim.Optimizer, list[float]]] = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        cnn = CNN(28, width=16)
        inner = torch.optim.SGD(cnn.parameters(), lr=0.01, momentum=0.9)
        runners.append((cnn, DASO(inner, module=cnn) if wrapped else inner, []))
    for _ in range(steps):
        for model, optimizer, seconds in runners:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss_of(model, images, labels).backward()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
    (_, _, bare), (_, _, wrapped_seconds) = runners
    return statistics.median(wrapped_seconds) / statistics.median(bare)


def summarize(trial: Trial, found: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """Return one row for each setting: means over seeds, against synchronous training."""
    best = statistics.mean(one.score for one in found[SYNCHRONOUS])
    rows = []
    for name, results in found.items():
        scores = [one.score for one in results]
        rows.append(
            {
                "trial": str(trial),
                "setting": name,
                "score": statistics.mean(scores),
                "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
                "gap": best - statistics.mean(scores),
                "loss": statistics.mean(one.loss for one in results),
                "bytes_ratio": statistics.mean(one.ddp_nbytes / one.nbytes for one in results),
                "exchanges": statistics.mean(one.exchanges for one in results),
                "steps": results[0].steps,
                "seeds": len(results),
                "scores": scores,
            }
        )
    return rows


def figures(trial: Trial, rows: list[dict[str, Any]], ratio: float) -> dict[str, dict[str, Any]]:
    """Return the figures of the first trial, named as everywhere."""
    conditions = (
        f"{trial.data}, {trial.model}, {trial.nodes} simulated nodes x batch {trial.batch}, "
        f"{trial.epochs} epochs of {trial.samples} samples, cosine from {trial.peak}, "
        f"{rows[0]['seeds']} seeds, an exchange takes {EXCHANGE} batches; against "
        f"fp32 gradients averaged at every batch"
    )
    text = "_text" if trial.text else ""
    by_name = {row["setting"]: row for row in rows}
    auto, suffix = by_name[AUTO], f"{trial.nodes}_nodes{text}"
    seldom = [row for row in rows if row["bytes_ratio"] >= 100]
    found = {
        f"accuracy_gap_auto_{suffix}": (auto["gap"], "points below synchronous", AUTO),
        f"bytes_ratio_auto_{suffix}": (auto["bytes_ratio"], "times fewer bytes", AUTO),
    }
    if seldom:
        best = min(seldom, key=lambda row: float(row["gap"]))
        name = best["setting"]
        found[f"bytes_ratio_best{text}"] = (best["bytes_ratio"], "times fewer bytes", name)
        found[f"accuracy_gap_best{text}"] = (best["gap"], "points below synchronous", name)
    made = {
        name: {"value": value, "unit": unit, "conditions": f"{setting}: {conditions}"}
        for name, (value, unit, setting) in found.items()
    }
    made["overhead_world_1"] = {
        "value": ratio,
        "unit": "ratio of step times, wrapped over bare",
        "conditions": "CNN of width 16, batch 32, one rank, medians of steps that alternate",
    }
    return made


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned lines."""
    names = ("right %", "+-", "gap", "fewer bytes", "exchanges")
    lines = [f"{'setting':<38}" + "{:>9}{:>6}{:>7}{:>13}{:>11}".format(*names)]
    for row in rows:
        lines.append(
            f"{row['setting']:<38}{row['score']:>9.2f}{row['spread']:>6.2f}{row['gap']:>7.2f}"
            f"{row['bytes_ratio']:>12.1f}x{row['exchanges']:>11.0f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against bytes, one panel for each trial."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["trial"] for row in rows))
    colors = {setting.name: f"C{number}" for number, setting in enumerate(SETTINGS)}
    figure, panels = pyplot.subplots(1, len(names), figsize=(6.2 * len(names), 4.6), squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        mine = [row for row in rows if row["trial"] == name]
        level = next(row["score"] for row in mine if row["setting"] == SYNCHRONOUS)
        panel.axhline(level, color="0.7", linewidth=1, zorder=0)
        for row in mine:
            panel.errorbar(
                row["bytes_ratio"],
                row["score"],
                yerr=row["spread"],
                fmt="o",
                color=colors[row["setting"]],
                capsize=3,
                label=row["setting"],
            )
        panel.set_xscale("log")
        panel.set_xlabel("times fewer bytes between nodes than fp32 DDP")
        panel.set_ylabel("test samples right, %")
        panel.set_title(f"{name}, {mine[0]['steps']} steps, {mine[0]['seeds']} seeds")
        panel.legend(fontsize=7, loc="lower left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code.
    """
    options = _options(words)
    # Not by fork: what threads of torch hold is held for ever in a forked child.
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    rows, first = [], None
    chosen = [one for one in trials(quick=options.quick) if options.only in str(one[0])]
    for trial, names in chosen:
        seeds = range(options.seeds or (1 if options.quick else 3))
        runs = [(name, seed) for seed in seeds for name in names]
        jobs = {one: pool.submit(run, trial, *one) for one in runs}
        found = {name: [jobs[name, seed].result() for seed in seeds] for name in names}
        mine = summarize(trial, found)
        first = first or (trial, mine)
        rows += mine
        print(f"\n{trial}, {mine[0]['steps']} steps, {len(seeds)} seeds\n{table(mine)}", flush=True)
    pool.shutdown()
    if first is None:
        print(f"no trial has {options.only!r} in its name", file=sys.stderr)
        return 2
    ratio = overhead(steps=300 if options.quick else 1000)
    print(f"\nwrapped over bare optimizer, one rank: {ratio:.4f}")
    made = figures(*first, ratio)
    if options.json:
        known = {"versions": versions(library()), "date": date.today().isoformat()}
        options.json.write_text(
            json.dumps({"figures": made, **known, "rows": rows}, indent=2) + "\n", encoding="utf-8"
        )
    if options.plot:
        plot(rows, options.plot)
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_accuracy", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs: minutes")
    parser.add_argument("--only", default="", help="trials whose name has this in it, as text")
    parser.add_argument("--seeds", type=int, default=0, help="runs of each setting (3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    parser.add_argument("--plot", type=Path, help="draw accuracy against bytes to this PNG")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
