"""Runs means by a plan of levels: between ranks, or for many simulated ones, to the same bits."""

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from daso import trace
from daso.comm.allreduce.levels import WINDOW, LevelledMean, Transfers
from daso.comm.allreduce.ordered import OnDevice, Requests, Waits, adder_of
from daso.comm.device.staging import Arrived
from daso.comm.engine import NestedWork
from daso.comm.mpi import load
from daso.comm.reduction import Chunks, ReduceBuffer, WeightedMean, in_process
from daso.kernels.codecs import Codec
from daso.plan.allreduce_plan import AllReducePlan

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MultiLevelAllReduce", "SequentialAllReduce", "carry"]

FIRST_TAG, PHASES = 16, 64  # tags of chunk i are FIRST_TAG + PHASES * i and those after
TAGS = 256  # chunks that have tags of their own; far more than are under way


class MultiLevelAllReduce:
    """Takes means over a communicator by a plan; not to be run twice at the same time.

    Args:
        comm: Communicator of the engine.
        plan: Groups of its ranks, level by level.
        codec: What crosses.
        weights: Weight of each rank's row, in rank order.
        total: What the sum is divided by.
        rounded: As in `LevelledMean`.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        of_gradients: As there.
    """

    def __init__(
        self,
        comm: "MPI.Comm",
        plan: AllReducePlan,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        where: OnDevice | None,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.comm, self.codec, self.where = comm, codec, where
        self.adder = adder_of(codec, weights, total, rounded, where, of_gradients=of_gradients)
        # A rank that no lane reaches has no part in means, and only asks what crosses.
        rank = plan.ranks[0] if comm == load().COMM_NULL else comm.Get_rank()
        self._means = LevelledMean(plan, rank, self.adder, where, comm)
        self.crossing = self._means.crossing
        self._nbytes = 0

    def run(self, source: ReduceBuffer, chunks: Chunks) -> Requests:
        """Take the mean of a row; return the bytes sent.

        Collective over the communicator; non-blocking, as work for the engine.
        """
        self._nbytes = self._means.delivered = 0
        yield from self._means.made(chunks)
        under_way: deque[NestedWork[None]] = deque()
        coming = iter(range(len(chunks)))

        def moved() -> bool:
            """Go on with all chunks; return whether any came further, or one can be started."""
            before = sum(work.moves for work in under_way)
            for work in under_way:
                work.go_on()
            return sum(work.moves for work in under_way) > before

        while True:
            while under_way and under_way[0].over:
                under_way.popleft()
            while len(under_way) < WINDOW and (index := next(coming, None)) is not None:
                work = NestedWork(self._cross(source, chunks[index], index))
                under_way.append(work)
                work.go_on()
            if not under_way:
                return self._nbytes
            if not under_way[0].over:
                yield moved

    def _cross(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> Waits:
        """Take the mean of a chunk."""
        for step in self._means.chunk(source, parts, index):
            if not isinstance(step, Transfers):
                yield step
                continue
            begun = time.perf_counter()
            yield self._start(step, FIRST_TAG + PHASES * (index % TAGS) + step.phase)
            trace.record(trace.MESSAGES, begun, key=index)

    def _start(self, step: Transfers, tag: int) -> "list[MPI.Request]":
        buffer = self._means.buffer
        self._nbytes += sum(tensor.numel() for _, tensor in step.sends)
        requests = [self.comm.Irecv(buffer(row), peer, tag) for peer, row in step.receives]
        return requests + [self.comm.Isend(buffer(row), peer, tag) for peer, row in step.sends]


class SequentialAllReduce:
    """What `daso.comm.allreduce.direct.deterministic_allreduce` does, for rows all in this process.

    Args:
        codec: What crosses.
        weights: Weight of each row.
        total: What the sum is divided by.
        plan: As between ranks.
        rounded: What each rank rounded away; one for each, of which a plan of one level needs the
            first alone.
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
            WeightedMean(codec, weights, total, kept, of_gradients=of_gradients)
            for kept in (rounded[:1] if plan.flat else rounded)
        ]
        self._adder = adders[0]
        self._means = [
            LevelledMean(plan, rank, adder) for rank, adder in enumerate(adders) if not plan.flat
        ]

    def run(self, sources: Sequence[ReduceBuffer], chunks: Chunks) -> int:
        """Replace rows by their mean; return the bytes that all ranks would send."""
        if self._flat:
            return in_process(sources, self._adder, chunks)
        nbytes = 0
        for parts in chunks:
            for mean in self._means:
                mean.delivered = 0
            ranks = [m.chunk(one, parts, 0) for m, one in zip(self._means, sources, strict=True)]
            while steps := [step for rank in ranks if (step := next(rank, None)) is not None]:
                nbytes += carry(steps)
        return nbytes


def carry(steps: "Sequence[Transfers | Arrived]") -> int:
    """Copy what all ranks send at a time to where it arrives; return its bytes."""
    transfers = [step for step in steps if isinstance(step, Transfers)]
    sent = {
        (rank, peer): tensor for rank, step in enumerate(transfers) for peer, tensor in step.sends
    }
    for rank, step in enumerate(transfers):
        for peer, tensor in step.receives:
            tensor.copy_(sent[peer, rank])
    return sum(tensor.numel() for tensor in sent.values())
