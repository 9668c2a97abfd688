"""Ways to cut a world into pretend nodes, for tests on ranks."""

import pytest
from mpi4py import MPI

__all__ = ["SHAPES", "whatever_the_nodes"]

# By ranks: one node, one rank each, equal, unequal.
SHAPES = {
    1: [(1,)],
    2: [(2,), (1, 1)],
    3: [(3,), (1, 1, 1), (2, 1), (1, 2)],
    4: [(4,), (1, 1, 1, 1), (2, 2), (3, 1)],
}

# For tests that take all ranks alike: once instead of for every shape.
whatever_the_nodes = pytest.mark.parametrize(
    "topology", SHAPES[MPI.COMM_WORLD.Get_size()][-1:], indirect=True, ids=str
)
