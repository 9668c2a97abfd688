"""Memory that all ranks of a node see: an MPI shared window as torch tensors."""

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from daso.comm.mpi import load
from daso.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SharedWindow", "free_bytes"]

ALIGN = 64  # bytes: a cache line
PLACE = "/dev/shm"


class SharedWindow:
    """One segment of shared memory for each rank of a node.

    Tensors made from it must not be used after `free`.

    Args:
        node: Communicator of the node.
        nbytes: Size of this rank's segment; may differ between ranks.

    Collective over the node; blocking.
    """

    def __init__(self, node: "MPI.Comm", nbytes: int) -> None:
        mpi = load()
        self._window: MPI.Win | None = None
        self.segments: list[torch.Tensor] = []
        if node.Get_size() == 1:
            # Pages of its own, which MPI would not give a single rank: they may be pinned.
            self.segments = [torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)]
            return
        self._check_room(node, max(nbytes, ALIGN))
        try:
            self._window = mpi.Win.Allocate_shared(max(nbytes, ALIGN), 1, comm=node)
        except mpi.Exception as error:
            raise _scarce(nbytes, f"MPI gave none: {error}") from error
        # MPI_Win_sync, the memory barrier used below, is legal only inside an access epoch.
        self._window.Lock_all()
        self.segments = [self._segment(rank) for rank in range(node.Get_size())]
        self.segments[node.Get_rank()].zero_()
        node.Barrier()

    def _check_room(self, node: "MPI.Comm", nbytes: int) -> None:
        """Refuse what does not fit: MPI makes a file of any size, and who writes to it dies.

        Collective over the node; blocking.
        """
        needed, there = node.allreduce(nbytes), node.bcast(free_bytes())
        if there is not None and needed > there:
            raise _scarce(nbytes, f"{needed} in all are more than the {there} that are free")

    def _segment(self, rank: int) -> torch.Tensor:
        assert self._window is not None
        memory, _ = self._window.Shared_query(rank)
        return torch.from_numpy(np.asarray(memory).view(np.uint8))

    def sync(self) -> None:
        """Make earlier writes of this rank visible and later reads fresh. Does not block."""
        assert self.segments, "used after free"
        if self._window is not None:
            self._window.Sync()

    def free(self) -> None:
        """Give the memory back. Collective over the node; blocking; idempotent."""
        self.segments = []
        if self._window is None:
            return
        self._window.Unlock_all()
        self._window.Free()
        self._window = None


def free_bytes() -> int | None:
    """Return the bytes of shared memory that this host has left; None where nothing tells."""
    try:
        found = os.statvfs(PLACE)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def _scarce(nbytes: int, why: str) -> TopologyError:
    return TopologyError(
        f"a node needs {nbytes} bytes of shared memory per rank, but {why}; enlarge {PLACE} "
        f"(containers: --shm-size) or use fewer ranks per node"
    )
