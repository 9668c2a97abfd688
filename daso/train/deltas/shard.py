"""Reference of one lane's part of a row of parameters, and the arithmetic of an exchange on it.

Nothing here knows of MPI or of other ranks: the same code runs between nodes, driven by
`daso.train.deltas.buffer`, and for many simulated nodes in one process, by `daso.train.simulated`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from daso.comm.engine import Work
from daso.comm.reduction import Chunks, SendBuffer
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.merge import Merge
from daso.train.deltas.ahead import Ahead
from daso.train.deltas.outer import MakeOuter, Outer

__all__ = [
    "EVEN",
    "LEAST",
    "DeltaShard",
    "MergeOptions",
    "cut_row",
    "message_numel",
]

EVEN = 1024  # numbers: a tile of the kernels of a device, which moves 16 bytes at once there
LEAST = 1 << 22  # numbers of a message from a device, where each is encoded by launches of its own
KIBI = 1024  # numbers by which a codec's rate is asked: headers of blocks do not count then
MOST = 1 << 18  # numbers of a message: one that takes long to encode keeps the link waiting
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of a shard's exchanges."""

    eager: bool = False  # a node goes ahead when it sends
    share: float = 1.0  # this node's weight in the mean of all nodes
    outer: MakeOuter | None = None


class DeltaShard:
    """Reference of one part of a row, and its exchange; a `daso.comm.reduction.ReduceBuffer`.

    With x the parameters, an exchange carries what it can of x - reference + residual. What the
    wire rounds away is not lost, so that a 16-bit wire never freezes a weight (error feedback):
    where the merge keeps local work, x <- x + (mean - carried), it stays in x, and elsewhere it
    goes into the residual.

    Args:
        shown: Memory that the whole node reads (numel), fp32 or fp64.
        way: How exchanges are taken in.
    """

    def __init__(self, shown: torch.Tensor, way: MergeOptions) -> None:
        self.shown, self.way = shown, way
        self.kernels = kernels_for(shown.device)
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
        # Of the last exchange: place of the first number that was not finite when it was sent;
        # squared distance from the mean of nodes, norm of the reference, and of the mean delta.
        self._first = torch.full((1,), NOWHERE, dtype=torch.int64, device=shown.device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=shown.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.shown.dtype

    def warm_up(self, codecs: Sequence[Codec], spans: Spans, values: FlatTensors) -> None:
        """Encode and accept once for each codec: both are compiled before the first exchange."""
        try:
            for codec, keeps, lost_before in product(codecs, (False, True), (False, True)):
                self.residual = torch.zeros_like(self.shown) if lost_before else None
                self.encode(codec, spans, values, keeps=keeps)
                for (start, stop), payload in self.outbox.items():
                    self.deliver(start, stop, Mean(codec, [payload]), payload)
        finally:
            self.residual = self.pending = None
            self.keeps = self.lossy = False
            self._ahead.forget()
            self.shown.zero_()
            self.reference.zero_()
            if self.outer is not None:
                self.outer.grad.zero_()

    def anchor(self) -> None:
        """Forget what belonged to an earlier reference; the caller has written the new one.

        The outer optimizer goes on with the momentum it has.
        """
        self.residual = None
        self._ahead.forget()

    # --- one exchange ------------------------------------------------------------------------

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode what an exchange will carry; nothing else changes until it is delivered."""
        self._open(codec, spans, keeps=keeps)
        self.kernels.encode(
            codec,
            values,
            spans,
            self.outbox.memory,
            EncodeRows(
                reference=self.reference,
                residual=self.residual,
                rounding=self.pending,
                first=self._first,
                # Most of the distance between nodes; with other wires next to nothing.
                distance=self._sums[0] if codec.sparse else None,
            ),
        )

    def _open(self, codec: Codec, spans: Spans, *, keeps: bool) -> None:
        """Make memory for what an exchange carries."""
        self._first.fill_(NOWHERE)
        self._sums.zero_()
        self.keeps, self.pending = keeps and not self.way.eager, None
        self.lossy = not codec.exact
        if self.lossy and not self.keeps:
            # Nobody reads what is shown before the next merge, but where the node goes ahead.
            self.pending = torch.empty_like(self.shown) if self.way.eager else self.shown
        # An exact payload is written into `shown`, where the merge goes: each tile is read first.
        memory = self.shown.view(torch.uint8) if codec.exact and not self.way.eager else None
        self.outbox.open(codec, spans, memory)

    @property
    def checks(self) -> torch.Tensor:
        """Place of the first number that was not finite (1,), on the device."""
        return self._first

    def first_nonfinite(self, checks: Sequence[int]) -> int | None:
        """Return the first element that was not finite when it was sent, if any."""
        return checks[0] if checks[0] < NOWHERE else None

    def collect(self) -> Work[int | None]:
        """Return the first element that is not finite, if any; on the host it is known."""
        yield from ()
        return self.first_nonfinite(self._first.tolist())

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans."""
        return self.outbox.payloads(spans)

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:
        """Move the reference by the mean delta, or keep it for the outer optimizer."""
        rows = ShardRows(
            reference=self.reference,
            negated=None if self.outer is None else self.outer.grad,
            shown=self.shown if self.keeps else None,
            residual=self.residual if self.pending is None else self._residual(),
            rounding=self.pending,
            others=self._ahead.others_like(self.reference) if self.way.eager else None,
            share=self.way.share,
        )
        self.kernels.accept(mean, sent, start, stop, rows, self._sums)

    def _residual(self) -> torch.Tensor:
        if self.residual is None:
            self.residual = torch.zeros_like(self.reference)
        return self.residual

    def conclude(self) -> Work[tuple[float, float, float]]:
        """End an exchange; return squared distance, norm and moved length, known on the host."""
        yield from ()
        return self.measured(self.finish().tolist())

    def finish(self) -> torch.Tensor:
        """Let the outer optimizer move the reference; return what `measured` reads (3,)."""
        self.pending = None
        if self.keeps or not self.lossy:
            self.residual = None  # it is in what is shown, or was sent
        if self.outer is not None:
            self.outer.step()
            self._sums[1] = self.reference.dot(self.reference)
        return self._sums

    def measured(self, sums: Sequence[float]) -> tuple[float, float, float]:
        """Return squared distance, norm and moved length of an exchange."""
        distance, norm, moved = sums
        return distance, norm, moved

    # --- merging -----------------------------------------------------------------------------

    def go_ahead(self, values: FlatTensors) -> None:
        """Show where the node would stand if the others did what they did in the last exchange."""
        trial = None if self.outer is None else self.outer.trial
        place = self._ahead.go(
            *(self.reference, self.way.share),
            lambda row: self.kernels.gather(values, 0, row.numel(), row),
            trial,
        )
        self.shown.copy_(place)

    def turn_back(self) -> None:
        """Show what takes the node back from where it went ahead to where it was."""
        self._ahead.go_back(self.shown)

    def settle(self, values: FlatTensors) -> None:
        """Move what the wire rounded away from the parameters into the residual.

        For a merge that was to keep local work, and comes before any was done.
        """
        if not (self.keeps and self.lossy):
            return
        residual = self._residual()
        self.kernels.gather(values, 0, residual.numel(), residual)
        lacking = self.shown if self.outer is None else self.shown + self.reference
        residual.sub_(self.reference).add_(lacking)

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


def cut_row(
    plan: AllReducePlan, codec: Codec, numel: int, chunk_bytes: int, *, on_device: bool
) -> Chunks:
    """Cut a row into what crosses by itself; as on devices, where each message costs launches."""
    least, even = (LEAST, EVEN) if on_device else (1, 1)
    return plan.chunks(numel, message_numel(codec, chunk_bytes, least), even)


def message_numel(codec: Codec, chunk_bytes: int, least: int = 1) -> int:
    """Return how many numbers of a row make a message of about so many bytes on the wire."""
    return max(least, min(MOST, chunk_bytes * KIBI // codec.nbytes(KIBI)))
