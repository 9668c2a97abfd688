"""Ways to pass packets between ranks: messages, and slots in windows that the sender writes to.

Messages are sent and received. A slot is a piece of the receiver's memory for packets of one
sender; there are two for each, taken in turn. The sender writes a packet, and after it the number
that tells that it is there; the receiver copies it out, and writes back how many it has taken: that
is the credit for the next ones. So no packet is written over while it is read, and none is missed.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from daso.comm.dtypes import byte_buffer
from daso.comm.emulation import LinkModel, emulated_link
from daso.comm.mpi import library, load
from daso.comm.p2p.emulated_link import LinkedPackets
from daso.comm.shared_memory import SharedWindow
from daso.comm.topology import Topology
from daso.errors import ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Messages",
    "OneSidedMemory",
    "Packets",
    "RmaSlots",
    "SharedMemory",
    "one_sided_seconds",
    "routes",
]

PACKET = 7  # tag
SLOTS = 2  # of each sender at each receiver
NUMBER = 8  # bytes
BUSY_SECONDS = 0.3  # for which a target stays out of MPI, to find out whether others wait for it
SLOW_SECONDS = 0.1


class Packets(Protocol):
    """Passes packets between this rank and some others; used by one thread."""

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool] | None:
        """Begin to send a packet; does not wait for the receiver."""
        ...

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived: world rank and bytes, of one rank in the order of sending."""
        ...

    def free(self) -> None:
        """Give everything back. Collective; blocking; idempotent."""
        ...


class Messages:
    """Two-sided messages.

    Args:
        comm: Communicator of its own; its ranks are world ranks.
    """

    def __init__(self, comm: "MPI.Comm") -> None:
        mpi = load()
        self._comm, self._anybody, self._byte = comm, mpi.ANY_SOURCE, mpi.BYTE
        self._status = mpi.Status()
        self._arriving: dict[int, deque[tuple[MPI.Request, torch.Tensor]]] = {}

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool]:
        """Begin to send a packet."""
        request = self._comm.Isend(byte_buffer(packet), to, PACKET)  # which holds the packet
        return request.Test

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived."""
        status = self._status
        while (message := self._probe()) is not None:
            packet = torch.empty(status.Get_count(self._byte), dtype=torch.uint8, device="cpu")
            request = message.Irecv(byte_buffer(packet))
            self._arriving.setdefault(status.Get_source(), deque()).append((request, packet))
        for source, arriving in self._arriving.items():
            while arriving and arriving[0][0].Test():
                yield source, arriving.popleft()[1]

    def _probe(self) -> "MPI.Message | None":
        # A probe that finds nothing takes in what has come meanwhile (MPICH), for the next to find:
        # without it one message is found for each call, however many have come.
        found = self._comm.Improbe(self._anybody, PACKET, self._status)
        return found or self._comm.Improbe(self._anybody, PACKET, self._status)

    def free(self) -> None:
        """Nothing is held."""


class SlotMemory(Protocol):
    """Memory of this rank to which others write, and theirs."""

    own: torch.Tensor  # (nbytes,), of this rank

    def refresh(self) -> None:
        """Let later reads of ``own`` see what others wrote."""
        ...

    def write(self, to: int, offset: int, row: torch.Tensor) -> None:
        """Write to another's memory; what is written later is not seen before it."""
        ...

    def free(self) -> None:
        """Give the memory back. Collective; blocking; idempotent."""
        ...


class SharedMemory:
    """Memory that ranks of one node share.

    Args:
        node: Communicator of the node.
        nbytes: Of each rank.

    Collective over the node; blocking.
    """

    def __init__(self, node: "MPI.Comm", nbytes: int) -> None:
        self._window = SharedWindow(node, nbytes)
        self.own = self._window.segments[node.Get_rank()]

    def refresh(self) -> None:
        """Let later reads see what others wrote."""
        self._window.sync()

    def write(self, to: int, offset: int, row: torch.Tensor) -> None:
        """Write to another's memory."""
        self._window.sync()
        self._window.segments[to][offset : offset + row.numel()] = row
        self._window.sync()

    def free(self) -> None:
        """Give the memory back."""
        self.own = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._window.free()


