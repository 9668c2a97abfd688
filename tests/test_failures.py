"""One rank raises, is killed, leaves or stalls: the whole job is gone soon, and says why."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, signal, sys, time
import torch
import daso

how = sys.argv[1]
place = daso.init().place
model = torch.nn.Linear(100, 100)
if sys.argv[2:] == ["server"]:
    optimizer = daso.EagerServer(
        model,
        lambda p: torch.optim.SGD(p, lr=0.1),
        staleness=5,
        exchange=daso.Exchange(stall_seconds=3.0),
    )
else:
    optimizer = daso.DASO(
        torch.optim.SGD(model.parameters(), lr=0.1),
        module=model,
        exchange=daso.Exchange(stall_seconds=3.0),
    )
for step in range(10**9):
    if step == 40 and place.rank == 0:  # a server's ranks may be some steps apart
        print("trouble at", time.time(), flush=True)
    if step == 50 and place.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise RuntimeError("the disk is on fire")
        if how == "exit":
            sys.exit(7)
        if how == "stall":
            time.sleep(600)
    optimizer.zero_grad()
    model(torch.randn(8, 100)).square().mean().backward()
    optimizer.step()
    time.sleep(0.001)
"""


def alive(marker: str) -> list[str]:
    """List processes whose command line holds the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if any(marker in word for word in words):
            found.append(" ".join(words))
    return found


def left_over(marker: str, *, within: float = 5.0) -> list[str]:
    """List what is still there after a moment: mpirun may return before its last rank is gone."""
    deadline = time.monotonic() + within
    while (found := alive(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("how", "message", "door"),
    [
        ("kill", "rank 1 ended first", "daso"),
        ("raise", "rank 1 of 4", "daso"),
        ("exit", "7", "daso"),
        ("stall", "world rank 1 did not", "daso"),
        ("kill", "rank 1 ended first", "server"),
        ("raise", "rank 1 of 4", "server"),
        ("stall", "world rank 1 makes", "server"),
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
        timeout=60,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seconds = time.time() - float(run.stdout.split("trouble at")[1].split()[0])
    assert run.returncode != 0
    assert message in run.stdout + run.stderr
    assert seconds < 10, f"gone after {seconds:.1f} s"
    assert left_over(str(program)) == []
    if how == "raise":
        assert "the disk is on fire" in run.stderr


def test_plain_mpirun_ends_too_when_a_rank_raises(tmp_path: Path) -> None:
    """Without `python -m mpi4py`: daso.init makes an uncaught exception end the job."""
    from daso.environment import find_mpirun
    from daso.run.local import Local

    program = tmp_path / "train_plain.py"
    program.write_text(PROGRAM)
    env = Local(ranks=2, ranks_per_node="1", program=("x",)).environment(
        os.environ, root=os.geteuid() == 0, cores=1
    )
    run = subprocess.run(
        [str(find_mpirun()), "-n", "2", sys.executable, str(program), "raise"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
    )
    assert run.returncode != 0
    assert "rank 1 of 2" in run.stderr
    assert left_over(str(program)) == []


def test_interrupting_ends_all_ranks(tmp_path: Path) -> None:
    import signal

    program = tmp_path / "train_interrupt.py"
    program.write_text(PROGRAM)
    job = subprocess.Popen(
        [sys.executable, "-m", "daso", "run", "-n", "2", str(program), "never"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert job.stdout is not None
    assert "trouble at" in job.stdout.readline()
    os.killpg(job.pid, signal.SIGINT)  # what Ctrl-C does
    job.communicate(timeout=20)
    assert job.returncode != 0
    assert left_over(str(program)) == []
