"""Meters of the bytes that torch's allocator hands out during a step."""

from typing import NamedTuple, Protocol

import torch

from daso.torch_private import ALLOCATION, mark_memory_log, start_memory_log, stop_memory_log

MARK = "daso: memory"


class Interval(NamedTuple):
    """Allocated bytes since a meter was entered.

    Args:
        start: At the start of the interval.
        peak: Highest value in the interval.
    """

    start: int
    peak: int


class Meter(Protocol):
    """Measures allocations of this thread and of its backward, after entry."""

    intervals: list[Interval]  # complete after exit

    def mark(self) -> None:
        """Begin an interval; the first begins on entry."""
        ...

    def __enter__(self) -> "Meter":
        """Start measuring."""
        ...

    def __exit__(self, *_: object) -> None:
        """Stop measuring."""
        ...


class HostMeter:
    """Measures the CPU allocator, including workspaces inside operations."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []

    def __enter__(self) -> "HostMeter":
        start_memory_log()
        return self

    def mark(self) -> None:
        """Begin an interval."""
        mark_memory_log(MARK)

    def __exit__(self, *_: object) -> None:
        start = now = peak = 0
        for name, nbytes in stop_memory_log():
            if name == ALLOCATION:
                now += nbytes
                peak = max(peak, now)
            elif name == MARK:
                self.intervals.append(Interval(start, peak))
                start = peak = now
        self.intervals.append(Interval(start, peak))


class CudaMeter:
    """Measures the caching allocator of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.intervals: list[Interval] = []
        self._device = device

    def __enter__(self) -> "CudaMeter":
        self._base = self._start = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def mark(self) -> None:
        """Begin an interval."""
        peak = torch.cuda.max_memory_allocated(self._device)
        self.intervals.append(Interval(self._start - self._base, peak - self._base))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)

    def __exit__(self, *_: object) -> None:
        self.mark()


def open_meter(device: torch.device) -> Meter:
    """Return a meter of a device's memory."""
    return CudaMeter(device) if device.type == "cuda" else HostMeter()