class OneSidedMemory:
    """Memory to which other nodes put, one-sided.

    Allocated by MPI: operations on memory that a program brings along stall in Open MPI.

    Args:
        comm: Communicator over all who write.
        nbytes: Of each rank.

    Collective over the communicator; blocking.
    """

    def __init__(self, comm: "MPI.Comm", nbytes: int) -> None:
        mpi = load()
        self._comm, self._window = comm, mpi.Win.Allocate(nbytes, 1, comm=comm)
        self._window.Lock_all()
        self.own = torch.from_numpy(np.frombuffer(self._window.tomemory(), dtype=np.uint8))
        self.own.zero_()
        comm.Barrier()

    def refresh(self) -> None:
        """Let later reads see what others wrote; a library may move things only when called."""
        self._comm.Iprobe()
        self._window.Sync()

    def write(self, to: int, offset: int, row: torch.Tensor) -> None:
        """Put, and wait until it is there: a library may reorder what is under way."""
        buffer, place = byte_buffer(row), (offset, row.numel(), load().BYTE)
        self._window.Put(buffer, to, place)
        self._window.Flush(to)

    def free(self) -> None:
        """Give the memory back."""
        if self._window == load().WIN_NULL:
            return
        self.own = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._window.Unlock_all()
        self._window.Free()


class RmaSlots:
    """Packets in slots.

    Args:
        make: Makes the memory of so many bytes.
        ranks: World rank of each index in that memory.
        rank: This rank, of the world.
        most_bytes: Of a packet.

    Collective over these ranks; blocking.
    """

    def __init__(
        self, make: Callable[[int], SlotMemory], ranks: Sequence[int], rank: int, most_bytes: int
    ) -> None:
        self._ranks, self._me = ranks, ranks.index(rank)
        self._slot = 2 * NUMBER + -(-most_bytes // NUMBER) * NUMBER
        self._memory = make(len(ranks) * (SLOTS * self._slot + NUMBER))
        self._sent, self._taken = [0] * len(ranks), [0] * len(ranks)

    def _place(self, sender: int, count: int) -> int:
        """Return where a sender's packet lies, in bytes: its number, its size, itself."""
        return (sender * SLOTS + count % SLOTS) * self._slot

    def _credit(self, receiver: int) -> int:
        """Return where a receiver writes to its sender how many packets it took."""
        return len(self._ranks) * SLOTS * self._slot + receiver * NUMBER

    def _number(self, at: int) -> int:
        return int(self._memory.own[at : at + NUMBER].view(torch.int64))

    def _write_number(self, to: int, at: int, number: int) -> None:
        self._memory.write(to, at, torch.tensor([number], device="cpu").view(torch.uint8))

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool] | None:
        """Write a packet, if a slot is free."""
        peer = self._ranks.index(to)
        count = self._sent[peer]
        self._memory.refresh()
        if count - self._number(self._credit(peer)) >= SLOTS:
            return None
        at = self._place(self._me, count)
        size = torch.tensor([packet.numel()], device="cpu").view(torch.uint8)
        self._memory.write(peer, at + NUMBER, torch.cat([size, packet]))
        self._write_number(peer, at, count + 1)
        self._sent[peer] = count + 1
        return lambda: True

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what has arrived."""
        self._memory.refresh()
        for peer, rank in enumerate(self._ranks):
            while (packet := self._next(peer)) is not None:
                yield rank, packet

    def _next(self, peer: int) -> torch.Tensor | None:
        count = self._taken[peer]
        at = self._place(peer, count)
        if peer == self._me or self._number(at) != count + 1:
            return None
        self._memory.refresh()
        start = at + 2 * NUMBER
        packet = self._memory.own[start : start + self._number(at + NUMBER)].clone()
        self._taken[peer] = count + 1
        self._write_number(peer, self._credit(self._me), count + 1)
        return packet

    def free(self) -> None:
        """Give the memory back."""
        self._memory.free()


def one_sided_seconds(comm: "MPI.Comm") -> float:
    """Return how long a small put takes to a rank that does not call MPI meanwhile.

    Collective over the communicator; blocking for about half a second.
    """
    memory = OneSidedMemory(comm, NUMBER)
    rank, size = comm.Get_rank(), comm.Get_size()
    taken, failed = 0.0, None
    for turn in range(2):
        comm.Barrier()
        if rank % 2 == turn:
            start = time.perf_counter()
            try:
                memory.write(
                    (rank + 1) % size, 0, torch.ones(NUMBER, dtype=torch.uint8, device="cpu")
                )
            except load().Exception as error:  # all ranks meet again before anybody raises
                failed = error
            taken = time.perf_counter() - start
        else:
            time.sleep(BUSY_SECONDS)
    comm.Barrier()
    memory.free()
    if failed is not None:
        raise failed
    return taken


def routes(
    topology: Topology, comm: "MPI.Comm", transport: str, most_bytes: int
) -> tuple[dict[int, Packets], list[Packets]]:
    """Return how packets reach each other rank, and all ways in the order to free them in.

    Collective over the world; blocking.
    """
    found, ways = _real_routes(topology, comm, transport, most_bytes)
    link, rank_info = emulated_link(), topology.rank_info
    if link is not None:
        link = _share(link, topology)
        linked = {way: LinkedPackets(way, link) for way in set(found.values())}
        for rank, way in found.items():
            if rank_info.node_of[rank] != rank_info.node:
                found[rank] = linked[way]
    return found, ways


def _share(link: LinkModel, topology: Topology) -> LinkModel:
    """Return one rank's share of a node's link, of which the given one is a lane's."""
    if topology.local_size == topology.lanes:
        return link
    rate = link.bytes_per_second * topology.lanes / topology.local_size
    return LinkModel(rate, link.latency_seconds)


