"""Background reducers: averages of gradients in other threads."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from daso import trace
from daso.comm.engine import NestedWork, WorkHandle
from daso.comm.node.base import NodeBucket
from daso.comm.step_timer import LATE_SECONDS, RunningClock
from daso.errors import ConfigError, ExchangeError, StallError
from daso.plan.portions import Portion
from daso.train.channels import Channels
from daso.train.gradients.buckets import FlatGradients
from daso.train.gradients.cuts import Bucket
from daso.train.metrics import Metrics


class BackgroundReducer(ABC):
    """Averages the buckets of each round in other threads.

    Args:
        channels: The engine and its communicators.
        metrics: Counts seconds and bytes.
    """

    def __init__(self, channels: Channels, metrics: Metrics) -> None:
        self.log: list[tuple[str, int]] | None = None  # what happened, for tests
        self._channels, self._metrics = channels, metrics
        self._world = False  # this round is averaged over the world
        self._submitted: set[int] = set()  # places of this round's buckets that this rank started
        self._buckets: Sequence[NodeBucket] = ()  # of this round, in order
        self._averaged: set[int] = set()  # places of buckets that hold the mean
        self._arrival = threading.Condition()  # another bucket holds the mean
        self._handles: list[WorkHandle[int]] = []  # of this round: bytes sent

    def begin(self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool) -> None:
        """Begin a round; all buckets of the last one were waited for. Does not block.

        Collective over the world, or the node; non-blocking.
        """
        self.finish()
        if self._handles:
            raise ExchangeError(
                "a backward must hand over all gradients before the next one begins, but one was "
                "broken off; start again, from a checkpoint",
                code="backward-broken-off",
            )
        self._submitted.clear()
        self._averaged.clear()
        self._buckets = [bucket for _, bucket in portions]
        self._world = world
        self._handles = self._start_reducing(portions, world=world)

    def ready(self, place: int) -> None:
        """Note that a bucket was started on this rank. Does not block."""
        self._submitted.add(place)

    def wait(self, place: int) -> None:
        """Block until a bucket holds the mean."""
        if place in self._averaged:
            return
        kind = trace.WAIT_INTER_NODE if self._world else trace.WAIT_INTRA_NODE
        waited = RunningClock()
        with self._metrics.watch.waiting(kind), self._poll_eagerly(), self._arrival:
            # Asleep, not polling: the other threads need this one's core and interpreter lock.
            while not self._arrival.wait_for(lambda: place in self._averaged, LATE_SECONDS):
                self.check()
                if waited.seconds() > self._channels.engine.timeout_seconds:
                    self._give_up(place)

    def _give_up(self, place: int) -> None:
        """Raise an error that names the late rank, and stop the engine: ranks are out of step."""
        engine = self._channels.engine
        missing = self._buckets[place].missing() or self._channels.missing()
        engine.give_up()
        raise StallError(
            f"all ranks must take part in a step within {engine.timeout_seconds:g} s, but they did "
            f"not: {missing}; look there, or raise Exchange.timeout_seconds",
            code="ranks-did-not-arrive",
        )

    @contextmanager
    def _poll_eagerly(self) -> Iterator[None]:
        """Let reducing threads poll more often while the training thread waits."""
        with self._channels.engine.poll_eagerly(self._handles[-1]):
            yield

    def is_averaged(self, place: int) -> bool:
        """Return whether a bucket holds the mean. Does not block."""
        return place in self._averaged

    def finish(self) -> None:
        """Block until the round is over, where all of its buckets were handed over."""
        if self._handles and len(self._submitted) == len(self._buckets):
            for handle in self._handles:
                self._metrics.global_bytes_sent += self._channels.engine.wait(handle)
            self._handles = []

    def check(self) -> None:
        """Raise the first error of another thread, if any."""
        self._channels.engine.check()

    def close(self) -> bool:
        """Stop the threads that this object started; idempotent."""
        return True

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        self._channels.engine.abandon()

    @abstractmethod
    def _start_reducing(
        self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool
    ) -> list[WorkHandle[int]]:
        """Hand a round to other threads."""

    def _note_published(self, places: Iterable[int]) -> None:
        """Note which of these buckets hold the mean now, on a reducing thread."""
        published = [place for place in places if self._buckets[place].published()]
        if published:
            for place in published:
                self._note("delivered", place)
            with self._arrival:
                self._averaged.update(published)
                self._arrival.notify_all()

    def _is_filled(self, place: int) -> bool:
        """Return whether a bucket was handed over on every rank of the node."""
        return place in self._submitted and self._buckets[place].filled()

    def _note(self, event: str, place: int) -> None:
        if self.log is not None:
            self.log.append((event, place))


class CarriedBuckets:
    """Buckets that a background reducer averages.

    Args:
        rows: The rows that are cut into the buckets.
    """

    def __init__(self, rows: FlatGradients) -> None:
        self._rows = rows
        self._background: BackgroundReducer | None = None  # of this round

    def under_way(self) -> bool:
        """Return whether buckets were handed over and not collected."""
        return any(bucket.under_way for bucket in self._rows.buckets)

    def begin(self, background: BackgroundReducer, *, world: bool) -> None:
        """Begin a round; all buckets of the last one were collected."""
        if self.under_way():
            raise ConfigError(
                "a step must follow each backward where no step waits for all gradients, but "
                "another backward came first; put all but the last under optimizer.no_sync(), "
                "or use Gradients(step='model')",
                code="backward-without-step",
            )
        self._background = background
        portions = [(bucket.portion, bucket.memory) for bucket in self._rows.buckets]
        background.begin(portions, world=world)

    def start(
        self,
        background: BackgroundReducer,
        buckets: Sequence[Bucket],
        start: Callable[[Bucket], None],
        *,
        all_of_them: bool = False,
    ) -> None:
        """Hand over buckets that are filled."""
        for bucket in buckets:
            if not bucket.under_way and (all_of_them or not bucket.missing):
                start(bucket)
                bucket.under_way = True
                background.ready(bucket.place)

    def collect(self, params: Iterable[int]) -> None:
        """Block until the means of parameters (indices) arrived, and deliver them."""
        buckets_of = self._rows.buckets_of
        for bucket in [bucket for index in params for bucket in buckets_of.get(index, [])]:
            if bucket.under_way:
                assert self._background is not None, "it was handed over"
                self._background.wait(bucket.place)
                bucket.under_way = False
                self._rows.deliver(bucket)

    def arrived(self, params: Iterable[int]) -> set[int]:
        """Return the parameters (indices) whose means arrived. Does not block."""
        missing = set[int]()
        for bucket in self._rows.buckets:
            background = self._background if bucket.under_way else None
            if background is not None and not background.is_averaged(bucket.place):
                missing.update(bucket.params)
        return set(params) - missing


class ConcurrentReductions:
    """Means of gradients over the world, a few at a time, each on its own communicator.

    Runs on the engine's thread. Overlapping means keep the link busy.

    Args:
        channels: Communicators between nodes. All ranks of a lane start the same means in the
            same order; they may finish in another.
    """

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._slots: list[tuple[int, NestedWork[int]] | None] = [None] * channels.abreast
        self._started = 0
        self.nbytes = 0  # sent by this rank

    @property
    def free(self) -> bool:
        """Return whether a slot is free for another mean."""
        return self._slots[self._started % len(self._slots)] is None

    def start(self, place: int, total: torch.Tensor) -> None:
        """Start to replace a sum over this node by the mean over the world. Does not block."""
        slot = self._started % len(self._slots)
        self._slots[slot] = place, NestedWork(self._channels.gradient_mean(total, slot))
        self._started += 1

    def finished(self) -> list[int]:
        """Advance all means; return the places of those that finished. Does not block."""
        over = []
        for slot, under_way in enumerate(self._slots):
            if under_way is not None and under_way[1].advance():
                place, work = under_way
                self.nbytes += work.result or 0
                self._slots[slot] = None
                over.append(place)
        return over
