"""Small blocking collectives, each with a time limit and an error that names the missing rank.

No other module issues them: MPI's own collectives wait for a missing rank without limit. They run
in the training thread, on the communicators of a `Topology`: world, node or lane.

The default limit is `STALL_SECONDS`. A `StallError` names each rank that has not joined within the
limit.
"""

import hashlib
import os
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from daso.comm.mpi import load
from daso.comm.rank_info import Ranks
from daso.comm.reduction import sum_buffer
from daso.comm.step_timer import wait_until
from daso.errors import DasoError, ExchangeError, StallError
from daso.plan.options import Exchange

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "RENDEZVOUS",
    "STALL_SECONDS",
    "AsyncMaxReduce",
    "all_equal",
    "barrier",
    "broadcast",
    "broadcast_in_node",
    "broadcast_row",
    "finish",
    "gather",
    "gather_in_lane",
    "gather_in_node",
    "gather_numbers_in_node",
    "gather_unlike",
    "raise_first",
    "raise_on_all_ranks",
    "rendezvous",
]

Value = TypeVar("Value")

STALL_SECONDS = Exchange().timeout_seconds  # the limit where the caller has no configured one
PIECE_BYTES = 1 << 26  # of a message
SPINS = 20  # tests of a request before the wait with a limit

# Operations outside of steps that begin with a `rendezvous`.
RENDEZVOUS = (
    "wrap an optimizer",
    "close an optimizer",
    "make a daso.ParameterServer",
    "close a daso.ParameterServer",
    "make a flow's Runtime",
    "begin an epoch of a flow",
    "close a flow's Runtime",
    "save a checkpoint",
    "load a checkpoint",
    "free a daso.Topology",
    "join torch.distributed",
    "measure the machine",
    "reduce a value",
    "wait for all ranks",
)

_unfinished: list[object] = []  # requests after a stall: MPI may still write to their buffers


# --- values ---------------------------------------------------------------------------------------


def gather(topology: Ranks, value: Value, timeout_seconds: float = STALL_SECONDS) -> list[Value]:
    """Return every rank's value, in rank order. Collective over the world; blocking."""
    return _gather(topology, topology.world_comm, value, timeout_seconds)


def gather_in_node(
    topology: Ranks, value: Value, timeout_seconds: float = STALL_SECONDS
) -> list[Value]:
    """Return the value of every rank of this node. Collective over the node; blocking."""
    return _gather(topology, topology.node_comm, value, timeout_seconds)


def gather_in_lane(
    topology: Ranks, value: Value, timeout_seconds: float = STALL_SECONDS
) -> list[Value]:
    """Return the value of every rank of this lane. Collective over the lane; blocking."""
    return _gather(topology, topology.lane_comm, value, timeout_seconds)


def gather_numbers_in_node(topology: Ranks, number: float, timeout_seconds: float) -> list[float]:
    """Return the number of every rank of this node, in one exchange (`gather_in_node` takes two).

    Collective over the node; blocking.
    """
    gathered = np.empty(topology.local_size, np.float64)
    request = topology.node_comm.Iallgather(np.array([number], np.float64), gathered)
    finish(topology, request, timeout_seconds)
    numbers: list[float] = gathered.tolist()
    return numbers


def gather_unlike(topology: Ranks, value: Value, timeout_seconds: float) -> list[Value]:
    """Return every rank's value, in rank order, or a list of one value if all are equal.

    If all values are equal, only a hash is exchanged, for any number of ranks.

    Collective over the world; blocking.
    """
    digest = hashlib.sha256(repr(value).encode()).digest()
    number = int.from_bytes(digest[:6], "big")
    row, mpi = np.array([number, -number], np.int64), load()
    request = topology.world_comm.Iallreduce(mpi.IN_PLACE, row, op=mpi.MAX)
    finish(topology, request, timeout_seconds)
    most, minus_least = row.tolist()
    return [value] if most == -minus_least else gather(topology, value, timeout_seconds)


