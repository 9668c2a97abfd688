"""`daso complete`: shell completion of daso's commands, options and settings."""

import argparse
from collections.abc import Iterator, Sequence

from daso.cli.main import make_parser
from daso.cli.train.keys import settings
from daso.errors import ConfigError

PROGRAMS = ("run", "submit", "memory", "predict")  # commands that a program follows
SHELLS = ("bash", "zsh", "tcsh")


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("shell", choices=SHELLS, help="shell to complete for")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the script."""
    try:
        import shtab
    except ImportError as error:
        raise ConfigError(
            "shell completion needs shtab, which is not installed; `pip install shtab` brings it",
            code="shtab-not-installed",
        ) from error
    parser = make_parser()
    commands = dict(_commands(parser))
    for key, _default, meaning, choices in settings():
        words = choices.split(" | ") if " | " in choices else None
        # One line, and no %: it is a format for argparse.
        text = " ".join(meaning.split()).replace("%", "%%")
        commands["train"].add_argument(f"--{key}", choices=words, help=text)
    for name in PROGRAMS:
        program = commands[name].add_argument("program", nargs="*", help="program of the ranks")
        vars(program)["complete"] = shtab.FILE
    script = shtab.complete(parser, options.shell)
    # Complete files as well: values of options that name a file, and arguments of the program.
    print(script.replace("complete -o bashdefault -F", "complete -o bashdefault -o default -F"))
    return 0


def _commands(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
