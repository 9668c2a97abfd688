"""The `daso` command. Parses first; torch and MPI are imported only by what needs them."""

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
from typing import Any, NoReturn

import daso
from daso.checks import format_value
from daso.cli.outputs import exit_on_broken_pipe
from daso.environment import (
    is_file,
    is_host_leader,
    parse_ranks_per_node,
    path_of,
    read_launch,
)
from daso.errors import (
    CheckpointWriteError,
    ConfigError,
    DasoError,
    ExchangeError,
    NonFiniteError,
    StallError,
)

__all__ = ["COMMANDS", "OURS", "Parser", "add_options", "carry_out", "main", "make_parser"]

DESCRIPTION = "Hierarchical asynchronous data-parallel training for PyTorch over MPI."


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the words."""

    # argparse lets the whole command's parser say it, which does not know the right --help.
    def parse_known_args(self, *words: Any, **keywords: Any) -> Any:
        """Refuse words that this command does not know."""
        options, rest = super().parse_known_args(*words, **keywords)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return options, rest

    def error(self, message: str) -> NoReturn:
        """End the program."""
        one_line = " ".join(message.split())
        self.exit(2, f"daso: {one_line}; `{self.prog} --help` shows how\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    _open_standard_streams()
    ours, theirs = _cut(sys.argv[1:] if words is None else list(words))
    for word in ours:
        if word.startswith("-") and word.endswith("=--"):  # argparse would make a list of it
            return _refuse(f"{word.removesuffix('=--')} must have a value, not --; give one")
    return carry_out(make_parser(called=ours[0] if ours else ""), ours, theirs)


def carry_out(
    parser: argparse.ArgumentParser, words: Sequence[str], rest: Sequence[str] = ()
) -> int:
    """Do what a command line says; return its exit code."""
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
        if read_launch().size > 1:  # each rank says so
            raise
        print("daso: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _refuse(f"no file can have the name {format_value(error.filename)}; shorten it")
    return code


def _open_standard_streams() -> None:
    """Let what a shell closed (``>&-``) lead nowhere: the next file would take its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: PTH123, SIM115


def _refuse(why: str) -> int:
    """Print an error, the same on every rank, in one line; return the exit code of wrong use."""
    if _speaks():
        print(f"daso: {' '.join(why.splitlines())}", file=sys.stderr)  # names may hold line breaks
    elif _is_alone_on_its_host():
        from daso.comm.mpi import OTHERS_SECONDS

        time.sleep(OTHERS_SECONDS)  # where rank 0 says it, too, it may end all
        line = f"daso: rank {read_launch().rank} on {socket.gethostname()}: "
        print(line + " ".join(why.splitlines()), file=sys.stderr)
    return 2


def _is_alone_on_its_host() -> bool:
    """Return whether this host may be the only one that has an error, and nobody else tells it.

    Before ranks met, what is wrong may be so on one host: a folder that is not there, say.
    """
    topology = sys.modules.get("daso.comm.topology")
    return is_host_leader() and (topology is None or not topology.have_met())


def _fail(why: str, *, alone: bool = False) -> int:
    """Print what went wrong at work; return the exit code of what may go well another time.

    Args:
        why: What it was.
        alone: Other ranks may not know of it: they wait, or are what this one waited for.
    """
    from daso.comm.mpi import end_alone, end_job

    line = " ".join(why.splitlines())
    end_alone(f"daso: {line}")  # who spoke for all may be lost
    _refuse(why)
    if alone:
        end_job("" if _speaks() else line)
    return 1


def _speaks() -> bool:
    """Return whether this rank is the one that prints; after a loss it may be another one."""
    topology = sys.modules.get("daso.comm.topology")
    if topology is not None and (rank := topology.rank_now()) is not None:
        return bool(rank == 0)
    try:
        return read_launch().rank == 0
    except ConfigError:
        return True


# What each command is for, and what adds its options: only the module of the one that is called is
# imported, so that the shell does not wait for the others.
COMMANDS = {
    "run": ("start a program on several ranks of this machine", "daso.cli.main:_add_run"),
    "train": ("train one of the built-in models", "daso.cli.main:_add_train"),
    "submit": ("submit a program to SLURM", "daso.slurm.submit:add_parser"),
    "status": ("show submitted jobs", "daso.slurm.status:add_status"),
    "logs": ("print a submitted job's log", "daso.slurm.status:add_logs"),
    "bench": (
        "measure ways to train on this machine, beside rivals",
        "daso.cli.bench.command:add_parser",
    ),
    "predict": ("what a schedule would cost on other nodes", "daso.cli.predict:add_parser"),
    "memory": ("what a script's model needs, and within a budget", "daso.cli.memory:add_parser"),
    "trace": ("where a recorded run's time went, and who was late", "daso.cli.trace:add_parser"),
    "doctor": ("look at MPI, torch, GPUs and nodes", "daso.cli.main:_add_doctor"),
    "complete": ("let a shell complete these words", "daso.cli.completion:add_parser"),
}


