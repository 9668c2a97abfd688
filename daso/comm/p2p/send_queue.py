"""Unsolicited messages between ranks, cut into packets and sent in order of urgency.

Receivers need not expect them. `daso.comm.p2p.packets` transmits packets. One thread moves them;
any thread may enqueue. A queued message delays a more urgent one by at most the packets in flight.
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

HEAD_BYTES = 8 * 4  # of a packet: number of the message, its bytes, offset, bytes of notes
MAX_IN_FLIGHT = 3  # packets per destination


@dataclass(frozen=True, slots=True)
class Message:
    """A message to another rank.

    Args:
        notes: A small object that can be pickled.
        payload: Bytes (nbytes,) on the host; must not be changed any more.
        urgency: The smallest is sent first.
        covers: Replaces an earlier message to the same rank that is not partly sent and whose
            ``covers`` is a subset; empty: replaces none.
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
        """Return the next packet, with its header."""
        size = min(most, self.nbytes - self.sent)
        packet = torch.empty(HEAD_BYTES + size, dtype=torch.uint8, device="cpu")
        head = packet[:HEAD_BYTES].view(torch.int64)
        head.copy_(
            torch.tensor([self.number, self.nbytes, self.sent, len(self.notes)], device="cpu")
        )
        self._copy(packet[HEAD_BYTES:])
        self.sent += size
        return packet

    def _copy(self, target: torch.Tensor) -> None:
        first = self.sent
        of_notes = max(0, min(len(self.notes) - first, target.numel()))
        if of_notes:
            notes = torch.frombuffer(
                bytearray(self.notes[first : first + of_notes]), dtype=torch.uint8
            )
            target[:of_notes] = notes
        start = max(0, first - len(self.notes))
        target[of_notes:] = self.message.payload[start : start + target.numel() - of_notes]


@dataclass(slots=True)
class _Destination:
    """Queue of messages to one rank."""

    waiting: list[_Outgoing] = field(default_factory=list)  # a heap
    in_flight: deque[tuple[Callable[[], bool], int]] = field(default_factory=deque)  # , bytes
    nbytes: int = 0  # not sent yet


@dataclass(slots=True)
class _Incoming:
    row: torch.Tensor
    notes: int
    missing: int


class SendQueue:
    """Sends and receives the messages of one rank.

    Args:
        routes: The route to each other rank.
        packet_bytes: Maximum bytes of a message in one packet.
    """

    def __init__(self, routes: Mapping[int, Packets], packet_bytes: int) -> None:
        self.packet_bytes = packet_bytes
        self._routes, self._transports = routes, set(routes.values())
        self.sent_bytes = 0  # of messages to all ranks
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._destinations: dict[int, _Destination] = {}  # by rank; only with unsent messages
        self._open: dict[tuple[int, int], _Incoming] = {}
        self._arrived: deque[tuple[int, Message]] = deque()

    def enqueue(self, to: int, message: Message) -> None:
        """Queue a message; any thread may call this. Does not block."""
        notes = pickle.dumps(message.notes)
        notes += bytes(-len(notes) % 8)  # aligns the payload
        outgoing = _Outgoing(message.urgency, next(self._numbers), notes, message)
        with self._lock:
            destination = self._destinations.setdefault(to, _Destination())
            if message.covers:
                self._replace(destination, message.covers)
            heapq.heappush(destination.waiting, outgoing)
            destination.nbytes += outgoing.nbytes

    @staticmethod
    def _replace(destination: _Destination, covers: frozenset[int]) -> None:
        """Drop unsent messages that the new message covers."""
        stale = [
            queued
            for queued in destination.waiting
            if queued.sent == 0 and queued.message.covers and queued.message.covers <= covers
        ]
        for queued in stale:
            destination.waiting.remove(queued)
            destination.nbytes -= queued.nbytes
        if stale:
            heapq.heapify(destination.waiting)

    @property
    def backlog_bytes(self) -> int:
        """Unsent bytes of the rank with the longest queue."""
        with self._lock:
            return max(
                (destination.nbytes for destination in self._destinations.values()), default=0
            )

    @property
    def idle(self) -> bool:
        """True if every queued message has been sent."""
        return not self._destinations

    # --- by the thread that moves them -------------------------------------------------------

    def move(self) -> bool:
        """Send and receive without blocking; return whether messages arrived. In one thread."""
        with self._lock:
            destinations = [*self._destinations.items()]
        for rank, destination in destinations:
            self._send(rank, destination)
        self._receive()
        return bool(self._arrived)

    def take(self) -> Iterator[tuple[int, Message]]:
        """Yield received messages with their senders, those of one rank in the order of sending."""
        while self._arrived:
            yield self._arrived.popleft()

    def _send(self, rank: int, destination: _Destination) -> None:
        left_bytes = 0
        while destination.in_flight and destination.in_flight[0][0]():
            left_bytes += destination.in_flight.popleft()[1]
        if left_bytes:
            with self._lock:
                destination.nbytes -= left_bytes
                if not destination.nbytes:
                    del self._destinations[rank]
                    return
        while len(destination.in_flight) < MAX_IN_FLIGHT:
            packet = self._next_packet(destination)
            if packet is None:
                return
            has_left = self._routes[rank].start(rank, packet)
            nbytes = packet.numel() - HEAD_BYTES
            self.sent_bytes += nbytes
            destination.in_flight.append((has_left, nbytes))

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
        for transport in self._transports:
            for source, packet in transport.arrived():
                self._accept(source, packet)

    def _accept(self, source: int, packet: torch.Tensor) -> None:
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
        contents = pickle.loads(row[:notes].numpy().tobytes())
        self._arrived.append((source, Message(contents, row[notes:])))
