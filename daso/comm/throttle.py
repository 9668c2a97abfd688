"""Parts of a machine that take a known time, for want of the real ones."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from daso.comm.copies import Arrived, Copies
from daso.errors import ConfigError

__all__ = ["CopyLink", "emulated_copies", "pretend_device"]

OUT, BACK = 0, 1


class CopyLink:
    """A link between a device and its host that carries one row at a time each way.

    A copy takes no core meanwhile, as on a device with copy engines of its own.

    Args:
        bytes_per_second: Rate of each direction.
        latency_seconds: What every copy takes beside its bytes.
    """

    def __init__(self, bytes_per_second: float, latency_seconds: float = 0.0) -> None:
        if not bytes_per_second > 0 or not latency_seconds >= 0:
            raise ConfigError(
                f"a link must have a rate above 0 and a latency of at least 0, not "
                f"{bytes_per_second} bytes/s and {latency_seconds} s"
            )
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

    def mark(self) -> Arrived:
        """Return what says at once that all is over."""
        return lambda: True

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return memory (nbytes, uint8)."""
        return torch.empty(nbytes, dtype=torch.uint8)

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


_copies: ContextVar[Copies | None] = ContextVar("copies", default=None)


def emulated_copies() -> Copies | None:
    """Return how rows go to the host where ranks pretend to compute on devices, else None."""
    return _copies.get()


@contextmanager
def pretend_device(copies: Copies) -> Iterator[None]:
    """Let models that are wrapped meanwhile take their gradients to the host and back.

    Args:
        copies: How. The same on every rank of a node.
    """
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)
