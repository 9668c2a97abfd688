"""Memory of less bandwidth: a thread that copies memory of its own beside the program."""

import statistics
import threading
import time

import torch

__all__ = ["MemoryHog", "memory_bytes_per_second"]

PROBE_BYTES = 96 << 20  # of what is copied to measure: more than caches hold
PRIVATE_BYTES = 64 << 20
PIECE = 32_000  # numbers of 8 bytes that are copied at once: by one thread, as torch cuts no fewer
TRIES = 5
HALVINGS = 7  # until the bandwidth that is taken is found
LEAST_SECONDS = 2e-3  # of a pause


def memory_bytes_per_second(tries: int = TRIES) -> float:
    """Return how fast this thread, and torch's threads, read and write. Blocks for 0.2 s."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.ones_like(source)
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return 2 * PROBE_BYTES / statistics.median(seconds)


class MemoryHog:
    """Takes bandwidth from memory until so much of it is left; a thread of its own copies.

    It holds what is left to 10 %: what others do to memory changes by as much as 6 % from moment to
    moment. The thread needs a core while it copies: on a machine without one to spare computing is
    slowed down too.

    Args:
        bytes_per_second: That are to be left, as `memory_bytes_per_second` measures it.
    """

    most_off = 0.10

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self._duty = 0.0  # part of the time in which it copies
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._take, name="daso-memory", daemon=True)

    def acquire(self) -> None:
        """Start to copy, as much as it takes. Blocks for about 2 s."""
        self._thread.start()
        try:
            self._search()
        except BaseException:
            self.release()
            raise

    def _search(self) -> None:
        """Find how much of the time it is to copy."""
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            self._duty = (low + high) / 2
            if memory_bytes_per_second() > self.bytes_per_second:
                low = self._duty
            else:
                high = self._duty

    def release(self) -> None:
        """Stop copying; idempotent."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> "MemoryHog":
        """As `acquire`."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """As `release`."""
        self.release()

    def off(self) -> float:
        """Return how far off what is left is, in parts of the time that a copy shall take."""
        return self.bytes_per_second / memory_bytes_per_second(2 * TRIES) - 1

    def _take(self) -> None:
        row = torch.zeros(PRIVATE_BYTES // 8, dtype=torch.float64, device="cpu")
        pieces = row.split(PIECE)[:-1]
        half, at, owed = len(pieces) // 2, 0, 0.0
        while not self._over.is_set():
            begun = time.perf_counter()
            pieces[at].copy_(pieces[at + half])
            at = (at + 1) % half
            taken = time.perf_counter() - begun
            owed += taken * (1 / max(self._duty, 1e-3) - 1)
            if owed > LEAST_SECONDS:
                begun = time.perf_counter()
                self._over.wait(owed)
                owed -= time.perf_counter() - begun
