"""Whether MPI itself reads and writes the memory of CUDA devices."""

import ctypes
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import byte_buffer
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["cuda_aware", "memory_problem"]

NUMBERS = 1 << 14  # that are sent on trial: more than what crosses in one eager message
TAG = 9


def cuda_aware() -> bool | None:
    """Return what the loaded MPI library says of itself; None where it cannot be asked."""
    # Its names are not global, but found through what was linked with it.
    query = getattr(ctypes.CDLL(load().__file__), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


def memory_problem(comm: "MPI.Comm", device: torch.device) -> str | None:
    """Return why MPI cannot send from and receive in ``device``'s memory; None if it can.

    What the library says is tried: every rank sends a row around. A library that says so and is
    not able to may end the process here.

    Args:
        comm: Communicator to try it on.
        device: Where this rank's parameters live.

    Collective over ``comm``; blocking.
    """
    remedy = "take Exchange(memory='host'), or an MPI that was built with CUDA and where it is on"
    if device.type != "cuda":
        return f"Exchange(memory='device') needs parameters on a CUDA device, not on {device}"
    says = cuda_aware()
    if not all(comm.allgather(bool(says))):
        word = {True: "does so here but not everywhere", False: "says no", None: "does not say"}
        return (
            f"Exchange(memory='device') needs an MPI library that reads and writes the memory of "
            f"CUDA devices (MPIX_Query_cuda_support), but this one {word[says]}; {remedy}"
        )
    rank, size = comm.Get_rank(), comm.Get_size()
    sent = torch.arange(rank, rank + NUMBERS, dtype=torch.float32, device=device)
    found = torch.full_like(sent, -1)
    torch.cuda.synchronize(device)
    comm.Sendrecv(
        *(byte_buffer(sent), (rank + 1) % size, TAG),
        *(byte_buffer(found), (rank - 1) % size, TAG),
    )
    expected = torch.arange(NUMBERS, dtype=torch.float32, device="cpu") + (rank - 1) % size
    if torch.equal(found.cpu(), expected):
        return None
    return (
        f"this MPI library says that it reads and writes the memory of CUDA devices, but a row "
        f"sent from one arrived as something else; {remedy}"
    )
