"""A PMI-1 server for MPICH, with which the ranks of torchrun become one MPI world.

World rank 0 starts `python -m daso.comm.torchrun.pmi SIZE SECONDS`, which prints its port and a
token for the ranks. Rank 0 puts both into the store of torchrun's agents. MPICH uses each rank's
connection to that server as the connection to its launcher. The server ends when all ranks have
disconnected, when one disconnects that others wait for, and when its standard input closes.

The protocol consists of lines, ``cmd=... key=value ...``: wire protocol of PMI version 1, in
MPICH's ``src/pmi``. MPI_Comm_connect and MPI_Comm_join are no alternative: MPICH 5.0.2 refuses
them between processes that started MPICH separately, since each of them is process 0.
"""

import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import IO, Any

from daso.environment import TorchrunAgents
from daso.errors import TopologyError, summarize

GRACE_SECONDS = 5.0  # for the server to name the missing ranks
RETRY_SECONDS = 0.2
ALL_CONNECTED = "all ranks are here"  # sent to each rank once all have connected
LIMITS = "kvsname_max=256 keylen_max=64 vallen_max=1024"
MAX_VALUE = 450  # characters: MPICH truncates a line at 1,024 characters, including names
MAPPING = "PMI_process_mapping"
GREETING_BYTES = 512  # at most: token, rank, host

_servers: list["subprocess.Popen[str]"] = []  # keeps their standard input open


# --- by ranks -----------------------------------------------------------------------------------


def rendezvous(agents: TorchrunAgents, limit_seconds: float) -> socket.socket:
    """Return a connection to the server, once all ranks are connected. Collective; blocking."""
    key, deadline = f"daso/{agents.start}", time.monotonic() + limit_seconds
    problem = "rank 0 did not come"
    try:
        store = _store(agents, limit_seconds)
        if agents.rank == 0:
            store.set(key, _start_server(agents.size, limit_seconds))
        while time.monotonic() < deadline:
            try:
                return _connect(agents, store.get(key).decode(), deadline)
            except OSError as error:  # the store may hold the server of an earlier start
                problem = summarize(error)
                time.sleep(RETRY_SECONDS)
    except RuntimeError as error:  # from torch's store
        problem = summarize(error)
    raise TopologyError(
        f"ranks that torchrun started must all start MPI within {limit_seconds:g} s, but world "
        f"rank {agents.rank} of {agents.size} met no other ({problem}); see that each calls "
        f"daso.init(), and reaches {agents.host}",
        code="torchrun-rank-alone",
    )


def _connect(agents: TorchrunAgents, server: str, deadline: float) -> socket.socket:
    """Return a connection to a server, once all ranks are connected to it."""
    port, token = server.split()
    left = max(RETRY_SECONDS, deadline - time.monotonic())
    connection = socket.create_connection((agents.host, int(port)), left)
    try:
        connection.sendall(f"{token} {agents.rank} {socket.gethostname()}\n".encode())
        connection.settimeout(left + GRACE_SECONDS)
        with connection.makefile("rb", buffering=0) as lines:
            reply = lines.readline().decode().strip()
    except OSError:
        connection.close()
        raise
    if reply == ALL_CONNECTED:
        connection.settimeout(None)
        return connection
    connection.close()
    if not reply:
        raise ConnectionError("the server of an earlier start has ended")
    missing = reply.removeprefix("missing ").replace(",", ", ")
    raise TopologyError(
        f"ranks that torchrun started must all start MPI in time, but of {agents.size} world rank "
        f"{missing} did not come; see that each calls daso.init()",
        code="torchrun-ranks-missing",
    )


def _store(agents: TorchrunAgents, limit_seconds: float) -> Any:
    """Return a client of the store of torchrun's agents."""
    import torch.distributed as dist

    make_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # not exported
    limit = timedelta(seconds=limit_seconds)
    return make_store(agents.host, agents.port, is_master=False, timeout=limit)


