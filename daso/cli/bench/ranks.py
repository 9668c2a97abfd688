"""Program of every rank of a bench: ``python -m daso.cli.bench.ranks MODULE FOLDER PLAN OUT``."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from daso.cli.train.report import versions
from daso.comm.control import barrier
from daso.comm.mpi import library
from daso.comm.world import init


def main() -> None:
    """Measure; world rank 0 writes the result."""
    module, folder, plan, out = sys.argv[1:]
    sys.path.append(folder)
    topology = init()
    bench: Any = import_module(module)
    result = bench.measure(bench.Plan(**json.loads(plan)), topology)
    if topology.rank == 0:
        result["versions"] = versions(library())
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    barrier(topology)


if __name__ == "__main__":
    main()
