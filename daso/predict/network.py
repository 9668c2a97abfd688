"""Links between nodes."""

import math
from dataclasses import dataclass

from daso.checks import Rule, check, either, number, positive, validated_record
from daso.plan.cost_model import vote_rounds

__all__ = ["HEADERS", "Link", "vote_seconds"]

# Bytes on the wire for each byte of payload: 1538 for 1448, TCP with timestamps at an MTU of 1500.
HEADERS = 1538 / 1448


@validated_record
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

    def __post_init__(self) -> None:
        infinite = Rule("infinite", lambda one: isinstance(one, float) and one == math.inf)
        rate = either(positive(1e18), infinite, text="a number above 0")
        check("bytes_per_second", self.bytes_per_second, rate)
        check("latency_seconds", self.latency_seconds, number(0, 1e6))
        check("headers", self.headers, number(1, 100))

    def seconds(self, nbytes: float) -> float:
        """Return how long so many bytes of payload occupy the link."""
        return nbytes * self.headers / self.bytes_per_second


def vote_seconds(link: Link, nodes: int) -> float:
    """Return how long nodes take to agree on a few numbers: up a tree and down again."""
    return vote_rounds(nodes) * link.latency_seconds
