"""Checks that MPI can read and write the memory of CUDA devices."""

import ctypes
from typing import TYPE_CHECKING

import torch

from daso.comm.control import gather
from daso.comm.device.staging import DeviceStaging
from daso.comm.engine import Work
from daso.comm.mpi import load
from daso.comm.reduction import device_buffer
from daso.errors import TopologyError

if TYPE_CHECKING:
    from mpi4py import MPI

    from daso.comm.topology import Topology

TRIAL_NUMEL = 1 << 14  # larger than an eager message
TAG = 9
REMEDY = "leave gpu_direct out, or take an MPI library with CUDA built in and switched on"


def cuda_aware() -> bool | None:
    """Return whether the loaded MPI library reports CUDA support, or None if it has no query.

    Open MPI and MPICH have one (``MPIX_Query_cuda_support``).
    """
    # The library's symbols are not global, but reachable through the module linked to it.
    query = getattr(ctypes.CDLL(load().__file__), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


def library_problem(
    topology: "Topology", device: torch.device, timeout_seconds: float
) -> TopologyError | None:
    """Return why MPI cannot send from ``device``, as the library reports it, or None if it can.

    Collective over the world; blocking.
    """
    if device.type != "cuda":
        return TopologyError(
            f"Exchange(gpu_direct=True) needs parameters on a CUDA device, not on {device}",
            code="gpu-direct-without-gpu",
        )
    reported = cuda_aware()
    if all(gather(topology, bool(reported), timeout_seconds)):
        return None
    answer = {
        True: "does so here but not everywhere",
        False: "reports no support",
        None: "has no such call",
    }
    return TopologyError(
        f"Exchange(gpu_direct=True) needs an MPI library that reads and writes the memory of CUDA "
        f"devices (MPIX_Query_cuda_support), but this one {answer[reported]}; {REMEDY}",
        code="mpi-without-cuda",
    )


def trial(
    comm: "MPI.Comm", device: torch.device, copies: DeviceStaging
) -> Work[TopologyError | None]:
    """Send a buffer from each rank's device to the next rank; return the problem found, or None.

    Runs between the ranks and in the thread that will use it. A library that reports support
    without having it may end the process here.

    Collective over ``comm``; non-blocking, as work for the engine.
    """
    copies.bind_thread()
    rank, size = comm.Get_rank(), comm.Get_size()
    with copies.side_stream():
        sent = torch.arange(rank, rank + TRIAL_NUMEL, dtype=torch.float32, device=device)
        received = torch.full_like(sent, -1)
        ready = copies.completion()
    yield ready
    yield [
        comm.Irecv(device_buffer(received), (rank - 1) % size, TAG),
        comm.Isend(device_buffer(sent), (rank + 1) % size, TAG),
    ]
    on_host = copies.host_memory(received.nbytes).view(received.dtype)
    with copies.side_stream():
        arrived = copies.to_host(received, on_host)
    yield arrived
    expected = torch.arange(TRIAL_NUMEL, dtype=on_host.dtype, device="cpu") + (rank - 1) % size
    if torch.equal(on_host, expected):
        return None
    return TopologyError(
        f"this MPI library reports that it reads and writes the memory of CUDA devices, but a row "
        f"sent from one arrived as something else; {REMEDY}",
        code="mpi-corrupts-gpu-memory",
    )
