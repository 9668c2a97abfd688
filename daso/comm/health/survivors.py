"""Finds lost ranks, tells the others, and shrinks the world to the nodes that are whole.

By User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013), which Open MPI has from 5.0 on under ``mpirun --with-ft ulfm``. A request
that a lost rank takes part in ends with an error on those who wait for it. The first who meets one
revokes all communicators, so that the others do not wait for ranks that went to mend the world.

What no revoking ends is MPI's agreement, so every rank that is left takes part in the same ones:
behind what all do together, saying 1, or in `regroup`, saying 0, and in none after a 0.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from daso.comm.health.liveness import LivenessProbe
from daso.comm.health.spares import Member, Reserve, members_of_next_world
from daso.comm.mpi import library, load
from daso.comm.topology import RankInfo, Topology
from daso.environment import survives_lost_ranks
from daso.errors import DasoError, ExchangeError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "is_loss",
    "leave",
    "losses_named",
    "lost",
    "problem",
    "raise_where_lost",
    "regroup",
    "revoke",
]

NEW = -1  # former rank of one that was a spare


class _LostError(ConnectionError):
    """Another rank says that one is lost."""


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
        if isinstance(error, _LostError):
            return True
        if isinstance(error, mpi.Exception) and error.Get_error_class() in losses:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def losses_named(what: str) -> Iterator[None]:
    """Raise `ExchangeError` for a lost rank during an operation that cannot survive it.

    Args:
        what: The operation, for the message.
    """
    try:
        yield
    except DasoError:
        raise
    except Exception as error:
        if not survives_lost_ranks() or not is_loss(error):
            raise
        raise ExchangeError(
            f"a job goes on without a lost rank from its first step on, but a rank was lost while "
            f"ranks were about to {what}; start the job again"
        ) from error


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


def raise_where_lost(topology: Topology) -> None:
    """Raise on every rank alike where one was lost in what they have just done together.

    Those that met the loss before they came here take part in `regroup`.

    Collective over the world; blocking.
    """
    if not _agree(topology.world_comm, sound=True):
        topology.loss_is_agreed = True
        raise _LostError("a rank is lost, as another one says")


def _agree(comm: "MPI.Comm", *, sound: bool) -> bool:
    """Return whether all ranks are left and say that all is well. Collective; blocking."""
    try:
        return bool(comm.Agree(int(sound)))
    except load().Exception as error:
        if not is_loss(error):
            raise
        return False


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
            if not topology.loss_is_agreed:
                topology.loss_is_agreed = True
                _agree(topology.world_comm, sound=False)
        base = base.Shrink()
        try:
            found = _next_world(base, topology, _member(topology, ready and topology.takes_spares))
        except load().Exception as error:
            if not is_loss(error):
                raise
            found = None  # one more was lost meanwhile
            revoke([base])
        if _agree(base, sound=found is not None) and found is not None:
            break
    if found.fresh is None:
        topology.reserve = found.reserve
        return None
    topology.become(found.fresh, found.reserve)
    return found.former


class _NextWorld(NamedTuple):
    """What is made of the ranks that are left."""

    fresh: Topology | None  # None where this rank is not in it
    former: list[int]  # ranks of its ranks
    reserve: Reserve | None


def _next_world(survivors: "MPI.Comm", topology: Topology, mine: Member) -> _NextWorld:
    """Return the next world. Collective over the ranks that are left; blocking."""
    reserve = topology.reserve
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
    fresh = _topology_of(survivors, [members[at] for at in chosen], chosen)
    if fresh is not None and reserve is not None:
        reserve = replace(reserve, place=None)
    return _NextWorld(fresh, former, reserve)


def _topology_of(
    survivors: "MPI.Comm", members: Sequence[Member], places: Sequence[int]
) -> Topology | None:
    """Return the topology of members, by their places; None for a rank that is not one.

    Collective over the ranks that are left, and over no part of them, where some might wait for
    ranks that met another loss; blocking.
    """
    undefined, here = load().UNDEFINED, survivors.Get_rank()
    rank = places.index(here) if here in places else None
    rank_info = None if rank is None else _rank_info(rank, [one.node for one in members])
    lane = None if rank_info is None else rank_info.lane

    def part(color: int | None) -> "MPI.Comm":
        return survivors.Split(undefined if color is None else color, rank or 0)

    world = part(None if rank_info is None else 0)
    node_comm, lane_comm = part(None if rank_info is None else rank_info.node), part(lane)
    if rank_info is None:
        part(None)  # that of the others' liveness
        return None
    liveness = LivenessProbe(partial(part, 0), [one.host for one in members])
    return _Formed(rank_info, world, node_comm, lane_comm, liveness)


def _rank_info(rank: int, nodes: Sequence[tuple[bool, int]]) -> RankInfo:
    """Return a rank's numbers by the nodes that all ranks were in before."""
    order = list(dict.fromkeys(nodes))
    node_of = tuple(map(order.index, nodes))
    node = node_of[rank]
    return RankInfo(rank, len(nodes), node_of[:rank].count(node), node, node_of)


class _Formed(Topology):
    """Ranks whose nodes are known, and whose communicators are made."""

    def __init__(
        self,
        rank_info: RankInfo,
        world: "MPI.Comm",
        node: "MPI.Comm",
        lane: "MPI.Comm",
        liveness: LivenessProbe,
    ) -> None:
        self.rank_info, self.reserve = rank_info, None
        self.world_comm, self.node_comm, self.lane_comm = world, node, lane
        hosts = liveness.hosts[: rank_info.rank + 1]
        self.host_rank = hosts[:-1].count(hosts[-1])
        self._begin(liveness)


def _member(topology: Topology, ready: bool) -> Member:
    """Return what this rank says of itself."""
    rank_info, reserve = topology.rank_info, topology.reserve
    host = load().Get_processor_name()
    if reserve is not None and reserve.place is not None:
        size = topology.world_comm.Get_size()  # its node alone
        return Member(topology.world_comm.Get_rank(), (True, reserve.place), size, host, ready)
    return Member(rank_info.rank, (False, rank_info.node), rank_info.local_size, host, ready)


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
