"""GPU paths where there is no GPU: on devices that torch's dispatcher believes in.

What it finds: tensors that mix host and device, launches of two streams with nothing between them,
memory given back too early, a host that waits, copies that are read before they are there. What it
cannot show: times, a GPU's own rounding, NCCL and the driver. See tests/support/pretended_cuda.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import HANG_SECONDS
from on_mpi import run_on, run_tests

HERE = Path(__file__).parent
PRETENDED = HERE.parent / "support" / "pretended_cuda"
# Ranks and devices. More take long, and add no kind of node.
CASES = [
    *((HERE / "on_ranks.py", *sizes) for sizes in [(2, 1), (2, 2), (3, 3)]),
    *((HERE.parent / "ranks" / "test_device.py", *sizes) for sizes in [(2, 1), (3, 3)]),
    *((PRETENDED / "on_ranks.py", *sizes) for sizes in [(2, 1), (3, 3)]),
    *((PRETENDED / "on_kernels.py", *sizes) for sizes in [(2, 1)]),
]
WITH = ("-p", "pretended_cuda")
pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA's: see tests/gpu"),
    pytest.mark.skipif(
        not (os.environ.get("CXX") or shutil.which("g++")), reason="no g++ to compile the device"
    ),
]


def pytest_of(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", *WITH, *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )


def test_the_device_finds_what_it_is_there_to_find(monkeypatch) -> None:
    monkeypatch.setenv("DASO_PRETENDED_GPUS", "2")
    run = pytest_of(str(PRETENDED / "on_itself.py"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.slow
def test_copies_are_slowed_down_on_a_device_with_a_link() -> None:
    run = pytest_of(str(PRETENDED / "on_copies.py"))
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@pytest.mark.timeout(900)
def test_what_needs_a_device() -> None:
    run = pytest_of(str(HERE / "test_gpu.py"), "-k", "not share_devices")
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


@pytest.mark.timeout(900)
@pytest.mark.slow("a whole file of tests in one job")
@pytest.mark.parametrize(
    ("tests", "ranks", "gpus"), CASES, ids=lambda one: getattr(one, "stem", str(one))
)
def test_ranks_on_devices(tests: Path, ranks: int, gpus: int, record_property) -> None:
    """Over NCCL where each rank of a node has a device of its own, else by sums on the host."""
    variables = {
        "DASO_PRETENDED_GPUS": str(gpus),
        "TRITON_INTERPRET": str(int("kernels" in tests.stem)),
    }
    run_tests(ranks, record_property, *WITH, str(tests), timeout=880, **variables)


TRAIN = """
import pretended_cuda
pretended_cuda.install()
import sys, torch
from daso.cli.train import loop
from daso.cli.main import main

def watched(steps):
    for at, _ in enumerate(steps):
        torch.cuda.set_sync_debug_mode("default")
        yield
        if at > 2:  # buckets, rows and references are made
            torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")

real = loop._steps
loop._steps = lambda *given: watched(real(*given))
done = main(sys.argv[1:])
assert not (found := pretended_cuda.violations()), found
assert not pretended_cuda.pageable()
sys.exit(done)
"""


@pytest.mark.parametrize(("nodes", "gpus"), [("1,1", 1), ("2", 2)])
def test_training_from_the_command_line_never_waits(nodes, gpus, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DASO_PRETENDED_GPUS", str(gpus))
    monkeypatch.setenv("DASO_RANKS_PER_NODE", nodes)
    monkeypatch.setenv("PYTHONPATH", str(PRETENDED.parent), prepend=os.pathsep)
    words = ("--data.name=digits", "--device=cuda", "--epochs=1", f"--runs={tmp_path}", "--name=x")
    run = run_on(2, "-c", TRAIN, "train", *words, timeout=HANG_SECONDS)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    assert re.search(r"ranks identical +yes", run.stdout)
    assert (tmp_path / "x" / "summary.json").exists()
