"""What seldom exchanges cost in accuracy: many simulated nodes against synchronous training.

Every setting trains the same model on the same samples in the same order, for as many epochs, once
for each seed. The nodes of a run are simulated in one process (`daso.train.simulated`): schedules,
wires, merges and bits are the real ones. Nothing is sent, so policies are told how long an exchange
takes, in batches.

    scripts/bench accuracy --json accuracy.json --plot accuracy.png
    scripts/bench accuracy --quick
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulations import (
    AUTO,
    CORES,
    DRIFT,
    SETTINGS,
    SLOW,
    SYNCHRONOUS,
    Result,
    Trial,
    run,
    trials,
)
from daso.cli.bench.models import loss_of
from daso.cli.bench.options import at_least_one
from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.examples.cnn import CNN
from daso.strict import json_by_rows
from daso.train.optimizer import DASO

__all__ = ["Found", "best_rates", "figures", "main", "named", "parsed", "summary"]

DESCRIPTION = "What seldom exchanges cost in accuracy, on simulated nodes."


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


EQUAL = 0.1  # points below synchronous that count as none
Found = dict[tuple[str, float], list[Result]]  # by setting and peak learning rate, of all seeds


def best_rates(found: Found) -> dict[str, tuple[float, list[Result]]]:
    """Return for each setting the peak rate at which it ended best, and its runs with that."""
    best: dict[str, tuple[float, list[Result]]] = {}
    for (name, peak), results in found.items():
        if name not in best or _mean(results) > _mean(best[name][1]):
            best[name] = peak, results
    return best


def _mean(results: Sequence[Result]) -> float:
    return statistics.mean(one.score for one in results)


def summarize(trial: Trial, found: Found) -> list[dict[str, Any]]:
    """Return one row for each setting at its best rate, against synchronous training at its own.

    ``gap_error`` is the standard error of the mean difference between runs of the same seed.
    """
    best = best_rates(found)
    level = [one.score for one in best[SYNCHRONOUS][1]]
    return [
        {"trial": str(trial), "setting": name, "peak": peak, **summary(results, level)}
        for name, (peak, results) in best.items()
    ]


def summary(results: Sequence[Result], level: Sequence[float]) -> dict[str, Any]:
    """Return what runs of a setting ended with; synchronous training's scores stand beside."""
    scores = [one.score for one in results]
    gaps = [theirs - mine for theirs, mine in zip(level, scores, strict=True)]
    return {
        "score": statistics.mean(scores),
        "spread": statistics.stdev(scores) if len(scores) > 1 else 0.0,
        "gap": statistics.mean(gaps),
        "gap_error": statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.0,
        "loss": statistics.mean(one.loss for one in results),
        "bytes_ratio": statistics.mean(one.ddp_nbytes / one.nbytes for one in results),
        "exchanges": statistics.mean(one.exchanges for one in results),
        "gain": statistics.mean(one.gain for one in results),
        "steps": results[0].steps,
        "seeds": len(results),
        "scores": scores,
        "losses": [one.loss for one in results],
    }


