"""Searches the size of gradient buckets while training goes on."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from daso.plan.bucket_search import BucketSizeSearch
from daso.plan.options import Settings
from daso.train.coordinator import Coordinator

if TYPE_CHECKING:
    from daso.comm.engine import WorkHandle

__all__ = ["BucketTuner", "first_size"]

LEAST_BYTES = 1 << 16
MARGIN = 2  # batches that the slowest rank's word may take beside exchanges


def bucket_search(nbytes: int) -> BucketSizeSearch:
    """Return how to search for a model whose gradients take so many bytes."""
    least = max(1, min(LEAST_BYTES, nbytes))
    return BucketSizeSearch(least, max(least, nbytes))


def first_size(
    settings: Settings, nbytes: int, *, on_gpu: bool, portion_bytes: int | None = None
) -> tuple[int, BucketSizeSearch | None]:
    """Return the size of buckets to begin with, and the search for a better one, if any."""
    if portion_bytes is not None:
        return portion_bytes, None
    size = settings.gradients.first_bucket_bytes(on_gpu=on_gpu)
    if size is not None:
        return size, None
    search = bucket_search(nbytes)
    return search.least_bytes, search


class BucketTuner:
    """Tries sizes of buckets, each for some batches, by what the slowest rank's batches take.

    Every rank decides from the same numbers and changes size after the same batch.

    Args:
        search: How to search.
        coordinator: Where ranks tell each other their times.
        cut: Takes a size, in bytes.
        groups: Returns what is in which bucket with a size, the same on every rank.
    """

    def __init__(
        self,
        search: BucketSizeSearch,
        coordinator: Coordinator,
        cut: Callable[[int], object],
        groups: Callable[[int], object],
    ) -> None:
        self.search, self._coordinator, self._cut, self._groups = search, coordinator, cut, groups
        self.now = search.start()
        self._seconds: list[float] = []  # of each batch with this size
        self._stepped_at: float | None = None  # None: the next batch is the first with this size
        self._handle: WorkHandle[list[float]] | None = None  # everyone's median, on its way
        self._left = 0  # batches until all ranks read it

    def after_step(self, batch: int, wait: int) -> None:
        """Count a batch; start asking, or change size, when that is due.

        Collective over the world in the sense that all ranks ask and change after the same batches;
        blocks only for a rank that is more than ``wait`` batches behind.
        """
        if self._handle is not None:
            self._left -= 1
            if self._left <= 0:
                everyones = self._coordinator.wait(self._handle)
                self._learn(batch, max(everyones))
            return
        now = time.perf_counter()
        if self._stepped_at is not None:
            self._seconds.append(now - self._stepped_at)
        self._stepped_at = now
        if len(self._seconds) == self.search.every:
            channels, median = self._coordinator.channels, statistics.median(self._seconds)
            self._handle = channels.engine.submit(channels.gather_aside(median))
            self._left = wait + MARGIN

    def _learn(self, batch: int, seconds: float) -> None:
        before, self.now = self.now, self.search.after(self.now, seconds)
        groups = self._groups(before.nbytes)
        while not self.now.holding and self._groups(self.now.nbytes) == groups:
            self.now = self.search.after(self.now, seconds)  # buckets are the same ones
        self._handle, self._stepped_at = None, None
        self._seconds.clear()
        if self.now.nbytes != before.nbytes:
            self._cut(self.now.nbytes)
        if self.now.holding != before.holding or self.now.nbytes != before.nbytes:
            self._coordinator.metrics.event(
                "bucket_bytes",
                batch=batch,
                nbytes=self.now.nbytes,
                seconds=seconds,
                holding=self.now.holding,
            )
