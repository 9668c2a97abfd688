import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

import daso.cli.launch as launching
from daso.cli.launch import Local, _watch, launch
from daso.errors import DasoError, TopologyError

LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "SLURM_", "DASO_")


def local(ranks=2, ranks_per_node=None, program=("train.py",)):
    return Local(ranks=ranks, ranks_per_node=ranks_per_node, program=program)


def environment(of, env=None, *, root=False, cores=8):
    return of.environment({} if env is None else env, root=root, cores=cores)


def test_ranks_stay_on_this_machine_whatever_allocation_this_is():
    made = environment(local(), {"PBS_NODEFILE": "nodes"})
    assert (made["HYDRA_LAUNCHER"], made["HYDRA_RMK"]) == ("fork", "user")
    assert "PRTE_MCA_ras" not in made
    assert environment(local(), {"SLURM_JOB_ID": "1"})["PRTE_MCA_ras"] == "^slurm"
    assert environment(local(), {"HYDRA_LAUNCHER": "ssh"})["HYDRA_LAUNCHER"] == "ssh"


def test_the_command_starts_every_rank_with_this_python_through_mpi4py():
    command = local(3, program=("-m", "mod", "--x=1 2")).command(Path("/opt/bin/mpirun"))
    assert command == [
        *("/opt/bin/mpirun", "-n", "3", sys.executable, "-m", "mpi4py"),
        *("-m", "mod", "--x=1 2"),
    ]


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, "8"), (2, 8, "4"), (3, 8, "2"), (8, 8, "1"), (9, 8, "1")]
)
def test_ranks_share_the_cores_and_each_has_one_thread_at_least(ranks, cores, threads):
    assert environment(local(ranks), cores=cores)["OMP_NUM_THREADS"] == threads


