"""Operands of the kernels: consecutive tensors, unevaluated means, and rows of a shard."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from daso.kernels.codecs import Codec
from daso.torch_private import foreach_copy

NOWHERE = 1 << 62  # larger than every index: all numbers are finite
OTHER = -1  # a type that C and Triton kernels do not read
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class FlatTensors:
    """Consecutive tensors that form one row.

    Args:
        tensors: Contiguous, with one axis, of any floating-point types and devices.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = [tensor for tensor in tensors if tensor.numel()]
        if not all(tensor.dim() == 1 and tensor.is_contiguous() for tensor in self.tensors):
            raise ValueError(
                "tensors of a row must have one axis and be contiguous; pass flat views"
            )
        self.bounds = list(accumulate((tensor.numel() for tensor in self.tensors), initial=0))
        self.numel = self.bounds[-1]
        # Tables for C and Triton, which only read tensors of these types on one device.
        self.addresses = array("q", [tensor.data_ptr() for tensor in self.tensors])
        self.kinds = array("i", [KINDS.get(tensor.dtype, OTHER) for tensor in self.tensors])
        self.ends = array("q", self.bounds[1:])
        devices = {tensor.device for tensor in self.tensors}
        self._device = devices.pop() if len(devices) == 1 and OTHER not in self.kinds else None
        self.on_host = self.fits(torch.device("cpu"))

    def fits(self, device: torch.device) -> bool:
        """Return whether kernels of a device can read the tensors through the tables."""
        return self._device == device or not self.tensors

    def pairs(
        self, start: int, stop: int, row: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the elements in a span, with the parts of a row (stop - start) for them."""
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
            foreach_copy([part for _, part in pairs], [elements for elements, _ in pairs])


class Mean(NamedTuple):
    """An unevaluated weighted mean of payloads.

    Args:
        codec: Layout of each payload.
        versions: Payloads of the same numbers, in rank order, which start at a block.
        weights: Of each payload.
        total: Divisor of the weighted sum.
    """

    codec: Codec
    versions: Sequence[torch.Tensor]
    weights: Sequence[int] = (1,)
    total: int = 1

    def part(self, start: int, stop: int) -> "Mean":
        """Return the mean of numbers ``start`` to ``stop``; see `Codec.part`."""
        parts = [self.codec.part(version, start, stop) for version in self.versions]
        return self._replace(versions=parts)


@dataclass(frozen=True, slots=True)
class EncodeRows:
    """Rows that are read and written when a row is encoded: (numel) of its type, or None.

    Args:
        reference: Subtracted.
        residual: Earlier rounding errors, added.
        rounding: Receives the rounding errors; may be ``residual``.
        gradients: A zero gradient is not sent and keeps its residual, because its parameter may be
            unused on all ranks. Errors that are not finite are dropped. ``residual`` is read and
            written; no other row is used.
        first: Lowered to the index of the first number that is not finite (1,), int64.
        distance: Increased by the squares of the rounding errors (), fp64.
        fingerprint: Receives the fingerprint of ``reference`` (1,), int64; spans must cover it.
    """

    reference: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    rounding: torch.Tensor | None = None
    gradients: bool = False
    first: torch.Tensor | None = None
    distance: torch.Tensor | None = None
    fingerprint: torch.Tensor | None = None

    def check(self) -> None:
        """Raise for gradients without a residual or with other rows, and for what has no row."""
        if self.fingerprint is not None and self.reference is None:
            raise ValueError("a fingerprint must be that of a reference, but it is None")
        others = (self.reference, self.rounding, self.first, self.distance)
        if self.gradients and (self.residual is None or any(row is not None for row in others)):
            raise ValueError("gradients must be encoded with a residual, and with no other row")


NO_ROWS = EncodeRows()


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of a shard that a mean changes: (numel) of one type, or None.

    Args:
        reference: Moved by the mean, unless an outer optimizer moves it.
        negated: Receives minus the mean: the gradient for an outer optimizer.
        shown: Receives mean - carried + residual; before an outer step, -(carried + reference) +
            residual.
        residual: Rounding errors of earlier exchanges; receives ``rounding`` if it is given.
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

    A CUDA device would multiply by the reciprocal of a number, but divides by a tensor.
    """
    return values.div_(values.new_full((), by) if values.is_cuda else by)
