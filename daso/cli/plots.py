"""Plots of step times, efficiency and recorded steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from daso.cli.bench.names import size_of_nodes
from daso.cli.outputs import writing
from daso.timeline.report import Timeline
from daso.trace import EXCHANGE, KINDS, MERGE, SEND, STEP, WAIT_INTER_NODE, WAIT_INTRA_NODE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = 16  # ranks
COLOURS = {
    STEP: "0.88",
    SEND: "tab:blue",
    MERGE: "tab:green",
    WAIT_INTER_NODE: "tab:red",
    WAIT_INTRA_NODE: "tab:orange",
    EXCHANGE: "tab:purple",
}
BAR = 0.8  # of the space between two contenders, for all links together


def draw(runs: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw step times over compute only, one bar for every contender and link."""
    from matplotlib.figure import Figure

    names = [row["name"] for row in runs[0]["rows"]][1:]  # the first is compute only
    figure = Figure(figsize=(8, 1.2 + 0.35 * len(names) * len(runs)), layout="constrained")
    axes = figure.add_subplot()
    width = BAR / len(runs)
    for at, run in enumerate(runs):
        ratios = {row["name"]: row["over_compute"] for row in run["rows"] if row["name"] in names}
        places = [names.index(name) + (at + 0.5) * width - BAR / 2 for name in ratios]
        bars = axes.barh(places, list(ratios.values()), width, label=run["plan"]["link"])
        axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in ratios.values()], padding=3, fontsize=8)
    axes.axvline(1, color="0.3", linewidth=1)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("step time over compute only, log scale")
    plan = runs[0]["plan"]
    axes.set_title(
        f"{plan['model']}, {runs[0]['parameters'] / 1e6:.2f} M parameters, "
        f"{size_of_nodes(runs[0]['nodes'])}, medians of {plan['rounds']} rounds",
        fontsize=10,
    )
    axes.legend(title="link")
    return figure


def draw_efficiency(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw predicted efficiency over nodes: a panel for every link, a line for every policy."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(row["link"] for row in rows))
    figure = Figure(figsize=(1.5 + 4 * len(links), 3.6), layout="constrained")
    panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
    for axes, link in zip(panels, links, strict=True):
        for policy in dict.fromkeys(row["policy"] for row in rows):
            rows_of_line = [row for row in rows if (row["link"], row["policy"]) == (link, policy)]
            nodes, parts = (
                [row["nodes"] for row in rows_of_line],
                [100 * row["efficiency"] for row in rows_of_line],
            )
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


def draw_timeline(timeline: Timeline, steps: int = 12) -> "Figure":
    """Draw the activity of every rank during some steps in the middle of a recording.

    A rank has two lines: its training thread above, its exchanges below.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = timeline.ranks[:DRAWN]
    step_spans = [span for span in ranks[0].spans if span.kind == STEP]
    first = max(0, len(step_spans) // 2 - steps // 2)
    shown = step_spans[first : first + steps]
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


def save(figure: "Figure", path: Path, content: str) -> None:
    """Write a figure, and print its file and content; the file's suffix selects the format."""
    with writing(path):
        figure.savefig(path, dpi=130)
    print(f"{path}: {content}", flush=True)
