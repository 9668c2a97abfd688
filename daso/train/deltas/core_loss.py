"""What exchanges take from training by the processor time of their thread: measured, not assumed.

A free core on which exchanges go on beside training may be another's: of a second job, of a
container with a quota, a hyperthread. The kernel tells how long a thread was ready to run while
others had its core (`/proc/thread-self/schedstat`, Documentation/scheduler/sched-stats.rst).
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

__all__ = ["CoreLoss", "ready_seconds"]

SCHEDSTAT = Path("/proc/thread-self/schedstat")
READ_BYTES = 64  # three numbers
SHARE = 0.25  # of the newest exchange in the mean
LEAST_SECONDS = 0.02  # between two exchanges, to learn what others take from there


def ready_seconds() -> float:
    """Return how long this thread was ready, but had no core; 0 where the kernel does not tell."""
    try:
        with SCHEDSTAT.open("rb", buffering=0) as file:  # half of what `read_text` takes
            return int(file.read(READ_BYTES).split()[1]) / 1e9
    except (OSError, LookupError, ValueError):
        return 0.0


class CoreLoss:
    """What the thread that trains loses by exchanges beside it.

    Args:
        cores: ``"shared"``: exchanges take their time from training, as no core is left;
            ``"spare"``: they do as far as is measured; ``"other"``: they do not, since training
            is elsewhere, on a GPU.
    """

    def __init__(self, cores: Literal["shared", "spare", "other"]) -> None:
        self._cores = cores
        self._begun: tuple[float, float] | None = None  # when; ready until then
        self._ended: tuple[float, float] | None = None
        self._others = 0.0  # share of its time that a thread is ready without exchanges
        self._loss: float | None = None  # seconds an exchange, smoothed
        self._part = 1.0  # of its thread's processor time
        # At the last look at steps: the time, ready until then, and its thread's processor time.
        self._stepped: tuple[float, float, float] | None = None

    def begin(self, *, beside: bool) -> None:
        """An exchange begins, beside training or while that waits. By the thread that trains."""
        self._begun = None
        if self._cores == "spare" and beside:
            self._begun = self._learn_of_others()

    def _learn_of_others(self) -> tuple[float, float]:
        """Learn how long this thread was ready while nothing was exchanged; return it until now."""
        now, ready = time.perf_counter(), ready_seconds()
        if self._ended is not None and now - self._ended[0] > LEAST_SECONDS:
            share = (ready - self._ended[1]) / (now - self._ended[0])
            # Another thread may train now, of which the kernel counts from another start.
            self._others += SHARE * (min(1.0, max(0.0, share)) - self._others)
        self._ended = None
        return now, ready

    def pause(self) -> None:
        """Something else begins to take its core from training. By the thread that trains."""
        if self._cores == "spare":
            self._learn_of_others()

    def resume(self) -> None:
        """That is over. By the thread that trains."""
        if self._cores == "spare":
            self._ended = time.perf_counter(), ready_seconds()

    def end(self, busy_seconds: float) -> float:
        """An exchange is over; return what one takes from training, in seconds.

        Args:
            busy_seconds: Processor time of its thread: it took no more.

        By the thread that trains.
        """
        if self._cores != "spare":
            return busy_seconds if self._cores == "shared" else 0.0
        self._ended = None
        if self._begun is not None:
            now, ready = time.perf_counter(), ready_seconds()
            # Less than none where others took less than before: noise must not add up.
            lost = min(busy_seconds, ready - self._begun[1] - self._others * (now - self._begun[0]))
            before = lost if self._loss is None else self._loss
            self._loss = before + SHARE * (lost - before)
            self._begun, self._ended = None, (now, ready)
        loss = max(0.0, self._loss or 0.0)
        self._part = min(1.0, loss / busy_seconds) if busy_seconds > 0 else self._part
        return loss

    def of(self, busy_seconds: float) -> float:
        """Return what one of so much processor time takes, by those that were measured."""
        parts = {"shared": 1.0, "spare": self._part, "other": 0.0}
        return parts[self._cores] * busy_seconds

    def of_steps(self, busy_seconds: float) -> float:
        """Return what averaging gradients took from steps since the last call, in seconds.

        Args:
            busy_seconds: Processor time that its thread has had so far.

        By the thread that trains.
        """
        if self._cores == "other":
            return 0.0
        ready = ready_seconds() if self._cores == "spare" else 0.0
        now = time.perf_counter(), ready, busy_seconds
        before, self._stepped = self._stepped or now, now
        passed, waited, busy = (new - old for new, old in zip(now, before, strict=True))
        if self._cores == "shared":
            return busy
        return min(busy, max(0.0, waited - self._others * passed))

    def drop(self) -> None:
        """An exchange came to nothing. By the thread that trains."""
        self._begun = self._ended = None

    def state(self) -> dict[str, float | None]:
        """Return what was learned, as plain values."""
        return {"loss": self._loss, "others": self._others, "part": self._part}

    def load(self, state: Mapping[str, float | None]) -> None:
        """Take up what `state` returned; what is under way is not this one's."""
        self._loss, self._others = state["loss"], state["others"] or 0.0
        self._part = 1.0 if (part := state.get("part")) is None else part
        self.drop()
