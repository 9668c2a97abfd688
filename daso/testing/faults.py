"""Faults that strike one rank at a moment of training, to see what a job does then.

    daso run --elastic -n 3 --ranks-per-node 1 --fault "kill rank 1 at merge 3" train.py
    mpirun -n 3 python -m daso.testing.faults "stop rank 2 at step 10 for 5 s" train.py

Moments are the ends of what a recording shows (`daso.trace.KINDS`): the third merge on that rank,
its tenth step, any message. The program is not changed.
"""

import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, get_args

from daso import trace
from daso.checks import format_value
from daso.environment import read_launch
from daso.errors import ConfigError

__all__ = ["Fault", "parse", "plant"]

LEAST_STOP_SECONDS = 0.05  # so that nobody is woken before it stands still
Kind = Literal["kill", "stop", "slow", "raise"]
FORM = re.compile(
    rf"(?P<kind>{'|'.join(get_args(Kind))}) rank (?P<rank>\d+) at (?P<every>every )?"
    rf"(?P<event>{'|'.join(trace.KINDS)})(?: (?P<number>[1-9]\d*))?"
    r"(?: for (?P<seconds>\d+(?:\.\d+)?) s)?",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong on one rank, and when.

    Args:
        kind: ``"kill"``: SIGKILL. ``"stop"``: the whole process stands still, for ``seconds``, or
            for ever. ``"slow"``: the thread that meets it waits ``seconds``. ``"raise"``: that
            thread raises a RuntimeError.
        rank: World rank, as the launcher counts.
        event: One of `daso.trace.KINDS`; the fault strikes when it ends.
        number: Which of them on this rank, from 1; None: every one.
        seconds: How long; None: for ever.
    """

    kind: Kind
    rank: int
    event: str
    number: int | None = 1
    seconds: float | None = None


def parse(text: str) -> list[Fault]:
    """Read faults such as ``"kill rank 1 at merge 3; slow rank 0 at every step for 0.1 s"``.

    Raises:
        ConfigError: It says something else.
    """
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    found = FORM.fullmatch(text)
    if found is None or (found["every"] and found["number"]):
        raise ConfigError(
            f"a fault must read `{'|'.join(get_args(Kind))} rank R at EVENT N [for S s]`, or `at "
            f"every EVENT`, not {format_value(text)}; events are {', '.join(trace.KINDS)}"
        )
    if found["kind"] == "slow" and not found["seconds"]:
        raise ConfigError(f"a rank is slow for some time, but {text!r} has none; add `for 0.1 s`")
    number = None if found["every"] else int(found["number"] or 1)
    seconds = float(found["seconds"]) if found["seconds"] else None
    kind: Kind = found["kind"]  # type: ignore[assignment]  # the pattern has these alone
    return Fault(kind, int(found["rank"]), found["event"], number, seconds)


def plant(faults: Sequence[Fault], *, rank: int | None = None) -> Callable[[], None]:
    """Let faults strike in this process from now on; return what takes them away.

    Args:
        faults: Of all ranks; those of others do nothing here.
        rank: This rank; None: as the launcher says.
    """
    mine = read_launch().rank if rank is None else rank
    ours = [(fault, count(1)) for fault in faults if fault.rank == mine]

    def meet(kind: int) -> None:
        for fault, met in ours:
            if trace.KINDS[kind] == fault.event and fault.number in (None, next(met)):
                _strike(fault)

    if ours:
        trace.watch(meet)
    return lambda: trace.watch(None)


def _strike(fault: Fault) -> None:
    where = f"rank {fault.rank} at {fault.event} {fault.number or ''}".strip()
    if fault.kind != "slow" or fault.number:  # one that comes every time would fill the terminal
        print(f"daso: fault: {fault.kind} {where}", file=sys.stderr, flush=True)
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stop":
        _stop(fault.seconds)
    elif fault.kind == "raise":
        raise RuntimeError(f"a fault that was asked for, on {where}")
    else:
        time.sleep(fault.seconds or 0.0)


def _stop(seconds: float | None) -> None:
    """Let this process stand still; another one wakes it, as none of its threads can."""
    if seconds is not None:
        mine = os.getpid()
        if os.fork() == 0:
            try:
                time.sleep(max(seconds, LEAST_STOP_SECONDS))
                os.kill(mine, signal.SIGCONT)
            finally:
                os._exit(0)  # whatever: this is a copy of a rank
    os.kill(os.getpid(), signal.SIGSTOP)


def _main(words: Sequence[str]) -> None:
    """Plant faults, then run a program as Python would: a script, or -m module."""
    if len(words) < 2 or (words[1] == "-m" and len(words) < 3):
        raise ConfigError(
            "faults and a program must follow: `python -m daso.testing.faults "
            '"kill rank 1 at step 10" train.py`'
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
