"""Messages of a flow between ranks: one buffer each, a head and the tensors behind it."""

import pickle
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

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

NUMBER = struct.Struct("<q")
FILLERS = [bytes(size) for size in range(ALIGNMENT)]
TRIALS = 5  # of a message whose seconds are measured


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

    First how many bytes the head has, then the head, then the tensors, each where torch's allocator
    would let it begin.
    """
    heads: list[tuple[Any, ...]] = []
    parts: list[Any] = []  # buffers
    for node, back, port, key, payload, (lane, after) in messages:
        kinds: list[tuple[int, bool, tuple[int, ...]] | None] = []
        for tensor in payload:
            if tensor is None:
                kinds.append(None)
                continue
            kinds.append((CODES[tensor.dtype], tensor.requires_grad, tuple(tensor.shape)))
            array = _array(tensor)
            parts += (array, FILLERS[-array.nbytes % ALIGNMENT])
        heads.append((node, back, port, key, lane, after, kinds))
    head = pickle.dumps(heads, pickle.HIGHEST_PROTOCOL)
    size = NUMBER.pack(len(head))
    parts[:0] = (size, head, FILLERS[-(NUMBER.size + len(head)) % ALIGNMENT])
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def _array(tensor: torch.Tensor) -> Any:
    """Return the contiguous memory of a tensor as numpy's, which joins bytes faster than torch."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()


def unpack(packet: torch.Tensor, device: torch.device) -> Iterator[Message]:
    """Yield the messages in bytes, whose memory their tensors share.

    Where numbers lie decides in which order some kernels add.
    """
    if packet.data_ptr() % ALIGNMENT:
        packet = packet.clone()
    memory = memoryview(packet.numpy())  # type: ignore[arg-type]  # of numpy's stubs
    (size,) = NUMBER.unpack_from(memory)
    offset, is_host = _up(NUMBER.size + size), device.type == "cpu"
    for node, back, port, key, lane, after, kinds in pickle.loads(memory[NUMBER.size :]):
        payload: list[torch.Tensor | None] = []
        for kind in kinds:
            if kind is None:
                payload.append(None)
                continue
            code, wants_grad, shape = kind
            part = _part(memory, offset, DTYPES[code], shape)
            offset += _up(part.nbytes)
            part = part if is_host else part.to(device)
            payload.append(part.requires_grad_() if wants_grad else part)
        yield Message(node, back, port, key, tuple(payload), Ticket(lane, after))


def _part(
    memory: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    numel = prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)


def _up(nbytes: int) -> int:
    """Return where the next tensor may begin."""
    return nbytes + -nbytes % ALIGNMENT


def message_seconds(messages: Sequence[Message]) -> list[float]:
    """Measure what each of some messages takes of a rank that sends or gets it by itself.

    MPI takes about as long as the packing, or the unpacking, that goes with it.
    """
    taken: list[list[float]] = [[] for _ in messages]
    for _ in range(TRIALS):
        for message, seconds in zip(messages, taken, strict=True):
            start = time.perf_counter()
            list(unpack(pack([message]), torch.device("cpu")))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in taken]


class Post:
    """One rank's messages to and from the others; used by the thread that computes.

    It moves things whenever it is called, between two nodes' computing: what is computed takes
    well under a millisecond, and a thread of its own would take the interpreter away from it.

    Args:
        packets: How they cross to each other rank.
        device: Where tensors are computed with.
    """

    def __init__(self, packets: Mapping[int, Packets], device: torch.device) -> None:
        self._packets, self._device = packets, device
        self._ways = (*dict.fromkeys(packets.values()),)
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
            left = self._packets[rank].start(rank, packet)
            assert left is not None  # messages always have room
            self.sent_bytes += packet.numel()
            if not left():
                self._leaving.append(left)
        self._waiting.clear()

    def arrived(self) -> Iterator[Message]:
        """Yield what came: of one rank in the order of sending."""
        if self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        for way in self._ways:
            for _, packet in way.arrived():
                yield from unpack(packet, self._device)

    def drain(self) -> int:
        """Wait until all that was sent has left, as the receivers' loops are over; return bytes."""
        while self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        return self.sent_bytes
