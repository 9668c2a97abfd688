"""Start programs and commands: `typed` in this process, `started` in one of its own."""

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

LAUNCHERS = ("PMI", "PMIX", "OMPI_", "PRTE_", "HYD", "MPI", "SLURM_", "DASO_")
TAG = 4747
# Ranks that wait give their core away: other tests run beside them. MPICH, then Open MPI.
POLITE = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
HANG_SECONDS = 250.0  # what takes longer hangs; no measure of speed, on any machine


def slowness() -> float:
    """Return how many times longer things take here than alone: limits in seconds are of that."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def outside() -> dict[str, str]:
    """Return the environment without what a launcher told this rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}


@contextmanager
def hidden_launcher() -> Iterator[None]:
    """Let a framework believe that this process is alone: it would start a process group else."""
    with mock.patch.dict(os.environ, outside(), clear=True):
        yield


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `daso` as it is typed, but in this process: it starts in no time."""
    from daso.cli.main import main

    return _typed(main, words)


def typed_benchmark(*words: object) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/bench WORDS`` in this process."""
    from benchmarks.command import main

    return _typed(main, words)


def _typed(
    main: Callable[[list[str]], int], words: Sequence[object]
) -> subprocess.CompletedProcess[str]:
    out, err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    out.seek(0)
    return subprocess.CompletedProcess(words, code, out.read(), err.getvalue())


def started(
    *words: object, seconds: float = HANG_SECONDS, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m WORDS`` as a user does, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        env={**POLITE, **os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def benchmark(*words: object, seconds: float = HANG_SECONDS) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/bench WORDS``, in this environment."""
    scripts = Path(__file__).parents[2] / "scripts"
    return started(
        "benchmarks", *words, seconds=seconds, PYTHONPATH=f"{scripts}:{scripts.parent / 'slurm'}"
    )


def run(
    command: Sequence[object], *, seconds: float = HANG_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a command as if no launcher had started us."""
    env = {**POLITE, **outside(), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in command]
    return subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=seconds, check=False
    )


def run_on(ranks: int, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program under `daso run`."""
    return run([sys.executable, "-m", "daso", "run", "-n", ranks, program, *arguments])


def once(world: Any, work: Callable[[], Any]) -> Any:
    """Return what rank 0's work returns; the others sleep, for a rank waiting in MPI costs a core.

    Collective over the world; blocking.
    """
    if world.Get_rank() > 0:
        while not world.iprobe(source=0, tag=TAG):
            time.sleep(0.01)
        result = world.recv(source=0, tag=TAG)
    else:
        try:
            result = work()
        except Exception as error:
            result = error
        for rank in range(1, world.Get_size()):
            world.send(result, rank, TAG)
    if isinstance(result, Exception):
        raise result
    return result
