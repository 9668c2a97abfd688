"""Links between nodes, as resources that carry one message at a time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Link", "Resource", "relay_seconds", "ring_ends", "vote_seconds"]

# Bytes on the wire for each byte of payload: 1538 for 1448, TCP with timestamps at an MTU of 1500.
HEADERS = 1538 / 1448


@dataclass(frozen=True, slots=True)
class Link:
    """What joins a node to a switch that is never full; both ways at once.

    Args:
        bytes_per_second: Rate of each direction; infinite where it does not count.
        latency_seconds: From one node to another, whatever the size.
        headers: Bytes on the wire for each byte of payload.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    headers: float = HEADERS

    def seconds(self, nbytes: float) -> float:
        """Return how long so many bytes of payload occupy the link."""
        return nbytes * self.headers / self.bytes_per_second


class Resource:
    """Something that does one thing at a time, in the order in which it is asked."""

    def __init__(self) -> None:
        self.free_at = 0.0

    def take(self, ready: float, seconds: float) -> float:
        """Occupy it for so long, once it is free and the task is ready; return when that ends."""
        self.free_at = max(ready, self.free_at) + seconds
        return self.free_at


def relay_seconds(link: Link, *, nbytes: float, hops: int, segments: int = 1) -> float:
    """Return how long a message takes over a chain of links that each pass it on.

    With one segment it is stored whole before it goes on; with several, the first ones are on the
    next link while others still come (cut-through). Latency occupies a link with each segment.

    Args:
        link: Each of the chain.
        nbytes: Of the message.
        hops: Links in the chain.
        segments: Equal parts of the message.

    Returns:
        Seconds: (hops - 1 + segments) * (latency + seconds of a segment), link by link.
    """
    chain = [Resource() for _ in range(hops)]
    each = link.latency_seconds + link.seconds(nbytes / segments)
    arrived = 0.0
    for _ in range(segments):
        arrived = 0.0
        for one in chain:
            arrived = one.take(arrived, each)
    return arrived


def ring_ends(ready: Sequence[float], nbytes: float, links: Sequence[Link]) -> list[float]:
    """Return when each node has the sum of all, taken round a ring.

    Each of 2 (P - 1) turns a node passes the part of a P-th that it got in the turn before to the
    next one (reduce-scatter, then all-gather; Patarasuk and Yuan 2009).

    Args:
        ready: When each node has its row.
        nbytes: Of a row.
        links: Of each node, to the next one.

    Returns:
        Seconds; with equal links and all ready at 0, 2 (P - 1) (latency + seconds of a part).
    """
    count = len(ready)
    each = [link.latency_seconds + link.seconds(nbytes / count) for link in links]
    free, have = list(ready), list(ready)
    for _ in range(2 * (count - 1)):
        left = [max(a, b) + seconds for a, b, seconds in zip(have, free, each, strict=True)]
        free = left  # a node's link carries one part at a time
        have = [left[at - 1] for at in range(count)]
    return have


def vote_seconds(link: Link, nodes: int) -> float:
    """Return how long nodes take to agree on a few numbers: up a tree and down again."""
    return 2 * math.ceil(math.log2(nodes)) * link.latency_seconds if nodes > 1 else 0.0
