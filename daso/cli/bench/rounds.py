"""Alternating rounds of contenders, so that other load on the machine affects all of them."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from daso.comm.control import gather
from daso.comm.topology import Topology

T = TypeVar("T")
INTERFACES = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True)
class Round:
    """Measured costs of one round of one contender, on the slowest rank."""

    steps: int
    seconds: float  # per step
    cpu_seconds: float  # per step: all threads of a rank, mean over ranks
    nbytes: float | None  # per step: sent by all hosts, by their interfaces; None on one host
    exposed_seconds: float  # per step; 0 if the contender does not count it
    base_seconds: float  # per step of compute only: mean of the rounds before and after
    whole: bool = True  # contains no partial exchange

    @property
    def ratio(self) -> float:
        """Return step time over compute only."""
        return self.seconds / self.base_seconds


def count_bytes(text: str) -> int:
    """Return the bytes that a host has sent, without loopback."""
    rows = [line.split(":", 1) for line in text.splitlines() if ":" in line]
    return sum(int(row.split()[8]) for name, row in rows if name.strip() != "lo")


def sent_bytes(topology: Topology) -> int | None:
    """Return the bytes that all hosts have sent; None if all ranks share one host.

    Collective over the world; blocking.
    """
    first = topology.host_rank == 0
    own_bytes = count_bytes(INTERFACES.read_text(encoding="ascii")) if first else 0
    rows: list[tuple[int, int]] = gather(topology, (int(first), own_bytes))
    return sum(sent for _, sent in rows) if sum(hosts for hosts, _ in rows) > 1 else None


def take_turns(names: Sequence[T], rounds: int) -> Iterator[T]:
    """Yield every name once a round, rotating the order by one each round."""
    for turn in range(rounds if names else 0):
        at = turn % len(names)
        yield from (*names[at:], *names[:at])


def over(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the seconds of every round over the base's seconds in the same round."""
    return [own / other for own, other in zip(seconds, base, strict=True)]


def median_of(rounds: Sequence[Round], field: str) -> float:
    """Return the median of a field over rounds."""
    return float(statistics.median(getattr(measured, field) for measured in rounds))


class Clock:
    """Wall and CPU seconds since construction."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Return wall and CPU seconds, of all threads."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu
