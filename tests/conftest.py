"""What every test of this project stands on; which tests run when: support/tiers.py."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import settings

# As scripts/test has it: with more threads torch adds in another order, and bits differ.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each of many processes would compile daso and the tests of a job again.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    sys.dont_write_bytecode = False

HERE = Path(__file__).parent
# Of processes that tests start; see support/startup/sitecustomize.py.
STARTUP = (str(HERE / "support" / "startup"), os.environ.get("PYTHONPATH", ""))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(STARTUP)))

pytest_plugins = ["worlds", "tiers"]


def pytest_configure() -> None:
    settings.register_profile("daso", deadline=None)  # no measure of speed, on any machine
    settings.load_profile("daso")
    # A shell that starts us in the background ignores Ctrl-C, and so would every job of ours.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config) -> bool | None:
    """Leave tests for ranks to mpirun, which tests/commands/test_ranks.py calls."""
    with_mpi = config.getoption("--with-mpi", default=False)
    if collection_path == HERE / "ranks" and not with_mpi:
        return True
    return None
