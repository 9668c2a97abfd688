"""How long training stands still when a host's rank is killed, and when another takes its place.

Hosts with links of a known rate train a CNN; the second rank is killed (SIGKILL) while it
exchanges. daso goes on with the ranks that are left, or with a spare one; torchft, where another
Python has it, with its LocalSGD between replica groups of one rank, whose process is started again.

    scripts/bench recovery --torchft ~/torchft/bin/python --json recovery.json

The Python that runs it needs Open MPI 5 or later: ``DASO_MPI=openmpi scripts/bench recovery``.
"""

import argparse
import json
import math
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
from benchmarks.recovery_ranks import BOTH, DASO, DYING_SECONDS, KILLED, ROUNDS, TORCHFT, Plan
from daso.cli.bench.options import at_least_one
from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.environment import find_mpirun
from daso.errors import ConfigError, ExchangeError
from daso.strict import json_by_rows

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
    Contender("torchft, one killed, 1 s", TORCHFT, dies=True, returns=False, heartbeat_ms=1000),
    Contender("torchft, one killed, started anew", TORCHFT, True, True, heartbeat_ms=5000),
    Contender("torchft, one killed, started anew, 1 s", TORCHFT, True, True, heartbeat_ms=1000),
)


ALTERNATING = Contender("daso, elastic and not in turns", BOTH, dies=False, returns=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one training; seconds are from the kill on, of the rank that came last."""

    accuracy: float  # percent, of the ranks that came to the end
    seconds: float  # from the first step of a rank to the last
    by: str  # versions
    shrink_seconds: float | None = None  # until others have exchanged without the killed rank
    join_seconds: float | None = None  # until all have exchanged with the one in its place
    ready_seconds: float | None = None  # of these, until the one in its place could train
    longest_step_seconds: float = 0.0  # of any rank, from the end of one to that of the next


def outcome_of(killed_at: float | None, ranks: Sequence[dict[str, Any]]) -> Outcome:
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
        by=ranks[0]["by"],
        longest_step_seconds=max(pauses),
    )
    if killed_at is None:
        return whole
    new = [rank for rank in ranks if rank["first_step"] > 0]
    # From here on an exchange between all is one with the rank that is new.
    joined_at = min((rank["step_ends"][0] for rank in new), default=math.inf)

    def last_of(some: Sequence[dict[str, Any]], *, whole: bool) -> float:
        """Return when the last of some ranks had its first exchange without the killed one."""
        return max(
            min(
                float(at) - killed_at
                for at, size in rank["exchanges"]
                if at > killed_at
                and ((size == RANKS and at >= joined_at) or (size < RANKS and not whole))
            )
            for rank in some
        )

    return replace(
        whole,
        shrink_seconds=last_of(stayed, whole=False),
        join_seconds=last_of(ranks, whole=True) if new else None,
        ready_seconds=max(0.0, *(rank["ready_at"] - killed_at for rank in new)) if new else None,
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
    if contender.by in (DASO, BOTH):
        spares = int(contender.returns)
        lines += [
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
            f"export OMPI_MCA_osc=^ucx DASO_SPARES={spares}",
            f"timeout 300 {find_mpirun() or 'mpirun'} --with-ft ulfm --map-by ppr:1:node "
            f"-n {RANKS + spares} {shlex.quote(sys.executable)} {program}",
        ]
        return "\n".join(lines) + "\n"
    # The one that is killed may fail; where it is to come back, it is started anew.
    anew = ' && "$@"' if contender.returns else ""
    again = f'"$@" || {{ [ "$SLURM_PROCID" = 1 ]{anew}; }}'
    here, python = shlex.quote(str(Path(torchft).parent)), shlex.quote(torchft)
    lines += [
        f"{here}/{LIGHTHOUSE} --heartbeat_timeout_ms {contender.heartbeat_ms} &",
        "export TORCHFT_LIGHTHOUSE=http://$(hostname -i):29510 GLOO_SOCKET_IFNAME=eth0",
        f"timeout 300 srun --nodes={RANKS} --ntasks={RANKS} --kill-on-bad-exit=0 "
        f"bash -c {shlex.quote(again)} again {python} {program}",
        "code=$?; kill %1; exit $code",
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
    new = sum(rank["first_step"] > 0 for rank in ranks)
    ended = RANKS - (contender.dies and not contender.returns)
    if (len(ranks), new, killed_at is None) != (ended, contender.returns, not contender.dies):
        raise ExchangeError(
            f"{contender.name}: {ended} ranks must come to the end, {int(contender.returns)} of "
            f"them new, but {len(ranks)} did, {new} of them new:\n{said[-4000:]}"
        )
    return outcome_of(killed_at, ranks)


def overhead(place: Hosts, plan: Plan, link: str) -> dict[str, list[float]]:
    """Train with an elastic optimizer and with another in turns; return seconds of steps."""
    folder = place.work / "turns"
    folder.mkdir()
    plan = replace(plan, by=BOTH, folder=str(folder), kill_step=0)
    said = place.run_script(script_of(ALTERNATING, plan, ""), link=link)
    path = folder / ROUNDS
    if not path.exists():
        raise ExchangeError(
            f"ranks must come to the end of all rounds, but did not:\n{said[-4000:]}"
        )
    turns: dict[str, list[float]] = json.loads(path.read_text())
    return turns


def overhead_ratio(turns: dict[str, list[float]]) -> float:
    """Return the median over rounds of an elastic step over another one."""
    pairs = zip(turns["elastic"], turns["plain"], strict=True)
    return statistics.median(elastic / plain for elastic, plain in pairs)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians as aligned lines."""
    head = (
        f"{'':<38}{'shrink s':>9}{'join s':>8}{'of it ready':>12}{'longest step':>13}{'right %':>9}"
    )
    lines = [head]
    for row in rows:
        numbers = [
            _median(row["runs"], name)
            for name in ("shrink_seconds", "join_seconds", "ready_seconds")
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


def figures(
    rows: Sequence[dict[str, Any]], turns: dict[str, list[float]], plan: Plan, link: str
) -> dict[str, dict[str, Any]]:
    """Return the figures, named as everywhere."""
    by_name = {row["name"]: row["runs"] for row in rows}
    conditions = (
        f"{RANKS} hosts of one rank, link {link}, CNN of 4.58 M parameters, batch 64, an exchange "
        f"every {plan.skip} batches, SIGKILL of a process {1e3 * DYING_SECONDS:.0f} ms after the "
        f"backward of batch {plan.kill_step} of {plan.steps}, whose step exchanges"
    )
    theirs = "heartbeats {}, --join_timeout_ms 10000, gloo's timeout 5 s"
    slow, fast = theirs.format("5 s (the default)"), theirs.format("1 s")
    wanted = {
        "shrink_seconds": ("daso, one rank killed", ""),
        "join_seconds": ("daso, one rank killed, a spare joins", "the spare had waited, ready"),
        "torchft_shrink_seconds": ("torchft, one killed", slow),
        "torchft_shrink_seconds_heartbeat_1s": ("torchft, one killed, 1 s", fast),
        "torchft_join_seconds": ("torchft, one killed, started anew", slow),
        "torchft_join_seconds_heartbeat_1s": ("torchft, one killed, started anew, 1 s", fast),
        "torchft_ready_seconds": ("torchft, one killed, started anew", slow),
    }
    made = {
        "elastic_overhead_ratio": {
            "value": overhead_ratio(turns),
            "unit": "ratio of step times, over the same without elastic=True",
            "conditions": f"{RANKS} hosts of one rank, link {link}, CNN of 4.58 M parameters, "
            f"batch 64, an exchange every {plan.skip} batches, nobody is killed, both under "
            f"mpirun --with-ft ulfm; median of "
            f"{len(turns['plain'])} rounds, in turns in the same processes",
        }
    }
    for figure, (name, more) in wanted.items():
        key = f"{figure.removeprefix('torchft_').split('_')[0]}_seconds"
        value = _median(by_name.get(name, ()), key)
        if value is not None:
            runs = by_name[name]
            made[figure] = {
                "value": value,
                "unit": "seconds from the kill",
                "conditions": f"{name} ({runs[0]['by']}): {conditions}; median of {len(runs)} runs"
                + (f"; {more}" if more else ""),
            }
    return made


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
    if options.steps < 3 * options.skip or options.steps % options.skip:
        raise ConfigError(
            f"--steps must be a multiple of --skip={options.skip}, three of them or more, not "
            f"{options.steps}"
        )
    torchft = str(Path(options.torchft).absolute()) if options.torchft else ""
    kill_step = options.steps // 3 // options.skip * options.skip
    plan = Plan("", "", options.steps, options.skip, 0, kill_step)
    found: dict[str, list[dict[str, Any]]] = {one.name: [] for one in contenders}
    share = [str(Path(torchft).parents[1])] if torchft else []
    with hosts(RANKS + 1, share=share) as place:
        turns = overhead(place, plan, options.link)
        for seed in range(options.rounds):
            for contender in contenders:
                outcome = run(place, contender, replace(plan, seed=seed), torchft, options.link)
                print(f"{contender.name}: {outcome}", file=sys.stderr, flush=True)
                found[contender.name].append(asdict(outcome))
    rows = [{"name": name, "runs": runs} for name, runs in found.items()]
    print(table(rows))
    print(f"a step with elastic=True over one without, nobody killed: {overhead_ratio(turns):.3f}")
    if options.json:
        known = {"versions": versions(library()), "date": date.today().isoformat()}
        made = figures(rows, turns, plan, options.link)
        written = {"figures": made, **known, "rows": rows, "turns": turns}
        options.json.write_text(json_by_rows(written) + "\n", encoding="utf-8")
    return 0


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench recovery", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--link", default="1gbit", help="rate of every link (1gbit)")
    parser.add_argument("--quick", action="store_true", help="one training of each, of 160 steps")
    parser.add_argument("--rounds", type=at_least_one, help="trainings of each (3; quick 1)")
    parser.add_argument("--steps", type=at_least_one, help="of a training (300; quick 160)")
    parser.add_argument("--skip", type=at_least_one, default=4, help="steps between exchanges (4)")
    parser.add_argument("--torchft", default="", help="a Python that has torchft, to run beside")
    parser.add_argument("--json", type=Path, help="write figures and rows to this file")
    options = parser.parse_args(words)
    options.rounds = (1 if options.quick else 3) if options.rounds is None else options.rounds
    options.steps = (160 if options.quick else 300) if options.steps is None else options.steps
    return options
