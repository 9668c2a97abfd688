"""Spans of this process's work, recorded in preallocated memory; off unless started.

Any module may record; `daso.timeline.recording` starts and stops. A span costs well under a
microsecond, and nothing while recording is off.
"""

import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Kinds of spans: a whole batch; packing of a payload; merging of a result; waiting for other nodes,
# and for other ranks of the node; inter-node work of the communication thread, and its messages;
# sums inside the node on a background thread; a flow node's forward and backward.
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
SCHEMA = 1  # of recording files; incremented when a field changes its meaning
NO_KEY = -1
CAPACITY = 1 << 17  # spans: 5 MB

_ROW = struct.Struct("<HHqddq")


class Span(NamedTuple):
    """A timed piece of work.

    Args:
        kind: Index into `KINDS`.
        thread: Index into the recorder's ``threads``.
        key: Number of the step, exchange or chunk; -1: none.
        begins: Seconds, `time.perf_counter`.
        ends: Seconds, likewise.
        nbytes: Bytes sent by this rank; 0 if unknown.
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
        capacity: Number of spans to keep; older ones are overwritten, and counted.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.threads: list[str] = []  # names, in the order of their first spans
        self._rows = bytearray(capacity * _ROW.size)
        self._count = itertools.count()  # its next() is atomic
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, kind: int, begins: float, ends: float, key: int, nbytes: int) -> None:
        """Store a span of the calling thread; does not block."""
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
        """Return the spans since the last call, oldest first, and the number of lost spans."""
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
    global _recorder  # noqa: PLW0603 - one recorder per process
    _recorder = recorder


def stop() -> None:
    """Stop recording; idempotent."""
    global _recorder  # noqa: PLW0603 - as in `start`
    _recorder = None


def watch(call: Callable[[int], None] | None) -> None:
    """Set a callback for each span's kind, called at its end in its thread; None: remove it."""
    global _watcher  # noqa: PLW0603 - as in `start`
    _watcher = call


def record(
    kind: int, begins: float, *, ends: float | None = None, key: int = NO_KEY, nbytes: int = 0
) -> None:
    """Store a span of this kind if recording is on."""
    recorder, watcher = _recorder, _watcher  # another thread may reset them meanwhile
    if recorder is not None:
        recorder.add(kind, begins, time.perf_counter() if ends is None else ends, key, nbytes)
    if watcher is not None:
        watcher(kind)
