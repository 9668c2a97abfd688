"""Tests that need several ranks live in tests/ranks and run under mpirun, with --with-mpi."""

from pathlib import Path


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    if collection_path.name == "ranks" and not config.getoption("--with-mpi", default=False):
        return True  # tests/test_ranks.py starts them; skipped lines would hide real skips
    return None
