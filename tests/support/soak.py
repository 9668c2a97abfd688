"""Elastic jobs with faults that are drawn from a seed; each outcome is held against the promise.

A job whose faults leave a node whole comes to its end: all ranks that are left have taken all steps
and hold the same bits, and none of a node that nothing struck is missing. Any other job ends with
an error. Nothing hangs, and no process is left.
"""

import json
import random
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import elastic_program
from jobs import HANG_SECONDS, slowness
from libraries import elastic_run

from daso.cli.train.report import versions

EVENTS = ("step", "send", "merge", "exchange", "messages", "wait for nodes", "wait in node")
POLICIES = ("Fixed(1, 0)", "Fixed(2, 1)", "Fixed(3, 0)", "Fixed(4, 2)", "Auto()")
LAST_STOP_SECONDS = 3.0  # how long a rank may stand still
TOO_EARLY = "ranks were about to wrap an optimizer; start the job again"  # refused by name


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the soak."""

    node_sizes: tuple[int, ...]
    spares: int
    policy: str
    epochs: int
    faults: str
    ends: str = ""  # RANK:STEP:MOMENT of `elastic_program`, in which a rank is killed

    @property
    def steps(self) -> int:
        """Batches of each rank."""
        return self.epochs * elastic_program.EPOCH

    def node_of(self, rank: int) -> int:
        """Return a rank's node, spare ones counted behind the others."""
        sizes = [*self.node_sizes, *[self.node_sizes[-1]] * self.spares]
        return next(node for node in range(len(sizes)) if rank < sum(sizes[: node + 1]))


def jobs(seed: int) -> Iterator[Job]:
    """Draw jobs without end."""
    draw = random.Random(seed)
    while True:
        yield drawn(draw)


def drawn(draw: random.Random) -> Job:
    """Draw a job."""
    size = draw.choice((1, 1, 1, 2))
    nodes = draw.randint(2, 5 if size == 1 else 3)
    spares = draw.choice((0, 0, 1, 2)) * size
    faults = [_fault(draw, (nodes * size) + spares) for _ in range(draw.randint(1, 3))]
    return Job(
        (size,) * nodes, spares, draw.choice(POLICIES), draw.randint(2, 4), "; ".join(faults)
    )


def _fault(draw: random.Random, ranks: int) -> str:
    rank, event, number = draw.randrange(ranks), draw.choice(EVENTS), draw.randint(1, 60)
    kind = draw.choice(("kill", "kill", "kill", "stop", "slow"))
    seconds = {"stop": draw.uniform(0.1, LAST_STOP_SECONDS), "slow": draw.uniform(0.001, 0.02)}
    if kind == "slow":
        return f"slow rank {rank} at every {event} for {seconds[kind]:.3f} s"
    lasts = f" for {seconds[kind]:.1f} s" if kind == "stop" else ""
    return f"{kind} rank {rank} at {event} {number}{lasts}"


def broken_promise(job: Job, code: int, results: dict[int, dict], said: str) -> str | None:
    """Return what is wrong with the outcome of a job; None if nothing is."""
    met = set(map(int, re.findall(r"daso: fault: (?:kill|raise) rank (\d+)", said)))
    met |= _killed(job) - results.keys()
    whole = set(range(len(job.node_sizes))) - {job.node_of(rank) for rank in met}
    if not whole:  # a spare may have taken over in time
        return None if code or results else "no node was whole, and the job ended well"
    if code and TOO_EARLY in said:
        return f"ranks {sorted(results)} trained on" if results else None
    if code:
        return f"nodes {sorted(whole)} were whole, and the job ended with exit code {code}"
    should = {rank for rank in range(sum(job.node_sizes)) if job.node_of(rank) in whole}
    if missing := should - results.keys():
        return f"ranks {sorted(missing)} of whole nodes did not come to the end"
    alike = {
        "digest": {one["digest"] for one in results.values()},
        "batches": {one["batches"] for one in results.values()} | {job.steps},
        "world": {one["world"] for one in results.values()} | {len(results)},
    }
    apart = {name: found for name, found in alike.items() if len(found) > 1}
    return f"ranks differ: {apart}" if apart else None


def _killed(job: Job) -> set[int]:
    """Return the ranks that are killed in a moment of the program."""
    return {int(word.split(":")[0]) for word in job.ends.split()}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job."""

    problem: str | None  # what is wrong with it, and what it said
    seconds: float
    struck: bool  # a fault that says so did
    world: int  # ranks at the end; 0: it failed
    longest_step_seconds: float  # of all ranks that are left


def run(python: str, job: Job) -> Outcome:
    """Run a job, and hold its outcome against the promise."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="daso-soak-") as name:
        folder = Path(name)
        program = Path(elastic_program.__file__)
        words = ("-m", "daso.testing.faults", job.faults, program) if job.faults else (program,)
        try:
            done = elastic_run(
                *(python, job.node_sizes, *words, folder, job.policy),
                *(job.steps, *job.ends.split()),
                spares=job.spares,
                seconds=HANG_SECONDS * slowness(),  # on a busy machine a start alone takes minutes
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode(errors="replace")
            return Outcome(
                f"it hangs\n{said[-3000:]}", time.monotonic() - begun, "daso: fault" in said, 0, 0.0
            )
        results = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
        left = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
        problem = broken_promise(job, done.returncode, results, done.stderr)
        if problem is None and left.stdout:
            problem = f"processes {left.stdout.split()} are left"
        return Outcome(
            problem and f"{problem}\n{done.stderr[-3000:]}",
            time.monotonic() - begun,
            "daso: fault" in done.stderr or bool(_killed(job) - results.keys()),
            len(results),
            max((one["longest_seconds"] for one in results.values()), default=0.0),
        )


# When each event comes for the second or third time, or so.
NUMBERS = {"step": 20, "send": 3, "merge": 3, "exchange": 9, "messages": 9}
SYNCHRONOUS = "Fixed(1, 0)"  # sends and merges nothing
IN_EPOCH, AT_ITS_END = ("forward", "backward"), ("averaged", "epoch", "meeting", "synchronize")


def cells() -> Iterator[Job]:
    """List faults at every event, with and without a spare, and kills at moments of a program."""
    for policy in (SYNCHRONOUS, "Fixed(4, 1)", "Auto()"):
        for event in EVENTS:
            if policy == SYNCHRONOUS and event in ("send", "merge"):
                continue
            size = 2 if event == "wait in node" else 1
            for kind in ("kill", "raise", "stop"):
                lasts = " for 2 s" if kind == "stop" else ""
                text = f"{kind} rank 1 at {event} {NUMBERS.get(event, 9)}{lasts}"
                yield Job((size,) * 3, size * (kind == "kill"), policy, 2, text)
        for moment in (*IN_EPOCH, *AT_ITS_END):
            step = elastic_program.EPOCH - 1 if moment in AT_ITS_END else 9
            yield Job((1, 1, 1), 1, policy, 2, "", f"1:{step}:{moment}")


def write_table(python: str, path: Path) -> int:
    """Run all cells, and write what became of them; return how many promises were broken."""
    rows, broken = [], 0
    for job in cells():
        outcome = run(python, job)
        broken += outcome.problem is not None
        row = {**asdict(job), **asdict(outcome)}
        rows.append(row)
        print(json.dumps(row), flush=True)
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps({"date": time.strftime("%Y-%m-%d"), "versions": versions("Open MPI, ULFM")})
    path.write_text(f'{head[:-1]},\n "rows": [\n  {lines}\n ]}}\n', encoding="utf-8")
    return broken
