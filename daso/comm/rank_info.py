"""A rank's numbers (world, node, lane), and the interface of its communicators."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from daso.comm.health.liveness import LivenessProbe

if TYPE_CHECKING:
    from mpi4py import MPI


class Ranks(Protocol):
    """Communicators of a `Topology` that `daso.comm.control` uses."""

    world_comm: "MPI.Comm"
    node_comm: "MPI.Comm"
    lane_comm: "MPI.Comm"  # COMM_NULL for a rank without a lane
    liveness: LivenessProbe  # names a missing rank
    others: list[Any]  # communicators that are freed together with these

    @property
    def local_size(self) -> int:
        """Ranks of this node."""
        ...


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank and node numbers of one rank; derived numbers are computed once, at construction."""

    rank: int  # world rank
    world_size: int  # ranks of the world
    local_rank: int  # rank inside the node
    node: int  # index of this rank's node
    node_of: tuple[int, ...]  # node of each world rank

    # Derived; plain fields, because every training step reads them.
    node_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)  # ranks of each node
    nodes: int = field(init=False, repr=False, compare=False)  # number of nodes
    local_size: int = field(init=False, repr=False, compare=False)  # ranks of this rank's node
    lanes: int = field(init=False, repr=False, compare=False)  # ranks of the smallest node
    largest_node: int = field(init=False, repr=False, compare=False)  # ranks of the largest node
    # This rank's lane; None if the smallest node does not have this local rank.
    lane: int | None = field(init=False, repr=False, compare=False)
    # World ranks of this rank's node.
    ranks_of_node: frozenset[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = Counter(self.node_of)
        sizes = tuple(counts[node] for node in range(len(counts)))
        lanes = min(sizes)
        mates = frozenset(rank for rank, node in enumerate(self.node_of) if node == self.node)
        derived = {
            "node_sizes": sizes,
            "nodes": len(sizes),
            "local_size": sizes[self.node],
            "lanes": lanes,
            "largest_node": max(sizes),
            "lane": self.local_rank if self.local_rank < lanes else None,
            "ranks_of_node": mates,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