def broadcast(topology: Ranks, value: Value, timeout_seconds: float = STALL_SECONDS) -> Value:
    """Return world rank 0's value; those of the other ranks are ignored.

    Collective over the world; blocking.
    """
    return _broadcast(topology, topology.world_comm, value, timeout_seconds)


def broadcast_in_node(
    topology: Ranks, value: Value, timeout_seconds: float = STALL_SECONDS
) -> Value:
    """Return local rank 0's value; those of the other ranks are ignored.

    Collective over the node; blocking.
    """
    return _broadcast(topology, topology.node_comm, value, timeout_seconds)


def _gather(topology: Ranks, comm: "MPI.Comm", value: Value, limit: float) -> list[Value]:
    own = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    sizes = np.empty(comm.Get_size(), dtype=np.int64)
    finish(topology, comm.Iallgather(np.array([own.size], dtype=np.int64), sizes), limit)
    gathered, counts = np.empty(sizes.sum(), dtype=np.uint8), sizes.tolist()
    finish(topology, comm.Iallgatherv(own, [gathered, (counts, None)]), limit)
    return [pickle.loads(part.data) for part in np.split(gathered, sizes.cumsum()[:-1])]


def _broadcast(topology: Ranks, comm: "MPI.Comm", value: Value, limit: float) -> Value:
    is_root = comm.Get_rank() == 0
    text = pickle.dumps(value) if is_root else b""
    size = np.array([len(text)], dtype=np.int64)
    finish(topology, comm.Ibcast(size), limit)
    row = np.empty(size[0], dtype=np.uint8)
    if is_root:
        row[:] = np.frombuffer(text, dtype=np.uint8)
    finish(topology, comm.Ibcast(row), limit)
    return pickle.loads(row.data)  # type: ignore[no-any-return]


# --- agreement ------------------------------------------------------------------------------------


def barrier(topology: Ranks, timeout_seconds: float = STALL_SECONDS) -> None:
    """Block until every rank has called this. Collective over the world; blocking."""
    finish(topology, topology.world_comm.Ibarrier(), timeout_seconds)


def rendezvous(topology: Ranks, what: str, timeout_seconds: float) -> None:
    """Block until every rank has reached the same operation of the program.

    Args:
        topology: The ranks.
        what: The operation that starts here: one of `RENDEZVOUS`.
        timeout_seconds: Maximum wait.

    Raises:
        StallError: A rank did not arrive; names it.
        ExchangeError: A rank has reached another operation; names it.

    Collective over the world; blocking.
    """
    ranks = topology.world_comm.Get_size()
    if ranks == 1:
        return
    own, places = np.array([RENDEZVOUS.index(what)], np.int64), np.empty(ranks, np.int64)
    request = topology.world_comm.Iallgather(own, places)
    finish(topology, request, timeout_seconds, what=what)
    for rank, place in enumerate(places.tolist()):
        if place != own[0]:
            raise ExchangeError(
                "all ranks must reach the same operation, but this rank is about "
                f"to {what}, and rank {rank} to {RENDEZVOUS[place]}; let all ranks do the same",
                code="operations-differ-between-ranks",
            )


def all_equal(topology: Ranks, value: object, timeout_seconds: float = STALL_SECONDS) -> bool:
    """Return whether every rank passed an equal value. Collective over the world; blocking."""
    return all(other == value for other in gather(topology, value, timeout_seconds))


def raise_on_all_ranks(
    topology: Ranks, problem: DasoError | None, timeout_seconds: float = STALL_SECONDS
) -> None:
    """Raise the same error on every rank if any rank has a problem.

    Args:
        topology: The ranks.
        problem: The error of this rank; None without a problem.
        timeout_seconds: Maximum wait for the other ranks.

    Collective over the world; blocking.
    """
    raise_first(gather(topology, problem, timeout_seconds))


