"""The tables of README and docs/, made from the figures that were measured.

A table stands in a page between two lines, and is written anew there:

    <!-- table: step-times -->
    <!-- end of table -->
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.overview import FIGURES, LINKS
from benchmarks.server import ratio_to
from benchmarks.simulations import AUTO, DRIFT, SETTINGS, SLOW, SYNCHRONOUS
from benchmarks.step_tables import (
    INNER,
    NONE,
    OVER_COMPUTE,
    figures_of,
    front,
    in_digits,
    in_times,
    kernels,
    markdown,
    prioritized,
    ratios_of_runs,
    starts,
    step_times,
    step_times_on_a_gpu,
)
from benchmarks.take import read_recipes
from daso.cli.algorithms import costs_of, table

__all__ = ["TABLES", "filled", "main", "pages"]

ROOT = Path(__file__).parents[2]
PLACE = re.compile(r"<!-- table: (\S+) -->\n.*?<!-- end of table -->\n", re.DOTALL)


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


# --- accuracy ------------------------------------------------------------------------------------


def _gap(row: Mapping[str, Any]) -> str:
    several = row["seeds"] > 1 and "gap_error" in row and row["setting"] != SYNCHRONOUS
    return f"{row['gap']:.2f} ± {row['gap_error']:.2f}" if several else f"{row['gap']:.2f}"


def _accuracies(name: str) -> str:
    """Return the rows of the first trial of a file."""
    rows = figures_of(name)["rows"]
    head = ["setting", "test accuracy, %", "below synchronous, points", "fewer bytes"]
    return markdown(
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
    for row in figures_of("accuracy-text")["rows"]:
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
    return markdown(["setting", *columns, f"fewer bytes, {most} nodes"], rows)


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
    return markdown(["setting", *(f"{nodes} nodes" for nodes in trials), "gain at the end"], rows)


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
    plans = [(run["plan"], run) for run in figures_of("server")["runs"]]
    runs = [run for plan, run in plans if plan["slow"] and not plan["epochs"]]
    head = ["", "last rank 3 times as slow", "1.5 times", "all alike"]
    assert [run["plan"]["slow"] for run in runs] == [3.0, 1.5, 1.0], "as its head says"
    return markdown(
        head,
        ([said, *(in_digits(ratio_to(run, name)) for run in runs)] for said, name in names.items()),
    )


def _servers_with_momentum() -> str:
    _, alike, slow = figures_of("server_momentum")["runs"]
    names = ("DDP over gloo", "`staleness=None`", "`staleness=1`")
    rows = []
    for name, *both in zip(names, alike["rows"], slow["rows"], strict=True):
        cells = [f"{mean(one['accuracy'] for one in row['courses']):.2f} %" for row in both]
        seconds = mean(one["lasted"] for one in both[1]["courses"])
        rows.append([name, *cells, f"{seconds:.1f}"])
    return markdown(["", "accuracy, all alike", "last rank 3 times as slow", "seconds"], rows)


def _recoveries() -> str:
    """Return medians over all kills, and the least and the most, in seconds."""
    runs = {row["name"]: row["runs"] for row in figures_of("recovery")["rows"]}
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
    return markdown(
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
    found = figures_of("flow")
    tasks = [run for run in found["runs"] if "plan" in run]
    ratios = [{row["name"]: row["ratio"] for row in run["rows"]} for run in tasks]
    rows = [[said, *(in_times(one.get(name)) for one in ratios)] for said, name in names.items()]
    figure = "simulated_speedup_16_workers"
    suffixes = [
        "" if run["plan"]["task"] == "lists" else f"_{run['plan']['task']}" for run in tasks
    ]
    speedups = [found["figures"][figure + suffix]["value"] for suffix in suffixes]
    simulated = "16 ranks, simulated: flow, replicas, unbatched, over the same on one"
    rows.append([simulated, *(in_times(one, 1) for one in speedups)])
    return markdown(["", *(run["plan"]["task"] for run in tasks)], rows)


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
    return markdown(head, rows)


def _figures() -> str:
    """Return what each file was taken with, newest first."""
    files = []
    for name, recipe in read_recipes().items():
        found = figures_of(name)
        commit = found.get("versions", {}).get("commit") or found.get("commit")
        how = f"by hand: {recipe.by_hand}" if recipe.by_hand else f"`take`{recipe.time}"
        files.append((found["date"], [f"`{name}`", (commit or NONE)[:7], found["date"], how]))
    files.sort(key=lambda one: one[0], reverse=True)
    return markdown(["file", "commit", "date", "how"], (row for _, row in files))


TABLES: dict[str, Callable[[], str]] = {
    "front": front,
    "step-times": step_times,
    "step-times-of-models": lambda: ratios_of_runs(
        "train_models", lambda plan: f"{plan['model']}, {plan['link']}"
    ),
    "step-times-on-a-gpu": step_times_on_a_gpu,
    "ddp-hooks": lambda: ratios_of_runs(
        "ddp_hook", lambda plan: INNER[plan["model"]], OVER_COMPUTE
    ),
    "plateau": lambda: ratios_of_runs(
        "train_plateau", lambda plan: LINKS[plan["link"]], OVER_COMPUTE
    ),
    "starts": starts,
    "kernels": kernels,
    "prioritized": prioritized,
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
