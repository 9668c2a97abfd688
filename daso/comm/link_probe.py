"""How long messages take over each link between ranks, measured in time slots."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import byte_buffer, sum_buffer
from daso.comm.engine import Work
from daso.comm.mpi import load
from daso.plan.cost_model import LinkCosts, fitted_costs, slots

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["link_costs", "link_rates"]

PROBE_BYTES = 1 << 19  # of a message, as large as those of exchanges or larger
TURNS = 5  # messages over each link, of which the middle one counts
LEAST_SECONDS = 1e-6  # of a message
PROBE = 5  # tag


def link_costs(lane: "MPI.Comm", world: "MPI.Comm") -> Work[LinkCosts]:
    """Return what messages between neighbours cost, the same on every rank: the slowest of all.

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

    In slots: in slot k each rank sends to the k-th after it, so that nobody is hit twice. All begin
    a slot together; no clock of another is read.

    Collective over the communicator; non-blocking, as work for the engine.
    """
    rank, ranks = comm.Get_rank(), comm.Get_size()
    seconds = torch.zeros(ranks, dtype=torch.float64, device="cpu")
    for slot in slots(ranks):
        seconds[slot.index(rank)] = yield from _seconds_in_slot(comm, slot, PROBE_BYTES)
    return seconds


def _seconds_in_slot(comm: "MPI.Comm", slot: Sequence[int], nbytes: int) -> Work[float]:
    """Return how long a message takes that comes in a slot: the middle of some turns."""
    rank, turns = comm.Get_rank(), []
    leaving, coming = torch.zeros(2, nbytes, dtype=torch.uint8, device="cpu")
    for _ in range(TURNS):
        arrives = comm.Irecv(byte_buffer(coming), slot.index(rank), PROBE)
        yield [comm.Ibarrier()]
        begun = time.perf_counter()
        sent = comm.Isend(byte_buffer(leaving), slot[rank], PROBE)
        yield [arrives]
        turns.append(time.perf_counter() - begun)
        yield [sent]
    return statistics.median(turns)


def link_rates(
    lane: "MPI.Comm", world: "MPI.Comm", node: int, nodes: int
) -> Work[list[list[float]]]:
    """Return bytes per second from each node to each other, the same on every rank.

    Args:
        lane: This rank's lane, COMM_NULL where it has none.
        world: All ranks; of several lanes the slowest counts.
        node: Index of this rank's node.
        nodes: How many.

    Collective over the world; non-blocking, as work for the engine.
    """
    seconds = torch.zeros(nodes, nodes, dtype=torch.float64, device="cpu")  # to, from
    if lane != load().COMM_NULL:
        seconds[node] = yield from _link_seconds(lane)
    yield [world.Iallreduce(load().IN_PLACE, sum_buffer(seconds.view(-1)), op=load().MAX)]
    rates: list[list[float]] = (PROBE_BYTES / seconds.T.clamp(min=LEAST_SECONDS)).tolist()
    return rates
