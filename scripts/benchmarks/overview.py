"""The picture of the README: step times beside rivals', accuracy beside synchronous training."""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "LINKS",
    "draw_overview",
    "front_ends",
    "front_ratios",
    "gaps_of_default",
    "main",
    "read_figures",
    "step_ratios",
]

FIGURES = Path(__file__).parents[1] / "figures"
LINKS = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
# Of the picture and the table of the README.
COLUMNS = (*(f"CNN, SGD, {link}" for link in LINKS.values()), "GPT, AdamW, 1 Gbit/s")
COLORS = {  # told apart by the colour-blind
    "DASO Auto": "#0072b2",
    "PostLocalSGD, every 64": "#56b4e9",
    "DDP, gloo, PowerSGD": "#f0e442",
    "PostLocalSGD, every 4": "#e69f00",
    "DDP, gloo, fp16": "#d55e00",
    "Horovod, fp16": "#cc79a7",
    "DDP, gloo": "#999999",
    "Horovod": "#009e73",
}
TEXT_NODES = (2, 4, 8, 16)
MARKS = (("#0072b2", "o", -0.1), ("#d55e00", "s", 0.1), ("#009e73", "D", 0.0))


def main(words: Sequence[str] | None = None) -> int:
    """Draw it."""
    parser = argparse.ArgumentParser(prog="scripts/bench overview", description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=Path("docs/overview.png"))
    path = parser.parse_args(words).path
    names = ("train", "train_adamw_start", "accuracy-text", "to_accuracy")
    draw_overview(*map(read_figures, names)).savefig(path, dpi=160)
    print(f"written to {path}")
    return 0


def read_figures(name: str) -> dict[str, Any]:
    """Return a file of figures."""
    found: dict[str, Any] = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return found


def step_ratios(train: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return step time over compute only of each contender that ran, by link."""
    runs = {run["plan"]["link"]: run["rows"] for run in train["runs"]}
    ratios = [{row["name"]: row["over_compute"] for row in runs[link]} for link in LINKS]
    return {name: [one[name] for one in ratios] for name in COLORS if name in ratios[0]}


def front_ratios(
    train: Mapping[str, Any], adamw: Mapping[str, Any]
) -> dict[str, list[float | None]]:
    """Return step time over compute only of each contender, by `COLUMNS`; None: it did not run."""
    (run,) = (run for run in adamw["runs"] if run["plan"]["model"] == "gpt")
    gpt = {row["name"]: row["over_compute"] for row in run["rows"]}
    return {name: [*ratios, gpt.get(name)] for name, ratios in step_ratios(train).items()}


def front_ends(
    to_accuracy: Mapping[str, Any], to_accuracy_gpt: Mapping[str, Any]
) -> dict[str, tuple[float | None, float | None]]:
    """Return the CNN's accuracy in percent and the GPT's loss in nats at the end, at 1 Gbit/s.

    By contender; None: it did not run.
    """
    cnn, gpt = (
        {row["name"]: row["final"] for row in figures["runs"][0]["rows"]}
        for figures in (to_accuracy, to_accuracy_gpt)
    )
    # The accuracy of text is its mean probability.
    losses = {name: -math.log(percent / 100) for name, percent in gpt.items()}
    return {name: (cnn.get(name), losses.get(name)) for name in COLORS}


def gaps_of_default(
    text: Mapping[str, Any], to_accuracy: Mapping[str, Any]
) -> dict[str, dict[str, tuple[float, float]]]:
    """Return points of accuracy that the default ends above synchronous, with standard errors.

    By how often nodes exchange, then by what is trained.
    """
    series = {"at every batch": "Auto, int4", "link 12 times slower": "Auto, link 12 times slower"}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for label, setting in series.items():
        rows = {row["trial"]: row for row in text["rows"] if row["setting"] == setting}
        found[label] = {
            f"text,\nAdamW,\n{nodes} nodes": (-row["gap"], row["gap_error"])
            for nodes in TEXT_NODES
            for row in [rows[f"text, {nodes} nodes"]]
        }
    found["as on the left"] = {
        f"CNN,\nSGD,\n{LINKS[run['plan']['link']]}": _gap_of_runs(run)
        for run in to_accuracy["runs"]
    }
    return found


def _gap_of_runs(run: Mapping[str, Any]) -> tuple[float, float]:
    """Return how far the default ends above the first row, and the standard error over seeds."""
    ends = [[course["accuracy"][-1] for course in row["courses"]] for row in run["rows"][:2]]
    gaps = [mine - theirs for theirs, mine in zip(*ends, strict=True)]
    return statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5


def draw_overview(
    train: Mapping[str, Any],
    adamw: Mapping[str, Any],
    text: Mapping[str, Any],
    to_accuracy: Mapping[str, Any],
) -> "Figure":
    """Draw both halves, from the files of figures that `main` names."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _draw_steps(left, front_ratios(train, adamw))
    _draw_gaps(right, gaps_of_default(text, to_accuracy))
    return figure


def _draw_steps(axes: "Axes", ratios: Mapping[str, Sequence[float | None]]) -> None:
    """Draw a group of bars a column, without places for contenders that did not run."""
    width = 0.85 / len(ratios)
    for column in range(len(COLUMNS)):
        known = ((name, row[column]) for name, row in ratios.items())
        heights = {name: height for name, height in known if height is not None}
        for at, (name, height) in enumerate(heights.items()):
            place = column + (at - (len(heights) - 1) / 2) * width
            label = "" if column else name
            bar = axes.bar([place], [height], width, label=label, color=COLORS[name])
            text = f"{height:.2f}" if height < 10 else f"{height:.0f}"
            axes.bar_label(bar, [text], fontsize=6.5, padding=1)
    axes.axhline(1, color="0.3", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(0.7, 60)
    axes.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes.set_yticks([], minor=True)
    axes.set_xticks(
        range(len(COLUMNS)),
        [name.replace("SGD, ", "SGD,\n").replace("AdamW, ", "AdamW,\n") for name in COLUMNS],
        fontsize=9,
    )
    axes.set_ylabel("step time over compute only (log)")
    axes.set_title("Time: less is better", fontsize=11)
    axes.legend(fontsize=8, loc="upper left")


def _draw_gaps(axes: "Axes", gaps: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    names = list(dict.fromkeys(name for points in gaps.values() for name in points))
    for (label, points), (color, mark, aside) in zip(gaps.items(), MARKS, strict=True):
        places = [names.index(name) + aside for name in points]
        heights, errors = zip(*points.values(), strict=True)
        axes.errorbar(places, heights, errors, fmt=mark, color=color, capsize=4, label=label)
    axes.axhline(0, color="0.3", linewidth=1)
    axes.set_xlim(-0.6, len(names) - 0.4)
    lowest = min(gap - error for points in gaps.values() for gap, error in points.values())
    axes.set_ylim(math.floor(lowest), 1)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel("points above synchronous training")
    axes.legend(title="nodes exchange", fontsize=9, title_fontsize=9, loc="lower left")
    axes.set_title("Accuracy of the default: 0 is synchronous", fontsize=11)
