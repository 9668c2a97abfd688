"""A world of thousands of ranks of which this process is one, and all others do as it does.

Collectives end at once with this rank's own value for everybody; what is sent to others is dropped,
and what is to come from them never does more than arrive. Enough to set up and to take steps, so
that what a step costs the training thread can be seen at any number of ranks.
"""

from collections.abc import Callable
from typing import Any

from local_world import Comm, Request

from daso.comm.topology import RankInfo, Topology

__all__ = ["mirrored"]


class MirrorComm(Comm):
    """One rank's end of a communicator of so many ranks."""

    def __init__(self, ranks: int, ranks_per_node: int, rank: int = 0) -> None:
        super().__init__(None, rank)
        self._ranks, self._per_node = ranks, ranks_per_node

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def size(self) -> int:
        return self._ranks

    def count(self, what: str, change: int = 1) -> None:
        """Nothing is held by others."""

    def _meet(self, kind: str, value: Any, end: Callable[[list[Any]], None]) -> Request:
        end([value] * self._ranks)
        return Request(lambda: True)

    def Alltoall(self, source: Any, target: Any) -> None:  # noqa: N802
        target[0][:] = source[0]

    def Isend(self, *_: Any, **__: Any) -> Request:  # noqa: N802
        return Request(lambda: True)

    Irecv = Isend

    def Iprobe(self, *_: Any, **__: Any) -> bool:  # noqa: N802
        return False

    iprobe = Iprobe

    def Split(self, color: int | None = 0, key: int = 0) -> "MirrorComm":  # noqa: N802
        """Return the lane of the world; a node is not cut further."""
        nodes = self._ranks // self._per_node
        return MirrorComm(nodes if nodes > 1 else self._ranks, self._per_node)

    def Split_type(self, _: Any) -> "MirrorComm":  # noqa: N802
        return MirrorComm(self._per_node, self._per_node)

    def Dup(self) -> "MirrorComm":  # noqa: N802
        return MirrorComm(self._ranks, self._per_node, self.rank)

    def Free(self) -> None:  # noqa: N802
        """Nothing to give back."""


def mirrored(nodes: int, ranks_per_node: int) -> Topology:
    """Return the topology of rank 0 of a world in which all others do as it does."""
    world_size = nodes * ranks_per_node
    topology = Topology(MirrorComm(world_size, ranks_per_node))
    topology.rank_info = RankInfo(
        rank=0,
        world_size=world_size,
        local_rank=0,
        node=0,
        node_of=tuple(rank // ranks_per_node for rank in range(world_size)),
    )
    return topology
