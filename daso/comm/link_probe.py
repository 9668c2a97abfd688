"""Measures the seconds of a message over each link between ranks."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.engine import Work
from daso.comm.mpi import load
from daso.comm.reduction import byte_buffer, sum_buffer
from daso.plan.cost_model import LinkCosts, fitted_costs, slots

if TYPE_CHECKING:
    from mpi4py import MPI

PROBE_BYTES = 1 << 19  # of a message, as large as those of exchanges or larger
TURNS = 5  # messages that measure a cost; the median counts
ROUNDS = 5  # of a message over each link, after one that opens the connections
MIN_SECONDS = 1e-6  # of a message
PROBE = 5  # tag


def link_costs(lane: "MPI.Comm", world: "MPI.Comm") -> Work[LinkCosts]:
    """Return the message costs of the slowest link between neighbors, the same on every rank.

    Collective over the world; non-blocking, as work for the engine.
    """
    seconds = torch.zeros(2, dtype=torch.float64, device="cpu")
    if lane != load().COMM_NULL:
        slot = slots(lane.Get_size())[0]
        for at, nbytes in enumerate((1, PROBE_BYTES)):
            seconds[at] = yield from _seconds_in_slot(lane, slot, nbytes)
    yield [world.Iallreduce(load().IN_PLACE, sum_buffer(seconds), op=load().MAX)]
    small, large = seconds.tolist()
    return fitted_costs(small, large, PROBE_BYTES)


def _link_seconds(comm: "MPI.Comm") -> Work[torch.Tensor]:
    """Return the seconds of a message from each rank to this one (ranks,), 0 from itself.

    In slot k each rank sends to the k-th rank after it, so that no rank receives two messages. All
    ranks start a slot together; no clock of another rank is read.

    Collective over the communicator; non-blocking, as work for the engine.
    """
    rank, ranks = comm.Get_rank(), comm.Get_size()
    seconds = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    for slot in slots(ranks):
        seconds[slot.index(rank)] = yield from _seconds_in_slot(comm, slot, PROBE_BYTES, 1)
    return seconds


def _seconds_in_slot(
    comm: "MPI.Comm", slot: Sequence[int], nbytes: int, count: int = TURNS
) -> Work[float]:
    """Return the seconds of the message received in a slot: the median of several."""
    rank, turns = comm.Get_rank(), []
    leaving, coming = torch.zeros(2, nbytes, dtype=torch.uint8, device="cpu")
    for _ in range(count):
        arrives = comm.Irecv(byte_buffer(coming), slot.index(rank), PROBE)
        yield [comm.Ibarrier()]
        start = time.perf_counter()
        sent = comm.Isend(byte_buffer(leaving), slot[rank], PROBE)
        yield [arrives]
        turns.append(time.perf_counter() - start)
        yield [sent]
    return statistics.median(turns)


def link_rates(
    lane: "MPI.Comm", world: "MPI.Comm", node: int, nodes: int
) -> Work[list[list[list[float]]]]:
    """Return bytes per second from each node to each other, the same on every rank, per round.

    Other load delays single messages. Rounds that are apart in time show which links are slow.

    Args:
        lane: This rank's lane; COMM_NULL if it has none.
        world: All ranks; the slowest of several lanes counts.
        node: Index of this rank's node.
        nodes: Number of nodes.

    Collective over the world; non-blocking, as work for the engine.
    """
    seconds = torch.zeros(ROUNDS, nodes, nodes, dtype=torch.float64, device="cpu")  # to, from
    if lane != load().COMM_NULL:
        yield from _link_seconds(lane)
        for of_round in seconds:
            of_round[node] = yield from _link_seconds(lane)
    yield [world.Iallreduce(load().IN_PLACE, sum_buffer(seconds.view(-1)), op=load().MAX)]
    rates: list[list[list[float]]] = (PROBE_BYTES / seconds.mT.clamp(min=MIN_SECONDS)).tolist()
    return rates
