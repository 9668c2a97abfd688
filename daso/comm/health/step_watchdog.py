"""Detects ranks that wait for each other in different operations, long before the stall limit.

A rank that has taken its last step and calls a collective of all ranks (`synchronize`, `end_epoch`:
a *meeting*) waits for ranks that may still be stepping, and they wait for it in an average. A rank
that has waited for a while at a meeting sends its step count to its neighbors. A neighbor in a
later step then knows that the step cannot complete; it gives up and sends this to its
neighbors, which pass it on. Neighbors are the ranks at distances of 1, 2, 4 ...: of ranks in two
operations some are always neighbors, and each rank sends 2 log2(ranks) messages. No message is sent
while no rank waits that long.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from daso.comm.mpi import load
from daso.comm.reduction import sum_buffer
from daso.errors import ExchangeError

if TYPE_CHECKING:
    from mpi4py import MPI

MEETING, GIVEN_UP = 1, 2  # tags
NUMBERS = 5  # integers in each message


def neighbours(rank: int, ranks: int) -> list[int]:
    """Return the other ranks at distances of powers of two, on a ring of all ranks."""
    distances = [1 << bit for bit in range(ranks.bit_length()) if 1 << bit < ranks]
    both = {(rank + sign * distance) % ranks for distance in distances for sign in (1, -1)}
    return sorted(both - {rank})


class ControlChannel:
    """Sends and receives small control messages; not thread-safe.

    Args:
        make_comm: Makes a separate communicator over all ranks, such as ``world.Dup``.
        numbers: Integers in each message.

    Collective over the world; blocking.
    """

    def __init__(self, make_comm: "Callable[[], MPI.Comm]", numbers: int = 4) -> None:
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
        # Last, because it raises if the connection of an earlier message is lost.
        self._sending = [sending for sending in self._sending if not sending[0].Test()]

    def arrived(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Yield the messages that have arrived. Does not block."""
        status = load().Status()
        while self.comm.Iprobe(status=status):
            source, tag = status.Get_source(), status.Get_tag()
            row = torch.empty(self._numbers, dtype=torch.int64, device="cpu")
            self.comm.Recv(sum_buffer(row), source, tag)
            self._received[source] += 1
            yield source, tag, row.tolist()

    def free(self) -> None:
        """Receive all pending messages, and free the communicator.

        MPI reuses the context of a freed communicator for the next one. A message that is still in
        flight would be received there, in the middle of an exchange.

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


class Position(NamedTuple):
    """Position of a rank in its training.

    Args:
        steps: Number of steps taken, including one in progress.
        rounds: Number of averages of gradients over all ranks that it has started.
        relevant_ranks: Ranks whose messages can mean that this rank waits in vain. None: all; in a
            backward that averages inside of a node, the ranks of that node.
    """

    steps: int = 0
    rounds: int = 0
    relevant_ranks: frozenset[int] | None = None


class StepWatchdog:
    """Watchdog of one rank; used by its training thread and its engine.

    Args:
        world: All ranks; the communicator is duplicated.

    Collective over the world; blocking.
    """

    def __init__(self, world: "MPI.Comm") -> None:
        self._notes = ControlChannel(world.Dup, NUMBERS)
        self._neighbours = neighbours(self._notes.rank, world.Get_size())
        self._position: Callable[[], Position] = Position
        self._meeting_step: int | None = None  # None: this rank is not at a meeting
        self._pending: list[tuple[int, Sequence[int]]] = []  # messages without a verdict so far
        self._meetings = 0  # finished meetings: equal on all ranks unless they are out of step
        self._announced = False  # at this meeting
        self._verdict: ExchangeError | None = None
        self._lock = threading.Lock()

    def follow(self, position: Callable[[], Position]) -> None:
        """Set the function that returns this rank's position; called after a long wait."""
        self._position = position

    @contextmanager
    def meeting(self, steps: int) -> Iterator[None]:
        """Mark this rank as being at a meeting, after ``steps`` steps, during the context."""
        self._meeting_step, self._announced = steps, False
        yield
        with self._lock:
            self._meeting_step, self._meetings = None, self._meetings + 1

    @property
    def given_up(self) -> bool:
        """True once ranks are known to be out of step: no collective may follow."""
        return self._verdict is not None

    def late(self) -> None:
        """Announce a long wait at a meeting, and read the other ranks' messages. Does not block."""
        with self._lock:
            if self._verdict is None:
                here = self._position()
                if self._meeting_step is not None:
                    here = Position(self._meeting_step, here.rounds)
                    if not self._announced:
                        self._announced = True
                        self._send(MEETING, here.steps, self._meetings, here.rounds)
                self._read(here)
            if self._verdict is not None:
                raise self._verdict

    def _send(self, tag: int, *numbers: int) -> None:
        for rank in self._neighbours:
            self._notes.send(rank, tag, *numbers)

    def _read(self, here: Position) -> None:
        at_meeting = self._meeting_step is not None
        pending, self._pending = self._pending, []
        earlier = [(source, MEETING, numbers) for source, numbers in pending]
        for source, tag, numbers in [*earlier, *self._notes.arrived()]:
            if tag == GIVEN_UP:
                self._verdict = _error(*numbers)
                self._send(GIVEN_UP, *numbers)
            elif numbers[1] < self._meetings:  # it waited for this rank, which has arrived since
                continue
            elif here.relevant_ranks is not None and source not in here.relevant_ranks:
                self._pending.append((source, numbers))
            # A rank at a meeting after fewer steps than this one has taken never joins its step;
            # two ranks at meetings after different numbers of steps may each wait for an exchange.
            elif numbers[0] < here.steps or (at_meeting and numbers[0] > here.steps):
                self._give_up(source, numbers[0], self._notes.rank, here.steps, 0)
            # A rank at a meeting never joins an average that it has not started.
            elif not at_meeting and numbers[0] == here.steps and numbers[2] < here.rounds:
                self._give_up(source, numbers[2], self._notes.rank, here.rounds, here.steps)
            else:  # checked again when this rank waits later
                self._pending.append((source, numbers))
            if self._verdict is not None:
                return

    def _give_up(self, *numbers: int) -> None:
        self._verdict = _error(*numbers)
        self._send(GIVEN_UP, *numbers)

    def revoke(self) -> None:
        """Revoke the communicator after the loss of a rank. Does not block."""
        self._notes.comm.Revoke()

    def free(self) -> None:
        """Free the communicator. Collective over the world; blocking; idempotent."""
        self._notes.free()


def _error(rank: int, count: int, other: int, others_count: int, steps: int) -> ExchangeError:
    """Return the error: ranks differ in steps or, if ``steps`` is not 0, in averages."""
    if not steps:
        return ExchangeError(
            f"every rank must take the same number of steps, but rank {rank} took {count} and rank "
            f"{other} took {others_count}; give every rank the same number of batches, and call "
            f"synchronize() on every rank",
            code="steps-differ-between-ranks",
        )
    return ExchangeError(
        f"every rank must average gradients equally often, but at step {steps} rank {rank} had "
        f"averaged {count} times and rank {other} {others_count} times; call backward() equally "
        f"often on every rank, or under no_sync()",
        code="averages-differ-between-ranks",
    )
