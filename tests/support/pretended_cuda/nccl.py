"""As much of `cupy.cuda.nccl` as daso uses, over MPI, for devices that are not there.

What is launched must be the same on every rank, and who uses the memory without having waited for
the stream is found out.
"""

import ctypes
import itertools

import torch
from mpi4py import MPI

from pretended_cuda import LIBRARY

_counter = itertools.count()

TYPES = {
    "NCCL_FLOAT32": torch.float32,
    "NCCL_FLOAT64": torch.float64,
    "NCCL_FLOAT16": torch.float16,
    "NCCL_BFLOAT16": torch.bfloat16,
}

available = True
NCCL_SUM = "sum"
NCCL_FLOAT32, NCCL_FLOAT64, NCCL_FLOAT16, NCCL_BFLOAT16 = TYPES
STARTING, STARTED = 7_001, 7_002  # tags


def get_version():
    return 22_907


def get_unique_id():
    return f"{MPI.COMM_WORLD.Get_rank()} {next(_counter)}".encode().ljust(128, b"\0")


def groupStart():  # noqa: N802 - cupy's name
    assert NcclCommunicator.grouped is None
    NcclCommunicator.grouped = []


def groupEnd():  # noqa: N802 - cupy's name
    grouped, NcclCommunicator.grouped = NcclCommunicator.grouped, None
    for launch in grouped:
        launch()


class NcclCommunicator:
    """Sums are taken at once, in rank order, on streams that are told of them.

    Args:
        size: Of its ranks.
        name: From `get_unique_id`, on one of them.
        rank: This one.
    """

    grouped = None

    def __init__(self, size, name, rank):
        world, (first, tag) = MPI.COMM_WORLD, map(int, name.rstrip(b"\0").split())
        mine = (rank, world.Get_rank(), torch.cuda.current_device())
        if world.Get_rank() == first:
            told = [mine, *(world.recv(tag=STARTING + 2 * tag) for _ in range(size - 1))]
            for _, other, _ in told[1:]:
                world.send(told, other, STARTED + 2 * tag)
        else:
            world.send(mine, first, STARTING + 2 * tag)
            told = world.recv(source=first, tag=STARTED + 2 * tag)
        assert len({device for *_, device in told}) == size, "Duplicate GPU detected"
        ranks = [other for _, other, _ in sorted(told)]
        self._ranks = world.Create_group(world.group.Incl(ranks), tag)
        self._device, self._alive = torch.cuda.current_device(), True

    def check_async_error(self):
        assert self._alive, "the communicator was destroyed"

    def destroy(self):
        self._alive = False

    abort = destroy

    def _row(self, address, count, kind, stream, by):
        """Return the memory (count), written on a stream by what every rank launches now."""
        assert self._alive
        told = self._ranks.allgather((by, count, kind))
        assert told == [told[0]] * len(told), f"ranks launch different things: {told}"
        nbytes = count * TYPES[kind].itemsize
        LIBRARY.pretended_launch(stream, self._device)
        LIBRARY.pretended_use(stream, self._device, address, nbytes, 1, f"NCCL {by}".encode())
        memory = (ctypes.c_byte * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=TYPES[kind])

    def allReduce(self, there, here, count, kind, operation, stream):  # noqa: N802 - cupy's name
        assert there == here
        assert operation == NCCL_SUM
        row = self._row(here, count, kind, stream, "sum")
        first, *others = self._ranks.allgather(row.clone())
        row.copy_(first)
        for other in others:
            row += other

    def broadcast(self, there, here, count, kind, root, stream):
        assert there == here
        assert self.grouped is not None, "parts are shown as a group"

        def launch():
            row = self._row(here, count, kind, stream, f"broadcast from {root}")
            self._ranks.Bcast(row.view(torch.uint8).numpy(), root)

        self.grouped.append(launch)
