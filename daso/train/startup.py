"""What happens once when a model is taken up: it is checked, made equal, and given its threads."""

import logging

from daso.comm.collectives import gather_unlike
from daso.comm.lane_topology import LaneTopology
from daso.comm.node.select import check_device
from daso.comm.topology import Topology
from daso.errors import ConfigError
from daso.kernels.choice import slow_kernels
from daso.plan.options import Settings
from daso.train.channels import Channels
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.host_reducer import HostReducer
from daso.train.gradients.priority import PriorityReducer
from daso.train.metrics import Metrics
from daso.train.model.params import Trained, check_same_layout, check_sharding, start_equal

__all__ = ["make_background", "start_alike", "warn_of_slow_kernels"]

logger = logging.getLogger("daso")


def start_alike(trained: Trained, topology: Topology, settings: Settings) -> Topology:
    """Check a model and let all ranks start from the same parameters.

    Returns:
        The replica group of what is trained: all ranks, or, of shards, those of this lane.

    Collective over the world; blocking.
    """
    lane = LaneTopology(topology) if check_sharding(trained, topology) else topology
    _refuse_reducers(trained, settings)
    check_same_layout(trained, topology)
    check_device(topology, trained.device, gpu_direct=settings.exchange.gpu_direct)
    exchange = settings.exchange
    start_equal(trained, topology, exchange.timeout_seconds, lane, exchange.keeps_own)
    return lane if trained.is_sharded else topology


def _refuse_reducers(trained: Trained, settings: Settings) -> None:
    """Refuse reducers that cannot take gradients of shards."""
    if trained.is_sharded and (settings.gradients.reducer != "bucketed" or not settings.whole):
        raise ConfigError(
            f"gradients of sharded parameters must go in buckets and steps be whole, but "
            f"{settings.gradients!r} has them otherwise; leave Gradients(reducer=, step=) out"
        )


def warn_of_slow_kernels(trained: Trained, topology: Topology, settings: Settings) -> None:
    """Warn where ranks compute with the fallback of the kernels.

    Collective over the world; blocking.
    """
    line, limit = slow_kernels(trained.device), settings.exchange.timeout_seconds
    lines = gather_unlike(topology, line, limit)  # a single line where all ranks have the same
    slow = [rank for rank, line in enumerate(lines) if line]
    if slow and topology.rank == 0:
        logger.warning(
            "%s encodes and adds with %s, which takes several times as long as C or Triton; every "
            "exchange waits for the slowest rank",
            "every rank" if len(lines) == 1 else f"rank {slow[0]} ({len(slow)} in all)",
            lines[slow[0]],
        )


def make_background(
    channels: Channels, metrics: Metrics, settings: Settings
) -> BackgroundReducer | None:
    """Return what averages gradients in other threads; None where the training thread does."""
    gradients = settings.gradients
    if gradients.reducer == "host":
        return HostReducer(channels, metrics, channels.rank_info.local_size)
    if gradients.reducer == "prioritized":
        return PriorityReducer(channels, metrics, gradients.priority)
    return None
