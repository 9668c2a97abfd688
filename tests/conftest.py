"""Tests that need several ranks live in tests/ranks and tests/train, under mpirun, --with-mpi."""

from pathlib import Path

RANKS = ("ranks", "train")


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    if collection_path.name in RANKS and not config.getoption("--with-mpi", default=False):
        return True  # tests/test_ranks.py starts them; skipped lines would hide real skips
    return None
