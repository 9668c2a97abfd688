"""Tells MPICH's ranks of each other, as its own launcher would: PMI-1, a few lines over TCP.

    python -m daso.comm.torchrun.pmi_server SIZE SECONDS

prints the port on which it listens and a word that ranks have to say. It ends when all ranks have
gone, when one goes that others wait for, and with its standard input.

A protocol of lines, ``cmd=... key=value ...``: MPICH, ``src/pmi`` (wire protocol of PMI version 1).
"""

import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import IO

__all__ = ["HERE", "RankLostError", "Ranks", "main", "mapping_of"]

HERE = "all ranks are here"  # said to each once all have come
LIMITS = "kvsname_max=256 keylen_max=64 vallen_max=1024"
LONGEST = 450  # of a value: MPICH cuts what does not fit into its line of 1,024, names included
MAPPING = "PMI_process_mapping"
GREETING_BYTES = 512  # at most: a word, a rank, a host


class RankLostError(Exception):
    """A rank has gone that others wait for, or asked for the end of all."""


def mapping_of(hosts: Sequence[str]) -> str | None:
    """Return which ranks share a host, in PMI's words: (host, hosts, ranks of each), in order.

    None where that is longer than MPICH reads; it finds out by itself then.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    runs = [(numbers[host], len(list(ranks))) for host, ranks in groupby(hosts)]
    blocks: list[list[int]] = []  # first host, hosts that follow it, ranks of each
    for host, ranks in runs:
        if blocks and [sum(blocks[-1][:2]), blocks[-1][2]] == [host, ranks]:
            blocks[-1][1] += 1
        else:
            blocks.append([host, 1, ranks])
    text = ",".join(f"({first},{count},{ranks})" for first, count, ranks in blocks)
    return f"(vector,{text})" if len(text) < LONGEST else None


class Ranks:
    """What ranks said, and what each is answered.

    Args:
        hosts: Host of every rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.size = len(hosts)
        # MPICH names what ranks of a host share by it: no other job there may have the same.
        self.name = f"daso_{secrets.token_hex(8)}"
        mapping = mapping_of(hosts)
        self._values = {} if mapping is None else {MAPPING: mapping}
        self._waiting, self._ended = set[int](), set[int]()  # ranks

    def answer(self, rank: int, line: str) -> Mapping[int, str]:
        """Return what which ranks are answered to a line of one.

        Raises:
            RankLostError: It asks for the end of all.
        """
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command = words.get("cmd", "")
        if command == "abort":
            raise RankLostError
        if command == "finalize":
            self._ended.add(rank)
        if command != "barrier_in":
            return {rank: self._told(command, words.get("key", ""), line)}
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return {}
        self._waiting.clear()
        return dict.fromkeys(range(self.size), "cmd=barrier_out rc=0")

    def gone(self, rank: int) -> None:
        """Take in that a rank is not connected any more.

        Raises:
            RankLostError: It had not ended, so that others would wait for it in vain.
        """
        if rank not in self._ended:
            raise RankLostError

    def _told(self, command: str, key: str, line: str) -> str:
        """Return what a rank is told that waits for nobody."""
        value = self._values.get(key)
        if command == "put":  # what is told may have blanks in it
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
            there = value is not None
            return f"cmd=get_result rc={0 if there else -1} value={value if there else 'unknown'}"
        if command in known:
            return f"cmd={known[command]} rc=0"
        return f"cmd={command}_result rc=-1 msg=not_here"  # such as to start more ranks


def main(words: Sequence[str]) -> None:
    """Serve one world of ranks; blocking."""
    size, seconds = int(words[0]), float(words[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ranks end first
        signal.signal(number, signal.SIG_IGN)
    token = secrets.token_hex(16)
    with listening() as listener:
        print(listener.getsockname()[1], token, flush=True)
        sys.stdout.close()
        here = Rendezvous(size, token).wait(listener, sys.stdin, time.monotonic() + seconds)
    missing = [str(rank) for rank in range(size) if rank not in here]
    said = f"missing {','.join(missing)}" if missing else HERE
    for connection, _ in here.values():
        connection.setblocking(True)
        with suppress(OSError):  # of one that has gone: the others are to know
            connection.sendall(f"{said}\n".encode())
    if not missing:
        with suppress(RankLostError):
            _serve([here[rank] for rank in range(size)])


def listening() -> socket.socket:
    """Return a socket that listens on a free port of all interfaces."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


class Rendezvous:
    """Who has come so far.

    Args:
        size: Ranks that are to come.
        token: What each says first.
    """

    def __init__(self, size: int, token: str) -> None:
        self._size, self._token = size, token.encode()
        self._here: dict[int, tuple[socket.socket, str]] = {}  # connections and hosts by rank
        self._begun: dict[socket.socket, bytes] = {}  # what others have said so far
        self._selector = selectors.DefaultSelector()

    def wait(
        self, listener: socket.socket, parent: IO[str], deadline: float
    ) -> dict[int, tuple[socket.socket, str]]:
        """Return connections and hosts once all ranks are here, or time is over.

        Args:
            listener: Where they come.
            parent: Ends when who started this has gone, and all of it with him.
            deadline: In seconds of `time.monotonic`.
        """
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(parent, selectors.EVENT_READ)
        while len(self._here) < self._size and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is parent:
                    sys.exit(1)
                if key.fileobj is listener:
                    with suppress(OSError):  # it has gone again
                        self._open(listener.accept()[0])
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]  # a socket
        for connection in self._begun:
            connection.close()
        self._selector.close()
        return self._here

    def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._begun[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        """Read from a connection: a greeting, or its end."""
        try:
            more = connection.recv(GREETING_BYTES)
        except OSError:
            more = b""
        text = self._begun.get(connection, b"") + more
        self._begun[connection] = text
        if more and not text.endswith(b"\n") and len(text) < GREETING_BYTES:
            return
        rank, host = self._greeted(text) if more else (None, "")
        for before in [at for at, (other, _) in self._here.items() if other is connection]:
            del self._here[before]
        del self._begun[connection]
        if rank is not None and rank not in self._here:
            self._here[rank] = connection, host
            return  # its end is still listened for
        self._selector.unregister(connection)
        connection.close()

    def _greeted(self, text: bytes) -> tuple[int | None, str]:
        """Return the rank and the host that a greeting tells of; None: it is no rank's."""
        token, rank, host = (*text.rstrip(b"\n").split(b" "), b"", b"", b"")[:3]
        known = secrets.compare_digest(token, self._token) and rank.isdigit()
        if not known or int(rank) >= self._size:
            return None, ""
        return int(rank), host.decode(errors="replace")


def _serve(here: Sequence[tuple[socket.socket, str]]) -> None:
    """Answer ranks until all have gone."""
    ranks, begun = Ranks([host for _, host in here]), [b""] * len(here)
    with selectors.DefaultSelector() as selector:
        for rank, (connection, _) in enumerate(here):
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank, connection = key.data, here[key.data][0]
                try:
                    more = connection.recv(1 << 16)
                except OSError:
                    more = b""
                if not more:
                    selector.unregister(connection)
                    ranks.gone(rank)
                    continue
                *lines, begun[rank] = (begun[rank] + more).split(b"\n")
                for line in lines:
                    _tell(here, ranks.answer(rank, line.decode()))


def _tell(here: Sequence[tuple[socket.socket, str]], answers: Mapping[int, str]) -> None:
    for rank, answer in answers.items():
        with suppress(OSError):  # it has gone
            here[rank][0].sendall(f"{answer}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
