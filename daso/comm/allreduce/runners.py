"""Runs multi-level all-reduces: between ranks, or for simulated ranks with the same bits."""

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from daso import trace
from daso.comm.allreduce.levels import WINDOW, MultiLevelMean, Transfers
from daso.comm.allreduce.message_sums import MessageSums
from daso.comm.allreduce.ordered import DeviceContext, Requests, Waits, make_weighted_mean
from daso.comm.device.staging import Arrived
from daso.comm.engine import NestedWork
from daso.comm.mpi import load
from daso.comm.reduction import Chunks, ReduceBuffer, WeightedMean, in_process
from daso.kernels.codecs import Codec
from daso.plan.allreduce_plan import AllReducePlan

if TYPE_CHECKING:
    from mpi4py import MPI

FIRST_TAG, PHASES = 16, 64  # tags of chunk i start at FIRST_TAG + PHASES * i
TAGS = 256  # chunks with distinct tags; far more than are in flight


class MultiLevelAllReduce:
    """All-reduce over a communicator by a plan; must not run twice at the same time.

    Args:
        comm: Communicator of the engine.
        plan: Groups of its ranks, level by level.
        codec: Wire format.
        weights: Weight of each rank's buffer, in rank order.
        total: Divisor of the sum.
        rounded: As in `MultiLevelMean`.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        of_gradients: As in `WeightedMean`.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        plan: AllReducePlan,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        where: DeviceContext | None,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.comm, self.codec, self.where = comm, codec, where
        self._sums: MessageSums | None = None
        self._levels = len(plan.levels)  # their phases carry sums, later ones means
        self.adder = make_weighted_mean(
            codec, weights, total, rounded, where, of_gradients=of_gradients
        )
        # A rank without a lane does not exchange; it only queries sizes.
        rank = plan.ranks[0] if comm == load().COMM_NULL else comm.Get_rank()
        self._means = MultiLevelMean(plan, rank, self.adder, where, comm)
        self.mpi_buffers = self._means.mpi_buffers
        self._nbytes = 0

    def count_messages(self, sums: MessageSums) -> None:
        """Count the payloads that another rank adds, if MPI reads host memory."""
        self._sums = sums if self._means.mpi_is_on_host else None

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Replace a buffer by the mean; return the bytes sent.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        self._nbytes = self._means.delivered = 0
        yield from self._means.allocate(chunks)
        in_flight: deque[NestedWork[None]] = deque()
        remaining = iter(range(len(chunks)))

        def progressed() -> bool:
            """Advance all chunks; return whether any has progressed."""
            before = sum(work.moves for work in in_flight)
            for work in in_flight:
                work.advance()
            return sum(work.moves for work in in_flight) > before

        while True:
            while in_flight and in_flight[0].over:
                in_flight.popleft()
            while len(in_flight) < WINDOW and (index := next(remaining, None)) is not None:
                work = NestedWork(self._reduce_chunk(source, chunks[index], index))
                in_flight.append(work)
                work.advance()
            if not in_flight:
                return self._nbytes
            if not in_flight[0].over:
                yield progressed

    def _reduce_chunk(
        self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int
    ) -> Waits:
        """Replace a chunk by the mean."""
        for step in self._means.chunk(source, parts, index):
            if not isinstance(step, Transfers):
                yield step
                continue
            start = time.perf_counter()
            sums = self._sums if step.phase < self._levels else None
            if sums is not None:
                for peer, payload in step.sends:
                    sums.send(peer, payload, index)
            yield self._start(step, FIRST_TAG + PHASES * (index % TAGS) + step.phase)
            trace.record(trace.MESSAGES, start, key=index)
            if sums is not None:
                for peer, payload in step.receives:
                    sums.receive(peer, payload, index)

    def _start(self, step: Transfers, tag: int) -> "list[MPI.Request]":
        buffer = self._means.buffer
        self._nbytes += sum(tensor.numel() for _, tensor in step.sends)
        requests = [self.comm.Irecv(buffer(row), peer, tag) for peer, row in step.receives]
        return requests + [self.comm.Isend(buffer(row), peer, tag) for peer, row in step.sends]


class SequentialAllReduce:
    """All-reduce of buffers in one process, with the bits of `deterministic_allreduce`.

    Args:
        codec: Wire format.
        weights: Weight of each buffer.
        total: Divisor of the sum.
        plan: As between ranks.
        rounded: Rounding errors of each rank; a plan of one level uses only the first.
        of_gradients: As in `WeightedMean`.
    """

    def __init__(
        self,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        plan: AllReducePlan,
        rounded: Sequence[dict[int, torch.Tensor]],
        *,
        of_gradients: bool = False,
    ) -> None:
        self.codec, self._flat = codec, plan.flat
        adders = [
            WeightedMean(codec, weights, total, errors, of_gradients=of_gradients)
            for errors in (rounded[:1] if plan.flat else rounded)
        ]
        self._adder = adders[0]
        self._means = [
            MultiLevelMean(plan, rank, adder) for rank, adder in enumerate(adders) if not plan.flat
        ]

    def run(self, sources: Sequence[ReduceBuffer], chunks: Chunks) -> int:
        """Replace buffers by their mean; return the bytes that all ranks would send."""
        if self._flat:
            return in_process(sources, self._adder, chunks)
        nbytes = 0
        for parts in chunks:
            for mean in self._means:
                mean.delivered = 0
            ranks = [
                mean.chunk(source, parts, 0)
                for mean, source in zip(self._means, sources, strict=True)
            ]
            while steps := [step for rank in ranks if (step := next(rank, None)) is not None]:
                nbytes += copy_transfers(steps)
        return nbytes


def copy_transfers(steps: "Sequence[Transfers | Arrived]") -> int:
    """Copy the payloads of one step of all ranks to their receivers; return the bytes."""
    transfers = [step for step in steps if isinstance(step, Transfers)]
    sent = {
        (rank, peer): tensor for rank, step in enumerate(transfers) for peer, tensor in step.sends
    }
    for rank, step in enumerate(transfers):
        for peer, tensor in step.receives:
            tensor.copy_(sent[peer, rank])
    return sum(tensor.numel() for tensor in sent.values())
