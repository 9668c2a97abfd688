"""`daso submit`, `status` and `logs` on a real SLURM, and the scripts for people without a tool."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from jobs import HANG_SECONDS

from daso.slurm.slurm_commands import library_of

ROOT = Path(__file__).parents[2]

HELLO = """
import os, socket, sys, time
from mpi4py import MPI
world = MPI.COMM_WORLD
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
sys.stdout.write(
    f"rank {world.rank} of {world.size} on {socket.gethostname()}, {sys.argv[1:]}, "
    f"threads {os.environ['OMP_NUM_THREADS']}, cpus {os.environ.get('SLURM_CPUS_PER_TASK')}\\n"
)
world.Barrier()
"""
PROGRAMS = {
    "hello.py": HELLO,
    # Ends with the code of its first argument, later ranks later; when restarted, with 0.
    "end.py": HELLO
    + "time.sleep(0.1 * world.rank)\nsys.exit(0 if restart != '0' else int(sys.argv[1]))",
    "always75.py": "import sys; sys.exit(75)",
    # SLURM's limit ends it where the signal does not.
    "told.py": """
import signal
got = []
signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
"""
    + HELLO
    + """
if restart != "0":
    sys.exit(0)
while True:
    time.sleep(0.1)
    if world.allreduce(len(got)) == world.size:
        sys.stdout.write(f"rank {world.rank} was told\\n")
        world.Barrier()
        sys.exit(75)
""",
    "third75.py": """
import os, sys, time
print(f"restart {os.environ.get('SLURM_RESTART_COUNT', '0')}", flush=True)
time.sleep(5 if os.environ["SLURM_ARRAY_TASK_ID"] != "3" else 1)
sys.exit(75 if os.environ["SLURM_ARRAY_TASK_ID"] == "3" and "SLURM_RESTART_COUNT" not in os.environ
         else 0)
""",
    "killed.py": HELLO + "os.kill(os.getpid(), 9) if world.rank == 1 else time.sleep(60)",
}


class Submitter:
    """`daso` in a folder that the hosts see."""

    def __init__(self, cluster):
        self.cluster, self.python, self.path = cluster, cluster.python, os.environ["PATH"]
        for name, text in PROGRAMS.items():
            (cluster.work / name).write_text(text)

    def daso(self, *words, check=True, seconds=HANG_SECONDS):
        env = {"DASO_SITE": "minicluster", "PYTHONPATH": str(ROOT), "PATH": self.path}
        words = [self.python, "-m", "daso", *words]
        return self.cluster.run(words, seconds=seconds, check=check, **env)

    def submit(self, *words):
        """Submit, and return the job's id."""
        return re.findall(r"submitted job (\d+) ", self.daso("submit", *words).stdout)[0]

    def follow(self, job):
        return self.daso("logs", "--follow", job).stdout

    def status(self, job):
        """Return state and restarts."""
        row = self.daso("status", job).stdout.splitlines()[1].split()
        return row[2], row[5]


@pytest.fixture
def daso(cluster):
    return Submitter(cluster)


# Of the MPI library that the tests run on, with SLURM as in Debian.
SRUN = "pmix" if "Open MPI" in str(library_of(sys.executable)) else "pmi2"
LAUNCHERS = pytest.mark.parametrize("launcher", [SRUN, "mpirun"])


@LAUNCHERS
def test_ranks_see_each_other_on_all_nodes(daso, launcher):
    words = ["--nodes=2", "--tasks-per-node=2", "--cpus-per-task=2", f"--launcher={launcher}"]
    job = daso.submit(*words, "hello.py", "a b", "$HOME")
    log = daso.follow(job)
    lines = sorted(line for line in log.splitlines() if line.startswith("rank"))
    assert [line.split(",")[0][:11] for line in lines] == [f"rank {r} of 4" for r in range(4)]
    assert len({line.split(" on ")[1].split(",")[0] for line in lines}) == 2
    assert all("['a b', '$HOME'], threads 2, cpus 2" in line for line in lines)
    assert log.splitlines()[-1] == f"daso: job {job} ended with exit code 0"
    assert daso.status(job) == ("COMPLETED", "0")


