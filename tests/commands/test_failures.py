"""One rank raises, is killed, leaves or stalls: the whole job is gone soon, and says why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, run_on, slowness
from jobs import started as ended

PROGRAM = """
import os, signal, sys, time
import torch
import daso

how, door = sys.argv[1], sys.argv[2]
topology = daso.init()


def look(step):
    if step == 20 and topology.rank == 0:  # long before the trouble, or it is not heard any more
        print("trouble at", time.time(), flush=True)
    if step == 50 and topology.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise RuntimeError("the disk is on fire")
        if how == "exit":
            sys.exit(7)
        if how == "stall":
            time.sleep(600)


class Layer(torch.nn.Linear):
    steps = 0

    def forward(self, x):
        look(self.steps)
        time.sleep(0.001)
        self.steps += 1
        return super().forward(x)


if door == "flow":
    graph = daso.flow.Graph()
    found = graph.source(lambda one: torch.ones(1, 8))
    for rank in range(topology.world_size):
        found = graph.layer(Layer(8, 8), found, name=f"layer {rank}")
    graph.loss(lambda item, y: y.square().mean(), found)
    runtime = daso.flow.Runtime(
        graph,
        lambda p: torch.optim.SGD(p, lr=0.1),
        placement={f"layer {rank}": rank for rank in range(topology.world_size)},
        timeout_seconds=3.0,
    )
    runtime.train_epoch(range(10**6))
model = torch.nn.Linear(100, 100)
exchange = daso.Exchange(timeout_seconds=3.0)
if door == "server":
    optimizer = daso.ParameterServer(
        model, lambda p: torch.optim.SGD(p, lr=0.1), staleness=5, exchange=exchange
    )
else:
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = daso.DASO(sgd, module=model, exchange=exchange)
for step in range(10**9):
    look(step)
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
    time.sleep(0.001)
"""


def alive(marker: str) -> dict[int, str]:
    """List processes whose command line holds the marker: their numbers and command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(marker in word for word in words):
            found[int(path.parent.name)] = " ".join(words)
    return found


