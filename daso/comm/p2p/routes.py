"""Routes of packets between ranks: MPI messages, over an emulated link if one is set."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from daso.comm.emulation import LinkModel, emulated_link
from daso.comm.p2p.packets import Messages, Packets
from daso.comm.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI


def routes(topology: Topology, comm: "MPI.Comm") -> dict[int, Packets]:
    """Return the route to each other rank, by MPI messages on a separate communicator."""
    messages, rank_info = Messages(comm), topology.rank_info
    others = [rank for rank in range(rank_info.world_size) if rank != rank_info.rank]
    link = emulated_link()
    if link is None:
        return dict.fromkeys(others, messages)
    linked = LinkedPackets(messages, _share(link, topology))
    return {
        rank: messages if rank_info.node_of[rank] == rank_info.node else linked for rank in others
    }


def _share(link: LinkModel, topology: Topology) -> LinkModel:
    """Return the link of one rank, given that of a lane: all ranks of a node share its link."""
    if topology.local_size == topology.lanes:
        return link
    rate = link.bytes_per_second * topology.lanes / topology.local_size
    return LinkModel(rate, link.latency_seconds)


class LinkedPackets:
    """Delays packets until this rank's emulated link would have transmitted them, in order."""

    def __init__(self, packets: Packets, link: LinkModel) -> None:
        self._packets, self._link = packets, link
        self._delayed: deque[_DelayedPacket] = deque()  # in order of transmission

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool]:
        """Start to send a packet; it occupies the link after the packets before it."""
        delayed = _DelayedPacket(to, packet, self._link.occupy(packet.numel(), 1))
        self._delayed.append(delayed)
        return lambda: self._forward() or delayed.has_left()

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield received packets."""
        self._forward()
        yield from self._packets.arrived()

    def _forward(self) -> bool:
        """Send the packets that the link has transmitted by now; return False."""
        while self._delayed and self._delayed[0].start(self._packets):
            self._delayed.popleft()
        return False


class _DelayedPacket:
    """A packet on the emulated link."""

    def __init__(self, to: int, packet: torch.Tensor, due: float) -> None:
        self._to, self._packet, self._due = to, packet, due
        self._left: Callable[[], bool] | None = None

    def start(self, packets: Packets) -> bool:
        """Send the packet if the link has transmitted it; return whether it was sent."""
        if time.perf_counter() < self._due:
            return False
        self._left = packets.start(self._to, self._packet)
        return True

    def has_left(self) -> bool:
        """Return whether the packet was sent and has left."""
        return self._left is not None and self._left()
