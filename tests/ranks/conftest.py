"""Every rank gives the same verdict; every world size runs the same bodies on every node shape."""

import os
import tempfile
from pathlib import Path

import pytest
from mpi4py import MPI
from shapes import SHAPES

from daso.comm.topology import Topology

WORLD = MPI.COMM_WORLD

# Each rank has a folder for its temporary files: pytest deletes what earlier runs left, and two
# ranks that delete the same folder fail.
_FILES = Path(tempfile.gettempdir()) / f"daso-tests-{os.getuid()}-rank-{WORLD.Get_rank()}"
_FILES.mkdir(exist_ok=True)
os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_FILES)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    if WORLD.Get_rank() > 0:  # one voice
        config.option.verbose = -2
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: PTH123, SIM115


@pytest.fixture(scope="session", params=SHAPES[WORLD.Get_size()], ids=str)
def topology(request):
    made = Topology(ranks_per_node=request.param)
    yield made
    made.free()


@pytest.fixture
def place(topology):
    return topology.place


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    error = None
    try:
        yield
    except BaseException as caught:
        error = caught
    verdicts = WORLD.allgather(None if error is None else repr(error)[:500])
    if error is not None:
        raise error
    others = {rank: verdict for rank, verdict in enumerate(verdicts) if verdict is not None}
    if others:
        pytest.fail(f"failed on other ranks: {others}", pytrace=False)
