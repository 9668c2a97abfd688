"""One rank's rows, served: gradients are taken in, rows published, those of others received.

A thread beside training does that. It never touches live parameters: what it receives waits beside
them until the training thread takes it up.
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from daso import trace
from daso.comm.device.staging import DeviceStaging
from daso.comm.engine import Work
from daso.comm.p2p.send_queue import Message, SendQueue
from daso.errors import ExchangeError
from daso.server.compression import PushCompressor
from daso.server.partition import Partition
from daso.server.plan import Plan
from daso.server.shard import Contribution, ParameterShard, first_rows, rows_in
from daso.server.staging import Staging, sound
from daso.server.versions import RowVersions

__all__ = ["ShardServer", "pinned_on", "uneven"]

GRADIENTS, ROWS, LAST_STEP, LAST_ROWS = range(4)  # what messages are about
LATEST = sys.maxsize  # urgency of what is to leave after everything else


@dataclass(slots=True)
class _Round:
    """What happened since all ranks met."""

    clocks: list[float]  # of this rank's rows, as all were told
    step: int = 0  # that this rank takes
    last_steps: dict[int, int] = field(default_factory=dict)  # of ranks that take no more
    pausing: int | None = None  # this rank's last step, before it is told to all
    over: set[int] = field(default_factory=set)  # ranks whose last rows came


class ShardServer:
    """One rank's rows, served to all.

    Args:
        rank: World rank.
        shares: Which rows are whose.
        plan: How gradients are taken in.
        shard: This rank's rows.
        queue: To and from the others.
        copies: Between the device of the model and its host; None: gradients are packed on the
            host, and who packs them waits for a device.
    """

    def __init__(
        self,
        rank: int,
        shares: Partition,
        plan: Plan,
        shard: ParameterShard,
        queue: SendQueue,
        copies: DeviceStaging | None,
    ) -> None:
        self.plan, self.shares, self.shard = plan, shares, shard
        self.rank, self.ranks = rank, shares.ranks
        self.queue, self.copies = queue, copies
        self.compressor = PushCompressor(shares, plan.wire)
        self.rows = RowVersions(shares, plan, first_rows(shard))
        self.given: deque[Contribution] = deque()  # by the training thread
        self.news = threading.Condition()  # something came
        self.heard_at = time.perf_counter()  # when somebody was heard of last
        self.round = _Round([0.0] * len(shares.layers))
        self._staging = None if copies is None else Staging(copies)

    def begin(self) -> None:
        """Count steps anew: all ranks have met."""
        self.round = _Round([0.0] * len(self.shares.layers))

    # --- by the training thread --------------------------------------------------------------

    def give(self, owner: int, contribution: Contribution, finite: torch.Tensor) -> None:
        """Hand over gradients; does not block.

        Args:
            owner: To whom.
            contribution: Its row and base lie where the model is; nobody else writes to them.
            finite: Of each of its layers, whether its gradient is (layers,), there.
        """
        urgency = self._urgency(self.round.step + 1, contribution.layers)
        if self._staging is None:
            self._post(owner, urgency, contribution, finite)
        else:
            self._staging.begin(owner, urgency, contribution, finite)

    def _post(
        self, owner: int, urgency: int, contribution: Contribution, finite: torch.Tensor
    ) -> None:
        """Let gradients leave that are on the host; those of this rank's rows stay."""
        one = sound(self.shares, owner, contribution, finite)
        payload = self.compressor.encode(owner, one.layers, one.has, one.row)
        if owner == self.rank:
            # As others' are: what the wire loses is part of the next.
            row = self.compressor.decode(owner, one.layers, payload)
            self.given.append(replace(one, row=row))
            return
        notes = (GRADIENTS, one.step, one.layers, one.has, one.read, one.values)
        self.queue.enqueue(owner, Message(notes, payload, urgency))

    @property
    def backlog_bytes(self) -> int:
        """Bytes that were given and have not left, to the rank to which there are most."""
        staged = 0 if self._staging is None else self._staging.backlog_bytes()
        return staged + self.queue.backlog_bytes

    # --- by the thread that serves -----------------------------------------------------------

    def serve(self) -> Work[None]:
        """Work until all ranks have met; never blocks."""
        while not self.is_over():
            yield self._stirs
            changed = []
            for staged in () if self._staging is None else self._staging.take():
                self._post(staged.owner, staged.urgency, staged.contribution, staged.finite)
            for source, message in self.queue.take():
                changed.append((source, self._open(source, message)))
                self.heard_at = time.perf_counter()
            for _ in range(len(self.given)):  # no more: others wait too
                mine = self.shard.contribute(self.given.popleft())
                changed.append((self.rank, mine))
            self._publish_changes(changed)
            self._go_towards_the_end()
            with self.news:
                self.news.notify_all()

    def _stirs(self) -> bool:
        return (
            self.queue.move()
            or bool(self.given)
            or (self._staging is not None and self._staging.came())
            or self._last_step() is not None
            or self.is_over()
            or (self._is_uneven() and self.queue.idle)
        )

    def _last_step(self) -> int | None:
        """Return this rank's last step, if it is to be told: all before it was taken in."""
        pausing = self.round.pausing  # read first: what was given was given before the pause
        if self.given or self._staging or self.rank in self.round.last_steps:
            return None
        return pausing

    def _is_uneven(self) -> bool:
        """Return whether all ranks are told to have taken their last step, and not the same."""
        steps = self.round.last_steps.values()
        return self.plan.together and len(steps) == self.ranks and len(set(steps)) > 1

    def _open(self, source: int, message: Message) -> Sequence[int]:
        """Take in a message; return layers of this rank that have a new version."""
        about, *notes = message.notes
        if about == GRADIENTS:
            step, layers, has, read, values = notes
            start = time.perf_counter()
            row = self.compressor.decode(self.rank, layers, message.payload)
            contribution = Contribution(source, step, layers, has, read, values, row)
            changed = self.shard.contribute(contribution)
            trace.record(trace.SUMS, start, key=step)
            return changed
        if about == ROWS:
            layers, versions = notes
            row = pinned_on(self.copies, message.payload)
            self.rows.keep(source, rows_in(self.shares, source, layers, versions, row))
        elif about == LAST_STEP:
            return self._note_last(source, *notes)
        else:
            self.round.over.add(source)
        return ()

    def _note_last(self, rank: int, steps: int) -> Sequence[int]:
        """Note that a rank takes no more steps; return layers whose clock this changes."""
        self.round.last_steps[rank] = steps
        if self.plan.together or rank not in self.shard.contributors:
            return ()
        self.shard.finish(rank)
        # Where nobody waits for a clock, the last rows bring all.
        return () if self.plan.staleness is None else self.shares.owned(self.rank)

    def _publish_changes(self, changed: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Send new versions to those who need them: who brought the gradient, or all.

        A rank takes up a layer once in a step. Where nobody waits, the answer to its gradient is
        what it takes up in its next step; what comes between would only fill the link.
        """
        to: dict[int, set[int]] = {}
        for source, layers in changed:
            for layer in layers:
                for rank in (self.rank, *self._in_need(source, layer)):
                    to.setdefault(rank, set()).add(layer)
        alike: dict[frozenset[int], list[int]] = {}
        for rank, mine in to.items():
            alike.setdefault(frozenset(mine), []).append(rank)
        for which, ranks in alike.items():
            self._publish(sorted(which), ranks)

    def _in_need(self, source: int, layer: int) -> Iterable[int]:
        """Return the ranks that need a version which a rank's gradient has made."""
        everybody, bound = range(self.ranks), self.plan.staleness
        if self.plan.together or self.shard.contributors == (self.rank,):
            return everybody
        if bound is None:
            return (source,)
        before, self.round.clocks[layer] = self.round.clocks[layer], self.shard.clock(layer)
        if self.round.clocks[layer] > before:
            return everybody  # somebody may be waiting for that
        # Where the others are close behind, theirs will bring it.
        return (source,) if self.shard.ahead(source, layer) > 1 else ()

    def _publish(self, layers: Sequence[int], ranks: Sequence[int]) -> None:
        """Let some ranks have this rank's rows of layers."""
        if not self.plan.together:
            self._send_rows(layers, ranks, self.round.step + 1)
            return
        steps: dict[int, list[int]] = {}  # each version is taken up, in its order
        for layer in layers:
            steps.setdefault(int(self.shard.clock(layer)), []).append(layer)
        for step, mine in sorted(steps.items()):
            self._send_rows(mine, ranks, step)

    def _send_rows(self, layers: Sequence[int], ranks: Sequence[int], step: int) -> None:
        row, urgency = self.shard.packed(layers), self._urgency(step, layers)
        # Where nobody goes in step the newest is as good as all.
        covers = frozenset(() if self.plan.together else layers)
        for rank in ranks:
            about = [self.shard.about(layer, rank) for layer in layers]
            if rank == self.rank:
                self.rows.keep(
                    rank, rows_in(self.shares, rank, layers, about, pinned_on(self.copies, row))
                )
            else:
                notes = (ROWS, tuple(layers), about)
                self.queue.enqueue(rank, Message(notes, row, urgency, covers))

    def _urgency(self, step: int, layers: Sequence[int]) -> int:
        """Return how soon layers are needed that a step begins with: those of an earlier first."""
        return step * len(self.shares.layers) + min(layers)

    def _go_towards_the_end(self) -> None:
        if (last := self._last_step()) is not None:
            self._tell_all((LAST_STEP, last), LATEST - 1)
            self._publish_changes([(self.rank, self._note_last(self.rank, last))])
        if self._is_uneven():
            if self.queue.idle:  # all others know it too
                fewest, most = (
                    find(self.round.last_steps, key=self.round.last_steps.__getitem__)
                    for find in (min, max)
                )
                raise ExchangeError(
                    uneven(fewest, self.round.last_steps[fewest], most, self.round.last_steps[most])
                )
        elif len(self.round.last_steps) == self.ranks and self.rank not in self.round.over:
            owned = self.shares.owned(self.rank)
            if owned and not self.plan.together:  # where everybody has every version
                self._publish(owned, range(self.ranks))
            self._tell_all((LAST_ROWS,), LATEST)
            self.round.over.add(self.rank)

    def _tell_all(self, notes: tuple[int, ...], urgency: int) -> None:
        for rank in range(self.ranks):
            if rank != self.rank:
                self.queue.enqueue(
                    rank, Message(notes, torch.empty(0, dtype=torch.uint8, device="cpu"), urgency)
                )

    def is_over(self) -> bool:
        """Return whether all ranks' last rows are here, and this rank's have left."""
        return len(self.round.over) == self.ranks and self.queue.idle


def pinned_on(copies: DeviceStaging | None, row: torch.Tensor) -> torch.Tensor:
    """Return what holds a row's values, and is copied to the device while others go on."""
    if copies is None:
        return row
    copy = copies.memory(row.nbytes).view(row.dtype).view(row.shape)
    return copy.copy_(row)


def uneven(rank: int, steps: int, other: int, others_steps: int) -> str:
    """Return the message for ranks that took other numbers of steps."""
    return (
        f"every rank must take the same number of steps with staleness=0, but rank {rank} took "
        f"{steps} and rank {other} is in number {others_steps}; give every rank the same number of "
        f"batches, or allow staleness"
    )
