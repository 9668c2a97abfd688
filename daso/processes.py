"""Parents of processes: which process started a rank, and the rank's end if it is killed. Linux."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PROXY = "hydra_pmi_proxy"  # of MPICH and Intel MPI
STARTERS = (PROXY, "prterun", "prted")  # prterun and prted are Open MPI 5's


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel signal this process when its parent is killed and cannot forward signals."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_starter() -> None:
    """Kill this rank when the process that started it ends.

    MPICH's mpiexec does not notice that its proxy was killed; Open MPI's mpirun, when it continues
    without lost ranks, leaves the others running when one aborts. srun ends its ranks itself.
    """
    if _name_of(os.getppid()) in STARTERS:
        end_with_parent(signal.SIGKILL)


def open_process(pid: int) -> int | None:
    """Return a descriptor that polls readable when a process ends; None if it ended or unsupported.

    Linux before 5.3, and Python built on an older one, do not support it.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def is_proxy(pid: int) -> bool:
    """Return whether a process is MPICH's proxy, which starts the ranks of a host."""
    return _name_of(pid) == PROXY


def _name_of(pid: int) -> str:
    """Return a process's own name; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the id of a process's parent; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[1])
