"""Means over many ranks by a plan of levels: each rank exchanges with a few, in large messages.

`LevelledMean` says which messages cross and holds all arithmetic, for one rank; it knows no MPI.
`daso.comm.allreduce.runners` runs it between ranks, or for many simulated ones in a process. A
chunk goes on the moment its messages are there, whatever the others do: while one is added, others
cross, and means return while sums still come (cut-through).

On an exact wire sums cross. On a narrow one running means do, whose range stays that of what is
added; what each rounding takes away is kept by the rank that rounds, and goes into its next sum.
Where a sparse wire leaves that to an exact one, the exact one has running means, too.
"""

from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from daso.comm.allreduce.ordered import (
    NOTHING,
    Arrivals,
    ExchangeMemory,
    OnDevice,
    turns_of,
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

__all__ = ["WINDOW", "LevelledMean", "Transfers"]

WINDOW = 4  # chunks under way at a time

Messages = list[tuple[int, torch.Tensor]]  # the other rank, and what is sent or where it arrives


class Transfers(NamedTuple):
    """What one rank sends and receives at the same time."""

    phase: int
    sends: Messages
    receives: Messages


Steps = Generator["Transfers | Arrived", None, None]


class _Cut(NamedTuple):
    """What one rank holds of a chunk."""

    held: list[tuple[Span, ...]]  # before each level: what has a payload of its own
    mine: list[Span]  # what is added here on each level
    leaves: tuple[Span, ...]  # of the chunk, after all levels
    stops: list[int]  # bytes: where the means of leaves end in the memory of all of them

    def region(self, leaves: tuple[int, int]) -> slice:
        """Return the bytes of the means of some leaves."""
        first, stop = leaves
        return slice(self.stops[first - 1] if first else 0, self.stops[stop - 1])


class LevelledMean(ExchangeMemory):
    """One rank's part in means by a plan.

    Args:
        plan: Groups, level by level.
        rank: Among the plan's.
        adder: Adds versions; has the weight of each rank's row, and what this rank rounded away, by
            where a part starts, and its level.
        where: As in `daso.comm.allreduce.direct.deterministic_allreduce`.
        comm: Whose messages move while a device is waited for.
    """

    def __init__(
        self,
        plan: AllReducePlan,
        rank: int,
        adder: WeightedMean,
        where: OnDevice | None = None,
        comm: "MPI.Comm | None" = None,
    ) -> None:
        poll = (lambda: False) if comm is None else partial(comm.Iprobe, tag=NOTHING)
        super().__init__(adder.codec, WINDOW, where, poll)
        self.plan, self.rank, self.adder = plan, rank, adder
        self.delivered = 0  # chunks of this row
        self.groups = [plan.group(rank, depth) for depth in range(len(plan.levels))]
        self._units = [self._weights_on(depth) for depth in range(len(plan.levels))]
        self._cuts: dict[tuple[int, int], _Cut] = {}

    def _weights_on(self, depth: int) -> list[int]:
        """Return how what each rank of a group holds counts on a level."""
        weights, group = self.adder.weights, self.groups[depth]
        if depth == 0:
            return [weights[one] for one in group]
        if self.codec.sums:
            return [1] * len(group)
        return [sum(weights[rank] for rank in self.plan.below(one, depth)) for one in group]

    def cut(self, parts: Sequence[tuple[int, int]]) -> _Cut:
        """Return what this rank holds of a chunk."""
        key = parts[0][0], parts[-1][1]
        if key not in self._cuts:
            first = tuple(Span(*part) for part in parts)
            held: list[tuple[Span, ...]] = [first]
            mine: list[Span] = []
            for depth, level in enumerate(self.plan.levels):
                if depth > 0:
                    held.append(split(mine[-1], level.parts, BLOCK))
                at = self.plan.digit(self.rank, depth) if level.parts > 1 else 0
                mine.append(held[-1][at])
            leaves = self.plan.leaf_spans(first)
            stops = list(accumulate(self.codec.nbytes(leaf.numel) for leaf in leaves))
            self._cuts[key] = _Cut(held, mine, leaves, stops)
        return self._cuts[key]

    # --- memory ------------------------------------------------------------------------------

    def _row(self, name: str, index: int, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory of a chunk: MPI's, and where is added."""
        crossing, here = (
            rows.row(name, index, nbytes, torch.uint8) for rows in (self.crossing, self.kept)
        )
        return crossing, here

    def _sizes(self, spans: Sequence[Span]) -> list[int]:
        return [self.codec.nbytes(span.numel) for span in spans]

    def _arriving(self, cut: _Cut, depth: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where versions of a level arrive."""
        if self.plan.levels[depth].way == "ring":
            return self._row(f"receive{depth}", index, sum(self._sizes(cut.held[depth])))
        nbytes = self.codec.nbytes(cut.mine[depth].numel) * self.plan.levels[depth].size
        return self._row(f"receive{depth}", index, nbytes)

    def _leaving(self, cut: _Cut, depth: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where what a level sends is encoded; on a ring what goes on from here."""
        return self._row(f"send{depth}", index, sum(self._sizes(cut.held[depth])))

    def made(self, chunks: Chunks) -> Arrivals:
        """Make what exchanges need on a device before the first message."""

        def rows(index: int) -> None:
            cut = self.cut(chunks[index])
            self._row("back", index, cut.stops[-1])
            for depth, level in enumerate(self.plan.levels):
                self._arriving(cut, depth, index)
                if depth > 0 or level.way == "ring":  # elsewhere the row's own payloads leave
                    self._leaving(cut, depth, index)

        yield from self._made(len(chunks), rows)

    # --- one chunk ---------------------------------------------------------------------------

    def chunk(self, source: ReduceBuffer, parts: Sequence[tuple[int, int]], index: int) -> Steps:
        """Take the mean of a chunk: yields what crosses next, and what is to be waited for."""
        cut = self.cut(parts)
        payloads, leaving = source.payloads(parts), self._sent(source, parts)
        back = self._row("back", index, cut.stops[-1])
        own, last = payloads, len(self.plan.levels) - 1
        for depth, level in enumerate(self.plan.levels):
            if level.way == "ring":
                versions = yield from self._pass_round(cut, depth, index, payloads, leaving)
                terms = self._last_stop(depth)
            else:
                versions = yield from self._gather(cut, depth, index, payloads, leaving)
                terms = self._terms(depth, self._units[depth])
            within = cut.mine[depth]
            if depth == last and not self.plan.returns:
                mean = self.adder.mean(versions, terms)
                yield from self._in_turn(index, partial(source.deliver, *within, mean, own[0]))
                return
            spans, targets = self._next(cut, depth, index, back)
            leaving, payloads = (torch.split(row, self._sizes(spans)) for row in targets)
            with self._beside():
                for span, payload in zip(spans, payloads, strict=True):
                    self.adder.add(versions, payload, span, within=within, terms=terms)
            yield from self._computed()
            yield from self._bring(targets[1], targets[0])
        yield from self._return(cut, back[0])
        yield from self._fetch(*back)
        yield from self._in_turn(index, partial(self._deliver, source, parts, cut, back[1], own))

    def _in_turn(self, index: int, deliver: Callable[[], None]) -> Arrivals:
        """Deliver a chunk after all before it: what the row sums over them has the same bits."""
        yield lambda: self.delivered == index
        with self._beside():
            deliver()
        self.delivered += 1
        yield from self._computed()

    def _next(
        self, cut: _Cut, depth: int, index: int, back: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[Sequence[Span], tuple[torch.Tensor, torch.Tensor]]:
        """Return of what a level's sum is encoded anew, and where: for the next, or to return."""
        if depth < len(self.plan.levels) - 1:
            return cut.held[depth + 1], self._leaving(cut, depth + 1, index)
        region = cut.region(self.plan.leaf_range(self.rank, depth))
        return (cut.mine[depth],), (back[0][region], back[1][region])

    def _terms(self, depth: int, weights: Sequence[int]) -> Terms:
        """Return how versions are added to what a level makes of them."""
        if depth == len(self.plan.levels) - 1:
            return Terms(weights, self.adder.total)
        return Terms(weights, 1 if self.codec.sums else sum(self._units[depth]), depth + 1)

    def _last_stop(self, depth: int) -> Terms:
        """Return how what came round a ring is added to this rank's own."""
        units, here = self._units[depth], self.plan.digit(self.rank, depth)
        return self._terms(depth, [self._passed(units, len(units) - 1, here), units[here]])

    def _passed(self, units: Sequence[int], stops: int, here: int) -> int:
        """Return how what comes round a ring counts, when so many ranks have added theirs."""
        if stops == 1:
            return units[here - 1]
        return 1 if self.codec.sums else sum(units[here - 1 - at] for at in range(stops))

    def _gather(
        self,
        cut: _Cut,
        depth: int,
        index: int,
        payloads: Sequence[torch.Tensor],
        leaving: Sequence[torch.Tensor],
    ) -> Generator["Transfers | Arrived", None, list[torch.Tensor]]:
        """Send each of a group its part, or all; return all versions of this rank's, in order."""
        group, here = self.groups[depth], self.plan.digit(self.rank, depth)
        arriving, there = self._arriving(cut, depth, index)
        nbytes, whole = self.codec.nbytes(cut.mine[depth].numel), len(leaving) == 1
        rows = torch.split(arriving, [nbytes] * len(group))
        turns = turns_of(here, len(group))
        yield Transfers(
            depth,
            [(group[one], leaving[0 if whole else one]) for one in turns],
            [(group[one], rows[one]) for one in reversed(turns)],
        )
        yield from self._fetch(arriving, there)
        versions = list(torch.split(there, [nbytes] * len(group)))
        versions[here] = payloads[0 if whole else here]
        return versions

    def _pass_round(
        self,
        cut: _Cut,
        depth: int,
        index: int,
        payloads: Sequence[torch.Tensor],
        leaving: Sequence[torch.Tensor],
    ) -> Generator["Transfers | Arrived", None, list[torch.Tensor]]:
        """Pass parts round the group, each rank adding its own; return what came last, and own.

        Part p begins at the rank after p, and ends at p.
        """
        group, here = self.groups[depth], self.plan.digit(self.rank, depth)
        units, size, spans = self._units[depth], len(group), cut.held[depth]
        arriving, there = (
            torch.split(row, self._sizes(spans)) for row in self._arriving(cut, depth, index)
        )
        crossing, sums = (
            torch.split(row, self._sizes(spans)) for row in self._leaving(cut, depth, index)
        )
        sent = leaving[here - 1]
        for step in range(size - 1):
            part = (here - 2 - step) % size
            yield Transfers(
                depth, [(group[(here + 1) % size], sent)], [(group[here - 1], arriving[part])]
            )
            yield from self._fetch(arriving[part], there[part])
            if step < size - 2:
                passed = self._passed(units, step + 1, here)
                total = 1 if self.codec.sums else passed + units[here]
                terms = Terms([passed, units[here]], total, depth + 1)
                with self._beside():
                    versions = [there[part], payloads[part]]
                    self.adder.add(versions, sums[part], spans[part], terms=terms)
                yield from self._computed()
                yield from self._bring(sums[part], crossing[part])
                sent = crossing[part]
        return [there[here], payloads[here]]

    def _return(self, cut: _Cut, means: torch.Tensor) -> Steps:
        """Give the means of this rank's leaves to all, level by level."""
        for depth in reversed(range(len(self.plan.levels))):
            level, group = self.plan.levels[depth], self.groups[depth]
            if level.way == "whole":
                continue
            regions = [means[cut.region(self.plan.leaf_range(one, depth))] for one in group]
            here, size = self.plan.digit(self.rank, depth), len(group)
            phase = len(self.plan.levels) + depth
            if level.way == "ring":
                for step in range(size - 1):
                    sent, coming = regions[(here - step) % size], regions[(here - 1 - step) % size]
                    after, before = group[(here + 1) % size], group[here - 1]
                    yield Transfers(phase, [(after, sent)], [(before, coming)])
                continue
            turns = turns_of(here, size)
            yield Transfers(
                phase,
                [(group[one], regions[here]) for one in turns],
                [(group[one], regions[one]) for one in reversed(turns)],
            )

    def _deliver(
        self,
        source: ReduceBuffer,
        parts: Sequence[tuple[int, int]],
        cut: _Cut,
        means: torch.Tensor,
        own: Sequence[torch.Tensor],
    ) -> None:
        """Give the row the means of all leaves."""
        codec, start = self.codec, 0
        leaves = iter(zip(cut.leaves, cut.stops, strict=True))
        each = len(cut.leaves) // len(parts)
        for (first, _), payload in zip(parts, own, strict=True):
            for _ in range(each):
                leaf, stop = next(leaves)
                sent = codec.part(payload, leaf.start - first, leaf.stop - first)
                source.deliver(*leaf, Mean(codec, [means[start:stop]]), sent)
                start = stop
