"""Measurement of the offsets between ranks' clocks, around a ring of all ranks."""

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.control import gather
from daso.comm.reduction import sum_buffer
from daso.comm.step_timer import LATE_SECONDS
from daso.comm.topology import Topology
from daso.errors import StallError

if TYPE_CHECKING:
    from mpi4py import MPI

TRIPS = 100  # the shortest counts
ASK, ANSWER = 1, 2  # tags, in the topology's world

_unfinished: list[object] = []  # after a stall: MPI may still write to buffers of requests


def ask_round(
    topology: Topology, timeout_seconds: float, now: Callable[[], float] = time.perf_counter
) -> Sequence[tuple[float, float, float]]:
    """Measure each rank's offset to the next rank's clock, around the ring; return all readings.

    It polls without sleeping, because a sleeping rank answers late. It takes three times 100 round
    trips of a message.

    Collective over the world; blocking.
    """
    rank_info, reading = topology.rank_info, (0.0, 0.0, 0.0)
    before, after = (
        (rank_info.rank - 1) % rank_info.world_size,
        (rank_info.rank + 1) % rank_info.world_size,
    )
    # All ranks have arrived after this, and answer at once.
    gather(topology, None, timeout_seconds)
    link = _Link(topology, timeout_seconds)
    for asks in _turns(rank_info.world_size):
        if rank_info.rank in asks:
            reading = link.ask(after, now)
        elif before in asks:
            link.answer(before, now)
    return gather(topology, reading, timeout_seconds)


def _turns(size: int) -> list[range]:
    """Return the ranks that ask in each turn; no rank asks and answers in one turn."""
    even = size - size % 2
    turns = [range(0, even, 2), range(1, even, 2)]
    return turns if even == size else [*turns, range(size - 1, size)]


class _Link:
    """Short messages to one rank at a time."""

    def __init__(self, topology: Topology, timeout_seconds: float) -> None:
        self._comm, self._liveness, self._timeout_seconds = (
            topology.world_comm,
            topology.liveness,
            timeout_seconds,
        )
        self._row = torch.zeros(1, dtype=torch.float64, device="cpu")

    def ask(self, rank: int, now: Callable[[], float]) -> tuple[float, float, float]:
        best = (0.0, 0.0, float("inf"))
        for _ in range(TRIPS):
            begins = now()
            self._finish(self._comm.Isend(sum_buffer(self._row), rank, ASK))
            self._finish(self._comm.Irecv(sum_buffer(self._row), rank, ANSWER))
            ends = now()
            if ends - begins < best[2]:
                middle = (begins + ends) / 2
                best = (middle, float(self._row[0]) - middle, ends - begins)
        return best

    def answer(self, rank: int, now: Callable[[], float]) -> None:
        for _ in range(TRIPS):
            self._finish(self._comm.Irecv(sum_buffer(self._row), rank, ASK))
            self._row[0] = now()
            self._finish(self._comm.Isend(sum_buffer(self._row), rank, ANSWER))

    def _finish(self, request: "MPI.Request") -> None:
        begun = time.perf_counter()
        while not request.Test():
            os.sched_yield()
            waited = time.perf_counter() - begun
            if waited > LATE_SECONDS:
                self._liveness.answer()
            if waited > self._timeout_seconds:
                _unfinished.append((request, self._row))
                raise StallError(
                    f"ranks must send their time within {self._timeout_seconds:g} s: "
                    f"{self._liveness.missing()}; look there, or raise Exchange.timeout_seconds",
                    code="clock-sync-timed-out",
                )
