"""The communication thread: runs all traffic between nodes, in the order of submission.

One daemon thread per process polls and sleeps. It does not block inside MPI, because a blocking
wait spins on a core that training needs, and it does not leave progress to the library, because
without `Test` nothing moves (measured with Open MPI 4.1 over 1 Gbit/s: 0 % hidden without a thread,
49 % with a blocking one, 99 % with one that polls and sleeps).

Work is a generator that yields what to wait for: a list of MPI requests, or a call that returns
whether to continue. Work runs one after the other, so that collectives start in the same order on
every rank as long as the training threads submit the same work; on one communicator a different
order gives wrong sums, silently.
"""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from daso import trace
from daso.comm.mpi import load
from daso.comm.step_timer import LATE_SECONDS, RunningClock
from daso.errors import ExchangeError, StallError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

Result = TypeVar("Result")
Work = Generator["Sequence[MPI.Request] | Callable[[], bool]", None, Result]

# Sleep between polls: a hundredth of the time that the work has taken so far, at most half of the
# last wait, so that a fast link gets its next message in time, and within these bounds. A poll
# costs 10 to 20 us of a core that training needs: 10,000 polls a second are noticeable.
POLL_SECONDS = 1e-4
RELAXED_SECONDS = 2e-3
RELAXATION = 0.01
# Polls are infrequent while only other ranks are waited for and the training thread is not blocked:
# each takes 20 to 100 us of a core. For a rank that was 80 ms late, 200 polls took five times as
# long as the exchange itself.
PEER_POLL_FRACTION = 1 / 16  # of the time that work may take, for all consecutive messages
PEER_POLL_SECONDS = 2e-2  # the maximum
SLOW = 0.25  # of the stall limit: if the last message is more recent, the link is slow


class PeerRendezvous(list["MPI.Request"]):
    """Requests that complete when all ranks have reached the same point; no data is sent before.

    Args:
        requests: MPI requests.
        rounds: Consecutive messages of the operation; each may wait for a rank that sleeps.
    """

    def __init__(self, requests: "Sequence[MPI.Request]", rounds: int = 1) -> None:
        super().__init__(requests)
        self.rounds = max(1, rounds)


def _completion(
    waited: "Sequence[MPI.Request] | Callable[[], bool]", mpi: "ModuleType"
) -> Callable[[], bool]:
    """Return a function that tests the condition that work waits for."""
    return waited if callable(waited) else partial(mpi.Request.Testall, list(waited))


class NestedWork(Generic[Result]):
    """Work inside other work, advanced by calls of `advance`.

    Args:
        work: Generator that yields what to wait for.
    """

    def __init__(self, work: Work[Result]) -> None:
        self._work, self._mpi = work, load()
        self._arrived: Callable[[], bool] = lambda: True
        self.result: Result | None = None
        self.moves = 0  # number of times that it progressed
        self.over = False

    def advance(self) -> bool:
        """Run as far as possible without waiting; return whether it is over."""
        while not self.over and self._arrived():
            self.moves += 1
            try:
                self._arrived = _completion(next(self._work), self._mpi)
            except StopIteration as stop:
                self.result, self.over = stop.value, True
        return self.over


class WorkHandle(Generic[Result]):
    """Handle of submitted work."""

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
        """Return a finished handle, as restored from a checkpoint."""
        handle = cls(work=_nothing(result))
        handle.result, handle.finished_at = result, seconds
        handle.finished.set()
        return handle

    def done(self) -> bool:
        """Return whether the work is over, with or without an error."""
        return self.finished.is_set()

    @property
    def seconds(self) -> float:
        """Duration of the work."""
        return self.finished_at - self.started_at


def _nothing(result: Result) -> Work[Result]:
    yield []
    return result


