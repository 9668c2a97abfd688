"""What exchanges take over the link between nodes, tried by the engine that training has."""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daso.comm.emulation import LinkModel
from daso.comm.topology import Topology
from daso.plan.options import Exchange, Gradients, Settings
from daso.train.channels import Channels

__all__ = ["link_is_off_by", "link_rate"]

TRIES = 5
CROSSES_SECONDS = 0.1  # a try of the link
MOST_BYTES = 64 << 20
SMALL, LARGE = 256, 4 << 20  # numbers of an exchange by which a link is measured


@contextmanager
def _channels(topology: Topology) -> Iterator[Channels]:
    settings = Settings(wire="fp32", merge="auto", exchange=Exchange(), gradients=Gradients())
    channels = Channels(topology, settings, topology)
    try:
        yield channels
    finally:
        channels.close()


def link_is_off_by(link: LinkModel, topology: Topology) -> float:
    """Exchange for about a tenth of a second; return how far off that is, in parts.

    Args:
        link: That models which are wrapped now are held to.
        topology: Whose ranks take part.

    Collective over the world; blocking.
    """
    nodes, seconds = topology.nodes, CROSSES_SECONDS
    sent = min(MOST_BYTES, seconds * link.bytes_per_second)
    numel = max(1, int(sent / 4 / (2 * (nodes - 1) / nodes)))
    with _channels(topology) as channels:
        parts = []
        for _ in range(TRIES + 1):
            taken, nbytes, rounds = _exchange(channels, numel)
            parts.append(taken / link.seconds(nbytes, rounds) - 1 if nbytes else 0.0)
    return min(parts[1:])  # the first makes buffers, and whatever comes between only adds


def link_rate(topology: Topology) -> tuple[float, float]:
    """Return bytes per second of a node's link, and the seconds of a message: the slowest rank's.

    As exchanges of gradients reach them, whatever they take of the processor included.

    Collective over the world; blocking.
    """
    with _channels(topology) as channels:
        (small, few, rounds), (large, many, _) = (_usual(channels, n) for n in (SMALL, LARGE))
    seconds_of_a_byte = max(0.0, large - small) / (many - few) if many > few else 0.0
    latency = max(0.0, small - few * seconds_of_a_byte) / rounds if rounds else 0.0
    told = topology.world_comm.allgather((seconds_of_a_byte, latency))
    slowest, latency = (max(column) for column in zip(*told, strict=True))
    return topology.lanes / slowest, latency


def _usual(channels: Channels, numel: int) -> tuple[float, int, int]:
    """Return what an exchange usually takes, the bytes that it sends, and its rounds."""
    tries = [_exchange(channels, numel) for _ in range(2 * TRIES + 1)][1:]
    return statistics.median(taken for taken, *_ in tries), *tries[0][1:]


def _exchange(channels: Channels, numel: int) -> tuple[float, int, int]:
    """Return the seconds, bytes and rounds of an exchange; zeros where there is no lane."""
    channels.engine.run(channels.gather(0.0))  # all begin together
    if channels.rank_info.lane is None:
        return 0.0, 0, 0
    handle = channels.engine.submit(channels.gradient_mean(torch.ones(numel, device="cpu")))
    nbytes = channels.engine.wait(handle)
    return handle.seconds, nbytes, channels.plan(nbytes).rounds
