"""Kernels in torch operations: the reference for all others, and the fallback.

On the host, rows are processed in pieces that fit into a core's cache. No kernel waits for a
device.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch

from daso.kernels.codecs import Codec
from daso.kernels.rows import NO_ROWS, EncodeRows, FlatTensors, Mean, ShardRows, divide_
from daso.kernels.torch_codecs import decode_row, encode_row
from daso.torch_private import foreach_add, foreach_copy

PIECE = 1 << 16  # numbers: a multiple of every block; six rows of fp32 are 1.5 MiB
DEVICE_PIECE = PIECE << 6  # on a device, where a pass costs a launch
SUM_TILE = 1024  # numbers whose squares are summed by folding in halves
PLACES = 1 << 16  # 32-bit words of a fingerprint with different factors
WORD = (1 << 32) - 1

NAME = "torch's operations"


def _pieces(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    most = PIECE if device.type == "cpu" else DEVICE_PIECE
    return ((at, min(at + most, stop)) for at in range(start, stop, most))


# --- sums ----------------------------------------------------------------------------------------


def _add_squares(values: torch.Tensor, total: torch.Tensor) -> None:
    """Add the squares of numbers to a sum (fp64), tile by tile; each tile is folded in halves."""
    tiles = -(-values.numel() // SUM_TILE)
    rows = torch.nn.functional.pad(values, (0, tiles * SUM_TILE - values.numel()))
    rows = torch.mul(rows, rows).view(tiles, SUM_TILE)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    if total.is_cuda:
        total += rows.double().sum()
        return
    number = float(total)
    for square in rows.view(-1).tolist():
        number += square
    total.fill_(number)


# --- kernels -------------------------------------------------------------------------------------


def encode(
    codec: Codec,
    values: FlatTensors,
    spans: Sequence[tuple[int, int]],
    payload: torch.Tensor,
    rows: EncodeRows = NO_ROWS,
) -> None:
    """Encode values - reference + residual.

    Args:
        codec: Layout of the payloads.
        values: Row (numel), as tensors.
        spans: Parts of the row with one payload each.
        payload: Receives the payloads, in order (sum of codec.nbytes,), uint8.
        rows: Rows that are read and written (numel).
    """
    rows.check()
    cuts = [b - a for span in spans for a, b in _pieces(*span, payload.device)]
    room = torch.empty(max(cuts, default=0), dtype=codec.row, device=payload.device)
    byte = 0
    for start, stop in spans:
        part = payload[byte : byte + codec.nbytes(stop - start)]
        byte += codec.nbytes(stop - start)
        part[codec.offset(stop - start) :] = 0
        for a, b in _pieces(start, stop, payload.device):
            piece, bytes_of = room[: b - a], codec.part(part, a - start, b - start)
            values.gather(a, b, piece)
            if rows.gradients and rows.residual is not None:
                _encode_with_errors(codec, piece, rows.residual[a:b], bytes_of, gradients=True)
                continue
            if rows.reference is not None:
                piece -= rows.reference[a:b]
            if rows.residual is not None:
                piece += rows.residual[a:b]
            if rows.first is not None:
                _find_nonfinite(piece, a, rows.first)
            encode_row(codec, piece, bytes_of)
            if rows.rounding is not None or rows.distance is not None:
                lost = torch.empty_like(piece) if rows.rounding is None else rows.rounding[a:b]
                _write_errors(codec, piece, bytes_of, lost, rows.distance)
    fingerprint_reference(rows)


def _write_errors(
    codec: Codec,
    values: torch.Tensor,
    payload: torch.Tensor,
    lost: torch.Tensor,
    distance: torch.Tensor | None,
) -> None:
    """Write the rounding errors of a payload; add their squares to a distance."""
    carried = torch.empty_like(values)
    decode_row(codec, payload, carried)
    torch.sub(values, carried, out=lost)
    if distance is not None:
        _add_squares(lost, distance)


def _find_nonfinite(values: torch.Tensor, start: int, first: torch.Tensor) -> None:
    """Lower ``first`` to the index of the first number that is not finite."""
    if not values.is_cuda and bool(values.sum().isfinite()):  # a sum is faster
        return
    differences = torch.sub(values, values)  # zero, or NaN, also for infinity
    place = differences.argmax()  # NaN is the largest, and the first of equals is taken
    candidate = torch.where(differences.take(place).isnan(), place + start, first)
    torch.minimum(first, candidate, out=first)


def _encode_with_errors(
    codec: Codec,
    values: torch.Tensor,
    errors: torch.Tensor,
    payload: torch.Tensor,
    *,
    gradients: bool,
) -> None:
    """Encode values plus earlier rounding errors; replace these by the errors of this payload."""
    if not gradients:
        values += errors
        encode_row(codec, values, payload)
        decode_row(codec, payload, errors)
        torch.sub(values, errors, out=errors)
        return
    idle = values == 0
    waiting = torch.where(idle, errors, 0)
    values.add_(errors).masked_fill_(idle, 0)
    encode_row(codec, values, payload)
    decode_row(codec, payload, errors)
    torch.sub(values, errors, out=errors)
    errors.nan_to_num_(0.0, 0.0, 0.0)
    errors += waiting


def _mean(mean: Mean, start: int, stop: int) -> torch.Tensor:
    """Return the mean of numbers ``start`` to ``stop``, added in rank order."""
    like = mean.versions[0]
    total = torch.empty(stop - start, dtype=mean.codec.row, device=like.device)
    term = torch.empty_like(total) if len(mean.versions) > 1 else total
    for rank, (version, weight) in enumerate(zip(mean.versions, mean.weights, strict=True)):
        out = term if rank else total
        decode_row(mean.codec, mean.codec.part(version, start, stop), out)
        if weight != 1:
            out *= weight
        if rank:
            total += term
    return total if mean.total == 1 else divide_(total, mean.total)


def reduce(
    mean: Mean,
    numel: int,
    *,
    payload: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    gradients: bool = False,
) -> None:
    """Compute a mean in rank order.

    Args:
        mean: Payloads of ``numel`` numbers.
        numel: Number of numbers.
        payload: Receives the encoded mean (codec.nbytes(numel),), uint8.
        row: Receives the mean (numel).
        carry: Rounding errors of earlier means (numel), which are added; receives those of this
            mean.
        gradients: As in `encode`, for ``carry``.
    """
    codec, device = mean.codec, mean.versions[0].device
    if payload is not None:
        payload[codec.offset(numel) :] = 0
    for a, b in _pieces(0, numel, device):
        values = _mean(mean, a, b)
        if row is not None:
            row[a:b].copy_(values)
        if payload is None:
            continue
        part = codec.part(payload, a, b)
        if carry is None:
            encode_row(codec, values, part)
        else:
            _encode_with_errors(codec, values, carry[a:b], part, gradients=gradients)


def accept(
    mean: Mean,
    sent: torch.Tensor,
    start: int,
    stop: int,
    rows: ShardRows,
    sums: torch.Tensor,
) -> None:
    """Apply a mean to the rows of a shard.

    Args:
        mean: Payloads of ``stop - start`` numbers.
        sent: This node's own payload of them.
        start: Their first element in ``rows``.
        stop: The end of their last.
        rows: Rows that change.
        sums: Increased by sums of squares: own part minus mean, reference, mean (3,), fp64.
    """
    codec = mean.codec
    for a, b in _pieces(0, stop - start, sent.device):
        span = slice(start + a, start + b)
        values = _mean(mean, a, b)
        carried = torch.empty_like(values)
        decode_row(codec, codec.part(sent, a, b), carried)
        _add_squares(values, sums[2])
        if rows.others is not None:
            torch.mul(carried, -rows.share, out=rows.others[span]).add_(values)
        if rows.rounding is not None:
            assert rows.residual is not None
            rows.residual[span].copy_(rows.rounding[span])
        apart = values - carried
        if rows.negated is not None:
            torch.neg(values, out=rows.negated[span])
            _add_squares(apart, sums[0])
            torch.add(carried, rows.reference[span], out=apart).neg_()
        else:
            moved = torch.add(rows.reference[span], values, out=rows.reference[span])
            _add_squares(moved, sums[1])
            _add_squares(apart, sums[0])
        if rows.shown is not None:
            if rows.residual is not None and rows.rounding is None:
                apart += rows.residual[span]
            rows.shown[span].copy_(apart)


def fingerprint_reference(rows: EncodeRows) -> None:
    """Compute the fingerprint of the reference, if it has a place."""
    if rows.fingerprint is not None and rows.reference is not None:
        fingerprint(rows.reference, rows.fingerprint)


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the factors of the words of a fingerprint by their places (PLACES,)."""
    return torch.arange(1, 2 * PLACES, 2, dtype=torch.int32, device=device)


