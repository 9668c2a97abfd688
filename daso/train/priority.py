"""Takes portions of gradients between nodes, the one that is needed first before the others.

Portions become ready while backward goes on, at other moments on each rank. World rank 0 takes of
those that are ready there the one that goes next, and tells the others, which wait until it is
ready there too: all ranks take the same order, without which sums would be wrong and nobody would
know. It tells one ahead, while a portion crosses, so that the link does not wait for the word;
what becomes ready then can overtake all but that one. See `daso.plan.slices`.

No rank can wait for another for ever: world rank 0 has a portion of a step only when it is through
with the forward of that step, so all portions of the step before had crossed; and a backward waits
for portions of its own step, if at all, when all of them are ready on its rank.
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from daso.comm.dtypes import sum_buffer
from daso.comm.engine import Ticket, Work
from daso.comm.node import NodeBucket
from daso.plan.slices import Order, Portion, Waiting
from daso.train.carrier import Carrier
from daso.train.links import Links
from daso.train.metrics import Counts

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Crossing"]


class Crossing(Carrier):
    """The portions of one round after the other, on their way between nodes.

    Args:
        links: The engine, and what runs on it.
        counts: Where seconds and bytes are counted.
        order: Which portion goes first.
    """

    def __init__(self, links: Links, counts: Counts, order: Order) -> None:
        super().__init__(links, counts)
        self.order = order
        self._came: deque[int] = deque()  # portions that are ready here, for the engine's thread

    def ready(self, place: int) -> None:
        """Note that a portion was started on this rank. Does not block."""
        super().ready(place)
        if self._links.leads:
            self._came.append(place)

    def _carry(
        self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool
    ) -> list[Ticket[int]]:
        assert world, "inside a node the training thread adds"
        return [self._links.engine.submit(self._cross([portion for portion, _ in portions]))]

    # --- on the engine's thread --------------------------------------------------------------

    def _cross(self, portions: Sequence[Portion]) -> Work[int]:
        nbytes, told = 0, _Turns(self._links.turns)
        waiting = Waiting(self.order, portions)
        for left in reversed(range(len(portions))):
            turn = yield from self._next(told, waiting)
            self._note("next", turn)
            memory = self._buckets[turn]
            if left and (not self._links.leads or self._take_in(waiting)):
                self._tell(told, waiting)
            yield partial(self._is_filled, turn)
            total = memory.add()
            assert total is not None, "it is filled"
            if total.numel():
                nbytes += yield from self._links.gradient_mean(total)
            memory.deliver(1)
            self._note("crossed", turn)
        return nbytes

    def _next(
        self, told: "_Turns", waiting: Waiting
    ) -> Generator["Sequence[MPI.Request] | Callable[[], bool]", None, int]:
        """Return which portion all ranks take now."""
        if told.request is None:
            if self._links.leads:
                yield lambda: self._take_in(waiting)
            self._tell(told, waiting)
        assert told.request is not None
        yield [told.request]
        return told.turn()

    def _tell(self, told: "_Turns", waiting: Waiting) -> None:
        """Start to tell, or to hear, which portion goes next."""
        turn = waiting.take() if self._links.leads else 0
        if self._links.leads:
            self._note("taken", turn)
        told.ask(turn)

    def _take_in(self, waiting: Waiting) -> bool:
        """Take in what came; return whether any portion is ready."""
        while self._came:
            portion = self._came.popleft()
            waiting.add(portion)
            self._note("ready", portion)
        return len(waiting) > 0


class _Turns:
    """World rank 0's words, one after the other."""

    def __init__(self, comm: "MPI.Comm") -> None:
        self._comm, self._word = comm, torch.zeros(1, dtype=torch.int64)
        self.request: MPI.Request | None = None

    def ask(self, mine: int) -> None:
        """Start to tell, or to be told; collective over the world, non-blocking."""
        self._word[0] = mine
        self.request = self._comm.Ibcast(sum_buffer(self._word), 0)

    def turn(self) -> int:
        """Return the word, once the request is over."""
        self.request = None
        return int(self._word)
