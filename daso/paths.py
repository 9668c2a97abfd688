"""Paths from the command line and from files: ``~`` expanded, existence checked."""

import os
from pathlib import Path


def expand_home(word: str) -> str:
    """Replace a leading ~ by the user's folder; shells do not after "=" or in files."""
    return os.path.expanduser(word)  # noqa: PTH111 - a Path would change docker://image


def is_file(path: Path) -> bool:
    """Return whether a file exists and this user may see it."""
    try:
        return path.is_file()
    except OSError:
        return False


def path_of(word: str) -> Path:
    """Return the path of a word from the command line."""
    return Path(expand_home(word))
