"""Runs a rank's program; records its exit code, and reports the first rank that was killed.

``python -m mpi4py -m daso.slurm.rank_entry PROGRAM``.

A program that has saved its work and should be restarted ends with exit code 75. srun loses that
code: when the first rank ends, the others are killed, and srun reports the kill (measured with
MPICH 5.0 and SLURM 22.05: 137). So the code is also recorded for the batch script, and the rank
waits for the others before it ends, because they may still be saving.

SLURM's signal before the time limit may come up to a minute early, before the program has its
handler, or after the program has ended; it would kill the rank then. So a handler is set from the
start, as `daso.checkpoint.preemption` asks.

A killed rank reports nothing, and mpirun names no rank. So a small process watches each rank, and a
rank that ends by itself notifies it. The first watcher that sees another end prints a line.
"""

import atexit
import os
import runpy
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from daso.comm.mpi import wait_for_all
from daso.environment import has_marks, is_first_to_end, note_requeue, read_cpu_mask, read_launch
from daso.errors import ConfigError
from daso.processes import open_process

REQUEUE = 75  # EX_TEMPFAIL of sysexits.h
WAIT_SECONDS = 60.0  # for ranks that are still saving
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STDERR = 2
ENDS = b"."  # a rank writes it before it ends by itself


class Remember:
    """Signal handler that records whether the signal came."""

    def __init__(self) -> None:
        self.heard = False

    def __call__(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Record the signal."""
        self.heard = True


def run(words: list[str]) -> None:
    """Run a program in this process, as Python does."""
    signal.signal(signal.SIGUSR1, Remember())
    _bind()
    report_end = watch_exit()
    atexit.register(report_end)
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
            is_first_to_end()  # its end has the others killed
        report_end()
        raise
    except BaseException:  # mpi4py prints it, and ends the job
        is_first_to_end()
        report_end()
        raise


def _bind() -> None:
    """Bind this process to the cores that srun would have bound its rank to."""
    cores = read_cpu_mask()
    if cores is None:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(
            f"CPU masks must name cores that this job has, but {sorted(cores)} are not: "
            f"{error.strerror}; take the masks out, or ask for whole nodes",
            code="cpu-masks-outside-job",
        ) from error


def watch_exit() -> Callable[[], None]:
    """Start this process's watcher, before MPI; return a call that marks a regular end."""
    if not has_marks():
        return lambda: None
    rank = open_process(os.getpid())
    if rank is None:
        return lambda: None
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    middle = os.fork()
    if middle == 0:
        # Its parent ends at once, so that the rank has no child to wait for.
        try:
            if os.fork() == 0:
                _watch(rank, reader)
        finally:
            os._exit(0)
    os.waitpid(middle, 0)
    for descriptor in (reader, rank):
        os.close(descriptor)

    def end() -> None:
        with suppress(OSError):  # the watcher has ended
            os.write(writer, ENDS)

    return end


def _watch(rank: int, reader: int) -> None:
    """Wait for a rank to end; report it if the rank did not."""
    os.setsid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    launch = read_launch()
    _close_all_but({rank, reader, STDERR})
    ends = select.poll()
    ends.register(rank, select.POLLIN)
    ends.poll()
    os.set_blocking(reader, False)
    with suppress(BlockingIOError):
        if os.read(reader, 1):
            return
    if not is_first_to_end():
        return
    text = (
        f"daso: rank {launch.rank} of {launch.size} on {os.uname().nodename} exited without "
        f"reporting: it was killed (was there too little memory?), crashed, or called os._exit\n"
    )
    os.write(STDERR, text.encode())


def _close_all_but(open_descriptors: set[int]) -> None:
    """Close all other descriptors, on which a launcher may wait."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in open_descriptors:
            with suppress(OSError):  # the descriptor of this listing
                os.close(int(path.name))


if __name__ == "__main__":
    run(sys.argv[1:])
