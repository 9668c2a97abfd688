"""How long training stands still when a host's rank is killed, and when another takes its place.

Hosts with links of a known rate train a CNN; the second rank is killed (SIGKILL) while it
exchanges. daso goes on with the ranks that are left, or with a spare one; torchft, where another
Python has it, with its LocalSGD between replica groups of one rank, whose process is started again.

    scripts/bench recovery --torchft ~/torchft/bin/python --json recovery.json

The Python that runs it needs Open MPI 5 or later: ``DASO_MPI=openmpi scripts/bench recovery``.
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts, hosts
from benchmarks.recovery_ranks import DASO, DYING_SECONDS, KILLED, TORCHFT, Plan
from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.environment import find_mpirun
from daso.errors import ConfigError
from daso.plan.strict import json_by_rows

__all__ = ["Contender", "Outcome", "main", "outcome_of"]

RANKS = 3
FOLDER = Path(__file__).parents[1]  # of `benchmarks`
LIGHTHOUSE = "torchft_lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --join_timeout_ms 10000"


@dataclass(frozen=True, slots=True)
class Contender:
    """Who trains, and what becomes of the rank that is killed.

    Args:
        name: For people.
        by: ``"DASO"`` or ``"torchft"``.
        dies: A rank is killed.
        returns: Another takes its place.
        heartbeat_ms: Of torchft: after so long without one a group counts as dead.
    """

    name: str
    by: str
    dies: bool
    returns: bool
    heartbeat_ms: int = 0


CONTENDERS = (
    Contender("daso", DASO, dies=False, returns=False),
    Contender("daso, one rank killed", DASO, dies=True, returns=False),
    Contender("daso, one rank killed, a spare joins", DASO, dies=True, returns=True),
    Contender("torchft", TORCHFT, dies=False, returns=False, heartbeat_ms=5000),
    Contender("torchft, one killed", TORCHFT, dies=True, returns=False, heartbeat_ms=5000),
    Contender("torchft, one killed, started again", TORCHFT, True, True, heartbeat_ms=5000),
    Contender("torchft, the same, heartbeats 1 s", TORCHFT, True, True, heartbeat_ms=1000),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one training; seconds are from the kill on."""

    accuracy: float  # percent, of the ranks that came to the end
    seconds: float  # from the first step of a rank to the last
    ranks: int  # that exchanged at the end
    shrink_seconds: float | None = None  # until others have exchanged without the killed rank
    join_seconds: float | None = None  # until all have exchanged with the one in its place
    started_seconds: float | None = None  # of these, until the one in its place ran
    longest_step_seconds: float = 0.0  # of any rank, from the end of one to that of the next
    lost_steps: int = 0  # most that a rank that was there took again


def outcome_of(killed_at: float | None, ranks: Sequence[dict[str, Any]], steps: int) -> Outcome:
    """Return what became of a training, from what its ranks wrote."""
    stayed = [rank for rank in ranks if rank["first_step"] == 0]
    ends = [end for rank in ranks for end in rank["step_ends"]]
    pauses = [
        after - before
        for rank in stayed
        for before, after in zip(rank["step_ends"], rank["step_ends"][1:], strict=False)
    ]
    whole = Outcome(
        accuracy=statistics.mean(rank["accuracy"] for rank in ranks),
        seconds=max(ends) - min(ends),
        ranks=ranks[0]["exchanges"][-1][1],
        longest_step_seconds=max(pauses),
        lost_steps=max(len(rank["step_ends"]) for rank in stayed) - steps,
    )
    if killed_at is None:
        return whole
    later = [
        (at - killed_at, size)
        for rank in stayed
        for at, size in rank["exchanges"]
        if at > killed_at
    ]
    new = [rank["began_at"] - killed_at for rank in ranks if rank["first_step"] > 0]
    return replace(
        whole,
        shrink_seconds=min(at for at, _ in later),
        join_seconds=min((at for at, size in later if size == RANKS), default=None)
        if new
        else None,
        started_seconds=max(0.0, *new) if new else None,
    )


def script_of(contender: Contender, plan: Plan, torchft: str) -> str:
    """Return the batch script of one training."""
    words = ("-m", "benchmarks.recovery_ranks", json.dumps(asdict(plan)))
    program = " ".join(map(shlex.quote, words))
    paths = os.pathsep.join((str(FOLDER), str(FOLDER.parent)))
    lines = [
        f"export PYTHONPATH={shlex.quote(paths)} OMP_NUM_THREADS=1",
        f"cd {shlex.quote(plan.folder)}",
    ]
    if contender.by == DASO:
        spares = int(contender.returns)
        lines += [
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
            f"export OMPI_MCA_osc=^ucx DASO_SPARES={spares}",
            f"timeout 300 {find_mpirun() or 'mpirun'} --with-ft ulfm --map-by ppr:1:node "
            f"-n {RANKS + spares} {shlex.quote(sys.executable)} {program}",
        ]
        return "\n".join(lines) + "\n"
    tries = "1 2" if contender.returns else "1"
    here, python = shlex.quote(str(Path(torchft).parent)), shlex.quote(torchft)
    lines += [
        f"{here}/{LIGHTHOUSE} --heartbeat_timeout_ms {contender.heartbeat_ms} &",
        "export TORCHFT_LIGHTHOUSE=http://$(hostname -i):29510 GLOO_SOCKET_IFNAME=eth0",
        f"again='for _ in {tries}; do \"$@\" && break; done'",
        f"timeout 300 srun --nodes={RANKS} --ntasks={RANKS} --kill-on-bad-exit=0 "
        f'bash -c "$again" again {python} {program}',
        "kill %1",
    ]
    return "\n".join(lines) + "\n"


