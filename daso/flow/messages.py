"""Messages of a flow between ranks, packed into one buffer: a header, then the tensors."""

import pickle
import statistics
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from daso.comm.p2p.packets import Packets
from daso.comm.reduction import CODES, DTYPES
from daso.flow.model.base import ALIGNMENT, Key, Payload

# In place of a node's index: an instance is finished; the pass is over.
FINISHED, OVER = -1, -2

NUMBER = struct.Struct("<q")
FILLERS = [bytes(size) for size in range(ALIGNMENT)]
TRIALS = 5  # measurements per message


class Admission(NamedTuple):
    """Lane and ordering token of an instance, carried by all its messages."""

    lane: int  # selects the replicas that compute the instance
    # Number of finished instances that each of the lane's ranks was notified of at admission:
    # the instance computes with their updates.
    after: tuple[int, ...]


NO_ADMISSION = Admission(0, ())


class Message(NamedTuple):
    """Tensors or gradients sent from one node to another."""

    node: int  # target, or `FINISHED` or `OVER`
    back: bool  # gradients
    port: int  # of the target: its input; for gradients, the output that the message left by
    key: Key  # number of the instance, and state
    payload: Payload
    admission: Admission  # of the instance


def pack(messages: Sequence[Message]) -> torch.Tensor:
    """Copy messages into one host buffer: size of the header, header, aligned tensors."""
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
    """Return a tensor's memory as a numpy array, which joins bytes faster than torch."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return (tensor if tensor.is_contiguous() else tensor.contiguous()).numpy()


def unpack(packet: torch.Tensor, device: torch.device) -> Iterator[Message]:
    """Yield the messages of a packet; their tensors share its memory."""
    if packet.data_ptr() % ALIGNMENT:
        packet = packet.clone()
    memory = memoryview(packet.numpy())  # type: ignore[arg-type]  # of numpy's stubs
    (size,) = NUMBER.unpack_from(memory)
    offset, is_host = _align(NUMBER.size + size), device.type == "cpu"
    for node, back, port, key, lane, after, kinds in pickle.loads(memory[NUMBER.size :]):
        payload: list[torch.Tensor | None] = []
        for kind in kinds:
            if kind is None:
                payload.append(None)
                continue
            code, wants_grad, shape = kind
            part = _part(memory, offset, DTYPES[code], shape)
            offset += _align(part.nbytes)
            part = part if is_host else part.to(device)
            payload.append(part.requires_grad_() if wants_grad else part)
        yield Message(node, back, port, key, tuple(payload), Admission(lane, after))


def _part(
    memory: memoryview, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    numel = prod(shape)
    if not numel:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)


def _align(nbytes: int) -> int:
    """Round an offset up to the alignment of tensors."""
    return nbytes + -nbytes % ALIGNMENT


def message_seconds(messages: Sequence[Message]) -> list[float]:
    """Measure the seconds to pack and unpack each message; MPI takes about as long again."""
    trials: list[list[float]] = [[] for _ in messages]
    for _ in range(TRIALS):
        for message, seconds in zip(messages, trials, strict=True):
            start = time.perf_counter()
            list(unpack(pack([message]), torch.device("cpu")))
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in trials]


class Post:
    """Sends and receives one rank's messages, in the computing thread: a second would delay it."""

    def __init__(self, packets: Mapping[int, Packets], device: torch.device) -> None:
        self._packets, self._device = packets, device
        self._routes = (*dict.fromkeys(packets.values()),)
        self._waiting: dict[int, list[Message]] = defaultdict(list)
        self._leaving: list[Callable[[], bool]] = []
        self.sent_bytes = 0

    def put(self, rank: int, message: Message) -> None:
        """Add a message to the next packet for a rank."""
        self._waiting[rank].append(message)

    def send(self) -> None:
        """Send the queued messages, one packet per rank; does not wait for receivers."""
        if not self._waiting:
            return
        for rank, messages in self._waiting.items():
            packet = pack(messages)
            left = self._packets[rank].start(rank, packet)
            self.sent_bytes += packet.numel()
            if not left():
                self._leaving.append(left)
        self._waiting.clear()

    def arrived(self) -> Iterator[Message]:
        """Yield received messages, in the order of sending for each rank."""
        if self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        for route in self._routes:
            for _, packet in route.arrived():
                yield from unpack(packet, self._device)

    def drain(self) -> int:
        """Wait until all packets have left; return the bytes sent."""
        while self._leaving:
            self._leaving = [left for left in self._leaving if not left()]
        return self.sent_bytes
