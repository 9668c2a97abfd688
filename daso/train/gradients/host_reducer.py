"""Adds gradients on the host during backward, in a separate thread.

Chunk after chunk, in the order in which they fill, a thread takes gradients to the host where they
are elsewhere, adds this rank's part of all ranks' in rank order, and brings the sums back: the
three stages of different chunks overlap each other and the backward of the layers below (after
US 10949746 B2, IBM). Between nodes the engine exchanges a chunk when it is added. On CPUs gradients
lie in memory that the node shares, so nothing is taken anywhere, and the thread only adds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from daso import trace
from daso.comm.engine import Engine, Work, WorkHandle
from daso.comm.node.base import NodeBucket
from daso.errors import ExchangeError
from daso.plan.portions import Portion
from daso.train.channels import Channels
from daso.train.gradients.background import BackgroundReducer, ConcurrentReductions
from daso.train.metrics import Metrics


class HostReducer(BackgroundReducer):
    """Copies chunks of gradients to the host, adds them there, and copies the sums back.

    Args:
        channels: The engine that exchanges between nodes.
        metrics: Counts seconds and bytes.
        local_size: Ranks of the node.
    """

    def __init__(self, channels: Channels, metrics: Metrics, local_size: int) -> None:
        super().__init__(channels, metrics)
        self._local_size = local_size
        # Not the engine's thread: an exchange between nodes may take many batches, sums take one.
        self._adder = Engine(
            channels.engine.timeout_seconds,
            channels.missing,
            channels.late,
            name="daso-host",
            kind=trace.SUMS,
        )

    def check(self) -> None:
        """Raise the first error of another thread, if any."""
        super().check()
        self._adder.check()

    @contextmanager
    def _poll_eagerly(self) -> Iterator[None]:
        with super()._poll_eagerly(), self._adder.poll_eagerly(self._handles[-1]):
            yield

    def _give_up(self, place: int) -> None:
        self._adder.give_up()
        super()._give_up(place)

    def close(self) -> bool:
        """Stop the thread that adds; idempotent."""
        return self._adder.close()

    def abandon(self) -> None:
        """Stop all threads whatever is under way; for the end of the process."""
        self._adder.abandon()
        super().abandon()

    def _start_reducing(
        self, portions: Sequence[tuple[Portion, NodeBucket]], *, world: bool
    ) -> list[WorkHandle[int]]:
        now = _Round(len(portions))
        handles = [self._adder.submit(self._add(now, world=world))]
        if world:
            handles.insert(0, self._channels.engine.submit(self._exchange(now)))
        return handles

    # --- on the thread that adds -------------------------------------------------------------

    def _add(self, now: "_Round", *, world: bool) -> Work[int]:
        yield partial(now.guarded, partial(self._advance, now, world=world))
        return 0

    def _advance(self, now: "_Round", *, world: bool) -> bool:
        """Advance every chunk without blocking; return whether all hold the mean."""
        while len(now.sums) < now.count and self._is_filled(len(now.sums)):
            place = len(now.sums)
            total = self._buckets[place].reduce()
            assert total is not None, "it is filled"
            self._note("added", place)
            now.sums.append(total)
            if not world or not total.numel():
                now.means.add(place)
        for place in sorted(now.means - now.published):
            self._buckets[place].publish(1 if world else self._local_size)
            now.published.add(place)
        self._note_published(sorted(now.published - self._averaged))
        return len(self._averaged) == now.count

    # --- on the engine's thread --------------------------------------------------------------

    def _exchange(self, now: "_Round") -> Work[int]:
        abreast = ConcurrentReductions(self._channels)
        yield partial(now.guarded, partial(self._advance_exchange, now, abreast))
        return abreast.nbytes

    def _advance_exchange(self, now: "_Round", abreast: ConcurrentReductions) -> bool:
        """Average added chunks between nodes, in order, a few at a time; return whether all are."""
        now.means.update(abreast.finished())
        while now.started < len(now.sums) and abreast.free:
            if now.sums[now.started].numel():
                abreast.start(now.started, now.sums[now.started])
            now.started += 1
        return len(now.means) == now.count


class _Round:
    """Progress of the chunks of a round, for both threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sums: list[torch.Tensor] = []  # of chunks, in order: this rank's parts
        self.started = 0  # sums whose exchange began
        self.means: set[int] = set()  # chunks whose sums may be published in the node
        self.published: set[int] = set()
        self.failed: BaseException | None = None  # in one thread; the other must not wait for it

    def guarded(self, poll: Callable[[], bool]) -> bool:
        """Poll, and record an error for the other thread."""
        if self.failed is not None:
            raise ExchangeError(f"{self.failed}", code="averaging-failed") from self.failed
        try:
            return poll()
        except BaseException as error:
            self.failed = error
            raise
