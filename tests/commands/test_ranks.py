"""Run what needs ranks under mpirun: plain `pytest` exercises MPI too."""

import re
import time
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, slowness
from on_mpi import PYTEST, run_on, run_tests

TESTS = Path(__file__).parents[1]
RANKS, WORLD = TESTS / "ranks", TESTS / "world"
# Of worlds: the everyday tier has all in threads, and these on ranks, whose time is their own.
EVERYDAY = [
    WORLD / f"test_{name}.py" for name in ("sync", "behaviour", "parameter_server", "checkpoint")
]
# And these have tests that MPI alone can pass, on three ranks and four.
OF_MPI = [WORLD / f"test_{name}.py" for name in ("host", "priority", "routes", "tuning")]
CONTRACT, MANY = RANKS / "test_contract.py", RANKS / "test_many_ranks.py"
POINTS = 47  # of the drop-in contract


@pytest.mark.slow("hundreds of tests in one job")
@pytest.mark.timeout(2460)
@pytest.mark.parametrize(
    "ranks",
    [
        2,
        pytest.param(3, marks=pytest.mark.later("other cuts into nodes")),
        pytest.param(4, marks=pytest.mark.later("other cuts into nodes")),
    ],
)
def test_on_ranks(ranks: int, record_property, pytestconfig) -> None:
    words = [RANKS, f"--ignore={CONTRACT}", f"--ignore={MANY}"]
    if ranks > 2:
        words += [*EVERYDAY, *OF_MPI]
    else:
        words += [WORLD] if pytestconfig.getoption("--all") else ["-m", "not later", *EVERYDAY]
    run_tests(ranks, record_property, *map(str, words))


def test_what_mpi_alone_can_pass_runs_on_any_number_of_ranks() -> None:
    marked = {path for path in WORLD.glob("test_*.py") if "real_mpi" in path.read_text()}
    assert marked <= {*EVERYDAY, *OF_MPI}
    assert set(OF_MPI) <= marked


@pytest.mark.slow("more ranks than cores")
@pytest.mark.later("more ranks than cores")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [8, 16])
def test_on_many_ranks(ranks: int, record_property) -> None:
    run_tests(ranks, record_property, str(MANY))


@pytest.mark.slow("hundreds of tests in one job")
@pytest.mark.later("starts programs of frameworks")
@pytest.mark.timeout(2460)
def test_the_drop_in_contract_on_ranks(record_property) -> None:
    said = run_tests(2, record_property, str(CONTRACT))
    (points,) = map(int, re.findall(r"^contract: (\d+) points hold$", said, re.MULTILINE))
    assert points == POINTS


@pytest.mark.parametrize(
    "cause", ["assert", pytest.param("hang", marks=pytest.mark.later("waits for a time limit"))]
)
def test_a_failure_on_one_rank_fails_the_run(tmp_path: Path, cause: str) -> None:
    """The suite above must be able to fail, at once and on any rank."""
    (tmp_path / "test_planted.py").write_text(
        "import pytest, time\n"
        "from mpi4py import MPI\n"
        "@pytest.mark.real_mpi\n"
        "def test_planted():\n"
        "    if MPI.COMM_WORLD.Get_rank() == 1:\n"
        + ("        assert 0\n" if cause == "assert" else "        time.sleep(50)\n")
    )
    start = time.monotonic()
    finds = f"pythonpath={TESTS / 'support'}"
    words = ["-o", finds, "-p", "worlds", "--timeout=5", "-x", str(tmp_path)]
    run = run_on(2, *PYTEST, *words, timeout=HANG_SECONDS)
    seconds = time.monotonic() - start
    assert run.returncode != 0
    if cause == "assert":
        assert "failed on other ranks: {1: " in run.stdout + run.stderr
    else:
        # Hydra may lose what is said right before the end; the timeout shows in how long it took.
        assert 5 < seconds < 45 * slowness()
