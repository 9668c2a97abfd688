"""What takes gradients through their averages while the training thread does something else."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from daso import trace
from daso.comm.engine import WorkHandle
from daso.comm.health.patience import Patience
from daso.comm.health.step_watchdog import LATE_SECONDS
from daso.comm.node.base import NodeBucket
from daso.errors import ExchangeError, StallError
from daso.plan.portions import Portion
from daso.train.channels import Channels
from daso.train.metrics import Metrics

__all__ = ["BackgroundReducer"]


class BackgroundReducer(ABC):
    """The buckets of one round after the other, averaged by other threads.

    Args:
        channels: The engine, and what runs on it.
        metrics: Where seconds and bytes are counted.
    """

    def __init__(self, channels: Channels, metrics: Metrics) -> None:
        self.log: list[tuple[str, int]] | None = None  # what happened, for tests
        self._channels, self._metrics = channels, metrics
        self._world = False  # this round is averaged over the world
        self._here: set[int] = set()  # places of buckets of this round that were handed over
        self._buckets: Sequence[NodeBucket] = ()  # of this round, in their order
        self._back: set[int] = set()  # places of those that hold the mean
        self._came = threading.Condition()  # one more does
        self._handles: list[WorkHandle[int]] = []  # of this round: bytes sent

    def begin(self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool) -> None:
        """Begin a round; all buckets of the last one were waited for. Does not block.

        Collective over the world, or the node; non-blocking.
        """
        self.finish()
        if self._handles:
            raise ExchangeError(
                "a backward must hand over all gradients before the next one begins, but one was "
                "broken off; start anew, from a checkpoint"
            )
        self._here.clear()
        self._back.clear()
        self._buckets = [bucket for _, bucket in portions]
        self._world = world
        self._handles = self._start_reducing(portions, world=world)

    def ready(self, place: int) -> None:
        """Note that a bucket was started on this rank. Does not block."""
        self._here.add(place)

    def wait(self, place: int) -> None:
        """Block until a bucket holds the mean."""
        if place in self._back:
            return
        kind = trace.WAIT_INTER_NODE if self._world else trace.WAIT_INTRA_NODE
        patience = Patience()
        with self._metrics.watch.waiting(kind), self._poll_eagerly(), self._came:
            # Asleep, not polling: the other threads need this one's core and interpreter lock.
            while not self._came.wait_for(lambda: place in self._back, LATE_SECONDS):
                self.check()
                if patience.seconds() > self._channels.engine.timeout_seconds:
                    self._give_up(place)

    def _give_up(self, place: int) -> None:
        """Raise, naming who is late, and let nothing follow: ranks are out of step from here."""
        engine = self._channels.engine
        missing = self._buckets[place].missing() or self._channels.missing()
        engine.give_up()
        raise StallError(
            f"all ranks must take part in a step within {engine.timeout_seconds:g} s, but they did "
            f"not: {missing}; look there, or raise Exchange.timeout_seconds"
        )

    @contextmanager
    def _poll_eagerly(self) -> Iterator[None]:
        """Let threads that carry poll more often: the training thread stands still."""
        with self._channels.engine.poll_eagerly(self._handles[-1]):
            yield

    def is_back(self, place: int) -> bool:
        """Return whether a bucket holds the mean. Does not block."""
        return place in self._back

    def finish(self) -> None:
        """Block until the round is over, where all of its buckets were handed over."""
        if self._handles and len(self._here) == len(self._buckets):
            for handle in self._handles:
                self._metrics.global_bytes_sent += self._channels.engine.wait(handle)
            self._handles = []

    def check(self) -> None:
        """Raise what went wrong in another thread since, if anything."""
        self._channels.engine.check()

    def close(self) -> bool:
        """Stop threads of this object's own; idempotent."""
        return True

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        self._channels.engine.abandon()

    @abstractmethod
    def _start_reducing(
        self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool
    ) -> list[WorkHandle[int]]:
        """Hand a round to other threads."""

    def _take_back(self, places: Iterable[int]) -> None:
        """Note, on the thread that carries, which of these buckets hold the mean now."""
        back = [place for place in places if self._buckets[place].delivered()]
        if back:
            for place in back:
                self._note("delivered", place)
            with self._came:
                self._back.update(back)
                self._came.notify_all()

    def _is_filled(self, place: int) -> bool:
        """Return whether a bucket was handed over on every rank of the node."""
        return place in self._here and self._buckets[place].filled()

    def _note(self, what: str, place: int) -> None:
        if self.log is not None:
            self.log.append((what, place))