def _real_routes(
    topology: Topology, comm: "MPI.Comm", transport: str, most_bytes: int
) -> tuple[dict[int, Packets], list[Packets]]:
    rank_info = topology.rank_info
    others = [rank for rank in range(rank_info.world_size) if rank != rank_info.rank]
    if transport == "messages":
        messages = Messages(comm)
        return dict.fromkeys(others, messages), [messages]
    found: dict[int, Packets] = {}
    ways: list[Packets] = []  # on every rank alike: freeing them is collective
    if rank_info.nodes > 1:
        _check_one_sided(topology, comm)
        everybody = range(rank_info.world_size)
        putting = RmaSlots(lambda n: OneSidedMemory(comm, n), everybody, rank_info.rank, most_bytes)
        found = dict.fromkeys(others, putting)
        ways.append(putting)
    mates = [
        rank for rank in range(rank_info.world_size) if rank_info.node_of[rank] == rank_info.node
    ]
    if rank_info.local_size > 1:
        shared = RmaSlots(
            lambda n: SharedMemory(topology.node_comm, n), mates, rank_info.rank, most_bytes
        )
        found |= dict.fromkeys([rank for rank in mates if rank != rank_info.rank], shared)
        ways.append(shared)
    return found, ways


def _check_one_sided(topology: Topology, comm: "MPI.Comm") -> None:
    problem, seconds = None, 0.0
    try:
        seconds = one_sided_seconds(comm)
    except load().Exception as error:
        problem = f"but {library()} has none here: {error}"
    if problem is None and seconds > SLOW_SECONDS:
        problem = (
            f"but with {library()} one took {seconds:.2f} s to a rank that was computing for "
            f"{BUSY_SECONDS:g} s"
        )
    if problem is not None:
        problem = (
            f"transport='windows' needs puts between nodes that do not wait for their target, "
            f"{problem}; use transport='messages'"
        )
    topology.raise_on_all_ranks(problem, ConfigError)
