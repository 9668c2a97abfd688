"""Search for the fastest bucket size: grow, refine once, hold, and restart after a change.

After US 11164079 B2 (chunk-wise synchronization, IBM): sizes grow until iterations get slower with
two sizes in a row (one may be noise). Then a size next to the fastest is tried, and the fastest of
all is kept. If iterations later become much slower or faster, twice in a row, the search restarts:
the model or the machine has changed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from daso.errors import ConfigError

MIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SearchState:
    """State of a search."""

    nbytes: int  # of a bucket, from now on
    tried: tuple[tuple[int, float], ...] = ()  # bytes, seconds of an iteration
    refining: bool = False  # the current size is the one next to the fastest
    holding: bool = False  # the search is over
    held_seconds: float = 0.0  # of an iteration at the end of the search; 0: not measured yet
    strange: bool = False  # the last iterations were much slower or faster than that


@dataclass(frozen=True, slots=True)
class BucketSizeSearch:
    """Finds the fastest bucket size from iteration times.

    Args:
        least_bytes: The first size.
        most_bytes: The largest size.
        every: Number of iterations per size; their median counts.
        expand: Ratio of the next size to the current one.
        tolerance: Relative time by which an iteration must be slower to count as slower.
        patience: Number of consecutive slower sizes after which sizes stop growing.
        reopen: Relative change of the iteration time that restarts the search.
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
                    f"BucketSizeSearch.{name} must be {rule}, not {getattr(self, name)!r}",
                    code="bucket-search-value-invalid",
                )

    def start(self) -> SearchState:
        """Return the initial state."""
        return SearchState(self.least_bytes)

    def after(self, now: SearchState, seconds: float) -> SearchState:
        """Return the state after ``every`` iterations with a median time of ``seconds``."""
        if now.holding:
            return self._hold(now, seconds)
        tried = (*now.tried, (now.nbytes, seconds))
        best, least = min(tried, key=lambda trial: trial[1])
        slower = [took > least * (1 + self.tolerance) for _, took in tried]
        larger = min(self.most_bytes, max(now.nbytes + 1, round(now.nbytes * self.expand)))
        if not now.refining and larger > now.nbytes and not all(slower[-self.patience :]):
            return replace(now, nbytes=larger, tried=tried)
        between = _size_between(best, tried)
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


def _size_between(best: int, tried: Sequence[tuple[int, float]]) -> int | None:
    """Return a size between the fastest size and its faster neighbor, or None."""
    index = [nbytes for nbytes, _ in tried].index(best)
    # The larger neighbor first: it is preferred if both are equally fast.
    neighbors = [*tried[index + 1 : index + 2], *tried[max(0, index - 1) : index]]
    if not neighbors:
        return None
    neighbor = min(neighbors, key=lambda trial: trial[1])[0]
    between = round(math.sqrt(best * neighbor))
    return None if between in (best, neighbor) else between


def bucket_search(nbytes: int) -> BucketSizeSearch:
    """Return the search for a model with ``nbytes`` bytes of gradients."""
    least = max(1, min(MIN_BYTES, nbytes))
    return BucketSizeSearch(least, max(least, nbytes))
