"""How long somebody has waited, without the time in which this process was stopped."""

import time
from collections.abc import Callable

__all__ = ["Patience"]

MOST_SECONDS = 5.0  # between two looks, or it did not run: a job that SLURM suspends, Ctrl-Z
SLICE_SECONDS = 1.0


class Patience:
    """Counts the seconds of a wait in which this process ran; it is asked every few seconds."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.perf_counter()
        self._seconds += min(now - self._last, MOST_SECONDS)
        self._last = now
        return self._seconds

    def waits_for(self, wait: Callable[[float], bool], most_seconds: float) -> bool:
        """Wait in slices by a call that returns whether it is over; return so in the end."""
        while True:
            left = most_seconds - self.seconds()
            if wait(min(SLICE_SECONDS, max(0.0, left))):
                return True
            if left <= 0:
                return False
