"""A program of the user's on a machine that is slowed down to imitate another one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daso.comm.emulation import LinkModel, Stretch, throttled
from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.plan.options import Exchange, Gradients, Settings
from daso.predict.throttle_plan import ThrottlePlan
from daso.train.channels import Channels

__all__ = ["simulate_target"]

MOST_OFF = 0.05  # of what a throttle is to bring about
TRIES = 5
CROSSES_SECONDS = 0.1  # a try of the link
MOST_BYTES = 64 << 20
COMPUTES_SECONDS = 0.05  # a try of computing


@contextmanager
def simulate_target(plan: ThrottlePlan, topology: Topology | None = None) -> Iterator[None]:
    """Slow this machine down to imitate another one, for optimizers that are wrapped meanwhile.

    Step times that are taken then go to `daso.predict.estimate`. The link between nodes is held to
    the plan's rate and latency, and computing is stretched, each tried out before.

    Args:
        plan: What is at hand, and what is imitated.
        topology: Whose ranks take part; found from MPI if None.

    Raises:
        ConfigError: There are no two nodes, or a throttle is more than 5 % off what the plan asks:
            the current machine's link, say, is slower than it was given. On every rank.

    Collective over the world; blocking, for about half a second.
    """
    topology = topology or default()
    if topology.nodes < 2:
        raise ConfigError(
            "a target must have a link between nodes, but there is one node here; start 2 ranks at "
            "least, each a pretend node (--ranks-per-node=1)"
        )
    # The plan's link is a node's, which all lanes share.
    link = LinkModel(plan.link_bytes_per_second / topology.lanes, plan.latency_seconds)
    with throttled(link, plan.compute_factor):
        off = {"the link": _link_off(link, topology), "computing": _compute_off(plan)}
        problem = "; ".join(
            f"{what} takes {1 + part:.2f} of what the plan asks"
            for what, part in off.items()
            if abs(part) > MOST_OFF
        )
        if problem:
            rule = f"a throttle must be right to {MOST_OFF:.0%}"
            problem = f"{rule}, but {problem}; correct what `current` is said to be"
        topology.raise_on_all_ranks(problem or None, ConfigError)
        yield


def _link_off(link: LinkModel, topology: Topology) -> float:
    """Exchange for about a tenth of a second; return how far off that is, in parts."""
    nodes, seconds = topology.nodes, CROSSES_SECONDS
    sent = min(MOST_BYTES, seconds * link.bytes_per_second)
    numel = max(1, int(sent / 4 / (2 * (nodes - 1) / nodes)))
    settings = Settings(wire="fp32", merge="auto", exchange=Exchange(), gradients=Gradients())
    channels = Channels(topology, settings, topology)
    try:
        parts = [
            _crossing(channels, torch.ones(numel, device="cpu"), link) for _ in range(TRIES + 1)
        ]
    finally:
        channels.close()
    return min(parts[1:])  # the first makes buffers, and whatever comes between only adds


def _crossing(channels: Channels, row: torch.Tensor, link: LinkModel) -> float:
    channels.engine.run(channels.gather(0.0))  # all begin together
    if channels.rank_info.lane is None:
        return 0.0
    handle = channels.engine.submit(channels.gradient_mean(row))
    nbytes = channels.engine.wait(handle)
    return handle.seconds / link.seconds(nbytes, channels.plan(nbytes).rounds) - 1


def _compute_off(plan: ThrottlePlan) -> float:
    """Stretch a known time, which takes no core; return how far off that is, in parts."""
    stretch, parts = Stretch(plan.compute_factor), []
    stretch.after_step(time.perf_counter(), 0.0)
    for _ in range(TRIES):
        begun = time.perf_counter()
        time.sleep(COMPUTES_SECONDS)
        computed = time.perf_counter() - begun
        stretch.after_step(begun, 0.0)
        parts.append((time.perf_counter() - begun) / (plan.compute_factor * computed) - 1)
    return min(parts)
