"""Emulated links, devices and processors that take a known time."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import RELAXED_SECONDS, Engine, Result, Work, WorkHandle
from daso.comm.step_timer import LATE_SECONDS, HostTimestamp
from daso.errors import ConfigError

OUT, BACK = 0, 1


def _check(bytes_per_second: float, latency_seconds: float) -> None:
    if not bytes_per_second > 0 or not latency_seconds >= 0:
        raise ConfigError(
            f"a link must have a rate above 0 and a latency of at least 0, not "
            f"{bytes_per_second} bytes/s and {latency_seconds} s",
            code="emulated-link-invalid",
        )


class LinkModel:
    """A link between nodes that is slower than the real one, and carries one exchange at a time.

    Args:
        bytes_per_second: Send rate of a rank.
        latency_seconds: Of a message, in addition to its bytes.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check(bytes_per_second, latency_seconds)
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self._free_at = 0.0  # seconds, time.perf_counter
        self._lock = threading.Lock()

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Return the minimum time that messages occupy the link."""
        return messages * self.latency_seconds + nbytes / self.bytes_per_second

    def occupy(self, nbytes: int, messages: int = 1, since: float | None = None) -> float:
        """Occupy the link after its current user; return when it is free, by time.perf_counter.

        Args:
            nbytes: Bytes sent.
            messages: Number of consecutive messages.
            since: Earliest start; None: now.
        """
        with self._lock:
            begins = max(time.perf_counter() if since is None else since, self._free_at)
            self._free_at = begins + self.seconds(nbytes, messages)
            return self._free_at


class EmulatedEngine(Engine):
    """An engine whose work occupies an emulated link for a minimum time.

    Args:
        timeout_seconds: As in `Engine`.
        missing: As in `Engine`.
        late: As in `Engine`.
        occupied_seconds: Returns the minimum time for work with a given result.
    """

    def __init__(
        self,
        timeout_seconds: float,
        missing: Callable[[], str],
        late: Callable[[], None],
        occupied_seconds: Callable[[object], float],
    ) -> None:
        self._occupied_seconds = occupied_seconds
        super().__init__(timeout_seconds, missing, late)

    def submit(
        self, work: Work[Result], key: int = trace.NO_KEY, due_seconds: float = 0.0
    ) -> WorkHandle[Result]:
        """Submit work that occupies the link for its minimum time; does not block."""
        return super().submit(self._occupy_link(work), key, due_seconds)

    def _occupy_link(self, work: Work[Result]) -> Work[Result]:
        start = time.perf_counter()
        result = yield from work
        self._pad(start, self._occupied_seconds(result))
        return result

    def _pad(self, start: float, seconds: float) -> None:
        """Block the thread: no other work can use an occupied link."""
        while (left := start + seconds - time.perf_counter()) > 0 and not self._abandoned:
            time.sleep(min(left, RELAXED_SECONDS))
            if self._late is not None and time.perf_counter() - start > LATE_SECONDS:
                self._late()


@dataclass(slots=True)
class StretchProgress:
    """The last stretched step of all optimizers, so that no time is stretched twice."""

    at: float = 0.0  # seconds, time.perf_counter
    padded: float = 0.0  # seconds added inside of steps until then


class Stretch:
    """Slows computation down by a factor, by sleeping, so that other threads can use the core.

    Args:
        factor: Of the time of computation; at least 1.
        padded: Returns the seconds added inside of steps so far.
        progress: Shared by all optimizers of a program.
    """

    def __init__(
        self,
        factor: float,
        padded: Callable[[], float] = lambda: 0.0,
        progress: StretchProgress | None = None,
    ) -> None:
        self.factor, self._padded_so_far = factor, padded
        self._progress = StretchProgress(padded=padded()) if progress is None else progress
        self._idle = 0.0
        self._overslept = 0.0  # seconds
        self._steps = 0

    def after_step(self, begun: float, idle: float) -> None:
        """Sleep for the missing time of a step, except the first step, which includes the setup."""
        self._steps += 1
        padded, last = self._padded_so_far(), self._progress
        if self.factor > 1 and self._steps > 1:
            computed = time.perf_counter() - max(begun, last.at) - (idle - self._idle)
            self._sleep(computed - (padded - last.padded), padded - last.padded)
        self._idle, last.padded, last.at = idle, padded, time.perf_counter()

    def _sleep(self, computed: float, added: float) -> None:
        missing = (self.factor - 1) * computed - added - self._overslept
        slept = sleep_for(missing)
        self._overslept = slept - missing


def sleep_for(seconds: float) -> float:
    """Sleep if the time is positive; return the time slept, which is often a little longer."""
    if seconds <= 0:
        return 0.0
    start = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - start


class CopyLink:
    """An emulated link between a device and its host: one copy at a time in each direction.

    A copy uses no core, as on a device with copy engines.

    Args:
        bytes_per_second: Rate of each direction.
        latency_seconds: Of each copy, in addition to its bytes.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check(bytes_per_second, latency_seconds)
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self._free_at = [0.0, 0.0]  # seconds, time.perf_counter, of each direction

    def seconds(self, nbytes: int) -> float:
        """Return the duration of a copy."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host."""
        return self._start(OUT, source, target)

    def to_device(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        in_order: bool = False,  # noqa: ARG002 - CPU operations finish when they return
    ) -> Arrived:
        """Start a copy to the device."""
        return self._start(BACK, source, target)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Do nothing: CPU threads run concurrently."""
        yield

    def bind_thread(self) -> None:
        """Do nothing: all threads use the CPU."""

    def current_stream(self) -> object:
        """Return None: a CPU has no streams."""

    def record_stream(self, tensors: Iterable[torch.Tensor], stream: object) -> None:
        """Do nothing: CPU operations finish when they return."""

    def completion(self) -> Arrived:
        """Return a function that returns True: CPU operations finish when they return."""
        return lambda: True

    def timestamp(self) -> HostTimestamp:
        """Return the current time."""
        return HostTimestamp()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return memory (nbytes, uint8)."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Do nothing: all memory is host memory."""

    def unpin(self) -> None:
        """Do nothing."""

    def _start(self, direction: int, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        begins = max(time.perf_counter(), self._free_at[direction])
        ends = self._free_at[direction] = begins + self.seconds(source.nbytes)
        copied = False

        def arrived() -> bool:
            nonlocal copied
            if not copied and time.perf_counter() >= ends:
                target.copy_(source)
                copied = True
            return copied

        return arrived


_copies: ContextVar[DeviceStaging | None] = ContextVar("copies", default=None)


def emulated_copies() -> DeviceStaging | None:
    """Return the copies of an emulated device, or None."""
    return _copies.get()


@contextmanager
def pretend_device(copies: DeviceStaging) -> Iterator[None]:
    """Emulate a device for models that are wrapped in this context."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


_link: ContextVar[LinkModel | None] = ContextVar("link", default=None)
_stretch: ContextVar[tuple[float, Callable[[], float], StretchProgress | None]] = ContextVar(
    "stretch", default=(1.0, lambda: 0.0, None)
)


def emulated_link() -> LinkModel | None:
    """Return the emulated link between nodes, or None."""
    return _link.get()


def stretch() -> Stretch | None:
    """Return the emulated slowdown of computation, or None."""
    factor, padded, progress = _stretch.get()
    return Stretch(factor, padded, progress) if factor > 1 else None


@contextmanager
def throttled(
    link: LinkModel | None, factor: float = 1.0, padded: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:
    """Slow down exchanges and computation of models that are wrapped in this context.

    Args:
        link: Emulated link between nodes; None: the real one.
        factor: Of the time of computation.
        padded: Returns the seconds added inside of steps so far.
    """
    if not 1 <= factor < float("inf"):
        raise ConfigError(
            f"computing must take 1 to many times as long, not {factor}",
            code="compute-factor-invalid",
        )
    tokens = _link.set(link), _stretch.set((factor, padded, StretchProgress(padded=padded())))
    try:
        yield
    finally:
        _link.reset(tokens[0])
        _stretch.reset(tokens[1])
