"""Ranks that torchrun started find each other, before MPICH starts in them.

The first one starts a small server for all (`daso.comm.torchrun.pmi_server`), and says in the store
that torchrun's agents share where it is. Each has a connection to it, which MPICH takes for that to
its launcher.
"""

import socket
import subprocess
import sys
from datetime import timedelta
from typing import Any

from daso.comm.torchrun.pmi_server import HERE
from daso.environment import Agents
from daso.errors import TopologyError

__all__ = ["enter"]

GRACE_SECONDS = 5.0  # for the server, which knows who is missing

_servers: list["subprocess.Popen[str]"] = []  # each ends when all ranks have gone


def enter(agents: Agents, limit_seconds: float) -> socket.socket:
    """Meet all ranks; return a connection to who tells them of each other.

    Args:
        agents: What torchrun told this rank.
        limit_seconds: How long it waits for the others.

    Raises:
        TopologyError: Ranks did not come.

    Collective over the world; blocking.
    """
    place = f"daso/{agents.start}"
    try:
        store = _store(agents, limit_seconds)
        if agents.rank == 0:
            store.set(place, _start_server(agents.size, limit_seconds))
        port, token = store.get(place).decode().split()
        connection = socket.create_connection((agents.host, int(port)), limit_seconds)
        said = _tell(connection, f"{token} {agents.rank} {socket.gethostname()}", limit_seconds)
    except (OSError, RuntimeError) as error:  # of torch's store
        raise TopologyError(
            f"ranks that torchrun started must all start MPI within {limit_seconds:g} s, but world "
            f"rank {agents.rank} of {agents.size} met no other: {str(error).splitlines()[0]}; see "
            f"that each calls daso.init()"
        ) from error
    if said != HERE:
        connection.close()
        raise TopologyError(
            f"ranks that torchrun started must all start MPI within {limit_seconds:g} s, but world "
            f"rank {said.removeprefix('missing ').replace(',', ', ')} did not; see that each calls "
            f"daso.init()"
        )
    connection.settimeout(None)
    return connection


def _tell(connection: socket.socket, line: str, limit_seconds: float) -> str:
    """Say a line; return the one that is answered once all ranks are there, or time is over."""
    try:
        connection.sendall(f"{line}\n".encode())
        connection.settimeout(limit_seconds + GRACE_SECONDS)
        with connection.makefile("rb", buffering=0) as lines:
            return lines.readline().decode().strip()
    except OSError:
        connection.close()
        raise


def _store(agents: Agents, limit_seconds: float) -> Any:
    """Return the store of torchrun's agents."""
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # not exported
    limit = timedelta(seconds=limit_seconds)
    return make_store(agents.host, agents.port, is_master=False, timeout=limit)


def _start_server(size: int, limit_seconds: float) -> str:
    """Start who tells ranks of each other; return its port and the word to say to it."""
    words = [sys.executable, "-m", "daso.comm.torchrun.pmi_server", str(size), str(limit_seconds)]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    _servers.append(server)
    assert server.stdout is not None
    with server.stdout as told:
        return told.readline().strip()