def test_more_ranks_than_cores_may_start():
    made = environment(local())
    assert made["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert made["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"


@pytest.mark.parametrize(("ranks", "cores", "sleep"), [(2, 2, False), (3, 2, True)])
def test_ranks_that_wait_leave_a_core_that_they_share(ranks, cores, sleep):
    made = environment(local(ranks), cores=cores)
    assert ("MPIR_CVAR_ENABLE_HEAVY_YIELD" in made) == sleep


def test_what_the_user_set_stays():
    user = {
        "HOME": "/home/me",
        "OMP_NUM_THREADS": "5",
        "OMPI_MCA_rmaps_base_oversubscribe": "0",
        "PRTE_MCA_rmaps_default_mapping_policy": "core",
        "OMPI_ALLOW_RUN_AS_ROOT": "0",
    }
    made = environment(local(), user, root=True)
    assert user.items() <= made.items()
    assert len(user) == 5  # and the user's own is left alone


@pytest.mark.parametrize("root", [True, False])
def test_open_mpi_is_told_twice_of_root_and_only_of_root(root):
    made = environment(local(), root=root)
    names = [name for name in made if "ROOT" in name]
    twice = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
    assert sorted(names) == (twice if root else [])
    assert all(made[name] == "1" for name in names)


def test_pretend_nodes_are_set_only_when_asked_for_and_then_win():
    assert "DASO_RANKS_PER_NODE" not in environment(local())
    user = {"DASO_RANKS_PER_NODE": "4"}
    assert environment(local(), user)["DASO_RANKS_PER_NODE"] == "4"
    assert environment(local(ranks_per_node="3,1"), user)["DASO_RANKS_PER_NODE"] == "3,1"


@pytest.mark.parametrize("ranks", [0, -1])
def test_fewer_than_one_rank_is_refused(ranks):
    with pytest.raises(TopologyError, match=f"at least 1, not {ranks}"):
        local(ranks)


def test_no_program_is_refused_with_an_example():
    with pytest.raises(TopologyError, match=r"daso run -n 4 train\.py"):
        local(program=())


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def mpirun(tmp_path, monkeypatch):
    """Return a function that writes a shell script to use as mpirun."""
    path = tmp_path / "mpirun"
    monkeypatch.setenv("DASO_MPIRUN", str(path))

    def write(script):
        path.write_text(f'#!/bin/sh\ncd "{tmp_path}"\n{script}\n')
        path.chmod(0o755)
        return path

    return write


def test_no_mpirun_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr("daso.cli.launch.find_mpirun", lambda: None)
    with pytest.raises(TopologyError) as caught:
        launch(local())
    assert "pip install mpich" in str(caught.value)
    assert "DASO_MPIRUN" in str(caught.value)


@pytest.mark.parametrize("there", [True, False])
def test_a_path_to_mpirun_that_cannot_be_started_is_told(tmp_path, monkeypatch, there):
    path = tmp_path / "no-mpirun"
    if there:
        path.write_text("not a program")
    monkeypatch.setenv("DASO_MPIRUN", str(path))
    with pytest.raises(DasoError, match="DASO_MPIRUN") as caught:
        launch(local())
    assert str(path) in str(caught.value)


def test_mpirun_gets_the_command_and_the_environment(mpirun, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    path = mpirun('printf "%s\\n" "$@" > words; env > env')
    asked = local(4, "2", ("train.py", "a b", ""))
    assert launch(asked) == 0
    assert (tmp_path / "words").read_text().split("\n")[:-1] == asked.command(path)[1:]
    env = (tmp_path / "env").read_text().splitlines()
    assert "DASO_RANKS_PER_NODE=2" in env
    assert "OMP_NUM_THREADS=7" in env
    assert capfd.readouterr() == ("", "")


def test_the_folder_for_process_numbers_is_there_and_goes_with_the_job(mpirun, tmp_path):
    mpirun('test -d "$DASO_PROCESSES" && echo "$DASO_PROCESSES" > folder')
    assert launch(local()) == 0
    folder = Path((tmp_path / "folder").read_text().strip())
    assert folder.is_absolute()
    assert not folder.exists()
    assert "DASO_PROCESSES" not in os.environ


@pytest.mark.parametrize("code", [1, 2, 3, 77, 130, 255])
def test_the_exit_code_is_passed_on_and_told(mpirun, capfd, code):
    mpirun(f"exit {code}")
    assert launch(local()) == code
    assert capfd.readouterr() == ("", f"daso: the job ended with exit code {code}\n")


def again(times):
    return Local(ranks=2, ranks_per_node=None, program=("train.py",), restarts=times)


def test_a_job_that_fails_is_started_again_as_often_as_is_told(mpirun, tmp_path, capfd):
    mpirun('echo "${DASO_RESTARTS:-0}" >> starts; test "$DASO_RESTARTS" = 2')
    assert launch(again(1)) == 1
    assert (tmp_path / "starts").read_text().split() == ["0", "1"]
    assert launch(again(3)) == 0
    assert (tmp_path / "starts").read_text().split() == ["0", "1", "0", "1", "2"]
    said = capfd.readouterr().err
    assert said.count("daso: the job starts again: restart 1 of at most 3\n") == 1
    assert said.count("daso: the job ended with exit code 1\n") == 4


@pytest.mark.parametrize("code", [2, 75, 130])
def test_a_job_of_wrong_use_or_that_was_asked_to_end_is_not_started_again(mpirun, tmp_path, code):
    mpirun(f"echo x >> starts; exit {code}")
    assert launch(again(3)) == code
    assert (tmp_path / "starts").read_text() == "x\n"


def test_spares_are_started_beside_the_ranks_and_told():
    made = Local(ranks=2, ranks_per_node="1", program=("a.py",), elastic=True, spares=3)
    command = made.command(Path("/opt/bin/mpirun"))
    assert command[1:5] == ["--with-ft", "ulfm", "-n", "5"]
    assert environment(made)["DASO_SPARES"] == "3"
    assert environment(made)["OMP_NUM_THREADS"] == "4"  # spares sleep
    with pytest.raises(TopologyError, match=r"must come with --elastic .*; add it"):
        Local(ranks=2, ranks_per_node=None, program=("a.py",), spares=1)
    for wrong in ("spares", "restarts"):
        with pytest.raises(TopologyError, match="must be 0 or more, not -1"):
            Local(ranks=2, ranks_per_node=None, program=("a.py",), **{wrong: -1})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_death_by_a_signal_is_told_as_a_shell_does(mpirun, capfd, number):
    mpirun(f"ulimit -c 0; kill -{int(number)} $$")
    assert launch(local()) == 128 + number
    said = f"daso: the job ended with exit code {128 + number}; {number.name} ended mpirun\n"
    assert capfd.readouterr().err == said


def test_what_ranks_print_comes_before_the_closing_line(mpirun, capfd):
    mpirun("echo out; echo from a rank >&2; exit 4")
    launch(local())
    out, err = capfd.readouterr()
    assert out == "out\n"
    assert err.splitlines() == ["from a rank", "daso: the job ended with exit code 4"]


# A rank that is killed, while another lives.
RANK_KILLED = """
sleep 30 & echo $! > "$DASO_PROCESSES/0"; other=$!
sleep 30 & echo $! > "$DASO_PROCESSES/1"
sleep 0.4; kill -9 $!; sleep 0.3; kill $other; exit {code}
"""


def test_the_closing_line_names_the_rank_that_was_killed(mpirun, capfd):
    mpirun(RANK_KILLED.format(code=9))
    assert launch(local()) == 9
    assert capfd.readouterr().err.splitlines()[-1] == (
        "daso: the job ended with exit code 9; rank 1 ended first"
    )


def test_a_rank_that_could_speak_for_itself_is_not_named(mpirun, capfd):
    mpirun(RANK_KILLED.format(code=1))
    assert launch(local()) == 1
    assert capfd.readouterr().err.splitlines()[-1] == "daso: the job ended with exit code 1"


def test_signal_handlers_are_as_before_after_a_launch(mpirun):
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    before = [signal.getsignal(number) for number in numbers]
    mpirun("exit 0")
    launch(local())
    assert [signal.getsignal(number) for number in numbers] == before


def test_a_signal_that_was_ignored_stays_so(mpirun):
    """`nohup daso run`: a hangup is no wish to end, after which nothing is started again."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        mpirun('kill -HUP $PPID; sleep 0.2; echo >> starts; test "$DASO_RESTARTS" = 1')
        assert launch(again(1)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


WAITING = """
trap 'echo got TERM; exit 7' TERM
trap 'echo got USR1; exit 8' USR1
trap 'echo got INT; exit 130' INT
sleep 0.3; touch ready
while :; do sleep 0.05; done
"""


def start(tmp_path, *options):
    (tmp_path / "train.py").touch()
    words = [sys.executable, "-m", "daso", "run", *options, str(tmp_path / "train.py")]
    pipe = subprocess.PIPE
    daso = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    until = time.monotonic() + 20
    while not (tmp_path / "ready").exists() and daso.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    return daso


@pytest.mark.parametrize(("name", "code"), [("TERM", 7), ("USR1", 8)])
def test_signals_of_a_batch_system_are_passed_on_to_mpirun(mpirun, tmp_path, name, code):
    mpirun(WAITING)
    with start(tmp_path, "--restarts=2") as daso:  # not after a signal
        daso.send_signal(getattr(signal, f"SIG{name}"))
        out, err = daso.communicate(timeout=HANG_SECONDS)
    assert daso.returncode == code
    assert out == f"got {name}\n"
    assert err == f"daso: the job ended with exit code {code}\n"


def test_ctrl_c_ends_mpirun_and_leaves_no_traceback(mpirun, tmp_path):
    mpirun(WAITING)
    with start(tmp_path) as daso:
        os.killpg(daso.pid, signal.SIGINT)
        out, err = daso.communicate(timeout=HANG_SECONDS)
    assert daso.returncode == 130
    assert out == "got INT\n"
    assert err == "daso: the job ended with exit code 130\n"


@pytest.fixture
def sleepers():
    made = [subprocess.Popen(["sleep", "30"]) for _ in range(3)]
    yield made
    for one in made:
        one.kill()
        one.wait()


def note(folder, processes):
    for rank, process in enumerate(processes):
        (folder / str(rank)).write_text(str(process.pid))


def watch(script, folder):
    with subprocess.Popen(["sh", "-c", script]) as process:
        said = _watch(process, folder)
        assert process.returncode is not None
    return said


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_watch_names_the_rank_that_ends_first(tmp_path, sleepers, rank):
    note(tmp_path, sleepers)
    kills = " ".join(str(one.pid) for one in sleepers if one is not sleepers[rank])
    script = f"sleep 0.3; kill -9 {sleepers[rank].pid}; sleep 0.3; kill -9 {kills}"
    assert watch(script, tmp_path) == f"; rank {rank} ended first"


def test_watch_names_all_ranks_that_end_at_once(tmp_path, sleepers):
    note(tmp_path, sleepers)
    for one in (sleepers[0], sleepers[2]):
        one.kill()
        os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)  # it ended, nobody asked after it
    said = watch("sleep 0.5", tmp_path)
    assert said in {"; rank 0 and rank 2 ended first", "; rank 2 and rank 0 ended first"}


def test_watch_waits_for_a_number_that_is_still_to_be_written(tmp_path, sleepers):
    (tmp_path / "4").touch()
    pid = sleepers[0].pid
    script = f"sleep 0.3; echo {pid} > {tmp_path}/4; sleep 0.4; kill -9 {pid}; sleep 0.3"
    assert watch(script, tmp_path) == "; rank 4 ended first"


def test_watch_names_none_when_ranks_outlive_mpirun_or_left_no_number(tmp_path, sleepers):
    assert watch("sleep 0.2", tmp_path) == ""
    note(tmp_path, sleepers)
    assert watch("sleep 0.2", tmp_path) == ""


def test_watch_names_none_when_a_number_is_of_no_process(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    note(tmp_path, [gone])
    assert watch("sleep 0.2", tmp_path) == ""


def test_watch_without_pidfd_names_no_process(tmp_path, sleepers, monkeypatch):
    """Such a Python was built on a Linux before 5.3, as some that are to be downloaded are."""
    monkeypatch.delattr(os, "pidfd_open")
    note(tmp_path, sleepers)
    assert watch(f"kill -9 {sleepers[0].pid}; sleep 0.3", tmp_path) == ""


def test_watch_ends_an_orphaned_mpirun(tmp_path, sleepers, monkeypatch):
    starter, rank, mpirun = sleepers
    monkeypatch.setattr(launching, "parent_of", lambda _: starter.pid)
    monkeypatch.setattr(launching, "is_proxy", lambda pid: pid == starter.pid)
    monkeypatch.setattr(launching, "ORPHANED_SECONDS", 0.1)
    asked = iter([False, False, True])  # whether what is printed can be written
    monkeypatch.setattr(launching, "_has_reader", lambda: next(asked))
    note(tmp_path, [rank])
    threading.Timer(0.5, starter.kill).start()
    assert _watch(mpirun, tmp_path) == "; mpirun's process that starts ranks was killed"
    assert next(asked, None) is None, "it asked until somebody read"
    assert rank.wait(HANG_SECONDS) < 0


@pytest.mark.parametrize("killed", [True, False])
def test_watch_leaves_no_file_open(tmp_path, sleepers, killed):
    note(tmp_path, sleepers)
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 - names are all there is to compare
    script = f"sleep 0.3; kill -9 {sleepers[0].pid}; sleep 0.2" if killed else "sleep 0.3"
    assert watch(script, tmp_path) == ("; rank 0 ended first" if killed else "")
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
