"""Whether MPI itself reads and writes the memory of CUDA devices."""

import ctypes
from typing import TYPE_CHECKING

import torch

from daso.comm.device.staging import DeviceStaging
from daso.comm.dtypes import device_buffer
from daso.comm.engine import Work
from daso.comm.mpi import load

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["cuda_aware", "library_problem", "trial"]

NUMBERS = 1 << 14  # that are sent on trial: more than what crosses in one eager message
TAG = 9
REMEDY = "leave gpu_direct out, or take an MPI library with CUDA built in and switched on"


def cuda_aware() -> bool | None:
    """Return what the loaded MPI library says of itself; None where it cannot be asked.

    Open MPI and MPICH can (``MPIX_Query_cuda_support``).
    """
    # Its names are not global, but found through what was linked with it.
    query = getattr(ctypes.CDLL(load().__file__), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


def library_problem(world: "MPI.Comm", device: torch.device) -> str | None:
    """Return why MPI will not send from ``device``'s memory, by its own word; None if it will.

    Collective over ``world``; blocking.
    """
    if device.type != "cuda":
        return f"Exchange(gpu_direct=True) needs parameters on a CUDA device, not on {device}"
    says = cuda_aware()
    if all(world.allgather(bool(says))):
        return None
    word = {True: "does so here but not everywhere", False: "says no", None: "does not say"}
    return (
        f"Exchange(gpu_direct=True) needs an MPI library that reads and writes the memory of CUDA "
        f"devices (MPIX_Query_cuda_support), but this one {word[says]}; {REMEDY}"
    )


def trial(comm: "MPI.Comm", device: torch.device, copies: DeviceStaging) -> Work[str | None]:
    """Let every rank send a row from its device to the next; return what is wrong with that.

    Tried where it will be used: between the same ranks, by the same thread. A library that says
    that it is able to and is not may end the process here.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    copies.attach()
    rank, size = comm.Get_rank(), comm.Get_size()
    with copies.beside():
        sent = torch.arange(rank, rank + NUMBERS, dtype=torch.float32, device=device)
        found = torch.full_like(sent, -1)
        made = copies.mark()
    yield made
    yield [
        comm.Irecv(device_buffer(found), (rank - 1) % size, TAG),
        comm.Isend(device_buffer(sent), (rank + 1) % size, TAG),
    ]
    there = copies.memory(found.nbytes).view(found.dtype)
    with copies.beside():
        arrived = copies.out(found, there)
    yield arrived
    expected = torch.arange(NUMBERS, dtype=there.dtype, device="cpu") + (rank - 1) % size
    if torch.equal(there, expected):
        return None
    return (
        f"this MPI library says that it reads and writes the memory of CUDA devices, but a row "
        f"sent from one arrived as something else; {REMEDY}"
    )
