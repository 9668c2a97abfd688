"""Reference of one lane's part of a row of parameters, and the arithmetic of its exchange.

This module is independent of MPI and other ranks: the same code runs between nodes, driven by
`daso.train.deltas.buffer`, and for many simulated nodes in one process, by `daso.train.simulated`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, NamedTuple

import torch

from daso.comm.engine import Work
from daso.comm.reduction import Chunks, ReduceBuffer, SendBuffer
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.exchange import Merge
from daso.train.deltas.outer import MakeOuter, Outer

EVEN = 1024  # numbers: a tile of a device's kernels, which move 16 bytes at once
LEAST = 1 << 22  # numbers of a message from a device: each is encoded by separate launches
KIBI = 1024  # numbers that measure a codec's rate: headers of blocks do not count then
MOST = 1 << 18  # numbers of a message: one that takes long to encode keeps the link waiting
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of a shard's exchanges."""

    eager: bool = False  # a node goes ahead when it sends
    share: float = 1.0  # this node's weight in the mean of all nodes
    outer: MakeOuter | None = None


class Checks(NamedTuple):
    """Checks of a shard when it is sent."""

    first: int  # the first element that is not finite; NOWHERE: all are
    fingerprint: int  # of the reference, which is equal on all nodes


@dataclass(slots=True)
class Prediction:
    """Predicted result of an exchange, to which a node moves when it sends.

    Eager updates, arXiv 2502.12996. Rows are allocated when they are needed.
    """

    snapshot: torch.Tensor | None = None  # parameters when they were sent
    place: torch.Tensor | None = None  # the prediction
    others: torch.Tensor | None = None  # the other nodes' share of the last mean delta

    def predict(
        self,
        reference: torch.Tensor,
        share: float,
        gather: Callable[[torch.Tensor], object],
        trial: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the predicted reference.

        The estimated mean delta is this node's delta with its weight, plus the others' of the last
        exchange; in the first exchange it is this node's delta alone.

        Args:
            reference: Reference that all nodes agreed on last (numel).
            share: This node's weight in the mean of all nodes.
            gather: Writes the parameters into a row.
            trial: Returns the outer optimizer's reference for a mean delta; None: it is added.
        """
        if self.snapshot is None:
            self.snapshot = torch.empty_like(reference)
        gather(self.snapshot)
        mean = self.snapshot - reference
        if self.others is not None:
            mean.mul_(share).add_(self.others)
        self.place = mean + reference if trial is None else trial(mean)
        return self.place

    def undo(self, difference: torch.Tensor) -> None:
        """Write the difference that undoes the prediction, and forget it."""
        assert self.snapshot is not None and self.place is not None, "the node went ahead"
        torch.sub(self.snapshot, self.place, out=difference)
        self.forget()

    def others_like(self, row: torch.Tensor) -> torch.Tensor:
        """Return the row of the other nodes' delta, to be written."""
        if self.others is None:
            self.others = torch.zeros_like(row)
        return self.others

    def forget(self) -> None:
        """Forget the prediction, and the other nodes' delta."""
        self.place = self.others = None

    def rows(self) -> dict[str, torch.Tensor]:
        """Return the rows that exist, by their names in a checkpoint."""
        rows = ((f"ahead_{field.name}", getattr(self, field.name)) for field in fields(self))
        return {name: row for name, row in rows if row is not None}

    @classmethod
    def load(cls, state: Mapping[str, torch.Tensor], device: torch.device) -> "Prediction":
        """Return the prediction whose `rows` are in a state."""
        rows = {field.name: state.get(f"ahead_{field.name}") for field in fields(cls)}
        return cls(
            **{k: None if row is None else row.to(device, copy=True) for k, row in rows.items()}
        )


class DeltaShard(ReduceBuffer):
    """Reference of one part of a row, and its exchange; a `daso.comm.reduction.ReduceBuffer`.

    With x the parameters, an exchange carries x - reference + residual, rounded to the wire. The
    rounding error is not lost, so that a 16-bit wire never freezes a weight (error feedback): if
    the merge keeps local work, x <- x + (mean - carried), the error stays in x; otherwise it goes
    into the residual.

    Args:
        published: Memory that the whole node reads (numel), fp32 or fp64.
        options: Options of the merge.
    """

    def __init__(self, published: torch.Tensor, options: MergeOptions) -> None:
        self.published, self.options, self.dtype = published, options, published.dtype
        self.kernels = kernels_for(published.device)
        self.reference = torch.zeros_like(published)  # agreed on by all nodes
        self.outer = None if options.outer is None else Outer(options.outer, self.reference)
        self.outbox = SendBuffer(published.device)
        self.keeps_local = False  # the merge of the exchange in flight keeps local work
        self.is_lossy = False  # its wire rounds
        # Rounding errors, allocated when they are needed: of earlier exchanges, and of the one in
        # flight, which may be dropped.
        self.residual: torch.Tensor | None = None
        self.rounding_error: torch.Tensor | None = None
        self._prediction = Prediction()  # unused where nodes do not go ahead
        # Of the last exchange: place of the first number that was not finite when it was sent, and
        # fingerprint of the reference;
        # squared distance from the mean of nodes, norm of the reference, and of the mean delta.
        self._checks = torch.tensor([NOWHERE, 0], dtype=torch.int64, device=published.device)
        self._sums = torch.zeros(3, dtype=torch.float64, device=published.device)

    def warm_up(self, codecs: Sequence[Codec], spans: Spans, values: FlatTensors) -> None:
        """Encode and accept once for each codec: both are compiled before the first exchange."""
        try:
            for codec, keeps, lost_before in product(codecs, (False, True), (False, True)):
                self.residual = torch.zeros_like(self.published) if lost_before else None
                DeltaShard.encode(self, codec, spans, values, keeps=keeps)  # nothing is sent
                for (start, stop), payload in self.outbox.items():
                    self.deliver(start, stop, Mean(codec, [payload]), payload)
        finally:
            self.residual = self.rounding_error = None
            self.keeps_local = self.is_lossy = False
            self._prediction.forget()
            self.published.zero_()
            self.reference.zero_()
            if self.outer is not None:
                self.outer.grad.zero_()

    def anchor(self) -> None:
        """Forget the state of an earlier reference; the caller has written the new one.

        The outer optimizer keeps its momentum.
        """
        self.residual = None
        self._prediction.forget()

    # --- one exchange ------------------------------------------------------------------------

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode the payload of an exchange; no other state changes until it is delivered."""
        self._open(codec, spans, keeps=keeps)
        self.kernels.encode(
            codec,
            values,
            spans,
            self.outbox.memory,
            EncodeRows(
                reference=self.reference,
                residual=self.residual,
                rounding=self.rounding_error,
                first=self._checks[:1],
                # Most of the distance between nodes; negligible with other wires.
                distance=self._sums[0] if codec.sparse else None,
                fingerprint=self._checks[1:],
            ),
        )

    def _open(self, codec: Codec, spans: Spans, *, keeps: bool) -> None:
        """Allocate memory for the payload of an exchange."""
        self._checks[:1].fill_(NOWHERE)
        self._sums.zero_()
        self.keeps_local, self.rounding_error = keeps and not self.options.eager, None
        self.is_lossy = not codec.exact
        if self.is_lossy and not self.keeps_local:
            # No rank reads the published row before the next merge, unless the node goes ahead.
            self.rounding_error = (
                torch.empty_like(self.published) if self.options.eager else self.published
            )
        # An exact payload is written into `published`, like the merge: each tile is read first.
        memory = (
            self.published.view(torch.uint8) if codec.exact and not self.options.eager else None
        )
        self.outbox.open(codec, spans, memory)

    def seal(self) -> None:
        """Do nothing: on the host all computations until now are over."""

    def collect(self) -> Work[Checks]:
        """Return the checks of what is sent; on the host they are known."""
        yield from ()
        return Checks(*self._checks.tolist())

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the encoded payloads of spans."""
        return self.outbox.payloads(spans)

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:
        """Move the reference by the mean delta, or keep it for the outer optimizer."""
        rows = ShardRows(
            reference=self.reference,
            negated=None if self.outer is None else self.outer.grad,
            shown=self.published if self.keeps_local else None,
            residual=self.residual if self.rounding_error is None else self._residual(),
            rounding=self.rounding_error,
            others=self._prediction.others_like(self.reference) if self.options.eager else None,
            share=self.options.share,
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
        self.rounding_error = None
        if self.keeps_local or not self.is_lossy:
            self.residual = None  # it is in the published row, or was sent
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
        """Publish the predicted result, with the other nodes' delta of the last exchange."""
        trial = None if self.outer is None else self.outer.trial
        place = self._prediction.predict(
            *(self.reference, self.options.share),
            lambda row: self.kernels.gather(values, 0, row.numel(), row),
            trial,
        )
        self.published.copy_(place)

    def turn_back(self) -> None:
        """Publish the difference that undoes `go_ahead`."""
        self._prediction.undo(self.published)

    def settle(self, values: FlatTensors) -> None:
        """Move the wire's rounding error from the parameters into the residual.

        For a merge that was chosen to keep local work, and comes before any is done.
        """
        if not (self.keeps_local and self.is_lossy):
            return
        residual = self._residual()
        self.kernels.gather(values, 0, residual.numel(), residual)
        lacking = self.published if self.outer is None else self.published + self.reference
        residual.sub_(self.reference).add_(lacking)

    def publish(self, rule: Merge) -> None:
        """Publish the row that a merge reads, g or g - s, unless it is published already."""
        if not rule.since_send:
            self.published.copy_(self.reference)
        elif self._prediction.place is not None:
            torch.sub(self.reference, self._prediction.place, out=self.published)
        elif self.outer is not None:
            self.published.add_(self.reference)
        self._prediction.place = None

    def rows(self) -> list[torch.Tensor]:
        """Return all tensors that live from exchange to exchange."""
        outer = [] if self.outer is None else self.outer.tensors()
        return [*self._rows().values(), *outer]

    def _rows(self) -> dict[str, torch.Tensor]:
        rows = {"reference": self.reference, "shown": self.published, "residual": self.residual}
        return {
            name: row for name, row in rows.items() if row is not None
        } | self._prediction.rows()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, without rows that are None."""
        state: dict[str, Any] = {name: row.clone() for name, row in self._rows().items()}
        return state | {"keeps": self.keeps_local, "lossy": self.is_lossy} | self.outer_state()

    def outer_state(self) -> dict[str, Any]:
        """Return the state of the outer optimizer alone, which outlives references."""
        return {} if self.outer is None else {"outer": self.outer.state()}

    def load_outer(self, state: dict[str, Any]) -> None:
        """Take over what `outer_state` returned."""
        if self.outer is not None:
            self.outer.load(state["outer"])

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.reference.copy_(state["reference"])
        self.published.copy_(state["shown"])
        residual = state.get("residual")
        self.residual = None if residual is None else residual.to(self.published.device, copy=True)
        self._prediction = Prediction.load(state, self.published.device)
        self.keeps_local, self.is_lossy = state["keeps"], state["lossy"]
        self.load_outer(state)


def cut_row(
    plan: AllReducePlan, codec: Codec, numel: int, chunk_bytes: int, *, on_device: bool
) -> Chunks:
    """Cut a row into messages; larger ones on devices, since each costs launches."""
    least, even = (LEAST, EVEN) if on_device else (1, 1)
    return plan.chunks(numel, message_numel(codec, chunk_bytes, least), even)


def message_numel(codec: Codec, chunk_bytes: int, least: int = 1) -> int:
    """Return the numbers of a row in a message of about ``chunk_bytes`` on the wire."""
    return max(least, min(MOST, chunk_bytes * KIBI // codec.nbytes(KIBI)))
