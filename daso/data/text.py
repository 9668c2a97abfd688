"""Windows over bytes of text; by default over the source of Python's standard library."""

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset

from daso.errors import ConfigError, DataError

_SUFFIXES = {".md", ".py", ".txt"}

# Two machines with the same Python must read the same bytes: no tests and packages that a
# distribution may leave out or package separately, and no files that a machine generates.
_OPTIONAL = {
    "__pycache__",
    "dist-packages",
    "distutils",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "venv",
}
_GENERATED = ("_sysconfigdata", "sitecustomize", "usercustomize")


class ByteWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Consecutive windows of a byte string; the target of a byte is the next byte.

    Args:
        data: The bytes; those after the last full window are left out.
        context: Bytes of one window.

    Raises:
        ConfigError: The context is below 1, or the data too short for one window.
    """

    def __init__(self, data: bytes | bytearray, context: int) -> None:
        if context < 1:
            raise ConfigError(
                f"context is a number of bytes, at least 1, not {context}; raise it",
                code="context-too-small",
            )
        if len(data) <= context:
            raise ConfigError(
                f"a window of context {context} needs {context + 1} bytes of text and this split "
                f"has {len(data)}; lower context, raise max_bytes or add text",
                code="text-too-short",
            )
        self._bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The range raises IndexError after the last window; a slice of a tensor would not.
        begin = range(len(self))[index] * self._context
        window = self._bytes[begin : begin + self._context + 1].long()
        return window[:-1], window[1:]


def load_text(
    folder: Path | str | None = None,
    *,
    train: bool,
    context: int,
    max_bytes: int | None = None,
) -> ByteWindows:
    """Load one split of a text as windows of bytes, to learn to predict the next byte.

    Args:
        folder: Folder whose .md, .py and .txt files, subfolders included, are joined in the order
            of their paths; None: the modules of Python's standard library.
        train: The train split, or else the test split: the last 10 % of the bytes.
        context: Bytes of one window.
        max_bytes: Read no more bytes than this, both splits together; None reads all.

    Returns:
        Windows of inputs and targets, int64 (context,) each, with values 0..255.

    Raises:
        DataError: The folder has no text.
        ConfigError: The context or the number of bytes is too small for one window.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ConfigError(
            f"max_bytes is at least 1, or None for all, not {max_bytes}; raise it",
            code="max-bytes-too-small",
        )
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    files = _library(root) if folder is None else _texts(root)
    data = _join(sorted(files, key=lambda path: path.relative_to(root).as_posix()), max_bytes)
    if not data:
        raise DataError(
            f"a text needs files named .md, .py or .txt, and {root} has none with content; "
            "name a folder that has some, or none to read Python's own source",
            code="no-text-files",
        )
    cut = len(data) * 9 // 10
    return ByteWindows(data[:cut] if train else data[cut:], context)


def find_text(folder: Path | str) -> Path | None:
    """Return the folder if it contains text that `load_text` reads, else None."""
    return Path(folder) if any(_texts(Path(folder))) else None


def _texts(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())


def _library(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*.py"):
        if not path.stem.startswith(_GENERATED):
            yield path
    for init in folder.glob("*/__init__.py"):
        if init.parent.name not in _OPTIONAL:
            yield from _library(init.parent)


def _join(files: Iterable[Path], max_bytes: int | None) -> bytearray:
    data = bytearray()
    for path in files:
        if max_bytes is not None and len(data) >= max_bytes:
            break
        try:
            with path.open("rb") as file:
                data += file.read(-1 if max_bytes is None else max_bytes - len(data))
        except OSError as error:
            raise DataError(
                f"a text must be readable, but {path}: {error.strerror}; change its mode, or name "
                f"another folder",
                code="text-not-readable",
            ) from error
    return data
