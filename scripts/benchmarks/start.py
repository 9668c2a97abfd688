"""Start of many ranks on this machine: seconds and memory of each phase, the slowest rank.

scripts/bench start --ranks 4,16,64 --json start.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.errors import ExchangeError
from daso.strict import json_by_rows

__all__ = ["main", "rank", "table"]

LAUNCHED = "DASO_BENCH_LAUNCHED"  # when the launcher was started, in seconds
PHASES = ("imported", "initialized", "inner", "wrapped", "stepped")  # inner: torch's optimizer
RANKS_PER_NODE = 4
LIMIT_SECONDS = 900.0
STATUS = Path("/proc/self/status")


def main(words: Sequence[str] | None = None) -> int:
    """Start ranks, each number of them once, and print a table."""
    parser = argparse.ArgumentParser(prog="scripts/bench start", description=__doc__)
    parser.add_argument("--ranks", default="4,16,64", help="numbers of ranks, by commas (4,16,64)")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    options = parser.parse_args(words)
    rows = [_started(int(ranks)) for ranks in options.ranks.split(",")]
    print(table(rows))
    if options.json:
        found: dict[str, Any] = {"date": str(date.today()), "cores": os.cpu_count(), "rows": rows}
        found["versions"] = versions(library())
        options.json.write_text(json_by_rows(found) + "\n", encoding="utf-8")
    return 0


def _started(ranks: int) -> dict[str, Any]:
    """Return what rank 0 of a job found of all ranks."""
    nodes = ["-n", str(ranks), "--ranks-per-node", str(RANKS_PER_NODE)]
    command = [sys.executable, "-m", "daso", "run", *nodes, "-m", "benchmarks.start"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", LAUNCHED: repr(time.time())}
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS
    )
    if run.returncode != 0:
        raise ExchangeError(f"{ranks} ranks must start, but {run.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as aligned lines."""
    head = f"{'ranks':>6}" + "".join(f"{phase:>13}" for phase in PHASES)
    lines = [
        "seconds since the launcher started, the last rank; memory of a rank in its median, MiB",
        f"{head}{'MiB before':>12}{'MiB after':>12}",
    ]
    for row in rows:
        seconds = "".join(f"{row['seconds'][phase]:>13.1f}" for phase in PHASES)
        before, after = row["mebibytes"]
        lines.append(f"{row['ranks']:>6}{seconds}{before:>12.0f}{after:>12.0f}")
    return "\n".join(lines)


def rank() -> None:
    """Start as a program does, take a step, and print what all ranks took. Collective."""
    import torch

    import daso

    moments = [time.time()]
    world = daso.init()
    moments.append(time.time())
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)  # imports torch._dynamo
    moments.append(time.time())
    before = _mebibytes()
    with daso.DASO(inner, module=model, policy=daso.Fixed(4, 1)) as optimizer:
        moments.append(time.time())
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        moments.append(time.time())
        values = world.world_comm.allgather((moments, before, _mebibytes()))
        optimizer.synchronize()
    if world.rank == 0:
        launched = float(os.environ[LAUNCHED])
        last = [max(column) - launched for column in zip(*(row[0] for row in values), strict=True)]
        memory = [statistics.median(row[at] for row in values) for at in (1, 2)]
        seconds = dict(zip(PHASES, last, strict=True))
        print(json.dumps({"ranks": len(values), "seconds": seconds, "mebibytes": memory}))


def _mebibytes() -> float:
    """Return the resident memory of this process that no file and no other process shares."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text("utf-8").splitlines())
    return int(fields["RssAnon"].split()[0]) / 1024


if __name__ == "__main__":
    rank()
