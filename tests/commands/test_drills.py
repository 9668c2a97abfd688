"""Damage that a user may meet without a lost rank: file systems that hang, memory that is full."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import HANG_SECONDS, run
from soak_jobs import PRESET

pytestmark = pytest.mark.later("starts ranks for each drill")
COMMAND = (sys.executable, "-m", "daso", "run", "-n", "2", "--ranks-per-node")
KEYS = ("model", "exchanges", "dropped", "identical")


def trained(folder: Path, name: str, fault: str = "", *more: str) -> dict:
    """Return the summary of a training with a fault."""
    done = train(folder, name, fault, *more)
    assert done.returncode == 0, done.stderr
    assert ("daso: fault" in done.stderr) == ("hang" in fault)  # a repeated one prints nothing
    return json.loads((folder / name / "summary.json").read_text())


def train(folder: Path, name: str, fault: str = "", *more: str) -> subprocess.CompletedProcess[str]:
    faults = ("--fault", fault) if fault else ()
    words = ("-m", "daso", "train", *PRESET, "--epochs=2", f"--runs={folder}", f"--name={name}")
    return run([*COMMAND, "1", *faults, *words, *more])


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict:
    return trained(tmp_path_factory.mktemp("runs"), "whole")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_system_that_hangs_delays_a_checkpoint_and_changes_no_bit(
    tmp_path, whole, rank
) -> None:
    fault = f"hang rank {rank} at step 8 for 4 s"
    summary = trained(tmp_path, "x", fault, "--checkpoint.every=4")
    assert {key: summary[key] for key in KEYS} == {key: whole[key] for key in KEYS}
    assert summary["seconds"] > 3.5
    steps = sorted(path.parent.name for path in tmp_path.glob("x/checkpoints/step-*/manifest.json"))
    assert steps[-1] == f"step-{summary['steps']:08d}"


def test_a_rank_whose_file_system_hangs_longer_than_the_limit_is_named(tmp_path) -> None:
    fault = "hang rank 1 at step 8 for 600 s"
    limits = ("--checkpoint.every=4", "--exchange.timeout_seconds=3")
    done = train(tmp_path, "x", fault, *limits)
    assert done.returncode not in (0, None)
    assert "no answer from world rank 1 on host" in done.stderr


def test_a_rank_ten_times_slower_for_a_while_changes_no_bit(tmp_path, whole) -> None:
    fault = "slow rank 1 at every step for 0.1 s during 2 s"
    summary = trained(tmp_path, "x", fault)
    assert {key: summary[key] for key in KEYS} == {key: whole[key] for key in KEYS}
    assert summary["seconds"] > 1.5


def test_a_payload_that_changes_on_its_way_ends_the_job_and_names_both_ranks(tmp_path) -> None:
    words = ("--schedule.policy=fixed", "--schedule.skip=4", f"--runs={tmp_path}", "--name=x")
    fault = ("--fault", "flip rank 1 at messages 9")
    command = [*COMMAND[:5], "3", COMMAND[6], "1", *fault, "-m", "daso", "train", *PRESET, *words]
    done = run(command)
    assert done.returncode not in (0, None)
    text = r"but one changed between rank \d on host \S+ and rank 1 on host"
    assert re.search(text, done.stderr), done.stderr[-3000:]


PROGRAM = """
import torch, daso
world = daso.init()
model = torch.nn.Linear(2000, 1000)
optimizer = daso.DASO(torch.optim.SGD(model.parameters(), lr=0.1), module=model)
model(torch.ones(2, 2000)).sum().backward()
optimizer.step()
"""
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode > 0,
    reason="a process may not have a /dev/shm that no other process has",
)
def test_shared_memory_that_is_full_is_refused_by_name(tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = " ".join([*COMMAND, "2", str(program)])
    small = f"mount -t tmpfs -o size=12m tmpfs /dev/shm && exec {words}"
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", small],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert re.search(
        r"all 2 ranks failed: TopologyError: a node needs \d+ bytes of shared memory per rank, but "
        r"\d+ in all are more than the \d+ that are free; enlarge /dev/shm",
        done.stderr,
    ), done.stderr[-3000:]


def test_a_training_whose_disk_is_full_goes_on_from_the_checkpoint_before(tmp_path, whole) -> None:
    every = "--checkpoint.every=4"
    done = train(tmp_path, "x", "full rank 0 at step 10 after 1000 bytes", every)
    assert done.returncode == 1
    assert "a checkpoint must be written, but" in done.stderr
    assert "earlier checkpoints are untouched" in done.stderr
    summary = trained(tmp_path, "x", "", every, "--resume")
    assert {key: summary[key] for key in KEYS} == {key: whole[key] for key in KEYS}
    assert summary["resumed_at"] == 8
