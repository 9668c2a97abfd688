"""Throttles of this machine's computing, memory and disk, active inside ``with`` blocks."""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from daso.comm.emulation import sleep_for
from daso.torch_private import TorchDispatchMode

LEAST_SECONDS = 5e-3  # of a pause, after which a core is slower for tenths of a millisecond
OVERHEAD_STEPS = 30  # steps that measure the overhead of intercepting an operation
WIDTH_OF_NONE = 8  # of a model with negligible operations
WIDTH, BATCH = 512, 128  # of matrices that test the padding
PRODUCTS = 40  # per try, long enough for some pauses
WOKEN = 3  # products measured after a pause
COMPUTE_TRIES = 15
MOST_COMPUTE_TRIES = 60  # on a busy machine
WELL = 0.04  # error below which tries end
PAUSES = 15  # that measure the slowdown of a core after a pause

WRITTEN_BYTES = 16 << 20  # of a file that tests a disk
DISK_TRIES = 3
COUNTERS = Path("/proc/self/io")  # Linux: bytes written to disks and read from them

PROBE_BYTES = 96 << 20  # of a copy that measures memory: larger than caches
MEMORY_TRIES = 5
MOST_MEMORY_OFF = 0.10  # bandwidth varies by 6 % by itself
LEAST_BYTES = 1 << 20  # of an operation's tensors: smaller ones stay in the caches of a core
CACHED = 3.0  # times as fast as memory: such an operation ran in caches, or moved nothing


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """Bytes per second of a rank's reads and writes, here and on the target in proportion."""

    current: float
    target: float


