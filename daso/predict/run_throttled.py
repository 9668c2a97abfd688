"""Runs a program on this machine, throttled by a plan, and estimates step times of the target.

    python -m daso.predict.run_throttled plan.toml train.py --epochs 3
    mpirun -n 2 python -m daso.predict.run_throttled plan.toml -m package.train

`daso predict --throttle plan.toml -- python train.py` inserts it into a command. The program is not
changed. An environment variable instead of a runner would also slow down launchers and every other
Python program of the command.
"""

import json
import runpy
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from daso.comm.topology import Topology
from daso.environment import read_launch
from daso.errors import ConfigError, DasoError
from daso.predict.emulate import LEAST_USE, StepTimes, emulated
from daso.predict.measure import measure_machine, world_of_launch
from daso.predict.throttle_plan import (
    LABELS,
    LEAST_STEPS,
    ThrottleFile,
    ThrottlePlan,
    estimate,
    read_throttle_file,
    settled,
    why_nothing,
)

RESULT = "--result"  # before a file: write the steps there instead of an estimate


def main(words: Sequence[str]) -> int:
    """Run a program throttled; return its exit code."""
    if len(words) < 2 or (words[1] == "-m" and len(words) < 3):
        print(
            "daso: a plan and a program must follow: `python -m daso.predict.run_throttled "
            "plan.toml train.py`",
            file=sys.stderr,
        )
        return 2
    world, result = world_of_launch(), None
    if words[0] == RESULT:
        result, words = Path(words[1]), words[2:]
    with ExitStack() as throttles:
        try:
            file = _read(Path(words[0]), world)
            plan = file.plan(lambda: measure_machine(world))
            steps = throttles.enter_context(emulated(plan, world, file.unnamed))
        except DasoError as error:  # raised on every rank, before the program starts
            print(f"daso: {error}", file=sys.stderr)
            return 2
        code = _run(words[1:])
        summary = report(steps)
    if code == 0 and read_launch().rank == 0:
        if result is None:
            print(summary, flush=True)
        else:
            _write(result, plan, steps)
    return code


def _write(path: Path, plan: ThrottlePlan, steps: StepTimes) -> None:
    """Write the rates of this machine and the mean of the steps that count."""
    values: dict[str, Any] = {"current": asdict(plan.current), "count": len(steps.seconds)}
    if len(steps.seconds) >= LEAST_STEPS:
        values["seconds"] = statistics.fmean(settled(steps.seconds))
    path.write_text(json.dumps(values), encoding="utf-8")


def _read(path: Path, world: Topology | None) -> ThrottleFile:
    """Read a plan file; raise its errors on every rank. Collective; blocking."""
    file: ThrottleFile | None = None
    problem: ConfigError | None = None
    try:
        file = read_throttle_file(path)
    except ConfigError as error:
        problem = error
    if world is not None:
        world.raise_on_all_ranks(problem)
    if file is None:
        assert problem is not None
        raise problem
    return file


def _run(words: Sequence[str]) -> int:
    """Run a program as Python does, a script or -m module; return its exit code."""
    try:
        if words[0] == "-m":
            sys.argv = list(words[1:])
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).resolve().parent))  # as Python does
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def report(steps: StepTimes) -> str:
    """Return the estimate of a program's steps on the target, or the reason for none."""
    plan, left_out = steps.plan, "".join(f"\n- {sentence}" for sentence in steps.left_out)
    count = len(steps.seconds)
    if count < LEAST_STEPS:
        return (
            f"daso: no estimate: it needs {LEAST_STEPS} steps at least, and an optimizer took "
            f"{count}"
        )
    if not plan.slowed:
        return f"daso: no estimate: nothing was slowed down: {why_nothing(plan)}{left_out}"
    if not steps.is_slowed:
        unused = ", ".join(LABELS[name] for name in plan.slowed)
        return (
            f"daso: no estimate: nothing was slowed down: the steps use the parts that are slower "
            f"here in proportion to the target ({unused}) for {steps.use:.1%} of their time, and "
            f"an estimate needs {LEAST_USE:.0%}; name a part that they use in [target], or start "
            f"more nodes{left_out}"
        )
    return f"daso: {estimate(plan, steps.seconds)}{left_out}\n- of {count} steps, of world rank 0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
