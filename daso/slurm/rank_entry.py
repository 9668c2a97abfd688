"""Run a rank's program, and keep what an exit code says.

``python -m mpi4py -m daso.slurm.rank_entry PROGRAM``.

A program that has saved its work and wants to be started again ends with exit code 75. Under srun
that code is lost: the first rank to end has the others killed, and srun reports the kill (measured
with MPICH 5.0 and SLURM 22.05: 137). So it is also written down, for the batch script to see; and a
rank waits for the others before it ends so, for they may still be saving.

SLURM's signal before the time limit may come up to a minute early, before the program listens, or
when it is over; it kills then. So it is listened to from the start, as `daso.checkpoint.preemption`
asks.
"""

import atexit
import os
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType

from daso.comm.mpi import wait_for_all
from daso.environment import is_first_to_end, note_requeue, read_cpu_mask
from daso.errors import ConfigError
from daso.slurm import exit_monitor

__all__ = ["run"]

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
WAIT_SECONDS = 60.0  # for ranks that save longer than this one


class Remember:
    """A handler that does nothing but know whether the signal came."""

    def __init__(self) -> None:
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Remember it."""
        self.heard = True


def run(words: list[str]) -> None:
    """Run a program in this process, as Python does."""
    signal.signal(signal.SIGUSR1, Remember())
    _bind()
    ends_by_itself = exit_monitor.start()
    atexit.register(ends_by_itself)
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            sys.path[0] = str(Path.cwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code == REQUEUE:
            wait_for_all(WAIT_SECONDS)
            note_requeue()
        if end.code:
            is_first_to_end()  # others are killed for it
        ends_by_itself()
        raise
    except BaseException:  # mpi4py says it, and ends the job
        is_first_to_end()
        ends_by_itself()
        raise


def _bind() -> None:
    """Keep to the cores that srun would have bound this rank to."""
    cores = read_cpu_mask()
    if cores is None:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(
            f"CPU masks must name cores that this job has, but {sorted(cores)} are not: "
            f"{error.strerror}; take the masks out, or ask for whole nodes"
        ) from error


if __name__ == "__main__":
    run(sys.argv[1:])
