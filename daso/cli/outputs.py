"""Output of commands: standard output, and the files that options name."""

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from daso.errors import ConfigError

STDOUT = 1
PICTURES = (".png", ".pdf", ".svg")  # kinds of files that matplotlib writes


def exit_on_broken_pipe(act: Callable[[], int]) -> int:
    """Call `act`; exit silently, as by SIGPIPE, if the reader of the output has left (``| head``).

    Args:
        act: Returns an exit code.
    """
    try:
        try:
            code = act()
        except SystemExit:  # from a parser that printed its help
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # a failure at interpreter exit would print a traceback
        return code  # noqa: TRY300 - flushing may fail
    except BrokenPipeError:
        if _has_reader() or _is_one_of_several_ranks():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for output still to be flushed
        return 128 + signal.SIGPIPE


def _is_one_of_several_ranks() -> bool:
    """Return whether this process is one of several ranks, which must all end with it."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and mpi.COMM_WORLD.Get_size() > 1


def _has_reader() -> bool:
    """Return whether standard output still has a reader."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def may_write(json_path: Path | None, plot: Path | None) -> None:
    """Raise `ConfigError` early if an output file could not be written at the end."""
    for path in (json_path, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise ConfigError(
                f"a file must lie in an existing folder, not {path}; make it, or name another",
                code="no-folder-for-file",
            )
        if path is not None and path.is_dir():
            raise ConfigError(
                f"a file must be writable, but {path} is a folder; choose another",
                code="file-is-a-folder",
            )
    if plot is not None:
        if plot.suffix not in PICTURES:
            raise ConfigError(
                f"--plot must end in {', '.join(PICTURES)}, not {plot}",
                code="unknown-picture-format",
            )
        if find_spec("matplotlib") is None:
            raise ConfigError(
                "--plot needs matplotlib; `pip install matplotlib`", code="matplotlib-not-installed"
            )


def write_file(path: Path, text: str) -> None:
    """Write a file; raise `ConfigError` if it cannot be written."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn `OSError` of writing a file into `ConfigError`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"a file must be writable, but {path}: {error.strerror}; choose another",
            code="file-not-writable",
        ) from error
