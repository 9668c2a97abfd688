"""Output of a run: log.jsonl, summary.json, progress and the closing table."""

import fcntl
import itertools
import logging
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from daso.environment import terminal_columns
from daso.errors import ConfigError
from daso.strict import strict_json
from daso.version import __version__

logger = logging.getLogger("daso")

SCHEMA = 1  # of log.jsonl; raised when a field changes its meaning


def versions(mpi: str) -> dict[str, str]:
    """Return the versions that a result depends on."""
    import torch  # here, as parsing a command must be quick; its __version__ names the build

    installed = {name: version(name) for name in ("mpi4py", "numpy")}
    return {
        "python": platform.python_version(),
        "mpi": mpi,
        "torch": str(torch.__version__),
        "daso": __version__,
        **installed,
        **commit_of(Path(__file__).parent),
    }


def commit_of(folder: Path) -> dict[str, str]:
    """Return the commit of a checkout as ``commit``; empty outside a checkout."""
    git = ["git", "-C", str(folder)]
    try:
        if not _output([*git, "ls-files", "."]):  # installed into an environment in a checkout
            return {}
        return {"commit": _output([*git, "describe", "--always", "--dirty", "--abbrev=12"])}
    except (OSError, subprocess.SubprocessError):  # no git, or no checkout
        return {}


def _output(words: Sequence[str]) -> str:
    process = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
    return process.stdout.strip()


class RunFolder:
    """The folder of one run; only world rank 0 makes one.

    Args:
        path: The folder, created with its parents. The folder of an earlier run is renamed.
        tensorboard: Write TensorBoard files of the same numbers.
        resume: Continue the files of an interrupted run instead.

    Raises:
        ConfigError: The folder cannot be written, or TensorBoard is not installed.
    """

    def __init__(self, path: Path, *, tensorboard: bool = False, resume: bool = False) -> None:
        self.path, self._whole = path, True
        writer = _find_tensorboard() if tensorboard else None  # before a folder is renamed
        try:
            if not resume:
                _keep_earlier(path)
            path.mkdir(parents=True, exist_ok=True)
            self._log = _open_log(path / "log.jsonl")
            self._board = None if writer is None else self._open_board(writer)
            (path / "summary.json").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the run folder must be writable, but {path}: {error.strerror}; choose another "
                f"with --runs=FOLDER",
                code="run-folder-not-writable",
            ) from error

    def _open_board(self, writer: Any) -> Any:
        try:
            (self.path / "tensorboard").mkdir(exist_ok=True)
            return writer(str(self.path / "tensorboard"))
        except BaseException:
            self._log.close()
            raise

    def event(self, kind: str, **what: object) -> None:
        """Write an event as a line of JSON; log the first failure, and continue."""
        line = {"schema": SCHEMA, "time": time.time(), "event": kind, **what}
        with self._noted():
            self._log.write(strict_json(line) + "\n")
            self._log.flush()
        if self._board is not None and "step" in what:
            for key, value in what.items():
                if isinstance(value, float):
                    with self._noted():
                        self._board.add_scalar(key, value, what["step"])

    def summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json atomically; print it if that fails."""
        text, part = strict_json(summary, indent=2) + "\n", self.path / "summary.json.part"
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / "summary.json")
        except OSError as error:
            self._note(error)
            print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close the files; idempotent."""
        with self._noted():
            self._log.close()
        if self._board is not None:
            with self._noted():
                self._board.close()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Log the first failed write inside the context instead of raising it."""
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: of a file that is closed
            self._note(error)

    def _note(self, error: Exception) -> None:
        if self._whole:
            self._whole = False
            why = getattr(error, "strerror", None) or error
            logger.warning("%s: %s; training continues without its log", self.path, why)


def _keep_earlier(path: Path) -> None:
    """Rename the folder of an earlier run, and log the new name."""
    log = path / "log.jsonl"
    if not log.exists() or not log.stat().st_size:
        return
    _open_log(log).close()  # raises if another process writes to it
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(1))
    renamed = next(name for name in names if not name.exists())
    path.rename(renamed)
    logger.warning("%s held an earlier run, which is %s now", path, renamed)


def _open_log(path: Path) -> TextIO:
    """Open a run's log with an exclusive lock until it is closed."""
    log = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        log.close()
        raise ConfigError(
            f"one run at a time may write to a run folder, but another writes to {path}; choose "
            f"another --name=NAME, or wait for it",
            code="run-folder-in-use",
        ) from error
    except OSError:  # a file system without locks
        pass
    # A killed run may leave half a line.
    log.truncate(path.read_bytes().rfind(b"\n") + 1)
    return log


def _find_tensorboard() -> Any:
    """Return TensorBoard's writer; raise if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard=true needs the tensorboard package; `pip install tensorboard`",
            code="tensorboard-not-installed",
        ) from error
    return SummaryWriter


class Progress(AbstractContextManager["Progress"]):
    """Shows the progress of a run: a bar on a terminal with rich installed, else plain lines.

    Args:
        steps: Total number of steps.
        shown: False on all ranks but one.
    """

    def __init__(self, steps: int, *, shown: bool) -> None:
        self.shown = shown
        columns = terminal_columns() if shown else None
        self._bar = _open_bar(columns) if columns is not None else None
        self._task = self._bar.add_task("training", total=steps) if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, steps: int = 1) -> None:
        """Advance by ``steps``."""
        if self._bar is not None:
            self._bar.advance(self._task, steps)

    def until(self, steps: int) -> None:
        """Set the total number of steps, which changes if ranks are lost."""
        if self._bar is not None:
            self._bar.update(self._task, total=steps)

    def line(self, text: str) -> None:
        """Show a line, above the bar if any."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self.shown:
            print(text, flush=True)


def _open_bar(columns: int) -> Any:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    parts = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    ]
    return Bar(*parts, console=Console(force_terminal=True, width=columns))


def _restored(summary: dict[str, Any]) -> str:
    if summary["step_restoration"] == "none":
        return "as given"
    return f"times {summary['gain']:.2f} between exchanges (measured, to restore the mean step)"


def closing_table(summary: dict[str, Any], folder: Path | None = None) -> str:
    """Return the summary's main figures as aligned lines."""
    rows = [
        ("data", summary["data"]),
        ("ranks, nodes", f"{summary['world']} ranks on {summary['nodes']} nodes"),
        ("steps", f"{summary['steps']} in {summary['epochs']} epochs"),
        ("time", f"{summary['seconds']:.1f} s, {summary['samples_per_second']:.0f} samples/s"),
        ("test accuracy", f"{summary['test_accuracy']:.4f}"),
        ("global exchanges", str(summary["exchanges"])),
        ("sent between nodes", f"{summary['global_bytes_sent'] / 1e6:.1f} MB by all ranks"),
        ("batches per exchange", f"{summary['skip_history'][-1][1]}: {summary['skip_because']}"),
        ("learning rate", _restored(summary)),
        ("exposed", f"{summary['exposed_seconds']:.2f} s waiting for other ranks (worst rank)"),
        ("ranks identical", "yes, bit for bit" if summary["identical"] else "NO"),
    ]
    if folder is not None:
        rows.append(("written to", f"{folder}/"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)
