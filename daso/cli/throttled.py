"""`daso predict --throttle`: starts a program on this machine slowed down."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from daso.cli.launch import shell_code, signals_to
from daso.cli.main import VALUE_OPTIONS
from daso.errors import ConfigError
from daso.predict.throttle_plan import read_throttle_file
from daso.processes import end_with_parent

RUNNER = "daso.predict.run_throttled"
PYTHON = re.compile(r"python[\d.]*")
PROGRAM = re.compile(r"-([bBdEhiIOPqRsSuvVx?]*)([cm])")  # flags; the next word is the program
VALUED = {"-W", "-X", "--check-hash-based-pycs"}  # options of Python with a separate value


def run_throttled(path: Path, program: Sequence[str]) -> int:
    """Run a program throttled by a plan file; return its exit code."""
    read_throttle_file(path)  # raises before anything starts
    command = with_runner(program, str(path.resolve()))
    sys.stdout.flush()
    try:
        process = subprocess.Popen(command, preexec_fn=end_with_parent)  # noqa: PLW1509 - no threads
    except OSError as error:
        raise ConfigError(
            f"the program must start, but {command[0]!r} does not: {error.strerror}; mend its name"
        ) from error
    with signals_to(process):  # the program gets Ctrl-C from the terminal, and may save
        return shell_code(process.wait())


def with_runner(words: Sequence[str], plan: str) -> list[str]:
    """Return a command with the runner inserted before the program of Python or ``daso run``."""
    at = _place(words)
    if words[at].startswith("-m") and words[at] != "-m":  # Python accepts this form too
        words = [*words[:at], "-m", words[at][2:], *words[at + 1 :]]
    return [*words[:at], "-m", RUNNER, plan, *words[at:]]


def _place(words: Sequence[str]) -> int:
    """Return the index of the first word of the program."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name == "daso" and list(words[at + 1 : at + 2]) == ["run"]:
            return _behind_options(words, at + 2, {*VALUE_OPTIONS})
        if PYTHON.fullmatch(name):
            begin = _behind_options(words, at + 1, VALUED)
            if list(words[begin : begin + 3]) == ["-m", "daso", "run"]:
                return _behind_options(words, begin + 3, {*VALUE_OPTIONS})
            return begin
    raise ConfigError(
        f"a program must follow that Python or `daso run` starts, as in `daso predict --throttle "
        f"plan.toml -- python train.py`, not {' '.join(words) or 'nothing'!r}; write it so"
    )


def _behind_options(words: Sequence[str], at: int, valued: set[str]) -> int:
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        program = PROGRAM.match(words[at])
        if program and program[2] == "c":
            raise ConfigError(
                "a throttled program must be a file or a module (-m), not words after -c; write "
                "them to a file"
            )
        if program and program[1]:
            raise ConfigError(
                f"-m must be a separate option in a throttled program, not part of "
                f"{words[at]!r}; write -{program[1]} -m"
            )
        if program:
            break
        at += 2 if words[at] in valued else 1
    at += list(words[at : at + 1]) == ["--"]
    if at >= len(words):
        raise ConfigError(
            f"a program must follow the options, but {' '.join(words)!r} ends with them; add it"
        )
    return at
