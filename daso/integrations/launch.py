"""Tells frameworks what ranks there are, so that they shard data and save on one rank alone."""

from collections.abc import Sequence

from daso.checks import check, flag, validate_call
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology, make_default
from daso.environment import tell_frameworks

__all__ = ["start"]


@validate_call
def start(*, cpu: bool = False, ranks_per_node: int | Sequence[int] | None = None) -> Topology:
    """Make torch's process group over all ranks, and say in the environment what torchrun says.

    Call it first: before `transformers.TrainingArguments` or an `accelerate.Accelerator` is made,
    which look who is there only once.

    Args:
        cpu: Whether to train on CPUs; else each rank takes a GPU of its host.
        ranks_per_node: As for `daso.init`.

    Returns:
        The topology.

    Raises:
        ConfigError: torch.distributed was initialized over other ranks; there is no GPU.
        TopologyError: As for `daso.init`.

    Collective over the world; blocking.
    """
    check("cpu", cpu, flag())
    topology = make_default(ranks_per_node)
    join_process_group(topology, "gloo" if cpu else "nccl")
    # Of the host, not of a pretend node: by that devices are chosen, and threads dealt out.
    hosts = topology.liveness.hosts
    tell_frameworks(
        topology.rank,
        topology.world_size,
        topology.host_rank,
        hosts.count(hosts[topology.rank]),
        hosts[0],
    )
    return topology
