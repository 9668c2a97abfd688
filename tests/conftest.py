"""Tests that need several ranks run under mpirun, with --with-mpi: tests/test_ranks.py does it."""

import signal
from pathlib import Path

RANKS = ("ranks", "test_contract.py")


def pytest_configure() -> None:
    # A shell that starts us in the background ignores Ctrl-C, and so would every job of ours.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    if collection_path.name in RANKS and not config.getoption("--with-mpi", default=False):
        return True  # tests/test_ranks.py starts them; skipped lines would hide real skips
    return None
