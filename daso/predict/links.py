"""Links between nodes: rates in words and for tc, and messages on virtual time. Pure."""

import heapq
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from daso.checks import Rule, check, either, number, positive, validated_record
from daso.errors import ConfigError
from daso.plan.cost_model import vote_rounds

# Bytes on the wire for each byte of payload: 1538 for 1448, TCP with timestamps at an MTU of 1500.
HEADERS = 1538 / 1448
UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
LARGEST = 72 * 1024  # bytes: 64 KiB of data, and the headers of 45 packets
SLOWEST, FASTEST = 10**6, 100 * 10**9  # bits per second; SLURM's own messages must pass
FASTEST_PREDICTED = 1600 * 10**9  # bits per second, of predicted links


@validated_record
@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex link from a node to a switch with unlimited capacity.

    Args:
        bytes_per_second: Rate of each direction; infinite to ignore it.
        latency_seconds: Seconds from one node to another, for any size.
        headers: Bytes on the wire for each byte of payload.
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    headers: float = HEADERS

    def __post_init__(self) -> None:
        infinite = Rule("infinite", lambda rate: isinstance(rate, float) and rate == math.inf)
        rate = either(positive(1e18), infinite, text="a number above 0")
        check("bytes_per_second", self.bytes_per_second, rate)
        check("latency_seconds", self.latency_seconds, number(0, 1e6))
        check("headers", self.headers, number(1, 100))

    def seconds(self, nbytes: float) -> float:
        """Return the seconds that `nbytes` of payload occupy the link."""
        return nbytes * self.headers / self.bytes_per_second


def vote_seconds(link: Link, nodes: int) -> float:
    """Return the seconds of a vote of all nodes on a few numbers, up and down a tree."""
    return vote_rounds(nodes) * link.latency_seconds


def parse_rate(word: str, fastest: int = FASTEST) -> int | None:
    """Return the bits per second of a rate such as ``1gbit``, or None for ``none``."""
    if word == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", word)
    bits = int(Fraction(match[1]) * UNITS[match[2]]) if match else 0
    if not SLOWEST <= bits <= fastest:
        raise ConfigError(
            f"the rate of a link must be none or from 1mbit to {fastest // 10**9}gbit, not "
            f"{word!r}; write it as in 10mbit, 2.5gbit",
            code="link-rate-invalid",
        )
    return bits


def discipline(bits: int | None) -> Iterator[str]:
    """Yield the words of tc's queueing discipline for a rate in bits per second."""
    if bits is None:
        yield "noqueue"
        return
    yield f"tbf rate {bits}bit"
    # One millisecond, and at least one kernel hand-over: a network card splits it into packets
    # itself, while splitting in the queue would take a core.
    yield f"burst {max(bits // 8000, LARGEST)}"
    yield "latency 50ms"


def push_seconds(orders: Sequence[Sequence[int]], nbytes: float, link: Link) -> float:
    """Return the seconds in which ranks push a message to each rank of their order, one by one.

    A message occupies the network cards of its sender and receiver; cards serve messages in order
    of arrival, and a sender waits for its turn.
    """
    takes = link.latency_seconds + link.seconds(nbytes)
    free = [0.0] * len(orders)  # when each card can receive
    ready = [(0.0, 0.0, rank, 0) for rank in range(len(orders)) if orders[rank]]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        at, arrival, rank, turn = heapq.heappop(ready)
        target = orders[rank][turn]
        if free[target] > at:  # busy: retry when it is free
            heapq.heappush(ready, (free[target], arrival, rank, turn))
            continue
        free[target] = last = at + takes
        if turn + 1 < len(orders[rank]):
            heapq.heappush(ready, (last, last, rank, turn + 1))
    return max([last, *free])