def figures(trial: Trial, rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the figures of a trial, named as everywhere."""
    by_name = {row["setting"]: row for row in rows}
    auto, suffix = by_name[AUTO], trial.suffix
    seldom = [row for row in rows if row["bytes_ratio"] >= 100]
    equal = [row for row in rows if row["gap"] <= EQUAL]
    found = {
        f"accuracy_gap_auto_{suffix}": (auto["gap"], "points below synchronous", AUTO),
        f"bytes_ratio_auto_{suffix}": (auto["bytes_ratio"], "times fewer bytes", AUTO),
    }
    gaps = ((SLOW, "slow_"), (DRIFT, "before_"), (CORES, ""))
    for setting, kind in gaps:
        if setting in by_name:
            gap = by_name[setting]["gap"]
            found[f"accuracy_gap_{kind}{suffix}"] = (gap, "points below synchronous", setting)
    if trial.kind == "long":
        best = max(equal, key=lambda row: float(row["bytes_ratio"]))
        name = best["setting"]
        ratio = (best["bytes_ratio"], "times fewer bytes", name)
        found["bytes_ratio_at_equal_accuracy_long"] = ratio
    if seldom:
        best = min(seldom, key=lambda row: float(row["gap"]))
        name = best["setting"]
        found[f"bytes_ratio_best_{suffix}"] = (best["bytes_ratio"], "times fewer bytes", name)
        found[f"accuracy_gap_best_{suffix}"] = (best["gap"], "points below synchronous", name)
    return {
        name: {"value": value, "unit": unit, "conditions": _conditions(trial, by_name[setting])}
        for name, (value, unit, setting) in found.items()
    }


def _conditions(trial: Trial, row: Mapping[str, Any]) -> str:
    """Return under which conditions a row was taken."""
    setting = next(one for one in SETTINGS if one.name == row["setting"])
    return (
        f"{setting.name}: {trial.data}, {trial.model}, {trial.nodes} simulated nodes x batch "
        f"{trial.batch}, {row['steps']} steps, cosine from the best of {trial.peaks} for each "
        f"setting, {row['seeds']} seeds, an exchange of everything takes {setting.exchange:g} "
        f"batches in {setting.settings().wires[0]}; against fp32 gradients averaged at every batch"
    )


def overhead_figure(ratio: float) -> dict[str, dict[str, Any]]:
    """Return what the wrapper costs one rank, as a figure."""
    return {
        "overhead_world_1": {
            "value": ratio,
            "unit": "ratio of step times, wrapped over bare",
            "conditions": "CNN of width 16, batch 32, one rank, medians of steps that alternate",
        }
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as aligned lines."""
    names = ("right %", "+-", "gap", "+-", "loss", "rate", "gain", "fewer bytes", "exchanges")
    layout = "{:>9}{:>6}{:>7}{:>6}{:>8}{:>8}{:>6}{:>13}{:>11}"
    lines = [f"{'setting':<50}" + layout.format(*names)]
    for row in rows:
        lines.append(
            f"{row['setting']:<50}{row['score']:>9.2f}{row['spread']:>6.2f}{row['gap']:>7.2f}"
            f"{row['gap_error']:>6.2f}{row['loss']:>8.3f}{row['peak']:>8g}{row['gain']:>6.2f}"
            f"{row['bytes_ratio']:>12.1f}x{row['exchanges']:>11.0f}"
        )
    return "\n".join(lines)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw accuracy against bytes, one panel for each trial."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["trial"] for row in rows))
    settings = dict.fromkeys(row["setting"] for row in rows)
    colors = {setting: f"C{number}" for number, setting in enumerate(settings)}
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


def write(path: Path, made: dict[str, dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    """Write figures and rows, and of which versions they are."""
    known = {"versions": versions(library()), "date": date.today().isoformat()}
    text = json_by_rows({"figures": made, **known, "rows": rows})
    path.write_text(text + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code.
    """
    options = parsed(words)
    # Not by fork: what threads of torch hold is held for ever in a forked child.
    pool = ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn"))
    rows: list[dict[str, Any]] = []
    made: dict[str, dict[str, Any]] = {}
    for trial, everything in named(options.only, list(trials(quick=options.quick))):
        wanted = (SYNCHRONOUS, AUTO, *(options.setting or everything))
        names = [name for name in everything if name in wanted]
        seeds = range(options.seeds or (1 if options.quick else trial.seeds))
        cells = [(name, peak) for name in names for peak in trial.peaks]
        runs = [(name, seed, peak) for seed in seeds for name, peak in cells]
        jobs = {one: pool.submit(run, trial, *one) for one in runs}
        found = {
            (name, peak): [jobs[name, seed, peak].result() for seed in seeds]
            for name, peak in cells
        }
        mine = summarize(trial, found)
        made |= figures(trial, mine)
        rows += mine
        print(f"\n{trial}, {mine[0]['steps']} steps, {len(seeds)} seeds\n{table(mine)}", flush=True)
        if options.json:
            write(options.json, made, rows)
    pool.shutdown()
    if not rows:
        print(f"no trial has {options.only!r} in its name", file=sys.stderr)
        return 2
    ratio = overhead(steps=300 if options.quick else 1000)
    print(f"\nwrapped over bare optimizer, one rank: {ratio:.4f}")
    if options.json:
        write(options.json, made | overhead_figure(ratio), rows)
    if options.plot:
        plot(rows, options.plot)
    return 0


Listed = Sequence[tuple[Trial, tuple[str, ...]]]


def named(words: str, listed: Listed) -> Listed:
    """Return the trial of a name, or those that have it in theirs."""
    whole = [one for one in listed if str(one[0]) == words]
    return whole or [one for one in listed if words in str(one[0])]


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what a command line says."""
    parser = argparse.ArgumentParser(prog="scripts/bench accuracy", description=DESCRIPTION)
    parser.add_argument("--quick", action="store_true", help="one seed, few epochs: minutes")
    parser.add_argument(
        "--only", default="", help="the trial of this name, or whose have it in them"
    )
    parser.add_argument("--seeds", type=at_least_one, help="runs of each setting (1 to 5)")
    parser.add_argument(
        "--setting",
        action="append",
        choices=[setting.name for setting in SETTINGS],
        help="run this one beside synchronous training and Auto, not all; may be repeated",
    )
    parser.add_argument("--jobs", type=at_least_one, default=2, help="runs at a time")
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    parser.add_argument("--plot", type=Path, help="draw accuracy against bytes to this PNG")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