def test_what_is_printed_says_what_was_chosen_and_what_was_submitted(daso):
    out = daso.daso("submit", "--nodes=2", "--time=0:05:00", "hello.py").stdout
    first, script, follow = out.splitlines()
    number = re.match(
        r"submitted job (\d+) \(2 nodes x 1 rank, [\w =-]+: the MPI library is", first
    )[1]
    assert follow == f"follow it: daso logs --follow {number}"
    text = Path(script.removeprefix("script: ")).read_text()
    assert "#SBATCH --time=0:05:00\n" in text
    assert "rank 0 of 2" in daso.follow(number)
    kept = (daso.cluster.work / "runs/slurm/jobs.jsonl").read_text().splitlines()
    assert json.loads(kept[-1])["job"] == number


def test_a_rank_gets_its_share_of_the_cpus_of_its_node(daso):
    profile = ROOT / "daso/slurm/data/sites/minicluster.toml"
    lines = [line for line in profile.read_text().splitlines() if "cpus_per_task" not in line]
    (daso.cluster.work / "plain.toml").write_text("\n".join(lines))
    out = daso.daso("submit", "--site=plain.toml", "--tasks-per-node=2", "hello.py").stdout
    assert "CPUs of each rank: 2, because a node has 4;" in out
    log = daso.follow(re.findall(r"submitted job (\d+) ", out)[0])
    assert log.count("threads 2, cpus 2") == 2, log


def test_flags_count_more_than_variables_of_sbatch_and_of_a_job_around_it(daso):
    env = {"DASO_SITE": "minicluster", "PYTHONPATH": str(ROOT), "SBATCH_JOB_NAME": "other"}
    env |= {"SBATCH_TIMELIMIT": "7", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "3"}
    words = [daso.cluster.python, "-m", "daso", "submit", "--time=5", "hello.py"]
    job = re.findall(r"submitted job (\d+) ", daso.cluster.run(words, **env).stdout)[0]
    shown = daso.cluster.run(["scontrol", "show", "job", job]).stdout
    assert "JobName=hello" in shown
    assert "TimeLimit=00:05:00" in shown
    assert ", restart 0\n" in daso.follow(job)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--nodes=9"], ["fit into the slots", "4 of 4 CPUs", "9 nodes"]),
        (["--tasks-per-node=5"], ["fit into the slots", "5 ranks"]),
        (["--cpus-per-task=5"], ["fit into the slots"]),
        (["--mem=9000G"], ["--mem=9000G", "Requested node configuration is not available"]),
        (["--partition=nosuch"], ["--partition=nosuch", "sinfo -s"]),
        (["--gpus-per-node=2"], ["--gpus-per-node=2", "sinfo"]),
        (["--constraint=fast"], ["--constraint=fast", "sinfo"]),
        (["--extra=--nosuch"], ["--nosuch"]),
    ],
)
def test_what_slurm_cannot_do_is_told_in_one_line_and_nothing_is_submitted(daso, words, parts):
    done = daso.daso("submit", *words, "hello.py", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("daso: ")
    assert done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in parts)
    assert daso.cluster.run(["squeue", "-h"]).stdout == ""


def test_a_cluster_that_is_not_up_or_does_not_answer_is_told_soon(daso):
    folder = daso.cluster.work / "other"
    for text, told in [
        (None, "start the cluster"),
        ("ClusterName=x\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=9\n", "scontrol ping"),
    ]:
        if text is not None:
            folder.mkdir()
            rest = "NodeName=n\nPartitionName=p Nodes=ALL Default=YES\nTCPTimeout=1\n"
            (folder / "slurm.conf").write_text(f"{text}{rest}MessageTimeout=2\n")
        env = {"DASO_MINICLUSTER": str(folder), "PYTHONPATH": str(ROOT)}
        words = [daso.cluster.python, "-m", "daso", "submit", "--site=minicluster", "hello.py"]
        done = daso.cluster.run(words, check=False, seconds=HANG_SECONDS, **env)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert told in done.stderr


