"""Detects lost ranks, notifies the others, and shrinks the world to the complete nodes.

By User-Level Failure Mitigation (ULFM; Bland et al., "Post-failure recovery of MPI communication
capability", IJHPCA 2013), which Open MPI has from 5.0 on under ``mpirun --with-ft ulfm``. A request
that involves a lost rank ends with an error on the ranks that wait for it. The first rank with such
an error revokes all communicators, so that no rank waits for ranks that already recover.

Revoking does not end MPI's agreement, so all surviving ranks must call the same agreements: with 1
after a collective operation, or with 0 in `regroup`, and none after a 0.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from daso.comm.communicators import WorldCommunicators
from daso.comm.health.liveness import LivenessProbe
from daso.comm.health.spares import Member, Reserve, members_of_next_world
from daso.comm.mpi import library, load
from daso.comm.rank_info import RankInfo
from daso.comm.topology import Topology
from daso.environment import survives_lost_ranks
from daso.errors import DasoError, ExchangeError

if TYPE_CHECKING:
    from mpi4py import MPI

NEW = -1  # former rank of a spare


class _LostError(ConnectionError):
    """A rank is lost, as reported by another rank."""


def problem() -> str | None:
    """Return why the job cannot survive a lost rank, or None if it can."""
    if survives_lost_ranks():
        return None
    return (
        f"a job that survives a lost rank needs Open MPI 5 or later, started by `mpirun "
        f"--with-ft ulfm` or `daso run --elastic`, but this one runs on {library()} without it"
    )


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error reports a lost rank, or was caused by one that does."""
    mpi = load()
    losses = {mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED}
    losses.add(mpi.ERR_IN_STATUS)  # of several requests tested together
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
    except Exception as error:
        # A `DasoError` is a remedy of its own, unless it only passes an error of MPI on.
        loss = error.__cause__ if isinstance(error, DasoError) else error
        if not survives_lost_ranks() or not is_loss(loss):
            raise
        raise ExchangeError(
            f"a job survives a lost rank once ranks have wrapped their optimizer, but a rank was "
            f"lost while ranks were about to {what}; start the job again",
            code="rank-lost-too-early",
        ) from error


def lost(comm: "MPI.Comm") -> bool:
    """Return whether this or another rank has detected a lost rank. Does not block."""
    try:
        comm.Iprobe()  # lets MPI progress
        failed = comm.Get_failed()
    except load().Exception as error:
        return is_loss(error)
    any_failed = failed.Get_size() > 0
    failed.Free()
    return any_failed or comm.Is_revoked()


def revoke(comms: Iterable["MPI.Comm"]) -> None:
    """Revoke communicators: all pending operations on them fail. Does not block."""
    mpi = load()
    for comm in comms:
        if comm != mpi.COMM_NULL and not comm.Is_revoked():
            comm.Revoke()


def raise_if_lost(topology: Topology) -> None:
    """Raise on every rank if a rank was lost during the last collective operation.

    Ranks that detected the loss earlier answer from `regroup`.

    Collective over the world; blocking.
    """
    if not _agree(topology.world_comm, sound=True):
        topology.loss_is_agreed = True
        raise _LostError("a rank is lost, as another rank reports")


def _agree(comm: "MPI.Comm", *, sound: bool) -> bool:
    """Return whether no rank is lost and all ranks pass ``sound``. Collective; blocking."""
    try:
        return bool(comm.Agree(int(sound)))
    except load().Exception as error:
        if not is_loss(error):
            raise
        return False


