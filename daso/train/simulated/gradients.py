"""Gradients of simulated nodes, averaged on a narrow wire to the bits of a real run."""

from collections.abc import Sequence
from functools import partial

import torch

from daso.comm.allreduce.runners import SequentialAllReduce
from daso.comm.reduction import accumulator
from daso.kernels.codecs import Codec, codec_named
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.cost_model import choose_plan
from daso.plan.layout import fit_buckets, flagged, last_layer
from daso.plan.options import Settings
from daso.train.gradients.compression import CompressedSum, compressed_chunks
from daso.train.model.params import Named, flat_view


class SimulatedGradients:
    """Averages gradients of nodes of one rank each, bucket by bucket.

    Args:
        named: Names and parameters, for each node.
        wire: "bf16", "int8" or "int4".
        settings: Settings of exchanges; if the size of buckets is searched, it differs here.
    """

    def __init__(self, named: Sequence[Named], wire: str, settings: Settings) -> None:
        self._named, self._wire, self._settings = named, wire, settings
        # Parameters in the order in which their gradients became ready, up to the end of the first
        # averaged round.
        self._order: list[int] = []
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(partial(self._note, index))
            for index, (_, tensor) in enumerate(named[0])
        ]
        self._residuals: dict[tuple[torch.dtype, int, int], torch.Tensor] = {}  # and by node
        self._rounded: dict[torch.dtype, list[dict[int, torch.Tensor]]] = {}  # by each node
        self._means: dict[tuple[torch.dtype, AllReducePlan], SequentialAllReduce] = {}

    def _note(self, index: int, _: torch.Tensor) -> None:
        if index not in self._order:
            self._order.append(index)

    def change(self, wire: str) -> None:
        """Use another wire from the next round on; see `GradientCompressor.change`."""
        if wire != self._wire:
            self._wire = wire
            self._rounded.clear()
            self._means.clear()

    def forget(self) -> None:
        """Forget all residuals."""
        self._residuals.clear()
        self._rounded.clear()
        self._means.clear()

    def average(self) -> int:
        """Replace gradients by their mean over nodes; return the bytes that nodes would send."""
        everything = range(len(self._named[0]))
        self._order += [at for at in reversed(everything) if at not in self._order]
        order = self._order
        nbytes = 0
        for dtype in dict.fromkeys(tensor.dtype for _, tensor in self._named[0]):
            members = [at for at in order if self._named[0][at][1].dtype == dtype]
            tensors = [self._named[0][at][1] for at in members]
            spans = flagged([tensor.numel() for tensor in tensors])
            size = self._settings.gradients.first_bucket_bytes(on_gpu=False) or 1 << 20
            last = last_layer([self._named[0][at][0] for at in members])
            for group in fit_buckets([tensor.nbytes for tensor in tensors], size, last=last):
                start, stop = spans[group[0]].start, spans[group[-1]].stop + 1
                places = [spans[at].stop - start for at in group]
                inside = [members[at] for at in group]
                nbytes += self._average(inside, dtype, start, stop - start, places)
        return nbytes

    def _average(
        self, members: Sequence[int], dtype: torch.dtype, start: int, numel: int, flags: list[int]
    ) -> int:
        """Average one bucket."""
        nodes, wide = len(self._named), accumulator(dtype)
        codec = codec_named(self._wire, wide)
        places = torch.tensor(flags, dtype=torch.int64, device="cpu")
        exchange = self._settings.exchange
        plan = choose_plan(exchange.algorithm, nodes, codec.nbytes(numel))
        sources = []
        for node in range(nodes):
            total = torch.zeros(numel, dtype=wide, device="cpu")
            for index, flag in zip(members, flags, strict=True):
                tensor = self._named[node][index][1]
                if tensor.grad is not None:
                    total[flag - tensor.numel() : flag] = flat_view(tensor.grad)
                    total[flag] = 1
            residual = self._residuals.setdefault((dtype, node, start), torch.zeros_like(total))
            sources.append(CompressedSum(total, start, residual, places))
        chunks = compressed_chunks(codec, exchange.chunk_bytes, start, numel, plan)
        spans = [span for parts in chunks for span in parts]
        for source in sources:
            source.encode(codec, spans)
        nbytes = self._exchange(dtype, codec, plan).run(sources, chunks)
        used = torch.stack([source.exact for source in sources]).sum(0).tolist()
        for index, flag, count in zip(members, flags, used, strict=True):
            for source, named in zip(sources, self._named, strict=True):
                tensor = named[index][1]
                if count > 0:
                    mean = source.total[flag - tensor.numel() : flag].to(dtype)
                    tensor.grad = torch.empty_like(tensor) if tensor.grad is None else tensor.grad
                    flat_view(tensor.grad).copy_(mean)
        return nbytes + 2 * (nodes - 1) * len(flags) * wide.itemsize

    def _exchange(
        self, dtype: torch.dtype, codec: Codec, plan: AllReducePlan
    ) -> SequentialAllReduce:
        """Return the all-reduce of gradients of a type by a plan."""
        if (dtype, plan) not in self._means:
            nodes = len(self._named)
            rounded = self._rounded.setdefault(dtype, [{} for _ in range(nodes)])
            self._means[dtype, plan] = SequentialAllReduce(
                codec, [1] * nodes, nodes, plan, rounded, of_gradients=True
            )
        return self._means[dtype, plan]