@LAUNCHERS
def test_exit_code_75_starts_the_job_again_and_the_log_goes_on(daso, launcher):
    words = ["--nodes=2", "--tasks-per-node=2", f"--launcher={launcher}", "end.py", "75"]
    job = daso.submit(*words)
    log = daso.follow(job)  # across the requeue
    # Open MPI 5.0's mpirun leaves half a line behind when it ends a job.
    told = re.findall(r"daso: .*", log)
    assert [re.sub(r"on \S+,", "on X,", line) for line in told] == [
        f"daso: job {job} on X, restart 0",
        f"daso: the program saved its work; requeueing job {job} for restart 1 of at most 100",
        f"daso: job {job} on X, restart 1",
        f"daso: job {job} ended with exit code 0",
    ]
    assert len(re.findall(r"^rank \d of 4", log, re.MULTILINE)) == 8
    assert daso.status(job) == ("COMPLETED", "1")
    assert not list((daso.cluster.work / "runs/slurm").glob("requeue-*"))


@pytest.mark.slow("SLURM waits before it starts a job again")
def test_restarts_end_at_the_limit(daso):
    job = daso.submit("--max-restarts=2", "always75.py")
    log = daso.follow(job)
    assert log.count(f"daso: job {job} on ") == 3
    assert "at most 2; submit again" in log
    assert daso.status(job) == ("FAILED", "2")


@pytest.mark.slow("SLURM's shortest limit is a minute")
@pytest.mark.parametrize("launcher", [SRUN])
def test_ranks_are_told_before_time_runs_out(daso, launcher):
    # SLURM signals up to a minute earlier than it is asked to: 40 s would be at the start.
    words = ["--nodes=2", "--time=1", "--signal-seconds=5", f"--launcher={launcher}", "told.py"]
    job = daso.submit(*words)
    log = daso.follow(job)
    assert {"rank 0 was told", "rank 1 was told"} <= set(log.splitlines())
    assert daso.status(job) == ("COMPLETED", "1")


@LAUNCHERS
def test_a_program_that_fails_fails_the_job_with_its_code(daso, launcher):
    job = daso.submit(f"--launcher={launcher}", "end.py", "3")
    assert daso.follow(job).endswith(f"daso: job {job} ended with exit code 3\n")
    assert "exit code 3" in daso.daso("status", job).stdout


@LAUNCHERS
def test_a_rank_that_is_killed_ends_the_job_at_once(daso, launcher):
    job = daso.submit("--nodes=2", f"--launcher={launcher}", "killed.py")
    log = daso.follow(job)
    assert re.search(rf"daso: job {job} ended with exit code [1-9]", log)
    assert daso.status(job)[0] == "FAILED"


def test_an_array_has_a_log_and_a_line_for_each_job(daso):
    job = daso.submit("--array=1-3%2", "--name=many", "hello.py")
    for task in (1, 2, 3):
        assert "rank 0 of 1" in daso.follow(f"{job}_{task}")
    rows = [line.split() for line in daso.daso("status", job).stdout.splitlines()[1:]]
    assert [(row[0], row[2]) for row in rows] == [(f"{job}_{t}", "COMPLETED") for t in (1, 2, 3)]
    assert daso.daso("logs", job).stdout.count("==> many-") == 3


def test_one_job_of_an_array_is_requeued_without_the_others(daso):
    job = daso.submit("--array=1-3", "third75.py")
    logs = [daso.follow(f"{job}_{task}") for task in (1, 2, 3)]
    assert [re.findall(r"^restart (\d+)$", log, re.MULTILINE) for log in logs] == [
        ["0"],
        ["0"],
        ["0", "1"],
    ]


