"""What ranks ask each other beside training, waiting no longer than the stall limit."""

import hashlib
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from daso.comm.dtypes import byte_buffer, sum_buffer
from daso.comm.mpi import load
from daso.comm.node.base import wait_until
from daso.comm.topology import Topology
from daso.errors import StallError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "AsyncMaxReduce",
    "broadcast_row",
    "byte_pieces",
    "exchange_rows",
    "finish",
    "first_value",
    "gather",
    "gather_in_node",
    "gather_unlike",
]

Value = TypeVar("Value")

PIECE_BYTES = 1 << 26  # of a message
ROWS = 31_338  # tag; the world may be used by others

_unfinished: list[object] = []  # after a stall: MPI may still write to what a request was given


def gather(topology: Topology, value: Value, timeout_seconds: float) -> list[Value]:
    """Return every rank's value, in rank order.

    MPI's own gather has no limit: where a host is cut off, ranks that are in it stay there.

    Collective over the world; blocking.
    """
    mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = torch.empty(topology.world_size, dtype=torch.int64, device="cpu")
    size = torch.tensor([mine.numel()], device="cpu")
    world = topology.world_comm
    finish(topology, world.Iallgather(sum_buffer(size), sum_buffer(sizes)), timeout_seconds)
    everyones = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
    target = [byte_buffer(everyones), (sizes.tolist(), None)]
    finish(topology, world.Iallgatherv(byte_buffer(mine), target), timeout_seconds)
    return [pickle.loads(part.numpy().tobytes()) for part in everyones.split(sizes.tolist())]


def gather_unlike(topology: Topology, value: Value, timeout_seconds: float) -> list[Value]:
    """Return every rank's value, in rank order, or one alone where all are alike.

    Values that are alike cost the exchange of a hash, whatever the number of ranks.

    Collective over the world; blocking.
    """
    digest = hashlib.sha256(repr(value).encode()).digest()
    number = int.from_bytes(digest[:6], "big")
    row = torch.tensor([number, -number], dtype=torch.int64, device="cpu")
    request = topology.world_comm.Iallreduce(load().IN_PLACE, sum_buffer(row), op=load().MAX)
    finish(topology, request, timeout_seconds)
    most, minus_least = row.tolist()
    return [value] if most == -minus_least else gather(topology, value, timeout_seconds)


def first_value(topology: Topology, value: Value, timeout_seconds: float) -> Value:
    """Return world rank 0's value; what others pass is not read.

    Collective over the world; blocking.
    """
    leads = topology.rank == 0
    text = bytearray(pickle.dumps(value)) if leads else bytearray()
    size = torch.tensor([len(text)], device="cpu")
    finish(topology, topology.world_comm.Ibcast(sum_buffer(size)), timeout_seconds)
    row = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    if leads:
        row.copy_(torch.frombuffer(text, dtype=torch.uint8))
    finish(topology, topology.world_comm.Ibcast(byte_buffer(row)), timeout_seconds)
    return pickle.loads(row.numpy().tobytes())  # type: ignore[no-any-return]


def gather_in_node(topology: Topology, number: float, timeout_seconds: float) -> list[float]:
    """Return the number of every rank of this node, in rank order.

    Collective over the node; blocking.
    """
    mine = torch.tensor([number], dtype=torch.float64, device="cpu")
    everyones = torch.empty(topology.local_size, dtype=torch.float64, device="cpu")
    request = topology.node_comm.Iallgather(sum_buffer(mine), sum_buffer(everyones))
    finish(topology, request, timeout_seconds)
    numbers: list[float] = everyones.tolist()
    return numbers


def finish(topology: Topology, request: "MPI.Request", timeout_seconds: float) -> None:
    """Block until a request is over; after a stall it is kept, with what MPI may still write to."""
    liveness = topology.liveness
    try:
        wait_until(request.Test, liveness.missing, timeout_seconds, liveness.answer)
    except StallError:
        _unfinished.append(request)  # which holds its buffers
        raise


def exchange_rows(
    topology: Topology,
    sent: Sequence[tuple[int, torch.Tensor]],
    received: Sequence[tuple[int, torch.Tensor]],
    timeout_seconds: float,
) -> None:
    """Send rows of any length to ranks and receive those of others, each of the length it has.

    Args:
        topology: Whose world.
        sent: To whom, and what.
        received: From whom, and where to; one from each rank at most.
        timeout_seconds: How long a piece of a row is waited for at most.

    Blocking; by those ranks alone.
    """
    comm = topology.world_comm
    calls = [
        partial(comm.Irecv, byte_buffer(one), source=source, tag=ROWS)
        for source, row in received
        for one in byte_pieces(row)
    ]
    calls += [
        partial(comm.Isend, byte_buffer(one), dest=to, tag=ROWS)
        for to, row in sent
        for one in byte_pieces(row)
    ]
    _finish_all(topology, calls, timeout_seconds)


def broadcast_row(topology: Topology, row: torch.Tensor, root: int, timeout_seconds: float) -> None:
    """Give all ranks a row of any length of one of them. Collective over the world; blocking."""
    comm = topology.world_comm
    calls = [partial(comm.Ibcast, byte_buffer(one), root=root) for one in byte_pieces(row)]
    _finish_all(topology, calls, timeout_seconds)


def byte_pieces(row: torch.Tensor) -> Sequence[torch.Tensor]:
    """Cut a flat row into what any MPI takes: Open MPI 5.0 counts no more than 2**31 bytes."""
    pieces: Sequence[torch.Tensor] = row.view(torch.uint8).split(PIECE_BYTES)
    return pieces


def _finish_all(
    topology: Topology, calls: "Sequence[Callable[[], MPI.Request]]", timeout_seconds: float
) -> None:
    """Block until requests are over; where one is not, all are kept, with what MPI may write to."""
    requests: list[MPI.Request] = []
    try:
        for call in calls:
            requests.append(call())
        for request in requests:
            finish(topology, request, timeout_seconds)
    except BaseException:
        _unfinished.extend(requests)
        raise


class AsyncMaxReduce:
    """Elementwise maxima over all ranks, asked for now and read some batches later.

    One at a time; called by the training thread.

    Args:
        topology: Whose world; a communicator of its own is made.
        timeout_seconds: How long `result` waits at most.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Topology, timeout_seconds: float) -> None:
        self.comm, self._liveness = topology.world_comm.Dup(), topology.liveness
        topology.others.append(self.comm)
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._request: MPI.Request | None = None
        self._row = torch.zeros(0, dtype=torch.float64, device="cpu")

    def start(self, numbers: Sequence[float]) -> None:
        """Ask. Collective over the world; non-blocking."""
        assert self._request is None, "one vote at a time"
        self._row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._request = self.comm.Iallreduce(load().IN_PLACE, sum_buffer(self._row), op=load().MAX)

    def result(self) -> list[float]:
        """Return the maxima, and wait where they are not there yet."""
        assert self._request is not None, "nothing was asked"
        # After a stall the request stays, for MPI may still write to its row.
        wait_until(
            self._request.Test, self._liveness.missing, self._timeout_seconds, self._liveness.answer
        )
        self._request = None
        return self._row.tolist()

    def free(self) -> None:
        """Give the communicator back. Collective over the world; blocking; idempotent."""
        if self._request is not None:
            self.result()
        if self.comm != load().COMM_NULL:
            if self.comm in self._topology.others:  # else that is another world's now
                self._topology.others.remove(self.comm)
            self.comm.Free()
