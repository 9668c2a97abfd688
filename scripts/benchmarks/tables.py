"""The tables of README and docs/, made from the figures that were measured.

A table stands in a page between two lines, and is written anew there:

    <!-- table: step-times -->
    <!-- end of table -->
"""

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.overview import COLUMNS, FIGURES, LINKS, front_ratios, read_figures, step_ratios
from benchmarks.server import ratio_to
from benchmarks.simulations import AUTO, DRIFT, SETTINGS, SLOW, SYNCHRONOUS
from benchmarks.take import read_recipes
from daso.cli.algorithms import costs_of, table

__all__ = ["TABLES", "filled", "main", "pages"]

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->\n", re.DOTALL)
NONE = "-"
OVER_COMPUTE = "step time over compute only"
INNER = {"cnn": "CNN, SGD", "gpt": "GPT, AdamW"}
KERNELS = {  # rows of the table of kernels, as they are called there
    "encode, residual": "`encode`",
    "encode, gradients": "`encode` of gradients",
    "reduce 2 to row": "`reduce` of two",
    "accept 1": "`accept`",
}


def main(words: Sequence[str] | None = None) -> int:
    """Write all tables anew."""
    parser = argparse.ArgumentParser(prog="scripts/bench tables", description=main.__doc__)
    parser.parse_args(words)
    for page in pages():
        before = page.read_text(encoding="utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"written anew: {page.relative_to(ROOT)}")
    return 0


def pages() -> list[Path]:
    """Return README, the list of figures, and the pages of docs/."""
    return [ROOT / "README.md", FIGURES / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """Return a page with its tables as the figures are now."""

    def place(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- table: {name} -->\n\n{TABLES[name]()}\n\n<!-- end of table -->\n"

    return PLACE.sub(place, text)


_read = cache(read_figures)


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def _number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return NONE if value is None else f"{value:.{digits}f}{unit}"


def _times(value: float | None, digits: int = 2) -> str:
    return _number(value, digits, "x")


# --- steps ---------------------------------------------------------------------------------------


def _step_times() -> str:
    """Return step time over compute only, fastest contender first."""
    ratios = step_ratios(_read("train"))
    names = sorted(ratios, key=lambda name: ratios[name])
    head = [OVER_COMPUTE, *LINKS.values()]
    return _lines(head, ([name, *map(_times, ratios[name])] for name in names))


def _loss(points: float | None) -> float | None:
    """Return the loss in nats of a mean probability, in percent."""
    return None if points is None else -log(points / 100)


def _front() -> str:
    """Return step times of a CNN, settled, and of a GPT from its first batch, over compute only.

    Beside them stand the accuracy of the CNN and the held-out loss of the GPT at their ends.
    """
    ratios = front_ratios(_read("train"), _read("train_adamw_start"))
    cnn, gpt = (
        {row["name"]: row["final"] for row in _read(name)["runs"][0]["rows"]}
        for name in ("to_accuracy", "to_accuracy_gpt")
    )
    rows = (
        [name, *map(_times, row), _number(cnn.get(name), 1, " %"), _number(_loss(gpt.get(name)))]
        for name, row in sorted(ratios.items(), key=lambda item: item[1][:2])
    )
    return _lines(["", *COLUMNS, "CNN, accuracy", "GPT, loss"], rows)


def _ratios(name: str, heads: Callable[[Mapping[str, Any]], str], corner: str = "") -> str:
    """Return step times over compute only, a column a run, in the order of the first run.

    Args:
        name: Of the file of figures.
        heads: Returns the head of a column from a run's plan.
        corner: Head of the names.
    """
    runs = _read(name)["runs"]
    ratios = [{row["name"]: row["over_compute"] for row in run["rows"]} for run in runs]
    names = [row for row in ratios[0] if row != "compute only"]
    rows = ([row, *(_times(column.get(row)) for column in ratios)] for row in names)
    return _lines([corner, *(heads(run["plan"]) for run in runs)], rows)


def _starts() -> str:
    """Return seconds from phase to phase of the start of many ranks, and memory of a rank."""
    head = ["ranks", "Python and torch", "`daso.init()`", "torch's optimizer", "`daso.DASO`"]
    rows = []
    for row in _read("start")["rows"]:
        ends = [0.0, *row["seconds"].values()]
        phases = [_number(b - a, 1) for a, b in pairwise(ends)][: len(head) - 1]
        before, after = row["mebibytes"]
        rows.append([str(row["ranks"]), *phases, f"{before:.0f}", f"{after - before:.0f}"])
    return _lines([*head, "MiB of a rank before", "more after a step"], rows)


def _kernels() -> str:
    """Return nanoseconds a number of the kernels, by function and wire, torch's and C's."""
    rows = [row for row in _read("kernels")["rows"] if row["function"] in KERNELS]
    columns = list(rows[0]["ns"])
    head = ["function", "wire", *(name.replace("torch", "torch's operations") for name in columns)]
    return _lines(
        head,
        (
            [KERNELS[row["function"]], row["wire"], *(_number(row["ns"][name]) for name in columns)]
            for row in rows
        ),
    )


def _step_times_on_a_gpu() -> str:
    """Return medians of the newest run of each model and number of ranks."""
    inner = {"resnet50": "SGD", "gpt2": "AdamW"}
    newest = {(len(run["nodes"]), run["plan"]["model"]): run for run in _read("gpu")["runs"]}
    rows = []
    for (ranks, model), run in newest.items():
        cells = []
        for name in ("wrapped", "default", "DDP"):
            pairs = zip(run["seconds"].get(name, ()), run["seconds"]["bare"], strict=False)
            ratios = [one / bare for one, bare in pairs]
            cells.append(_times(median(ratios), 3) if ratios else NONE)
        rows.append([str(ranks), f"{model}, {inner[model]}", *cells])
    head = ["ranks", "model, optimizer", "`Fixed(8, 4)`", "default, first steps", "DDP"]
    return _lines(head, rows)


def _prioritized() -> str:
    figures = _read("prioritized")["figures"]
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
    return _lines(["", *links.values()], rows)


# --- accuracy ------------------------------------------------------------------------------------


def _gap(row: Mapping[str, Any]) -> str:
    several = row["seeds"] > 1 and "gap_error" in row and row["setting"] != SYNCHRONOUS
    return f"{row['gap']:.2f} ± {row['gap_error']:.2f}" if several else f"{row['gap']:.2f}"


def _accuracies(name: str) -> str:
    """Return the rows of the first trial of a file."""
    rows = _read(name)["rows"]
    head = ["setting", "test accuracy, %", "below synchronous, points", "fewer bytes"]
    return _lines(
        head,
        (
            [
                row["setting"],
                f"{row['score']:.2f} ± {row['spread']:.2f}",
                _gap(row),
                f"{row['bytes_ratio']:.1f}x",
            ]
            for row in rows
            if row["trial"] == rows[0]["trial"]
        ),
    )


def _texts(kind: str = "") -> dict[int, dict[str, dict[str, Any]]]:
    """Return the rows of the transformer's trials, by nodes and setting."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in _read("accuracy-text")["rows"]:
        if trial := re.fullmatch(rf"text, (\d+) nodes{kind}", row["trial"]):
            found.setdefault(int(trial[1]), {})[row["setting"]] = row
    return found


def _accuracies_of_text(kind: str = "") -> str:
    trials = _texts(kind)
    most = max(trials)
    counts = {nodes: rows[AUTO]["seeds"] for nodes, rows in trials.items()}
    columns = [f"{nodes} nodes, {n} seed{'s' * (n > 1)}" for nodes, n in counts.items()]

    def cell(nodes: int, setting: str) -> str:
        row = trials[nodes].get(setting)
        if row is None:
            return NONE
        if setting == SYNCHRONOUS:
            return f"{row['score']:.2f} % right"
        return _gap(row) + (f" ({row['seeds']})" if row["seeds"] != counts[nodes] else "")

    rows = []
    for setting in (
        one.name for one in SETTINGS if any(one.name in row for row in trials.values())
    ):
        last = trials[most].get(setting)
        ratio = NONE if last is None else f"{last['bytes_ratio']:.1f}x"
        rows.append([setting, *(cell(nodes, setting) for nodes in trials), ratio])
    return _lines(["setting", *columns, f"fewer bytes, {most} nodes"], rows)


def _restored() -> str:
    """Return gaps beside the gain with which each training ended."""
    trials = _texts()
    settings = (DRIFT, "Fixed(4, 1), delta, bf16", SLOW, AUTO)
    rows = []
    for setting in settings:
        found = [trials[nodes].get(setting) for nodes in trials]
        gains = [NONE if row is None else f"{row['gain']:.2f}" for row in found]
        gain = "1" if set(gains) <= {NONE, "1.00"} else ", ".join(gains)
        rows.append([setting, *(NONE if row is None else _gap(row) for row in found), gain])
    return _lines(["setting", *(f"{nodes} nodes" for nodes in trials), "gain at the end"], rows)


# --- beside the optimizer ------------------------------------------------------------------------


def _servers() -> str:
    names = {
        "`staleness=None`": "eager, unbounded",
        '`staleness=None`, `mode="local_rows"`': "eager, blocks, unbounded",
        "`staleness=4`": "eager, 4 steps apart",
        "`staleness=1`": "eager, 1 step apart",
        "`staleness=0`": "eager, in step",
        "`daso.DASO`, `Auto`": "DASO Auto",
        "`daso.DASO`, `Fixed(1, 0)`": "DASO synchronous",
    }
    plans = [(run["plan"], run) for run in _read("server")["runs"]]
    runs = [run for plan, run in plans if plan["slow"] and not plan["epochs"]]
    head = ["", "last rank 3 times as slow", "1.5 times", "all alike"]
    assert [run["plan"]["slow"] for run in runs] == [3.0, 1.5, 1.0], "as its head says"
    return _lines(
        head,
        ([said, *(_number(ratio_to(run, name)) for run in runs)] for said, name in names.items()),
    )


def _servers_with_momentum() -> str:
    _, alike, slow = _read("server_momentum")["runs"]
    names = ("DDP over gloo", "`staleness=None`", "`staleness=1`")
    rows = []
    for name, *both in zip(names, alike["rows"], slow["rows"], strict=True):
        cells = [f"{mean(one['accuracy'] for one in row['courses']):.2f} %" for row in both]
        seconds = mean(one["lasted"] for one in both[1]["courses"])
        rows.append([name, *cells, f"{seconds:.1f}"])
    return _lines(["", "accuracy, all alike", "last rank 3 times as slow", "seconds"], rows)


def _recoveries() -> str:
    """Return medians over all kills, and the least and the most, in seconds."""
    runs = {row["name"]: row["runs"] for row in _read("recovery")["rows"]}
    killed = "torchft, one killed"
    names = {
        "daso": ["daso, one rank killed"],
        "daso, with a spare, for which the others wait": ["daso, one rank killed, a spare joins"],
        "torchft, heartbeats 5 s, its default": [killed, f"{killed}, started anew"],
        "torchft, heartbeats 1 s": [f"{killed}, 1 s", f"{killed}, started anew, 1 s"],
    }

    def cell(kinds: Sequence[str], what: str) -> str:
        found = [run[what] for kind in kinds for run in runs[kind] if run[what] is not None]
        if not found:
            return NONE
        least, most = (f"{pick(found):.1f}" for pick in (min, max))
        between = "" if least == most else f" ({least} to {most})"
        return f"{median(found):.1f}{between}"

    head = ["", "kills", "the others exchange without it", "one in its place exchanges with them"]
    return _lines(
        head,
        (
            [
                said,
                str(sum(len(runs[kind]) for kind in kinds)),
                *(cell(kinds, what) for what in ("shrink_seconds", "join_seconds")),
            ]
            for said, kinds in names.items()
        ),
    )


def _flows() -> str:
    names = {
        "two ranks: plain torch, gradients averaged": "eager on all ranks, gradients averaged",
        "two ranks: flow, replicas, 32 under way": "flow, replicas, 32 at once",
        "two ranks: flow, replicas, 8 under way": "flow, replicas, 8 at once",
        "two ranks: flow, replicas, 1 under way": "flow, replicas, 1 at once",
        "two ranks: flow, each layer on one, 32 under way": "flow, spread, 32 at once",
        "two ranks: flow, replicas, unbatched": "flow, replicas, 32 at once, unbatched",
        "two ranks: flow, each layer on one, unbatched": "flow, spread, 32 at once, unbatched",
        "one rank: flow, 32 under way": "flow, 1 rank, 32 at once",
        "one rank: flow, unbatched": "flow, 1 rank, 32 at once, unbatched",
        "one rank: plain torch, 2 BLAS threads": "eager, 2 BLAS threads",
        "one rank: `nn.GRU`": "nn.GRU, one by one",
        "one rank: batches of lists of one length": "batches of one length",
    }
    found = _read("flow")
    tasks = [run for run in found["runs"] if "plan" in run]
    ratios = [{row["name"]: row["ratio"] for row in run["rows"]} for run in tasks]
    rows = [[said, *(_times(one.get(name)) for one in ratios)] for said, name in names.items()]
    figure = "simulated_speedup_16_workers"
    suffixes = [
        "" if run["plan"]["task"] == "lists" else f"_{run['plan']['task']}" for run in tasks
    ]
    speedups = [found["figures"][figure + suffix]["value"] for suffix in suffixes]
    simulated = "16 ranks, simulated: flow, replicas, unbatched, over the same on one"
    rows.append([simulated, *(_times(one, 1) for one in speedups)])
    return _lines(["", *(run["plan"]["task"] for run in tasks)], rows)


def _algorithms() -> str:
    return f"```text\n{table(costs_of(256, 25e6))}\n```"


def _nodes() -> str:
    """Return messages, and what the least and the link take, of the chosen plan and others."""
    head = ["parameters", "nodes", "chosen", "messages of KiB", "MB", "ms"]
    head += ["direct: messages of KiB, ms", "ring", "halving (Rabenseifner)"]
    rows = []
    for parameters, words in ((25e6, "25 M"), (1e9, "1 B")):
        for nodes in (2, 4, 8, 16, 64, 256, 1024):
            cost = {row["algorithm"]: row for row in costs_of(nodes, parameters)}
            chosen = cost["auto"]
            messages = f"{chosen['messages']:,} of {chosen['smallest_kibibytes']:,.0f}"
            row = [words, f"{nodes:,}", chosen["plan"], messages]
            row += [f"{chosen['sent_megabytes']:,.0f}", f"{1e3 * chosen['seconds']:,.0f}"]
            for name in ("direct", "ring", "halving"):
                one = cost[name]
                messages = f"{one['messages']:,} of {one['smallest_kibibytes']:,.0f}"
                row.append(f"{messages}, {1e3 * one['seconds']:,.0f}")
            rows.append(row)
    return _lines(head, rows)


def _figures() -> str:
    """Return what each file was taken with, newest first."""
    files = []
    for name, recipe in read_recipes().items():
        found = _read(name)
        commit = found.get("versions", {}).get("commit") or found.get("commit")
        how = f"by hand: {recipe.by_hand}" if recipe.by_hand else f"`take`{recipe.time}"
        files.append((found["date"], [f"`{name}`", (commit or NONE)[:7], found["date"], how]))
    files.sort(key=lambda one: one[0], reverse=True)
    return _lines(["file", "commit", "date", "how"], (row for _, row in files))


TABLES: dict[str, Callable[[], str]] = {
    "front": _front,
    "step-times": _step_times,
    "step-times-of-models": lambda: _ratios(
        "train_models", lambda plan: f"{plan['model']}, {plan['link']}"
    ),
    "step-times-on-a-gpu": _step_times_on_a_gpu,
    "ddp-hooks": lambda: _ratios("ddp_hook", lambda plan: INNER[plan["model"]], OVER_COMPUTE),
    "plateau": lambda: _ratios("train_plateau", lambda plan: LINKS[plan["link"]], OVER_COMPUTE),
    "starts": _starts,
    "kernels": _kernels,
    "prioritized": _prioritized,
    "accuracy": lambda: _accuracies("accuracy"),
    "accuracy-long": lambda: _accuracies("accuracy-long"),
    "accuracy-text": _accuracies_of_text,
    "accuracy-text-wide": lambda: _accuracies_of_text(", wide"),
    "restored": _restored,
    "servers": _servers,
    "servers-with-momentum": _servers_with_momentum,
    "recoveries": _recoveries,
    "flows": _flows,
    "algorithms": _algorithms,
    "nodes": _nodes,
    "figures": _figures,
}
