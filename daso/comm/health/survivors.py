"""Finds lost ranks, tells the others, and shrinks the world to the nodes that are whole.

By User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013), which Open MPI has from 5.0 on under ``mpirun --with-ft ulfm``. A request
that a lost rank takes part in ends with an error on those who wait for it. The first who meets one
revokes all communicators, so that the others do not wait for ranks that went to mend the world.
"""

import os
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from daso.comm.mpi import library, load
from daso.comm.topology import Topology
from daso.environment import survives_lost_ranks
from daso.errors import ExchangeError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "is_loss",
    "leave",
    "lost",
    "problem",
    "raise_where_lost",
    "regroup",
    "revoke",
    "staying",
]


def problem() -> str | None:
    """Return why a job cannot go on without a rank that is lost; None if it can."""
    if survives_lost_ranks():
        return None
    return (
        f"a job that goes on without a lost rank needs Open MPI 5 or later, started by `mpirun "
        f"--with-ft ulfm` or `daso run --elastic`, but this one runs on {library()} without it"
    )


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error says that a rank is lost, or comes of one that does."""
    mpi = load()
    losses = {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED}
    losses.add(mpi.ERR_IN_STATUS)  # what several requests met that were tested together
    while error is not None:
        if isinstance(error, mpi.Exception) and error.Get_error_class() in losses:
            return True
        error = error.__cause__ or error.__context__
    return False


def lost(comm: "MPI.Comm") -> bool:
    """Return whether a rank is known to be lost, here or on a rank that said so. Does not block."""
    try:
        comm.Iprobe()  # lets MPI look
        failed = comm.Get_failed()
    except load().Exception as error:
        return is_loss(error)
    some = failed.Get_size() > 0
    failed.Free()
    return some or comm.Is_revoked()


def revoke(comms: Iterable["MPI.Comm"]) -> None:
    """End all that anybody waits for on these communicators, for good. Does not block."""
    mpi = load()
    for comm in comms:
        if comm != mpi.COMM_NULL and not comm.Is_revoked():
            comm.Revoke()


def raise_where_lost(comm: "MPI.Comm") -> None:
    """Raise on every rank alike where one was lost in what they have just done together.

    Collective; blocking.
    """
    comm.Agree(1)


def staying(node_of: Sequence[int], alive: Collection[int]) -> list[int]:
    """Return the ranks of nodes of which every rank is alive, in order."""
    broken = {node for rank, node in enumerate(node_of) if rank not in alive}
    return [rank for rank, node in enumerate(node_of) if node not in broken]


def regroup(topology: Topology) -> list[int] | None:
    """Make a topology that of the nodes that are whole.

    Communicators that lost a rank are kept as they are: to free one takes all of its ranks.

    Args:
        topology: Changes in place: ranks and nodes have other numbers, and are fewer.

    Returns:
        The former world ranks of those that go on; None on a rank whose node is broken.

    Raises:
        ExchangeError: No node is whole.

    Collective over the ranks that are left, also of broken nodes; blocking.
    """
    base, rank_info = topology.world_comm, topology.rank_info
    while True:
        revoke([base, topology.lane_comm, topology.node_comm])
        base = base.Shrink()
        try:
            fresh, stay = _whole_nodes(base, topology)
            raise_where_lost(base)
        except load().Exception as error:
            if not is_loss(error):
                raise
            continue  # one more was lost meanwhile
        if fresh is not None:
            topology.become(fresh)
        return stay if rank_info.rank in stay else None


def _whole_nodes(survivors: "MPI.Comm", topology: Topology) -> tuple[Topology | None, list[int]]:
    """Return the topology of the nodes that are whole, for a rank of one, and their old ranks."""
    rank_info, mpi = topology.rank_info, load()
    stay = staying(rank_info.node_of, survivors.allgather(rank_info.rank))
    if not stay:
        raise ExchangeError(
            "training goes on without a lost rank's node where another node is whole, but there is "
            "none; start again from a checkpoint"
        )
    stays = rank_info.rank in stay
    part = survivors.Split(0 if stays else mpi.UNDEFINED, rank_info.rank)
    if not stays:
        return None, stay
    host = part.Split_type(mpi.COMM_TYPE_SHARED)
    nodes = host.allgather(rank_info.node)
    host.Free()
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]  # pretend nodes of this host
    fresh = Topology(part, ranks_per_node=sizes)
    part.Free()
    return fresh, stay


def leave(topology: Topology) -> None:
    """End this process, whose node lost a rank, and let the others go on. Does not return."""
    where = f"rank {topology.rank} on {topology.liveness.hosts[topology.rank]}"
    print(
        f"daso: {where} ends: its node lost a rank, and the others go on",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(0)  # with another code Open MPI's mpirun ends the job
