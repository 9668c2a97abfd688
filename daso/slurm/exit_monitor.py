"""Says which rank was killed first: a killed rank cannot speak, and mpirun names no rank.

A small process of its own watches each rank of a SLURM job. The rank tells it when it ends by
itself; where it ends without that, the first one of the job to see it prints one line.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from daso.environment import has_marks, is_first_to_end, read_launch
from daso.processes import open_process

__all__ = ["start"]

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
STDERR = 2
ENDS = b"."  # what a rank writes when it ends by itself


def start() -> Callable[[], None]:
    """Start to watch this process, before it starts MPI.

    Returns:
        What tells that this process ends by itself; idempotent.
    """
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
        # Its parent ends at once: the rank has no child for which it might wait.
        try:
            if os.fork() == 0:
                _watch(rank, reader)
        finally:
            os._exit(0)
    os.waitpid(middle, 0)
    for descriptor in (reader, rank):
        os.close(descriptor)

    def end() -> None:
        with suppress(OSError):  # nobody watches any more
            os.write(writer, ENDS)

    return end


def _watch(rank: int, reader: int) -> None:
    """Wait for a rank to end, and say it where the rank does not."""
    os.setsid()
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    launch = read_launch()
    _let_go_of_the_launcher({rank, reader, STDERR})
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


def _let_go_of_the_launcher(kept: set[int]) -> None:
    """Close what a launcher may wait for."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # of the list itself
                os.close(int(path.name))
