"""How an operation of torch's writes to memory that it is given, rather than to its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["EMPTY", "Call", "Make", "allocating", "direct", "flat", "in_place", "same"]

aten = torch.ops.aten
Call = Callable[[], object]
Make = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Call]  # outs, args, kwargs


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors hold the same values; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def flat(found: Any) -> list[Any]:
    """Return an operation's results, one or several, as a list."""
    return list(found) if isinstance(found, (tuple, list)) else [found]


def _copy(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    return partial(outs[0].copy_, args[0])


def _fill(value: float) -> Make:
    return lambda outs, _args, _kwargs: partial(outs[0].fill_, value)


def _full(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    return partial(outs[0].fill_, args[-1])


def _relu(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    return partial(aten.clamp_min.out, args[0], 0, out=outs[0])


def _number(op: OpOverload) -> Make:
    return lambda outs, args, kwargs: partial(op, *args, **kwargs, out=outs[0])


def _masked_fill(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    (out,), (source, mask, value) = outs, args

    def write() -> None:
        out.copy_(source)
        out.masked_fill_(mask, value)

    return write


def _embedding(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
    (out,), (weight, indices) = outs, args[:2]

    def write() -> None:
        rows = out.view(-1, weight.shape[1])
        aten.index_select.out(weight, 0, indices.reshape(-1), out=rows)

    return write


def _part(choose: Callable[..., torch.Tensor]) -> Make:
    def make(outs: Sequence[Any], args: Sequence[Any], _: Mapping[str, Any]) -> Call:
        (out,), (source, _sizes, *where) = outs, args

        def write() -> None:
            out.zero_()
            choose(out, *where).copy_(source)

        return write

    return make


# Operations without an `.out` overload that is more than a copy (torch 2.13 tags these "generated":
# they allocate a result and copy it), and what writes the same values.
WRITES: Mapping[OpOverload, Make] = {
    aten.clone.default: _copy,
    aten._to_copy.default: _copy,
    aten.lift_fresh_copy.default: _copy,
    aten.relu.default: _relu,
    aten.ones_like.default: _fill(1),
    aten.zeros_like.default: _fill(0),
    aten.new_ones.default: _fill(1),
    aten.new_zeros.default: _fill(0),
    aten.ones.default: _fill(1),
    aten.zeros.default: _fill(0),
    aten.full.default: _full,
    aten.full_like.default: _full,
    aten.new_full.default: _full,
    aten.scalar_tensor.default: _full,
    aten.mul.Scalar: _number(aten.mul.out),
    aten.div.Scalar: _number(aten.div.out),
    aten.add.Scalar: _number(aten.add.out),
    aten.sub.Scalar: _number(aten.sub.out),
    aten.masked_fill.Scalar: _masked_fill,
    aten.embedding.default: _embedding,
    aten.select_backward.default: _part(aten.select.int),
    aten.slice_backward.default: _part(aten.slice.Tensor),
}
EMPTY = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


# Their `.out` overloads resize what they are given to the shape of their inputs, and back (2.13).
RESIZING = {
    aten.binary_cross_entropy.default,
    aten.huber_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
}


def direct(op: OpOverload) -> list[Make]:
    """Return how an operation might write to given memory: to be tried, the best first."""
    if op in RESIZING:
        return []
    return [make for make in (WRITES.get(op), _through_out(op)) if make is not None]


def _through_out(op: OpOverload) -> Make | None:
    """Return how an operation writes through its `.out` overload; None if it has none."""
    inputs = [(one.name, str(one.type)) for one in op._schema.arguments]
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = overload._schema.arguments
        names = [one.name for one in arguments if one.is_out]
        takes = [(one.name, str(one.type)) for one in arguments if not one.is_out]
        generated = torch.Tag.generated in overload.tags
        if len(names) == len(op._schema.returns) and takes == inputs and not generated:
            return partial(_to_names, overload, names)
    return None


def _to_names(
    overload: OpOverload,
    names: Sequence[str],
    outs: Sequence[Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Call:
    return partial(overload, *args, **kwargs, **dict(zip(names, outs, strict=True)))


def in_place(
    op: OpOverload, _: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """Run an operation that writes to its arguments, or to nothing."""
    return partial(op, *args, **kwargs)


def allocating(
    op: OpOverload, lands: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """Run an operation as it is; hand what it allocates to ``lands``, not where that is None."""

    def run() -> None:
        for land, one in zip(lands, flat(op(*args, **kwargs)), strict=True):
            if land is not None:
                land(one)

    return run
