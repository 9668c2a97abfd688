"""Messages between ranks that nobody has to expect, cut into packets, the most urgent first.

How packets cross is the business of `daso.comm.p2p.packets`. One thread moves them; any thread may
enqueue. A message that was queued earlier holds up one that is needed sooner for no longer than the
packets that are under way.
"""

import heapq
import itertools
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from daso.comm.p2p.packets import Packets

__all__ = ["HEAD_BYTES", "Message", "SendQueue"]

HEAD_BYTES = 8 * 4  # before a packet's: number of the message, its bytes, offset, bytes of notes
UNDER_WAY = 3  # packets to a rank


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank tells another.

    Args:
        notes: Anything small that pickles.
        payload: Bytes (nbytes,) on the host, not to be written to any more.
        urgency: The smallest leaves first.
        covers: Queued later for the same rank, it takes the place of one that has not begun to
            leave and covers no more than it; empty: of none.
    """

    notes: Any
    payload: torch.Tensor
    urgency: int = 0
    covers: frozenset[int] = frozenset()


@dataclass(order=True, slots=True)
class _Outgoing:
    urgency: int
    number: int
    notes: bytes = field(compare=False)
    message: Message = field(compare=False)
    sent: int = field(default=0, compare=False)  # bytes

    @property
    def nbytes(self) -> int:
        return len(self.notes) + self.message.payload.numel()

    def next_packet(self, most: int) -> torch.Tensor:
        """Return the next bytes to send, with their head."""
        size = min(most, self.nbytes - self.sent)
        packet = torch.empty(HEAD_BYTES + size, dtype=torch.uint8, device="cpu")
        head = packet[:HEAD_BYTES].view(torch.int64)
        head.copy_(
            torch.tensor([self.number, self.nbytes, self.sent, len(self.notes)], device="cpu")
        )
        self._copy(packet[HEAD_BYTES:])
        self.sent += size
        return packet

    def _copy(self, room: torch.Tensor) -> None:
        first = self.sent
        of_notes = max(0, min(len(self.notes) - first, room.numel()))
        if of_notes:
            notes = torch.frombuffer(
                bytearray(self.notes[first : first + of_notes]), dtype=torch.uint8
            )
            room[:of_notes] = notes
        start = max(0, first - len(self.notes))
        room[of_notes:] = self.message.payload[start : start + room.numel() - of_notes]


@dataclass(slots=True)
class _Destination:
    """What is to go to one rank."""

    waiting: list[_Outgoing] = field(default_factory=list)  # a heap
    under_way: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)  # and bytes
    stuck: torch.Tensor | None = None  # a packet for which there was no room
    nbytes: int = 0  # that have not left


@dataclass(slots=True)
class _Incoming:
    row: torch.Tensor
    notes: int
    missing: int


class SendQueue:
    """One rank's messages to and from the others.

    Args:
        routes: How packets reach each other rank; given back by whoever made them.
        packet_bytes: Of a message that cross in one packet.
    """

    def __init__(self, routes: Mapping[int, Packets], packet_bytes: int) -> None:
        self.packet_bytes = packet_bytes
        self._routes, self._ways = routes, set(routes.values())
        self.sent_bytes = 0  # to all, of messages
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._destinations: dict[int, _Destination] = {}  # of ranks to which something goes
        self._open: dict[tuple[int, int], _Incoming] = {}
        self._arrived: deque[tuple[int, Message]] = deque()

    def enqueue(self, to: int, message: Message) -> None:
        """Hand over a message; any thread. Does not block."""
        notes = pickle.dumps(message.notes)
        notes += bytes(-len(notes) % 8)  # so that numbers behind them can be read where they lie
        outgoing = _Outgoing(message.urgency, next(self._numbers), notes, message)
        with self._lock:
            destination = self._destinations.setdefault(to, _Destination())
            if message.covers:
                self._replace(destination, message.covers)
            heapq.heappush(destination.waiting, outgoing)
            destination.nbytes += outgoing.nbytes

    @staticmethod
    def _replace(destination: _Destination, covers: frozenset[int]) -> None:
        """Drop what has not begun to leave, and says less than a message that comes now."""
        stale = [
            one
            for one in destination.waiting
            if one.sent == 0 and one.message.covers and one.message.covers <= covers
        ]
        for one in stale:
            destination.waiting.remove(one)
            destination.nbytes -= one.nbytes
        if stale:
            heapq.heapify(destination.waiting)

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were queued and have not left, to the rank to which there are most."""
        with self._lock:
            return max(
                (destination.nbytes for destination in self._destinations.values()), default=0
            )

    @property
    def idle(self) -> bool:
        """Whether everything queued has left."""
        return not self._destinations

    # --- by the thread that moves them -------------------------------------------------------

    def move(self) -> bool:
        """Send and receive as far as possible without blocking; one thread."""
        with self._lock:
            destinations = [*self._destinations.items()]
        for rank, destination in destinations:
            self._send(rank, destination)
        self._receive()
        return bool(self._arrived)

    def take(self) -> Iterator[tuple[int, Message]]:
        """Yield what arrived, with who sent it: of one rank in the order in which it left."""
        while self._arrived:
            yield self._arrived.popleft()

    def _send(self, rank: int, destination: _Destination) -> None:
        gone = 0
        while destination.under_way and destination.under_way[0][0]():
            gone += destination.under_way.popleft()[1]
        if gone:
            with self._lock:
                destination.nbytes -= gone
                if not destination.nbytes:
                    del self._destinations[rank]
                    return
        while len(destination.under_way) < UNDER_WAY:
            packet = (
                destination.stuck
                if destination.stuck is not None
                else self._next_packet(destination)
            )
            if packet is None:
                return
            left = self._routes[rank].start(rank, packet)
            destination.stuck = packet if left is None else None
            if left is None:
                return
            nbytes = packet.numel() - HEAD_BYTES
            self.sent_bytes += nbytes
            destination.under_way.append((left, nbytes))

    def _next_packet(self, destination: _Destination) -> torch.Tensor | None:
        with self._lock:
            if not destination.waiting:
                return None
            first = destination.waiting[0]
            packet = first.next_packet(self.packet_bytes)
            if first.sent == first.nbytes:
                heapq.heappop(destination.waiting)
            return packet

    def _receive(self) -> None:
        for way in self._ways:
            for source, packet in way.arrived():
                self._take_up(source, packet)

    def _take_up(self, source: int, packet: torch.Tensor) -> None:
        number, nbytes, offset, notes = packet[:HEAD_BYTES].view(torch.int64).tolist()
        body = packet[HEAD_BYTES:]
        if body.numel() == nbytes:
            self._deliver(source, body, notes)
            return
        incoming = self._open.get((source, number))
        if incoming is None:
            row = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            incoming = self._open[source, number] = _Incoming(row, notes, nbytes)
        incoming.row[offset : offset + body.numel()] = body
        incoming.missing -= body.numel()
        if not incoming.missing:
            del self._open[source, number]
            self._deliver(source, incoming.row, incoming.notes)

    def _deliver(self, source: int, row: torch.Tensor, notes: int) -> None:
        told = pickle.loads(row[:notes].numpy().tobytes())
        self._arrived.append((source, Message(told, row[notes:])))
