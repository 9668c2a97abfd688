"""Runs a program on a machine that is slowed down as a plan says, and estimates the target.

    python -m daso.predict.run_throttled plan.toml train.py --epochs 3
    mpirun -n 2 python -m daso.predict.run_throttled plan.toml -m package.train

`daso predict --throttle plan.toml -- python train.py` puts this into a command. The program is not
changed. A runner, and no variable of the environment: that would slow down launchers and every
other Python program that the command starts, too.
"""

import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from daso.comm.topology import Topology
from daso.environment import read_launch
from daso.errors import ConfigError, DasoError
from daso.predict.emulate import simulate_target
from daso.predict.measure import measure_machine, world_of_launch
from daso.predict.throttle_file import ThrottleFile, read_throttle_file
from daso.predict.throttle_plan import LEAST_STEPS, ThrottlePlan, estimate

__all__ = ["main", "report"]


def main(words: Sequence[str]) -> int:
    """Run a program throttled; return its exit code."""
    if len(words) < 2 or (words[1] == "-m" and len(words) < 3):
        print(
            "daso: a plan and a program must follow: `python -m daso.predict.run_throttled "
            "plan.toml train.py`",
            file=sys.stderr,
        )
        return 2
    world = world_of_launch()
    with ExitStack() as throttles:
        try:
            plan = _read(Path(words[0]), world).plan(lambda: measure_machine(world))
            steps = throttles.enter_context(simulate_target(plan, world))
        except DasoError as wrong:  # on every rank; the program's own errors are its own
            print(f"daso: {wrong}", file=sys.stderr)
            return 2
        code = _run(words[1:])
        seconds = list(steps.seconds)
    if code == 0 and read_launch().rank == 0:
        print(report(plan, seconds), flush=True)
    return code


def _read(path: Path, world: Topology | None) -> ThrottleFile:
    """Read a plan; raise on every rank what is wrong with it on one. Collective; blocking."""
    problem = None
    try:
        found = read_throttle_file(path)
    except ConfigError as error:
        problem = str(error)
    if world is not None:
        world.raise_on_all_ranks(problem, ConfigError)
    if problem is not None:
        raise ConfigError(problem)
    return found


def _run(words: Sequence[str]) -> int:
    """Run a program as Python would, a script or -m module; return its exit code."""
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


def report(plan: ThrottlePlan, seconds: Sequence[float]) -> str:
    """Return what a program's steps tell of the target."""
    if len(seconds) < LEAST_STEPS:
        return (
            f"daso: no estimate: it needs {LEAST_STEPS} steps at least, and an optimizer took "
            f"{len(seconds)}"
        )
    return f"daso: {estimate(plan, seconds)}\n- of {len(seconds)} steps, of world rank 0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
