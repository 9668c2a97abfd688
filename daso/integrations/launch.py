"""Setup of torch's process group and variables, so that frameworks shard data and save once."""

from collections.abc import Sequence

from daso.checks import check, flag, validate_call
from daso.comm.process_group import join_process_group
from daso.comm.topology import Topology, make_default
from daso.environment import set_torchrun_environment


@validate_call
def start(*, cpu: bool = False, ranks_per_node: int | Sequence[int] | None = None) -> Topology:
    """Create torch's process group over all ranks, and set the variables of torchrun.

    Call it first: `transformers.TrainingArguments` and `accelerate.Accelerator` read them only
    once, when they are created.

    Args:
        cpu: Whether to train on CPUs; otherwise each rank uses a GPU of its host.
        ranks_per_node: As for `daso.init`.

    Returns:
        The topology.

    Raises:
        ConfigError: torch.distributed was initialized over other ranks, or the host has no GPU.
        TopologyError: As for `daso.init`.

    Collective over the world; blocking.
    """
    check("cpu", cpu, flag())
    topology = make_default(ranks_per_node)
    join_process_group(topology, "gloo" if cpu else "nccl")
    # Of the host, not of a pretend node: devices and threads are assigned by these.
    hosts = topology.liveness.hosts
    set_torchrun_environment(
        topology.rank,
        topology.world_size,
        topology.host_rank,
        hosts.count(hosts[topology.rank]),
        hosts[0],
    )
    return topology
