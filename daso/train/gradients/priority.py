"""Averages portions of gradients between nodes in the order in which forward needs them.

Portions become ready during backward, at different times on each rank. World rank 0 chooses the
next of its ready portions and broadcasts the choice; the other ranks start that portion once they
have it. The common order is essential: with different orders sums would be wrong, without an error.
A few portions cross at a time, to keep the link busy, and one choice is broadcast ahead; a portion
that becomes ready later can overtake all but these. See `daso.plan.portions`.

This cannot deadlock: world rank 0 has a portion of a step only after the forward of that step, so
all portions of the step before had crossed; and a backward waits for portions of the same step only
when all of them are ready on its rank.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from daso.comm.engine import Work, WorkHandle
from daso.comm.node.base import NodeBucket
from daso.comm.reduction import sum_buffer
from daso.plan.portions import Order, Portion, PriorityQueue
from daso.train.channels import Channels
from daso.train.gradients.background import BackgroundReducer, ConcurrentReductions
from daso.train.metrics import Metrics

if TYPE_CHECKING:
    from mpi4py import MPI


class PriorityReducer(BackgroundReducer):
    """Averages the portions of each round between nodes, in one order on all ranks.

    Args:
        channels: The engine and its communicators.
        metrics: Counts seconds and bytes.
        order: Order of portions.
    """

    def __init__(self, channels: Channels, metrics: Metrics, order: Order) -> None:
        super().__init__(channels, metrics)
        self.order = order
        self._ready: deque[int] = deque()  # portions that are ready here, for the engine's thread

    def ready(self, place: int) -> None:
        """Note that a portion was started on this rank. Does not block."""
        super().ready(place)
        if self._channels.leads:
            self._ready.append(place)

    def _start_reducing(
        self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool
    ) -> list[WorkHandle[int]]:
        assert world, "inside a node the training thread adds"
        return [self._channels.engine.submit(self._cross([portion for portion, _ in portions]))]

    # --- on the engine's thread --------------------------------------------------------------

    def _cross(self, portions: Sequence[Portion]) -> Work[int]:
        now = _Round(
            len(portions), PriorityQueue(self.order, portions), ConcurrentReductions(self._channels)
        )
        turns = _TurnBroadcast(self._channels.comms.turns)
        yield partial(self._advance, now, turns)
        return now.abreast.nbytes

    def _advance(self, now: "_Round", turns: "_TurnBroadcast") -> bool:
        """Advance all portions without blocking; return whether every mean arrived."""
        for place in now.abreast.finished():
            self._deliver(place, now)
        while self._start_next(now, turns):
            pass
        self._note_published(sorted(now.published - self._averaged))
        return len(self._averaged) == now.count

    def _start_next(self, now: "_Round", turns: "_TurnBroadcast") -> bool:
        """Start the next portion of the common order, if this node is ready for it."""
        if now.turn is None:
            now.turn = self._poll_turn(now, turns)
        if now.turn is None or not now.abreast.free or not self._is_filled(now.turn):
            return False
        place, now.turn = now.turn, None
        total = self._buckets[place].reduce()
        assert total is not None, "it is filled"
        if total.numel():
            now.abreast.start(place, total)
        else:
            self._deliver(place, now)
        now.turn = self._poll_turn(now, turns)  # broadcast ahead, while this one crosses
        return True

    def _poll_turn(self, now: "_Round", turns: "_TurnBroadcast") -> int | None:
        """Return the next portion once its broadcast is over; start the broadcast if possible."""
        may_start = turns.request is None and now.turns_left > 0
        if may_start and (not self._channels.leads or self._queue_ready(now)):
            now.turns_left -= 1
            turns.start(self._take(now) if self._channels.leads else 0)
        if turns.request is None or not turns.request.Test():
            return None
        turn = turns.turn()
        self._note("next", turn)
        return turn

    def _deliver(self, place: int, now: "_Round") -> None:
        self._buckets[place].publish(1)
        now.published.add(place)
        self._note("crossed", place)

    def _take(self, now: "_Round") -> int:
        turn = now.waiting.take()
        self._note("taken", turn)
        return turn

    def _queue_ready(self, now: "_Round") -> bool:
        """Queue portions that became ready; return whether the queue has any."""
        while self._ready:
            portion = self._ready.popleft()
            now.waiting.add(portion)
            self._note("ready", portion)
        return len(now.waiting) > 0


@dataclass(slots=True)
class _Round:
    """Progress of the portions of a round."""

    count: int
    waiting: PriorityQueue  # on world rank 0: ready, and not taken
    abreast: ConcurrentReductions
    turns_left: int = 0  # turns that are still to be broadcast
    turn: int | None = None  # broadcast, and not started here
    published: set[int] = field(default_factory=set)  # portions that have crossed

    def __post_init__(self) -> None:
        self.turns_left = self.count


class _TurnBroadcast:
    """Broadcasts of the next portion from world rank 0, one at a time."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm, self._turn = comm, torch.zeros(1, dtype=torch.int64, device="cpu")
        self.request: MPI.Request | None = None

    def start(self, turn: int) -> None:
        """Start to broadcast world rank 0's turn; collective over the world, non-blocking."""
        self._turn[0] = turn
        self.request = self._comm.Ibcast(sum_buffer(self._turn), 0)

    def turn(self) -> int:
        """Return the turn, once the request is over."""
        self.request = None
        return int(self._turn)
