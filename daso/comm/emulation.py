"""Parts of a machine that take a known time, for want of the real ones."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.step_timer import HostTimestamp
from daso.errors import ConfigError

__all__ = [
    "CopyLink",
    "LinkModel",
    "Stretch",
    "emulated_copies",
    "emulated_link",
    "pretend_device",
    "sleep_for",
    "stretch",
    "throttled",
]

OUT, BACK = 0, 1


def _check(bytes_per_second: float, latency_seconds: float) -> None:
    if not bytes_per_second > 0 or not latency_seconds >= 0:
        raise ConfigError(
            f"a link must have a rate above 0 and a latency of at least 0, not "
            f"{bytes_per_second} bytes/s and {latency_seconds} s"
        )


class LinkModel:
    """A link between nodes that is slower than the real one, and carries one exchange at a time.

    Args:
        bytes_per_second: That a rank sends.
        latency_seconds: Of a message, beside its bytes.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check(bytes_per_second, latency_seconds)
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self._free_at = 0.0  # seconds, time.perf_counter
        self._lock = threading.Lock()

    def seconds(self, nbytes: int, messages: int = 1) -> float:
        """Return how long the link is occupied, at the least."""
        return messages * self.latency_seconds + nbytes / self.bytes_per_second

    def occupy(self, nbytes: int, messages: int = 1, since: float | None = None) -> float:
        """Take the link after who has it; return when it is free again, by time.perf_counter.

        Args:
            nbytes: That cross.
            messages: One after the other.
            since: When they could begin; None: now.
        """
        with self._lock:
            begins = max(time.perf_counter() if since is None else since, self._free_at)
            self._free_at = begins + self.seconds(nbytes, messages)
            return self._free_at


@dataclass(slots=True)
class Settled:
    """When a step was stretched last, of any optimizer: what was computed before is not again."""

    at: float = 0.0  # seconds, time.perf_counter
    padded: float = 0.0  # seconds, added inside of steps until then


class Stretch:
    """Lets computing take as many times as long, by sleeping: other threads get the core.

    Args:
        factor: How many times; 1 at least.
        padded: Returns the seconds that were added inside of steps until now.
        settled: Of all optimizers of a program together.
    """

    def __init__(
        self,
        factor: float,
        padded: Callable[[], float] = lambda: 0.0,
        settled: Settled | None = None,
    ) -> None:
        self.factor, self._padded_until_now = factor, padded
        self._settled = Settled(padded=padded()) if settled is None else settled
        self._stood = 0.0
        self._ahead = 0.0  # seconds that steps took too long
        self._steps = 0

    def after_step(self, begun: float, stood: float) -> None:
        """Sleep for what is missing of a step; not after the first, which holds the setup."""
        self._steps += 1
        padded, last = self._padded_until_now(), self._settled
        if self.factor > 1 and self._steps > 1:
            computed = time.perf_counter() - max(begun, last.at) - (stood - self._stood)
            self._settle(computed - (padded - last.padded), padded - last.padded)
        self._stood, last.padded, last.at = stood, padded, time.perf_counter()

    def _settle(self, computed: float, added: float) -> None:
        missing = (self.factor - 1) * computed - added - self._ahead
        slept = sleep_for(missing)
        self._ahead = slept - missing


def sleep_for(seconds: float) -> float:
    """Sleep, if that is more than 0; return how long it took, which is often a little more."""
    if seconds <= 0:
        return 0.0
    begun = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - begun


class CopyLink:
    """A link between a device and its host that carries one row at a time each way.

    A copy takes no core meanwhile, as on a device with copy engines of its own.

    Args:
        bytes_per_second: Rate of each direction.
        latency_seconds: What every copy takes beside its bytes.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        _check(bytes_per_second, latency_seconds)
        self.bytes_per_second, self.latency_seconds = bytes_per_second, latency_seconds
        self._free_at = [0.0, 0.0]  # seconds, time.perf_counter, of each direction

    def seconds(self, nbytes: int) -> float:
        """Return how long a copy takes."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host."""
        return self._start(OUT, source, target)

    def back(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        in_turn: bool = False,  # noqa: ARG002 - what is launched on a CPU is over
    ) -> Arrived:
        """Start a copy to the device."""
        return self._start(BACK, source, target)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Do nothing: threads of a CPU run beside each other."""
        yield

    def attach(self) -> None:
        """Do nothing: all threads are the CPU's."""

    def here(self) -> object:
        """Return nothing to tell it by."""

    def lend(self, tensors: Iterable[torch.Tensor], to: object) -> None:
        """Do nothing: what a thread of a CPU computes is over."""

    def mark(self) -> Arrived:
        """Return what says at once that all is over."""
        return lambda: True

    def stamp(self) -> HostTimestamp:
        """Return the time now."""
        return HostTimestamp()

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory (nbytes, uint8)."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Do nothing: it is all host memory."""

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
    """Return how rows go to the host where ranks pretend to compute on devices, else None."""
    return _copies.get()


@contextmanager
def pretend_device(copies: DeviceStaging) -> Iterator[None]:
    """Let models that are wrapped meanwhile take their gradients to the host and back."""
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)


_link: ContextVar[LinkModel | None] = ContextVar("link", default=None)
_stretch: ContextVar[tuple[float, Callable[[], float], Settled | None]] = ContextVar(
    "stretch", default=(1.0, lambda: 0.0, None)
)


def emulated_link() -> LinkModel | None:
    """Return the link between nodes that is imitated, else None."""
    return _link.get()


def stretch() -> Stretch:
    """Return what lets steps take as long as they shall."""
    return Stretch(*_stretch.get())


@contextmanager
def throttled(
    link: LinkModel | None, factor: float = 1.0, padded: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:
    """Slow down exchanges and computing of the models that are wrapped meanwhile.

    Args:
        link: Between nodes; None: as it is.
        factor: How many times as long computing takes.
        padded: Returns the seconds that were added inside of steps until now.
    """
    if not 1 <= factor < float("inf"):
        raise ConfigError(f"computing must take 1 to many times as long, not {factor}")
    tokens = _link.set(link), _stretch.set((factor, padded, Settled(padded=padded())))
    try:
        yield
    finally:
        _link.reset(tokens[0])
        _stretch.reset(tokens[1])
