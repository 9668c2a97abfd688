"""What a command prints, and files that it is asked to write."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from daso.errors import ConfigError

__all__ = ["exit_on_broken_pipe", "may_write", "write_file", "writing"]

STDOUT = 1
PICTURES = (".png", ".pdf", ".svg")  # kinds of files that matplotlib writes


def exit_on_broken_pipe(act: Callable[[], int]) -> int:
    """Act; end as by SIGPIPE, without a word, where who reads what is printed left (``| head``).

    Args:
        act: Returns an exit code.
    """
    try:
        try:
            code = act()
        except SystemExit:  # of a parser, that has printed its help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a failure at the interpreter's end would be told
        return code  # noqa: TRY300 - what is flushed may fail
    except BrokenPipeError:
        if _has_reader() or _is_one_of_several_ranks():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # of what is still to be flushed
        return 128 + signal.SIGPIPE


def _is_one_of_several_ranks() -> bool:
    """Tell whether this is one of several ranks: all are to end when one does."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.COMM_WORLD.Get_size() > 1


def _has_reader() -> bool:
    """Tell whether somebody has the other end of what is printed to."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def may_write(json_path: Path | None, plot: Path | None) -> None:
    """Raise now what would go wrong when all is computed."""
    for path in (json_path, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(f"a file must lie in a folder that is there, not {path}")
        if path is not None and path.is_dir():
            raise ConfigError(f"a file must be writable, but {path} is a folder; choose another")
    if plot is not None:
        if plot.suffix not in PICTURES:
            raise ConfigError(f"--plot must end in {', '.join(PICTURES)}, not {plot}")
        if find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib; `pip install matplotlib`")


def write_file(path: Path, text: str) -> None:
    """Write a file, or raise what is wrong with it."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise what is wrong with a file that is written inside."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"a file must be writable, but {path}: {error.strerror}; choose another"
        ) from error