def left_over(marker: str, *, within: float = 5.0) -> dict[int, str]:
    """List what is still there after a moment: mpirun may return before its last rank is gone."""
    deadline = time.monotonic() + within
    while (found := alive(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


later = pytest.mark.later("starts a job of four ranks for each case")


@pytest.mark.parametrize(
    ("how", "message", "door"),
    [
        ("kill", "rank 1 ended first", "daso"),
        pytest.param("raise", "rank 1 of 4", "daso", marks=later),
        pytest.param("exit", "7", "daso", marks=later),
        pytest.param("stall", "world rank 1 did not", "daso", marks=later),
        pytest.param("kill", "rank 1 ended first", "server", marks=later),
        pytest.param("raise", "rank 1 of 4", "server", marks=later),
        pytest.param("stall", "world rank 1's rows of step", "server", marks=later),
        pytest.param("kill", "rank 1 ended first", "flow", marks=later),
        pytest.param("raise", "layer 'layer 1' must not fail", "flow", marks=later),
        pytest.param("stall", "world rank 1 ", "flow", marks=later),
    ],
)
def test_one_rank_in_trouble_ends_the_job(
    tmp_path: Path, how: str, message: str, door: str
) -> None:
    program = tmp_path / f"train_{how}.py"
    program.write_text(PROGRAM)
    words = ["run", "-n", "4", "--ranks-per-node", "2", str(program), how, door]
    run = subprocess.run(
        [sys.executable, "-m", "daso", *words],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.time() - float(run.stdout.split("trouble at")[1].split()[0])
    assert run.returncode != 0
    assert message in run.stdout + run.stderr
    assert seconds < 10 * slowness(), f"gone after {seconds:.1f} s"
    assert left_over(str(program)) == {}
    assert "was killed" not in run.stderr
    if how == "raise":
        assert "the disk is on fire" in run.stderr


def test_plain_mpirun_ends_too_when_a_rank_raises(tmp_path: Path) -> None:
    """Without `python -m mpi4py`: daso.init makes an uncaught exception end the job."""
    from daso.cli.launch import Local
    from daso.environment import find_mpirun

    program = tmp_path / "train_plain.py"
    program.write_text(PROGRAM)
    env = Local(ranks=2, ranks_per_node="1", program=("x",)).environment(
        os.environ, root=os.geteuid() == 0, cores=1
    )
    run = subprocess.run(
        [str(find_mpirun()), "-n", "2", sys.executable, str(program), "raise", "daso"],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env=env,
    )
    assert run.returncode != 0
    assert "rank 1 of 2" in run.stderr
    assert left_over(str(program)) == {}


def started(program: Path) -> "subprocess.Popen[str]":
    """A job of two ranks, once they train."""
    program.write_text(PROGRAM)
    job = subprocess.Popen(
        [sys.executable, "-m", "daso", "run", "-n", "2", str(program), "never", "daso"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    assert "trouble at" in job.stdout.readline()
    return job


def test_interrupting_ends_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "train_interrupt.py"
    job = started(program)
    os.killpg(job.pid, signal.SIGINT)  # what Ctrl-C does
    job.communicate(timeout=HANG_SECONDS)
    assert job.returncode != 0
    assert left_over(str(program)) == {}


@pytest.mark.parametrize("whose", ["mpirun", "proxy"])
def test_killing_what_started_the_ranks_ends_the_job(tmp_path: Path, whose: str) -> None:
    program = tmp_path / f"train_{whose}.py"
    job = started(program)
    mpirun = child_of(job.pid)
    proxy = child_of(mpirun)
    if whose == "proxy" and str(program) in command_of(proxy):
        pytest.skip("this mpirun starts ranks by itself")
    os.kill(mpirun if whose == "mpirun" else proxy, signal.SIGKILL)
    said = job.communicate(timeout=HANG_SECONDS)[1]
    assert job.returncode != 0
    assert f"the job ended with exit code {job.returncode}" in said
    proxy_killed = "mpirun's process that starts ranks was killed"
    causes = {"mpirun": "SIGKILL ended mpirun", "proxy": proxy_killed}
    assert causes[whose] in said
    wait_for_none_left(program)


@pytest.mark.later("waits for a slow reader")
def test_what_is_read_slowly_is_printed_to_its_end(tmp_path: Path) -> None:
    program = tmp_path / "much.py"
    program.write_text("import daso\ndaso.init()\nprint('x' * 160_000)\n")
    command = (
        f"{sys.executable} -m daso run -n 2 {program} | (sleep 7; wc -c); exit ${{PIPESTATUS[0]}}"
    )
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) == 2 * 160_001


def test_ranks_of_plain_mpirun_end_with_what_started_them(tmp_path: Path) -> None:
    from daso.environment import find_mpirun

    program = tmp_path / "train_orphaned.py"
    program.write_text(PROGRAM)
    mpirun = subprocess.Popen(
        [str(find_mpirun()), "-n", "2", sys.executable, str(program), "never", "daso"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        | {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    )
    assert mpirun.stdout is not None
    assert "trouble at" in mpirun.stdout.readline()
    os.kill(child_of(mpirun.pid), signal.SIGKILL)  # one rank, where mpirun starts them by itself
    wait_for_none_left(program, but=mpirun.pid)
    mpirun.kill()  # MPICH's sees nothing
    mpirun.communicate(timeout=HANG_SECONDS)


LOADING = """
import signal, sys, time
import torch
import daso
from daso.checkpoint.preemption import StopRequest
from torch.utils.data import DataLoader, TensorDataset

def main():
    topology = daso.init()
    model = torch.nn.Linear(5, 5)
    optimizer = daso.DASO(torch.optim.SGD(model.parameters(), lr=0.01), module=model)
    data = TensorDataset(torch.randn(100_000, 5))
    loader = DataLoader(data, num_workers=1, multiprocessing_context=sys.argv[1])
    with StopRequest(topology, signals=(signal.SIGTERM,)) as stop:
        for step, (x,) in enumerate(loader):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            time.sleep(0.005)
            if step == 20:
                print("loading", flush=True)
            if stop.after_step():
                break
    optimizer.synchronize()
    print("saved", flush=True)

GUARD
"""


@pytest.mark.parametrize(
    "way", ["fork", *(pytest.param(one, marks=later) for one in ("spawn", "forkserver"))]
)
def test_what_asks_ranks_to_end_spares_their_workers(tmp_path: Path, way: str) -> None:
    """SLURM signals all processes of a rank."""
    program = tmp_path / "train_loading.py"
    program.write_text(LOADING.replace("GUARD", "if __name__ == '__main__':\n    main()"))
    words = ["run", "-n", "2", "--ranks-per-node", "1", str(program), way]
    job = subprocess.Popen(
        [sys.executable, "-m", "daso", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    said = [job.stdout.readline() for _ in range(2)]  # of two ranks, perhaps in one line
    assert "".join(said).count("loading") == 2
    run = f"{sys.executable} -m mpi4py"
    ranks = [pid for pid, words in alive(str(program)).items() if words.startswith(run)]
    below = [pid for rank in ranks for pid in descendants(rank)]
    assert len(below) >= 4
    for pid in below:
        os.kill(pid, signal.SIGTERM)
    out, err = job.communicate(timeout=HANG_SECONDS)
    assert out.count("saved") == 2, err
    assert job.returncode == 0
    wait_for_none_left(program)


@pytest.mark.later("waits for workers to fail")
def test_a_program_without_a_guard_is_told_what_its_workers_lack(tmp_path: Path) -> None:
    program = tmp_path / "train_unguarded.py"
    program.write_text(LOADING.replace("GUARD", "main()"))
    run = run_on(2, program, "spawn")
    assert run.returncode != 0
    assert "put what trains behind `if __name__ == '__main__':`" in run.stderr
    wait_for_none_left(program)


BESIDE_TORCH = """
import atexit, os
from pathlib import Path
import torch
import torch.distributed as dist
import daso


def show():
    tasks = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print(f"{tasks.count('pt_gloo_runloop')} threads of gloo\\n", end="", flush=True)


atexit.register(show)  # what is registered later comes first
world = daso.init(torch_backend="gloo")
dist.all_reduce(torch.ones(1))
if RAISES and world.rank == 1:
    raise RuntimeError("the disk is on fire")
"""


FAILING = """
import daso
world = daso.init()
print("hello from", world.rank, flush=True)
def divide():
    return 1 / 0
if world.rank in RANKS:
    divide()
OTHERS
"""


def failing(folder: Path, ranks: str, others: str = "world.barrier()") -> Path:
    program = folder / "divide.py"
    program.write_text(FAILING.replace("RANKS", ranks).replace("OTHERS", others))
    return program


@pytest.mark.later("starts ranks")
def test_an_error_that_all_ranks_raise_is_printed_once(tmp_path: Path) -> None:
    run = run_on(3, failing(tmp_path, "(0, 1, 2)"))
    assert run.returncode == 1
    assert run.stdout.count("hello from") == 3
    assert run.stderr.count("Traceback") == 1
    assert "runpy" not in run.stderr
    assert "Abort" not in run.stderr
    assert run.stderr.splitlines()[-2:] == [
        "daso: all 3 ranks failed: ZeroDivisionError: division by zero",
        "daso: the job ended with exit code 1",
    ]


@pytest.mark.later("starts ranks")
def test_each_rank_prints_its_traceback_where_that_is_asked_for(tmp_path: Path) -> None:
    words = ("run", "-n", "2", failing(tmp_path, "(0, 1)"))
    run = ended("daso", *words, DASO_TRACEBACKS="all")
    assert run.returncode != 0
    assert run.stderr.count("Traceback") == 2
    assert "all 2 ranks" not in run.stderr


@pytest.mark.later("starts ranks")
@pytest.mark.parametrize(
    "others", ["world.barrier()", "raise ZeroDivisionError('division by zero')"]
)
def test_an_error_of_some_ranks_is_printed_by_them(tmp_path: Path, others: str) -> None:
    """Also where the others raise one of the same text in another line."""
    run = run_on(3, failing(tmp_path, "(1,)", others))
    assert run.returncode != 0
    assert "daso: rank 1 of 3 on " in run.stderr
    assert "in divide" in run.stderr
    assert "all 3 ranks" not in run.stderr


def test_an_error_beside_torchs_process_group_is_printed(tmp_path: Path) -> None:
    """Its hook for errors prints what others wrote once they return, and ours ends the job."""
    program = tmp_path / "train_beside_torch.py"
    program.write_text(BESIDE_TORCH.replace("RAISES", "True"))
    run = run_on(2, program)
    assert run.returncode != 0
    assert "RuntimeError: the disk is on fire" in run.stderr
    assert "daso: rank 1 of 2 on " in run.stderr
    wait_for_none_left(program)


@pytest.mark.later("starts a program many times")
def test_no_thread_of_gloo_outlives_the_program(tmp_path: Path) -> None:
    """One that gives back a tensor while the interpreter ends is ended, and the process with it."""
    program = tmp_path / "train_beside_torch.py"
    program.write_text(BESIDE_TORCH.replace("RAISES", "False"))
    run = run_on(2, program)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("0 threads of gloo") == 2, run.stdout


def descendants(pid: int) -> list[int]:
    """A process and those that it started, and theirs."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").glob("*/children"))
        children = [int(word) for task in tasks for word in task.read_text().split()]
    except OSError:  # it has ended
        return []
    return [pid, *(one for child in children for one in descendants(child))]


def child_of(pid: int) -> int:
    """A process that another one started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def wait_for_none_left(program: Path, but: int = 0) -> None:
    deadline = time.monotonic() + 10 * slowness()
    while left := {pid: words for pid, words in alive(str(program)).items() if pid != but}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.later("four jobs")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_ending_daso_run_alone_ends_all_ranks(tmp_path: Path, name: str) -> None:
    """Signals that a terminal, a batch system or a person sends to this one process."""
    program = tmp_path / f"train_until_{name}.py"
    job = started(program)
    job.send_signal(signal.Signals[name])
    job.communicate(timeout=HANG_SECONDS)
    assert job.returncode != 0
    wait_for_none_left(program)


@pytest.mark.later("waits for a rank that stands still")
def test_waiting_rank_prints_its_error_when_rank_0_is_stopped(tmp_path):
    """`daso train` has rank 0 print errors; here rank 0 is what the other waits for."""
    fault = "stop rank 0 at step 5 for 60 s"
    words = ("-m", "daso", "run", "-n", "2", "--ranks-per-node", "1", "--fault", fault)
    train = ("-m", "daso", "train", "--data.name=digits", "--epochs=50", f"--runs={tmp_path}")
    limits = ("--schedule.policy=fixed", "--schedule.skip=1", "--exchange.timeout_seconds=3")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, *train, *limits],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "daso: rank 1 of 2 on " in done.stderr
    assert "no answer from world rank 0" in done.stderr
    assert time.monotonic() - begun < 45 * slowness()


ENDING = """
import sys
import torch
import daso

topology = daso.init()
torch.manual_seed(0)
opened = []
for how in sys.argv[1].split(","):
    model = torch.nn.Linear(5, 5)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = daso.DASO(inner, module=model, policy=daso.Fixed(4, 1))
    opened.append(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 5) + topology.rank).square().sum().backward()
        optimizer.step()
    if how == "synchronize":
        optimizer.synchronize()
    elif how == "averaged":
        with optimizer.averaged():
            print(model.weight.sum())
    elif how == "state":
        optimizer.state_dict()
    elif how == "raises":
        raise ValueError("of the user's")
"""


@pytest.mark.parametrize(
    ("how", "ranks_per_node"),
    [("", 1), ("", 2), ("synchronize,averaged,state", 1), ("raises", 1)],
)
def test_a_program_that_ends_while_nodes_differ_is_told(
    tmp_path: Path, how: str, ranks_per_node: int
) -> None:
    program = tmp_path / "train_ending.py"
    program.write_text(ENDING)
    done = ended("daso", "run", "-n", "2", "--ranks-per-node", ranks_per_node, program, how)
    assert (done.returncode == 0) == (how != "raises")
    said = done.stderr.count("this one ends while they hold different parameters")
    assert said == (0 if how or ranks_per_node == 2 else 1), done.stderr
