"""Server of one rank's rows: applies gradients, publishes rows, receives those of other ranks.

It runs on a thread alongside training and never writes to live parameters: received rows wait until
the training thread loads them.
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
from daso.server.clipping import LastNorm, squared_norm
from daso.server.compression import PushCompressor
from daso.server.partition import Partition
from daso.server.plan import Plan
from daso.server.rows import RowVersions, rows_in
from daso.server.shard import Contribution, ParameterShard
from daso.server.staging import Staging, without_nonfinite

GRADIENTS, ROWS, LAST_STEP, LAST_ROWS = range(4)  # kinds of messages
LATEST = sys.maxsize  # urgency of messages to send after all others


@dataclass(slots=True)
class _Round:
    """State since the last synchronization of all ranks."""

    clocks: list[float]  # of this rank's rows, as last published to all
    step: int = 0  # current step of this rank
    last_steps: dict[int, int] = field(default_factory=dict)  # of ranks that take no more steps
    pausing: int | None = None  # this rank's last step, before it is announced
    over: set[int] = field(default_factory=set)  # ranks whose last rows have arrived


class ShardServer:
    """Serves one rank's rows to all ranks."""

    def __init__(
        self,
        rank: int,
        partition: Partition,
        plan: Plan,
        shard: ParameterShard,
        queue: SendQueue,
        copies: DeviceStaging | None,  # None: gradients are packed on the host
    ) -> None:
        self.plan, self.partition, self.shard = plan, partition, shard
        self.rank, self.ranks = rank, partition.ranks
        self.queue, self.copies = queue, copies
        self.compressor = PushCompressor(partition, plan.wire)
        self.rows = RowVersions(partition, plan)
        self.norm = LastNorm(sum(map(len, partition.owners)))
        self.own_contributions: deque[Contribution] = deque()  # from the training thread
        self.progress = threading.Condition()  # notified after every poll
        self.last_message_at = time.perf_counter()  # time of the last message
        self.round = _Round([0.0] * len(partition.layers))
        self._staging = None if copies is None else Staging(copies)

    def begin(self) -> None:
        """Restart the count of steps: all ranks have synchronized."""
        self.round = _Round([0.0] * len(self.partition.layers))
        self.norm.begin()

    # --- called by the training thread -------------------------------------------------------

    def give(self, owner: int, contribution: Contribution, finite: torch.Tensor) -> None:
        """Push gradients, with flags whether each layer's are finite (layers,); does not block."""
        # The row and the flags are on the model's device; only this method writes to them.
        urgency = self._urgency(self.round.step + 1, contribution.layers)
        if self._staging is None:
            self._post(owner, urgency, contribution, finite)
        else:
            self._staging.begin(owner, urgency, contribution, finite)

    def _post(
        self, owner: int, urgency: int, contribution: Contribution, finite: torch.Tensor
    ) -> None:
        """Queue gradients that are on the host; store those of this rank's own rows."""
        gradients = without_nonfinite(self.partition, owner, contribution, finite)
        gradients = replace(gradients, clip=self.norm.factor(self.plan.clip_norm))
        if self.plan.clips_own_norm:
            self.norm.add(owner, self._squares(owner, gradients))
        payload = self.compressor.encode(owner, gradients.layers, gradients.has, gradients.row)
        if owner == self.rank:
            # The next gradient includes the rounding error, as for other ranks.
            row = self.compressor.decode(owner, gradients.layers, payload)
            self.own_contributions.append(replace(gradients, row=row))
            return
        notes = (
            GRADIENTS,
            gradients.step,
            gradients.layers,
            gradients.has,
            gradients.read,
            gradients.values,
            gradients.clip,
        )
        self.queue.enqueue(owner, Message(notes, payload, urgency))

    def _squares(self, owner: int, gradients: Contribution) -> dict[int, float]:
        """Return the squared norms of gradients for an owner, by layer."""
        unpacked = self.partition.unpack(owner, gradients.layers, gradients.row)
        return {
            layer: squared_norm(next(unpacked)[1] for _ in self.partition.layers[layer])
            for layer in gradients.layers
        }

    @property
    def backlog_bytes(self) -> int:
        """Return the unsent bytes to the rank with most of them."""
        staged = 0 if self._staging is None else self._staging.backlog_bytes()
        return staged + self.queue.backlog_bytes

    # --- called by the serving thread --------------------------------------------------------

    def serve(self) -> Work[None]:
        """Serve until all ranks have synchronized; never blocks."""
        while not self.is_over():
            yield self._has_work
            changed = []
            for staged in () if self._staging is None else self._staging.take():
                self._post(staged.owner, staged.urgency, staged.contribution, staged.finite)
            for source, message in self.queue.take():
                changed.append((source, self._process(source, message)))
                self.last_message_at = time.perf_counter()
            for _ in range(len(self.own_contributions)):  # a bounded number: other work waits too
                layers = self.shard.contribute(self.own_contributions.popleft())
                changed.append((self.rank, layers))
            self._publish_changes(changed)
            self._finish_round()
            with self.progress:
                self.progress.notify_all()

    def _has_work(self) -> bool:
        return (
            self.queue.move()
            or bool(self.own_contributions)
            or (self._staging is not None and self._staging.has_arrived())
            or self._last_step() is not None
            or self.is_over()
            or (self._has_unequal_steps() and self.queue.idle)
        )

    def _last_step(self) -> int | None:
        """Return this rank's last step once all its gradients are applied; else None."""
        pausing = self.round.pausing  # read first: contributions precede the pause
        if self.own_contributions or self._staging or self.rank in self.round.last_steps:
            return None
        return pausing

    def _has_unequal_steps(self) -> bool:
        """Return whether all ranks have announced their last step, and the steps differ."""
        steps = self.round.last_steps.values()
        return self.plan.is_synchronous and len(steps) == self.ranks and len(set(steps)) > 1

    def _process(self, source: int, message: Message) -> Sequence[int]:
        """Process a message; return this rank's layers with a new version."""
        kind, *notes = message.notes
        if kind == GRADIENTS:
            step, layers, has, read, values, clip = notes
            start = time.perf_counter()
            row = self.compressor.decode(self.rank, layers, message.payload)
            contribution = Contribution(source, step, layers, has, read, values, row, clip)
            changed = self.shard.contribute(contribution)
            trace.record(trace.SUMS, start, key=step)
            return changed
        if kind == ROWS:
            layers, versions, squares = notes
            self.norm.add(source, squares)
            row = pinned_on(self.copies, message.payload)
            self.rows.keep(source, rows_in(self.partition, source, layers, versions, row))
        elif kind == LAST_STEP:
            return self._note_last(source, *notes)
        else:
            self.round.over.add(source)
        return ()

    def _note_last(self, rank: int, steps: int) -> Sequence[int]:
        """Record that a rank takes no more steps; return layers whose clock changes."""
        self.round.last_steps[rank] = steps
        if self.plan.is_synchronous or rank not in self.shard.contributors:
            return ()
        self.shard.finish(rank)
        # Without a bound on staleness, the last rows include this change.
        return () if self.plan.staleness is None else self.partition.owned(self.rank)

    def _publish_changes(self, changed: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Send new versions to the ranks that need them: the gradient's source, or all ranks."""
        # A rank loads a layer once per step. Without a bound it loads the reply to its own gradient
        # in its next step; versions in between would only occupy the link.
        layers_by_rank: dict[int, set[int]] = {}
        for source, layers in changed:
            for layer in layers:
                for rank in (self.rank, *self._readers_of(source, layer)):
                    layers_by_rank.setdefault(rank, set()).add(layer)
        ranks_by_layers: dict[frozenset[int], list[int]] = {}
        for rank, layers_of_rank in layers_by_rank.items():
            ranks_by_layers.setdefault(frozenset(layers_of_rank), []).append(rank)
        for layer_set, ranks in ranks_by_layers.items():
            self._publish(sorted(layer_set), ranks)

    def _readers_of(self, source: int, layer: int) -> Iterable[int]:
        """Return the ranks that need the version created by a rank's gradient."""
        all_ranks, bound = range(self.ranks), self.plan.staleness
        if self.plan.is_synchronous or self.shard.contributors == (self.rank,):
            return all_ranks
        if bound is None:
            return (source,)
        before, self.round.clocks[layer] = self.round.clocks[layer], self.shard.clock(layer)
        if self.round.clocks[layer] > before:
            return all_ranks  # some rank may be waiting for this clock
        # If the others are close behind, their own replies will include it.
        return (source,) if self.shard.ahead(source, layer) > 1 else ()

    def _publish(self, layers: Sequence[int], ranks: Sequence[int]) -> None:
        """Send this rank's rows of layers to some ranks."""
        if not self.plan.is_synchronous:
            self._send_rows(layers, ranks, self.round.step + 1)
            return
        steps: dict[int, list[int]] = {}  # each version is loaded, in order
        for layer in layers:
            steps.setdefault(int(self.shard.clock(layer)), []).append(layer)
        for step, layers_of_step in sorted(steps.items()):
            self._send_rows(layers_of_step, ranks, step)

    def _send_rows(self, layers: Sequence[int], ranks: Sequence[int], step: int) -> None:
        row, urgency = self.shard.packed(layers), self._urgency(step, layers)
        squares = (
            {layer: self.shard.squares[layer] for layer in layers}
            if self.plan.clips_mean_norm
            else {}
        )
        # In asynchronous steps the newest version replaces all earlier ones.
        covers = frozenset(() if self.plan.is_synchronous else layers)
        for rank in ranks:
            states = [self.shard.row_state(layer, rank) for layer in layers]
            if rank == self.rank:
                self.norm.add(rank, squares)
                self.rows.keep(
                    rank, rows_in(self.partition, rank, layers, states, pinned_on(self.copies, row))
                )
            else:
                notes = (ROWS, tuple(layers), states, squares)
                self.queue.enqueue(rank, Message(notes, row, urgency, covers))

    def _urgency(self, step: int, layers: Sequence[int]) -> int:
        """Return the urgency of layers: earlier steps first, then earlier layers."""
        return step * len(self.partition.layers) + min(layers)

    def _finish_round(self) -> None:
        if (last := self._last_step()) is not None:
            self._send_to_all((LAST_STEP, last), LATEST - 1)
            self._publish_changes([(self.rank, self._note_last(self.rank, last))])
        if self._has_unequal_steps():
            if self.queue.idle:  # all other ranks have this rank's announcement
                fewest, most = (
                    find(self.round.last_steps, key=self.round.last_steps.__getitem__)
                    for find in (min, max)
                )
                raise unequal_steps(
                    fewest, self.round.last_steps[fewest], most, self.round.last_steps[most]
                )
        elif len(self.round.last_steps) == self.ranks and self.rank not in self.round.over:
            owned = self.partition.owned(self.rank)
            if (
                owned and not self.plan.is_synchronous
            ):  # synchronous ranks have every version already
                self._publish(owned, range(self.ranks))
            self._send_to_all((LAST_ROWS,), LATEST)
            self.round.over.add(self.rank)

    def _send_to_all(self, notes: tuple[int, ...], urgency: int) -> None:
        for rank in range(self.ranks):
            if rank != self.rank:
                self.queue.enqueue(
                    rank, Message(notes, torch.empty(0, dtype=torch.uint8, device="cpu"), urgency)
                )

    def is_over(self) -> bool:
        """Return whether all ranks' last rows have arrived, and this rank's have been sent."""
        return len(self.round.over) == self.ranks and self.queue.idle


def pinned_on(copies: DeviceStaging | None, row: torch.Tensor) -> torch.Tensor:
    """Return a row in pinned memory, from which copies to the device do not block."""
    if copies is None:
        return row
    copy = copies.host_memory(row.nbytes).view(row.dtype).view(row.shape)
    return copy.copy_(row)


def unequal_steps(rank: int, steps: int, other: int, others_steps: int) -> ExchangeError:
    """Return the error for ranks with different numbers of steps."""
    return ExchangeError(
        f"every rank must take the same number of steps with staleness=0, but rank {rank} took "
        f"{steps} and rank {other} is in number {others_steps}; give every rank the same number of "
        f"batches, or allow staleness",
        code="synchronous-steps-differ",
    )
