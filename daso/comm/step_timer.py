"""Step times, idle times and waits of one rank, measured on its device's clock.

A device runs behind its host: while the host waits for other ranks, the device runs the kernels
that were launched before, and is idle only after them. So a wait is measured on the device:
timestamps are launched where the host waits, and between steps. They are read once the device has
passed them, without waiting. Idle times are also recorded in traces; see `daso.trace`.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from daso import trace
from daso.errors import StallError

MOST_STEPS = 1000  # kept between two calls of `take_steps`
MOST_SECONDS = 5.0  # between two readings; longer: the process was suspended (SLURM, Ctrl-Z)
SLICE_SECONDS = 1.0
LATE_SECONDS = 2.0  # of a wait before ranks ask for, and answer with, signs of life
YIELDS = 200  # polls with sched_yield() before the first sleep
SLEEP_SECONDS = 5e-5


class Timestamp(Protocol):
    """The time at which the operations that a thread had launched were finished."""

    def over(self) -> bool:
        """Return whether they are finished. Does not block."""
        ...

    def since(self, earlier: Any) -> float:
        """Return the seconds since another timestamp of the same clock; both must be over."""
        ...


class HostTimestamp:
    """The current time: operations of a CPU thread finish when they return."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def over(self) -> bool:
        """Return True."""
        return True

    def since(self, earlier: "HostTimestamp") -> float:
        """Return the seconds since another timestamp."""
        return self._at - earlier._at


class Launched(NamedTuple):
    """Unread timestamps of a wait or of the end of a step."""

    kind: int | None  # of the wait, as in `daso.trace`; None: a step ended
    begun: Timestamp
    ended: Timestamp
    at: float = 0.0  # when the wait ended on the host; seconds, time.perf_counter
    key: int = trace.NO_KEY
    of_step: bool = True


class StepTimer:
    """Measures the steps and waits of one rank.

    Args:
        stamp: Records a timestamp on the calling thread's stream.
    """

    def __init__(self, stamp: Callable[[], Timestamp] = HostTimestamp) -> None:
        self._idle = {trace.WAIT_INTRA_NODE: 0.0, trace.WAIT_INTER_NODE: 0.0}  # seconds
        self.meeting_seconds = 0.0  # part of these: waits for other nodes outside of steps
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._launched: deque[Launched] = deque()  # in order
        self.start(stamp)

    def start(self, stamp: Callable[[], Timestamp]) -> None:
        """Begin a step on another clock; unread timestamps are dropped."""
        self._read()
        self._launched.clear()
        self._stamp = stamp
        self._last: Timestamp = stamp()
        self._idle_since = 0.0  # idle seconds of the current step, for other nodes

    @contextmanager
    def waiting(
        self, kind: int, key: int = trace.NO_KEY, *, of_step: bool = True
    ) -> Iterator[None]:
        """Measure a wait of the calling thread, inside of a step or outside."""
        begun = self._stamp()
        try:
            yield
        finally:
            at = time.perf_counter()
            self._launched.append(Launched(kind, begun, self._stamp(), at, key, of_step))
            self._read()

    def step(self) -> None:
        """End a step."""
        ended = self._stamp()
        self._launched.append(Launched(None, ended, ended))
        self._read()

    def idle_seconds(self, kind: int) -> float:
        """Return the idle seconds in waits of a kind."""
        self._read()
        return self._idle[kind]

    def step_idle_seconds(self) -> float:
        """Return the idle seconds in steps that waited for other nodes."""
        return self.idle_seconds(trace.WAIT_INTER_NODE) - self.meeting_seconds

    def steps(self) -> list[float]:
        """Return the seconds of each step since the last `take_steps`."""
        self._read()
        return list(self._steps)

    def take_steps(self) -> list[float]:
        """Return the seconds of each step since the last call, excluding waits for other nodes."""
        steps = self.steps()
        self._steps.clear()
        return steps

    def _read(self) -> None:
        """Read the timestamps that the device has passed."""
        while self._launched and self._launched[0].ended.over():
            kind, begun, ended, at, key, of_step = self._launched.popleft()
            if kind is None:
                self._steps.append(max(0.0, ended.since(self._last) - self._idle_since))
                self._last, self._idle_since = ended, 0.0
                continue
            idle = ended.since(begun)
            self._idle[kind] += idle
            if kind == trace.WAIT_INTER_NODE:
                self._idle_since += idle
                self.meeting_seconds += 0.0 if of_step else idle
            trace.record(kind, at - idle, ends=at, key=key)


class RunningClock:
    """Elapsed time of a wait, excluding time the process was suspended."""

    def __init__(self) -> None:
        self._seconds, self._last = 0.0, time.perf_counter()

    def seconds(self) -> float:
        """Return the elapsed seconds."""
        now = time.perf_counter()
        self._seconds += min(now - self._last, MOST_SECONDS)
        self._last = now
        return self._seconds

    def waits_for(self, wait: Callable[[float], bool], most_seconds: float) -> bool:
        """Call ``wait`` with slices of the time until it returns True; return whether it did."""
        while True:
            left = most_seconds - self.seconds()
            if wait(min(SLICE_SECONDS, max(0.0, left))):
                return True
            if left <= 0:
                return False


def wait_until(
    arrived: Callable[[], bool],
    missing: Callable[[], str],
    timeout_seconds: float,
    late: Callable[[], None],
    kind: int | None = None,
    what: str = "take part in a step",
) -> float:
    """Block until ``arrived()`` returns True; yields the core between polls."""
    if arrived():
        return 0.0
    start, clock, polls = time.perf_counter(), None, 0
    while not arrived():
        polls += 1
        if polls < YIELDS:
            os.sched_yield()
            continue
        clock = clock or RunningClock()
        time.sleep(SLEEP_SECONDS)
        waited = clock.seconds()
        if waited > LATE_SECONDS:
            late()
        if waited > timeout_seconds:
            raise StallError(
                f"all ranks must {what} within {timeout_seconds:g} s: {missing()}; look there, or "
                f"raise Exchange.timeout_seconds",
                code="ranks-did-not-arrive",
            )
    if kind is not None:
        trace.record(kind, start)
    return time.perf_counter() - start