def run(place: Hosts, contender: Contender, plan: Plan, torchft: str, link: str) -> Outcome:
    """Train once; blocking."""
    folder = place.work / "ranks"
    folder.mkdir()
    plan = replace(plan, by=contender.by, folder=str(folder))
    if not contender.dies:
        plan = replace(plan, kill_step=0)
    said = place.run_script(script_of(contender, plan, torchft), link=link)
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    killed = folder / KILLED
    killed_at = float(killed.read_text()) if killed.exists() else None
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    if len(ranks) < RANKS - 1 or contender.dies != (killed_at is not None):
        raise ConfigError(f"{contender.name} must come to the end, but:\n{said[-4000:]}")
    return outcome_of(killed_at, ranks, plan.steps)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians as aligned lines."""
    head = (
        f"{'':<38}{'shrink s':>9}{'join s':>8}{'of it start':>12}{'longest step':>13}{'right %':>9}"
    )
    lines = [head]
    for row in rows:
        numbers = [
            _median(row["runs"], name)
            for name in ("shrink_seconds", "join_seconds", "started_seconds")
        ]
        longest, right = (
            _median(row["runs"], name) for name in ("longest_step_seconds", "accuracy")
        )
        texts = ["-" if one is None else f"{one:.2f}" for one in (*numbers, longest, right)]
        lines.append(
            f"{row['name']:<38}{texts[0]:>9}{texts[1]:>8}{texts[2]:>12}{texts[3]:>13}{texts[4]:>9}"
        )
    return "\n".join(lines)


def _median(runs: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [run[name] for run in runs if run[name] is not None]
    return statistics.median(known) if known else None


def figures(rows: Sequence[dict[str, Any]], plan: Plan, link: str) -> dict[str, dict[str, Any]]:
    """Return the figures, named as everywhere."""
    by_name = {row["name"]: row["runs"] for row in rows}
    conditions = (
        f"{RANKS} hosts of one rank, link {link}, CNN of 4.58 M parameters, batch 64, an exchange "
        f"every {plan.skip} batches, SIGKILL {1e3 * DYING_SECONDS:.0f} ms into the exchange after "
        f"batch {plan.kill_step} of {plan.steps}; median of {len(rows[0]['runs'])} runs"
    )
    wanted = {
        "shrink_seconds": ("daso, one rank killed", "shrink_seconds"),
        "join_seconds": ("daso, one rank killed, a spare joins", "join_seconds"),
        "torchft_shrink_seconds": ("torchft, one killed", "shrink_seconds"),
        "torchft_join_seconds": ("torchft, one killed, started again", "join_seconds"),
    }
    return {
        figure: {
            "value": _median(by_name[name], key),
            "unit": "seconds from the kill to an exchange",
            "conditions": f"{name}: {conditions}",
        }
        for figure, (name, key) in wanted.items()
        if name in by_name
    }


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        words: Arguments; the process's own if None.

    Returns:
        Exit code.
    """
    options = _options(words)
    if "Open MPI" not in library():
        raise ConfigError(
            f"a lost rank is survived under Open MPI 5 or later alone, not {library()}; run it as "
            f"DASO_MPI=openmpi scripts/bench recovery"
        )
    contenders = [one for one in CONTENDERS if one.by == DASO or options.torchft]
    kill_step = options.steps // 3 // options.skip * options.skip
    plan = Plan("", "", options.steps, options.skip, 0, kill_step)
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
    share = [str(Path(options.torchft).parents[1])] if options.torchft else []
    with hosts(RANKS + 1, share=share) as place:
        for seed in range(options.rounds):
            for contender in contenders:
                outcome = run(
                    place, contender, replace(plan, seed=seed), options.torchft, options.link
                )
                print(f"{contender.name}: {outcome}", file=sys.stderr, flush=True)
                found[contender.name].append(asdict(outcome))
    rows = [{"name": name, "runs": runs} for name, runs in found.items()]
    print(table(rows))
    if options.json:
        known = {"versions": versions(library()), "date": date.today().isoformat()}
        written = {"figures": figures(rows, plan, options.link), **known, "rows": rows}
        options.json.write_text(json_by_rows(written) + "\n", encoding="utf-8")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench recovery", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--link", default="1gbit", help="rate of every link (1gbit)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each (3)")
    parser.add_argument("--steps", type=int, default=300, help="of a training (300)")
    parser.add_argument("--skip", type=int, default=4, help="steps between exchanges (4)")
    parser.add_argument("--torchft", default="", help="a Python that has torchft, to run beside")
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    return parser.parse_args(words)
