"""`daso complete`: what a shell needs to complete daso's commands, options and settings."""

import argparse
from collections.abc import Iterator, Sequence

from daso.cli.main import make_parser
from daso.cli.train.config import settings
from daso.errors import ConfigError

__all__ = ["add_parser"]

PROGRAMS = ("run", "submit", "memory", "predict")  # are followed by a program
SHELLS = ("bash", "zsh", "tcsh")


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=SHELLS, help="which shell's")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "scripts for shells are made by shtab, which is not here: pip install shtab"
        ) from error
    parser = make_parser()
    commands = dict(_commands(parser))
    for key, _default, meaning, choices in settings():
        words = choices.split(" | ") if " | " in choices else None
        # One line, and no %: it is a format for argparse.
        text = " ".join(meaning.split()).replace("%", "%%")
        commands["train"].add_argument(f"--{key}", choices=words, help=text)
    for name in PROGRAMS:
        program = commands[name].add_argument("program", nargs="*", help="what ranks run")
        vars(program)["complete"] = shtab.FILE
    script = shtab.complete(parser, options.shell)
    # Files where no word of ours fits: of options that name one, and behind the program.
    print(script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F"))
    return 0


def _commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
