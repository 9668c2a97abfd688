"""Which size of chunks is fastest: a search that grows, refines once, holds, and starts anew.

After US 11164079 B2 (chunk-wise synchronisation, IBM): chunks grow until iterations got slower with
two sizes in a row (one may be noise), a size beside the fastest is tried, and the fastest of all is
kept. Where iterations then come to take much longer or shorter, twice in a row, the search starts
anew: what trains, or the machine, has changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daso.errors import ConfigError

__all__ = ["BucketSizeSearch", "SearchState"]


@dataclass(frozen=True, slots=True)
class SearchState:
    """Where a search stands."""

    nbytes: int  # of a chunk, from here on
    tried: tuple[tuple[int, float], ...] = ()  # bytes, seconds of an iteration
    refining: bool = False  # this is the size beside the fastest
    holding: bool = False  # the search is over
    held_seconds: float = 0.0  # of an iteration when it was over; 0: not measured yet
    strange: bool = False  # the last iterations took much longer or shorter than those


@dataclass(frozen=True, slots=True)
class BucketSizeSearch:
    """Finds the size of chunks by the time of iterations.

    Args:
        least_bytes: The first size.
        most_bytes: The last one.
        every: Iterations whose median time tells of a size.
        expand: How much larger the next size is.
        tolerance: Relative time by which an iteration must be slower to count as slower.
        patience: Slower sizes in a row after which chunks grow no more.
        reopen: Relative time by which iterations must change for the search to start anew.
    """

    least_bytes: int
    most_bytes: int
    every: int = 20
    expand: float = 2.0
    tolerance: float = 0.02
    patience: int = 2
    reopen: float = 0.15

    def __post_init__(self) -> None:
        rules = (
            ("least_bytes", "at least 1", self.least_bytes >= 1),
            ("most_bytes", "at least least_bytes", self.most_bytes >= self.least_bytes),
            ("every", "at least 1", self.every >= 1),
            ("expand", "more than 1", 1 < self.expand < math.inf),
            ("tolerance", "at least 0", 0 <= self.tolerance < math.inf),
            ("patience", "at least 1", self.patience >= 1),
            ("reopen", "more than 0", 0 < self.reopen < math.inf),
        )
        for name, rule, holds in rules:
            if not holds:
                raise ConfigError(
                    f"BucketSizeSearch.{name} must be {rule}, not {getattr(self, name)!r}"
                )

    def start(self) -> SearchState:
        """Return where every search begins."""
        return SearchState(self.least_bytes)

    def after(self, now: SearchState, seconds: float) -> SearchState:
        """Return how to go on."""
        if now.holding:
            return self._hold(now, seconds)
        tried = (*now.tried, (now.nbytes, seconds))
        best, least = min(tried, key=lambda one: one[1])
        slower = [one > least * (1 + self.tolerance) for _, one in tried]
        larger = min(self.most_bytes, max(now.nbytes + 1, round(now.nbytes * self.expand)))
        if not now.refining and larger > now.nbytes and not all(slower[-self.patience :]):
            return replace(now, nbytes=larger, tried=tried)
        between = _beside(best, tried)
        if now.refining or not slower[-1] or between is None:
            return SearchState(best, tried, holding=True)
        return replace(now, nbytes=between, tried=tried, refining=True)

    def _hold(self, now: SearchState, seconds: float) -> SearchState:
        if now.held_seconds <= 0:
            return replace(now, held_seconds=seconds)
        ratio = seconds / now.held_seconds
        if 1 / (1 + self.reopen) <= ratio <= 1 + self.reopen:
            return replace(now, strange=False)
        return self.start() if now.strange else replace(now, strange=True)


def _beside(best: int, tried: Sequence[tuple[int, float]]) -> int | None:
    """Return a size between the fastest and its faster neighbour; None if there is none."""
    at = [nbytes for nbytes, _ in tried].index(best)
    # The larger one where both are equally fast.
    next_to = [*tried[at + 1 : at + 2], *tried[max(0, at - 1) : at]]
    if not next_to:
        return None
    beside = min(next_to, key=lambda one: one[1])[0]
    between = round(math.sqrt(best * beside))
    return None if between in (best, beside) else between