class OperationPadding(TorchDispatchMode):
    """Makes operations of this thread, and of its backwards, as slow as on slower parts.

    An operation takes ``factor`` times as long. It also takes no less time than its large tensors
    need at the target's memory rate, each read or written once.

    Pauses are accumulated to some milliseconds and slept, so that other threads get the core, and
    exchanges progress. They include the overhead of intercepting operations, and of a slower core
    after a pause.
    """

    def __init__(self, factor: float = 1.0, memory: MemoryRates | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.factor, self.memory = factor, memory
        self.seconds = self.slept = 0.0  # added so far, and the part slept
        self.in_operations = 0.0  # seconds of the operations themselves
        self.memory_seconds = 0.0  # of pauses due so far, for memory beyond the factor
        self._owed = 0.0  # seconds of pauses due; below 0: operations took too long
        self._overhead_seconds = self._wake_seconds = 0.0  # per operation; after a pause

    def __enter__(self) -> "OperationPadding":
        """Measure the overhead of intercepting and pausing, and start padding."""
        self._wake_seconds = _wake_seconds()
        self._overhead_seconds = _overhead_seconds()
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and pause."""
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        elapsed = time.perf_counter() - begun
        self.in_operations += elapsed
        self.seconds += self._overhead_seconds
        self._owed += (self.factor - 1) * elapsed - self._overhead_seconds
        if self.memory is not None:
            self._owe_memory(self.memory, elapsed, (args, kwargs, result))
        if self._owed > LEAST_SECONDS:
            self._pause()
        return result

    def _owe_memory(self, memory: MemoryRates, elapsed: float, values: Sequence[Any]) -> None:
        """Add the time by which memory delays an operation more than the factor does."""
        most = CACHED * memory.current * elapsed
        if most < LEAST_BYTES:
            return
        nbytes = sum(_sizes(values).values())
        if LEAST_BYTES <= nbytes <= most:
            seconds = max(0.0, nbytes / memory.target - self.factor * elapsed)
            self.memory_seconds += seconds
            self._owed += seconds

    def _pause(self) -> None:
        slept = sleep_for(self._owed)
        self.slept += slept
        self.seconds += slept + self._wake_seconds
        self.in_operations -= self._wake_seconds
        # The next operation takes this much longer, and is padded for it.
        self._owed -= slept + self.factor * self._wake_seconds

    def off(self) -> float:
        """Compute, padded; return the minimum relative error of the duration over some tries."""
        least, memory, self.memory = math.inf, self.memory, None
        for tries in range(MOST_COMPUTE_TRIES):
            least = min(least, self._try(_matrices()))
            if tries >= COMPUTE_TRIES and least < WELL:
                break
        self.memory = memory
        return least

    def memory_off(self) -> float:
        """Copy, padded; return the minimum relative error of the duration over some tries."""
        rate, least = 1.0 if self.memory is None else self.memory.target, math.inf
        source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
        target = torch.ones_like(source)
        for _ in range(MEMORY_TRIES):
            owed, begun = self._owed, time.perf_counter()
            target.copy_(source)
            seconds = time.perf_counter() - begun + self._owed - owed
            least = min(least, seconds * rate / (2 * PROBE_BYTES) - 1)
        return least

    def _try(self, matrices: Sequence[torch.Tensor]) -> float:
        own, added = self.in_operations, self.seconds - self.slept
        owed, begun, busy = self._owed, time.perf_counter(), time.thread_time()
        _multiply(matrices, PRODUCTS)
        asleep = time.perf_counter() - begun - (time.thread_time() - busy)
        own, added = self.in_operations - own, self.seconds - self.slept - added
        return (own + added + asleep + self._owed - owed) / (self.factor * own) - 1


def _sizes(values: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each tensor on the CPU in nested arguments and results."""
    sizes: dict[int, int] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cpu and value.layout == torch.strided:
                sizes[id(value)] = min(value.nbytes, value.untyped_storage().nbytes())
        elif isinstance(value, list | tuple):
            sizes |= _sizes(value)
        elif isinstance(value, dict):
            sizes |= _sizes(value.values())
    return sizes


class _Counted(TorchDispatchMode):
    """Intercepts operations as a padding does, and counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count, self._inside = 0, 0.0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        begun = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self._inside += time.perf_counter() - begun
        self.count += 1
        return result


def _overhead_seconds() -> float:
    """Return the overhead of intercepting an operation, from steps of a small model."""
    with torch.random.fork_rng(devices=[]):  # keeps the program's random state
        layers = [torch.nn.Linear(WIDTH_OF_NONE, WIDTH_OF_NONE, device="cpu") for _ in range(3)]
    model, ratios = torch.nn.Sequential(*layers), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    _step_seconds(model, optimizer)
    for _ in range(OVERHEAD_STEPS):
        plain = _step_seconds(model, optimizer)
        with _Counted() as counted:
            ratios.append((_step_seconds(model, optimizer) - plain) / counted.count)
    return max(0.0, statistics.median(ratios))


def _step_seconds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    begun = time.perf_counter()
    optimizer.zero_grad()
    model(torch.ones(1, WIDTH_OF_NONE, device="cpu")).sum().backward()
    optimizer.step()
    return time.perf_counter() - begun


def _matrices() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return two matrices and the memory of their product."""
    shapes = (WIDTH, WIDTH), (WIDTH, BATCH), (WIDTH, BATCH)
    left, right, product = (torch.full(shape, 1 / WIDTH, device="cpu") for shape in shapes)
    return left, right, product


def _wake_seconds() -> float:
    """Return the total slowdown of operations after a pause."""
    matrices, after, before = _matrices(), [], []
    for _ in range(PAUSES):
        _multiply(matrices, WOKEN)
        before.append(_multiply(matrices, WOKEN))
        time.sleep(LEAST_SECONDS)
        after.append(_multiply(matrices, WOKEN))
    return max(0.0, statistics.median(after) - statistics.median(before))


def _multiply(matrices: Sequence[torch.Tensor], times: int) -> float:
    """Return the seconds of some products."""
    left, right, product = matrices
    begun = time.perf_counter()
    for _ in range(times):
        torch.mm(left, right, out=product)
    return time.perf_counter() - begun


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Bytes per second of synced writes and uncached reads."""

    write: float
    read: float


class DiskDelay:
    """Sleeps at `settle` for the extra time of reads and writes on the target's disk.

    The system counts the bytes of this process, writes at the time of the call; files in memory do
    not count.
    """

    def __init__(self, current: DiskRates, target: DiskRates) -> None:
        self._current, self._target = current, target
        self._write = max(0.0, 1 / target.write - 1 / current.write)  # per byte
        self._read = max(0.0, 1 / target.read - 1 / current.read)
        self._counted = (0, 0)
        self._ahead = 0.0  # seconds that delays took too long
        self.seconds = 0.0  # of delay so far

    def __enter__(self) -> "DiskDelay":
        """Start counting."""
        self._counted = _counters()
        return self

    def __exit__(self, *_: object) -> None:
        """Delay the rest."""
        self.settle()

    def settle(self) -> None:
        """Sleep for the reads and writes since the last call."""
        read, written = _counters()
        missing = (written - self._counted[1]) * self._write - self._ahead
        missing += (read - self._counted[0]) * self._read
        self._counted = read, written
        slept = sleep_for(missing)
        self.seconds += slept
        self._ahead = slept - missing

    def off(self, folder: Path) -> float:
        """Write a file, delayed; return the relative error of the duration."""
        COUNTERS.read_text(encoding="utf-8")  # fails if the system does not count bytes
        self.settle()
        parts = []
        for _ in range(DISK_TRIES):
            self._ahead = 0.0
            with _written(folder):
                pass
            begun = time.perf_counter()
            self.settle()
            seconds = time.perf_counter() - begun + WRITTEN_BYTES / self._current.write
            parts.append(seconds * self._target.write / WRITTEN_BYTES - 1)
        self.seconds = 0.0
        return statistics.median(parts)


def disk_rates(folder: Path) -> DiskRates:
    """Write a file to the disk and read it back, several times. Blocks."""
    written, read = [], []
    for _ in range(DISK_TRIES):
        begun = time.perf_counter()
        with _written(folder) as path:
            written.append(time.perf_counter() - begun)
            read.append(_read(path))
    return DiskRates(*(WRITTEN_BYTES / statistics.median(tries) for tries in (written, read)))


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """Write and sync a file; delete it at the end."""
    descriptor, name = tempfile.mkstemp(prefix="daso-disk-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(1 << 16) * (WRITTEN_BYTES >> 16))
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    finally:
        Path(name).unlink()


def _read(path: Path) -> float:
    """Return the seconds of reading a file uncached."""
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun = time.perf_counter()
        while file.read(1 << 20):
            pass
        return time.perf_counter() - begun


def _counters() -> tuple[int, int]:
    """Return the bytes that this process read from disks and wrote to them; 0 if not counted."""
    try:
        lines = COUNTERS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0, 0
    values = dict(line.split(": ") for line in lines)
    return int(values["read_bytes"]), int(values["write_bytes"])


def memory_bytes_per_second(tries: int = MEMORY_TRIES) -> float:
    """Return the read and write rate of this thread and torch's threads. Blocks for 0.2 s."""
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, device="cpu")
    target = torch.ones_like(source)
    seconds = []
    for _ in range(tries):
        begun = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - begun)
    return 2 * PROBE_BYTES / statistics.median(seconds)
