"""Messages of a flow between ranks: one buffer each, a head and the tensors behind it."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from daso.comm.packets import Packets
from daso.flow.base import Key, Payload
from daso.plan.layout import aligned

__all__ = ["FINISHED", "OVER", "Message", "Post", "pack", "unpack"]

# Instead of a node: all of an instance is over; the pass is over.
FINISHED, OVER = -1, -2

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
ABSENT = -1  # code of a gradient that there is none of


class Message(NamedTuple):
    """What goes from one node to another.

    Args:
        node: To which, or `FINISHED` or `OVER`.
        back: Whether these are gradients.
        port: At which it comes in; backward: at which it had left.
        key: Number of the instance and state.
        payload: Tensors.
        after: How many instances were finished when this one was let in: what they changed is to
            be seen by it.
    """

    node: int
    back: bool
    port: int
    key: Key
    payload: Payload
    after: int


def pack(message: Message) -> torch.Tensor:
    """Return a message as bytes (nbytes,) on the host; a copy."""
    node, back, port, key, payload, after = message
    numbers = [node, back, port, after, len(key), len(payload), *key]
    rows = []
    for tensor in payload:
        if tensor is None:
            numbers += (ABSENT, 0, 0)
            continue
        numbers += (CODES[tensor.dtype], tensor.requires_grad, tensor.dim(), *tensor.shape)
        rows.append(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8))
    head = 8 * (len(numbers) + 1)
    spans = aligned([len(row) for row in rows])
    buffer = bytearray(head + (spans[-1].stop if spans else 0))
    struct.pack_into(f"<{len(numbers) + 1}q", buffer, 0, head, *numbers)
    packet = torch.frombuffer(buffer, dtype=torch.uint8)
    for (start, stop), row in zip(spans, rows, strict=True):
        packet[head + start : head + stop] = row
    return packet


def unpack(packet: torch.Tensor, device: torch.device) -> Message:
    """Return the message in bytes; a copy."""
    head = int(packet[:8].view(torch.int64))
    _, node, back, port, after, depth, width, *rest = packet[:head].view(torch.int64).tolist()
    key, rest = tuple(rest[:depth]), rest[depth:]
    found: list[torch.dtype | None] = []
    wants, shapes, sizes = [], [], []
    for _ in range(width):
        code, wants_grad, dim = rest[:3]
        shape, rest = rest[3 : 3 + dim], rest[3 + dim :]
        dtype = None if code == ABSENT else DTYPES[code]
        found.append(dtype)
        wants.append(bool(wants_grad))
        shapes.append(shape)
        if dtype is not None:
            sizes.append(_numel(shape) * dtype.itemsize)
    spans = iter(aligned(sizes))
    payload: list[torch.Tensor | None] = []
    for dtype, wants_grad, shape in zip(found, wants, shapes, strict=True):
        if dtype is None:
            payload.append(None)
            continue
        start, stop = next(spans)
        # In memory of its own: where numbers lie decides in which order some kernels add.
        tensor = packet[head + start : head + stop].view(dtype).view(shape).to(device, copy=True)
        payload.append(tensor.requires_grad_(wants_grad))
    return Message(node, bool(back), port, key, tuple(payload), after)


def _numel(shape: list[int]) -> int:
    numel = 1
    for length in shape:
        numel *= length
    return numel


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
        self._leaving: list[Any] = []
        self.sent_bytes = 0

    def send(self, rank: int, message: Message) -> None:
        """Send a message; does not wait for the receiver."""
        packet = pack(message)
        left = self._packets.start(rank, packet)
        assert left is not None  # messages always have room
        self.sent_bytes += packet.numel()
        if not left():
            self._leaving.append(left)

    def arrived(self) -> Iterator[Message]:
        """Yield what came: of one rank in the order of sending."""
        if self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        for _, packet in self._packets.arrived():
            yield unpack(packet, self._device)

    def drain(self) -> int:
        """Wait until all that was sent has left, as the receivers' loops are over; return bytes."""
        while self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        return self.sent_bytes
