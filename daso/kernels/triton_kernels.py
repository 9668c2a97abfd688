"""Triton kernels for CUDA devices, with the bits of `daso.kernels.torch_kernels`.

Each function is one launch. Each program handles a tile of 1024 numbers, which are whole blocks of
every wire, so that blocks may straddle tensors without a scratch row. A program finds its span and
its tensors by binary search in small tables, which are copied to the device when they are first
used. `torch_kernels` handles rows of fp64, tensors of fp64 and top-k payloads. No function waits
for the device. Squares are added within a tile as in torch, and over tiles in fp64, in torch's
order.
"""

from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import torch
import triton

from daso.errors import summarize
from daso.kernels import torch_kernels, triton_programs
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.native import KernelError
from daso.kernels.rows import KINDS, NO_ROWS, NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows
from daso.kernels.triton_codecs import FORMATS, TILE

NAME = f"Triton kernels ({triton.__version__})"
EVEN: int = triton_programs.EVEN.value
NUMBERS: int = TILE.value  # of a tile
TABLES = 256  # cached on devices, a few KiB each
WIDE = KINDS[torch.float64]
NARROW = {dtype: kind for dtype, kind in KINDS.items() if kind != WIDE}  # formats of tensors


# --- tables --------------------------------------------------------------------------------------


@lru_cache(maxsize=TABLES)
def _copied(content: bytes, device: torch.device, stream: int) -> torch.Tensor:
    """Copy a table to a device, for launches on a stream."""
    del stream  # another stream could read the table before it is copied
    numbers = torch.frombuffer(bytearray(content), dtype=torch.int64)
    if device.type != "cuda":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)


def _table(content: bytes, device: torch.device) -> torch.Tensor:
    """Return a table (int64) on a device; equal tables are copied once."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _copied(content, device, stream)


def _tensor_table(values: FlatTensors, device: torch.device) -> torch.Tensor:
    """Return the table of tensors that `triton_codecs.locate` reads."""
    filler = bytes(len(values.kinds) % 2 * values.kinds.itemsize)
    parts = (values.addresses.tobytes(), values.ends.tobytes(), values.kinds.tobytes(), filler)
    return _table(b"".join(parts), device)


@lru_cache(maxsize=TABLES)
def _span_table(codec: Codec, spans: tuple[tuple[int, int], ...]) -> tuple[bytes, int, int, bool]:
    """Return the table of spans, their tiles and bytes, and whether all spans are aligned."""
    spans = tuple((start, stop) for start, stop in spans if start < stop)
    tiles = list(accumulate(_tiles(stop - start) for start, stop in spans))
    nbytes = list(accumulate((codec.nbytes(b - a) for a, b in spans), initial=0))
    starts, stops = [start for start, _ in spans], [stop for _, stop in spans]
    even = all(at % EVEN == 0 for at in (*starts, *nbytes[:-1]))
    table = array("q", chain(tiles, starts, stops, nbytes[:-1]))
    return table.tobytes(), max(tiles, default=0), nbytes[-1], even


def _readable(values: FlatTensors, device: torch.device) -> bool:
    """Return whether these kernels can read the tensors."""
    return WIDE not in values.kinds and values.fits(device)


def _tiles(numel: int) -> int:
    return -(-numel // NUMBERS)


def _aligned(addresses: "array[int]") -> bool:
    return all(address % EVEN == 0 for address in addresses)


def _version_table(mean: Mean, numel: int, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Return the table that `triton_codecs.mean_tile` reads, and whether payloads are aligned."""
    assert len(mean.versions) == len(mean.weights) > 0
    _check_bytes(mean.codec, device, mean.codec.offset(numel), *mean.versions)
    addresses = array("q", [payload.data_ptr() for payload in mean.versions])
    return _table((addresses + array("q", mean.weights)).tobytes(), device), _aligned(addresses)


# --- launches ------------------------------------------------------------------------------------


def interpreted() -> bool:
    """Return whether Triton interprets kernels (TRITON_INTERPRET), on the host."""
    return not isinstance(triton_programs.encode_row, triton.runtime.JITFunction)


