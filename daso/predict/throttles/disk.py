"""A disk that is slower: the training thread stands still for what the process read and wrote."""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from daso.comm.emulation import sleep_for

__all__ = ["DiskDelay", "DiskRates", "disk_rates"]

TRIAL_BYTES = 16 << 20
TRIES = 3
COUNTERS = Path("/proc/self/io")  # of Linux: what went to a disk and came from one


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second until they are on a disk, and of what no cache holds."""

    write: float
    read: float


class DiskDelay:
    """Stands still for the time that bytes would take longer which this process wrote and read.

    They are what the system counted as written to a disk, when the program handed them over, and
    read from one; files in memory do not count. The delay comes at the next `settle`, in its
    thread, also for what another thread wrote beside training.

    Args:
        current: What the disk does.
        target: What it is to do, no more than it does.
    """

    def __init__(self, current: DiskRates, target: DiskRates) -> None:
        self._current, self._target = current, target
        self._write = max(0.0, 1 / target.write - 1 / current.write)  # seconds of a byte
        self._read = max(0.0, 1 / target.read - 1 / current.read)
        self._counted = (0, 0)
        self._ahead = 0.0  # seconds that delays took too long

    def acquire(self) -> None:
        """Count from now on."""
        self._counted = _counters()

    def release(self) -> None:
        """Stand still for what is left; idempotent."""
        self.settle()

    def __enter__(self) -> "DiskDelay":
        """As `acquire`."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """As `release`."""
        self.release()

    def settle(self) -> None:
        """Stand still for what was read and written since the last call."""
        read, written = _counters()
        missing = (written - self._counted[1]) * self._write - self._ahead
        missing += (read - self._counted[0]) * self._read
        self._counted = read, written
        self._ahead = sleep_for(missing) - missing

    def off(self, folder: Path) -> float:
        """Write a file; return how far off the write is, in parts of its time.

        It must be acquired.

        Raises:
            OSError: The system does not tell what a process reads and writes.
        """
        COUNTERS.read_text(encoding="utf-8")
        self.settle()
        parts = []
        for _ in range(TRIES):
            self._ahead = 0.0
            with _written(folder):
                pass
            begun = time.perf_counter()
            self.settle()
            seconds = time.perf_counter() - begun + TRIAL_BYTES / self._current.write
            parts.append(seconds * self._target.write / TRIAL_BYTES - 1)
        return statistics.median(parts)


def disk_rates(folder: Path) -> DiskRates:
    """Write a file to the disk and read it back from there, some times. Blocks."""
    written, read = [], []
    for _ in range(TRIES):
        begun = time.perf_counter()
        with _written(folder) as path:
            written.append(time.perf_counter() - begun)
            read.append(_read(path))
    return DiskRates(*(TRIAL_BYTES / statistics.median(one) for one in (written, read)))


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """Write a file until it is on the disk; it is deleted at the end, whatever comes."""
    number, name = tempfile.mkstemp(prefix="daso-disk-", dir=folder)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(os.urandom(1 << 16) * (TRIAL_BYTES >> 16))
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink()


def _read(path: Path) -> float:
    """Return how long it takes to read a file that no cache holds."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        while file.read(1 << 20):
            pass
        return time.perf_counter() - begun


def _counters() -> tuple[int, int]:
    """Return the bytes that this process read from a disk and wrote to one; 0 where none tells."""
    try:
        lines = COUNTERS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    found = dict(line.split(": ") for line in lines)
    return int(found["read_bytes"]), int(found["write_bytes"])