def test_a_job_waits_for_another_one_and_logs_say_so(daso):
    first = daso.submit("--setup=sleep 5", "hello.py")
    second = daso.submit(f"--dependency=afterok:{first}", "hello.py")
    done = daso.daso("logs", second, check=False)
    assert done.returncode == 2
    assert "PENDING, Dependency" in done.stderr
    assert "rank 0" in daso.follow(second)
    assert daso.status(first)[0] == "COMPLETED"


def test_a_cancelled_job_ends_follow(daso):
    job = daso.submit("--setup=sleep 60", "hello.py")
    daso.cluster.until(lambda: daso.status(job)[0] == "RUNNING")
    daso.cluster.run(["scancel", job])
    assert "ended with" not in daso.follow(job)
    assert daso.status(job)[0] == "CANCELLED"


def test_folders_and_words_with_odd_letters(daso):
    folder = daso.cluster.work / "it's 100% mine"
    folder.mkdir()
    (folder / "hello.py").write_text(HELLO)
    env = {"DASO_SITE": "minicluster", "PYTHONPATH": str(ROOT)}
    words = ["submit", "--logs", "my logs", "hello.py", "a\nb", "\r", "é"]
    command = ["sh", "-c", 'cd "$0" && exec "$@"', folder, daso.cluster.python, "-m", "daso"]
    out = daso.cluster.run([*command, *words], **env).stdout
    job = re.findall(r"submitted job (\d+)", out)[0]
    assert f"daso logs --follow --logs 'my logs' {job}" in out
    log = daso.cluster.run([*command, "logs", "--follow", "--logs", "my logs", job], **env).stdout
    assert str(["a\nb", "\r", "é"]) in log
    assert (folder / "my logs" / f"hello-{job}.out").exists()


@pytest.mark.slow("a job of four hosts trains")
def test_training_through_the_tool_ends_with_equal_ranks(daso):
    settings = ["--data.name=digits", "--epochs=1", "--name=submitted"]
    job = daso.submit("--nodes=4", "-m", "daso", "train", *settings)
    assert "yes, bit for bit" in daso.follow(job)
    summary = json.loads((daso.cluster.work / "runs/submitted/summary.json").read_text())
    assert (summary["world"], summary["nodes"], summary["identical"]) == (4, 4, True)


# --- without a tool -------------------------------------------------------------------------------


def plain(daso, name, **lines):
    """Run a script of slurm/ as its reader does, with this MPI's launcher; return its log."""
    text = (ROOT / "slurm" / f"{name}.sbatch").read_text()
    text = text.replace("--mpi=pmi2 --kill", f"--mpi={SRUN} --kill")
    for key, value in lines.items():
        text = re.sub(rf"^{key}=\(.*\)$", f"{key}=({value})", text, flags=re.MULTILINE)
    path = daso.cluster.work / f"{name}.sbatch"
    path.write_text(text)
    folder = str(Path(sys.executable).parent)
    env = {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{daso.cluster.env['PATH']}"}
    daso.cluster.batch(path, seconds=HANG_SECONDS, **env)
    (log,) = daso.cluster.work.glob(f"{name}-*.out")
    return log.read_text()


@pytest.mark.slow("the script of slurm/ looks at every node")
def test_check_says_that_all_is_well(daso):
    log = plain(daso, "check")
    assert log.endswith("check: all is well\n"), log
    assert "hello from rank 1 of 2 on mini" in log
    assert "no problems found" in log


def test_train_runs_its_program_and_starts_again(daso):
    log = plain(daso, "train", program="end.py 75")
    assert "requeueing job" in log
    assert log.count("rank 0 of 2") == 2, log
    assert re.search(r"job \d+ ended with exit code 0\n$", log)
