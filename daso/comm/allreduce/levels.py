"""All-reduce over many ranks in levels: each rank exchanges large messages with a few others.

`MultiLevelMean` defines the messages and the arithmetic of one rank; it does not call MPI.
`daso.comm.allreduce.runners` runs it between ranks, or for simulated ranks in one process. Chunks
progress independently: while one is reduced, others are sent, and means return while sums still
arrive (cut-through).

An exact wire sends sums. A narrow wire sends running means, whose range is that of the inputs; the
rank that rounds keeps the rounding error and adds it to its next sum. If a sparse wire leaves this
to an exact wire, the exact wire sends running means, too.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from daso.comm.allreduce.ordered import (
    PROBE_TAG,
    Arrivals,
    DeviceContext,
    ExchangeMemory,
    peer_order,
)
from daso.comm.device.staging import Arrived
from daso.comm.reduction import (
    Chunks,
    ReduceBuffer,
    Terms,
    WeightedMean,
)
from daso.kernels.rows import Mean
from daso.plan.allreduce_plan import BLOCK, AllReducePlan
from daso.plan.layout import Span, split

if TYPE_CHECKING:
    from mpi4py import MPI

WINDOW = 4  # chunks in flight

Messages = list[tuple[int, torch.Tensor]]  # the other rank, and the payload or receive memory


class Transfers(NamedTuple):
    """Messages that one rank sends and receives concurrently."""

    phase: int
    sends: Messages
    receives: Messages


Steps = Generator["Transfers | Arrived", None, None]


class _ChunkLayout(NamedTuple):
    """Layout of one chunk on one rank: its spans on each level."""

    held: list[tuple[Span, ...]]  # spans with one payload each, before each level
    owned: list[Span]  # the span that this rank reduces on each level
    leaves: tuple[Span, ...]  # spans of the chunk after all levels
    stops: list[int]  # byte offsets at which the means of leaves end

    def region(self, leaves: tuple[int, int]) -> slice:
        """Return the byte range of the means of some leaves."""
        first, stop = leaves
        return slice(self.stops[first - 1] if first else 0, self.stops[stop - 1])


class MultiLevelMean(ExchangeMemory):
    """Transfers and arithmetic of a multi-level mean, for one rank.

    Args:
        plan: Groups on each level.
        rank: Index of this rank in the plan.
        adder: Reduces payloads; holds the weights of all ranks and this rank's rounding errors.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        comm: Progresses during waits for the device.
    """

    def __init__(
        self,
        plan: AllReducePlan,
        rank: int,
        adder: WeightedMean,
        where: DeviceContext | None = None,
        comm: "MPI.Comm | None" = None,
    ) -> None:
        poll = (lambda: False) if comm is None else partial(comm.Iprobe, tag=PROBE_TAG)
        super().__init__(adder.codec, WINDOW, where, poll)
        self.plan, self.rank, self.adder = plan, rank, adder
        self.delivered = 0  # chunks of this buffer
        self.groups = [plan.group(rank, depth) for depth in range(len(plan.levels))]
        self._weights = [self._level_weights(depth) for depth in range(len(plan.levels))]
        self._layouts: dict[tuple[int, int], _ChunkLayout] = {}

    def _level_weights(self, depth: int) -> list[int]:
        """Return the weight of each group member's payload on a level."""
        weights, group = self.adder.weights, self.groups[depth]
        if depth == 0:
            return [weights[rank] for rank in group]
        if self.codec.sums:
            return [1] * len(group)
        return [sum(weights[rank] for rank in self.plan.below(member, depth)) for member in group]

    def layout(self, parts: Sequence[tuple[int, int]]) -> _ChunkLayout:
        """Return this rank's layout of a chunk; computed once."""
        key = parts[0][0], parts[-1][1]
        if key not in self._layouts:
            first = tuple(Span(*part) for part in parts)
            held: list[tuple[Span, ...]] = [first]
            owned: list[Span] = []
            for depth, level in enumerate(self.plan.levels):
                if depth > 0:
                    held.append(split(owned[-1], level.parts, BLOCK))
                part = self.plan.digit(self.rank, depth) if level.parts > 1 else 0
                owned.append(held[-1][part])
            leaves = self.plan.leaf_spans(first)
            stops = list(accumulate(self.codec.nbytes(leaf.numel) for leaf in leaves))
            self._layouts[key] = _ChunkLayout(held, owned, leaves, stops)
        return self._layouts[key]

    # --- memory ------------------------------------------------------------------------------

    def _row(self, name: str, index: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory of a chunk: for MPI, and to reduce in."""
        for_mpi, local = (
            pool.row(name, index, nbytes, torch.uint8)
            for pool in (self.mpi_buffers, self.local_buffers)
        )
        return for_mpi, local

    def _sizes(self, spans: Sequence[Span]) -> list[int]:
        return [self.codec.nbytes(span.numel) for span in spans]

    def _arriving(
        self, layout: _ChunkLayout, depth: int, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return receive memory of a level."""
        if self.plan.levels[depth].way == "ring":
            return self._row(f"receive{depth}", index, sum(self._sizes(layout.held[depth])))
        nbytes = self.codec.nbytes(layout.owned[depth].numel) * self.plan.levels[depth].size
        return self._row(f"receive{depth}", index, nbytes)

    def _leaving(
        self, layout: _ChunkLayout, depth: int, index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for the payloads that a level sends; on a ring, of the partial sums."""
        return self._row(f"send{depth}", index, sum(self._sizes(layout.held[depth])))

    def allocate(self, chunks: Chunks) -> Arrivals:
        """Allocate memory on the device before the first message."""

        def rows(index: int) -> None:
            layout = self.layout(chunks[index])
            self._row("back", index, layout.stops[-1])
            for depth, level in enumerate(self.plan.levels):
                self._arriving(layout, depth, index)
                if depth > 0 or level.way == "ring":  # otherwise the buffer's own payloads are sent
                    self._leaving(layout, depth, index)

        yield from self._allocate(len(chunks), rows)

    # --- one chunk ---------------------------------------------------------------------------

    def chunk(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> Steps:
        """Replace a chunk by the mean; yields transfers, and calls to wait for."""
        layout = self.layout(parts)
        payloads, leaving = source.payloads(parts), self._outgoing(source, parts)
        back = self._row("back", index, layout.stops[-1])
        own, last = payloads, len(self.plan.levels) - 1
        for depth, level in enumerate(self.plan.levels):
            if level.way == "ring":
                versions = yield from self._ring_reduce(layout, depth, index, payloads, leaving)
                terms = self._ring_terms(depth)
            else:
                versions = yield from self._gather(layout, depth, index, payloads, leaving)
                terms = self._terms(depth, self._weights[depth])
            within = layout.owned[depth]
            if depth == last and not self.plan.returns:
                mean = self.adder.mean(versions, terms)
                deliver = partial(source.deliver, *within, mean, own[0])
                yield from self._deliver_in_order(index, deliver)
                return
            spans, targets = self._encode_targets(layout, depth, index, back)
            leaving, payloads = (torch.split(row, self._sizes(spans)) for row in targets)
            with self._side_stream():
                for span, payload in zip(spans, payloads, strict=True):
                    self.adder.add(versions, payload, span, within=within, terms=terms)
            yield from self._wait_computed()
            yield from self._copy_out(targets[1], targets[0])
        yield from self._return_means(layout, back[0])
        yield from self._copy_in(*back)
        deliver = partial(self._deliver, source, parts, layout, back[1], own)
        yield from self._deliver_in_order(index, deliver)

    def _deliver_in_order(self, index: int, deliver: Callable[[], None]) -> Arrivals:
        """Deliver chunks in order, so that sums over chunks have the same bits in every run."""
        yield lambda: self.delivered == index
        with self._side_stream():
            deliver()
        self.delivered += 1
        yield from self._wait_computed()

    def _encode_targets(
        self, layout: _ChunkLayout, depth: int, index: int, back: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[Sequence[Span], tuple[torch.Tensor, torch.Tensor]]:
        """Return the spans and memory to encode a level's sum: for the next level, or to return."""
        if depth < len(self.plan.levels) - 1:
            return layout.held[depth + 1], self._leaving(layout, depth + 1, index)
        region = layout.region(self.plan.leaf_range(self.rank, depth))
        return (layout.owned[depth],), (back[0][region], back[1][region])

    def _terms(self, depth: int, weights: Sequence[int]) -> Terms:
        """Return the weights and the divisor of a level's sum."""
        if depth == len(self.plan.levels) - 1:
            return Terms(weights, self.adder.total)
        return Terms(weights, 1 if self.codec.sums else sum(self._weights[depth]), depth + 1)

    def _ring_terms(self, depth: int) -> Terms:
        """Return the terms of a ring's last sum: the partial sum of the others, and this rank's."""
        weights, local = self._weights[depth], self.plan.digit(self.rank, depth)
        others = self._partial_weight(weights, len(weights) - 1, local)
        return self._terms(depth, [others, weights[local]])

    def _partial_weight(self, weights: Sequence[int], count: int, local: int) -> int:
        """Return the weight of a ring's partial sum that ``count`` ranks have contributed to."""
        if count == 1:
            return weights[local - 1]
        return 1 if self.codec.sums else sum(weights[local - 1 - back] for back in range(count))

    def _gather(
        self,
        layout: _ChunkLayout,
        depth: int,
        index: int,
        payloads: Sequence[torch.Tensor],
        leaving: Sequence[torch.Tensor],
    ) -> Generator["Transfers | Arrived", None, list[torch.Tensor]]:
        """Send group members their parts; return all payloads of this rank's, in rank order."""
        group, local = self.groups[depth], self.plan.digit(self.rank, depth)
        arriving, received = self._arriving(layout, depth, index)
        nbytes, whole = self.codec.nbytes(layout.owned[depth].numel), len(leaving) == 1
        rows = torch.split(arriving, [nbytes] * len(group))
        peers = peer_order(local, len(group))
        yield Transfers(
            depth,
            [(group[peer], leaving[0 if whole else peer]) for peer in peers],
            [(group[peer], rows[peer]) for peer in reversed(peers)],
        )
        yield from self._copy_in(arriving, received)
        versions = list(torch.split(received, [nbytes] * len(group)))
        versions[local] = payloads[0 if whole else local]
        return versions

    def _ring_reduce(
        self,
        layout: _ChunkLayout,
        depth: int,
        index: int,
        payloads: Sequence[torch.Tensor],
        leaving: Sequence[torch.Tensor],
    ) -> Generator["Transfers | Arrived", None, list[torch.Tensor]]:
        """Pass partial sums around the group; return the last one received and this rank's payload.

        Part p starts at the rank after p, and ends at p.
        """
        group, local = self.groups[depth], self.plan.digit(self.rank, depth)
        weights, size, spans = self._weights[depth], len(group), layout.held[depth]
        arriving, received = (
            torch.split(row, self._sizes(spans)) for row in self._arriving(layout, depth, index)
        )
        outgoing, sums = (
            torch.split(row, self._sizes(spans)) for row in self._leaving(layout, depth, index)
        )
        sent = leaving[local - 1]
        for step in range(size - 1):
            part = (local - 2 - step) % size
            yield Transfers(
                depth, [(group[(local + 1) % size], sent)], [(group[local - 1], arriving[part])]
            )
            yield from self._copy_in(arriving[part], received[part])
            if step < size - 2:
                partial_weight = self._partial_weight(weights, step + 1, local)
                total = 1 if self.codec.sums else partial_weight + weights[local]
                terms = Terms([partial_weight, weights[local]], total, depth + 1)
                with self._side_stream():
                    versions = [received[part], payloads[part]]
                    self.adder.add(versions, sums[part], spans[part], terms=terms)
                yield from self._wait_computed()
                yield from self._copy_out(sums[part], outgoing[part])
                sent = outgoing[part]
        return [received[local], payloads[local]]

    def _return_means(self, layout: _ChunkLayout, means: torch.Tensor) -> Steps:
        """Distribute the means of this rank's leaves to all ranks, level by level."""
        for depth in reversed(range(len(self.plan.levels))):
            level, group = self.plan.levels[depth], self.groups[depth]
            if level.way == "whole":
                continue
            regions = [means[layout.region(self.plan.leaf_range(rank, depth))] for rank in group]
            local, size = self.plan.digit(self.rank, depth), len(group)
            phase = len(self.plan.levels) + depth
            if level.way == "ring":
                for step in range(size - 1):
                    sent = regions[(local - step) % size]
                    received = regions[(local - 1 - step) % size]
                    after, before = group[(local + 1) % size], group[local - 1]
                    yield Transfers(phase, [(after, sent)], [(before, received)])
                continue
            peers = peer_order(local, size)
            yield Transfers(
                phase,
                [(group[peer], regions[local]) for peer in peers],
                [(group[peer], regions[peer]) for peer in reversed(peers)],
            )

    def _deliver(
        self,
        source: ReduceBuffer,
        parts: Sequence[tuple[int, int]],
        layout: _ChunkLayout,
        means: torch.Tensor,
        own: Sequence[torch.Tensor],
    ) -> None:
        """Deliver the means of all leaves to the buffer."""
        codec, start = self.codec, 0
        leaves = iter(zip(layout.leaves, layout.stops, strict=True))
        each = len(layout.leaves) // len(parts)
        for (first, _), payload in zip(parts, own, strict=True):
            for _ in range(each):
                leaf, stop = next(leaves)
                sent = codec.part(payload, leaf.start - first, leaf.stop - first)
                source.deliver(*leaf, Mean(codec, [means[start:stop]]), sent)
                start = stop
