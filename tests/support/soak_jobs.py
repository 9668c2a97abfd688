"""Jobs of the soak that are not elastic: trainings with a drawn fault, and what they must end as.

A fault that only delays leaves all ranks with the bits of an unbroken training. A rank that is
lost ends the job, and the error names it; `daso train` then goes on from its checkpoint to the same
bits. Nothing hangs, and no process is left.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import soak_program
from jobs import HANG_SECONDS, POLITE, outside, slowness

PROGRAM = soak_program.__file__
LASTING_SECONDS = 3.0  # of a stop, and of a file system that hangs
DELAYS = (
    "stop rank {rank} at {event} {number} for {seconds:.1f} s",
    "hang rank {rank} at {event} {number} for {seconds:.1f} s",
    "jump rank {rank} at {event} {number} by 3600 s",
    "jump rank {rank} at {event} {number} by -3600 s",
    "slow rank {rank} at every {event} for 0.05 s during {seconds:.1f} s",
)
LOSSES = ("kill rank {rank} at {event} {number}", "raise rank {rank} at {event} {number}")
FLIP = "flip rank {rank} at merge {number}"
FULL = "full rank {rank} at {event} {number} after 1000 bytes"
NAMES = {"flip": r"rank {rank} on host|reference", "full": "a checkpoint must be written, but"}
SCHEDULE = ("--schedule.policy=fixed", "--schedule.skip=4", "--schedule.wait=1")
PRESET = ("--data.name=digits", "--epochs=8", "--exchange.algorithm=direct", *SCHEDULE)
TIMED = ("stale server", "flow")  # with other bits in each run; a flow is replayed
SAVED = 75  # exit code of a training that was asked to end


@dataclass(frozen=True, slots=True)
class Training:
    """A job of a kind in `soak_program`, or of `daso train`."""

    kind: str
    ranks: int
    ranks_per_node: int
    steps: int
    fault: str = ""
    stops_at: int = 0  # the step of a checkpoint after which `daso train` is asked to end

    @property
    def is_lost(self) -> bool:
        """Whether the fault ends the job."""
        return self.fault.split(" ")[0] in ("kill", "raise", "flip", "full")


# Ranks, ranks per node, steps, and the events that occur often enough on each rank.
SETUPS = {
    "adamw": ((3, 1, 80), ("step", "send", "merge", "exchange", "messages")),
    "fsdp2": ((4, 2, 60), ("step", "exchange")),
    "server": ((3, 1, 80), ("step",)),
    "stale server": ((3, 1, 80), ("step",)),
    "flow": ((2, 1, 40), ("forward", "backward")),
    "daso train": ((2, 1, 176), ("step", "exchange")),
}


def training(kind: str, draw: random.Random) -> Training:
    """Draw a job of a kind."""
    shape, events = SETUPS[kind]
    forms = [*DELAYS, *LOSSES]
    if kind == "adamw":
        forms.append(FLIP)
    if kind == "daso train":
        forms = [*forms, FULL, "", "", ""]  # those without a fault are asked to end
    form = draw.choice(forms)
    first = 10 if kind == "daso train" else 1  # a checkpoint exists by then
    values = {
        "rank": draw.randrange(shape[0]),
        "event": draw.choice(events),
        "number": draw.randint(first, 15),
        "seconds": draw.uniform(0.1, LASTING_SECONDS),
    }
    stops_at = 0 if form else draw.randint(8, 100)
    return Training(kind, *shape, form.format(**values), stops_at)


@dataclass(frozen=True, slots=True)
class Ended:
    """A job's end."""

    code: int
    text: str  # of its errors
    digests: tuple[str, ...]  # of ranks that came to the end

    @property
    def struck(self) -> bool:
        """Whether a fault printed that it struck."""
        return "daso: fault: " in self.text


def judge(job: Training, ended: Ended, unbroken: str) -> str | None:
    """Return what is wrong with a job's end; None if nothing is."""
    if job.is_lost and ended.struck:
        return judge_loss(job, ended)
    if ended.code:
        return f"nothing was lost, and the job ended with exit code {ended.code}"
    if len(ended.digests) != (1 if job.kind == "daso train" else job.ranks):
        return f"{len(ended.digests)} of {job.ranks} ranks came to the end"
    if len(set(ended.digests)) > 1:
        return f"ranks differ: {ended.digests}"
    if job.kind not in TIMED and ended.digests[0] != unbroken:
        return f"the bits {ended.digests[0][:12]} are not those of an unbroken job: {unbroken[:12]}"
    return None


def judge_loss(job: Training, ended: Ended) -> str | None:
    """Return what is wrong with the end of a job of which a rank was lost."""
    kind, _, rank, *_ = job.fault.split(" ")
    named = NAMES.get(kind, "rank {rank}").format(rank=rank)
    text = re.sub(r"daso: fault: .*|a fault that was requested, on .*", "", ended.text)
    if not ended.code:
        return "a rank was lost, and the job ended well"
    return None if re.search(named, text) else f"no error has {named!r}"