def fingerprint(row: torch.Tensor, out: torch.Tensor) -> None:
    """Compute a checksum of the bits of a row: one changed bit always changes it.

    It is the sum of the 32-bit words, each times an odd factor by its place, modulo 2^32. Integer
    sums are exact in any order.

    Args:
        row: Numbers (numel), fp32 or fp64; or bytes, with zeros up to the next whole word.
        out: Receives the fingerprint (1,), int64.
    """
    if row.dtype == torch.uint8:
        row = torch.nn.functional.pad(row, (0, -row.numel() % 4))
    words = row.view(torch.int32)
    factors = _factors(row.device)
    out.zero_()
    for a, b in _pieces(0, words.numel(), row.device):
        whole = a + (b - a) // PLACES * PLACES
        for part in (words[a:whole].view(-1, PLACES), words[whole:b].view(1, -1)):
            out += (part * factors[: part.shape[1]]).sum(dtype=torch.int64)
    out &= WORD


def mean_rows(
    rows: Sequence[torch.Tensor],
    divisor: int = 1,
    *,
    total: torch.Tensor | None = None,
    to: Sequence[torch.Tensor] = (),
) -> None:
    """Average rows, added in order in fp32 or fp64.

    Args:
        rows: Rows (numel) of one type.
        divisor: Of the sum.
        total: Receives the mean (numel), fp32 or fp64; may be the first row, or either of two.
        to: Rows that receive the mean, rounded to their type; may be ``rows``.
    """
    wide = torch.float64 if rows[0].dtype == torch.float64 else torch.float32
    if total is None:
        total = torch.empty(rows[0].numel(), dtype=wide, device=rows[0].device)
    _add_rows(rows, total)
    if divisor != 1:
        divide_(total, divisor)
    for row in to:
        if row.data_ptr() != total.data_ptr():
            row.copy_(total)


