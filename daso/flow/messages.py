"""Messages of a flow between ranks: one buffer each, a head and the tensors behind it."""

import struct
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import prod
from typing import NamedTuple

import torch

from daso.comm.dtypes import CODES, DTYPES
from daso.comm.p2p.packets import Packets
from daso.flow.model.base import Key, Payload
from daso.plan.layout import ALIGNMENT, aligned

__all__ = ["FINISHED", "NO_TICKET", "OVER", "Message", "Post", "Ticket", "pack", "unpack"]

# Instead of a node: all of an instance is over; the pass is over.
FINISHED, OVER = -1, -2

NUMBER = 8  # bytes
ABSENT = -1  # code of a gradient that there is none of


class Ticket(NamedTuple):
    """What an instance is given when it is let in, and its messages carry.

    Args:
        lane: Which replicas it goes through.
        after: How many instances each of the lane's ranks was told by then to be finished: what
            these changed is to be seen by it.
    """

    lane: int
    after: tuple[int, ...]


NO_TICKET = Ticket(0, ())


class Message(NamedTuple):
    """What goes from one node to another.

    Args:
        node: To which, or `FINISHED` or `OVER`.
        back: Whether these are gradients.
        port: At which it comes in; backward: at which it had left.
        key: Number of the instance and state.
        payload: Tensors.
        ticket: Of the instance.
    """

    node: int
    back: bool
    port: int
    key: Key
    payload: Payload
    ticket: Ticket


def pack(messages: Sequence[Message]) -> torch.Tensor:
    """Return messages as bytes (nbytes,) on the host; a copy.

    First how many numbers the head has, then the head, then the tensors' bytes.
    """
    numbers = [0, len(messages)]
    rows = []
    for node, back, port, key, payload, (lane, after) in messages:
        numbers += (node, back, port, lane, len(after), len(key), len(payload), *after, *key)
        for tensor in payload:
            if tensor is None:
                numbers += (ABSENT, 0, 0)
                continue
            numbers += (CODES[tensor.dtype], tensor.requires_grad, tensor.dim(), *tensor.shape)
            rows.append(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8))
    numbers[0] = len(numbers)
    head = struct.pack(f"<{len(numbers)}q", *numbers)  # a multiple of the alignment of tensors
    spans = aligned([row.numel() for row in rows])
    buffer = bytearray(len(head) + (spans[-1].stop if spans else 0))
    buffer[: len(head)] = head
    packet = torch.frombuffer(buffer, dtype=torch.uint8)
    body = packet[len(head) :]
    for (start, stop), row in zip(spans, rows, strict=True):
        body[start:stop] = row
    return packet


def unpack(packet: torch.Tensor, device: torch.device) -> Iterator[Message]:
    """Yield the messages in bytes; copies."""
    memory = memoryview(packet.numpy())  # type: ignore[arg-type]  # of numpy's stubs
    (count,) = struct.unpack_from("<q", memory)
    numbers = iter(struct.unpack_from(f"<{count - 1}q", memory, NUMBER))
    at = NUMBER * count
    for _ in range(next(numbers)):
        node, back, port, lane, told, depth, width = islice(numbers, 7)
        ticket = Ticket(lane, tuple(islice(numbers, told)))
        key = tuple(islice(numbers, depth))
        payload: list[torch.Tensor | None] = []
        for _ in range(width):
            code, wants_grad, dim = islice(numbers, 3)
            shape = tuple(islice(numbers, dim))
            if code == ABSENT:
                payload.append(None)
                continue
            dtype, numel = DTYPES[code], prod(shape)
            # In memory of its own: where numbers lie decides in which order some kernels add.
            part = torch.empty(shape, dtype=dtype, device="cpu")
            if numel:
                part.view(-1).copy_(torch.frombuffer(memory, dtype=dtype, count=numel, offset=at))
            payload.append(part.to(device).requires_grad_(bool(wants_grad)))
            at += -(-numel * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        yield Message(node, bool(back), port, key, tuple(payload), ticket)


class Post:
    """One rank's messages to and from the others; used by the thread that computes.

    It moves things whenever it is called, between two nodes' computing: what is computed takes
    well under a millisecond, and a thread of its own would take the interpreter away from it.

    Args:
        packets: How they cross.
        device: Where tensors are computed with.
    """

    def __init__(self, packets: Packets, device: torch.device) -> None:
        self._packets, self._device = packets, device
        self._waiting: dict[int, list[Message]] = defaultdict(list)
        self._leaving: list[Callable[[], bool]] = []
        self.sent_bytes = 0

    def put(self, rank: int, message: Message) -> None:
        """Put a message among those that leave next."""
        self._waiting[rank].append(message)

    def send(self) -> None:
        """Let what was put leave, all for one rank at once; does not wait for the receivers."""
        if not self._waiting:
            return
        for rank, messages in self._waiting.items():
            packet = pack(messages)
            left = self._packets.start(rank, packet)
            assert left is not None  # messages always have room
            self.sent_bytes += packet.numel()
            if not left():
                self._leaving.append(left)
        self._waiting.clear()

    def arrived(self) -> Iterator[Message]:
        """Yield what came: of one rank in the order of sending."""
        if self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        for _, packet in self._packets.arrived():
            yield from unpack(packet, self._device)

    def drain(self) -> int:
        """Wait until all that was sent has left, as the receivers' loops are over; return bytes."""
        while self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        return self.sent_bytes
