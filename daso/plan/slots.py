"""Who sends to whom when, and round which ring: the same on every rank, from the same numbers.

Where all push to all in the same order, a receiver is hit by everybody at once and the others have
nothing to do: about 2 (p - 1) services for p ranks. In slots, each a permutation, nobody is hit
twice: p - 1. A ring is as fast as its slowest link, so the best has the fastest slowest link.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Sequence

from daso.errors import ConfigError

__all__ = [
    "best_segments",
    "leader",
    "pipelined_seconds",
    "plan_digest",
    "ring_order",
    "slots",
]

EXACT_RANKS = 8  # up to which all rings are tried: 5040
Matrix = Sequence[Sequence[float]]


def slots(ranks: int) -> list[tuple[int, ...]]:
    """Return to whom each rank sends in every slot: in slot k rank r sends to r + k.

    Args:
        ranks: How many; in all slots together each sends once to each other.
    """
    return [tuple((rank + turn) % ranks for rank in range(ranks)) for turn in range(1, ranks)]


def _check(seconds: Matrix) -> int:
    ranks = len(seconds)
    if ranks < 2 or any(len(row) != ranks for row in seconds):
        raise ConfigError(
            f"links must be given from each of 2 ranks or more to each, not as "
            f"{[len(row) for row in seconds]}"
        )
    return ranks


def _cost(ring: Sequence[int], seconds: Matrix) -> tuple[float, float]:
    """Return what a ring costs: its slowest link, then all of them."""
    links = [seconds[a][b] for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]
    return max(links), sum(links)


def ring_order(seconds: Matrix) -> tuple[int, ...]:
    """Return the ring whose slowest link is fastest, from rank 0; of those the one shortest in all.

    Exact up to 8 ranks; with more, the nearest neighbours of each in turn, mended by reversing
    stretches as long as that helps (2-opt, Croes 1958).

    Args:
        seconds: What each rank (row) needs to send a message to each other (column).
    """
    ranks = _check(seconds)
    if ranks <= EXACT_RANKS:
        rings = ((0, *rest) for rest in itertools.permutations(range(1, ranks)))
        return min(rings, key=lambda ring: (_cost(ring, seconds), ring))
    ring, left = [0], set(range(1, ranks))
    while left:
        ring.append(min(left, key=lambda rank: (seconds[ring[-1]][rank], rank)))
        left.remove(ring[-1])
    return _two_opt(ring, seconds)


def _two_opt(ring: list[int], seconds: Matrix) -> tuple[int, ...]:
    best, better = _cost(ring, seconds), True
    while better:
        better = False
        for a, b in itertools.combinations(range(1, len(ring)), 2):
            turned = [*ring[:a], *reversed(ring[a : b + 1]), *ring[b + 1 :]]
            if (cost := _cost(turned, seconds)) < best:
                ring, best, better = turned, cost, True
    return tuple(ring)


def leader(seconds: Matrix) -> int:
    """Return the rank from which the farthest other one is nearest.

    Args:
        seconds: As for `ring_order`.
    """
    ranks = range(_check(seconds))
    return min(ranks, key=lambda rank: (max(seconds[rank][to] for to in ranks if to != rank), rank))


def pipelined_seconds(ranks: int, segments: int, latency_seconds: float, seconds: float) -> float:
    """Return how long a row takes from the first rank of a chain to the last, in segments.

    Each is passed on while the next one comes (cut-through). One segment is store-and-forward.

    Args:
        ranks: Of the chain; 2 at least.
        segments: Into which the row is cut.
        latency_seconds: Of a segment, beside its bytes.
        seconds: That the whole row occupies a link.
    """
    return (ranks - 2 + segments) * (latency_seconds + seconds / segments)


def best_segments(ranks: int, latency_seconds: float, seconds: float) -> int:
    """Return into how many segments `pipelined_seconds` is shortest: about sqrt((p-2) t / latency).

    Args:
        ranks: Of the chain; 2 at least.
        latency_seconds: Of a segment; above 0.
        seconds: That the whole row occupies a link.
    """
    near = math.sqrt((ranks - 2) * seconds / latency_seconds)
    return min(
        (max(1, math.floor(near)), math.ceil(near) or 1),
        key=lambda count: pipelined_seconds(ranks, count, latency_seconds, seconds),
    )


def plan_digest(seconds: Matrix) -> int:
    """Return a number that two ranks share if, and all but surely only if, they plan alike.

    Args:
        seconds: As for `ring_order`; the digest is of ring, leader and slots.
    """
    plan = [ring_order(seconds), leader(seconds), slots(len(seconds))]
    digest = hashlib.sha256(json.dumps(plan).encode()).digest()
    return int.from_bytes(digest[:6], "big")  # exact in a float64
