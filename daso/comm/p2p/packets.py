"""Packets between two ranks: two-sided messages, received whole."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch

from daso.comm.mpi import load
from daso.comm.reduction import byte_buffer

if TYPE_CHECKING:
    from mpi4py import MPI

PACKET = 7  # tag


class Packets(Protocol):
    """Sends packets to, and receives them from, some other ranks; used by one thread."""

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool]:
        """Start to send a packet; return a call that tests whether it has left. Does not block."""
        ...

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield received packets, each with its sender's world rank, in order for each sender."""
        ...


class Messages:
    """Sends packets as two-sided MPI messages."""

    def __init__(self, comm: "MPI.Comm") -> None:  # a separate one; its ranks are world ranks
        mpi = load()
        self._comm, self._any_source, self._byte = comm, mpi.ANY_SOURCE, mpi.BYTE
        self._status = mpi.Status()
        self._arriving: dict[int, deque[tuple[MPI.Request, torch.Tensor]]] = {}

    def start(self, to: int, packet: torch.Tensor) -> Callable[[], bool]:
        """Start to send a packet."""
        request = self._comm.Isend(byte_buffer(packet), to, PACKET)  # which holds the packet
        return request.Test

    def arrived(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield received packets."""
        status = self._status
        while (message := self._probe()) is not None:
            packet = torch.empty(status.Get_count(self._byte), dtype=torch.uint8, device="cpu")
            request = message.Irecv(byte_buffer(packet))
            self._arriving.setdefault(status.Get_source(), deque()).append((request, packet))
        for source, arriving in self._arriving.items():
            while arriving and arriving[0][0].Test():
                yield source, arriving.popleft()[1]

    def _probe(self) -> "MPI.Message | None":
        # With MPICH, a probe without a result progresses receives, so that the next probe succeeds:
        # with one probe only, each call would return at most one message.
        message = self._comm.Improbe(self._any_source, PACKET, self._status)
        return message or self._comm.Improbe(self._any_source, PACKET, self._status)
