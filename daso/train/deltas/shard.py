"""What one lane of one node keeps of a row of parameters, and all arithmetic of an exchange on it.

Nothing here knows of MPI or of other ranks: the same code runs between nodes, driven by
`daso.train.deltas.buffer`, and for many simulated nodes in one process, by `daso.train.simulated`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from daso.comm.compression import EVEN, PIECE, Codec, Fields, pieces
from daso.comm.reduction import Chunks, EncodeProgress, SendBuffer
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.merge import Merge
from daso.train.deltas.ahead import Ahead
from daso.train.deltas.fused import Fused
from daso.train.deltas.outer import MakeOuter, Outer

__all__ = [
    "DEVICE_PIECE",
    "LEAST",
    "DeltaShard",
    "Gather",
    "MergeOptions",
    "cut_row",
    "message_numel",
]

# Numbers of a piece on a device, where what a pass costs is its launch.
DEVICE_PIECE = PIECE << 6

LEAST = 1 << 22  # numbers of a message from a device, where each is encoded by launches of its own
KIBI = 1024  # numbers by which a codec's rate is asked: headers of blocks do not count then
MOST = 1 << 18  # numbers of a message: one that takes long to encode keeps the link waiting
Gather = Callable[[int, int, torch.Tensor], object]  # writes parameters start to stop into a row
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """How parts take in exchanges."""

    eager: bool = False  # a node goes ahead when it sends
    share: float = 1.0  # this node's weight in the mean of all nodes
    outer: MakeOuter | None = None


@dataclass(slots=True)
class Sums:
    """What an exchange measures piece by piece, not read yet."""

    distances: list[torch.Tensor] = field(default_factory=list)  # squared, from the mean of nodes
    norms: list[torch.Tensor] = field(default_factory=list)  # squared, of the reference
    moved: list[torch.Tensor] = field(default_factory=list)  # squared, of the mean delta
    # Where what was sent is not finite first, piece by piece, or -1.
    nonfinite: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def stacked(self, like: torch.Tensor) -> torch.Tensor:
        """Return all that are squared in one tensor."""
        return _stack([*self.distances, *self.norms, *self.moved], like.new_zeros(0))

    def totals(self, numbers: Sequence[float]) -> tuple[float, float, float]:
        """Return the sum of each kind of what `stacked` returned."""
        first = len(self.distances)
        second = first + len(self.norms)
        return sum(numbers[:first]), sum(numbers[first:second]), sum(numbers[second:])


class DeltaShard:
    """Reference of one part of a row, and what is on its way; a `daso.comm.reduction.ReduceBuffer`.

    With x the parameters, an exchange carries what it can of x - reference + residual. What the
    wire rounds away is not lost, so that a 16-bit wire never freezes a weight (error feedback):
    where the merge keeps local work, x <- x + (mean - carried), it stays in x, and elsewhere it
    goes into the residual.

    Args:
        shown: Memory that the whole node reads (numel), fp32 or fp64.
        way: How exchanges are taken in.
        on_device: What is computed cannot be read at once without waiting; see
            `daso.train.deltas.staging`.
    """

    def __init__(self, shown: torch.Tensor, way: MergeOptions, *, on_device: bool = False) -> None:
        self.shown, self.way = shown, way
        self.on_device = on_device
        self.fused: Fused | None = None  # does in one pass what torch does in several
        self.reference = torch.zeros_like(shown)  # what the nodes agreed on last
        self.outer = None if way.outer is None else Outer(way.outer, self.reference)
        self.outbox = SendBuffer(shown.device)
        self.keeps = False  # the merge of what is on its way keeps local work
        self.lossy = False  # the wire rounded something of it away
        # Rows that are made when they are needed. Of what the wire rounded away: from earlier
        # exchanges, and of the one on its way, which may be dropped.
        self.residual: torch.Tensor | None = None
        self.pending: torch.Tensor | None = None
        self._ahead = Ahead()  # unused where nodes do not go ahead
        self._sums = Sums()  # of the last exchange
        numel = min(self.piece, -(-shown.numel() // PIECE) * PIECE)
        room = torch.empty(2, numel, dtype=shown.dtype, device=shown.device)
        # To encode in and to deliver: on the host pieces are delivered while others are encoded.
        self._rooms = room, room if on_device else torch.empty_like(room)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.shown.dtype

    @property
    def progress(self) -> EncodeProgress:
        """How far what is on its way is encoded."""
        return self.outbox.progress

    @property
    def piece(self) -> int:
        """Numbers of a piece that is computed at once."""
        return DEVICE_PIECE if self.on_device else PIECE

    def warm_up(self, codecs: Sequence[Codec], spans: Spans, gather: Gather) -> None:
        """Launch what exchanges will, before the first: nothing is made or compiled later."""
        mean = torch.zeros_like(self._rooms[1][0])
        try:
            for codec, keeps, lost_before in product(codecs, (False, True), (False, True)):
                self.residual = torch.zeros_like(self.shown) if lost_before else None
                self.encode(codec, spans, gather, keeps=keeps)
                if self._takes_at_once(codec):
                    for start, stop, fields in self.sent():
                        self.deliver(start, stop, mean[: stop - start], fields)
        finally:
            self.residual = self.pending = None
            self.keeps = self.lossy = False
            self.shown.zero_()
            self.reference.zero_()

    def anchor(self) -> None:
        """Forget what belonged to an earlier reference; the caller has written the new one.

        The outer optimizer goes on with the momentum it has.
        """
        self.residual = None
        self._ahead.forget()

    # --- one exchange ------------------------------------------------------------------------

    def encode(self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool) -> None:
        """Encode what an exchange will carry; nothing else changes until it is delivered."""
        payloads = self._open(codec, spans, keeps=keeps)
        if self.fused is not None and self.fused.handles(codec):
            place = self.fused.pack(
                *(codec, spans, self.outbox.memory, self.reference, self.residual, self.pending)
            )
            self._sums.nonfinite = [(0, place)]
        else:
            self._fill(codec, spans, payloads, gather, self.residual, looks=True)
        self.progress.until = math.inf

    def begin(
        self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool
    ) -> Callable[[], None]:
        """Return what encodes, to be called while other threads exchange what is encoded.

        What comes of it must be finite: that is not looked for here.
        """
        assert not codec.sparse, "its distances are summed by who encodes and by who delivers"
        payloads, residual = self._open(codec, spans, keeps=keeps), self.residual

        def fill() -> None:
            self._fill(codec, spans, payloads, gather, residual, looks=False)
            self.progress.until = math.inf

        return fill

    def _open(self, codec: Codec, spans: Spans, *, keeps: bool) -> Sequence[torch.Tensor]:
        """Return memory for what an exchange carries."""
        self._sums = Sums()
        self.progress.begin()
        self.keeps, self.pending = keeps and not self.way.eager, None
        self.lossy = not codec.exact
        if self.lossy and not self.keeps:
            # Nobody reads what is shown before the next merge, but where the node goes ahead.
            self.pending = torch.empty_like(self.shown) if self.way.eager else self.shown
        # What loses nothing crosses from where the merge will be shown: each piece is read first.
        memory = self.shown.view(torch.uint8) if codec.exact and not self.way.eager else None
        return self.outbox.open(codec, spans, memory)

    def _fill(
        self,
        codec: Codec,
        spans: Spans,
        payloads: Sequence[torch.Tensor],
        gather: Gather,
        residual: torch.Tensor | None,
        *,
        looks: bool,
    ) -> None:
        """Encode piece by piece, and look for what is not finite."""
        for (start, stop), payload in zip(spans, payloads, strict=True):
            for a, b in pieces(stop - start, self.piece):
                values, room = self._rooms[0][:, : b - a]
                gather(start + a, start + b, values)
                fields = codec.fields(payload, stop - start, a, b)
                self._encode(codec, start + a, values, fields, residual)
                # A sum is cheaper, where it can be read at once.
                if looks and (self.on_device or not bool(values.sum().isfinite())):
                    self._sums.nonfinite.append((start + a, _first_nonfinite(values, room)))
            self.progress.until = stop

    def checks(self) -> torch.Tensor:
        """Return, not read yet, what `first_nonfinite` needs of the exchange that was sent."""
        return _stack([place for _, place in self._sums.nonfinite], self.shown.new_zeros(0)).long()

    def first_nonfinite(self, checks: Sequence[int]) -> int | None:
        """Return the first element that was not finite when it was sent, if any."""
        places = zip(self._sums.nonfinite, checks, strict=True)
        return next((start + at for (start, _), at in places if at >= 0), None)

    def _encode(
        self,
        codec: Codec,
        start: int,
        values: torch.Tensor,
        fields: Fields,
        residual: torch.Tensor | None,
    ) -> None:
        """Write delta + residual for the wire, into ``values`` too; they hold parameters."""
        span = slice(start, start + values.numel())
        values -= self.reference[span]
        if residual is not None:
            values += residual[span]
        codec.encode(values, fields)
        if self.pending is None and not codec.sparse:
            return
        carried = self._rooms[0][1, : values.numel()]
        codec.decode(fields, carried)
        lost = torch.sub(
            values, carried, out=carried if self.pending is None else self.pending[span]
        )
        if codec.sparse:  # most of what nodes are apart by; elsewhere next to nothing
            self._sums.distances.append(lost.dot(lost))

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return what was encoded of spans."""
        return self.outbox.payloads(spans)

    def sent(self) -> Iterator[tuple[int, int, Fields]]:
        """Yield what is delivered at a time: where it begins and ends, and what was sent of it."""
        for (first, last), payload in self.outbox.items():
            for a, b in pieces(last - first, self.piece):
                fields = self.outbox.codec.fields(payload, last - first, a, b)
                yield first + a, first + b, fields

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:
        """Move the reference by the mean delta, or keep it for the outer optimizer."""
        span, (apart, carried) = slice(start, stop), self._rooms[1][:, : stop - start]
        self._sums.moved.append(mean.dot(mean))
        if self._takes_at_once(self.outbox.codec):
            self._take(span, mean, *sent)
            return
        self.outbox.codec.decode(sent, carried)
        if self.way.eager:
            self._ahead.learn(span, mean, carried, self.reference, self.way.share)
        torch.sub(mean, carried, out=apart)
        self._sums.distances.append(apart.dot(apart))
        if self.pending is not None:
            self._residual()[span].copy_(self.pending[span])
        if self.outer is not None:
            torch.neg(mean, out=self.outer.grad[span])
            torch.add(carried, self.reference[span], out=apart).neg_()
        else:
            moved = torch.add(self.reference[span], mean, out=self.reference[span])
            self._sums.norms.append(moved.dot(moved))
        if self.keeps:
            if self.residual is not None:
                apart += self.residual[span]
            self.shown[span].copy_(apart)

    def _takes_at_once(self, codec: Codec) -> bool:
        plain = not self.way.eager and self.outer is None and self.pending is None
        return plain and self.fused is not None and self.fused.handles(codec)

    def _take(self, span: slice, mean: torch.Tensor, sent: torch.Tensor) -> None:
        """Do what `deliver` does where there is nothing but a reference and what is shown."""
        assert self.fused is not None
        residual = None if self.residual is None else self.residual[span]
        shown = self.shown[span] if self.keeps else None
        distance, norm = self.fused.take(mean, sent, self.reference[span], residual, shown)
        self._sums.distances.append(distance)
        self._sums.norms.append(norm)

    def _residual(self) -> torch.Tensor:
        if self.residual is None:
            self.residual = torch.zeros_like(self.reference)
        return self.residual

    def finish(self) -> torch.Tensor:
        """End an exchange: let the outer optimizer move the reference."""
        self.pending = None
        if self.keeps or not self.lossy:
            self.residual = None  # it is in what is shown, or was sent
        if self.outer is not None:
            self.outer.step()
            self._sums.norms = [self.reference.dot(self.reference)]
        return self._sums.stacked(self.shown)

    def measured(self, found: Sequence[float]) -> tuple[float, float, float]:
        """Return what an exchange told of this node."""
        return self._sums.totals(found)

    # --- merging -----------------------------------------------------------------------------

    def go_ahead(self, gather: Gather) -> None:
        """Show where the node would stand if the others did what they did in the last exchange."""
        trial = None if self.outer is None else self.outer.trial
        place = self._ahead.go(
            self.reference, self.way.share, lambda row: gather(0, row.numel(), row), trial
        )
        self.shown.copy_(place)

    def turn_back(self) -> None:
        """Show what takes the node back from where it went ahead to where it was."""
        self._ahead.go_back(self.shown)

    def settle(self, gather: Gather) -> None:
        """Move what the wire rounded away from the parameters into the residual.

        For a merge that was to keep local work, and comes before any was done.
        """
        if not (self.keeps and self.lossy):
            return
        residual = self._residual()
        for a, b in pieces(residual.numel(), self.piece):
            gather(a, b, residual[a:b])
            reference, lacking = self.reference[a:b], self.shown[a:b]
            lacking = lacking if self.outer is None else lacking + reference
            residual[a:b].sub_(reference).add_(lacking)

    def show(self, rule: Merge) -> None:
        """Write what every rank of the node needs for a merge, g or g - s, unless it lies there."""
        if not rule.since_send:
            self.shown.copy_(self.reference)
        elif self._ahead.place is not None:
            torch.sub(self.reference, self._ahead.place, out=self.shown)
        elif self.outer is not None:
            self.shown.add_(self.reference)
        self._ahead.place = None

    def rows(self) -> list[torch.Tensor]:
        """Return everything that lives on from exchange to exchange."""
        outer = [] if self.outer is None else self.outer.tensors()
        return [*self._rows().values(), *outer]

    def _rows(self) -> dict[str, torch.Tensor]:
        rows = {"reference": self.reference, "shown": self.shown, "residual": self.residual}
        return {name: row for name, row in rows.items() if row is not None} | self._ahead.rows()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values; what is None is left out."""
        state: dict[str, Any] = {name: row.clone() for name, row in self._rows().items()}
        return state | {"keeps": self.keeps, "lossy": self.lossy} | self.outer_state()

    def outer_state(self) -> dict[str, Any]:
        """Return that of the outer optimizer alone, which outlives references."""
        return {} if self.outer is None else {"outer": self.outer.state()}

    def load_outer(self, state: dict[str, Any]) -> None:
        """Take over what `outer_state` returned."""
        if self.outer is not None:
            self.outer.load(state["outer"])

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.reference.copy_(state["reference"])
        self.shown.copy_(state["shown"])
        residual = state.get("residual")
        self.residual = None if residual is None else residual.to(self.shown.device, copy=True)
        self._ahead = Ahead.load(state, self.shown.device)
        self.keeps, self.lossy = state["keeps"], state["lossy"]
        self.load_outer(state)


def _first_nonfinite(values: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
    """Return, not read yet, the place of the first number that is not finite; -1 where all are.

    In two passes: `isfinite` alone makes four.
    """
    apart = torch.sub(values, values, out=room)  # zero, or NaN: for infinity too
    place = apart.argmax()  # NaN is the greatest, and the first of equals is taken
    return torch.where(apart.take(place).isnan(), place, -1)


def _stack(numbers: list[torch.Tensor], none: torch.Tensor) -> torch.Tensor:
    return torch.stack(numbers) if numbers else none


def cut_row(
    plan: AllReducePlan, codec: Codec, numel: int, chunk_bytes: int, *, on_device: bool
) -> Chunks:
    """Cut a row into what crosses by itself; as on devices, where each message costs launches."""
    least, even = (LEAST, EVEN) if on_device else (1, 1)
    return plan.chunks(numel, message_numel(codec, chunk_bytes, least), even)


def message_numel(codec: Codec, chunk_bytes: int, least: int = 1) -> int:
    """Return how many numbers of a row make a message of about so many bytes on the wire."""
    return max(least, min(MOST, chunk_bytes * KIBI // codec.nbytes(KIBI)))
