"""Step times, and how costs grow, as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daso.run.bench.growth import AXES, GROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "draw_growth", "save"]

BAR = 0.8  # of the space between two contenders, for all links together


def draw(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw step times over compute only, one bar for every contender and link.

    Args:
        runs: What `daso bench train` found on each link, as in its JSON under ``runs``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    names = [row["name"] for row in runs[0]["rows"]][1:]  # the first is compute only
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(names) * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    width = BAR / len(runs)
    for at, run in enumerate(runs):
        ratios = {row["name"]: row["over_compute"] for row in run["rows"]}
        places = [index + (at + 0.5) * width - BAR / 2 for index in range(len(names))]
        bars = axes.barh(places, [ratios[n] for n in names], width, label=run["plan"]["link"])
        axes.bar_label(bars, [f"{ratios[name]:.2f}x" for name in names], padding=3, fontsize=8)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("step time over compute only, log scale")
    plan = runs[0]["plan"]
    axes.set_title(
        f"{plan['model']}, {runs[0]['parameters'] / 1e6:.2f} M parameters, nodes of "
        f"{', '.join(map(str, runs[0]['nodes']))} ranks, medians of {plan['rounds']} rounds",
        fontsize=10,
    )
    axes.legend(title="link")
    return figure


def draw_growth(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw costs against what grows, one panel for every axis, with lines of slope 1 behind.

    Args:
        runs: What `daso bench growth` found, as in its JSON under ``runs``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    drawn = [run for run in runs if run["plan"].get("axis") in AXES]
    figure = Figure(figsize=(9, 3.4 * -(-max(1, len(drawn)) // 2)), layout="constrained")
    panels = figure.subplots(-(-max(1, len(drawn)) // 2), 2, squeeze=False).flat
    for axes, run in zip(panels, drawn, strict=False):
        axis, rows = run["plan"]["axis"], run["rows"]
        xs = [row[axis] for row in rows]
        for name, text in GROWS.items():
            ys = [row[name] if row[name] > 0 else float("nan") for row in rows]
            (line,) = axes.plot(xs, ys, "o-", markersize=4, label=text)
            linear = [ys[0] * x / xs[0] for x in xs]
            axes.plot(xs, linear, ":", color=line.get_color(), linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(axis)
        axes.set_ylabel("ms")
    for axes in figure.axes[len(drawn) :]:
        axes.set_visible(False)
    figure.axes[0].legend(fontsize=8)
    figure.suptitle("costs as something grows; dotted: in proportion", fontsize=10)
    return figure


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to a PNG file."""
    figure.savefig(path, dpi=130)
