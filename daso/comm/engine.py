"""The communication thread: owns all traffic between nodes, in the order it was handed work.

One daemon thread per process polls and sleeps. It does not block inside MPI, because a blocking
wait spins on a core that training needs, and it does not leave progress to the library, because
without `Test` nothing moves (measured with Open MPI 4.1 over 1 Gbit/s: 0 % hidden without a thread,
49 % with a blocking one, 99 % with one that polls and sleeps).

Work is a generator that yields what is to be waited for: lists of MPI requests, or a call that
tells whether something has happened. Work is carried out one
after the other, so collectives start in the same order on every rank as long as the training
threads hand in the same work; on one communicator a different order gives wrong sums, silently.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from daso import trace
from daso.comm.health.patience import Patience
from daso.comm.health.step_watchdog import LATE_SECONDS
from daso.comm.mpi import load
from daso.errors import ExchangeError, StallError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

__all__ = ["Arrival", "Engine", "NestedWork", "Work", "WorkHandle"]

Result = TypeVar("Result")
Work = Generator["Sequence[MPI.Request] | Callable[[], bool]", None, Result]

# How long the thread sleeps between polls: a hundredth of what the work has taken so far, but no
# more than half of the last wait, so that a fast link gets its next message in time; within these
# bounds. A poll costs 10 to 20 us of a core that training needs, so 10,000 of them a second are
# felt.
POLL_SECONDS = 1e-4
RELAXED_SECONDS = 2e-3
RELAXATION = 0.01
# Where only others are waited for, and nobody stands still for it, polls are rare: each takes 20 to
# 100 us of a core, so that 200 of them, for a rank that is 80 ms later, took five times as much as
# what they were polls for.
PATIENCE = 1 / 16  # of the time that work may take, for all messages that follow each other
PATIENT_SECONDS = 2e-2
SLOW = 0.25  # of the stall limit: who sent a message so lately is slow


class Arrival(list["MPI.Request"]):
    """Requests that end when all ranks have come as far: until then nothing crosses.

    Args:
        requests: Of MPI.
        rounds: Messages that follow each other then; each may wait for who rests on its way.
    """

    def __init__(self, requests: "Sequence[MPI.Request]", rounds: int = 1) -> None:
        super().__init__(requests)
        self.rounds = max(1, rounds)


def _arrival(
    waited: "Sequence[MPI.Request] | Callable[[], bool]", mpi: "ModuleType"
) -> Callable[[], bool]:
    """Return what tells whether that which work waits for has happened."""
    return waited if callable(waited) else partial(mpi.Request.Testall, list(waited))


class NestedWork(Generic[Result]):
    """Work that goes on inside other work, whenever that asks it to.

    Args:
        work: Generator of what to wait for.
    """

    def __init__(self, work: Work[Result]) -> None:
        self._work = work
        self._arrived: Callable[[], bool] = lambda: True
        self.result: Result | None = None
        self.moves = 0  # how often it came further
        self.over = False

    def go_on(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        while not self.over and self._arrived():
            self.moves += 1
            try:
                self._arrived = _arrival(next(self._work), load())
            except StopIteration as stop:
                self.result, self.over = stop.value, True
        return self.over


class WorkHandle(Generic[Result]):
    """The receipt for work handed in."""

    def __init__(
        self, work: Work[Result], key: int = trace.NO_KEY, due_seconds: float = 0.0
    ) -> None:
        self.work, self.key, self.due_seconds = work, key, due_seconds
        self.finished = threading.Event()
        self.started_at = 0.0  # seconds, time.perf_counter
        self.finished_at = 0.0
        self.result: Result | None = None
        self.error: BaseException | None = None

    @classmethod
    def over(cls, result: Result, seconds: float) -> "WorkHandle[Result]":
        """Return a finished handle, as it is kept in a checkpoint."""
        handle = cls(work=_nothing(result))
        handle.result, handle.finished_at = result, seconds
        handle.finished.set()
        return handle

    def done(self) -> bool:
        """Return whether the work is over, well or not."""
        return self.finished.is_set()

    @property
    def seconds(self) -> float:
        """How long the work took."""
        return self.finished_at - self.started_at


def _nothing(result: Result) -> Work[Result]:
    yield []
    return result


class Engine:
    """Carries out work in a thread of its own.

    Args:
        timeout_seconds: How long `wait` waits before it raises.
        missing: Says who does not take part, for that error; blocks for seconds.
        late: Called again and again, by the thread, once work takes long; what it raises ends the
            work.
        name: Of the thread.
        takes: Says how many seconds work with a result takes at least, for links that are imitated.
        kind: As what work is recorded; None: not at all.
    """

    def __init__(
        self,
        timeout_seconds: float,
        missing: Callable[[], str],
        late: Callable[[], None] | None = None,
        name: str = "daso-exchange",
        takes: Callable[[object], float] | None = None,
        kind: int | None = trace.EXCHANGE,
    ) -> None:
        self._takes, self._kind = takes, kind
        self.timeout_seconds, self._missing, self._late = timeout_seconds, missing, late
        # Of any length: who waits for room in it would not be told who is missing.
        self._queue: queue.SimpleQueue[WorkHandle[object] | None] = queue.SimpleQueue()
        self._mpi = load()
        self._error: BaseException | None = None
        self._closed = False
        self._abandoned = False
        self._moved_at = 0.0  # when a message came or left last
        self.busy_seconds = 0.0  # processor time of the thread, by the end of its last work
        self._awaited: WorkHandle[object] | None = (
            None  # by the training thread, which stands still
        )
        self._is_awaited = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Work[Result], key: int = trace.NO_KEY, due_seconds: float = 0.0
    ) -> WorkHandle[Result]:
        """Hand in work; does not block.

        Args:
            work: Generator of what to wait for.
            key: By which it is recorded.
            due_seconds: About when it will be waited for; 0: not known.
        """
        self.check()
        handle = WorkHandle(work, key, due_seconds)
        self._queue.put(handle)  # type: ignore[arg-type]  # a result is read by its owner
        return handle

    def wait(self, handle: WorkHandle[Result]) -> Result:
        """Block until the work is over and return what it gave."""
        self._awaited = handle  # type: ignore[assignment]  # as in `submit`
        self._is_awaited.set()
        if not Patience().waits_for(handle.finished.wait, self.timeout_seconds):
            who = self._cause()  # while the thread still answers others who ask the same
            self._abandoned = True  # ranks are out of step from here: nothing may follow
            raise StallError(
                f"an exchange must finish within {self.timeout_seconds:g} s, but it did not: "
                f"{who}; look there, or raise timeout_seconds"
            )
        if handle.error is not None:
            raise ExchangeError(f"an exchange failed: {handle.error}") from handle.error
        return handle.result  # type: ignore[return-value]  # set with finished

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    @property
    def sound(self) -> bool:
        """Whether no work failed, and nobody gave up."""
        return self._error is None and not self._abandoned

    def _cause(self) -> str:
        """Return what holds up the work: for an error."""
        quiet_seconds = time.perf_counter() - self._moved_at
        missing = self._missing()
        if quiet_seconds > SLOW * self.timeout_seconds:
            return missing
        # On a slow link answers wait behind what is sent.
        return f"{missing} (messages come, the last one {quiet_seconds:.1f} s ago: a slow link)"

    @contextmanager
    def poll_eagerly(self, handle: WorkHandle[Result] | None) -> Iterator[None]:
        """Poll more often for this work meanwhile: the training thread stands still for a part."""
        self._awaited = handle  # type: ignore[assignment]  # as in `submit`
        self._is_awaited.set()
        try:
            yield
        finally:
            self._awaited = None

    def run(self, work: Work[Result]) -> Result:
        """Hand in work and block until it is over."""
        return self.wait(self.submit(work))

    def check(self) -> None:
        """Raise what went wrong in the thread since, if anything."""
        if self._error is not None:
            raise ExchangeError(f"an exchange failed: {self._error}") from self._error
        if self._closed:
            raise ExchangeError("the engine must be open to exchange, but close() was called")

    def close(self, patience_seconds: float = 10.0) -> bool:
        """Finish what is queued and stop the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join(patience_seconds)
        return self._error is None and self.stopped

    def give_up(self) -> None:
        """Let nothing follow what is under way, which ends at the next poll. Does not block."""
        self._abandoned = True

    def abandon(self) -> None:
        """Stop the thread at its next poll, whatever is under way; for the end of the process."""
        self._abandoned = True
        self.close(patience_seconds=2.0)

    def _loop(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.started_at = time.perf_counter()
            try:
                self._finish(handle)
            except BaseException as error:  # it surfaces in the training thread
                self._error = self._error or error
                handle.error = error
            handle.finished.set()

    def _finish(self, handle: WorkHandle[object]) -> None:
        try:
            handle.result = self._carry_out(handle)
            if self._takes is not None:
                self._hold(handle, self._takes(handle.result))
        finally:
            handle.finished_at, self.busy_seconds = time.perf_counter(), time.thread_time()
            if self._kind is not None:
                trace.record(self._kind, handle.started_at, key=handle.key)

    def _hold(self, handle: WorkHandle[object], seconds: float) -> None:
        """Let work take so long, and nothing go on beside it: the link is occupied."""
        ends = handle.started_at + seconds
        while (left := ends - time.perf_counter()) > 0 and not self._abandoned:
            time.sleep(min(left, RELAXED_SECONDS))
            if self._late is not None and time.perf_counter() - handle.started_at > LATE_SECONDS:
                self._late()

    def _nap(self, handle: WorkHandle[Result], before: float) -> None:
        """Sleep until the next poll: not for long where the training thread stands still."""
        seconds = POLL_SECONDS
        if not self._stands_still():
            taken = time.perf_counter() - handle.started_at
            seconds = max(seconds, min(RELAXATION * taken, before / 2, RELAXED_SECONDS))
        time.sleep(seconds)

    def _rest(self, due_seconds: float, rounds: int) -> bool:
        """Sleep until others may have come, or are waited for; return whether it is for them."""
        seconds = min(PATIENCE * due_seconds, PATIENT_SECONDS) / rounds
        self._is_awaited.clear()  # before it is looked for: what comes behind wakes
        if seconds <= POLL_SECONDS or self._stands_still():
            return False
        self._is_awaited.wait(seconds)
        return True

    def _stands_still(self) -> bool:
        return self._awaited is not None and not self._awaited.finished.is_set()

    def _carry_out(self, handle: WorkHandle[Result]) -> Result:
        if self._error is not None:
            raise self._error
        before = RELAXED_SECONDS
        while True:
            try:
                waited = next(handle.work)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            arrived = _arrival(waited, self._mpi)
            start = time.perf_counter()
            while not arrived():
                if self._abandoned:
                    raise ExchangeError("an exchange was given up while it was under way")
                rested = isinstance(waited, Arrival) and self._rest(
                    handle.due_seconds, waited.rounds
                )
                if not rested:
                    self._nap(handle, max(before, time.perf_counter() - start))
                if self._late is not None and time.perf_counter() - start > LATE_SECONDS:
                    self._late()
            self._moved_at = time.perf_counter()
            before = max(self._moved_at - start, before / 2)
