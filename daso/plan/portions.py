"""Cuts gradients into portions, and chooses the order in which portions are exchanged.

A forward pass needs the first layers first, but a backward pass computes their gradients last. So
gradients are cut into portions. Whenever the link is free, the portion that is needed first is
sent: it overtakes the rest of a large layer, but does not interrupt a portion in flight. After US
11941528 B2 (Amazon: split and pre-empt), P3 (Jayarajan et al. 2019, arXiv 1905.03960) and
ByteScheduler (Peng et al., SOSP 2019).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from daso.errors import ConfigError
from daso.plan.layout import Span, split

Order = Literal["layer", "lifo", "fifo"]


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a gradient buffer that is exchanged as a unit."""

    span: Span  # elements of the buffer
    params: tuple[int, ...]  # indices of parameters that overlap it, in buffer order
    layer: int  # the first layer that needs it


def efficient_bytes(efficiency: float, *, latency_seconds: float, bytes_per_second: float) -> int:
    """Return the minimum portion size with which a link reaches a share of its rate.

    A portion takes bytes / rate plus a latency. The share is the first term over the sum, so
    bytes >= efficiency / (1 - efficiency) * latency * rate (US 11941528 B2, claim 14).
    """
    if not 0 < efficiency < 1:
        raise ConfigError(
            f"efficiency must be above 0 and below 1, not {efficiency!r}",
            code="efficiency-out-of-range",
        )
    return max(1, round(efficiency / (1 - efficiency) * latency_seconds * bytes_per_second))


def cut_portions(
    spans: Sequence[Span], layers: Sequence[int], capacity: int
) -> tuple[Portion, ...]:
    """Cut a gradient buffer into portions.

    A tensor of at least one and a half times the capacity is cut into separate portions; smaller
    adjacent tensors share a portion until it is full.
    """
    portions: list[Portion] = []
    filling: list[int] = []

    def close() -> None:
        if filling:
            whole = Span(spans[filling[0]].start, spans[filling[-1]].stop + 1)
            portions.append(Portion(whole, tuple(filling), min(layers[at] for at in filling)))
            filling.clear()

    for at, (start, stop) in enumerate(spans):
        if 2 * (stop + 1 - start) >= 3 * capacity:
            close()
            count = max(1, round((stop + 1 - start) / capacity))
            parts = split(Span(start, stop + 1), count)
            portions.extend(Portion(part, (at,), layers[at]) for part in parts)
            continue
        filling.append(at)
        if stop + 1 - spans[filling[0]].start >= capacity:
            close()
    close()
    return tuple(portions)


class PriorityQueue:
    """Portions that are ready to be sent, in order of priority.

    Args:
        order: ``"layer"``: needed first by the next forward; ``"lifo"``: ready last; ``"fifo"``:
            ready first.
        portions: All portions; methods identify them by index.
    """

    def __init__(self, order: Order, portions: Sequence[Portion]) -> None:
        self._order, self._portions = order, portions
        self._ready: list[tuple[int, int, int]] = []  # two keys and the portion; next last
        self._count = 0

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, portion: int) -> None:
        """Add a portion that is ready."""
        self._count += 1
        # Keys are negated, because `take` removes the end of the list.
        key = {"layer": -self._portions[portion].layer, "lifo": self._count, "fifo": -self._count}
        insort(self._ready, (key[self._order], -portion, portion))

    def take(self) -> int:
        """Remove and return the portion to send next."""
        return self._ready.pop()[2]
