"""Calls of torch's operations that write their results to given memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from daso.torch_private import TO_COPY, OpOverload, schema_of

aten = torch.ops.aten
Call = Callable[[], object]
Make = Callable[[Sequence[Any], Sequence[Any], Mapping[str, Any]], Call]  # outs, args, kwargs


def equal_values(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Return whether two tensors have the same values; NaN equals NaN."""
    if first is None or second is None:
        return first is second
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | (first.isnan() & second.isnan())).all())


def as_list(result: Any) -> list[Any]:
    """Return one or several results of an operation as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


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


# Replacements for operations whose `.out` overload allocates a result and copies it (torch 2.13
# tags these "generated"), or that have none.
WRITES: Mapping[OpOverload, Make] = {
    aten.clone.default: _copy,
    TO_COPY: _copy,
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


# Their `.out` overloads resize the output to the shape of the inputs, and back (torch 2.13).
RESIZING = {
    aten.binary_cross_entropy.default,
    aten.huber_loss.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
}


def candidates(op: OpOverload) -> list[Make]:
    """Return ways in which an operation might write to given memory, the best first."""
    if op in RESIZING:
        return []
    return [make for make in (WRITES.get(op), _through_out(op)) if make is not None]


def _through_out(op: OpOverload) -> Make | None:
    """Return a maker of calls of an operation's `.out` overload; None if it has none."""
    inputs = [(argument.name, str(argument.type)) for argument in schema_of(op).arguments]
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = schema_of(overload).arguments
        names = [argument.name for argument in arguments if argument.is_out]
        takes = [
            (argument.name, str(argument.type)) for argument in arguments if not argument.is_out
        ]
        generated = torch.Tag.generated in overload.tags
        if len(names) == len(schema_of(op).returns) and takes == inputs and not generated:
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
    """Return a call of an operation that writes to its arguments, or does not write."""
    return partial(op, *args, **kwargs)


def allocating(
    op: OpOverload, receivers: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Call:
    """Return a call of an operation that allocates, and hands its results to receivers."""

    def run() -> None:
        for receive, result in zip(receivers, as_list(op(*args, **kwargs)), strict=True):
            if receive is not None:
                receive(result)

    return run
