"""`daso memory`: what a training script needs of memory, and what it could do with less.

Runs the script as it is until it calls its model for the first time, plans the memory of that call,
and ends it there.
"""

import argparse
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from daso.cli.outputs import may_write, writing
from daso.environment import is_file, path_of
from daso.errors import ConfigError
from daso.memory.planner import POLICIES

if TYPE_CHECKING:
    from daso.cli.memory_report import Found

__all__ = ["add_parser", "cut"]

EXAMPLE = "daso memory --budget 8GiB train.py --epochs 3"
ANY = 1 << 62  # bytes: a budget into which everything fits


def cut(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part the words behind ``memory`` into options and the script."""
    ours, at = list[str](), 0
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        alone = words[at] in ("-h", "--help") or "=" in words[at] or at + 1 == len(words)
        ours.append(words[at] if alone else f"{words[at]}={words[at + 1]}")
        at += 1 if alone else 2
    return ours, tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``daso memory``."""
    parser.usage = "daso memory [OPTIONS] SCRIPT [ARGUMENTS]"
    parser.add_argument("--budget", help="bytes that all may take, e.g. 8GiB; none: shows some")
    parser.add_argument(
        "--second", default="host", help="second memory: host, or file:FOLDER (host)"
    )
    parser.add_argument(
        "--policy", choices=[*POLICIES], default="search", help="who decides (search)"
    )
    parser.add_argument(
        "--units", default="", metavar="NAMES", help="modules to treat as wholes, by commas"
    )
    parser.add_argument("--plot", type=path_of, help="draw memory over one step (PNG, PDF or SVG)")
    parser.add_argument(
        "--json", type=path_of, help="write all that is found to this file, in bytes"
    )
    parser.set_defaults(run=_main)


def _main(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    try:
        return _memory(chosen, program)
    except KeyboardInterrupt:
        print("daso: interrupted", file=sys.stderr)
        return 130


def _memory(chosen: argparse.Namespace, program: Sequence[str]) -> int:
    outputs = [path and path.absolute() for path in (chosen.json, chosen.plot)]
    may_write(*outputs)  # absolute: the script may go to another folder
    options = _checked(chosen)
    if not program:
        raise ConfigError(f"a script must follow the options, as in `{EXAMPLE}`")
    if not is_file(Path(program[0])):
        raise ConfigError(f"SCRIPT must be a Python file that is there, not {program[0]}")
    found = _found(program, options)
    from daso.cli import memory_report as report

    print(report.render(found))
    for path, write in zip(outputs, (_write_json, _write_plot), strict=True):
        if path is not None:
            _write(path, found, write)
    return 0


def _checked(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what to plan with; raise now what would go wrong when the script has run so far."""
    import torch

    from daso.memory.sizes import parse_bytes
    from daso.memory.tiers import open_tier

    kind, _, folder = chosen.second.partition(":")
    second = f"file:{path_of(folder).absolute()}" if kind == "file" and folder else chosen.second
    open_tier(second, torch.device("cpu")).close()
    return {
        "budget": None if chosen.budget is None else parse_bytes("budget", chosen.budget),
        "policy": chosen.policy,
        "second": second,
        "units": tuple(name.strip() for name in chosen.units.split(",") if name.strip()),
    }


def _write(path: Path, found: "Found", write: Callable[[Path, "Found"], None]) -> None:
    with writing(path):
        write(path, found)


def _write_json(path: Path, found: "Found") -> None:
    from daso.cli import memory_report as report

    path.write_text(json.dumps(report.as_json(found), indent=1) + "\n", encoding="utf-8")


def _write_plot(path: Path, found: "Found") -> None:
    from daso.cli import memory_report as report
    from daso.cli import plots

    plots.save(report.draw(found), path)


# --- the script, until it calls its model ---------------------------------------------------------


class _Stop(BaseException):
    """Ends the script: all that is needed of it was seen. No handler of errors catches it."""


Look = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]


def _found(program: Sequence[str], options: dict[str, Any]) -> "Found":
    """Run a script until it calls its model, and return what was found there."""
    found: list[Found] = []
    failed: list[BaseException] = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The script's own handlers of errors must see none of ours.
        try:
            found.append(_look(module, args, kwargs, program, options))
        except BaseException as error:
            failed.append(error)

    ended = _run(program, look)
    if found:
        return found[0]
    if not failed:
        raise _came_not_so_far(program[0], ended)
    if isinstance(failed[0], (ConfigError, KeyboardInterrupt)):
        raise failed[0]
    raise _came_not_so_far(program[0], failed[0])


def _run(program: Sequence[str], look: Look) -> BaseException | None:
    """Run a script until what is looked for was seen; return with what it ended before, if so."""
    script = Path(program[0]).absolute()
    try:
        with _stdout_to_stderr(), _as_main(program), _looking_at_calls(look):
            # runpy would make sys.argv[0] absolute, or __file__ relative; python does neither.
            main = sys.modules["__main__"]
            main.__file__ = str(script)
            exec(compile(script.read_bytes(), str(script), "exec"), main.__dict__)
    except _Stop:
        pass
    except SystemExit as error:
        return error
    except Exception as error:
        frame = error.__traceback__  # without the frames that are ours
        while frame is not None and frame.tb_frame.f_code.co_filename != str(script):
            frame = frame.tb_next
        return error.with_traceback(frame)
    return None


def _came_not_so_far(script: str, ended: BaseException | None) -> ConfigError:
    """Return an error for a script that came to no call of its model, and tell of its own."""
    if ended is None or isinstance(ended, SystemExit):
        code = f" with exit code {ended.code}" if ended is not None and ended.code else ""
        return ConfigError(
            f"a script must call a model that has parameters to train, with gradients enabled, in "
            f"its first process, but {script} ended{code} without"
        )
    traceback.print_exception(ended)
    return ConfigError(
        f"a script must come through one call of its model, but {script} ended with "
        f"{type(ended).__name__}, as told above; mend it, or the arguments behind its name"
    )


@contextmanager
def _as_main(program: Sequence[str]) -> Iterator[None]:
    """Let a script find its arguments, its folder and its module where python puts them."""
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [*program]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program[0]).resolve().parent)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keep standard output for what is found; the script's, and its programs', goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _looking_at_calls(look: Look) -> Iterator[None]:
    """Look at the first call of a module that is trained, and end the script with it."""
    import torch

    plain = torch.nn.Module.__call__
    state = {"looking": False, "seen": False}

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if state["looking"] or not (state["seen"] or _trains(module)):
            return plain(module, *args, **kwargs)
        if not state["seen"]:
            state["seen"] = state["looking"] = True
            look(module, args, kwargs)
            state["looking"] = False
        raise _Stop

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.__call__ = plain  # type: ignore[method-assign]


def _trains(module: Any) -> bool:
    import torch

    trained = (param.requires_grad for param in module.parameters())
    return torch.is_grad_enabled() and any(trained)


# --- what is seen there ---------------------------------------------------------------------------


def _look(
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    program: Sequence[str],
    options: dict[str, Any],
) -> "Found":
    """Plan the memory of a call. Autocast and all else is as the script has set it."""
    import torch

    from daso.cli.memory_report import Found
    from daso.memory.api import Call, plan

    model, notes = _unwrapped(module)
    if any(torch.nn.parameter.is_lazy(param) for param in model.parameters()):
        with torch.no_grad():
            model(*args, **kwargs)  # makes its parameters, which no step does again
    optimizer = _optimizer_of(model)
    budget = options["budget"]
    made = plan(
        model,
        Call(args, kwargs),
        ANY if budget is None else budget,
        optimizer=optimizer,
        policy="all_keep" if budget is None else options["policy"],
        second=options["second"],
        units=options["units"],
    )
    return Found(
        made=made,
        program=tuple(program),
        planned=budget is not None,
        policy=options["policy"],
        given=_shapes((args, kwargs)),
        optimizer=None if optimizer is None else _name(optimizer),
        notes=(*notes, *_notes(model, optimizer)),
    )


def _unwrapped(module: Any) -> tuple[Any, list[str]]:
    """Return the model inside of what compiles it or trains it on several devices."""
    import torch

    notes = list[str]()
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while isinstance(module, (torch._dynamo.OptimizedModule, *parallel)):
        notes.append(f"planned for the module inside of {type(module).__name__}, as it is")
        compiled = isinstance(module, torch._dynamo.OptimizedModule)
        module = module._orig_mod if compiled else module.module
    return module, notes


def _optimizer_of(model: Any) -> Any:
    """Return the newest optimizer that has parameters of a model, or None."""
    import torch

    params = {id(param) for param in model.parameters() if param.requires_grad}
    found = [
        one
        for generation in range(3)  # of Python's garbage collector: newest objects first
        for one in reversed(gc.get_objects(generation))
        if issubclass(type(one), torch.optim.Optimizer) and params & _held(one)
    ]
    inside = {id(one.inner) for one in found if hasattr(one, "inner")}  # of daso.DASO
    return next((one for one in found if id(one) not in inside), None)


def _held(optimizer: Any) -> set[int]:
    """Return the parameters of an optimizer, which may not be finished."""
    groups = getattr(optimizer, "param_groups", ())
    return {id(param) for group in groups for param in group["params"]}


def _name(optimizer: Any) -> str:
    name = type(optimizer).__name__
    return f"{name}({_name(optimizer.inner)})" if hasattr(optimizer, "inner") else name


def _notes(model: Any, optimizer: Any) -> Iterator[str]:
    """Say what is not counted."""
    if optimizer is None:
        yield (
            "no optimizer has the model's parameters when it is called: its memory is not counted"
        )
    else:
        held = _held(optimizer)
        left = [p for p in model.parameters() if p.requires_grad and id(p) not in held]
        if left:
            yield (
                f"{len(left)} trained parameters are in no optimizer, or in another one than "
                f"{_name(optimizer)}: what that keeps is not counted"
            )
    yield "the loss is not counted: the sum of what the model gives stands for it"


def _shapes(given: object) -> str:
    """Return the tensors that a model is given, to be read."""
    from daso.memory.observe import tensors_in

    shown = [
        f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}" for one in tensors_in(given)
    ]
    return ", ".join(shown[:4]) + (", ..." if len(shown) > 4 else "") if shown else "no tensor"
