"""`daso memory`: memory of a training script's model, and plans that fit it into a budget.

Runs the script unchanged until it calls its model for the first time, plans the memory of that
call, and stops the script there.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from daso.cli.outputs import may_write, write_file, writing
from daso.errors import ConfigError
from daso.memory.planner import POLICIES
from daso.paths import is_file, path_of

EXAMPLE = "daso memory --budget 8GiB train.py --epochs 3"


def split_words(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the words after ``memory`` into options and the script with its arguments."""
    ours, at = list[str](), 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        alone = words[at] in ("-h", "--help") or "=" in words[at] or at + 1 == len(words)
        ours.append(words[at] if alone else f"{words[at]}={words[at + 1]}")
        at += 1 if alone else 2
    return ours, tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso memory``."""
    parser.usage = "daso memory [OPTIONS] SCRIPT [ARGUMENTS]"
    add = parser.add_argument
    add("--budget", help="memory limit, e.g. 8GiB; without it: the cost of some budgets")
    add("--second", default="host", help="second memory: host, or file:FOLDER (host)")
    add("--policy", choices=[*POLICIES], default="search", help="planning policy (search)")
    add("--units", default="", metavar="NAMES", help="modules to plan as units, by commas")
    add("--plot", type=path_of, help="draw memory over one step (PNG, PDF or SVG)")
    add("--json", type=path_of, help="write all results to this file, in bytes and seconds")
    parser.set_defaults(run=_memory)


def _memory(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    import torch

    from daso.cli import memory_report as report
    from daso.cli import plots
    from daso.memory.sizes import parse_bytes
    from daso.memory.tiers import open_tier

    # Errors in options are raised before the script runs; it may change the working folder.
    json_path, plot_path = (path and path.absolute() for path in (chosen.json, chosen.plot))
    may_write(json_path, plot_path)
    kind, _, folder = chosen.second.partition(":")
    second = f"file:{path_of(folder).absolute()}" if kind == "file" and folder else chosen.second
    open_tier(second, torch.device("cpu")).close()
    budget = None if chosen.budget is None else parse_bytes("budget", chosen.budget)
    units = tuple(name.strip() for name in chosen.units.split(",") if name.strip())
    options = {"budget": budget, "policy": chosen.policy, "second": second, "units": units}
    if not program:
        raise ConfigError(
            f"a script must follow the options, as in `{EXAMPLE}`", code="no-script-to-measure"
        )
    if not is_file(Path(program[0])):
        raise ConfigError(
            f"SCRIPT must be an existing Python file, not {program[0]}", code="script-not-found"
        )
    values, planned = _first_call(program, partial(report.analyse, **options))
    print(report.render(values))
    if json_path is not None:
        write_file(json_path, json.dumps({"script": [*program], **values}, indent=1) + "\n")
    if plot_path is not None:
        with writing(plot_path):
            plots.save(report.draw(values, planned), plot_path, "a picture of one step's memory")
    return 0


class _Stop(BaseException):
    """Ends the script after the call; handlers of `Exception` do not catch it."""


def _first_call(program: Sequence[str], analyse: Callable[..., Any]) -> Any:
    """Run a script up to the first call of a model that it trains; return the call's analysis."""
    results, errors = list[Any](), list[BaseException | None]()

    def look(module: Any, args: Any, kwargs: Any) -> None:
        try:
            results.append(analyse(module, args, kwargs))
        except BaseException as error:  # the script's own handlers must not see it
            errors.append(error)

    ended = _run_script(program, look)
    if results:
        return results[0]
    if errors and isinstance(errors[0], (ConfigError, KeyboardInterrupt)):
        raise errors[0]
    cause = errors[0] if errors else ended
    if cause is None or isinstance(cause, SystemExit):
        code = f" with exit code {cause.code}" if cause is not None and cause.code else ""
        raise ConfigError(
            f"a script must call a model that has parameters to train, with gradients enabled, in "
            f"its first process, but {program[0]} ended{code} without; call it as model(inputs), "
            f"outside torch.no_grad()",
            code="script-calls-no-model",
        )
    traceback.print_exception(cause)
    raise ConfigError(
        f"a script must complete one call of its model, but {program[0]} ended with "
        f"{type(cause).__name__}, as shown above; mend it, or the arguments behind its name",
        code="script-failed",
    )


def _run_script(program: Sequence[str], look: Callable[..., None]) -> BaseException | None:
    """Run a script up to its first call of a model; return the error that ended it before."""
    script = Path(program[0]).absolute()
    try:
        with _script_environment(program), _intercepted_calls(look):
            # runpy would make sys.argv[0] absolute, or __file__ relative; python does neither.
            main = sys.modules["__main__"]
            main.__file__ = str(script)
            exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)
    except _Stop:
        pass
    except (Exception, SystemExit) as error:
        frame = error.__traceback__  # without the frames of this module
        while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
            frame = frame.tb_next
        return error.with_traceback(frame)
    return None


@contextmanager
def _script_environment(program: Sequence[str]) -> Iterator[None]:
    """Set argv, path and main module as python does for a script; send its stdout to stderr."""
    before, stdout = (sys.argv, sys.path[:], sys.modules["__main__"]), os.dup(1)
    sys.argv = [*program]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    sys.modules["__main__"] = ModuleType("__main__")
    sys.stdout.flush()
    os.dup2(2, 1)  # also for programs that the script starts
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        sys.argv, sys.path[:], sys.modules["__main__"] = before


@contextmanager
def _intercepted_calls(look: Callable[..., None]) -> Iterator[None]:
    """Pass the first call of a trained module to a function, and end the script with it."""
    import torch

    plain = torch.nn.Module.__call__
    state = {"looking": False, "done": False}

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if state["looking"] or not (state["done"] or _trains(module)):
            return plain(module, *args, **kwargs)
        if not state["done"]:
            state["looking"] = True
            look(module, args, kwargs)
            state["looking"], state["done"] = False, True
        raise _Stop

    def _trains(module: Any) -> bool:
        return torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = plain  # type: ignore[method-assign]
