"""Signal handling of processes that a rank starts with multiprocessing (DataLoader workers).

SLURM and people signal all processes of a rank, workers included. A signal that asks a rank to save
and end would kill its workers at once, and thereby the rank.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from multiprocessing import forkserver, util

from daso.environment import note_ignored_signals, read_ignored_signals


def is_worker() -> bool:
    """Return whether this process is a worker of another one."""
    # Private: set while a spawned worker starts and runs the program's main module.
    is_starting = getattr(multiprocessing.current_process(), "_inheriting", False)
    return is_starting or multiprocessing.parent_process() is not None


def _serves_forks() -> bool:
    """Return whether this process forks workers for another one."""
    return "multiprocessing.forkserver" in " ".join(sys.orig_argv)


def ignore_in_workers(numbers: Iterable[int]) -> None:
    """Make workers started from now on ignore these signals, unless sent by their rank."""
    note_ignored_signals(numbers)
    known = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if __name__ not in known:
        forkserver.set_forkserver_preload([*known, __name__])


def shield_this_process() -> None:
    """Ignore signals in a worker, except SIGTERM from its rank, which ends it as usual.

    torch sets handlers of its own in DataLoader workers, so signals are blocked, not handled.
    """
    rank, numbers = read_ignored_signals()
    if not numbers or os.getpid() == rank:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    listen = threading.Thread(target=_listen, args=(numbers, rank), name="daso-worker", daemon=True)
    listen.start()


def _listen(numbers: frozenset[int], rank: int) -> None:
    while True:
        received = signal.sigwaitinfo(numbers)
        if received.si_signo == signal.SIGTERM and received.si_pid in (rank, os.getppid()):
            os._exit(0)


# For multiprocessing only: programs in other forks may need to be ended by a signal.
util.register_after_fork(shield_this_process, lambda shield: shield())
if is_worker() or _serves_forks():  # a new Python
    shield_this_process()
