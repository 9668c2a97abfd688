"""What all ways to take means in rank order have in common: memory, and waiting for devices."""

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.dtypes import byte_buffer, device_buffer
from daso.comm.mpi import load
from daso.comm.reduction import (
    CPU,
    BufferPool,
    ReduceBuffer,
    Spans,
    StagedBuffer,
    WeightedMean,
)
from daso.kernels.codecs import Codec

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "NOTHING",
    "Arrivals",
    "ExchangeMemory",
    "OnDevice",
    "OrderedAllReduce",
    "Requests",
    "Waits",
    "adder_of",
    "in_window",
    "outgoing",
    "turns_of",
    "window",
]

Requests = Generator["Sequence[MPI.Request] | Arrived", None, int]
Waits = Generator["Sequence[MPI.Request] | Arrived", None, None]
Arrivals = Generator[Arrived, None, None]
Finish = Callable[[int], Waits]

NOTHING = 4  # a tag that no message has
MESSAGES = 8  # under way to and from a rank, about


@dataclass(frozen=True, slots=True)
class OnDevice:
    """Where rows are added that lie on a device.

    Args:
        device: Which.
        copies: Lets launches run beside training, and tells when they are over.
        staged: MPI sends copies on the host (`StagedBuffer`); else it takes the device's memory.
    """

    device: torch.device
    copies: DeviceStaging
    staged: bool = False


def window(peers: int) -> int:
    """Return how many chunks are under way at a time, between so many ranks."""
    return max(2, MESSAGES // peers)


def in_window(
    chunks: Sequence[Spans],
    window: int,
    start: Callable[[int], "list[MPI.Request]"],
    finish: Finish,
) -> Waits:
    """Start chunks of a row, and finish each in order with a window of them under way."""
    count, test = len(chunks), load().Request.Testall
    crossing: deque[tuple[float, list[MPI.Request]]] = deque()
    for index in range(count + window):
        if index >= window and crossing:
            begun, requests = crossing.popleft()
            yield requests
            trace.record(trace.MESSAGES, begun, key=index - window)
            yield from finish(index - window)
        if index < count:
            crossing.append((time.perf_counter(), start(index)))
            # Messages of the size of ours do not leave before the library is called again.
            test(crossing[0][1])


def turns_of(here: int, size: int) -> list[int]:
    """Return the others of a group in the order in which one sends to them.

    Each begins with the one after it: in the same order all would send to one at a time.
    """
    return [(here + turn) % size for turn in range(1, size)]


def outgoing(source: ReduceBuffer, spans: Spans) -> Sequence[torch.Tensor]:
    """Return what MPI on the host sends of spans."""
    return (source.outgoing if isinstance(source, StagedBuffer) else source.payloads)(spans)


def adder_of(
    codec: Codec,
    weights: Sequence[int],
    total: int,
    rounded: dict[int, torch.Tensor],
    where: OnDevice | None,
    *,
    of_gradients: bool,
) -> WeightedMean:
    """Return what adds where rows lie."""
    device = CPU if where is None else where.device
    return WeightedMean(codec, weights, total, rounded, device, of_gradients=of_gradients)


class ExchangeMemory:
    """Memory that exchanges keep: where is added, and where MPI reads and writes.

    Args:
        codec: What crosses.
        chunks: Under way at a time.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        poll: Lets messages move while a device is waited for.
    """

    def __init__(
        self, codec: Codec, chunks: int, where: OnDevice | None, poll: Callable[[], object]
    ) -> None:
        self.codec, self.where, self._poll = codec, where, poll
        self._copies: DeviceStaging | None = None if where is None else where.copies
        self._staged = where is not None and where.staged
        self.buffer = byte_buffer if where is None or where.staged else device_buffer
        self.device = CPU if where is None else where.device
        self.kept = BufferPool(chunks, self.device)
        # What MPI reads and writes: the same memory, but where that is on the host.
        self.crossing = self.kept
        if where is not None and where.staged:
            self.crossing = BufferPool(chunks, CPU, where.copies.memory)

    def _sent(self, source: ReduceBuffer, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what MPI sends of spans."""
        if self._staged:
            return outgoing(source, spans)
        return source.payloads(spans)

    def _fetch(self, arrived: torch.Tensor, row: torch.Tensor) -> Arrivals:
        """Bring what MPI wrote to where it is added, unless it lies there."""
        if self._staged and self._copies is not None:
            yield self._polled(self._copies.back(arrived, row))

    def _bring(self, row: torch.Tensor, leaving: torch.Tensor) -> Arrivals:
        """Bring what was added, and is over, to where MPI reads it, unless it lies there."""
        if self._staged and self._copies is not None:
            with self._copies.beside():
                over = self._copies.out(row, leaving)
            yield self._polled(over)

    def _polled(self, over: Arrived) -> Arrived:
        """Let other chunks' messages move while something is waited for."""
        return lambda: bool(self._poll()) or over()

    def _beside(self) -> AbstractContextManager[None]:
        """Let what is computed meanwhile run beside training."""
        return nullcontext() if self._copies is None else self._copies.beside()

    def _made(self, count: int, rows: Callable[[int], object]) -> Arrivals:
        """Make what MPI will write on a device, and wait until whoever had that memory is done."""
        if self._copies is not None:
            with self._copies.beside():
                for index in range(min(count, self.kept.window)):
                    rows(index)
            yield from self._computed()

    def _computed(self) -> Arrivals:
        """Wait until that is over: MPI and others may take what it made, and write what it read."""
        if self._copies is not None:
            with self._copies.beside():
                over = self._copies.mark()
            yield self._polled(over)


class OrderedAllReduce(ExchangeMemory):
    """What takes means over a communicator with one level of ranks.

    Not to be run twice at the same time: what crosses beside it takes one of its own.

    Args:
        comm: Communicator of the engine.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: What the owners of parts rounded away, by start of the part.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        of_gradients: As there.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        where: OnDevice | None,
        *,
        of_gradients: bool = False,
    ) -> None:
        super().__init__(codec, window(len(weights)), where, lambda: comm.Iprobe(tag=NOTHING))
        self.comm = comm
        self.adder = adder_of(codec, weights, total, rounded, where, of_gradients=of_gradients)
