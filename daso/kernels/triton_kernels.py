"""Triton kernels for CUDA devices, with the bits of `daso.kernels.torch_kernels`.

Each function is one launch, in which a program owns a tile of 1024 numbers: whole blocks of every
wire, so blocks may straddle tensors and no scratch row is needed. A program finds its span and its
tensors by binary search in small tables, which are copied to the device when they are first used.
Rows of fp64, tensors of fp64 and top-k payloads are left to `torch_kernels`. Nothing waits for the
device. Squares are added tile by tile as torch does, and tiles in fp64, in the device's order.
"""

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from itertools import accumulate, chain

import torch
import triton
import triton.language as tl

from daso.errors import told
from daso.kernels import torch_kernels
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.native import Refused
from daso.kernels.rows import KINDS, NOWHERE, FlatTensors, Mean, ShardRows
from daso.kernels.triton_codecs import (
    FORMATS,
    FP32,
    TILE,
    collect,
    decode_tile,
    encode_kept,
    encode_tile,
    format_of,
    locate,
    magnitude,
    mean_tile,
    offset,
    passed,
    places,
    read,
    read_format,
    squares,
    start_of,
    write,
    write_format,
)
from daso.kernels.triton_codecs import INFINITY as INF

__all__ = ["NAME", "accept", "check", "encode", "gather", "mean_rows", "merge", "reduce"]

NAME = f"Triton kernels ({triton.__version__})"
COPY, ADD, PULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EVEN = 16  # numbers or bytes: where tiles begin at multiples, threads move 16 bytes at once
NUMBERS = 1024  # of a tile
TABLES = 256  # kept on devices, a few KiB each


# --- kernels -------------------------------------------------------------------------------------


@triton.jit
def _encode_one(
    values, reference, residual, rounding, payload, first, distances, place, at, count,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    if GRADIENTS:
        kept = read(residual + place, at, mask, WHOLE)
        lost = encode_kept(values, kept, payload, at, count, FORMAT, True, WHOLE)
        write(residual + place, at, lost, mask, WHOLE)
    else:
        if reference is not None:
            values -= read(reference + place, at, mask, WHOLE)
        if residual is not None:
            values += read(residual + place, at, mask, WHOLE)
        if first is not None:
            wrong = tl.where(magnitude(values) >= INF, at, TILE)
            lowest = tl.min(tl.min(wrong, 1), 0)
            if lowest < TILE:
                tl.atomic_min(first, place + lowest)
        lost = values - encode_tile(values, payload, at, count, FORMAT, WHOLE)
        if rounding is not None:
            write(rounding + place, at, lost, mask, WHOLE)
        if distances is not None:
            tl.store(distances + tl.program_id(0), squares(lost))


@triton.jit(do_not_specialize=["tensor_count", "span_count"])
def _encode(
    tensors, tensor_count, spans, span_count, reference, residual, rounding, payload, first,
    distances, FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Encode a tile of a span; ``spans``: ends in tiles, starts, stops, bytes (int64 each)."""
    program = tl.program_id(0).to(tl.int64)
    span = passed(spans, span_count, program)
    tile = program - start_of(spans, span)
    place = tl.load(spans + span_count + span) + tile * TILE
    byte = tl.load(spans + 3 * span_count + span) + offset(tile * TILE, FORMAT)
    if ALIGNED:
        place, byte = tl.multiple_of(place, EVEN), tl.multiple_of(byte, EVEN)
    count = tl.minimum(tl.load(spans + 2 * span_count + span) - place, TILE).to(tl.int32)
    at, payload = places(FORMAT), payload + byte
    index, address, direct = locate(tensors, tensor_count, place, count)
    if direct:
        code = format_of(tensors, tensor_count, index)
        values = read_format(tl.multiple_of(address, 16), code, at, True, True)
        _encode_one(
            values, reference, residual, rounding, payload, first, distances, place, at, TILE,
            FORMAT, GRADIENTS, True,
        )  # fmt: skip
    else:
        values = collect(tensors, tensor_count, index, place, at, count)
        _encode_one(
            values, reference, residual, rounding, payload, first, distances, place, at, count,
            FORMAT, GRADIENTS, False,
        )  # fmt: skip


@triton.jit
def _reduce_one(
    versions, number, total, payload, row, carry, place, byte, at, count,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    mean = mean_tile(versions, number, total, byte, at, count, FORMAT, ALIGNED, WHOLE)
    tl.debug_barrier()  # a version may lie where the mean is written
    if row is not None:
        write(row + place, at, mean, mask, WHOLE)
    if payload is not None:
        if carry is not None:
            kept = read(carry + place, at, mask, WHOLE)
            lost = encode_kept(mean, kept, payload + byte, at, count, FORMAT, GRADIENTS, WHOLE)
            write(carry + place, at, lost, mask, WHOLE)
        else:
            encode_tile(mean, payload + byte, at, count, FORMAT, WHOLE)


@triton.jit(do_not_specialize=["number", "numel"])
def _reduce(
    versions, number, total, numel, payload, row, carry,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    byte, at = offset(place, FORMAT), places(FORMAT)
    if count == TILE:
        _reduce_one(
            versions, number, total, payload, row, carry, place, byte, at, TILE,
            FORMAT, GRADIENTS, ALIGNED, True,
        )  # fmt: skip
    else:
        _reduce_one(
            versions, number, total, payload, row, carry, place, byte, at, count,
            FORMAT, GRADIENTS, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _accept_one(
    versions, number, total, sent, reference, negated, shown, residual, rounding, others, less,
    sums, place, byte, at, count,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    mean = mean_tile(versions, number, total, byte, at, count, FORMAT, ALIGNED, WHOLE)
    carried = decode_tile(sent + byte, at, count, FORMAT, WHOLE)
    apart, before = mean - carried, read(reference + place, at, mask, WHOLE)
    moved = before + mean
    tl.store(sums, squares(apart))
    tl.store(sums + 2, squares(mean))
    tl.debug_barrier()  # a version, or what was sent, may lie where this is shown
    if negated is not None:
        tl.store(sums + 1, 0.0)
        write(negated + place, at, -mean, mask, WHOLE)
        apart = -(carried + before)
    else:
        tl.store(sums + 1, squares(moved))
        write(reference + place, at, moved, mask, WHOLE)
    if others is not None:
        write(others + place, at, carried * less + mean, mask, WHOLE)
    if rounding is not None:
        write(residual + place, at, read(rounding + place, at, mask, WHOLE), mask, WHOLE)
    if shown is not None:
        if residual is not None and rounding is None:
            apart += read(residual + place, at, mask, WHOLE)
        write(shown + place, at, apart, mask, WHOLE)


@triton.jit(do_not_specialize=["number", "numel"])
def _accept(
    versions, number, total, numel, sent, reference, negated, shown, residual, rounding, others,
    less, sums, FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take in a tile; ``sums`` (tiles, 3), as those of `accept`."""
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    byte, at, sums = offset(place, FORMAT), places(FORMAT), sums + 3 * tl.program_id(0)
    if count == TILE:
        _accept_one(
            versions, number, total, sent, reference, negated, shown, residual, rounding, others,
            less, sums, place, byte, at, TILE, FORMAT, ALIGNED, True,
        )  # fmt: skip
    else:
        _accept_one(
            versions, number, total, sent, reference, negated, shown, residual, rounding, others,
            less, sums, place, byte, at, count, FORMAT, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _mean_one(
    rows, number, to_number, divisor, total, place, at, count,
    READ: tl.constexpr, WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    within = place + at
    