def make_parser(called: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        called: The command whose options are wanted; None: of all.
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
    """Give a parser the options of a command."""
    _named(COMMANDS[command][1])(parser)


def _named(place: str) -> Callable[..., Any]:
    """Return the function that ``module:name`` names."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="how N nodes would exchange, and what that costs"
    )
    parser.add_argument(
        "--parameters", type=float, default=25e6, help="of the model, for --nodes (25e6)"
    )
    parser.add_argument("--link", default="1gbit", help="of each node, for --nodes (1gbit)")
    parser.set_defaults(run=_doctor)


# Options that take a word, before a program or settings.
OURS = ("-n", "--ranks", "--ranks-per-node", "--spares", "--restarts", "--fault")
CUTS = {
    "submit": "daso.slurm.submit:cut",
    "memory": "daso.cli.memory:cut",
    "predict": "daso.cli.predict:cut",
}


def _cut(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part a command line into options, for argparse, and what belongs to others.

    argparse would take a program's own options, and its ``-m``, for ours, and a setting with a
    blank in it for a file.
    """
    if words and words[0] in CUTS:
        options, program = _named(CUTS[words[0]])(words[1:])
        return [words[0], *options], program
    if words[:1] == ["run"]:
        at = 1
        while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
            at += 2 if words[at] in OURS else 1
        return words[:at], tuple(words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:])
    if words[:1] == ["train"]:
        return _cut_train(words)
    return words, ()


def _cut_train(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part options from settings, ``--key=value`` or ``--key value``."""
    from daso.cli.train.config import takes_value

    ours, settings, at = words[:1], list[str](), 1
    while at < len(words):
        word, at = words[at], at + 1
        if not word.startswith("--") or word.partition("=")[0] in (*OURS, "--help", "--resume"):
            ours.append(word)
            if word in OURS and at < len(words):
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
        help="let Exchange(elastic=True) go on where a rank is killed (Open MPI 5 or later)",
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
        help="start a job that fails again, at most N times: daso train goes on where it saved",
    )
    parser.add_argument(
        "--spares",
        type=int,
        default=0,
        metavar="S",
        help="start S more ranks that wait until they take the place of a killed one",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    from daso.cli.train.config import describe

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "settings, with defaults:\n" + describe()
    _add_ranks(parser, default=1)
    _add_survival(parser)
    parser.add_argument("config", nargs="?", type=path_of, help="a TOML file with settings")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in runs/NAME"
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
            f"the program must be a script that is there, but there is no "
            f"{format_value(program[0])} in {Path.cwd()}; mend its path, or run a module with -m"
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
    from daso.cli.train.config import read_config

    config = read_config(options.config, words)
    parse_ranks_per_node(options.ranks_per_node or "")
    launched = read_launch()
    if options.ranks != 1 or options.ranks_per_node or options.spares or options.restarts:
        if launched.size > 1:
            raise ConfigError(
                f"-n, --ranks-per-node, --spares and --restarts start ranks, but "
                f"{launched.launcher} already did; leave them out, and set DASO_RANKS_PER_NODE for "
                f"pretend nodes, DASO_SPARES for spare ranks"
            )
        flags = ["--resume"] if options.resume else []
        files = [str(options.config)] if options.config else []
        again = ["-m", "daso", "train", *flags, *files, *words]
        ranks, pretend = options.ranks, options.ranks_per_node
        elastic = config.exchange.elastic
        return launch(
            Local(
                ranks=ranks,
                ranks_per_node=pretend,
                program=tuple(again),
                elastic=elastic,
                spares=options.spares,
                restarts=options.restarts,
            )
        )
    from daso.checkpoint.preemption import CHECKPOINTED
    from daso.cli.train.loop import train
    from daso.comm.mpi import finalize

    if train(config, resume=options.resume) is None:
        finalize()  # mpi4py would take this exit code for a failure, and abort the other ranks
        return CHECKPOINTED
    return 0


def _doctor(options: argparse.Namespace, _: Sequence[str]) -> int:
    from daso.cli.doctor import examine, render

    if options.nodes is not None:
        from daso.cli.algorithms import costs_of, table

        rows = costs_of(options.nodes, options.parameters, options.link)
        print(json.dumps(rows, indent=2) if options.json else table(rows))
        return 0
    found = examine()
    if _speaks():
        print(json.dumps(found, indent=2) if options.json else render(found))
    return 1 if found["problems"] else 0
