"""Finds lost ranks, tells the others, and shrinks the world to the nodes that are whole.

By User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013), which Open MPI has from 5.0 on under ``mpirun --with-ft ulfm``. A request
that a lost rank takes part in ends with an error on those who wait for it. The first who meets one
revokes all communicators, so that the others do not wait for ranks that went to mend the world.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from daso.comm.health.spares import Member, Reserve, members_of_next_world
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
]

NEW = -1  # former rank of one that was a spare


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


def regroup(topology: Topology, *, ready: bool) -> list[int] | None:
    """Make a topology that of the nodes that are whole, and of spare ones for those that are not.

    Communicators that lost a rank are kept as they are: to free one takes all of its ranks.

    Args:
        topology: Changes in place: ranks and nodes have other numbers.
        ready: Spares may come: they would meet this rank where they begin. Where one rank is not,
            they wait on, and `Reserve.due` says so.

    Returns:
        The former world rank of each rank that goes on, `NEW` for one that was a spare; None on a
        rank that does not: one of a broken node, or a spare that waits on.

    Raises:
        ExchangeError: No node is whole.

    Collective over the ranks that are left, also of broken nodes, and spares; blocking.
    """
    reserve = topology.reserve
    base = topology.world_comm if reserve is None else reserve.comm
    while True:
        revoke([base])
        if not topology.is_spare:
            revoke(topology.communicators)
        base = base.Shrink()
        try:
            fresh, former, reserve = _next_world(
                base, topology, _member(topology, ready and topology.takes_spares)
            )
            raise_where_lost(base)
        except load().Exception as error:
            if not is_loss(error):
                raise
            continue  # one more was lost meanwhile
        if fresh is not None:
            topology.become(fresh, reserve)
            return former
        topology.reserve = reserve
        return None


def _next_world(
    survivors: "MPI.Comm", topology: Topology, mine: Member
) -> tuple[Topology | None, list[int], Reserve | None]:
    """Return the next topology, where this rank is in it, its ranks' former ones, and its spares.

    Collective over the ranks that are left; blocking.
    """
    mpi, reserve = load(), topology.reserve
    members = survivors.allgather(mine)
    wanted = chosen = members_of_next_world(members, 0 if reserve is None else reserve.nodes)
    if not all(one.ready for one in members):
        chosen = members_of_next_world(members, 0)
    if not chosen:
        raise ExchangeError(
            "training goes on without a lost rank's node where another node is whole, but there is "
            "none; start again from a checkpoint"
        )
    former = [NEW if members[at].node[0] else members[at].rank for at in chosen]
    if reserve is not None:
        spares = (at for at, one in enumerate(members) if one.node[0] and at not in chosen)
        due = len(wanted) > len(chosen)
        reserve = replace(reserve, comm=survivors, waiting=tuple(spares), due=due)
    here = survivors.Get_rank()
    is_in = here in chosen
    part = survivors.Split(0 if is_in else mpi.UNDEFINED, chosen.index(here) if is_in else 0)
    if not is_in:
        return None, former, reserve
    host = part.Split_type(mpi.COMM_TYPE_SHARED)
    nodes = host.allgather(mine.node)
    host.Free()
    sizes = [nodes.count(node) for node in dict.fromkeys(nodes)]  # pretend nodes of this host
    fresh = Topology(part, ranks_per_node=sizes)
    part.Free()
    return fresh, former, None if reserve is None else replace(reserve, place=None)


def _member(topology: Topology, ready: bool) -> Member:
    """Return what this rank says of itself."""
    rank_info, reserve = topology.rank_info, topology.reserve
    if reserve is not None and reserve.place is not None:
        size = topology.world_comm.Get_size()  # its node alone
        return Member(topology.world_comm.Get_rank(), (True, reserve.place), size, ready)
    return Member(rank_info.rank, (False, rank_info.node), rank_info.local_size, ready)


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
