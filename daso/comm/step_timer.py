"""How long a rank's steps take and how long it stands still, by the clock of what computes.

A device is behind its host. While the host waits for others, the device does what was launched
before, and stands still only once that is done; a step that took the host a moment to launch takes
the device as long as ever. So a device is asked: stamps are launched where its host waits, and
between steps, and read when it has come past them. Nobody waits for that. How long a rank stood
still is recorded too; see `daso.trace`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from daso import trace

__all__ = ["HostTimestamp", "StepTimer", "Timestamp"]

MOST_STEPS = 1000  # that are kept until somebody takes them


class Timestamp(Protocol):
    """The moment at which all that a thread had launched was over."""

    def over(self) -> bool:
        """Return whether that moment is past. Does not block."""
        ...

    def since(self, earlier: Any) -> float:
        """Return the seconds since another stamp of the same clock; both are past."""
        ...


class HostTimestamp:
    """Now: what a thread of a CPU launched is over."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def over(self) -> bool:
        """Return True."""
        return True

    def since(self, earlier: "HostTimestamp") -> float:
        """Return the seconds since another one."""
        return self._at - earlier._at


class Launched(NamedTuple):
    """Stamps that were not read yet, of a wait or of the end of a step."""

    kind: int | None  # for whom was waited; None: a step ended
    begun: Timestamp
    ended: Timestamp
    at: float = 0.0  # when the wait ended on the host; seconds, time.perf_counter
    key: int = trace.NO_KEY
    of_step: bool = True


class StepTimer:
    """Takes the times of one rank.

    Args:
        stamp: Launches a stamp, on the calling thread's stream.
    """

    def __init__(self, stamp: Callable[[], Timestamp] = HostTimestamp) -> None:
        self._idle = {trace.WAIT_INTRA_NODE: 0.0, trace.WAIT_INTER_NODE: 0.0}  # seconds
        self.meeting_seconds = 0.0  # of those, for other nodes, in waits that are not a step's
        self._steps: deque[float] = deque(maxlen=MOST_STEPS)
        self._launched: deque[Launched] = deque()  # in order
        self.start(stamp)

    def start(self, stamp: Callable[[], Timestamp]) -> None:
        """Begin a step, on another clock; what is not past by now is not taken."""
        self._read()
        self._launched.clear()
        self._stamp = stamp
        self._last: Timestamp = stamp()
        self._idle_since = 0.0  # of the step that goes on, for other nodes

    @contextmanager
    def waiting(
        self, kind: int, key: int = trace.NO_KEY, *, of_step: bool = True
    ) -> Iterator[None]:
        """Let the calling thread wait meanwhile: for what its steps need, or for a meeting."""
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
        """Return for how long nothing was computed since others were waited for."""
        self._read()
        return self._idle[kind]

    def step_idle_seconds(self) -> float:
        """Return for how long nothing was computed since steps waited for other nodes."""
        return self.idle_seconds(trace.WAIT_INTER_NODE) - self.meeting_seconds

    def steps(self) -> list[float]:
        """Return the seconds of each step since the last `take_steps`."""
        self._read()
        return list(self._steps)

    def take_steps(self) -> list[float]:
        """Return the seconds of every step since the last call, without waits for other nodes."""
        steps = self.steps()
        self._steps.clear()
        return steps

    def _read(self) -> None:
        """Take up what is past."""
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