def _start_server(size: int, limit_seconds: float) -> str:
    """Start the server; return its port and token as one line."""
    words = [sys.executable, "-m", "daso.comm.torchrun.pmi", str(size), str(limit_seconds)]
    # The server ends when its standard input closes, which is when this process ends.
    pipe = subprocess.PIPE
    server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    _servers.append(server)
    assert server.stdout is not None
    with server.stdout as lines:
        line = lines.readline().strip()
    if not line:
        raise TopologyError(
            f"rank 0 must be able to start `{' '.join(words[1:3])}`, but that ended with exit code "
            f"{server.wait()}; see that {sys.executable} finds daso from any folder",
            code="torchrun-server-failed",
        )
    return line


# --- the server ---------------------------------------------------------------------------------


class RankLostError(Exception):
    """A rank that others wait for has disconnected, or a rank has aborted."""


def mapping_of(hosts: Sequence[str]) -> str | None:
    """Return PMI's mapping of ranks to hosts, or None if MPICH would truncate it."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    runs = [(numbers[host], len(list(ranks))) for host, ranks in groupby(hosts)]
    blocks: list[list[int]] = []  # first host, number of consecutive hosts, ranks of each
    for host, ranks in runs:
        if blocks and [sum(blocks[-1][:2]), blocks[-1][2]] == [host, ranks]:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1, ranks])
    text = ",".join(f"({first},{count},{ranks})" for first, count, ranks in blocks)
    return f"(vector,{text})" if len(text) < MAX_VALUE else None  # then MPICH determines it


class Ranks:
    """State of the PMI server: the key-value pairs of all ranks, and the ranks in a barrier."""

    def __init__(self, hosts: Sequence[str]) -> None:  # of every rank
        self.size = len(hosts)
        # MPICH names shared memory by it, so that no other job on a host may have the same.
        self.name = f"daso_{secrets.token_hex(8)}"
        mapping = mapping_of(hosts)
        self._values = {} if mapping is None else {MAPPING: mapping}
        self._waiting, self._ended = set[int](), set[int]()  # ranks

    def answer(self, rank: int, line: str) -> Mapping[int, str]:
        """Return (rank, reply) pairs for one PMI request; raise `RankLostError` for an abort."""
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command = words.get("cmd", "")
        if command == "abort":
            raise RankLostError
        if command == "finalize":
            self._ended.add(rank)
        if command != "barrier_in":
            return {rank: self._reply(command, words.get("key", ""), line)}
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return {}
        self._waiting.clear()
        return dict.fromkeys(range(self.size), "cmd=barrier_out rc=0")

    def disconnect(self, rank: int) -> None:
        """Handle the disconnection of a rank; raise `RankLostError` unless it has finalized."""
        if rank not in self._ended:  # other ranks would wait for it forever
            raise RankLostError

    def _reply(self, command: str, key: str, line: str) -> str:
        """Return the reply to a request that does not wait for other ranks."""
        value = self._values.get(key)
        if command == "put":  # a value may contain blanks
            self._values[key] = line.partition(" value=")[2]
        known = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1",
            "get_maxes": f"maxes {LIMITS}",
            "get_appnum": "appnum appnum=0",
            "get_my_kvsname": f"my_kvsname kvsname={self.name}",
            "get_universe_size": f"universe_size size={self.size}",
            "put": "put_result msg=success",
            "finalize": "finalize_ack",
        }
        if command == "get":
            exists = value is not None
            return f"cmd=get_result rc={0 if exists else -1} value={value if exists else 'unknown'}"
        if command in known:
            return f"cmd={known[command]} rc=0"
        return f"cmd={command}_result rc=-1 msg=not_here"  # for example, to spawn ranks


def main(words: Sequence[str]) -> None:
    """Serve one world of ranks; blocking."""
    size, seconds = int(words[0]), float(words[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ranks end first
        signal.signal(number, signal.SIG_IGN)
    token = secrets.token_hex(16)
    with listening() as listener:
        print(listener.getsockname()[1], token, flush=True)
        sys.stdout.close()
        connections = Rendezvous(size, token).wait(listener, sys.stdin, time.monotonic() + seconds)
    missing = [str(rank) for rank in range(size) if rank not in connections]
    message = f"missing {','.join(missing)}" if missing else ALL_CONNECTED
    for connection, _ in connections.values():
        connection.setblocking(True)
        with suppress(OSError):  # of a rank that has disconnected
            connection.sendall(f"{message}\n".encode())
    if not missing:
        with suppress(RankLostError):
            _serve([connections[rank] for rank in range(size)])


def listening() -> socket.socket:
    """Return a socket that listens on a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Rendezvous:
    """Collects the connections of all ranks."""

    def __init__(self, size: int, token: str) -> None:  # each rank sends the token first
        self._size, self._token = size, token.encode()
        self._connected: dict[int, tuple[socket.socket, str]] = {}  # connections and hosts by rank
        self._pending: dict[socket.socket, bytes] = {}  # incomplete greetings
        self._selector = selectors.DefaultSelector()

    def wait(
        self, listener: socket.socket, parent: IO[str], deadline: float
    ) -> dict[int, tuple[socket.socket, str]]:
        """Return connections and hosts by rank, once all are there or at the deadline; blocking."""
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(parent, selectors.EVENT_READ)
        while len(self._connected) < self._size and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is parent:  # closed: the parent has ended
                    sys.exit(1)
                if key.fileobj is listener:
                    with suppress(OSError):  # the peer has disconnected
                        self._open(listener.accept()[0])
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]  # a socket
        for connection in self._pending:
            connection.close()
        self._selector.close()
        return self._connected

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._pending[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read a greeting, or the end of a connection."""
        try:
            more = connection.recv(GREETING_BYTES)
        except OSError:
            more = b""
        text = self._pending.get(connection, b"") + more
        self._pending[connection] = text
        if more and not text.endswith(b"\n") and len(text) < GREETING_BYTES:
            return
        rank, host = self._parse_greeting(text) if more else (None, "")
        earlier = [key for key, (other, _) in self._connected.items() if other is connection]
        for known_rank in earlier:
            del self._connected[known_rank]
        del self._pending[connection]
        if rank is not None and rank not in self._connected:
            self._connected[rank] = connection, host
            return  # stays registered, to detect its end
        self._selector.unregister(connection)
        connection.close()

    def _parse_greeting(self, text: bytes) -> tuple[int | None, str]:
        """Return the rank and the host of a greeting; the rank is None if it is invalid."""
        token, rank, host = (*text.rstrip(b"\n").split(b" "), b"", b"", b"")[:3]
        known = secrets.compare_digest(token, self._token) and rank.isdigit()
        if not known or int(rank) >= self._size:
            return None, ""
        return int(rank), host.decode(errors="replace")


def _serve(connections: Sequence[tuple[socket.socket, str]]) -> None:
    """Answer ranks until all have disconnected."""
    ranks, pending = Ranks([host for _, host in connections]), [b""] * len(connections)
    with selectors.DefaultSelector() as selector:
        for rank, (connection, _) in enumerate(connections):
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank, connection = key.data, connections[key.data][0]
                try:
                    more = connection.recv(1 << 16)
                except OSError:
                    more = b""
                if not more:
                    selector.unregister(connection)
                    ranks.disconnect(rank)
                    continue
                *lines, pending[rank] = (pending[rank] + more).split(b"\n")
                for line in lines:
                    _send(connections, ranks.answer(rank, line.decode()))


def _send(connections: Sequence[tuple[socket.socket, str]], answers: Mapping[int, str]) -> None:
    for rank, answer in answers.items():
        with suppress(OSError):  # the rank has disconnected
            connections[rank][0].sendall(f"{answer}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
