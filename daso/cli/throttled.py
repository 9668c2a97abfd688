"""`daso predict --throttle`: starts a program on this machine slowed down. Nothing heavy here."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from daso.cli.launch import shell_code, signals_to
from daso.cli.main import OURS
from daso.errors import ConfigError
from daso.predict.throttle_file import read_throttle_file
from daso.processes import end_with_parent

__all__ = ["run_throttled", "with_runner"]

RUNNER = "daso.predict.run_throttled"
PYTHON = re.compile(r"python[\d.]*")
PROGRAM = re.compile(r"-([bBdEhiIOPqRsSuvVx?]*)([cm])")  # flags, and what comes next is it
VALUED = {"-W", "-X", "--check-hash-based-pycs"}  # options of Python with a word of their own


def run_throttled(path: Path, program: Sequence[str]) -> int:
    """Run a program throttled as a file says; return its exit code."""
    read_throttle_file(path)  # what is wrong with it is said before anything starts
    command = with_runner(program, str(path.resolve()))
    sys.stdout.flush()
    try:
        process = subprocess.Popen(command, preexec_fn=end_with_parent)  # noqa: PLW1509 - no threads
    except OSError as error:
        raise ConfigError(
            f"the program must start, but {command[0]!r} does not: {error.strerror}; mend its name"
        ) from error
    with signals_to(process):  # Ctrl-C it gets itself, and may save
        return shell_code(process.wait())


def with_runner(words: Sequence[str], plan: str) -> list[str]:
    """Return a command with the runner before the program of its Python, or of ``daso run``."""
    at = _place(words)
    if words[at].startswith("-m") and words[at] != "-m":  # as Python takes it too
        words = [*words[:at], "-m", words[at][2:], *words[at + 1 :]]
    return [*words[:at], "-m", RUNNER, plan, *words[at:]]


def _place(words: Sequence[str]) -> int:
    """Return where the words of the program begin."""
    for at, word in enumerate(words):
        name = Path(word).name
        if name == "daso" and words[at + 1 : at + 2] == ["run"]:
            return _behind_options(words, at + 2, {*OURS})
        if PYTHON.fullmatch(name):
            begin = _behind_options(words, at + 1, VALUED)
            if list(words[begin : begin + 3]) == ["-m", "daso", "run"]:
                return _behind_options(words, begin + 3, {*OURS})
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
                f"-m must be an option of its own in a throttled program, not part of "
                f"{words[at]!r}; write -{program[1]} -m"
            )
        if program:
            break
        at += 2 if words[at] in valued else 1
    at += words[at : at + 1] == ["--"]
    if at >= len(words):
        raise ConfigError(
            f"a program must follow the options, but {' '.join(words)!r} ends with them; add it"
        )
    return at
