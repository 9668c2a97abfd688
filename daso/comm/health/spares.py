"""Spare ranks: started with the job, they wait to replace lost nodes."""

import atexit
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daso.comm.mpi import load
from daso.environment import survives_lost_ranks
from daso.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py import MPI

DISMISSED = 31_338  # tag
POLL_SECONDS = 5e-3
DISMISS_SECONDS = 1.0  # for the message that ends a spare


@dataclass(frozen=True, slots=True)
class Reserve:
    """The spare ranks of a world, and the communicator that reports lost ranks to them."""

    comm: "MPI.Comm"  # over the world and its spares; revoked when a rank is lost
    nodes: int  # of the world while it has spares
    waiting: tuple[int, ...]  # ranks in ``comm`` that are spares
    place: int | None  # index of this rank's node among the spares; None in the world
    due: bool = False  # spare nodes are available, but cannot join until the next step

    @property
    def is_spare(self) -> bool:
        """True on a spare rank."""
        return self.place is not None

    @property
    def active(self) -> set[int]:
        """Ranks in ``comm`` that belong to the world."""
        return set(range(self.comm.Get_size())) - set(self.waiting)

    def lost(self) -> set[int]:
        """Return the ranks in ``comm`` that are known to be lost. Does not block."""
        failed = self.comm.Get_failed()
        ranks = failed.Translate_ranks(range(failed.Get_size()), self.comm.Get_group())
        failed.Free()
        return set(ranks)


@dataclass(frozen=True, slots=True)
class Member:
    """Description of one surviving rank, exchanged to form the next world."""

    rank: int  # in the former world; arbitrary for a spare
    node: tuple[bool, int]  # whether it is a spare node, and its index
    node_size: int  # ranks of its node before the loss
    host: str
    ready: bool  # to admit spares, which start with a step or with the collective after it


def set_aside(everybody: "MPI.Comm", spares: int) -> "MPI.Comm":
    """Split off the last ranks as spares; return the communicator of this rank's side.

    Raises:
        TopologyError: Too few ranks, or the job does not survive lost ranks.

    Collective over all ranks; blocking.
    """
    world_size = everybody.Get_size() - spares
    if not survives_lost_ranks():
        raise TopologyError(
            "spare ranks (DASO_SPARES) replace lost ranks, which needs `mpirun --with-ft ulfm` of "
            "Open MPI 5 or later, but this job runs without it; start the job with "
            "`daso run --spares N`, or unset DASO_SPARES",
            code="spares-need-ulfm",
        )
    if world_size < 2:
        raise TopologyError(
            f"besides spare ranks, two ranks must train, but of {everybody.Get_size()} ranks "
            f"{spares} are spare; start more",
            code="too-few-trained-ranks",
        )
    return everybody.Split(int(everybody.Get_rank() >= world_size), everybody.Get_rank())


def members_of_next_world(members: Sequence[Member], nodes: int) -> list[int]:
    """Return the members of the next world, in order, as indices into ``members``.

    The ranks of complete nodes come first, then those of complete spare nodes, one for each missing
    node.

    Args:
        members: All surviving ranks.
        nodes: Target number of nodes, if enough spares are left.
    """
    counts: dict[tuple[bool, int], int] = {}
    for member in members:
        counts[member.node] = counts.get(member.node, 0) + 1
    complete = {member.node for member in members if counts[member.node] == member.node_size}
    remaining = [node for node in sorted(complete) if not node[0]]
    missing = max(0, nodes - len(remaining)) if remaining else 0
    joining = [node for node in sorted(complete) if node[0]][:missing]
    places = [place for place, member in enumerate(members) if member.node in remaining]
    places.sort(key=lambda place: members[place].rank)
    for node in joining:
        places += [place for place, member in enumerate(members) if member.node == node]
    return places


def wait_until_needed(reserve: Reserve) -> bool:
    """Block until a rank of the world is lost; return False if the job ends instead. For spares.

    The job has ended once every rank of the world is lost or has sent its end.
    """
    mpi, comm = load(), reserve.comm
    ended = set[int]()
    status = mpi.Status()
    while not comm.Is_revoked():
        try:
            while comm.Iprobe(mpi.ANY_SOURCE, DISMISSED, status):
                comm.Recv([bytearray(1), mpi.BYTE], status.Get_source(), DISMISSED)
                ended.add(status.Get_source())
        except mpi.Exception as error:
            if error.Get_error_class() == mpi.ERR_REVOKED:
                return True
            comm.Ack_failed()  # allows receiving from ANY_SOURCE again
        if reserve.active <= ended | reserve.lost():
            return False
        time.sleep(POLL_SECONDS)
    return True


def dismiss_at_exit(reserve: Reserve) -> None:
    """Dismiss spares when this rank exits. For ranks of the world."""
    atexit.unregister(_dismiss)
    atexit.register(_dismiss, reserve)


def _dismiss(reserve: Reserve) -> None:
    """Send spares the end of this rank."""
    mpi, end = load(), time.monotonic() + DISMISS_SECONDS
    if mpi.Is_finalized():
        return
    try:
        word = bytearray(1)
        requests = [
            reserve.comm.Isend([word, mpi.BYTE], spare, DISMISSED) for spare in reserve.waiting
        ]
        while not all([request.Test() for request in requests]) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
    except mpi.Exception:
        return  # a spare or a rank is lost; spares detect that themselves
