"""The largest of every rank's numbers, asked for now and read some batches later."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import sum_buffer
from daso.comm.mpi import load
from daso.comm.node import wait_until
from daso.comm.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Vote"]


class Vote:
    """Elementwise maxima over all ranks, one at a time, called by the training thread.

    Args:
        topology: Whose world; a communicator of its own is made.
        stall_seconds: How long `result` waits at most.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Topology, stall_seconds: float) -> None:
        self.comm, self._roll = topology.world.Dup(), topology.roll
        self._stall_seconds = stall_seconds
        self._request: MPI.Request | None = None
        self._row = torch.zeros(0, dtype=torch.float64)

    def start(self, numbers: Sequence[float]) -> None:
        """Ask. Collective over the world; non-blocking."""
        assert self._request is None, "one vote at a time"
        self._row = torch.tensor(numbers, dtype=torch.float64)
        self._request = self.comm.Iallreduce(load().IN_PLACE, sum_buffer(self._row), op=load().MAX)

    def result(self) -> list[float]:
        """Return the maxima, and wait where they are not there yet.

        Raises:
            StallError: They did not come within the stall limit.
        """
        assert self._request is not None, "nothing was asked"
        # After a stall the request stays, for MPI may still write to its row.
        wait_until(self._request.Test, self._roll.missing, self._stall_seconds, self._roll.answer)
        self._request = None
        return self._row.tolist()

    def free(self) -> None:
        """Give the communicator back. Collective over the world; blocking; idempotent."""
        if self._request is not None:
            self.result()
        if self.comm != load().COMM_NULL:
            self.comm.Free()
