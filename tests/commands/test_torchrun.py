"""Ranks that torchrun starts, where MPI is MPICH: a world of MPI, as under its own launcher."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, outside, slowness

pytestmark = pytest.mark.later("starts torchrun and its ranks, for ten seconds each")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
PROGRAM = r"""
import os, sys
import torch
import torch.distributed as dist
import daso

if sys.argv[1:] == ["early"] and os.environ["RANK"] == "1":
    sys.exit(3)  # before it meets the others
equal = os.environ.get("DASO_RANKS_PER_NODE") != "2,1"  # nodes, or there is no mesh of them
world = daso.init(torch_backend="gloo" if equal else None)
torch.manual_seed(world.rank)
model = torch.nn.Linear(8, 3)
inner = torch.optim.SGD(model.parameters(), lr=0.1)
with daso.DASO(inner, module=model, policy=daso.Fixed(4, 1)) as optimizer:
    for step in range(12):
        if sys.argv[1:] == ["raise"] and step == 6 and world.rank == 1:
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise RuntimeError("the disk is on fire")
        optimizer.zero_grad()
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
    optimizer.synchronize()
total = torch.ones(1)
if equal:
    dist.all_reduce(total)
words = (world.rank, world.world_size, world.nodes, world.local_rank, int(total))
end = model.weight.double().sum().item().hex()
os.write(1, f"is {' '.join(map(str, words))} {end}\n".encode())  # at once: others write there too
"""
SAID = re.compile(r"^is (\d+) (\d+) (\d+) (\d+) (\d+) (\S+)$", re.MULTILINE)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def job() -> Iterator[str]:
    """A word in the environment of all processes of a job."""
    word = uuid.uuid4().hex
    yield word
    for pid in processes_of(word):
        os.kill(pid, signal.SIGKILL)


def start(job: str, *words: object, **variables: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*TORCHRUN, *map(str, words)],
        env={**outside(), "OMP_NUM_THREADS": "1", "DASO_TEST_JOB": job, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(job: str) -> list[int]:
    """Return what is left of a job."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has gone
            if f"DASO_TEST_JOB={job}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def none_is_left(job: str) -> bool:
    end = time.monotonic() + 5 * slowness()
    while processes_of(job) and time.monotonic() < end:
        time.sleep(0.1)
    return not processes_of(job)


def told(text: str) -> list[tuple[int, ...]]:
    """Return what ranks said, in their order: rank, world size, nodes, local rank, sum of ones."""
    return sorted(tuple(map(int, found[:5])) for found in SAID.findall(text))


def end_of(run: "subprocess.Popen[str]") -> tuple[str, str]:
    try:
        return run.communicate(timeout=HANG_SECONDS)
    finally:
        run.kill()


@pytest.mark.slow("starts ranks")
def test_ranks_of_one_agent_are_a_world(program: Path, job: str) -> None:
    run = start(job, "--standalone", "--nproc-per-node=3", program)
    out, err = end_of(run)
    assert run.returncode == 0, err[-3000:]
    assert told(out) == [(rank, 3, 1, rank, 3) for rank in range(3)]
    assert len({found[5] for found in SAID.findall(out)}) == 1  # all ended alike
    assert none_is_left(job)


@pytest.mark.slow("starts ranks")
def test_ranks_of_agents_that_start_unlike_numbers_are_a_world(program: Path, job: str) -> None:
    """As `srun torchrun --nnodes 2` on each node, which hands on what srun said to torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}"]
    runs = [
        start(
            job,
            *words,
            f"--node-rank={node}",
            f"--nproc-per-node={ranks}",
            program,
            DASO_RANKS_PER_NODE="2,1",
            PMI_FD="77",
            PMI_SIZE="2",
            PMI_RANK=str(node),
            PMIX_NAMESPACE="srun",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_PROCID=str(node),
        )
        for node, ranks in enumerate((2, 1))
    ]
    ends = [end_of(run) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], ends
    assert told(ends[0][0] + ends[1][0]) == [(0, 3, 2, 0, 1), (1, 3, 2, 1, 1), (2, 3, 2, 0, 1)]
    assert none_is_left(job)


@pytest.mark.slow("starts ranks, and again")
def test_a_rank_that_fails_ends_all_and_torchrun_starts_them_again(program: Path, job: str) -> None:
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", program, "raise"]
    run = start(job, *words, DASO_RANKS_PER_NODE="1")
    out, err = end_of(run)
    assert run.returncode == 0, err[-3000:]
    assert "the disk is on fire" in err
    assert [found[:3] for found in told(out)] == [(0, 2, 2), (1, 2, 2)]
    assert none_is_left(job)


@pytest.mark.slow("starts ranks")
def test_a_rank_that_ends_before_it_meets_the_others_leaves_none_behind(
    program: Path, job: str
) -> None:
    run = start(job, "--standalone", "--nproc-per-node=2", program, "early")
    out, err = end_of(run)
    assert run.returncode != 0
    assert "exitcode  : 3" in err
    assert told(out) == []
    assert none_is_left(job)
