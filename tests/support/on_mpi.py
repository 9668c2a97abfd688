"""Run programs and tests on ranks that mpirun starts."""

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiers import RECORD, hand_on

from daso.cli.launch import Local
from daso.environment import find_mpirun

__all__ = ["PYTEST", "run_on", "run_tests"]

TESTS = Path(__file__).parents[1]
PYTEST = (
    "-m",
    "pytest",
    "--with-mpi",
    "-q",
    "--color=no",
    "--timeout=180",
    "--timeout-method=thread",
    "--no-header",
)


def run_on(
    ranks: int, *program: str, timeout: float = 1800, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks of this machine, as `daso run` does."""
    mpirun = find_mpirun()
    assert mpirun is not None, "no mpirun: pip install mpich"
    local = Local(ranks=ranks, ranks_per_node=None, program=program)
    env = local.environment(_outside(), root=os.geteuid() == 0, cores=1)
    return subprocess.run(
        local.command(mpirun),
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _outside() -> Mapping[str, str]:
    """Return the environment without what xdist told this process."""
    return {name: value for name, value in os.environ.items() if "XDIST" not in name}


def run_tests(
    ranks: int,
    record_property: Callable[[str, Any], None],
    *words: str,
    timeout: float = 2400,
    **variables: str,
) -> str:
    """Run tests on ranks; return what was printed, and hand on how each ended.

    Raises:
        AssertionError: One failed, was skipped, or none ran.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        variables = {**variables, RECORD: str(record)}
        run = run_on(ranks, *PYTEST, "-x", *words, timeout=timeout, **variables)
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
        assert hand_on(record, record_property) > 0, "no test of ranks ran"
    assert " skipped" not in run.stdout, "a test that needs ranks was skipped where ranks are"
    return run.stdout
