"""Finds out that ranks wait for each other in different places, long before the stall limit.

A rank that has taken its last step and comes to a meeting of all ranks (`synchronize`, `end_epoch`)
waits there for others that may still be stepping, and they wait for it in an average. Whoever has
waited in vain for a while at a meeting rings: it tells its neighbours after how many steps it came.
Who waits inside a later step then knows that the step will never be complete, gives up, and says so
to its neighbours, who pass it on. Neighbours are the ranks at distances of 1, 2, 4 ...: of ranks in
two places some are always neighbours, and each sends 2 log2(ranks) messages. Nothing is sent as
long as nobody waits that long.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from daso.comm.health.control_messages import ControlChannel
from daso.errors import ExchangeError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["LATE_SECONDS", "StepWatchdog", "neighbours"]

LATE_SECONDS = 2.0  # of waiting before anybody rings or listens
MEETING, GIVEN_UP = 1, 2  # tags
NUMBERS = 5  # of each note


def neighbours(rank: int, ranks: int) -> list[int]:
    """Return the other ranks at distances of powers of two, on a ring of all."""
    distances = [1 << bit for bit in range(ranks.bit_length()) if 1 << bit < ranks]
    both = {(rank + sign * distance) % ranks for distance in distances for sign in (1, -1)}
    return sorted(both - {rank})


class StepWatchdog:
    """One rank's watchdog; used by its training thread and its engine.

    Args:
        world: All ranks; a communicator of its own is made.

    Collective over the world; blocking.
    """

    def __init__(self, world: "MPI.Comm") -> None:
        self._notes = ControlChannel(world.Dup, NUMBERS)
        self._neighbours = neighbours(self._notes.rank, world.Get_size())
        self.steps = 0  # that this rank has taken or is in the middle of
        self.rounds = 0  # averages of gradients over all ranks that this rank has begun
        self.at_meeting = False
        # Ranks whose rings may mean that this one waits in vain: in a backward that averages in its
        # node, those of its node. None: all.
        self.heeds: frozenset[int] | None = None
        self._kept: list[tuple[int, Sequence[int]]] = []  # rings of others, not judged yet
        self._meetings = 0  # that are over: the same on all ranks that are not out of step
        self._rung = False  # at this meeting
        self._verdict: str | None = None
        self._lock = threading.Lock()

    @contextmanager
    def meeting(self, steps: int) -> Iterator[None]:
        """Be at a meeting of all ranks, after so many steps."""
        self.steps, self.at_meeting, self._rung, self.heeds = steps, True, False, None
        yield
        with self._lock:
            self.at_meeting, self._meetings = False, self._meetings + 1

    @property
    def given_up(self) -> bool:
        """Whether ranks are known to be out of step: nothing collective may follow."""
        return self._verdict is not None

    def late(self) -> None:
        """Ring where this rank waits at a meeting, and listen to the others. Does not block."""
        with self._lock:
            if self._verdict is None:
                if self.at_meeting and not self._rung:
                    self._rung = True
                    self._tell(MEETING, self.steps, self._meetings, self.rounds)
                self._listen()
            if self._verdict is not None:
                raise ExchangeError(self._verdict)

    def _tell(self, tag: int, *numbers: int) -> None:
        for rank in self._neighbours:
            self._notes.send(rank, tag, *numbers)

    def _listen(self) -> None:
        kept, self._kept = self._kept, []
        rings = [(source, MEETING, numbers) for source, numbers in kept]
        for source, tag, numbers in [*rings, *self._notes.arrived()]:
            if tag == GIVEN_UP:
                self._verdict = _text(*numbers)
                self._tell(GIVEN_UP, *numbers)
            elif numbers[1] < self._meetings:  # it was waiting for this rank, which came
                continue
            elif self.heeds is not None and source not in self.heeds:
                self._kept.append((source, numbers))
            # A rank that came after fewer steps than this one is in will never join it; two that
            # came after different numbers may each be stuck behind an exchange of theirs.
            elif numbers[0] < self.steps or (self.at_meeting and numbers[0] > self.steps):
                self._give_up(source, numbers[0], self._notes.rank, self.steps, 0)
            # A rank at a meeting never joins an average that it has not begun.
            elif not self.at_meeting and numbers[0] == self.steps and numbers[2] < self.rounds:
                self._give_up(source, numbers[2], self._notes.rank, self.rounds, self.steps)
            else:  # judged again when this rank waits later
                self._kept.append((source, numbers))
            if self._verdict is not None:
                return

    def _give_up(self, *numbers: int) -> None:
        self._verdict = _text(*numbers)
        self._tell(GIVEN_UP, *numbers)

    def revoke(self) -> None:
        """End all notes, for good, where a rank is lost. Does not block."""
        self._notes.comm.Revoke()

    def free(self) -> None:
        """Give the communicator back. Collective over the world; blocking; idempotent."""
        self._notes.free()


def _text(rank: int, count: int, other: int, others_count: int, steps: int) -> str:
    """Return the error text: counts of steps, or of averages if ``steps`` is not 0."""
    if not steps:
        return (
            f"every rank must take the same number of steps, but rank {rank} took {count} and rank "
            f"{other} took {others_count}; give every rank the same number of batches, and call "
            f"synchronize() on every rank"
        )
    return (
        f"every rank must average gradients equally often, but at step {steps} rank {rank} had "
        f"averaged {count} times and rank {other} {others_count} times; call backward() equally "
        f"often on every rank, or under no_sync()"
    )