def processes(marker: str) -> list[int]:
    """List the processes with a text in their command line, but this one."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        if marker in words and int(path.parent.name) != os.getpid():
            pids.append(int(path.parent.name))
    return pids


def left_over(marker: str, within: float = 5.0) -> list[int]:
    """List the processes of a job that are still alive after a moment."""
    deadline = time.monotonic() + within
    while (pids := processes(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def end_all(marker: str) -> None:
    """Kill the processes of a job."""
    while pids := processes(marker):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


@contextmanager
def running(log: Path, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of daso in a session; end it if an error or Ctrl-C comes."""
    command = [sys.executable, "-m", "daso", *map(str, words)]
    env = {**POLITE, **outside(), "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        job = subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(10)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()


def run_program(job: Training, folder: Path) -> Ended:
    """Run a job of `soak_program` to its end."""
    fault = ("--fault", job.fault) if job.fault else ()
    ranks = ("-n", job.ranks, "--ranks-per-node", job.ranks_per_node)
    log = folder / "log"
    with running(log, "run", *ranks, *fault, PROGRAM, job.kind, folder, job.steps) as run:
        code = run.wait(HANG_SECONDS * slowness())
    results = [json.loads(path.read_text())["digest"] for path in folder.glob("*.json")]
    return Ended(code, log.read_text(errors="replace"), tuple(results))


def run_preset(job: Training, folder: Path) -> Ended:
    """Run `daso train` until it ends, by a fault or a signal too."""
    fault = ("--fault", job.fault) if job.fault else ()
    ranks = ("-n", job.ranks, "--ranks-per-node", job.ranks_per_node)
    more = (f"--runs={folder}", "--name=x", "--checkpoint.every=4")
    resumes = ("--resume",) if (folder / "x").exists() else ()
    words = ("run", *ranks, *fault, "-m", "daso", "train", *PRESET, *more, *resumes)
    log = folder / f"log{len(resumes)}"
    with running(log, *words) as run:
        deadline = time.monotonic() + HANG_SECONDS * slowness()
        while job.stops_at and run.poll() is None and newest(folder) < job.stops_at:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(words, HANG_SECONDS)
            time.sleep(0.01)
        if job.stops_at and run.poll() is None:
            run.send_signal(signal.SIGUSR1)
        code = run.wait(HANG_SECONDS * slowness())
    summary = folder / "x" / "summary.json"
    digests = (json.loads(summary.read_text())["model"],) if summary.exists() else ()
    return Ended(code, log.read_text(errors="replace"), digests)


def newest(folder: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if none is."""
    paths = (folder / "x" / "checkpoints").glob("step-*/manifest.json")
    return max((int(path.parent.name.removeprefix("step-")) for path in paths), default=0)


def run_whole(job: Training, folder: Path, unbroken: str) -> tuple[str | None, str]:
    """Run a job, and `daso train` on to its end; return what is wrong, and its errors."""
    if job.kind != "daso train":
        ended = run_program(job, folder)
        return judge(job, ended, unbroken), ended.text
    ended = run_preset(job, folder)
    if job.stops_at and ended.code not in (0, SAVED):
        return f"it was asked to end, and ended with exit code {ended.code}", ended.text
    if not job.stops_at and (problem := judge(job, ended, unbroken)):
        return problem, ended.text
    if ended.code == 0:
        return judge(replace(job, fault=""), ended, unbroken), ended.text
    resumed = run_preset(replace(job, fault="", stops_at=0), folder)
    return judge(replace(job, fault=""), resumed, unbroken), ended.text + resumed.text


class Trainings:
    """Runs jobs; keeps the bits of unbroken ones."""

    def __init__(self) -> None:
        self._unbroken: dict[Training, str] = {}

    def run(self, job: Training) -> str | None:
        """Run a job; return what is wrong with its end, and its errors. None if nothing is."""
        whole = replace(job, fault="", stops_at=0)
        if whole not in self._unbroken:
            with job_folder() as folder:
                ended = (run_preset if job.kind == "daso train" else run_program)(whole, folder)
            bits = next(iter(ended.digests), "")
            if problem := judge(whole, ended, bits):
                return f"without a fault: {problem}\n{ended.text[-3000:]}"
            self._unbroken[whole] = bits
        with job_folder() as folder:
            try:
                problem, text = run_whole(job, folder, self._unbroken[whole])
            except subprocess.TimeoutExpired:
                logs = sorted(folder.glob("log*"))
                problem, text = "it hangs", "".join(log.read_text(errors="replace") for log in logs)
            if problem is None and (pids := left_over(str(folder))):
                problem = f"processes {pids} are left"
        return problem and f"{problem}\n{text[-3000:]}"


@contextmanager
def job_folder() -> Iterator[Path]:
    """Make a folder for a job; end with it all processes that have it in their command line."""
    with tempfile.TemporaryDirectory(prefix="daso-soak-") as name:
        try:
            yield Path(name)
        finally:
            end_all(name)
