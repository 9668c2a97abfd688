"""What every rank of a bench runs: ``python -m daso.cli.bench.ranks MODULE FOLDER PLAN OUT``."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from daso.cli.train.report import versions
from daso.comm.mpi import library
from daso.comm.world import init


def main() -> None:
    """Measure, and let world rank 0 write what was found."""
    module, folder, plan, out = sys.argv[1:]
    sys.path.append(folder)
    topology = init()
    bench: Any = import_module(module)
    found = bench.measure(bench.Plan(**json.loads(plan)), topology)
    if topology.rank == 0:
        found["versions"] = versions(library())
        Path(out).write_text(json.dumps(found), encoding="utf-8")
    topology.world_comm.Barrier()


if __name__ == "__main__":
    main()
