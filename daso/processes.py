"""Parents of processes: who started a rank, and what happens to it when that is killed. Linux."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

__all__ = ["end_with_parent", "end_with_starter", "is_proxy", "open_process", "parent_of"]

PR_SET_PDEATHSIG = 1
PROXY = "hydra_pmi_proxy"  # of MPICH and Intel MPI
STARTERS = (PROXY, "prterun", "prted")  # the others of Open MPI 5


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let this process get a signal when its parent is killed, which can pass on nothing then."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_starter() -> None:
    """Let this rank end with what mpirun started it by.

    MPICH's mpiexec does not see that its proxy was killed; Open MPI's mpirun, where it goes on
    without lost ranks, leaves the others behind when one aborts. srun ends its ranks by itself.
    """
    if _name_of(os.getppid()) in STARTERS:
        end_with_parent(signal.SIGKILL)


def open_process(pid: int) -> int | None:
    """Return a descriptor that tells when a process ends; None where it has, or nobody can tell.

    Linux before 5.3 cannot, and neither can a Python that was built on an older one.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def is_proxy(pid: int) -> bool:
    """Return whether a process is what MPICH's mpiexec starts ranks by."""
    return _name_of(pid) == PROXY


def _name_of(pid: int) -> str:
    """Return what a process calls itself; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the number of a process's parent; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])