def _add_rows(rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    first, *others = rows
    if not others:
        if first.data_ptr() != total.data_ptr():
            total.copy_(first)
    elif first.dtype == total.dtype:
        torch.add(first, others.pop(0), out=total)
    else:  # adding two 16-bit rows would round the sum to 16 bits
        total.copy_(first)
    for row in others:
        total += row


def gather(values: FlatTensors, start: int, stop: int, row: torch.Tensor) -> None:
    """Copy elements ``start`` to ``stop`` of tensors to a row (stop - start)."""
    for a, b in _pieces(start, stop, row.device):
        values.gather(a, b, row[a - start : b - start])


def merge(values: FlatTensors, row: torch.Tensor, pull: float, *, add: bool = False) -> None:
    """Write x + pull (c - x) to tensors x, for a row c (numel); with ``add``, x + c.

    16-bit tensors are computed in the row's type, and rounded once.
    """
    pairs = list(values.pairs(0, values.numel, row))
    if not pairs:
        return
    targets, sources = [x for x, _ in pairs], [c for _, c in pairs]
    if pull == 1 and not add:
        foreach_copy(targets, sources)
        return
    if add and all(x.dtype == row.dtype for x in targets):
        foreach_add(targets, sources)
        return
    for x, c in pairs:
        wide = x.to(c.dtype)
        x.copy_(wide + c if add else wide + (c - wide).mul_(pull))
