"""Cuts the rows of gradients into buckets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.utils.dlpack

from daso.comm.node.base import NodeBucket, NodeRow
from daso.plan.layout import MIN_BUCKET_BYTES, Span
from daso.plan.portions import Portion, cut_portions

Finish = Callable[[], None]
Cuts = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients of one type."""

    params: tuple[int, ...]  # indices of the parameters
    nbytes: tuple[int, ...]  # of each
    spans: tuple[Span, ...]  # of each; its flag lies at stop
    memory: NodeRow
    grad_memory: torch.Tensor  # the same memory in another storage: ``.grad`` lies in it


@dataclass(slots=True)
class Bucket:
    """A bucket: its memory, and its progress in this round."""

    portion: Portion
    place: int  # in the order in which buckets fill
    params: tuple[int, ...]  # indices of the parameters that lie in it, wholly or in part
    memory: NodeBucket
    flag_params: tuple[int, ...]  # indices of the parameters whose flag lies in it
    flag_offsets: tuple[int, ...]  # of these flags in the memory
    flag_index: torch.Tensor  # the same (flags,), on the device of the memory
    under_way: bool = False  # started, and not collected
    missing: set[int] = field(default_factory=set)  # parameters without a gradient yet
    finish: Finish | None = None


def cut_row(
    row: Row,
    cuts: Cuts,
    bucket_bytes: int,
    layers: Sequence[int],
    groups: Sequence[tuple[int, ...]],
) -> list[Bucket]:
    """Return the buckets of a row.

    Args:
        row: The row.
        cuts: Tensors that may lie in several buckets.
        bucket_bytes: Bytes from which a bucket counts as full.
        layers: Layer of each parameter of the row, counted from the input.
        groups: Parameters (places in the row) of each bucket where no tensor is cut.
    """
    dtype = row.memory.flat.dtype
    full = elements(bucket_bytes, dtype)
    if cuts == "all":
        portions: Sequence[Portion] = cut_portions(row.spans, layers, full)
    else:
        portions = _whole_tensors(row, groups)
    if cuts == "last":
        least = elements(MIN_BUCKET_BYTES, dtype)
        portions = _with_last_cut(row, portions, layers, max(full, least))
    memories = row.memory.cut([portion.span for portion in portions])
    return [
        _bucket(row, portion, memory) for portion, memory in zip(portions, memories, strict=True)
    ]


def elements(bucket_bytes: int, dtype: torch.dtype) -> int:
    """Return the number of elements from which a bucket counts as full."""
    return max(1, bucket_bytes // dtype.itemsize)


def _whole_tensors(row: Row, groups: Sequence[tuple[int, ...]]) -> list[Portion]:
    """Cut a row so that every tensor is in one bucket."""
    spans = [Span(row.spans[group[0]].start, row.spans[group[-1]].stop + 1) for group in groups]
    return [Portion(span, group, 0) for span, group in zip(spans, groups, strict=True)]


def _with_last_cut(
    row: Row, portions: Sequence[Portion], layers: Sequence[int], elements: int
) -> list[Portion]:
    """Cut the last bucket: its stages have no backward to hide behind, but can hide each other."""
    first = portions[-1].params[0]
    parts = cut_portions(row.spans[first:], layers[first:], elements)
    moved = [replace(part, params=tuple(first + at for at in part.params)) for part in parts]
    return [*portions[:-1], *moved]


def _bucket(row: Row, portion: Portion, memory: NodeBucket) -> Bucket:
    start, stop = portion.span
    params = tuple(row.params[at] for at in portion.params)
    ending = [at for at in portion.params if start <= row.spans[at].stop < stop]
    offsets = tuple(row.spans[at].stop - start for at in ending)
    return Bucket(
        portion=portion,
        place=0,
        params=params,
        memory=memory,
        flag_params=tuple(row.params[at] for at in ending),
        flag_offsets=offsets,
        flag_index=torch.tensor(offsets, dtype=torch.int64, device=memory.flat.device),
        missing=set(params),
    )


def gradient_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type of a parameter's gradients: its ``grad_dtype``, else its own."""
    return getattr(tensor, "grad_dtype", None) or tensor.dtype


def second_storage(row: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage torch may replace by itself.

    ``share_memory_()`` replaces the memory behind a storage, for all tensors that have it. Memory
    of a device is shared already.
    """
    if row.device.type != "cpu":
        # Its version counts writes of the program only.
        where = row.storage_offset(), row.shape, row.stride()
        return row.new_empty(0).set_(row.untyped_storage(), *where)
    return torch.utils.dlpack.from_dlpack(row)
