"""Which device a rank computes on, and which transport is taken inside a node."""

from collections.abc import Callable

import torch

from daso.comm.node import NodeGroup
from daso.comm.node_host import HostNode
from daso.comm.node_shm import ShmNode
from daso.comm.throttle import emulated_copies
from daso.comm.topology import Topology

__all__ = ["choose_device", "choose_node", "node_problem"]


def choose_device(topology: Topology) -> torch.device:
    """Return where this rank computes: the ranks of a host take the GPUs that they see in turn.

    Args:
        topology: Who is where. Where the launcher shows each rank one GPU, that is its first.

    Returns:
        A GPU, or the CPU where there is none. Does not communicate.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", topology.host_rank % count) if count else torch.device("cpu")


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
        Shared memory for the CPU; where a device is pretended, with copies there and back.

    Collective over the node; blocking.
    """
    assert node_problem(device) is None
    host, copies = ShmNode(topology, stall_seconds, late), emulated_copies()
    return host if copies is None else HostNode(host, device, copies)