def regroup(topology: Topology, *, ready: bool) -> list[int] | None:
    """Change a topology to the complete nodes, plus spare nodes in place of the broken ones.

    Communicators that lost a rank are not freed: freeing one needs all of its ranks.

    Args:
        topology: Changed in place: ranks and nodes are renumbered.
        ready: Spares may join: this rank is where they start. If any rank is not ready, they
            continue to wait, and `Reserve.due` is set.

    Returns:
        The former world rank of each member, `NEW` for a former spare; None on a rank that is
        not a member: one of a broken node, or a spare that continues to wait.

    Raises:
        ExchangeError: No node is complete.

    Collective over the surviving ranks, including those of broken nodes, and spares; blocking.
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
            next_world = _next_world(
                base, topology, _member(topology, ready and topology.takes_spares)
            )
        except load().Exception as error:
            if not is_loss(error):
                raise
            next_world = None  # another rank was lost
            revoke([base])
        if _agree(base, sound=next_world is not None) and next_world is not None:
            break
    if next_world.topology is None:
        topology.keep_reserve(next_world.reserve)
        return None
    topology.become(next_world.topology, next_world.reserve)
    return next_world.former


class _NextWorld(NamedTuple):
    """The world formed by the surviving ranks."""

    topology: Topology | None  # None if this rank is not a member
    former: list[int]  # the former rank of each member
    reserve: Reserve | None


def _next_world(survivors: "MPI.Comm", topology: Topology, member: Member) -> _NextWorld:
    """Return the next world. Collective over the surviving ranks; blocking."""
    reserve = topology.reserve
    members = survivors.allgather(member)
    best = chosen = members_of_next_world(members, 0 if reserve is None else reserve.nodes)
    if not all(member.ready for member in members):
        chosen = members_of_next_world(members, 0)
    if not chosen:
        raise ExchangeError(
            "training continues without a lost rank's node if another node is complete, but none "
            "is; start again from a checkpoint",
            code="no-whole-node",
        )
    former = [NEW if members[place].node[0] else members[place].rank for place in chosen]
    if reserve is not None:
        spares = tuple(
            place for place, member in enumerate(members) if member.node[0] and place not in chosen
        )
        due = len(best) > len(chosen)
        reserve = replace(reserve, comm=survivors, waiting=spares, due=due)
    new_topology = _topology_of(survivors, [members[place] for place in chosen], chosen)
    if new_topology is not None and reserve is not None:
        reserve = replace(reserve, place=None)
    return _NextWorld(new_topology, former, reserve)


def _topology_of(
    survivors: "MPI.Comm", members: Sequence[Member], places: Sequence[int]
) -> Topology | None:
    """Return the topology of the members, or None on a rank that is not a member.

    Collective over all surviving ranks, not over subsets, in which ranks might wait for others
    that detected another loss; blocking.
    """
    undefined, here = load().UNDEFINED, survivors.Get_rank()
    rank = places.index(here) if here in places else None
    rank_info = None if rank is None else _rank_info(rank, [member.node for member in members])
    lane = None if rank_info is None else rank_info.lane

    def part(color: int | None) -> "MPI.Comm":
        return survivors.Split(undefined if color is None else color, rank or 0)

    world = part(None if rank_info is None else 0)
    node_comm, lane_comm = part(None if rank_info is None else rank_info.node), part(lane)
    if rank_info is None:
        part(None)  # matches the split for the members' liveness probe
        return None
    hosts = [member.host for member in members]
    liveness = LivenessProbe(partial(part, 0), hosts)
    host_rank = hosts[: rank_info.rank].count(hosts[rank_info.rank])
    return Topology(WorldCommunicators(rank_info, host_rank, world, node_comm, lane_comm, liveness))


def _rank_info(rank: int, nodes: Sequence[tuple[bool, int]]) -> RankInfo:
    """Return a rank's numbers in the next world, from the former node of each member."""
    order = list(dict.fromkeys(nodes))
    node_of = tuple(map(order.index, nodes))
    node = node_of[rank]
    return RankInfo(rank, len(nodes), node_of[:rank].count(node), node, node_of)


def _member(topology: Topology, ready: bool) -> Member:
    """Return the description of this rank."""
    rank_info, reserve = topology.rank_info, topology.reserve
    host = load().Get_processor_name()
    if reserve is not None and reserve.place is not None:
        size = topology.world_comm.Get_size()  # its node alone
        return Member(topology.world_comm.Get_rank(), (True, reserve.place), size, host, ready)
    return Member(rank_info.rank, (False, rank_info.node), rank_info.local_size, host, ready)


def leave(topology: Topology) -> None:
    """End this process, whose node lost a rank, without ending the job. Does not return."""
    where = f"rank {topology.rank} on {topology.liveness.hosts[topology.rank]}"
    print(
        f"daso: {where} ends: its node lost a rank, and the others go on",
        file=sys.stderr,
        flush=True,
    )
    sys.stdout.flush()
    os._exit(0)  # with another code Open MPI's mpirun ends the job
