"""`daso.init`: starts MPI and, if requested, torch.distributed."""

import atexit
from collections.abc import Sequence

from daso.checks import NONE, check, either, one_of, validate_call
from daso.comm.process_group import Backend, join_process_group, node_mesh
from daso.comm.topology import Topology, make_default

DEVICES: dict[str, str] = {"gloo": "cpu", "nccl": "cuda"}  # device type of each backend


@validate_call
def init(
    *, ranks_per_node: int | Sequence[int] | None = None, torch_backend: Backend | None = None
) -> Topology:
    """Start MPI if needed, and set the topology that `DASO` uses by default.

    Args:
        ranks_per_node: As for `Topology`.
        torch_backend: Also make torch.distributed's default process group over the same ranks, and
            ``.mesh``, a DeviceMesh ``("node", "local")``: ``fully_shard(model, mesh=world.mesh[
            "local"])`` shards inside the node. ``"gloo"`` on CPUs, ``"nccl"`` on GPUs, where each
            rank takes one of its host's GPUs; None: neither.

    Returns:
        The topology; later calls return the same one.

    Raises:
        ConfigError: torch.distributed was initialized over other ranks.
        TopologyError: As for `Topology`; ranks do not reach each other by TCP; nodes are unequal.

    Collective over the world; blocking.
    """
    check("torch_backend", torch_backend, either(one_of(*DEVICES), NONE))
    topology = make_default(ranks_per_node)
    if torch_backend is not None:
        created = join_process_group(topology, torch_backend)
        if created or not topology.has_mesh:
            topology.mesh = node_mesh(topology, DEVICES[torch_backend])
            atexit.register(_forget_mesh, topology)  # before the groups that it holds end
    return topology


def _forget_mesh(topology: Topology) -> None:
    del topology.mesh
