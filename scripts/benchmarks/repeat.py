"""Trains rows of an accuracy file again, and compares the scores that they end with.

Simulated nodes are deterministic: a row whose runs end with the same score, and the same loss where
the file has that of each run, is as good as one taken now. Such rows say so under `repeated`. Only
the rate that a row has is looked at; rows that are taken anew are trained at all rates.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from itertools import count, groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.accuracy import Found, best_rates, figures, summary
from benchmarks.overview import FIGURES
from benchmarks.simulations import SYNCHRONOUS, Result, Trial, run, trials
from daso.cli.bench.options import at_least_one
from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.strict import json_by_rows

__all__ = ["Repeat", "line_of", "main", "repeats", "retake"]


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
        loss: Mean training loss of its last epoch; None where the file does not have it.
    """

    row: int
    trial: Trial
    setting: str
    seed: int
    peak: float
    score: float
    loss: float | None = None

    def ends_as(self, now: Result) -> bool:
        """Return whether it ended the same."""
        return now.score == self.score and self.loss in (None, now.loss)


def main(words: Sequence[str] | None = None) -> int:
    """Run them, print what each ended with, and mark the rows that ended the same.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code: 1 where a row ended elsewhere and was not retaken.
    """
    options = _parsed(words)
    path = FIGURES / f"{options.name}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    listed = [
        one
        for one in repeats(found["rows"], options.seeds)
        if options.only in str(one.trial) and options.setting in one.setting
    ]
    if not listed:
        raise SystemExit("rows must be of trials that there are, with the data that is here")
    now = {"commit": versions(library())["commit"], "date": date.today().isoformat()}
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        other = _compare(pool, listed)
        runs = Counter(one.row for one in listed)
        for row in runs.keys() - other:
            found["rows"][row]["repeated"] = {**now, "seeds": runs[row]}
        _write(path, found)
        if options.retake and other:
            retake(found, other, now, lambda again: _results(pool, again))
            _write(path, found)
    return int(bool(other) and not options.retake)


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json_by_rows(found) + "\n", encoding="utf-8")


def _parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what a command line says."""
    parser = argparse.ArgumentParser(prog="scripts/bench repeat", description=__doc__)
    parser.add_argument("name", help="of a file: accuracy, accuracy-text ...")
    parser.add_argument("--only", default="", help="rows whose trial has this in its name")
    parser.add_argument("--setting", default="", help="rows whose setting has this in its name")
    parser.add_argument("--seeds", type=at_least_one, default=1, help="of each row (1)")
    parser.add_argument(
        "--retake", action="store_true", help="take rows that end elsewhere anew, at all rates"
    )
    parser.add_argument("--jobs", type=at_least_one, default=2, help="runs at a time")
    return parser.parse_args(words)


def _compare(pool: ProcessPoolExecutor, listed: Sequence[Repeat]) -> set[int]:
    """Return the rows of which a run ended elsewhere; print what each ended with."""
    other = set()
    for one, now in zip(listed, _results(pool, listed), strict=True):
        print(line_of(one, now), flush=True)
        if not one.ends_as(now):
            other.add(one.row)
    return other


def _results(pool: ProcessPoolExecutor, runs: Sequence[Repeat]) -> Iterator[Result]:
    """Yield what runs end with, in their order."""
    jobs = [pool.submit(run, one.trial, one.setting, one.seed, one.peak) for one in runs]
    return (job.result() for job in jobs)


def retake(
    found: dict[str, Any],
    rows: Iterable[int],
    now: Mapping[str, str],
    train: Callable[[Sequence[Repeat]], Iterable[Result]],
) -> None:
    """Take rows anew, with all their seeds at all rates, and the figures of their trials.

    Args:
        found: A file of figures.
        rows: Which; synchronous training is none of them, as others stand beside it.
        now: Of which commit and date they are.
        train: Carries out runs.

    Raises:
        SystemExit: There is no synchronous training of the same seeds to stand beside.
    """
    known = [one for one in repeats(found["rows"], sys.maxsize) if one.row in set(rows)]
    runs = [replace(one, peak=peak) for one in known for peak in one.trial.peaks]
    beside = _synchronous(found["rows"])
    for one in runs:
        if one.setting == SYNCHRONOUS or one.seed not in beside[str(one.trial)]:
            raise SystemExit(f"{one.setting} of {one.trial} ended elsewhere: take all anew")
    for row, pairs in groupby(zip(runs, train(runs), strict=True), key=lambda pair: pair[0].row):
        by_rate: Found = {}
        level: dict[int, float] = {}
        for one, result in pairs:
            by_rate.setdefault((one.setting, one.peak), []).append(result)
            level[one.seed] = beside[str(one.trial)][one.seed]
        ((peak, results),) = best_rates(by_rate).values()
        before = {key: kept for key, kept in found["rows"][row].items() if key != "repeated"}
        anew = {"peak": peak, **summary(results, list(level.values())), "commit": now["commit"]}
        found["rows"][row] = before | anew
    for trial in {one.trial for one in runs}:
        found["figures"] |= figures(
            trial, [one for one in found["rows"] if one["trial"] == str(trial)]
        )
    found["date"] = now["date"]


def _synchronous(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return scores of synchronous training by trial and seed."""
    return {
        row["trial"]: dict(zip(row.get("seed_numbers", count()), row["scores"], strict=False))
        for row in rows
        if row["setting"] == SYNCHRONOUS
    }


def repeats(rows: Sequence[Mapping[str, Any]], seeds: int) -> Iterator[Repeat]:
    """Yield the first runs of each row whose trial is still one.

    Args:
        rows: Of a file of figures.
        seeds: How many runs of each.
    """
    known = {str(trial): trial for trial, _ in trials(quick=False)}
    for index, row in enumerate(rows):
        numbers = row.get("seed_numbers", range(len(row["scores"])))
        losses = row.get("losses", [None] * len(numbers))
        for seed, score, loss in list(zip(numbers, row["scores"], losses, strict=True))[:seeds]:
            if row["trial"] in known:
                trial = known[row["trial"]]
                yield Repeat(index, trial, row["setting"], seed, row["peak"], score, loss)


def line_of(one: Repeat, now: Result) -> str:
    """Return a line that says what a run ended with, then and now."""
    same = "the same" if one.ends_as(now) else f"not {one.score:.4f}"
    return (
        f"{one.trial}: {one.setting}, rate {one.peak:g}, seed {one.seed}: "
        f"{now.score:.4f} %, {same}; {now.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
