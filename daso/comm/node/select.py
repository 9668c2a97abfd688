"""Selects the transport inside a node, and checks that the ranks' devices fit."""

from collections.abc import Callable
from typing import Any

import torch

from daso.comm.control import STALL_SECONDS, broadcast, gather_in_node
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

Late = Callable[[], None]


def device_problem(
    topology: Topology, device: torch.device, timeout_seconds: float
) -> TopologyError | None:
    """Return why parameters on ``device`` cannot be trained with those of the other ranks, or None.

    Collective over the world; blocking.
    """
    first = broadcast(topology, device.type, timeout_seconds)
    if device.type != first:
        return TopologyError(
            f"parameters must be on the same type of device on every rank, but they are on "
            f"{device} here and on {first} on rank 0; move every rank's model before wrapping",
            code="device-types-differ",
        )
    if device.type not in ("cpu", "cuda"):
        return TopologyError(
            f"parameters must be on the CPU or a CUDA device, not on {device}; move the model to "
            f"one before wrapping its optimizer",
            code="device-not-supported",
        )
    return None


def check_device(
    topology: Topology, device: torch.device, timeout_seconds: float, *, gpu_direct: bool
) -> None:
    """Check that parameters on ``device`` can be trained, and sent from there if ``gpu_direct``.

    Collective over the world; blocking.
    """
    problem = device_problem(topology, device, timeout_seconds)
    topology.raise_on_all_ranks(problem, timeout_seconds)
    if gpu_direct and topology.nodes > 1:
        problem = library_problem(topology, device, timeout_seconds)
        topology.raise_on_all_ranks(problem, timeout_seconds)


def wants_nccl(
    topology: Topology, device: torch.device, reducer: str, timeout_seconds: float = STALL_SECONDS
) -> bool:
    """Return whether a node averages over NCCL: a GPU for each rank, and buckets in one order.

    Collective over the node; blocking.
    """
    if device.type != "cuda" or topology.local_size == 1 or reducer != "bucketed":
        return False
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = gather_in_node(topology, (gpu, may_share_a_gpu()), timeout_seconds)
    distinct = len({uuid for uuid, _ in gpus}) == topology.local_size
    return distinct or all(may_share for _, may_share in gpus)


def choose_node(
    topology: Topology,
    device: torch.device,
    reducer: str,
    timeout_seconds: float,
    late: Late,
    copies: DeviceStaging | None,
) -> NodeTransport:
    """Return the node transport for parameters on ``device``.

    Args:
        topology: The ranks and their nodes.
        device: This rank's device; of the same type on every rank.
        reducer: `Gradients.reducer`.
        timeout_seconds: Maximum wait for another rank.
        late: Called repeatedly once a wait takes long.
        copies: From `staging_of`.

    Collective over the world; blocking.
    """
    if device.type == "cuda":
        uses_nccl = wants_nccl(topology, device, reducer, timeout_seconds)
        if node := _nccl_node(topology, device, timeout_seconds, late, uses_nccl=uses_nccl):
            return node
    host = ShmNode(topology, timeout_seconds, late)
    return host if copies is None else HostNode(host, device, copies)


def _nccl_node(
    topology: Topology,
    device: torch.device,
    timeout_seconds: float,
    late: Late,
    *,
    uses_nccl: bool,
    cuda: Any = torch.cuda,
) -> NcclNode | None:
    """Start NCCL if the node uses it; raise the same error on every rank if that fails on any."""
    problem = nccl_problem() if uses_nccl else None
    topology.raise_on_all_ranks(problem, timeout_seconds)
    node = None
    if uses_nccl:
        try:
            library = nccl.library()
            node = NcclNode(topology, device, timeout_seconds, late, nccl=library, cuda=cuda)
        except Exception as error:  # NcclError, or an error of the driver
            problem = _refusal(
                f"it does not start: {error}", "see what NCCL says with NCCL_DEBUG=WARN"
            )
    try:
        topology.raise_on_all_ranks(problem, timeout_seconds)
    except TopologyError:
        if node is not None:
            node.abandon()
        raise
    return node


def nccl_problem() -> TopologyError | None:
    """Return why NCCL cannot be loaded here, with the remedy, or None if it can."""
    library = nccl.describe()
    return None if library["available"] else _refusal(library["why"], library["remedy"])


def _refusal(why: str, remedy: str) -> TopologyError:
    return TopologyError(
        f"ranks of a node that have a GPU each need cupy's NCCL, but {why}; {remedy}, or average "
        f"on the host: gradients=daso.Gradients(reducer='host')",
        code="nccl-not-usable",
    )


def staging_of(device: torch.device) -> DeviceStaging | None:
    """Return the copies between ``device`` and the host; None for the CPU."""
    return CudaCopies(device) if device.type == "cuda" else emulated_copies()
