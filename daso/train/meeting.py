"""Where all ranks meet: what they check, wait for and average together, beside parameters."""

import logging
from typing import TypeVar

import torch

from daso import trace
from daso.comm.engine import Ticket
from daso.comm.topology import Topology
from daso.comm.vote import gather
from daso.errors import ConfigError, ExchangeError, LayoutError, NonFiniteError
from daso.train.agree import (
    average_tensors,
    drop_partial_state,
    mend_buffers,
    state_digest,
    state_tensors,
)
from daso.train.links import Links
from daso.train.metrics import Counts
from daso.train.params import Trained

__all__ = ["Meeting", "agree_options"]

Result = TypeVar("Result")
Value = TypeVar("Value")
logger = logging.getLogger("daso")

DROPS_LATELY = 3  # drops, without two good exchanges in a row between, at which all raise


def agree_options(trained: Trained, topology: Topology, mine: str) -> None:
    """Refuse what must be equal on all ranks and is not, before anything is sent.

    Args:
        trained: Whose optimizer state is compared.
        topology: Whose world.
        mine: How this rank was told to exchange, as text.

    Raises:
        ConfigError: Options differ; the same on every rank.
        LayoutError: The optimizer's state differs; the same on every rank.

    Collective over the world; blocking.
    """
    first = topology.world.bcast(mine)
    problem = None
    if mine != first:
        problem = (
            f"every rank must be given the same options, but there are {mine} here and {first} on "
            f"rank 0; pass the same keywords everywhere"
        )
    topology.agree(problem, ConfigError)
    if not topology.same(state_digest(trained.inner, trained.named)):
        raise LayoutError(
            "the inner optimizer's state must be the same on every rank, but it differs; load it "
            "on every rank, or on none, before wrapping"
        )


class Meeting:
    """What all ranks do together between exchanges; each waits no longer than the stall limit.

    Args:
        trained: The optimizer and what it trains.
        topology: Whose world.
        links: The engine that all traffic goes through.
        counts: Where seconds and bytes are counted.
    """

    def __init__(self, trained: Trained, topology: Topology, links: Links, counts: Counts) -> None:
        self.trained, self.topology = trained, topology
        self.links, self.counts = links, counts

    def wait(self, ticket: Ticket[Result]) -> Result:
        """Block until work is over and return its result; standing still is exposed time."""
        with self.counts.watch.waiting(trace.NODES, ticket.key):
            return self.links.engine.wait(ticket)

    def gather(self, number: float) -> list[float]:
        """Return every rank's number, in rank order. Collective over the world; blocking."""
        return self.wait(self.links.engine.submit(self.links.gather(number)))

    def same_order(self, order: list[int]) -> list[int]:
        """Return world rank 0's order. Collective over the world; blocking."""
        self.gather(0.0)  # the bell is heard there
        mine = order if self.topology.place.rank == 0 else []
        return self._everyones(mine)[0]

    def _everyones(self, value: Value) -> list[Value]:
        return gather(self.topology, value, self.links.settings.exchange.stall_seconds)

    def agree_batch(self, batch: int) -> None:
        """Raise on every rank alike unless all have taken the same number of steps.

        Args:
            batch: Steps of this rank.

        Raises:
            ExchangeError: Naming who took fewest and most.

        Collective over the world; blocking.
        """
        with self.links.bell.meeting(batch):
            steps = self.gather(float(batch))
        fewest, most = min(steps), max(steps)
        if fewest != most:
            raise ExchangeError(
                f"every rank must take the same number of steps, but rank {steps.index(fewest)} "
                f"took {fewest:.0f} and rank {steps.index(most)} took {most:.0f}; give every rank "
                f"the same number of batches"
            )

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks, the same bits everywhere; blocking."""
        values = self.gather(value)
        return sum(values) / len(values)

    def join(self) -> None:
        """Average the inner optimizer's state: from here all nodes take the same steps.

        Collective over the world; blocking.
        """
        self.gather(0.0)
        inner, named = self.trained.inner, self.trained.named
        everyones = self._everyones([*state_tensors(inner, named)])
        drop_partial_state(inner, named, everyones)
        tensors = [*state_tensors(inner, named).values()]
        self._average(tensors)
        self.counts.event("join", tensors=len(tensors))

    def average_buffers(self) -> None:
        """Make the model's buffers (BatchNorm statistics) equal: means over all ranks.

        Collective over the world; blocking.
        """
        self._average(self.trained.buffers())

    def mend_buffers(self) -> None:
        """Give buffers that are not finite here the mean of the ranks where they are.

        Collective over the world; blocking.
        """
        mend_buffers(self.trained.buffers(), self._average)

    def count_drop(self, what: str) -> None:
        """Note a drop; raise, on every rank alike, when there were too many."""
        lately = self.counts.drop()
        self.counts.event("dropped", why=what)
        if self.topology.place.rank == 0:
            logger.warning(what)
        limit = 1 if self.links.settings.exchange.nonfinite == "raise" else DROPS_LATELY
        if lately >= limit:
            raise NonFiniteError(
                f"values must be finite, but {what} (drop number {lately} within a few exchanges); "
                f"lower the learning rate, clip gradients, or look at that rank's data"
            )

    def _average(self, tensors: list[torch.Tensor]) -> None:
        with self.counts.watch.waiting(trace.NODES):
            self.counts.global_bytes_sent += average_tensors(
                tensors,
                self.topology,
                self.links.world,
                self.links.engine.run,
                self.links.settings.exchange.chunk_bytes,
            )
