"""Tables of step times, kernels and starts, and the parts that all tables are made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.overview import (
    COLUMNS,
    LINKS,
    front_ends,
    front_ratios,
    read_figures,
    step_ratios,
)

__all__ = [
    "INNER",
    "NONE",
    "OVER_COMPUTE",
    "figures_of",
    "front",
    "in_digits",
    "in_times",
    "kernels",
    "markdown",
    "prioritized",
    "ratios_of_runs",
    "starts",
    "step_times",
    "step_times_on_a_gpu",
]

NONE = "-"
OVER_COMPUTE = "step time over compute only"
INNER = {"cnn": "CNN, SGD", "gpt": "GPT, AdamW"}
KERNELS = {  # rows of the table of kernels, as they are called there
    "encode, residual": "`encode`",
    "encode, gradients": "`encode` of gradients",
    "reduce 2 to row": "`reduce` of two",
    "accept 1": "`accept`",
}

figures_of = cache(read_figures)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def in_digits(value: float | None, digits: int = 2, unit: str = "") -> str:
    """Return a number as a cell; None: it was not measured."""
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def in_times(value: float | None, digits: int = 2) -> str:
    """Return a ratio as a cell."""
    return in_digits(value, digits, "x")


def step_times() -> str:
    """Return step time over compute only, fastest contender first."""
    ratios = step_ratios(figures_of("train"))
    names = sorted(ratios, key=lambda name: ratios[name])
    head = [OVER_COMPUTE, *LINKS.values()]
    return markdown(head, ([name, *map(in_times, ratios[name])] for name in names))


def front() -> str:
    """Return step times of a CNN, settled, and of a GPT from its first batch, over compute only.

    With the accuracy of the CNN and the held-out loss of the GPT at their ends.
    """
    ratios = front_ratios(figures_of("train"), figures_of("train_adamw_start"))
    ends = front_ends(figures_of("to_accuracy"), figures_of("to_accuracy_gpt"))
    rows = (
        [name, *map(in_times, row), in_digits(ends[name][0], 1, " %"), in_digits(ends[name][1])]
        for name, row in sorted(ratios.items(), key=lambda item: item[1][:2])
    )
    return markdown(["", *COLUMNS, "CNN, accuracy", "GPT, loss"], rows)


def ratios_of_runs(name: str, heads: Callable[[Mapping[str, Any]], str], corner: str = "") -> str:
    """Return step times over compute only, a column a run, in the order of the first run.

    Args:
        name: Of the file of figures.
        heads: Returns the head of a column from a run's plan.
        corner: Head of the names.
    """
    runs = figures_of(name)["runs"]
    ratios = [{row["name"]: row["over_compute"] for row in run["rows"]} for run in runs]
    names = [row for row in ratios[0] if row != "compute only"]
    rows = ([row, *(in_times(column.get(row)) for column in ratios)] for row in names)
    return markdown([corner, *(heads(run["plan"]) for run in runs)], rows)


def starts() -> str:
    """Return seconds from phase to phase of the start of many ranks, and memory of a rank."""
    head = ["ranks", "Python and torch", "`daso.init()`", "torch's optimizer", "`daso.DASO`"]
    rows = []
    for row in figures_of("start")["rows"]:
        ends = [0.0, *row["seconds"].values()]
        phases = [in_digits(b - a, 1) for a, b in pairwise(ends)][: len(head) - 1]
        before, after = row["mebibytes"]
        rows.append([str(row["ranks"]), *phases, f"{before:.0f}", f"{after - before:.0f}"])
    return markdown([*head, "MiB of a rank before", "more after a step"], rows)


def kernels() -> str:
    """Return nanoseconds a number of the kernels, by function and wire, torch's and C's."""
    rows = [row for row in figures_of("kernels")["rows"] if row["function"] in KERNELS]
    columns = list(rows[0]["ns"])
    head = ["function", "wire", *(name.replace("torch", "torch's operations") for name in columns)]
    return markdown(
        head,
        (
            [
                KERNELS[row["function"]],
                row["wire"],
                *(in_digits(row["ns"][name]) for name in columns),
            ]
            for row in rows
        ),
    )


def step_times_on_a_gpu() -> str:
    """Return medians of the newest run of each model and number of ranks."""
    inner = {"resnet50": "SGD", "gpt2": "AdamW"}
    newest = {(len(run["nodes"]), run["plan"]["model"]): run for run in figures_of("gpu")["runs"]}
    rows = []
    for (ranks, model), run in newest.items():
        cells = []
        for name in ("wrapped", "default", "DDP"):
            pairs = zip(run["seconds"].get(name, ()), run["seconds"]["bare"], strict=False)
            ratios = [one / bare for one, bare in pairs]
            cells.append(in_times(median(ratios), 3) if ratios else NONE)
        rows.append([str(ranks), f"{model}, {inner[model]}", *cells])
    head = ["ranks", "model, optimizer", "`Fixed(8, 4)`", "default, first steps", "DDP"]
    return markdown(head, rows)


def prioritized() -> str:
    """Return step times of gradients in portions over those of the default."""
    figures = figures_of("prioritized")["figures"]
    models = {
        "the CNN, 4.6 M parameters, most of them in its last layers but one": "",
        "layers that sleep as on a device, half of 4.6 M parameters in the first": "device-early_",
    }
    links = {"500mbit": "500 Mbit/s", "1gbit": "1 Gbit/s", "2gbit": "2 Gbit/s"}
    rows = (
        [
            label,
            *(
                f"{figures[f'prioritized_over_default_{model}{link}']['value']:.2f}"
                for link in links
            ),
        ]
        for label, model in models.items()
    )
    return markdown(["", *links.values()], rows)
