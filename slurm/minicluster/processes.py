"""The processes that hold a cluster's namespaces, and programs run inside them."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from daso.errors import ConfigError, DasoError
from minicluster.text import CONTROL, Minicluster

__all__ = ["PATH", "ClusterError", "call", "check_root", "inside", "kill", "process_of"]

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CALL_SECONDS = 20
REAP_SECONDS = 3


class ClusterError(DasoError):
    """The cluster could not be started, or does not answer."""


def check_root() -> None:
    """Refuse anybody but root.

    Raises:
        ClusterError: It is somebody else.
    """
    if os.geteuid() != 0:
        raise ClusterError("minicluster must run as root, which may make namespaces; use sudo")


def call(*words: str, text: str = "", conf: str | None = None) -> str:
    """Run a short program to its end and return what it prints.

    Args:
        words: The command.
        text: Its standard input.
        conf: The slurm.conf of a SLURM command.

    Raises:
        ClusterError: It failed.
    """
    env = {"PATH": PATH, "LC_ALL": "C", **({"SLURM_CONF": conf} if conf else {})}
    try:
        done = subprocess.run(
            words,
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)} did not end in {CALL_SECONDS} s") from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(words)} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def holders(token: str) -> dict[int, str]:
    """Find the processes that hold a cluster's namespaces.

    Args:
        token: The cluster's.

    Returns:
        Process ids; for each the name of its host if it is process 1 there, else "".
    """
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return {pid: name for pid in pids if (name := _held_by(pid, token)) is not None}


def _held_by(pid: int, token: str) -> str | None:
    """Return the host that a process holds, "" for its launcher; None for any other process."""
    path = Path("/proc", str(pid))
    try:
        words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        # Anybody can write a command line: only root's counts.
        if words[-1:] != [token] or path.stat().st_uid != 0:
            return None
    except OSError:  # it has just ended
        return None
    return Path(words[1]).parent.name if words[0] == "sh" else ""


def process_of(cluster: Minicluster, name: str) -> int:
    """Return the process id of a host.

    Raises:
        ConfigError: There is no such host.
        ClusterError: It is gone, or this is not root.
    """
    check_root()
    if name not in (*cluster.names, CONTROL):
        raise ConfigError(
            f"a host must be one of {cluster.names[0]} to {cluster.names[-1]}, not {name!r}"
        )
    for pid, host in holders(cluster.token).items():
        if host == name:
            return pid
    raise ClusterError(f"{name} must be running, but it is gone; run `down`, then `up`")


def inside(pid: int, *kinds: str) -> list[str]:
    """Return the command that what follows is run with to run inside a host."""
    return ["nsenter", f"--target={pid}", *(f"--{kind}" for kind in kinds), "--"]


def kill(token: str) -> None:
    """End every process of a cluster, and wait until they are gone."""
    deadline = time.monotonic() + CALL_SECONDS
    killed = set[int]()
    empty = 0
    while empty < 2:  # twice: a process may just have been started, and not carry the token yet
        pids = holders(token)
        killed |= set(pids)
        open_ = [descriptor for pid in pids if (descriptor := _kill(pid, token)) is not None]
        for descriptor in open_:
            select.select([descriptor], [], [], max(0, deadline - time.monotonic()))
            os.close(descriptor)
        empty = 0 if open_ else empty + 1
        if time.monotonic() > deadline:
            raise ClusterError(
                f"the processes {sorted(holders(token))} must end when killed, but they are still "
                f"there; look at them, then run `down` again"
            )
        time.sleep(0.01)
    _reaped(killed)


def _reaped(pids: Iterable[int]) -> None:
    """Wait until the init of this machine has reaped what was killed, as far as it does."""
    deadline = time.monotonic() + REAP_SECONDS
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill(pid: int, token: str) -> int | None:
    """Kill a process and return a descriptor that tells of its end; None if it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The descriptor holds the process, its number may have gone to another: look again.
    if _held_by(pid, token) is None:
        os.close(descriptor)
        return None
    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    return descriptor
