"""Short messages between any two ranks that nobody has to wait for: a few numbers and a tag."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import sum_buffer
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ControlChannel"]

NUMBERS = 4  # of each note, unless it is told


class ControlChannel:
    """One rank's notes to others; not to be called by two threads at once.

    Args:
        make_comm: Makes a communicator of its own over all ranks, as ``world.Dup`` does.
        numbers: Of each note.

    Collective over the world; blocking.
    """

    def __init__(self, make_comm: "Callable[[], MPI.Comm]", numbers: int = NUMBERS) -> None:
        self.comm, self._numbers = make_comm(), numbers
        self.rank: int = self.comm.Get_rank()
        self.others = [rank for rank in range(self.comm.Get_size()) if rank != self.rank]
        self._sending: list[tuple[MPI.Request, torch.Tensor]] = []
        self._sent = torch.zeros(self.comm.Get_size(), dtype=torch.int64, device="cpu")  # by rank
        self._received = torch.zeros_like(self._sent)

    def send(self, rank: int, tag: int, *numbers: int) -> None:
        """Send a control message. Does not block."""
        row = torch.tensor([*numbers, *[0] * (self._numbers - len(numbers))], device="cpu")
        self._sending.append((self.comm.Isend(sum_buffer(row), rank, tag), row))
        self._sent[rank] += 1
        # Last, for it raises where an earlier note met a lost connection.
        self._sending = [one for one in self._sending if not one[0].Test()]

    def arrived(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Receive the notes that are here. Does not block."""
        status = load().Status()
        while self.comm.Iprobe(status=status):
            source, tag = status.Get_source(), status.Get_tag()
            row = torch.empty(self._numbers, dtype=torch.int64, device="cpu")
            self.comm.Recv(sum_buffer(row), source, tag)
            self._received[source] += 1
            yield source, tag, row.tolist()

    def free(self) -> None:
        """Receive what nobody read, and give the communicator back.

        MPI gives the number of a freed communicator to the next that is made. A note that is still
        on its way would be received there, in the middle of an exchange.

        Collective over the world; blocking; idempotent.
        """
        mpi = load()
        if self.comm == mpi.COMM_NULL:
            return
        expected = torch.empty_like(self._sent)
        self.comm.Alltoall(sum_buffer(self._sent), sum_buffer(expected))
        while not torch.equal(self._received, expected):
            for _ in self.arrived():
                pass
        mpi.Request.Waitall([request for request, _ in self._sending])
        self.comm.Free()
