"""One lane as a world of its own: the ranks that hold the same shards, one on each node."""

from daso.comm.mpi import load
from daso.comm.topology import RankInfo, Topology

__all__ = ["LaneTopology"]


class LaneTopology(Topology):
    """The ranks of equal place in their nodes, each as a node of one rank.

    It borrows the communicators of the topology it is made of, which frees them.

    Args:
        whole: All ranks; nodes have the same number of them.
    """

    def __init__(self, whole: Topology) -> None:
        nodes, node = whole.nodes, whole.node
        self.world_comm = self.lane_comm = whole.lane_comm
        self.node_comm = load().COMM_SELF
        self.rank_info = RankInfo(node, nodes, 0, node, tuple(range(nodes)))
        self.liveness, self.host_rank, self._mesh = whole.liveness, whole.host_rank, None

    def free(self) -> None:
        """Do nothing: the communicators are another topology's."""
