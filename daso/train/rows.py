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
        self.reference = node.share(self.spans, dtype)
        self.snapshot = node.share(self.spans, dtype)
        residual = None if two_phase.codec.exact else torch.zeros_like(self.reference.mine)
        self.deltas = Deltas(self.snapshot.mine, self.reference.mine, residual)

    def _views(self, span: Span, row: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the parameters' elements in a span with a row that holds that span."""
        for piece in pieces(self.layout, span):
            tensor = flat_view(self.named[piece.slot][1])
            yield tensor[slice(*piece.inside)], row[slice(*piece.at)]

    def anchor(self) -> None:
        """Take the parameters, equal on all nodes, as the reference."""
        self._copy_parameters(self.reference.mine)
        if self.deltas.residual is not None:
            self.deltas.residual.zero_()
        self.two_phase.forget()

    def take_snapshot(self) -> None:
        """Remember the parameters as they are now, for the exchange that starts."""
        self.reference.wait_released()
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
        """Take in the new reference: x <- keep x + pull g - drop s.

        Args:
            rule: The three numbers.

        Collective over the node; blocking.
        """
        share, pull = self.reference, rule.pull
        if rule.drop:
            share, pull = self.snapshot, 1.0
            self.snapshot.mine.mul_(-rule.drop).add_(self.reference.mine, alpha=rule.pull)
        share.publish()
        share.wait()
        with torch.no_grad():
            for span, part in zip(self.spans, share.parts, strict=True):
                _merge_pairs(list(self._views(span, part)), rule.keep, pull)
        share.release()

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
        chunk = max(1, chunk_bytes // mean.codec.nbytes(1))
        chunks = chunk_parts(self.span.numel, len(mean.weights), chunk)
        if reduce == "ordered":
            return mean.run(self.deltas, chunks)
        weight = mean.weights[mean.comm.Get_rank()]
        return iallreduce(mean.comm, self.deltas, chunks, weight, mean.total)


def _merge_pairs(pairs: list[tuple[torch.Tensor, torch.Tensor]], keep: float, pull: float) -> None:
    """Compute x <- keep x + pull c for pairs (x, c)."""
    if not pairs:
        return
    here, there = [x for x, _ in pairs], [c for _, c in pairs]
    if keep == 0.0 and pull == 1.0:
        torch._foreach_copy_(here, there)
    elif all(x.dtype == c.dtype for x, c in pairs):
        torch._foreach_mul_(here, keep)
        torch._foreach_add_(here, there, alpha=pull)
    else:  # 16-bit parameters: compute in the reference's type, round once
        for x, c in pairs:
            x.copy_(x.to(c.dtype).mul_(keep).add_(c, alpha=pull))
