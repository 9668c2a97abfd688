"""What benchmarks found, as pictures: accuracy and loss over time, how costs grow."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.growth import AXES, GROWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_courses", "draw_growth", "draw_losses"]

SHOWN = 20  # points of accuracy below the level
UNITS = {"parameters": (10**6, "M parameters"), "chunk_bytes": (2**20, "MiB of a chunk")}


def draw_courses(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw accuracy over seconds of training, one color for every contender and link.

    Args:
        runs: What `scripts/bench time-to-accuracy` found on each link: ``runs`` of its JSON.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    level = runs[0]["plan"]["level"]
    lines = [(run["plan"]["link"], row) for run in runs for row in run["rows"]]
    for color, (link, row) in enumerate(lines):
        for number, course in enumerate(row["courses"]):
            label = None if number else f"{row['name']}, {link}"
            axes.plot(course["seconds"], course["accuracy"], f"C{color}", lw=1.2, label=label)
    axes.axhline(level, color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.set_ylim(max(0, level - SHOWN))
    axes.set_xlabel("seconds of training, log scale")
    axes.set_ylabel("test samples right, %")
    plan = runs[0]["plan"]
    axes.set_title(
        f"{plan['data']}, CNN of {runs[0]['parameters'] / 1e6:.2f} M parameters, nodes of "
        f"{', '.join(map(str, runs[0]['nodes']))} ranks, {plan['epochs']} epochs; "
        f"one line for each seed",
        fontsize=10,
    )
    axes.legend(fontsize=8)
    return figure


def draw_losses(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw losses over seconds and over steps, a pair of panels for every slowness.

    Args:
        runs: What `scripts/bench server` found, as in its JSON under ``runs``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    drawn = [run for run in runs if run["plan"]["slow"] and not run["plan"].get("epochs")]
    figure = Figure(figsize=(10, 0.8 + 3.2 * len(drawn)), layout="constrained")
    panels = figure.subplots(len(drawn), 2, squeeze=False, sharey=True)
    for (left, right), run in zip(panels, drawn, strict=True):
        for color, row in enumerate(run["rows"]):
            for number, course in enumerate(row["courses"]):
                label = None if number else row["name"]
                left.plot(course["seconds"], course["losses"], f"C{color}", lw=1.1, label=label)
                right.plot(course["steps"], course["losses"], f"C{color}", lw=1.1)
        left.set_xlabel("seconds of training")
        right.set_xlabel("steps of rank 0")
        left.set_ylabel("test loss")
        left.set_yscale("log")
        slow = run["plan"]["slow"]
        left.set_title(
            f"the last of {len(run['nodes'])} ranks takes {slow:g} times as long"
            if slow > 1
            else "all ranks alike",
            fontsize=10,
        )
        for axes in (left, right):
            axes.axhline(run["plan"]["loss"], color="0.3", linewidth=1)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=4, fontsize=8)
    return figure


def draw_growth(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw costs against what grows, one panel for every axis, with lines of slope 1 behind.

    Args:
        runs: What `scripts/bench growth` found, as in its JSON under ``runs``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    drawn = [run for run in runs if run["plan"].get("axis") in AXES]
    count = -(-len(drawn) // 2)
    figure = Figure(figsize=(9, 0.8 + 3.2 * count), layout="constrained")
    panels = figure.subplots(count, 2, squeeze=False).ravel()
    for axes, run in zip(panels, drawn, strict=False):
        _draw_axis(axes, run)
    for axes in panels[len(drawn) :]:
        axes.set_visible(False)
    lines, names = panels[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=len(names), fontsize=9)
    return figure


def _draw_axis(axes: Any, run: Mapping[str, Any]) -> None:
    axis, rows = run["plan"]["axis"], run["rows"]
    unit, text = UNITS.get(axis, (1, axis))
    xs = [row[axis] / unit for row in rows]
    for name, label in GROWS.items():
        ys = [row[name] if row[name] > 0 else math.nan for row in rows]
        (line,) = axes.plot(xs, ys, "o-", markersize=4, label=label)
        steep = [ys[0] * x / xs[0] for x in xs]
        axes.plot(xs, steep, ":", color=line.get_color(), linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(xs, [f"{x:g}" for x in xs])
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{text}; dotted: in proportion")
    axes.set_ylabel("ms")
