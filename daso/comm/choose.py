"""Which transport is taken inside a node."""

from collections.abc import Callable

import torch

from daso.comm.node import NodeGroup
from daso.comm.node_shm import ShmNode
from daso.comm.topology import Topology

__all__ = ["choose_node", "node_problem"]


def node_problem(device: torch.device) -> str | None:
    """Return why no transport serves parameters on ``device``; None if one does."""
    if device.type == "cpu":
        return None
    return (
        f"parameters must be on the CPU in this version, not on {device}; move the model there "
        f"before wrapping its optimizer"
    )


def choose_node(
    topology: "Topology", device: torch.device, stall_seconds: float, late: Callable[[], None]
) -> NodeGroup:
    """Return the transport for parameters on ``device``.

    Args:
        topology: Who is where.
        device: Where the parameters live.
        stall_seconds: How long to wait for a rank before naming it in an error.
        late: Called once a wait takes long.

    Returns:
        Shared memory for the CPU.

    Collective over the node; blocking.
    """
    assert node_problem(device) is None
    return ShmNode(topology, stall_seconds, late)
