"""In which portions gradients cross, and which portion goes first.

A forward pass needs the first layers first, and a backward pass makes their gradients last. So
gradients are cut into portions, and whenever the link is free, of the portions that are ready the
one goes that will be needed first: it overtakes the rest of a large layer, but nothing that is
already on its way is interrupted. After US 11941528 B2 (Amazon: split and pre-empt), P3 (Jayarajan
et al. 2019, arXiv 1905.03960) and ByteScheduler (Peng et al., SOSP 2019).
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from daso.errors import ConfigError
from daso.plan.layout import Span, split

__all__ = ["Order", "Portion", "PriorityQueue", "cut_portions", "efficient_bytes"]

Order = Literal["layer", "lifo", "fifo"]


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of a row of gradients that crosses at once."""

    span: Span  # elements of the row
    params: tuple[int, ...]  # that lie in it or in part, by their place in the row
    layer: int  # the first layer that needs it


def efficient_bytes(efficiency: float, *, latency_seconds: float, bytes_per_second: float) -> int:
    """Return the least size of a portion with which a link does a share of what it could.

    A portion takes its bytes over the rate, and a latency; the share is the first over both, so
    bytes >= efficiency / (1 - efficiency) * latency * rate (US 11941528 B2, claim 14).
    """
    if not 0 < efficiency < 1:
        raise ConfigError(f"efficiency must be above 0 and below 1, not {efficiency!r}")
    return max(1, round(efficiency / (1 - efficiency) * latency_seconds * bytes_per_second))


def cut_portions(
    spans: Sequence[Span], layers: Sequence[int], capacity: int
) -> tuple[Portion, ...]:
    """Cut a row of gradients into portions.

    A tensor of one and a half times the capacity or more is cut into portions of its own; smaller
    ones that lie side by side share a portion until it is full.
    """
    made: list[Portion] = []
    filling: list[int] = []

    def close() -> None:
        if filling:
            whole = Span(spans[filling[0]].start, spans[filling[-1]].stop + 1)
            made.append(Portion(whole, tuple(filling), min(layers[at] for at in filling)))
            filling.clear()

    for at, (start, stop) in enumerate(spans):
        if 2 * (stop + 1 - start) >= 3 * capacity:
            close()
            count = max(1, round((stop + 1 - start) / capacity))
            parts = split(Span(start, stop + 1), count)
            made.extend(Portion(part, (at,), layers[at]) for part in parts)
            continue
        filling.append(at)
        if stop + 1 - spans[filling[0]].start >= capacity:
            close()
    close()
    return tuple(made)


class PriorityQueue:
    """Portions that are ready to cross; the next one is taken whenever the link is free.

    Args:
        order: ``"layer"``: needed first by the next forward; ``"lifo"``: ready last; ``"fifo"``:
            ready first.
        portions: All of them; they are named by their place in here.
    """

    def __init__(self, order: Order, portions: Sequence[Portion]) -> None:
        self._order, self._portions = order, portions
        self._ready: list[tuple[int, int, int]] = []  # two keys and the portion, the next one last
        self._came = 0

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, portion: int) -> None:
        """Note that a portion is ready."""
        self._came += 1
        # What came last is taken first from the end of the list: keys are negated.
        key = {"layer": -self._portions[portion].layer, "lifo": self._came, "fifo": -self._came}
        insort(self._ready, (key[self._order], -portion, portion))

    def take(self) -> int:
        """Return the portion that goes next, and forget it."""
        return self._ready.pop()[2]
