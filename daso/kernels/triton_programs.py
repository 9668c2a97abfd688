"""Triton kernels of an exchange; `daso.kernels.triton_kernels` launches them.

A missing row is None, and compiled away. Each kernel branches on whether its tile is full, because
only then can its threads move 16 bytes at once.
"""

import triton
import triton.language as tl

from daso.kernels.triton_codecs import (
    FP32,
    INFINITY,
    TILE,
    collect,
    decode_tile,
    encode_tile,
    encode_with_errors,
    format_of,
    locate,
    magnitude,
    mean_tile,
    offset,
    passed,
    places,
    pointer,
    read,
    read_format,
    squares,
    start_of,
    write,
    write_format,
)

COPY, ADD, PULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EVEN = tl.constexpr(16)  # numbers or bytes: tiles that start at multiples are aligned


@triton.jit
def _encode_values(
    values, reference, residual, rounding, payload, first, distances, place, at, count,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    if GRADIENTS:
        errors = read(residual + place, at, mask, WHOLE)
        lost = encode_with_errors(values, errors, payload, at, count, FORMAT, True, WHOLE)
        write(residual + place, at, lost, mask, WHOLE)
    else:
        if reference is not None:
            values -= read(reference + place, at, mask, WHOLE)
        if residual is not None:
            values += read(residual + place, at, mask, WHOLE)
        if first is not None:
            wrong = tl.where(magnitude(values) >= INFINITY, at, TILE)
            lowest = tl.min(tl.min(wrong, 1), 0)
            if lowest < TILE:
                tl.atomic_min(first, place + lowest)
        lost = values - encode_tile(values, payload, at, count, FORMAT, WHOLE)
        if rounding is not None:
            write(rounding + place, at, lost, mask, WHOLE)
        if distances is not None:
            tl.store(distances + tl.program_id(0), squares(lost))


@triton.jit(do_not_specialize=["tensor_count", "span_count"])
def encode_row(
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
        values = read_format(pointer(address, True), code, at, True, True)
    else:
        values = collect(tensors, tensor_count, index, place, at, count)
    if count == TILE:
        _encode_values(
            values, reference, residual, rounding, payload, first, distances, place, at, TILE,
            FORMAT, GRADIENTS, True,
        )  # fmt: skip
    else:
        _encode_values(
            values, reference, residual, rounding, payload, first, distances, place, at, count,
            FORMAT, GRADIENTS, False,
        )  # fmt: skip


@triton.jit
def _reduce_values(
    versions, number, total, payload, row, carry, place, byte, at, count,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    mean = mean_tile(versions, number, total, byte, at, count, FORMAT, ALIGNED, WHOLE)
    tl.debug_barrier()  # the result may replace a version
    if row is not None:
        write(row + place, at, mean, mask, WHOLE)
    if payload is not None:
        if carry is not None:
            errors = read(carry + place, at, mask, WHOLE)
            lost = encode_with_errors(
                mean, errors, payload + byte, at, count, FORMAT, GRADIENTS, WHOLE
            )
            write(carry + place, at, lost, mask, WHOLE)
        else:
            encode_tile(mean, payload + byte, at, count, FORMAT, WHOLE)


@triton.jit(do_not_specialize=["number", "numel"])
def reduce_row(
    versions, number, total, numel, payload, row, carry,
    FORMAT: tl.constexpr, GRADIENTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Average a tile of payloads; ``versions``: as in `mean_tile`."""
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    byte, at = offset(place, FORMAT), places(FORMAT)
    if count == TILE:
        _reduce_values(
            versions, number, total, payload, row, carry, place, byte, at, TILE,
            FORMAT, GRADIENTS, ALIGNED, True,
        )  # fmt: skip
    else:
        _reduce_values(
            versions, number, total, payload, row, carry, place, byte, at, count,
            FORMAT, GRADIENTS, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _accept_values(
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
    tl.debug_barrier()  # payloads may share the memory of `shown`
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
def accept_row(
    versions, number, total, numel, sent, reference, negated, shown, residual, rounding, others,
    less, sums, FORMAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Accept a tile of a mean; ``sums`` (tiles, 3) are those of `torch_kernels.accept`."""
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    byte, at, sums = offset(place, FORMAT), places(FORMAT), sums + 3 * tl.program_id(0)
    if count == TILE:
        _accept_values(
            versions, number, total, sent, reference, negated, shown, residual, rounding, others,
            less, sums, place, byte, at, TILE, FORMAT, ALIGNED, True,
        )  # fmt: skip
    else:
        _accept_values(
            versions, number, total, sent, reference, negated, shown, residual, rounding, others,
            less, sums, place, byte, at, count, FORMAT, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _at(rows, index, place, FORMAT: tl.constexpr, ALIGNED: tl.constexpr):
    return pointer(tl.load(rows + index) + place * (4 if FORMAT == FP32 else 2), ALIGNED)


@triton.jit
def _mean_values(
    rows, number, to_number, divisor, total, place, at, count,
    FORMAT: tl.constexpr, WRITTEN: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    mask = at < count
    mean = read_format(_at(rows, 0, place, FORMAT, ALIGNED), FORMAT, at, mask, WHOLE)
    for index in range(1, number):
        mean += read_format(_at(rows, index, place, FORMAT, ALIGNED), FORMAT, at, mask, WHOLE)
    mean = tl.math.div_rn(mean, divisor)
    tl.debug_barrier()  # the mean may replace the rows
    if total is not None:
        write(total + place, at, mean, mask, WHOLE)
    for index in range(number, number + to_number):
        row = _at(rows, index, place, WRITTEN, ALIGNED)
        write_format(row, WRITTEN, at, mean, mask, WHOLE)


@triton.jit(do_not_specialize=["number", "to_number", "numel"])
def mean_of_rows(
    rows, number, to_number, divisor, numel, total,
    FORMAT: tl.constexpr, WRITTEN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Average a tile; ``rows``: addresses of the inputs, then of the outputs."""
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    at = places(FP32)
    if count == TILE:
        _mean_values(
            rows, number, to_number, divisor, total, place, at, TILE,
            FORMAT, WRITTEN, ALIGNED, True,
        )  # fmt: skip
    else:
        _mean_values(
            rows, number, to_number, divisor, total, place, at, count,
            FORMAT, WRITTEN, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def _merge_values(
    tensor, code, row, within, at, mask, pull, HOW: tl.constexpr, WHOLE: tl.constexpr
):
    values = read(row, at, mask, WHOLE)
    if HOW != COPY:
        before = read_format(tensor, code, within, mask, WHOLE)
        values = before + (values if HOW == ADD else (values - before) * pull)
    write_format(tensor, code, within, values, mask, WHOLE)


@triton.jit(do_not_specialize=["tensor_count", "numel"])
def merge_row(tensors, tensor_count, row, pull, numel, HOW: tl.constexpr):
    """Merge a tile of a row into tensors."""
    place = tl.program_id(0).to(tl.int64) * TILE
    count = tl.minimum(numel - place, TILE).to(tl.int32)
    at = places(FP32)
    index, address, direct = locate(tensors, tensor_count, place, count)
    if direct:
        code, tensor = format_of(tensors, tensor_count, index), pointer(address, True)
        _merge_values(tensor, code, row + place, at, at, True, pull, HOW, True)
    else:
        ends = tensors + tensor_count
        first = start_of(ends, index)
        while first < place + count:
            end = tl.load(ends + index)
            within = at + (place - first)
            mask = (at < count) & (within >= 0) & (within < end - first)
            code = format_of(tensors, tensor_count, index)
            tensor = pointer(tl.load(tensors + index), False)
            _merge_values(tensor, code, row + place, within, at, mask, pull, HOW, False)
            first, index = end, index + 1
