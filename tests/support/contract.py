"""What test_contract.py stands on: one cut into nodes per world size, and a count of its points.

A plugin, not a conftest: beside it lie tests that need no ranks.
"""

import re
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from doors import DOORS, INNERS
from mpi4py import MPI

import daso

POINT = re.compile(r"test_contract\.py::test_(\d\d)_")


@pytest.fixture(scope="session")
def topology(request):
    made = daso.init(ranks_per_node=request.param)  # which copies look for
    yield made
    made.free()


@pytest.fixture(scope="session")
def alone():
    """A world of this rank only."""
    made = daso.Topology(MPI.COMM_SELF)
    yield made
    made.free()


@pytest.fixture
def folder(topology):
    """One folder for all ranks; pytest's own are swept away by ranks that end sooner."""
    made = tempfile.mkdtemp(prefix="daso-") if topology.rank == 0 else None
    path = Path(topology.world_comm.bcast(made))
    yield path
    topology.world_comm.Barrier()
    if made is not None:
        shutil.rmtree(path, ignore_errors=True)  # a store may be removing its file


@pytest.fixture(params=DOORS, ids=lambda door: door.name)
def door(request):
    return request.param


@pytest.fixture(params=INNERS.values(), ids=INNERS.keys())
def make(request):
    return request.param


def pytest_terminal_summary(terminalreporter):
    """Say how many points hold: all tests of theirs passed."""
    verdicts = defaultdict(set)
    for verdict in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(verdict, []):
            if found := POINT.search(report.nodeid):
                verdicts[found[1]].add(verdict)
    held = [point for point, said in verdicts.items() if said == {"passed"}]
    terminalreporter.write_line(f"contract: {len(held)} points hold")
