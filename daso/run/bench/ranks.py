"""What every rank of a bench runs: ``python -m daso.run.bench.ranks KIND PLAN OUT``."""

import json
import sys
from pathlib import Path
from typing import Any

from daso.comm.mpi import library
from daso.comm.topology import init
from daso.run.bench import (
    chunks,
    exchange,
    fitting,
    flow,
    gpu,
    growth,
    memory,
    node,
    order,
    push,
    server,
    to_accuracy,
    tracing,
    train,
)
from daso.run.report import versions

BENCHES = {
    "chunks": chunks,
    "exchange": exchange,
    "fitting": fitting,
    "flow": flow,
    "gpu": gpu,
    "gradient-order": order,
    "growth": growth,
    "memory": memory,
    "node": node,
    "push": push,
    "server": server,
    "time-to-accuracy": to_accuracy,
    "trace": tracing,
    "train": train,
}


def main() -> None:
    """Measure, and let world rank 0 write what was found."""
    kind, plan, out = sys.argv[1:]
    topology = init()
    bench: Any = BENCHES[kind]
    found = bench.measure(bench.Plan(**json.loads(plan)), topology)
    if topology.place.rank == 0:
        found["versions"] = versions(library())
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    topology.world.Barrier()


if __name__ == "__main__":
    main()
