"""Ranks that torchrun started find each other, before MPICH starts in them.

The first one starts a small server for all (`daso.comm.torchrun.pmi_server`), and says in the store
that torchrun's agents share where it is. Each has a connection to it, which MPICH takes for that to
its launcher.
"""

import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from daso.comm.torchrun.pmi_server import HERE
from daso.environment import TorchrunAgents
from daso.errors import TopologyError, told

__all__ = ["rendezvous"]

GRACE_SECONDS = 5.0  # for the server, which knows who is missing
AGAIN_SECONDS = 0.2

_servers: list["subprocess.Popen[str]"] = []  # each ends with this process, and before


def rendezvous(agents: TorchrunAgents, limit_seconds: float) -> socket.socket:
    """Meet all ranks; return a connection to who tells them of each other.

    What the store says may be of an earlier start of these ranks: who finds nobody there looks
    again.

    Args:
        agents: What torchrun told this rank.
        limit_seconds: How long it waits for the others.

    Raises:
        TopologyError: Ranks did not come.

    Collective over the world; blocking.
    """
    place, deadline = f"daso/{agents.start}", time.monotonic() + limit_seconds
    problem = "rank 0 did not come"
    try:
        store = _store(agents, limit_seconds)
        if agents.rank == 0:
            store.set(place, _start_server(agents.size, limit_seconds))
        while time.monotonic() < deadline:
            try:
                return _met(agents, store.get(place).decode(), deadline)
            except OSError as error:
                problem = told(error)
                time.sleep(AGAIN_SECONDS)
    except RuntimeError as error:  # of torch's store
        problem = told(error)
    raise TopologyError(
        f"ranks that torchrun started must all start MPI within {limit_seconds:g} s, but world "
        f"rank {agents.rank} of {agents.size} met no other ({problem}); see that each calls "
        f"daso.init(), and reaches {agents.host}"
    )


def _met(agents: TorchrunAgents, server: str, deadline: float) -> socket.socket:
    """Return a connection to a server that says that all ranks are there."""
    port, token = server.split()
    left = max(AGAIN_SECONDS, deadline - time.monotonic())
    connection = socket.create_connection((agents.host, int(port)), left)
    try:
        connection.sendall(f"{token} {agents.rank} {socket.gethostname()}\n".encode())
        connection.settimeout(left + GRACE_SECONDS)
        with connection.makefile("rb", buffering=0) as lines:
            said = lines.readline().decode().strip()
    except OSError:
        connection.close()
        raise
    if said == HERE:
        connection.settimeout(None)
        return connection
    connection.close()
    if not said:
        raise ConnectionError("the server of an earlier start has ended")
    missing = said.removeprefix("missing ").replace(",", ", ")
    raise TopologyError(
        f"ranks that torchrun started must all start MPI in time, but of {agents.size} world rank "
        f"{missing} did not come; see that each calls daso.init()"
    )


def _store(agents: TorchrunAgents, limit_seconds: float) -> Any:
    """Return the store of torchrun's agents."""
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # not exported
    limit = timedelta(seconds=limit_seconds)
    return make_store(agents.host, agents.port, is_master=False, timeout=limit)


def _start_server(size: int, limit_seconds: float) -> str:
    """Start who tells ranks of each other; return its port and the word to say to it."""
    words = [sys.executable, "-m", "daso.comm.torchrun.pmi_server", str(size), str(limit_seconds)]
    # It ends when its standard input does: with this process.
    pipe = subprocess.PIPE
    server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    _servers.append(server)
    assert server.stdout is not None
    with server.stdout as lines:
        line = lines.readline().strip()
    if not line:
        raise TopologyError(
            f"rank 0 must be able to start `{' '.join(words[1:3])}`, but that ended with exit code "
            f"{server.wait()}; see that {sys.executable} finds daso from any folder"
        )
    return line
