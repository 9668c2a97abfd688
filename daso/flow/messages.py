"""Messages of a flow between ranks: one buffer each, a head and the tensors behind it."""

import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import prod
from typing import NamedTuple

import torch

from daso.comm.dtypes import CODES, DTYPES
from daso.comm.p2p.packets import Packets
from daso.flow.model.base import ALIGNMENT, Key, Payload

__all__ = [
    "FINISHED",
    "NO_TICKET",
    "OVER",
    "Message",
    "Post",
    "Ticket",
    "message_seconds",
    "pack",
    "unpack",
]

# Instead of a node: all of an instance is over; the pass is over.
FINISHED, OVER = -1, -2

NUMBER = 8  # bytes
ABSENT = -1  # code of a gradient that there is none of
TRIED, TRIALS = 4, 20  # messages of a packet whose seconds are measured, and packets


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


@torch.no_grad()
def pack(messages: Sequence[Message]) -> torch.Tensor:
    """Return messages as bytes (nbytes,) on the host; a copy.

    First how many numbers the head has, then the head, then the tensors' bytes.
    """
    numbers = [0, len(messages)]
    rows: list[torch.Tensor] = []  # bytes of tensors, and what fills up to where the next may begin
    nbytes = 0
    for node, back, port, key, payload, (lane, after) in messages:
        numbers += (node, back, port, lane, len(after), len(key), len(payload), *after, *key)
        for tensor in payload:
            if tensor is None:
                numbers += (ABSENT, 0, 0)
                continue
            shape = tensor.shape
            numbers += (CODES[tensor.dtype], tensor.requires_grad, len(shape), *shape)
            row = tensor.cpu().reshape(-1).view(torch.uint8)
            size = row.numel()
            nbytes += size + -size % ALIGNMENT
            rows.append(row)
            if size % ALIGNMENT:
                rows.append(_filler(-size % ALIGNMENT))
    numbers[0] = len(numbers)
    head = struct.pack(f"<{len(numbers)}q", *numbers)
    packet = torch.empty(_up(len(head)) + nbytes, dtype=torch.uint8, device="cpu")
    memoryview(packet.numpy())[: len(head)] = head  # type: ignore[arg-type]  # of numpy's stubs
    if rows:
        torch.cat(rows, out=packet[_up(len(head)) :])
    return packet


def unpack(packet: torch.Tensor, device: torch.device) -> Iterator[Message]:
    """Yield the messages in bytes, whose memory their tensors share.

    They begin there where torch's allocator would let them: where numbers lie decides in which
    order some kernels add.
    """
    memory = memoryview(packet.numpy())  # type: ignore[arg-type]  # of numpy's stubs
    (count,) = struct.unpack_from("<q", memory)
    numbers = struct.unpack_from(f"<{count}q", memory)
    at, offset, is_host = 2, _up(NUMBER * count), device.type == "cpu"
    for _ in range(numbers[1]):
        node, back, port, lane, told, depth, width = numbers[at : at + 7]
        at += 7 + told + depth
        ticket = Ticket(lane, numbers[at - depth - told : at - depth])
        key = numbers[at - depth : at]
        payload: list[torch.Tensor | None] = []
        for _ in range(width):
            code, wants_grad, dim = numbers[at : at + 3]
            at += 3 + dim
            if code == ABSENT:
                payload.append(None)
                continue
            part = _part(memory, offset, DTYPES[code], numbers[at - dim : at])
            offset += _up(part.nbytes)
            part = part if is_host else part.to(device)
            payload.append(part.requires_grad_() if wants_grad else part)
        yield Message(node, bool(back), port, key, tuple(payload), ticket)


def _part(
    memory: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    numel = prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)


def _up(nbytes: int) -> int:
    """Return where the next tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@cache
def _filler(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


def message_seconds() -> float:
    """Measure what a small message takes of the rank that sends it, or of the one that gets it."""
    some = [Message(0, False, 0, (0, 0), (torch.zeros(1, 128, device="cpu"),), NO_TICKET)] * TRIED
    taken = []
    for _ in range(TRIALS):
        start = time.perf_counter()
        for _ in unpack(pack(some), torch.device("cpu")):
            pass
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) / TRIED / 2


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
