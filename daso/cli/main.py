"""The `daso` command: parses the command line, and imports torch and MPI only when needed."""

import argparse
import errno
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import daso
from daso.checks import format_value
from daso.cli.outputs import exit_on_broken_pipe
from daso.cli.parser import Parser
from daso.environment import is_host_leader, parse_ranks_per_node, read_launch
from daso.errors import (
    CheckpointWriteError,
    ConfigError,
    DasoError,
    ExchangeError,
    NonFiniteError,
    StallError,
)
from daso.paths import is_file, path_of

DESCRIPTION = "Hierarchical asynchronous data-parallel training for PyTorch over MPI."


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    _open_standard_streams()
    ours, theirs = _split_words(sys.argv[1:] if words is None else list(words))
    for word in ours:
        if word.startswith("-") and word.endswith("=--"):  # argparse would make a list of it
            return _refuse(f"{word.removesuffix('=--')} must have a value, not --; give one")
    return carry_out(make_parser(called=ours[0] if ours else ""), ours, theirs)


def carry_out(
    parser: argparse.ArgumentParser, words: Sequence[str], rest: Sequence[str] = ()
) -> int:
    """Run a parsed command; return its exit code."""
    return exit_on_broken_pipe(lambda: _carry_out(parser, words, rest))


def _carry_out(parser: argparse.ArgumentParser, words: Sequence[str], rest: Sequence[str]) -> int:
    options = parser.parse_args(words)
    try:
        code: int = options.run(options, rest)
    except (ExchangeError, StallError) as error:
        return _fail(str(error), alone=True)
    except (CheckpointWriteError, NonFiniteError) as error:
        return _fail(str(error))
    except DasoError as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        if read_launch().size > 1:  # each rank prints it
            raise
        print("daso: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(f"no file can have the name {format_value(error.filename)}; shorten it")
    return code


def _open_standard_streams() -> None:
    """Reopen standard streams closed by the shell (``>&-``); files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _refuse(why: str) -> int:
    """Print an error, the same on every rank, in one line; return the exit code of wrong use."""
    if _prints_errors():
        # Names may contain line breaks.
        print(f"daso: {' '.join(why.splitlines())}", file=sys.stderr)
    elif _is_alone_on_its_host():
        from daso.comm.mpi import OTHERS_SECONDS

        time.sleep(OTHERS_SECONDS)  # if rank 0 has the error too, it may end the job
        line = f"daso: rank {read_launch().rank} on {socket.gethostname()}: "
        print(line + " ".join(why.splitlines()), file=sys.stderr)
    return 2


def _is_alone_on_its_host() -> bool:
    """Return whether only this host may have an error, which no other rank would print.

    Before ranks have met, an error may concern one host: a missing folder, for example.
    """
    topology = sys.modules.get("daso.comm.topology")
    return is_host_leader() and (topology is None or not topology.have_met())


def _fail(why: str, *, alone: bool = False) -> int:
    """Print a failure; return the exit code of failures that may not recur.

    Args:
        why: Message of the failure.
        alone: Other ranks may not know of it: they wait for this rank, or it waited for them.
    """
    from daso.comm.mpi import end_alone, end_job

    line = " ".join(why.splitlines())
    end_alone(f"daso: {line}")  # the printing rank may be lost
    _refuse(why)
    if alone:
        end_job("" if _prints_errors() else line)
    return 1


def _prints_errors() -> bool:
    """Return whether this rank prints errors for all; a loss may move this to another rank."""
    topology = sys.modules.get("daso.comm.topology")
    if topology is not None and (rank := topology.rank_now()) is not None:
        return bool(rank == 0)
    try:
        return read_launch().rank == 0
    except ConfigError:
        return True


# Help and parser factory of each command: only the called command's module is imported, so that
# the shell does not wait for the others.
COMMANDS = {
    "run": ("start a program on several ranks of this machine", "daso.cli.main:_add_run"),
    "train": ("train one of the built-in models", "daso.cli.main:_add_train"),
    "submit": ("submit a program to SLURM", "daso.slurm.submit:add_parser"),
    "status": ("show submitted jobs", "daso.slurm.status:add_status"),
    "logs": ("print a submitted job's log", "daso.slurm.status:add_logs"),
    "bench": (
        "compare training methods on this machine",
        "daso.cli.bench.command:add_parser",
    ),
    "predict": ("predict the cost of a schedule on other nodes", "daso.cli.predict:add_parser"),
    "memory": ("show a script's memory, and plan within a budget", "daso.cli.memory:add_parser"),
    "trace": ("show where a recorded run's time went, and late ranks", "daso.cli.trace:add_parser"),
    "doctor": ("examine MPI, torch, GPUs and nodes", "daso.cli.main:_add_doctor"),
    "complete": ("print a shell's completion script", "daso.cli.completion:add_parser"),
}


def make_parser(called: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        called: The command whose options to add; None: all commands.
    """
    parser = Parser(prog="daso", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"daso {daso.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (meaning, _) in COMMANDS.items():
        command = commands.add_parser(name, help=meaning, allow_abbrev=False)
        if called in (None, name):
            add_options(command, name)
    return parser


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command to a parser."""
    _named(COMMANDS[command][1])(parser)


def _named(place: str) -> Callable[..., Any]:
    """Return the function named by ``module:name``."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="show how N nodes would exchange, at what cost"
    )
    parser.add_argument(
        "--parameters", type=float, default=25e6, help="of the model, for --nodes (25e6)"
    )
    parser.add_argument("--link", default="1gbit", help="of each node, for --nodes (1gbit)")
    parser.set_defaults(run=_doctor)


# Options with a value, before a program or settings.
VALUE_OPTIONS = ("-n", "--ranks", "--ranks-per-node", "--spares", "--restarts", "--fault")
SPLITTERS = {
    "submit": "daso.slurm.submit:split_words",
    "memory": "daso.cli.memory:split_words",
    "predict": "daso.cli.predict:split_words",
}


def _split_words(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line into argparse's options, and the words of a program or settings.

    argparse would parse a program's own options, and its ``-m``, as daso's, and a setting that
    contains a blank as a file.
    """
    if words and words[0] in SPLITTERS:
        options, program = _named(SPLITTERS[words[0]])(words[1:])
        return [words[0], *options], program
    if words[:1] == ["run"]:
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
            at += 2 if words[at] in VALUE_OPTIONS else 1
        return words[:at], tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])
    if words[:1] == ["train"]:
        return _split_train_words(words)
    return words, ()


def _split_train_words(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split ``daso train`` words into options and settings, ``--key=value`` or ``--key value``."""
    from daso.cli.train.keys import takes_value

    ours, settings, at = words[:1], list[str](), 1
    while at < len(words):
        word, at = words[at], at + 1
        if not word.startswith("--") or word.partition("=")[0] in (
            *VALUE_OPTIONS,
            "--help",
            "--resume",
        ):
            ours.append(word)
            if word in VALUE_OPTIONS and at < len(words):
                ours.append(words[at])
                at += 1
            continue
        if takes_value(word) and at < len(words) and not words[at].startswith("--"):
            word, at = f"{word}={words[at]}", at + 1
        settings.append(word)
    return ours, tuple(settings)


def _add_ranks(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("-n", "--ranks", type=int, default=default, help="number of ranks")
    parser.add_argument(
        "--ranks-per-node",
        metavar="R",
        help="cut the ranks into pretend nodes of R, or of sizes such as 3,1",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    _add_ranks(parser, default=1)
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="let Exchange(elastic=True) continue after a rank is killed (Open MPI 5 or later)",
    )
    _add_survival(parser)
    parser.add_argument(
        "--fault",
        default="",
        metavar="TEXT",
        help="rehearse a fault, such as `kill rank 1 at step 50`; see docs/how-to/elastic.md",
    )
    parser.usage = (
        "daso run [-n RANKS] [--ranks-per-node R] [--elastic [--spares S]] [--restarts N] [--fault "
        "TEXT] (SCRIPT | -m MODULE) [ARGUMENTS]"
    )
    parser.set_defaults(run=_run)


def _add_survival(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart a failed job up to N times: daso train resumes from its checkpoint",
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="S",
        help="start S spare ranks that wait to replace a killed one",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    from daso.cli.train.keys import describe

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "settings, with defaults:\n" + describe()
    _add_ranks(parser, default=1)
    _add_survival(parser)
    parser.add_argument("config", nargs="?", type=path_of, help="a TOML file with settings")
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint in runs/NAME"
    )
    parser.set_defaults(run=_train)


def _run(options: argparse.Namespace, program: Sequence[str]) -> int:
    from daso.cli.launch import Local, launch
    from daso.testing.faults import parse as parse_faults

    parse_ranks_per_node(options.ranks_per_node or "")
    parse_faults(options.fault)
    ranks, pretend = options.ranks, options.ranks_per_node
    if program and not program[0].startswith("-") and not is_file(Path(program[0])):
        raise ConfigError(
            f"the program must be an existing script, but there is no "
            f"{format_value(program[0])} in {Path.cwd()}; mend its path, or run a module with -m",
            code="program-not-found",
        )
    if ranks == 1 and (
        late := [word for word in program[1:] if word.partition("=")[0] in VALUE_OPTIONS]
    ):
        print(
            f"daso: {late[0]} stands behind the program and is passed to it: 1 rank starts; write "
            f"daso run {late[0]} ... {program[0]} to start more",
            file=sys.stderr,
        )
    return launch(
        Local(
            ranks=ranks,
            ranks_per_node=pretend,
            program=tuple(program),
            elastic=options.elastic,
            spares=options.spares,
            restarts=options.restarts,
            faults=options.fault,
        )
    )


def _train(options: argparse.Namespace, words: Sequence[str]) -> int:
    from daso.cli.launch import Local, launch
    from daso.cli.train.keys import read_config

    config = read_config(options.config, words)
    parse_ranks_per_node(options.ranks_per_node or "")
    launched = read_launch()
    if options.ranks != 1 or options.ranks_per_node or options.spares or options.restarts:
        if launched.size > 1:
            raise ConfigError(
                f"-n, --ranks-per-node, --spares and --restarts start ranks, but "
                f"{launched.launcher} already did; leave them out, and set DASO_RANKS_PER_NODE for "
                f"pretend nodes, DASO_SPARES for spare ranks",
                code="ranks-already-started",
            )
        flags = ["--resume"] if options.resume else []
        files = [str(options.config)] if options.config else []
        program = ["-m", "daso", "train", *flags, *files, *words]
        ranks, pretend = options.ranks, options.ranks_per_node
        elastic = config.exchange.elastic
        return launch(
            Local(
                ranks=ranks,
                ranks_per_node=pretend,
                program=tuple(program),
                elastic=elastic,
                spares=options.spares,
                restarts=options.restarts,
            )
        )
    from daso.checkpoint.preemption import CHECKPOINTED
    from daso.cli.train.loop import train
    from daso.comm.mpi import finalize

    if train(config, resume=options.resume) is None:
        finalize()  # mpi4py would treat this exit code as a failure, and abort the other ranks
        return CHECKPOINTED
    return 0


def _doctor(options: argparse.Namespace, _: Sequence[str]) -> int:
    from daso.cli.doctor import examine, render

    if options.nodes is not None:
        from daso.cli.algorithms import costs_of, table

        rows = costs_of(options.nodes, options.parameters, options.link)
        print(json.dumps(rows, indent=2) if options.json else table(rows))
        return 0
    findings = examine()
    if _prints_errors():
        print(json.dumps(findings, indent=2) if options.json else render(findings))
    return 1 if findings["problems"] else 0
