"""Trains rows of an accuracy file again, and compares what they end with to the last bit.

Simulated nodes are deterministic: code that ends where older code ended changed no arithmetic, and
such a row is as good as one taken now. Rows that end the same say so under `repeated`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from typing import Any

from benchmarks.overview import FIGURES
from benchmarks.simulations import Result, Trial, run, trials
from daso.cli.bench.options import at_least_one
from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.plan.strict import json_by_rows

__all__ = ["Repeat", "main", "repeats", "told"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A run of a row, again.

    Args:
        row: Its index in the file.
        trial: Of the row.
        setting: Of the row.
        seed: Of the run.
        peak: Learning rate of the row.
        score: That the run ended with, in percent of test samples.
    """

    row: int
    trial: Trial
    setting: str
    seed: int
    peak: float
    score: float


def main(words: Sequence[str] | None = None) -> int:
    """Run them, print what each ended with, and mark the rows that ended the same.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code: 1 where a run ended elsewhere.
    """
    parser = argparse.ArgumentParser(prog="scripts/bench repeat", description=__doc__)
    parser.add_argument("name", help="of a file: accuracy, accuracy-text ...")
    parser.add_argument("--only", default="", help="rows whose trial has this in its name")
    parser.add_argument("--setting", default="", help="rows whose setting has this in its name")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="of each row (1)")
    parser.add_argument("--jobs", type=at_least_one, default=2, help="runs at a time")
    options = parser.parse_args(words)
    path = FIGURES / f"{options.name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    listed = [
        one
        for one in repeats(found["rows"], options.seeds)
        if options.only in str(one.trial) and options.setting in one.setting
    ]
    commit = versions(library())["commit"]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(run, one.trial, one.setting, one.seed, one.peak) for one in listed]
        other = set()
        for one, job in zip(listed, jobs, strict=True):
            print(told(one, job.result()), flush=True)
            if job.result().score != one.score:
                other.add(one.row)
    for row in {one.row for one in listed} - other:
        again = {"commit": commit, "date": date.today().isoformat(), "seeds": options.seeds}
        found["rows"][row]["repeated"] = again
    path.write_text(json_by_rows(found) + "\n", encoding="utf-8")
    return int(bool(other))


def repeats(rows: Sequence[Mapping[str, Any]], seeds: int) -> Iterator[Repeat]:
    """Yield the first runs of each row whose trial is still one.

    Args:
        rows: Of a file of figures.
        seeds: How many runs of each.
    """
    known = {str(trial): trial for trial, _ in trials(quick=False)}
    for index, row in enumerate(rows):
        numbers = row.get("seed_numbers", range(len(row["scores"])))
        for seed, score in list(zip(numbers, row["scores"], strict=True))[:seeds]:
            if row["trial"] in known:
                yield Repeat(index, known[row["trial"]], row["setting"], seed, row["peak"], score)


def told(one: Repeat, now: Result) -> str:
    """Return a line that says what a run ended with, then and now."""
    same = "the same" if now.score == one.score else f"not {one.score:.4f}"
    return (
        f"{one.trial}: {one.setting}, rate {one.peak:g}, seed {one.seed}: "
        f"{now.score:.4f} %, {same}; {now.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
