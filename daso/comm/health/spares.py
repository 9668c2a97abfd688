"""Spare ranks: started with the job, they wait beside the world until nodes of it are lost."""

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

__all__ = [
    "Member",
    "Reserve",
    "dismiss_at_exit",
    "members_of_next_world",
    "set_aside",
    "wait_until_needed",
]

DISMISSED = 31_338  # tag
POLL_SECONDS = 5e-3
DISMISS_SECONDS = 1.0  # for a spare to hear that the job is over


@dataclass(frozen=True, slots=True)
class Reserve:
    """The spare ranks of a world, and how they are told that one of it is lost."""

    comm: "MPI.Comm"  # over the world and its spares; revoked where a rank is lost
    nodes: int  # of the world, as long as there are spares
    waiting: tuple[int, ...]  # ranks in ``comm`` that are spares
    place: int | None  # of this rank's node among spares; None in the world
    due: bool = False  # spare nodes could come, but not at the place where a rank was lost

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits."""
        return self.place is not None

    @property
    def active(self) -> set[int]:
        """Ranks in ``comm`` of the world."""
        return set(range(self.comm.Get_size())) - set(self.waiting)

    def lost(self) -> set[int]:
        """Return the ranks in ``comm`` that are known to be lost. Does not block."""
        failed = self.comm.Get_failed()
        found = failed.Translate_ranks(range(failed.Get_size()), self.comm.Get_group())
        failed.Free()
        return set(found)


@dataclass(frozen=True, slots=True)
class Member:
    """What a rank that is left says of itself to make the next world."""

    rank: int  # in the former world; of a spare any number
    node: tuple[bool, int]  # whether it is a spare's, and its number among these
    node_size: int  # ranks that its node had
    host: str
    ready: bool  # for new ranks: they begin with a step, or with the meeting after it


def set_aside(everybody: "MPI.Comm", spares: int) -> "MPI.Comm":
    """Part the last ranks from the others; return a communicator of those, or of these.

    Raises:
        TopologyError: There are not enough ranks, or a lost one ends the job here.

    Collective over all; blocking.
    """
    world_size = everybody.Get_size() - spares
    if not survives_lost_ranks():
        raise TopologyError(
            "spare ranks (DASO_SPARES) take the place of lost ones where training goes on without "
            "these, under `mpirun --with-ft ulfm` of Open MPI 5 or later; start the job with "
            "`daso run --spares N`, or leave them out"
        )
    if world_size < 2:
        raise TopologyError(
            f"beside spare ranks there must be two that train, but of {everybody.Get_size()} ranks "
            f"{spares} are spare; start more"
        )
    return everybody.Split(int(everybody.Get_rank() >= world_size), everybody.Get_rank())


def members_of_next_world(members: Sequence[Member], nodes: int) -> list[int]:
    """Return who makes the next world, in order: places among those that are left.

    First the ranks of nodes that are whole, then those of as many whole spare nodes as are missing.

    Args:
        members: Of every rank that is left.
        nodes: That the world shall have, where there are enough spares.
    """
    counts: dict[tuple[bool, int], int] = {}
    for one in members:
        counts[one.node] = counts.get(one.node, 0) + 1
    whole = sorted({one.node for one in members if counts[one.node] == one.node_size})
    stay = [node for node in whole if not node[0]]
    missing = max(0, nodes - len(stay)) if stay else 0
    come = [node for node in whole if node[0]][:missing]
    places = [at for at, one in enumerate(members) if one.node in stay]
    places.sort(key=lambda at: members[at].rank)
    return places + [at for node in come for at, one in enumerate(members) if one.node == node]


def wait_until_needed(reserve: Reserve) -> bool:
    """Wait until a rank of the world is lost; False where the job is over. For a spare; blocking.

    It is over for a rank that says so when it ends, and for one that is lost.
    """
    mpi, comm = load(), reserve.comm
    gone = set[int]()
    status = mpi.Status()
    while not comm.Is_revoked():
        try:
            while comm.Iprobe(mpi.ANY_SOURCE, DISMISSED, status):
                comm.Recv([bytearray(1), mpi.BYTE], status.Get_source(), DISMISSED)
                gone.add(status.Get_source())
        except mpi.Exception as error:
            if error.Get_error_class() == mpi.ERR_REVOKED:
                return True
            comm.Ack_failed()  # messages of any rank can be received again
        if reserve.active <= gone | reserve.lost():
            return False
        time.sleep(POLL_SECONDS)
    return True


def dismiss_at_exit(reserve: Reserve) -> None:
    """Let spares end once this rank does. For ranks of the world."""
    atexit.unregister(_dismiss)
    atexit.register(_dismiss, reserve)


def _dismiss(reserve: Reserve) -> None:
    """Tell spares that this rank ends well."""
    mpi, end = load(), time.monotonic() + DISMISS_SECONDS
    if mpi.Is_finalized():
        return
    try:
        word = bytearray(1)
        sent = [reserve.comm.Isend([word, mpi.BYTE], one, DISMISSED) for one in reserve.waiting]
        while not all([one.Test() for one in sent]) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
    except mpi.Exception:
        return  # a spare is lost, or a rank: then they see it themselves
