"""Rows on simulated nodes: encoded, averaged and merged as in a real run."""

from collections.abc import Sequence

import torch

from daso.comm.allreduce.runners import SequentialAllReduce
from daso.kernels.codecs import Codec, codec_named, dense_codec
from daso.kernels.rows import FlatTensors
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.cost_model import choose_plan
from daso.plan.exchange import ADOPT, Merge
from daso.plan.options import Settings
from daso.train.deltas.shard import DeltaShard, MergeOptions, cut_row
from daso.train.model.params import Named, flat_view


class Row:
    """A row of one fragment on all nodes.

    Args:
        named: Names and parameters, for each node.
        dtype: fp32 or fp64.
        options: Options of the merge.
        settings: Settings of exchanges.
        on_devices: See `daso.train.simulated.nodes.Times`.
        is_small: Whether the row has the small tensors of the model.
    """

    def __init__(
        self,
        named: Sequence[Named],
        dtype: torch.dtype,
        options: MergeOptions,
        settings: Settings,
        *,
        on_devices: bool,
        is_small: bool,
    ) -> None:
        self.named, self.dtype, nodes = named, dtype, len(named)
        self.is_small = is_small
        numel = sum(tensor.numel() for _, tensor in named[0])
        self.parts = [
            DeltaShard(torch.zeros(numel, dtype=dtype, device="cpu"), options) for _ in named
        ]
        self.rounded: list[dict[int, torch.Tensor]] = [{} for _ in named]  # by each node
        wires = settings.wires
        codecs = {wire: codec_named(wire, dtype) for wire in wires}
        codec = codecs[wires[0]]
        plan = choose_plan(settings.exchange.algorithm, nodes, codec.nbytes(numel))
        self.wired = {wire: self._mean(wired, plan) for wire, wired in codecs.items()}
        self.dense = self.wired[wires[0]]
        if settings.sparse:
            self.dense = self._mean(dense_codec(wires[0], dtype), plan)
        self.chunks = cut_row(
            plan, codec, numel, settings.exchange.chunk_bytes, on_device=on_devices
        )
        self.spans = [span for parts in self.chunks for span in parts]

    def _mean(self, codec: Codec, plan: AllReducePlan) -> SequentialAllReduce:
        nodes = len(self.named)
        return SequentialAllReduce(codec, [1] * nodes, nodes, plan, self.rounded)

    def anchor(self) -> float:
        """Take the parameters, equal on all nodes, as the reference; return its squared norm."""
        for node, part in enumerate(self.parts):
            part.kernels.gather(self._values(node), 0, part.reference.numel(), part.reference)
            part.anchor()
        for rounded in self.rounded:
            rounded.clear()
        return float(self.parts[0].reference.double().square().sum())

    def send(
        self, wire: str, *, dense: bool, ahead: bool, keeps: bool
    ) -> tuple[int, list[tuple[float, float, float]]]:
        """Exchange deltas; return the bytes of all nodes, and each shard's measurements."""
        means = self.dense if dense and len(self.wired) == 1 else self.wired[wire]
        for node, part in enumerate(self.parts):
            values = self._values(node)
            part.encode(means.codec, self.spans, values, keeps=keeps)
            if ahead:
                part.go_ahead(values)
                part.kernels.merge(values, part.published, ADOPT.pull)
        nbytes = means.run(self.parts, self.chunks)
        return nbytes, [part.measured(part.finish().tolist()) for part in self.parts]

    def _values(self, node: int) -> FlatTensors:
        """Return the parameters of a node."""
        return FlatTensors([flat_view(tensor) for _, tensor in self.named[node]])

    def merge(self, rule: Merge) -> None:
        """Merge the new reference into the parameters."""
        for node, part in enumerate(self.parts):
            if rule == ADOPT:
                part.settle(self._values(node))
            part.publish(rule)
            part.kernels.merge(self._values(node), part.published, rule.pull, add=rule.since_send)
