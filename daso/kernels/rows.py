"""Operands of the kernels: tensors that form a row, means that are not computed yet, shard rows."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from daso.kernels.codecs import Codec

__all__ = ["NOWHERE", "NO_ROWS", "EncodeRows", "FlatTensors", "Mean", "ShardRows", "divide_"]

NOWHERE = 1 << 62  # larger than every place: all numbers are finite
OTHER = -1  # a type that C and Triton do not read
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class FlatTensors:
    """Tensors that lie one after the other in a row.

    Args:
        tensors: Each contiguous, with one axis; of any floating types and devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [one for one in tensors if one.numel()]
        if not all(one.dim() == 1 and one.is_contiguous() for one in self.tensors):
            raise ValueError(
                "tensors of a row must have one axis and be contiguous; pass flat views"
            )
        self.bounds = list(accumulate((one.numel() for one in self.tensors), initial=0))
        self.numel = self.bounds[-1]
        # Tables for C and Triton, which read tensors of these types on one device alone.
        self.addresses = array("q", [one.data_ptr() for one in self.tensors])
        self.kinds = array("i", [KINDS.get(one.dtype, OTHER) for one in self.tensors])
        self.ends = array("q", self.bounds[1:])
        devices = {one.device for one in self.tensors}
        self._device = devices.pop() if len(devices) == 1 and OTHER not in self.kinds else None

    def fits(self, device: torch.device) -> bool:
        """Return whether kernels of a device can read the tensors by the tables."""
        return self._device == device or not self.tensors

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
        total: Divisor of the weighted sum.
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
class EncodeRows:
    """Rows that take part in encoding a row (numel), each as long and of one type, or None.

    Args:
        reference: Subtracted.
        residual: Earlier rounding errors, added.
        rounding: Receives the rounding errors; may be ``residual``.
        gradients: A zero gradient is not sent and keeps its residual, because its parameter may be
            unused on all ranks. Errors that are not finite are not kept. ``residual`` is read and
            written; no other row is used.
        first: Lowered to the place of the first number that is not finite (1,), int64.
        distance: Raised by the squares of the rounding errors (), fp64.
    """

    reference: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    rounding: torch.Tensor | None = None
    gradients: bool = False
    first: torch.Tensor | None = None
    distance: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Refuse gradients without a residual, and rows that gradients do not use."""
        others = (self.reference, self.rounding, self.first, self.distance)
        if self.gradients and (self.residual is None or any(row is not None for row in others)):
            raise ValueError("gradients must be encoded with a residual, and with no other row")


NO_ROWS = EncodeRows()


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows that a mean changes, each (numel) of one type, or None.

    Args:
        reference: Moved by the mean, unless an outer optimizer will move it.
        negated: Receives minus the mean: the gradient of an outer optimizer.
        shown: Receives mean - carried + residual; before an outer step, -(carried + reference) +
            residual.
        residual: Rounding errors of earlier exchanges; receives `rounding` if that is given.
        rounding: Rounding errors of this exchange.
        others: Receives mean - share * carried, the delta of the other nodes.
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
