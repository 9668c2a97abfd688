"""Faults injected into one rank at a chosen moment of training, to test how a job reacts.

    daso run --elastic -n 3 --ranks-per-node 1 --fault "kill rank 1 at merge 3" train.py
    mpirun -n 3 python -m daso.testing.faults "stop rank 2 at step 10 for 5 s" train.py
    daso run -n 2 --fault "full rank 0 at step 10 after 4096 bytes" train.py
    daso run -n 2 --fault "slow rank 1 at every step for 0.1 s during 60 s" train.py

Moments are the ends of recorded spans (`daso.trace.KINDS`): the third merge on that rank, its tenth
step, any message. The program itself is not changed.
"""

import gc
import os
import re
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from daso import trace
from daso.checks import format_value
from daso.environment import read_launch
from daso.errors import ConfigError

__all__ = ["Fault", "parse", "plant"]

LEAST_STOP_SECONDS = 0.05  # so that SIGCONT does not precede SIGSTOP
Kind = Literal["kill", "stop", "slow", "raise", "full", "hang", "jump", "flip"]
FORM = re.compile(
    rf"(?P<kind>{'|'.join(get_args(Kind))}) rank (?P<rank>\d+) at (?P<every>every )?"
    rf"(?P<event>{'|'.join(trace.KINDS)})(?: (?P<number>[1-9]\d*))?"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) s(?: during (?P<window>\d+(?:\.\d+)?) s)?"
    r"| by (?P<jump>-?\d+(?:\.\d+)?) s| after (?P<nbytes>\d+) bytes)?",
)
WORDS = {  # that may follow
    **dict.fromkeys(("stop", "slow", "hang"), "seconds"),
    "full": "nbytes",
    "jump": "jump",
}
NEEDS = {
    "slow": "a rank is slow for some time, but {} has none; add `for 0.1 s`",
    "hang": "a file system hangs for some time, but {} has none; add `for 60 s`",
    "full": "a disk is full after some bytes, but {} has none; add `after 4096 bytes`",
    "jump": "a clock jumps by some time, but {} has none; add `by 3600 s`",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault on one rank at one moment.

    Args:
        kind: ``"kill"``: SIGKILL. ``"stop"``: the whole process is suspended for ``seconds``, or
            forever. ``"slow"``: the thread at that moment waits ``seconds``. ``"raise"``: that
            thread raises a RuntimeError. ``"full"``: from then on no file of the process may grow
            longer than ``nbytes``: writing more is an OSError, as on a full disk. ``"hang"``: for
            ``seconds`` no file system responds to writes: opening a file for writing, renaming,
            removing and `os.fsync` wait until that time is over. ``"jump"``: the
            clock of `time.time` moves by ``seconds``, also backwards; clocks that measure
            durations do not. ``"flip"``: a bit changes in the reference that nodes agreed on; at
            ``messages``, in the next payload that arrives from another of three or more nodes.
        rank: World rank, by the launcher's count.
        event: One of `daso.trace.KINDS`; the fault strikes at its end.
        number: Number of the event on this rank, from 1; None: every event.
        seconds: Duration, or jump of the clock; None: forever.
        nbytes: Maximum length of files.
        window: Seconds from the first strike in which a repeated fault strikes; None: forever.
    """

    kind: Kind
    rank: int
    event: str
    number: int | None = 1
    seconds: float | None = None
    nbytes: int | None = None
    window: float | None = None


def parse(text: str) -> list[Fault]:
    """Parse faults such as ``"kill rank 1 at merge 3; slow rank 0 at every step for 0.1 s"``.

    Raises:
        ConfigError: The text is not of this form.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    match = FORM.fullmatch(text)
    values = {} if match is None else {name: match[name] for name in set(WORDS.values())}
    if (
        match is None
        or (match["every"] and match["number"])
        or (match["window"] and not (match["every"] and match["kind"] == "slow"))
        or any(value and WORDS.get(match["kind"]) != name for name, value in values.items())
    ):
        raise ConfigError(
            f"a fault must read `{'|'.join(get_args(Kind))} rank R at EVENT N [for S s]`, or `at "
            f"every EVENT`, `slow ... for S s during T s`, `full ... after B bytes`, `jump ... by "
            f"S s`, not {format_value(text)}; events are {', '.join(trace.KINDS)}",
            code="fault-not-valid",
        )
    kind: Kind = match["kind"]  # type: ignore[assignment]  # the pattern allows only these
    if kind in NEEDS and not match[WORDS[kind]]:
        raise ConfigError(NEEDS[kind].format(repr(text)), code="fault-without-value")
    number = None if match["every"] else int(match["number"] or 1)
    seconds = match["seconds"] or match["jump"]
    return Fault(
        kind,
        int(match["rank"]),
        match["event"],
        number,
        float(seconds) if seconds else None,
        int(match["nbytes"]) if match["nbytes"] else None,
        float(match["window"]) if match["window"] else None,
    )


def plant(faults: Sequence[Fault], *, rank: int | None = None) -> Callable[[], None]:
    """Make faults strike in this process from now on; return a function that removes them.

    Args:
        faults: Faults of all ranks; those of other ranks are ignored.
        rank: This rank; None: the launcher's.
    """
    own_rank = read_launch().rank if rank is None else rank
    own_faults = [_Planted(fault) for fault in faults if fault.rank == own_rank]
    changed = ExitStack()

    def meet(kind: int) -> None:
        for planted in own_faults:
            if planted.is_due(trace.KINDS[kind]):
                _strike(planted.fault, changed)

    def remove() -> None:
        trace.watch(None)
        changed.close()

    if own_faults:
        trace.watch(meet)
    return remove


@dataclass(slots=True)
class _Planted:
    """A fault of this process, with the events so far."""

    fault: Fault
    met: int = 0
    ends_at: float | None = None  # of its window

    def is_due(self, event: str) -> bool:
        """Count an event; return whether the fault strikes at it."""
        if event != self.fault.event:
            return False
        self.met += 1
        if self.fault.window is not None:
            now = time.monotonic()
            self.ends_at = self.ends_at or now + self.fault.window
            return now <= self.ends_at
        return self.fault.number in (None, self.met)


def _strike(fault: Fault, changed: ExitStack) -> None:
    where = f"rank {fault.rank} at {fault.event} {fault.number or ''}".strip()
    if fault.kind != "slow" or fault.number:  # a repeated one would fill the terminal
        print(f"daso: fault: {fault.kind} {where}", file=sys.stderr, flush=True)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        _stop(fault.seconds)
    elif fault.kind == "raise":
        raise RuntimeError(f"a fault that was requested, on {where}")
    elif fault.kind in LASTING:
        changed.enter_context(LASTING[fault.kind](fault))
    elif fault.kind == "flip" and fault.event == "messages":
        _flip_payload(where)
    elif fault.kind == "flip":
        _flip_bit(where)
    else:
        time.sleep(fault.seconds or 0.0)


def _flip_payload(where: str) -> None:
    """Change the lowest bit of the next payload that this process receives, before it is added."""
    module = sys.modules.get("daso.comm.allreduce.message_sums")
    kind = () if module is None else module.MessageSums
    sums: Any = next((each for each in gc.get_objects() if isinstance(each, kind)), None)
    if sums is None:
        raise RuntimeError(
            f"a bit of a payload must flip on {where}, but payloads are added by another rank "
            f"only among three nodes or more"
        )
    count = sums.receive

    def receive(peer: int, payload: Any, index: int) -> None:
        sums.receive = count
        payload[0] ^= 1
        count(peer, payload, index)

    sums.receive = receive


def _flip_bit(where: str) -> None:
    """Change the lowest bit of a number in the middle of this process's first reference."""
    module = sys.modules.get("daso.train.deltas.shard")
    for shard in gc.get_objects() if module else ():
        is_shard = module is not None and isinstance(shard, module.DeltaShard)
        if is_shard and shard.reference.untyped_storage().nbytes():
            words = shard.reference.numpy().view("uint32")  # on the host
            words[len(words) // 2] ^= 1
            return
    raise RuntimeError(
        f"a bit of a reference must flip on {where}, but none is in memory; choose a later moment"
    )


def _stop(seconds: float | None) -> None:
    """Suspend this process; a child process resumes it, which its own threads cannot."""
    if seconds is not None:
        pid = os.getpid()
        if os.fork() == 0:
            try:
                time.sleep(max(seconds, LEAST_STOP_SECONDS))
                os.kill(pid, signal.SIGCONT)
            finally:
                os._exit(0)  # in any case: this is a copy of a rank
    os.kill(os.getpid(), signal.SIGSTOP)


@contextmanager
def _full_disk(fault: Fault) -> Iterator[None]:
    """Limit the length of this process's files; Python ignores the accompanying signal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (fault.nbytes or 0, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def _hanging_files(fault: Fault) -> Iterator[None]:
    """Let writes to files wait until some seconds from now."""
    ends_at = time.monotonic() + (fault.seconds or 0.0)
    if isinstance(os.fsync, _Stall):  # a second one
        os.fsync.ends_at = ends_at
        yield
        return
    before = os.fsync
    stall = _Stall(before, ends_at)
    os.fsync = stall  # type: ignore[assignment]  # called as the function is
    sys.addaudithook(stall.before_event)  # Python removes no hook
    yield
    os.fsync, stall.ends_at = before, 0.0


@dataclass(slots=True)
class _Stall:
    """`os.fsync`, and a hook of Python's events, that wait until a moment."""

    right: Callable[[int], None]
    ends_at: float

    def __call__(self, file: Any) -> None:
        self.wait()
        self.right(file)

    def before_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Wait before a change of a file system."""
        if not self.ends_at:
            return
        if event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or (
            event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and not _is_device(args[0])
        ):
            self.wait()

    def wait(self) -> None:
        while (seconds := self.ends_at - time.monotonic()) > 0:
            time.sleep(min(seconds, 0.1))


def _is_device(path: object) -> bool:
    """Return whether a path is a descriptor, or of memory, processes or devices."""
    return isinstance(path, int) or str(path).startswith(("/dev/", "/proc/", "/sys/"))


@contextmanager
def _other_clock(fault: Fault) -> Iterator[None]:
    """Shift `time.time`; Linux has no wall clock per process."""
    seconds = fault.seconds or 0.0
    if isinstance(time.time, _Clock):  # a second jump
        time.time.seconds += seconds
        yield
        return
    before = time.time, time.time_ns
    clock = _Clock(before[0], seconds)
    time.time = clock
    time.time_ns = lambda: before[1]() + int(clock.seconds * 1e9)
    yield
    time.time, time.time_ns = before


LASTING = {"full": _full_disk, "hang": _hanging_files, "jump": _other_clock}


@dataclass(slots=True)
class _Clock:
    """A clock that is off by some seconds."""

    right: Callable[[], float]
    seconds: float

    def __call__(self) -> float:
        return self.right() + self.seconds


def _main(words: Sequence[str]) -> None:
    """Plant faults, then run a program as Python does: a script, or -m module."""
    if len(words) < 2 or (words[1] == "-m" and len(words) < 3):
        raise ConfigError(
            "faults and a program must follow: `python -m daso.testing.faults "
            '"kill rank 1 at step 10" train.py`',
            code="no-faults-given",
        )
    plant(parse(words[0]))
    if words[1] == "-m":
        sys.argv = list(words[2:])
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words[1:])
        sys.path.insert(0, str(Path(words[1]).resolve().parent))  # as Python does
        runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    _main(sys.argv[1:])
