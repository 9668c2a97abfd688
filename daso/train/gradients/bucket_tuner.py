"""Searches the size of gradient buckets during training."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from daso.plan.bucket_search import BucketSizeSearch
from daso.train.coordinator import Coordinator

if TYPE_CHECKING:
    from daso.comm.engine import WorkHandle

MARGIN = 2  # batches that the gather of medians may take, besides the wait of exchanges


class BucketTuner:
    """Tries bucket sizes, each for some batches, and compares the slowest rank's batch times.

    All ranks decide from the same numbers and change the size after the same batch.

    Args:
        search: Search strategy.
        coordinator: Gathers the times of all ranks.
        cut: Cuts gradients into buckets of a size in bytes.
        groups: Returns the parameters of each bucket of a size; the same on every rank.
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
        self._handle: WorkHandle[list[float]] | None = None  # medians of all ranks, in flight
        self._left = 0  # batches until all ranks read it

    def after_step(self, batch: int, wait: int) -> None:
        """Count a batch; gather the times of ranks, or change the size, when due.

        Collective over the world in the sense that all ranks gather and change after the same
        batches; blocks only for a rank that is more than ``wait`` batches behind.
        """
        if self._handle is not None:
            self._left -= 1
            if self._left <= 0:
                medians = self._coordinator.wait(self._handle)
                self._learn(batch, max(medians))
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
            self.now = self.search.after(self.now, seconds)  # with the same buckets
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
