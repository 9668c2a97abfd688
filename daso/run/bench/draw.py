"""What benches found, as pictures: step times, accuracy over time, how costs grow."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daso.run.bench.growth import AXES, GROWS
from daso.run.timeline import Timeline
from daso.trace import EXCHANGE, KINDS, MERGE, NODE, NODES, SEND, STEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "draw",
    "draw_courses",
    "draw_efficiency",
    "draw_growth",
    "draw_losses",
    "draw_timeline",
    "save",
]

SHOWN = 20  # points of accuracy below the level
UNITS = {"parameters": (10**6, "M parameters"), "chunk_bytes": (2**20, "MiB of a chunk")}
DRAWN = 16  # ranks
COLOURS = {
    STEP: "0.88",
    SEND: "tab:blue",
    MERGE: "tab:green",
    NODES: "tab:red",
    NODE: "tab:orange",
    EXCHANGE: "tab:purple",
}
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
        ratios = {row["name"]: row["over_compute"] for row in run["rows"] if row["name"] in names}
        places = [names.index(name) + (at + 0.5) * width - BAR / 2 for name in ratios]
        bars = axes.barh(places, list(ratios.values()), width, label=run["plan"]["link"])
        axes.bar_label(bars, [f"{one:.2f}x" for one in ratios.values()], padding=3, fontsize=8)
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


def draw_efficiency(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw predicted efficiency over nodes, one panel for every link and one line for every policy.

    Args:
        rows: What `daso predict` found, as in its JSON under ``rows``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(row["link"] for row in rows))
    figure = Figure(figsize=(1.5 + 4 * len(links), 3.6), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for axes, link in zip(panels, links, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            mine = [row for row in rows if (row["link"], row["policy"]) == (link, policy)]
            nodes, parts = [row["nodes"] for row in mine], [100 * row["efficiency"] for row in mine]
            axes.plot(nodes, parts, marker="o", markersize=4, label=policy)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({row["nodes"] for row in rows}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 105)
        axes.grid(visible=True, alpha=0.3)
        axes.set_xlabel("nodes")
        axes.set_title(f"link {link}", fontsize=10)
    panels[0].set_ylabel("computing over a step, %\n(predicted, not measured)")
    panels[0].legend(fontsize=8)
    return figure


def draw_courses(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw accuracy over seconds of training, one color for every contender and link.

    Args:
        runs: What `daso bench time-to-accuracy` found on each link, as in its JSON under ``runs``.

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
        runs: What `daso bench server` found, as in its JSON under ``runs``.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure

    drawn = [run for run in runs if run["plan"]["slow"]]
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
        runs: What `daso bench growth` found, as in its JSON under ``runs``.

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


def draw_timeline(timeline: Timeline, steps: int = 12) -> "Figure":
    """Draw what every rank did during so many steps in the middle of a recording.

    A rank has two lines: above what its training thread did, below the exchanges beside it.

    Args:
        timeline: From `daso.run.timeline.read_timeline`; the first 16 ranks are drawn.
        steps: How many, about.

    Returns:
        The figure.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = timeline.ranks[:DRAWN]
    taken = [span for span in ranks[0].spans if span.kind == STEP]
    first = max(0, len(taken) // 2 - steps // 2)
    shown = taken[first : first + steps]
    begins, ends = shown[0].begins, shown[-1].ends
    figure = Figure(figsize=(11, 1.4 + 0.7 * len(ranks)), layout="constrained")
    axes = figure.add_subplot()
    for number, rank in enumerate(ranks):
        for kind, colour in COLOURS.items():
            place = (number + 0.02, 0.36) if kind == EXCHANGE else (number - 0.4, 0.36)
            bars = [
                (1e3 * (span.begins - begins), 1e3 * (span.ends - span.begins))
                for span in rank.spans
                if span.kind == kind and span.ends > begins and span.begins < ends
            ]
            border = 0.5 if kind == STEP else 0
            axes.broken_barh(bars, place, facecolor=colour, edgecolor="0.5", linewidth=border)
    axes.set_xlim(0, 1e3 * (ends - begins))
    axes.set_yticks(range(len(ranks)), [f"rank {n}" for n in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    patches = [Patch(color=colour, label=KINDS[kind]) for kind, colour in COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=len(patches), fontsize=8)
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


def save(figure: "Figure", path: Path) -> None:
    """Write a figure to a PNG file."""
    figure.savefig(path, dpi=130)
