"""Which transport is taken inside a node, and whether ranks' devices fit."""

from collections.abc import Callable
from typing import Any

import torch

from daso.comm.device import nccl_library as nccl
from daso.comm.device.cuda import CudaCopies
from daso.comm.device.cuda_aware import library_problem
from daso.comm.device.staging import DeviceStaging
from daso.comm.emulation import emulated_copies
from daso.comm.node.base import NodeTransport
from daso.comm.node.host import HostNode
from daso.comm.node.nccl import NcclNode
from daso.comm.node.shm import ShmNode
from daso.comm.topology import Topology
from daso.environment import may_share_a_gpu
from daso.errors import TopologyError

__all__ = [
    "check_device",
    "choose_node",
    "device_problem",
    "nccl_problem",
    "staging_of",
    "wants_nccl",
]

Late = Callable[[], None]


def device_problem(topology: Topology, device: torch.device) -> str | None:
    """Return why parameters on ``device`` cannot be trained with the others'; None if they can.

    Collective over the world; blocking.
    """
    first = topology.world_comm.bcast(device.type)
    if device.type != first:
        return (
            f"parameters must be on the same type of device on every rank, but they are on "
            f"{device} here and on {first} on rank 0; move every rank's model before wrapping"
        )
    if device.type not in ("cpu", "cuda"):
        return (
            f"parameters must be on the CPU or a CUDA device, not on {device}; move the model to "
            f"one before wrapping its optimizer"
        )
    return None


def check_device(topology: Topology, device: torch.device, *, gpu_direct: bool) -> None:
    """Check that parameters on ``device`` can be trained, and cross from where they shall.

    Collective over the world; blocking.
    """
    topology.raise_on_all_ranks(device_problem(topology, device), TopologyError)
    if gpu_direct and topology.nodes > 1:
        topology.raise_on_all_ranks(library_problem(topology.world_comm, device), TopologyError)


def wants_nccl(topology: Topology, device: torch.device, reducer: str) -> bool:
    """Return whether a node averages over NCCL: its ranks have a GPU each, and buckets one order.

    Collective over the node; blocking.
    """
    if device.type != "cuda" or topology.local_size == 1 or reducer != "bucketed":
        return False
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    told = topology.node_comm.allgather((gpu, may_share_a_gpu()))
    apart = len({gpu for gpu, _ in told}) == topology.local_size
    return apart or all(may_share for _, may_share in told)


def choose_node(
    topology: Topology, device: torch.device, reducer: str, timeout_seconds: float, late: Late
) -> NodeTransport:
    """Return the transport for parameters on ``device``.

    Collective over the world; blocking.
    """
    if device.type == "cuda":
        wanted = wants_nccl(topology, device, reducer)
        if node := _nccl_node(topology, device, timeout_seconds, late, wanted=wanted):
            return node
    host, copies = ShmNode(topology, timeout_seconds, late), staging_of(device)
    return host if copies is None else HostNode(host, device, copies)


def _nccl_node(
    topology: Topology,
    device: torch.device,
    timeout_seconds: float,
    late: Late,
    *,
    wanted: bool,
    cuda: Any = torch.cuda,
) -> NcclNode | None:
    """Start NCCL where it is wanted; raise the same on every rank where that fails on any."""
    problem = nccl_problem() if wanted else None
    topology.raise_on_all_ranks(problem, TopologyError)
    node = None
    if wanted:
        try:
            library = nccl.library()
            node = NcclNode(topology, device, timeout_seconds, late, nccl=library, cuda=cuda)
        except Exception as error:  # NcclError, or what the driver says
            problem = _refusal(
                f"it does not start: {error}", "see what NCCL says with NCCL_DEBUG=WARN"
            )
    try:
        topology.raise_on_all_ranks(problem, TopologyError)
    except TopologyError:
        if node is not None:
            node.abandon()
        raise
    return node


def nccl_problem() -> str | None:
    """Return why NCCL cannot be loaded here, and the remedy; None where it can."""
    there = nccl.describe()
    return None if there["available"] else _refusal(there["why"], there["remedy"])


def _refusal(why: str, remedy: str) -> str:
    return (
        f"ranks of a node that have a GPU each need cupy's NCCL, but {why}; {remedy}, or average "
        f"on the host: gradients=daso.Gradients(reducer='host')"
    )


def staging_of(device: torch.device) -> DeviceStaging | None:
    """Return how rows on ``device`` go to the host and back; None where they lie there."""
    return CudaCopies(device) if device.type == "cuda" else emulated_copies()
