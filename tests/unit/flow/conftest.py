"""What every test of flows in a world of one rank is given."""

from contextlib import closing

import pytest
import torch
from flows import sgd
from mpi4py import MPI

import daso
from daso.flow import Runtime


@pytest.fixture(scope="package")
def running():
    """Runtimes in a world of this rank only, closed whatever happens."""
    alone = daso.Topology(MPI.COMM_SELF)

    def start(graph, make=None, **keywords):
        return closing(Runtime(graph, make or sgd, topology=alone, **keywords))

    yield start
    alone.free()


@pytest.fixture(scope="package", autouse=True)
def _warned():
    # What torch warns of once in a process would fail one test, whichever comes first.
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)
