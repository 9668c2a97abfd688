"""One flat row of parameters as the nodes see it: the agreed reference, and what came since.

Parameters of one accumulation type (fp32, or fp64 for fp64 parameters) make one row. Lane l owns
part l of it on every node: reference, snapshot and residual exist once per node, not per rank.
"""

from collections.abc import Iterator

import torch

from daso.comm.engine import Work
from daso.comm.exchange import Deltas, TwoPhase, iallreduce
from daso.comm.node import NodeGroup
from daso.comm.topology import Place
from daso.plan.layout import Span, chunk_parts, pieces, split
from daso.plan.merge import ADOPT, Merge
from daso.train.params import Named, flat_view, layout_of

__all__ = ["ParameterRow"]

KIBI = 1024  # numbers by which a codec's rate is asked: headers of blocks do not count then


class ParameterRow:
    """Reference, snapshot and merge of one row of parameters.

    Args:
        named: Names and parameters, all accumulated in ``dtype``.
        dtype: fp32 or fp64.
        node: The node whose ranks read each other's parts.
        place: Where this rank stands.
        two_phase: The exchange of deltas over this rank's lane.

    Collective over the node; blocking.
    """

    def __init__(
        self,
        named: Named,
        dtype: torch.dtype,
        *,
        node: NodeGroup,
        place: Place,
        two_phase: TwoPhase,
    ) -> None:
        self.named, self.two_phase = named, two_phase
        self.layout = layout_of(named)
        self.spans = split(self.layout.numel, place.lanes)
        self.span = self.spans[place.lane] if place.lane is not None else Span(0, 0)
        self.snapshot = node.share(self.spans, dtype)
        self.reference = torch.zeros(self.span.numel, dtype=dtype)
        residual = None if two_phase.codec.exact else torch.zeros_like(self.reference)
        self.deltas = Deltas(self.snapshot.mine, self.reference, residual)

    def _views(self, span: Span, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the parameters' elements in a span with a row that holds that span."""
        for piece in pieces(self.layout, span):
            tensor = flat_view(self.named[piece.slot][1])
            yield tensor[slice(*piece.inside)], row[slice(*piece.at)]

    def anchor(self) -> None:
        """Take the parameters, equal on all nodes, as the reference."""
        self._copy_parameters(self.reference)
        if self.deltas.residual is not None:
            self.deltas.residual.zero_()
        self.two_phase.forget()

    def take_snapshot(self) -> None:
        """Remember the parameters as they are now, for the exchange that starts."""
        self.snapshot.wait_released()
        self._copy_parameters(self.snapshot.mine)

    def _copy_parameters(self, row: torch.Tensor) -> None:
        pairs = list(self._views(self.span, row))
        if pairs:
            torch._foreach_copy_([there for _, there in pairs], [here for here, _ in pairs])

    def first_nonfinite(self) -> int | None:
        """Return the element of the whole row that is not finite in the snapshot, if any."""
        mine = self.snapshot.mine
        if bool(mine.sum().isfinite()) or bool(mine.isfinite().all()):
            return None
        return self.span.start + int((~mine.isfinite()).nonzero()[0])

    def merge(self, rule: Merge) -> None:
        """Take in the new reference g.

        What every rank of the node needs (g, or g - s) is written once, over the snapshot s, and
        read by all of them from there.

        Args:
            rule: What to do.

        Collective over the node; blocking.
        """
        shown = self.snapshot.mine
        if rule.since_send:
            torch.sub(self.reference, shown, out=shown)
        else:
            shown.copy_(self.reference)
        self.snapshot.publish()
        self.snapshot.wait()
        with torch.no_grad():
            for span, part in zip(self.spans, self.snapshot.parts, strict=True):
                _merge_pairs(list(self._views(span, part)), rule)
        self.snapshot.release()

    def restore(self) -> None:
        """Set the parameters back to the reference. Collective over the node; blocking."""
        self.merge(ADOPT)

    def exchange(self, reduce: str, chunk_bytes: int) -> Work[int]:
        """Move the reference by the mean delta of all nodes.

        Args:
            reduce: ``"iallreduce"`` or ``"ordered"``.
            chunk_bytes: Bytes of a chunk on the wire.

        Returns:
            Bytes sent by this rank.

        Collective over the lane; non-blocking, as work for the engine.
        """
        mean = self.two_phase
        chunk = max(1, chunk_bytes * KIBI // mean.codec.nbytes(KIBI))
        chunks = chunk_parts(self.span.numel, len(mean.weights), chunk)
        if reduce == "ordered":
            return mean.run(self.deltas, chunks)
        weight = mean.weights[mean.comm.Get_rank()]
        return iallreduce(mean.comm, self.deltas, chunks, weight, mean.total)


def _merge_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Carry out a merge for pairs (x, c), c being g, or g - s where the rule says since_send."""
    if not pairs:
        return
    here, there = [x for x, _ in pairs], [c for _, c in pairs]
    if rule == ADOPT:
        torch._foreach_copy_(here, there)
    elif any(x.dtype != c.dtype for x, c in pairs):
        _merge_wide(pairs, rule)
    elif rule.since_send:
        torch._foreach_add_(here, there)
    else:
        torch._foreach_lerp_(here, there, rule.pull)


def _merge_wide(pairs: list[tuple[torch.Tensor, torch.Tensor]], rule: Merge) -> None:
    """Merge 16-bit parameters: compute in the reference's type, round once."""
    for x, c in pairs:
        wide = x.to(c.dtype)
        x.copy_(wide.add_(c) if rule.since_send else wide.lerp_(c, rule.pull))
