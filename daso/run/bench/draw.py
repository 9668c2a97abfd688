"""Step times as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]

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


def save(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw to a PNG file."""
    draw(runs).savefig(path, dpi=130)
