"""Operands of the kernels: tensors that form a row, means that are not computed yet, shard rows."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from daso.kernels.codecs import Codec

__all__ = ["NOWHERE", "FlatTensors", "Mean", "ShardRows", "divide_"]

NOWHERE = 1 << 62  # a place behind all others: every number is finite
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class FlatTensors:
    """Tensors that lie one after the other in a row.

    Args:
        tensors: Each contiguous, with one axis; fp32, fp64, bf16 or fp16, all on one device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [one for one in tensors if one.numel()]
        assert all(one.dim() == 1 and one.is_contiguous() for one in self.tensors)
        self.bounds = list(accumulate((one.numel() for one in self.tensors), initial=0))
        self.numel = self.bounds[-1]
        # What the C code reads: addresses, types, ends.
        self.addresses = array("q", [one.data_ptr() for one in self.tensors])
        self.kinds = array("i", [KINDS[one.dtype] for one in self.tensors])
        self.ends = array("q", self.bounds[1:])

    def pairs(
        self, start: int, stop: int, row: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pair the elements in a span with a row (stop - start) of that span."""
        for tensor, (first, last) in zip(self.tensors, pairwise(self.bounds), strict=True):
            a, b = max(first, start), min(last, stop)
            if a < b:
                yield tensor[a - first : b - first], row[a - start : b - start]

    def gather(self, start: int, stop: int, row: torch.Tensor) -> None:
        """Copy the elements in a span to a row (stop - start), with torch."""
        pairs = list(self.pairs(start, stop, row))
        if len(pairs) == 1:
            pairs[0][1].copy_(pairs[0][0])
        elif pairs:
            torch._foreach_copy_([there for _, there in pairs], [here for here, _ in pairs])


class Mean(NamedTuple):
    """A weighted mean of payloads that is not computed yet.

    Args:
        codec: Layout of every version.
        versions: Payloads of the same numbers, in rank order; each bytes from a block on.
        weights: Of each version.
        total: What the weighted sum is divided by.
    """

    codec: Codec
    versions: Sequence[torch.Tensor]
    weights: Sequence[int] = (1,)
    total: int = 1

    def part(self, start: int, stop: int) -> "Mean":
        """Return the mean of numbers ``start`` to ``stop``; see `Codec.part`."""
        parts = [self.codec.part(one, start, stop) for one in self.versions]
        return self._replace(versions=parts)


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows that a mean changes, each (numel) of one type; None: there is no such row.

    Args:
        reference: Moved by the mean, unless an outer optimizer will move it.
        negated: Receives minus the mean: the gradient of an outer optimizer.
        shown: Receives mean - carried + residual; before an outer step, -(carried + reference) +
            residual.
        residual: What earlier exchanges rounded away; receives `rounding` where there is one.
        rounding: What this exchange rounded away.
        others: Receives mean - share * carried: what the other nodes did.
        share: This node's weight in the mean of all nodes.
    """

    reference: torch.Tensor
    negated: torch.Tensor | None = None
    shown: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    rounding: torch.Tensor | None = None
    others: torch.Tensor | None = None
    share: float = 1.0


def divide_(values: torch.Tensor, by: int) -> torch.Tensor:
    """Divide by a number in place, with the bits of a CPU.

    A CUDA device multiplies by the number's reciprocal, but not by one of a tensor there.
    """
    return values.div_(values.new_full((), by) if values.is_cuda else by)
