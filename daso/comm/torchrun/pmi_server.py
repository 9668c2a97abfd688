"""Tells MPICH's ranks of each other, as its own launcher would: PMI-1, a few lines over TCP.

    python -m daso.comm.torchrun.pmi_server SIZE SECONDS

prints the port on which it listens and a word that ranks have to say. It ends when all have gone,
however they went.

A protocol of lines, ``cmd=... key=value ...``: MPICH, ``src/pmi`` (wire protocol of PMI version 1).
"""

import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence

__all__ = ["HERE", "Ranks", "main", "mapping_of"]

HERE = "all ranks are here"  # said to each once all have come
LIMITS = "kvsname_max=256 keylen_max=256 vallen_max=4096"
MAPPING = "PMI_process_mapping"


def mapping_of(hosts: Sequence[str]) -> str:
    """Return which ranks share a host, in PMI's words: (host, hosts, ranks of each), in order."""
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    blocks: list[list[int]] = []
    for host in hosts:
        if blocks and blocks[-1][0] == numbers[host]:
            blocks[-1][1] += 1
        else:
            blocks.append([numbers[host], 1])
    return "(vector," + ",".join(f"({host},1,{ranks})" for host, ranks in blocks) + ")"


class Ranks:
    """What ranks said, and what each is answered.

    Args:
        hosts: Host of every rank.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self.size = len(hosts)
        # MPICH names what ranks of a host share by it: no other job there may have the same.
        self.name = f"daso_{secrets.token_hex(8)}"
        self._values = {MAPPING: mapping_of(hosts)}
        self._waiting = set[int]()  # ranks

    def answer(self, rank: int, line: str) -> Mapping[int, str]:
        """Return what which ranks are answered to a line of one."""
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        if words.get("cmd") == "abort":  # torchrun sees it end
            return {}
        if words.get("cmd") != "barrier_in":
            return {rank: self._told(words, line)}
        self._waiting.add(rank)
        if len(self._waiting) < self.size:
            return {}
        self._waiting.clear()
        return dict.fromkeys(range(self.size), "cmd=barrier_out rc=0")

    def _told(self, words: Mapping[str, str], line: str) -> str:
        """Return what a rank is told that waits for nobody."""
        command, value = words.get("cmd", ""), self._values.get(words.get("key", ""))
        if command == "put":  # what is told may have blanks in it
            self._values[words["key"]] = line.partition(" value=")[2]
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
            found = value is not None
            return f"cmd=get_result rc={0 if found else -1} value={value if found else 'unknown'}"
        if command in known:
            return f"cmd={known[command]} rc=0"
        return f"cmd={command}_result rc=-1 msg=not_here"  # such as to start more ranks


def main(words: Sequence[str]) -> None:
    """Serve one world of ranks; blocking."""
    size, seconds = int(words[0]), float(words[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ranks end first
        signal.signal(number, signal.SIG_IGN)
    token = secrets.token_hex(16)
    with socket.create_server(("", 0), backlog=size) as door:
        print(door.getsockname()[1], token, flush=True)
        sys.stdout.close()
        came = _meet(door, size, token, time.monotonic() + seconds)
    missing = [str(rank) for rank in range(size) if rank not in came]
    said = f"missing {','.join(missing)}" if missing else HERE
    for connection, _ in came.values():
        connection.setblocking(True)
        connection.sendall(f"{said}\n".encode())
    if not missing:
        _serve([came[rank] for rank in range(size)])


def _meet(
    door: socket.socket, size: int, token: str, deadline: float
) -> dict[int, tuple[socket.socket, str]]:
    """Return the connections of ranks, and their hosts, once all have come, or time is over."""
    came: dict[int, tuple[socket.socket, str]] = {}
    while len(came) < size and (left := deadline - time.monotonic()) > 0:
        door.settimeout(left)
        try:
            connection, _ = door.accept()
            connection.settimeout(left)
            said, rank, host = _line(connection).split(" ")
        except (OSError, ValueError):  # nobody came, or somebody else
            continue
        if secrets.compare_digest(said, token) and rank.isdecimal():
            came[int(rank)] = connection, host
        else:
            connection.close()
    return came


def _line(connection: socket.socket) -> str:
    """Return the first line that is said on a connection, and read no further."""
    text = b""
    while not text.endswith(b"\n") and (more := connection.recv(1)):
        text += more
    return text.decode().rstrip("\n")


def _serve(came: Sequence[tuple[socket.socket, str]]) -> None:
    """Answer ranks until all have gone."""
    ranks, begun = Ranks([host for _, host in came]), [b""] * len(came)
    with selectors.DefaultSelector() as selector:
        for rank, (connection, _) in enumerate(came):
            selector.register(connection, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank, connection = key.data, came[key.data][0]
                try:
                    more = connection.recv(1 << 16)
                except OSError:
                    more = b""
                if not more:
                    selector.unregister(connection)
                    continue
                *lines, begun[rank] = (begun[rank] + more).split(b"\n")
                for line in lines:
                    _tell(came, ranks.answer(rank, line.decode()))


def _tell(came: Sequence[tuple[socket.socket, str]], answers: Mapping[int, str]) -> None:
    for rank, answer in answers.items():
        try:
            came[rank][0].sendall(f"{answer}\n".encode())
        except OSError:  # it has gone
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
