"""Run what needs ranks under mpirun, on 1 to 4 of them: plain `pytest` exercises MPI too."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from daso.environment import find_mpirun
from daso.run.local import Local

RANKS = Path(__file__).parent / "ranks"
CONTRACT = Path(__file__).parent / "train" / "test_contract.py"
POINTS = 47  # of the drop-in contract
PYTEST = (
    "-m",
    "pytest",
    "--with-mpi",
    "-q",
    "--color=no",
    "--timeout=60",
    "--timeout-method=thread",
)


def run_on(ranks: int, *program: str, timeout: float = 1800) -> subprocess.CompletedProcess[str]:
    mpirun = find_mpirun()
    assert mpirun is not None, "no mpirun: pip install 'daso[mpich]'"
    local = Local(ranks=ranks, ranks_per_node=None, program=program)
    env = local.environment(os.environ, root=os.geteuid() == 0, cores=1)
    return subprocess.run(
        local.command(mpirun), env=env, capture_output=True, text=True, timeout=timeout, check=False
    )


def run_tests(ranks: int, tests: Path) -> tuple[int, str]:
    """Run tests on ranks; return how many passed, and what was printed."""
    run = run_on(ranks, *PYTEST, "-x", str(tests))
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    passed = re.findall(r"^(\d+) passed(?:, (\d+) skipped)? in", run.stdout, re.MULTILINE)
    assert len(passed) == 1, run.stdout[-2000:]
    count, skipped = int(passed[0][0]), passed[0][1]
    assert count > 0, "no multi-rank test ran"
    assert not skipped, "a test that needs ranks was skipped where ranks are"
    return count, run.stdout


@pytest.mark.timeout(1860)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_on_ranks(ranks: int, capsys) -> None:
    count, _ = run_tests(ranks, RANKS)
    with capsys.disabled():
        print(f"\n{count} multi-rank tests passed on {ranks} ranks", file=sys.stderr)


@pytest.mark.timeout(1860)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_drop_in_contract_on_ranks(ranks: int, capsys) -> None:
    count, said = run_tests(ranks, CONTRACT)
    (points,) = map(int, re.findall(r"^contract: (\d+) points hold$", said, re.MULTILINE))
    with capsys.disabled():
        what = f"{points} of {POINTS} points of the contract ({count} tests)"
        print(f"\n{what} hold on {ranks} ranks", file=sys.stderr)
    assert points == POINTS


@pytest.mark.parametrize("cause", ["assert", "hang"])
def test_a_failure_on_one_rank_fails_the_run(tmp_path: Path, cause: str) -> None:
    """The suite above must be able to fail, at once and on any rank."""
    (tmp_path / "conftest.py").write_text((RANKS / "conftest.py").read_text())
    (tmp_path / "test_planted.py").write_text(
        "import pytest, time\n"
        "from mpi4py import MPI\n"
        "@pytest.mark.mpi\n"
        "def test_planted():\n"
        "    if MPI.COMM_WORLD.Get_rank() == 1:\n"
        + ("        assert 0\n" if cause == "assert" else "        time.sleep(50)\n")
    )
    start = time.monotonic()
    finds = f"pythonpath={RANKS.parent}"
    run = run_on(2, *PYTEST, "-o", finds, "--timeout=5", "-x", str(tmp_path), timeout=60)
    seconds = time.monotonic() - start
    assert run.returncode != 0
    if cause == "assert":
        assert "failed on other ranks: {1: " in run.stdout + run.stderr
    else:
        # Hydra may lose what is said right before the end; the timeout shows in how long it took.
        assert 5 < seconds < 45