def raise_first(problems: Sequence[DasoError | None]) -> None:
    """Raise the first rank's problem, with its rank unless all ranks have the same problem."""
    raised = [(rank, problem) for rank, problem in enumerate(problems) if problem is not None]
    if not raised:
        return
    rank, first = raised[0]
    everywhere = len(raised) == len(problems) and len({str(error) for _, error in raised}) == 1
    raise first if everywhere else type(first)(f"rank {rank}: {first}", code=first.code)


# --- rows of bytes --------------------------------------------------------------------------------


def broadcast_row(
    topology: Ranks,
    row: torch.Tensor,
    root: int,
    timeout_seconds: float,
    comm: "MPI.Comm | None" = None,
) -> None:
    """Overwrite a flat buffer of any length with the root rank's.

    Args:
        topology: The ranks.
        row: The buffer, on the host, of the same length on all ranks.
        root: The rank whose buffer is sent.
        timeout_seconds: Maximum wait for a piece of the buffer.
        comm: A communicator of some of the ranks; None for the world.

    Collective over the communicator; blocking.
    """
    over = topology.world_comm if comm is None else comm
    calls = [partial(over.Ibcast, piece.numpy(), root=root) for piece in _byte_pieces(row)]
    _finish_all(topology, calls, timeout_seconds)


def _byte_pieces(row: torch.Tensor) -> Sequence[torch.Tensor]:
    """Split a flat buffer into messages for any MPI: Open MPI 5.0 counts up to 2**31 bytes."""
    pieces: Sequence[torch.Tensor] = row.view(torch.uint8).split(PIECE_BYTES)
    return pieces


def finish(
    topology: Ranks,
    request: "MPI.Request",
    timeout_seconds: float,
    what: str = "take part in a step",
) -> None:
    """Block until a request is complete; after a stall, keep its buffers alive for MPI."""
    for _ in range(SPINS):  # most ranks arrive at about the same time
        if request.Test():
            return
        os.sched_yield()
    liveness = topology.liveness
    try:
        wait_until(request.Test, liveness.missing, timeout_seconds, liveness.answer, what=what)
    except StallError:
        _unfinished.append(request)  # keeps its buffers alive
        raise


def _finish_all(
    topology: Ranks, calls: "Sequence[Callable[[], MPI.Request]]", timeout_seconds: float
) -> None:
    """Block until all requests are complete; after an error, keep their buffers alive for MPI."""
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
    """Elementwise maxima over all ranks, started now and read some batches later.

    One at a time; for the training thread.

    Args:
        topology: The ranks; their communicator is duplicated.
        timeout_seconds: Maximum wait of `result`.

    Collective over the world; blocking.
    """

    def __init__(self, topology: Ranks, timeout_seconds: float) -> None:
        self.comm, self._liveness = topology.world_comm.Dup(), topology.liveness
        topology.others.append(self.comm)
        self._topology = topology
        self._timeout_seconds = timeout_seconds
        self._request: MPI.Request | None = None
        self._row = torch.zeros(0, dtype=torch.float64, device="cpu")

    def start(self, numbers: Sequence[float]) -> None:
        """Start the reduction. Collective over the world; non-blocking."""
        assert self._request is None, "one reduction at a time"
        self._row = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._request = self.comm.Iallreduce(load().IN_PLACE, sum_buffer(self._row), op=load().MAX)

    def result(self) -> list[float]:
        """Block until the reduction is complete; return the maxima."""
        assert self._request is not None, "start() must be called first"
        # After a stall the request is kept, because MPI may still write to its buffer.
        wait_until(
            self._request.Test, self._liveness.missing, self._timeout_seconds, self._liveness.answer
        )
        self._request = None
        return self._row.tolist()

    def free(self) -> None:
        """Free the communicator. Collective over the world; blocking; idempotent."""
        if self._request is not None:
            self.result()
        if self.comm != load().COMM_NULL:
            if self.comm in self._topology.others:  # otherwise the topology has regrouped
                self._topology.others.remove(self.comm)
            self.comm.Free()
