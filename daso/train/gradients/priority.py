"""Takes portions of gradients between nodes, the one that is needed first before the others.

Portions become ready while backward goes on, at other moments on each rank. World rank 0 takes of
those that are ready there the one that goes next, and tells the others, which wait until it is
ready there too: all ranks take the same order, without which sums would be wrong and nobody would
know. A few cross at a time, so that the link does not stand still between two, and one is told
ahead; what becomes ready then can overtake all but those. See `daso.plan.portions`.

No rank can wait for another for ever: world rank 0 has a portion of a step only when it is through
with the forward of that step, so all portions of the step before had crossed; and a backward waits
for portions of its own step, if at all, when all of them are ready on its rank.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import sum_buffer
from daso.comm.engine import Work, WorkHandle
from daso.comm.node.base import NodeBucket
from daso.plan.portions import Order, Portion, PriorityQueue
from daso.train.channels import Channels
from daso.train.gradients.background import BackgroundReducer
from daso.train.gradients.concurrent import ConcurrentReductions
from daso.train.metrics import Metrics

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["PriorityReducer"]


class PriorityReducer(BackgroundReducer):
    """The portions of one round after the other, on their way between nodes.

    Args:
        channels: The engine, and what runs on it.
        metrics: Where seconds and bytes are counted.
        order: Which portion goes first.
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
        told = _Turns(self._channels.comms.turns)
        yield partial(self._go_on, now, told)
        return now.abreast.nbytes

    def _go_on(self, now: "_Round", told: "_Turns") -> bool:
        """Take all of it as far as it goes now; return whether every portion has crossed."""
        for place in now.abreast.finished():
            self._deliver(place, now)
        while self._start_next(now, told):
            pass
        self._take_back(sorted(now.given - self._back))
        return len(self._back) == now.count

    def _start_next(self, now: "_Round", told: "_Turns") -> bool:
        """Start the portion whose turn it is, where all is ready for it."""
        if now.turn is None:
            now.turn = self._hear(now, told)
        if now.turn is None or not now.abreast.free or not self._is_filled(now.turn):
            return False
        place, now.turn = now.turn, None
        total = self._buckets[place].add()
        assert total is not None, "it is filled"
        if total.numel():
            now.abreast.start(place, total)
        else:
            self._deliver(place, now)
        now.turn = self._hear(now, told)  # the leader tells one ahead, while this one crosses
        return True

    def _hear(self, now: "_Round", told: "_Turns") -> int | None:
        """Return whose turn it is, once that is told; let the leader tell, as soon as it can."""
        if told.request is None and now.untold and (not self._channels.leads or self._take_in(now)):
            now.untold -= 1
            told.ask(self._take(now) if self._channels.leads else 0)
        if told.request is None or not told.request.Test():
            return None
        turn = told.turn()
        self._note("next", turn)
        return turn

    def _deliver(self, place: int, now: "_Round") -> None:
        self._buckets[place].deliver(1)
        now.given.add(place)
        self._note("crossed", place)

    def _take(self, now: "_Round") -> int:
        turn = now.waiting.take()
        self._note("taken", turn)
        return turn

    def _take_in(self, now: "_Round") -> bool:
        """Take in what came; return whether any portion is ready."""
        while self._ready:
            portion = self._ready.popleft()
            now.waiting.add(portion)
            self._note("ready", portion)
        return len(now.waiting) > 0


@dataclass(slots=True)
class _Round:
    """How far the portions of a round are."""

    count: int
    waiting: PriorityQueue  # on world rank 0: ready, and not taken
    abreast: ConcurrentReductions
    untold: int = 0  # turns that are still to be told
    turn: int | None = None  # told, and not started here
    given: set[int] = field(default_factory=set)  # portions that have crossed

    def __post_init__(self) -> None:
        self.untold = self.count


class _Turns:
    """World rank 0's words, one after the other."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm, self._word = comm, torch.zeros(1, dtype=torch.int64, device="cpu")
        self.request: MPI.Request | None = None

    def ask(self, mine: int) -> None:
        """Start to tell, or to be told; collective over the world, non-blocking."""
        self._word[0] = mine
        self.request = self._comm.Ibcast(sum_buffer(self._word), 0)

    def turn(self) -> int:
        """Return the word, once the request is over."""
        self.request = None
        return int(self._word)
