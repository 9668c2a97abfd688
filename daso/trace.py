"""What this process did and when, in memory that is set aside before; off unless it is started.

Any module may record; who starts and stops is `daso.timeline.recording`. A span takes well under a
microsecond, and nothing where nobody records.
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "EXCHANGE",
    "FORWARD",
    "KINDS",
    "MERGE",
    "MESSAGES",
    "SCHEMA",
    "SEND",
    "STEP",
    "SUMS",
    "WAIT_INTER_NODE",
    "WAIT_INTRA_NODE",
    "Recorder",
    "Span",
    "record",
    "start",
    "stop",
    "watch",
]

# What a span can be: a whole batch; packing what is sent; merging what came; standing still for
# other nodes, and for other ranks of the node; work between nodes of a thread beside training, and
# messages of it; sums inside the node of another; a node of a flow at a message or at gradients.
KINDS = (
    "step",
    "send",
    "merge",
    "wait for nodes",
    "wait in node",
    "exchange",
    "messages",
    "sums",
    "forward",
    "backward",
)
STEP, SEND, MERGE, WAIT_INTER_NODE, WAIT_INTRA_NODE, EXCHANGE, MESSAGES, SUMS, FORWARD, BACKWARD = (
    range(len(KINDS))
)
SCHEMA = 1  # of recordings' files; goes up when a field changes its meaning
NO_KEY = -1
CAPACITY = 1 << 17  # spans: 5 MB

_ROW = struct.Struct("<HHqddq")


class Span(NamedTuple):
    """Something that took a while.

    Args:
        kind: Index into `KINDS`.
        thread: Index into the recorder's ``threads``.
        key: Which step, exchange or chunk; -1: none.
        begins: Seconds, `time.perf_counter`.
        ends: Seconds, likewise.
        nbytes: Sent by this rank; 0 where unknown.
    """

    kind: int
    thread: int
    key: int
    begins: float
    ends: float
    nbytes: int = 0


class Recorder:
    """Keeps the last spans of all threads; any thread may add.

    Args:
        capacity: How many are kept; older ones are overwritten, and counted.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.threads: list[str] = []  # names, in the order in which they first recorded
        self._rows = bytearray(capacity * _ROW.size)
        self._count = itertools.count()  # whose next() no other thread can interrupt
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, kind: int, begins: float, ends: float, key: int, nbytes: int) -> None:
        """Keep a span of the calling thread; does not block."""
        ident = threading.get_ident()
        thread = self._numbers.get(ident)
        if thread is None:
            thread = self._enter(ident)
        at = next(self._count) % self.capacity * _ROW.size
        _ROW.pack_into(self._rows, at, kind, thread, key, begins, ends, nbytes)

    def _enter(self, ident: int) -> int:
        with self._lock:
            self.threads.append(threading.current_thread().name)
            return self._numbers.setdefault(ident, len(self.threads) - 1)

    def take(self) -> tuple[list[Span], int]:
        """Return what was kept since the last call, oldest first, and how many spans were lost."""
        rows, count = self._rows, next(self._count)
        self._rows, self._count = bytearray(len(rows)), itertools.count()
        return list(_spans(rows, count, self.capacity)), max(0, count - self.capacity)


def _spans(rows: bytearray, count: int, capacity: int) -> Iterator[Span]:
    for number in range(max(0, count - capacity), count):
        kind, thread, key, begins, ends, nbytes = _ROW.unpack_from(
            rows, number % capacity * _ROW.size
        )
        if ends:  # else another thread was about to write it
            yield Span(kind, thread, key, begins, ends, nbytes)


_recorder: Recorder | None = None
_watcher: Callable[[int], None] | None = None


def start(recorder: Recorder) -> None:
    """Record everything in this process from now on."""
    global _recorder  # noqa: PLW0603 - one process, one recorder: modules record without being told
    _recorder = recorder


def stop() -> None:
    """Record no more; idempotent."""
    global _recorder  # noqa: PLW0603 - as in `start`
    _recorder = None


def watch(call: Callable[[int], None] | None) -> None:
    """Call a function with the kind of each span, when it ends, in its thread; None: no more."""
    global _watcher  # noqa: PLW0603 - as in `start`
    _watcher = call


def record(
    kind: int, begins: float, *, ends: float | None = None, key: int = NO_KEY, nbytes: int = 0
) -> None:
    """Keep that something of this kind took a while, if anybody records."""
    recorder, watcher = _recorder, _watcher  # which another thread may stop meanwhile
    if recorder is not None:
        recorder.add(kind, begins, time.perf_counter() if ends is None else ends, key, nbytes)
    if watcher is not None:
        watcher(kind)