def _launch(
    kernel: Any, tiles: int, device: torch.device, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on a device; the interpreter runs it on the host."""
    on: AbstractContextManager[object]
    on = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on:  # products and sums are rounded separately, as in torch
        kernel[(tiles,)](*arguments, **constants, enable_fp_fusion=False)


def _check_rows(device: torch.device, numel: int, *rows: torch.Tensor | None) -> None:
    """Raise ValueError for rows that are too short, of another type or device, or strided."""
    for row in rows:
        if row is None:
            continue
        fits = row.numel() >= numel and row.dtype == torch.float32
        if not (fits and row.device == device and row.is_contiguous()):
            raise ValueError(
                f"a row must be {numel} contiguous numbers of fp32 on {device}, not {row.numel()} "
                f"of {row.dtype} on {row.device}"
            )


def _check_bytes(
    codec: Codec, device: torch.device, nbytes: int, *payloads: torch.Tensor | None
) -> None:
    """Raise ValueError for payloads that are too short, strided, misaligned or elsewhere."""
    unit = codec.block_nbytes if codec.block == 1 else 1
    for payload in payloads:
        if payload is None:
            continue
        fits = payload.numel() >= nbytes and payload.data_ptr() % unit == 0
        if not (fits and payload.dtype == torch.uint8 and payload.is_contiguous()):
            raise ValueError(
                f"a payload must be {nbytes} contiguous bytes from a multiple of {unit} on, not "
                f"{payload.numel()} numbers of {payload.dtype}"
            )
        if payload.device != device:
            raise ValueError(f"payloads must be on {device}, but one is on {payload.device}")


def _handles(codec: Codec) -> bool:
    """Return whether these kernels support a wire and its rows."""
    return codec.row == torch.float32 and codec.wire in FORMATS


def encode(
    codec: Codec,
    values: FlatTensors,
    spans: Sequence[tuple[int, int]],
    payload: torch.Tensor,
    rows: EncodeRows = NO_ROWS,
) -> None:
    """Encode values - reference + residual; see `daso.kernels.torch_kernels.encode`."""
    if not _handles(codec) or not _readable(values, payload.device):
        torch_kernels.encode(codec, values, spans, payload, rows)
        return
    rows.check()
    device = payload.device
    content, tiles, nbytes, even = _span_table(codec, tuple(map(tuple, spans)))
    if not tiles:
        return
    last = max(stop for _, stop in spans)
    assert last <= values.numel, "a span ends after the tensors"
    _check_bytes(codec, device, nbytes, payload)
    _check_rows(device, last, rows.reference, rows.residual, rows.rounding)
    sums = None
    if rows.distance is not None:
        sums = torch.empty(tiles, dtype=torch.float32, device=device)
    _launch(
        triton_programs.encode_row,
        tiles,
        device,
        _tensor_table(values, device),
        len(values.kinds),
        _table(content, device),
        len(content) // 32,
        rows.reference,
        rows.residual,
        rows.rounding,
        payload,
        rows.first,
        sums,
        FORMAT=FORMATS[codec.wire],
        GRADIENTS=rows.gradients,
        ALIGNED=even,
    )
    if sums is not None and rows.distance is not None:
        rows.distance.add_(sums.sum(dtype=torch.float64))
    torch_kernels.fingerprint_reference(rows)


def reduce(
    mean: Mean,
    numel: int,
    *,
    payload: torch.Tensor | None = None,
    row: torch.Tensor | None = None,
    carry: torch.Tensor | None = None,
    gradients: bool = False,
) -> None:
    """Compute a mean in rank order; see `daso.kernels.torch_kernels.reduce`.

    ``payload`` or ``row`` may share the memory of a version.
    """
    if not _handles(mean.codec):
        torch_kernels.reduce(
            mean, numel, payload=payload, row=row, carry=carry, gradients=gradients
        )
        return
    if not numel:
        return
    codec, device = mean.codec, mean.versions[0].device
    if payload is None:
        carry = None
    else:
        _check_bytes(codec, device, codec.nbytes(numel), payload)
    _check_rows(device, numel, row, carry)
    table, even = _version_table(mean, numel, device)
    _launch(
        triton_programs.reduce_row,
        _tiles(numel),
        device,
        table,
        len(mean.versions),
        float(mean.total),
        numel,
        payload,
        row,
        carry,
        FORMAT=FORMATS[codec.wire],
        GRADIENTS=gradients,
        ALIGNED=even,
    )


def accept(
    mean: Mean,
    sent: torch.Tensor,
    start: int,
    stop: int,
    rows: ShardRows,
    sums: torch.Tensor,
) -> None:
    """Apply a mean; see `daso.kernels.torch_kernels.accept`."""
    if not _handles(mean.codec):
        torch_kernels.accept(mean, sent, start, stop, rows, sums)
        return
    if start >= stop:
        return
    numel, device = stop - start, sent.device
    changed = (rows.reference, rows.negated, rows.shown, rows.residual, rows.rounding, rows.others)
    assert rows.rounding is None or rows.residual is not None
    _check_bytes(mean.codec, device, mean.codec.offset(numel), sent)
    _check_rows(device, stop, *changed)
    table, even = _version_table(mean, numel, device)
    squares = torch.empty(_tiles(numel), 3, dtype=torch.float32, device=device)
    _launch(
        triton_programs.accept_row,
        _tiles(numel),
        device,
        table,
        len(mean.versions),
        float(mean.total),
        numel,
        sent,
        *(None if row is None else row[start:] for row in changed),
        -rows.share,
        squares,
        FORMAT=FORMATS[mean.codec.wire],
        ALIGNED=even,
    )
    sums += squares.sum(0, dtype=torch.float64)


fingerprint = torch_kernels.fingerprint  # one pass over a row, few launches


def mean_rows(
    rows: Sequence[torch.Tensor],
    divisor: int = 1,
    *,
    total: torch.Tensor | None = None,
    to: Sequence[torch.Tensor] = (),
) -> None:
    """Average rows, added in order; see `daso.kernels.torch_kernels.mean_rows`."""
    types = {row.dtype for row in rows}, {row.dtype for row in to}
    if any(len(kinds) > 1 or not kinds <= NARROW.keys() for kinds in types):
        torch_kernels.mean_rows(rows, divisor, total=total, to=to)
        return
    numel, device = rows[0].numel(), rows[0].device
    if not numel:
        return
    for row in (*rows, *to):
        fits = row.numel() >= numel and row.is_contiguous() and row.device == device
        assert fits, f"rows must be {numel} contiguous numbers on {device}"
    _check_rows(device, numel, total)
    addresses = array("q", [row.data_ptr() for row in (*rows, *to)])
    _launch(
        triton_programs.mean_of_rows,
        _tiles(numel),
        device,
        _table(addresses.tobytes(), device),
        len(rows),
        len(to),
        float(divisor),
        numel,
        total,
        FORMAT=NARROW[rows[0].dtype],
        WRITTEN=NARROW[to[0].dtype] if to else 0,
        ALIGNED=_aligned(addresses),
    )


def gather(values: FlatTensors, start: int, stop: int, row: torch.Tensor) -> None:
    """Copy elements of tensors to a row; see `daso.kernels.torch_kernels.gather`."""
    if row.dtype != torch.float32 or not _readable(values, row.device):
        torch_kernels.gather(values, start, stop, row)
        return
    _check_rows(row.device, stop - start, row)
    encode(codec_named("fp32"), values, [(start, stop)], row.view(torch.uint8))


def merge(values: FlatTensors, row: torch.Tensor, pull: float, *, add: bool = False) -> None:
    """Merge a row into tensors; see `daso.kernels.torch_kernels.merge`."""
    if row.dtype != torch.float32 or not _readable(values, row.device):
        torch_kernels.merge(values, row, pull, add=add)
        return
    if not values.numel:
        return
    device = row.device
    _check_rows(device, values.numel, row)
    how = triton_programs.COPY if pull == 1 else triton_programs.PULL
    _launch(
        triton_programs.merge_row,
        _tiles(values.numel),
        device,
        _tensor_table(values, device),
        len(values.kinds),
        row,
        float(pull),
        values.numel,
        HOW=(triton_programs.ADD if add else how).value,
    )
    # So that autograd raises for a backward through the old values, as after torch's operations.
    torch.autograd.graph.increment_version(values.tensors)


# --- check ---------------------------------------------------------------------------------------


def check(device: torch.device) -> None:
    """Raise unless these kernels run on a device and give the bits of torch.

    Raises:
        KernelError: Triton interprets kernels, cannot compile here, or gives other bits.
    """
    if interpreted():
        raise KernelError("Triton interprets its kernels; unset TRITON_INTERPRET")
    if device.type != "cuda":
        raise KernelError(f"Triton kernels run on GPUs, not on a {device.type}")
    try:
        differing = compare(device)
    except Exception as error:
        raise KernelError(f"Triton's kernels do not run here: {summarize(error)}") from error
    if differing:
        raise KernelError(f"Triton's kernels and torch differ here: {', '.join(differing)}")


def compare(device: torch.device) -> list[str]:
    """Return the outputs of `encode` in which these kernels and torch differ."""
    codec, numel = codec_named("int4"), NUMBERS + 77
    numbers = torch.arange(numel, dtype=torch.float32, device=device).sub_(500.5).mul_(0.37)
    values, results = FlatTensors([numbers[:1001].clone(), numbers[1001:].bfloat16()]), []
    for encode_with in (encode, torch_kernels.encode):
        payload = torch.full((codec.nbytes(numel),), 171, dtype=torch.uint8, device=device)
        first = torch.full((), NOWHERE, dtype=torch.int64, device=device)
        rounding, distance = numbers.clone(), torch.zeros((), dtype=torch.float64, device=device)
        rows = EncodeRows(residual=rounding, rounding=rounding, first=first, distance=distance)
        encode_with(codec, values, [(0, numel)], payload, rows)
        results.append((payload, rounding, first, distance))
    names = ("payload", "rounding", "first")
    differing = [
        name
        for name, ours, reference in zip(names, *results, strict=False)
        if not torch.equal(ours, reference)
    ]
    ours, reference = (float(result[-1]) for result in results)
    return differing + ["distance"] * (abs(ours - reference) > 1e-12 * reference)