class Engine:
    """Runs work in a background thread.

    Args:
        timeout_seconds: Maximum wait of `wait`.
        missing: Returns a description of the missing ranks for that error; blocks for seconds.
        late: Called repeatedly by the thread once work takes long; an error in it ends the work.
        name: Of the thread.
        kind: Kind of the work in traces; None: not recorded.
    """

    def __init__(
        self,
        timeout_seconds: float,
        missing: Callable[[], str],
        late: Callable[[], None] | None = None,
        name: str = "daso-exchange",
        kind: int | None = trace.EXCHANGE,
    ) -> None:
        self._kind = kind
        self.timeout_seconds, self._missing, self._late = timeout_seconds, missing, late
        # Unbounded: a wait for room in it would have no time limit.
        self._queue: queue.SimpleQueue[WorkHandle[object] | None] = queue.SimpleQueue()
        self._mpi = load()
        self._error: BaseException | None = None
        self._closed = False
        self._abandoned = False
        self._moved_at = 0.0  # time of the last completed message
        self.busy_seconds = 0.0  # CPU time of the thread at the end of its last work
        self._awaited: WorkHandle[object] | None = (
            None  # work that the training thread is blocked on
        )
        self._is_awaited = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Work[Result], key: int = trace.NO_KEY, due_seconds: float = 0.0
    ) -> WorkHandle[Result]:
        """Submit work; does not block.

        Args:
            work: Generator that yields what to wait for.
            key: Its key in traces.
            due_seconds: Estimated time until `wait` is called; 0: unknown.
        """
        self.check()
        handle = WorkHandle(work, key, due_seconds)
        self._queue.put(handle)  # type: ignore[arg-type]  # a result is read by its owner
        return handle

    def wait(self, handle: WorkHandle[Result]) -> Result:
        """Block until the work is over; return its result."""
        self._awaited = handle  # type: ignore[assignment]  # as in `submit`
        self._is_awaited.set()
        over = handle.finished.is_set()
        if not over and not RunningClock().waits_for(handle.finished.wait, self.timeout_seconds):
            cause = self._cause()  # while the thread still answers other ranks' probes
            self._abandoned = True  # ranks are out of step: no further work may run
            raise StallError(
                f"an exchange must finish within {self.timeout_seconds:g} s, but it did not: "
                f"{cause}; look there, or raise timeout_seconds",
                code="exchange-timed-out",
            )
        if handle.error is not None:
            raise ExchangeError(
                f"an exchange failed: {handle.error}", code="exchange-failed"
            ) from handle.error
        return handle.result  # type: ignore[return-value]  # set with finished

    @property
    def stopped(self) -> bool:
        """True once the thread has ended."""
        return not self._thread.is_alive()

    @property
    def sound(self) -> bool:
        """True while no work has failed and no wait was given up."""
        return self._error is None and not self._abandoned

    def _cause(self) -> str:
        """Return the reason why work is late, for an error message."""
        quiet_seconds = time.perf_counter() - self._moved_at
        missing = self._missing()
        if quiet_seconds > SLOW * self.timeout_seconds:
            return missing
        # On a slow link answers to probes queue behind the payloads.
        return f"{missing} (the last message arrived {quiet_seconds:.1f} s ago: a slow link)"

    @contextmanager
    def poll_eagerly(self, handle: WorkHandle[Result] | None) -> Iterator[None]:
        """Poll more often while the training thread is blocked on a part of this work."""
        self._awaited = handle  # type: ignore[assignment]  # as in `submit`
        self._is_awaited.set()
        try:
            yield
        finally:
            self._awaited = None

    def run(self, work: Work[Result]) -> Result:
        """Submit work and block until it is over."""
        return self.wait(self.submit(work))

    def check(self) -> None:
        """Raise an error of the thread, if it has one."""
        if self._error is not None:
            raise ExchangeError(
                f"an exchange failed: {self._error}", code="exchange-failed"
            ) from self._error
        if self._closed:
            raise ExchangeError(
                "the engine must be open to exchange, but close() was called",
                code="engine-is-closed",
            )

    def close(self, patience_seconds: float = 10.0) -> bool:
        """Finish all queued work and stop the thread; idempotent."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self._thread.join(patience_seconds)
        return self._error is None and self.stopped

    def give_up(self) -> None:
        """Stop the running work at its next poll, and run no other. Does not block."""
        self._abandoned = True

    def abandon(self) -> None:
        """Stop the thread at its next poll, even during work; for the end of the process."""
        self._abandoned = True
        self.close(patience_seconds=2.0)

    def _loop(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.started_at = time.perf_counter()
            try:
                self._finish(handle)
            except BaseException as error:  # raised in the training thread
                self._error = self._error or error
                handle.error = error
            handle.finished.set()

    def _finish(self, handle: WorkHandle[object]) -> None:
        try:
            handle.result = self._run_work(handle)
        finally:
            handle.finished_at, self.busy_seconds = time.perf_counter(), time.thread_time()
            if self._kind is not None:
                trace.record(self._kind, handle.started_at, key=handle.key)

    def _sleep_until_poll(self, handle: WorkHandle[Result], before: float) -> None:
        """Sleep until the next poll, for less time if the training thread is blocked."""
        seconds = POLL_SECONDS
        if not self._trainer_is_blocked():
            elapsed = time.perf_counter() - handle.started_at
            seconds = max(seconds, min(RELAXATION * elapsed, before / 2, RELAXED_SECONDS))
        time.sleep(seconds)

    def _sleep_until_peers(self, due_seconds: float, rounds: int) -> bool:
        """Sleep until the next poll for other ranks, or until awaited; return whether it slept."""
        seconds = min(PEER_POLL_FRACTION * due_seconds, PEER_POLL_SECONDS) / rounds
        self._is_awaited.clear()  # before the check, so that a later `wait` wakes the thread
        if seconds <= POLL_SECONDS or self._trainer_is_blocked():
            return False
        self._is_awaited.wait(seconds)
        return True

    def _trainer_is_blocked(self) -> bool:
        return self._awaited is not None and not self._awaited.finished.is_set()

    def _run_work(self, handle: WorkHandle[Result]) -> Result:
        if self._error is not None:
            raise self._error
        before = RELAXED_SECONDS
        while True:
            try:
                waited = next(handle.work)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            arrived = _completion(waited, self._mpi)
            start = time.perf_counter()
            while not arrived():
                if self._abandoned:
                    raise ExchangeError(
                        "an exchange was abandoned before it finished", code="exchange-abandoned"
                    )
                slept = isinstance(waited, PeerRendezvous) and self._sleep_until_peers(
                    handle.due_seconds, waited.rounds
                )
                if not slept:
                    self._sleep_until_poll(handle, max(before, time.perf_counter() - start))
                if self._late is not None and time.perf_counter() - start > LATE_SECONDS:
                    self._late()
            self._moved_at = time.perf_counter()
            before = max(self._moved_at - start, before / 2)
