import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jobs import HANG_SECONDS, slowness
from jobs import run as run_outside

from daso.comm.mpi import wait_for_all

SHOW = "import sys; print(__name__, sys.argv, sys.path[0]); sys.exit(int(sys.argv[1]))\n"


def run(tmp_path, *words, **variables):
    return subprocess.run(
        [sys.executable, "-m", "mpi4py", "-m", "daso.slurm.rank_entry", *words],
        cwd=tmp_path,
        env={"DASO_REQUEUE": str(tmp_path / "marks" / "requeue"), "PYTHONPATH": str(ROOT)}
        | variables,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def program(tmp_path):
    for folder in ("marks", "sub"):
        (tmp_path / folder).mkdir()
    (tmp_path / "sub" / "show.py").write_text(SHOW)
    (tmp_path / "show.py").write_text(SHOW)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_a_program_runs_as_python_runs_it(tmp_path, code):
    script = run(tmp_path, "sub/show.py", str(code), "-m")
    folder = tmp_path / "sub"
    assert script.stdout == f"__main__ ['sub/show.py', '{code}', '-m'] {folder}\n"
    module = run(tmp_path, "-m", "show", str(code), "a b")
    name = str(tmp_path / "show.py")
    assert module.stdout == f"__main__ {[name, str(code), 'a b']} {tmp_path}\n"
    assert script.returncode == module.returncode == code, script.stderr


@pytest.mark.parametrize("code", [0, 1, 75, 76])
def test_only_the_code_that_asks_for_it_is_noted(tmp_path, code):
    run(tmp_path, "show.py", str(code))
    assert (tmp_path / "marks" / "requeue").exists() == (code == 75)


@pytest.mark.parametrize(
    ("ends", "says"),
    [
        ("os.kill(os.getpid(), 9)", True),
        ("os.kill(os.getpid(), 11)", True),
        ("os._exit(3)", True),
        ("sys.exit(3)", False),
        ("1 / 0", False),
        ("pass", False),
        ("os.execv(sys.executable, [sys.executable, '-c', 'pass'])", True),
    ],
)
def test_a_rank_that_is_killed_is_named(tmp_path, ends, says):
    (tmp_path / "ends.py").write_text(f"import os, sys\n{ends}\n")
    found = run(tmp_path, "ends.py")
    assert ("of 1 on" in found.stderr and "exited without reporting" in found.stderr) == says
    assert (tmp_path / "marks" / "requeue-first").exists() == (says or "pass" not in ends)
    again = run(tmp_path, "ends.py").stderr  # as by another rank, which the first one takes along
    assert "exited without reporting" not in again


@pytest.mark.parametrize(
    ("masks", "local_rank", "cores"),
    [("1,2", "0", {0}), ("1,2", "1", {1}), ("0x3", "5", {0, 1}), ("1", None, None)],
)
def test_a_rank_keeps_to_its_cores(tmp_path, masks, local_rank, cores):
    here = os.sched_getaffinity(0)
    if not (cores or here) <= here:
        pytest.skip("these cores are not here")
    (tmp_path / "cores.py").write_text("import os; print(sorted(os.sched_getaffinity(0)))\n")
    local = {} if local_rank is None else {"MPI_LOCALRANKID": local_rank}
    found = run(tmp_path, "cores.py", DASO_CPU_MASKS=masks, **local)
    assert found.stdout == f"{sorted(here if cores is None else cores)}\n", found.stderr


@pytest.mark.parametrize(
    ("masks", "says"),
    [("x", "in hexadecimal, by commas, not 'x'"), ("1" + "0" * 60, "cores that this job has")],
)
def test_masks_that_do_not_fit_are_refused(tmp_path, masks, says):
    found = run(tmp_path, "show.py", "0", DASO_CPU_MASKS=masks, MPI_LOCALRANKID="0")
    assert found.returncode != 0
    assert says in found.stderr


def test_an_error_keeps_its_traceback(tmp_path):
    (tmp_path / "bad.py").write_text("1 / 0\n")
    found = run(tmp_path, "bad.py")
    assert found.returncode != 0
    assert "ZeroDivisionError" in found.stderr


SAVE = """
import sys, time
from pathlib import Path
from mpi4py import MPI

rank = MPI.COMM_WORLD.rank
time.sleep(rank)
Path(__file__).with_name(f"saved-{rank}").touch()
sys.exit(75)
"""


def test_no_rank_ends_before_all_have_saved(tmp_path):
    """The first rank that ends with an exit code other than 0 has the others killed."""
    (tmp_path / "save.py").write_text(SAVE)
    words = ["run", "-n", "2", "-m", "daso.slurm.rank_entry", tmp_path / "save.py"]
    done = run_outside([sys.executable, "-m", "daso", *words])
    assert done.returncode == 75, done.stderr
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_rank_does_not_wait_for_ever(monkeypatch):
    class Request:
        def Test(self):  # noqa: N802
            return False

    world = SimpleNamespace(Ibarrier=Request)
    fake = SimpleNamespace(
        COMM_WORLD=world, Is_initialized=lambda: True, Is_finalized=lambda: False
    )
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
    begun = time.monotonic()
    wait_for_all(0.05)
    assert 0.05 <= time.monotonic() - begun < 5 * slowness()
