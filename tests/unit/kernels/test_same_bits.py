"""C kernels give the bits of torch's, at every instruction set that this processor has."""

import math
import os
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_operands import numbers, same

from daso.kernels import torch_kernels
from daso.kernels.build import FOLDER, library_name
from daso.kernels.codecs import codec_named
from daso.kernels.native import load_native, supported_variants
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows

WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "int2", "topk")
ROWS = (torch.float32, torch.float64)
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Libraries of another build: test_sanitizers.py runs this file with them.
LIBRARIES = Path(os.environ.get("DASO_TEST_LIBRARIES", FOLDER))
VARIANTS = [
    name
    for name in supported_variants()
    if LIBRARIES == FOLDER or (LIBRARIES / library_name(name)).exists()
]
GUARD = 171  # of bytes that a kernel must not write
NUMEL = st.one_of(
    st.integers(0, 3 * 128 + 5), st.integers(1000, 1100), st.sampled_from([4095, 4096, 4097, 9001])
)
SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=3)
SHIFTS, ODD_SHARES = st.sampled_from((1, 0, 3)), st.sampled_from((0.02, 0.0, 0.0, 0.5))
SEEDS = st.integers(0, 10**6)


def subsets(*names):
    """Any of these names, each subset as likely as another."""
    sizes = range(len(names), -1, -1)
    return st.sampled_from([chosen for size in sizes for chosen in combinations(names, size)])


# The same cases in every run; a failure is shown as it was found, since to shrink it takes minutes.
cases = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
each_wire = pytest.mark.parametrize("wire", WIRES)


@pytest.fixture(scope="module", params=VARIANTS)
def native(request):
    return load_native(request.param, LIBRARIES)


@pytest.fixture(scope="module", params=["torch", *VARIANTS])
def kernels(request):
    return torch_kernels if request.param == "torch" else load_native(request.param, LIBRARIES)


# --- operands ------------------------------------------------------------------------------------


def shifted(tensor, shift):
    """A copy that starts at a byte of any address."""
    memory = bytearray(shift + tensor.nbytes)
    if not tensor.numel():
        return tensor.clone()
    copy = torch.frombuffer(memory, dtype=tensor.dtype, offset=shift)
    return copy.copy_(tensor)


def payload_of(codec, row):
    payload = torch.zeros(codec.nbytes(row.numel()), dtype=torch.uint8)
    torch_kernels.encode(codec, FlatTensors([row]), [(0, row.numel())], payload)
    return payload


def payloads(codec, numel, count, seed, odd=0.0):
    return [
        payload_of(codec, numbers(numel, seed + 10 * rank, codec.row, odd)) for rank in range(count)
    ]


def guarded(nbytes, shift=0):
    """Memory for a payload, and the payload within it."""
    memory = torch.full((nbytes + 16,), GUARD, dtype=torch.uint8)
    return memory, memory[shift : shift + nbytes]


def written(memory, payload, codec):
    """A payload that was written within its bounds, so that equal numbers compare as equal."""
    first = payload.storage_offset()
    outside = torch.cat([memory[:first], memory[first + payload.numel() :]])
    assert bool((outside == GUARD).all())
    return payload.clone().view(torch.float32) if codec.wire == "fp32" else payload


def cut(row, sizes, kinds):
    """A row as tensors of sizes and types that repeat."""
    parts, at = [], 0
    while at < row.numel():
        turn = len(parts)
        size = max(sizes[turn % len(sizes)], row.numel() // 50)
        parts.append(row[at : at + size].to(kinds[turn % len(kinds)], copy=True))
        at += size
    return parts


def spans_of(numel, edges):
    """Spans that cover a row without a gap."""
    places = sorted({0, numel, *(min(numel, edge) for edge in edges)})
    return list(pairwise(places)) or [(0, numel)]


# --- properties ----------------------------------------------------------------------------------


@each_wire
@cases
@given(
    dtype=st.sampled_from(ROWS),
    numel=NUMEL,
    edges=st.lists(st.integers(1, 5000), max_size=3),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=SIZES,
    rows=subsets("reference", "residual", "rounding", "first", "distance", "fingerprint"),
    in_place=st.booleans(),
    gradients=st.booleans(),
    odd=ODD_SHARES,
    shift=SHIFTS,
    seed=SEEDS,
)
def test_encode(
    native, *, wire, dtype, numel, edges, kinds, sizes, rows, in_place, gradients, odd, shift, seed
):
    codec = codec_named(wire, dtype)
    parts = cut(numbers(numel, seed, dtype, odd), sizes, kinds)
    spans = spans_of(numel, edges)
    rows = [name for name in rows if name != "fingerprint" or "reference" in rows]
    rows = ["residual"] if gradients else rows
    results = []
    for kernels, by in ((torch_kernels, 0), (native, shift)):
        operands = {
            name: shifted(numbers(numel, seed + 1 + at, dtype), by) for at, name in enumerate(rows)
        }
        if in_place and {"residual", "rounding"} <= operands.keys():
            operands["rounding"] = operands["residual"]
        if "first" in operands:
            operands["first"] = torch.full((), NOWHERE, dtype=torch.int64)
        if "distance" in operands:
            operands["distance"] = torch.zeros((), dtype=torch.float64)
        if "fingerprint" in operands:
            operands["fingerprint"] = torch.zeros(1, dtype=torch.int64)
        memory, payload = guarded(sum(codec.nbytes(b - a) for a, b in spans), by)
        values = FlatTensors([shifted(part, by) for part in parts])
        kernels.encode(codec, values, spans, payload, EncodeRows(**operands, gradients=gradients))
        results.append({"payload": written(memory, payload, codec), **operands})
    for name, expected in results[0].items():
        same(expected, results[1][name], name)


@each_wire
@cases
@given(
    dtype=st.sampled_from(ROWS),
    numel=NUMEL,
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=16),
    total=st.integers(1, 40),
    carry=st.booleans(),
    gradients=st.booleans(),
    odd=ODD_SHARES,
    shift=SHIFTS,
    seed=SEEDS,
)
def test_reduce(native, *, wire, dtype, numel, weights, total, carry, gradients, odd, shift, seed):
    codec = codec_named(wire, dtype)
    versions = payloads(codec, numel, len(weights), seed, odd)
    results = []
    for kernels, by in ((torch_kernels, 0), (native, shift)):
        mean = Mean(codec, [shifted(version, by) for version in versions], weights, total)
        carried = shifted(numbers(numel, seed, dtype), by) if carry else None
        memory, payload = guarded(codec.nbytes(numel), by)
        row = shifted(torch.full((numel,), 7.0, dtype=dtype), by)
        kernels.reduce(mean, numel, payload=payload, carry=carried, gradients=gradients)
        kernels.reduce(mean, numel, row=row)
        results.append({"payload": written(memory, payload, codec), "row": row})
        if carry:
            results[-1]["carry"] = carried
    for name, expected in results[0].items():
        same(expected, results[1][name], name)


@each_wire
@cases
@given(
    dtype=st.sampled_from(ROWS),
    numel=NUMEL,
    start=st.integers(0, 40),
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    own=st.sampled_from((0, -1, None)),
    rows=subsets("negated", "shown", "residual", "rounding", "others"),
    odd=ODD_SHARES,
    shift=SHIFTS,
    seed=SEEDS,
)
def test_accept(native, *, wire, dtype, numel, start, weights, own, rows, odd, shift, seed):
    codec, whole = codec_named(wire, dtype), start + numel + 3
    versions = payloads(codec, numel, len(weights), seed, odd)
    names = sorted({"reference", *rows} | ({"residual"} if "rounding" in rows else set()))
    results = []
    for kernels, by in ((torch_kernels, 0), (native, shift)):
        mean = Mean(codec, [shifted(version, by) for version in versions], weights, sum(weights))
        operands = {
            name: shifted(numbers(whole, seed + at, dtype), by) for at, name in enumerate(names)
        }
        sums = torch.zeros(3, dtype=torch.float64)
        shard = ShardRows(**operands, share=0.375)
        sent = mean.versions[0].clone() if own is None else mean.versions[own]
        kernels.accept(mean, sent, start, start + numel, shard, sums)
        results.append({**operands, "sums": sums})
    for name, expected in results[0].items():
        same(expected, results[1][name], name)


@pytest.mark.parametrize("kind", KINDS)
@cases
@given(
    numel=NUMEL,
    count=st.integers(1, 6),
    divisor=st.integers(1, 9),
    spread=st.booleans(),
    in_place=st.booleans(),
    shift=SHIFTS,
    seed=SEEDS,
)
def test_mean_rows(native, *, kind, numel, count, divisor, spread, in_place, shift, seed):
    wide = torch.float64 if kind == torch.float64 else torch.float32
    results = []
    for kernels, by in ((torch_kernels, 0), (native, shift)):
        rows = [shifted(numbers(numel, seed + rank, kind), by) for rank in range(count)]
        total = rows[0] if in_place and wide == kind else torch.zeros(numel, dtype=wide)
        kernels.mean_rows(rows, divisor, total=total, to=rows if spread else [])
        results.append([total, *rows])
    for expected, actual in zip(*results, strict=True):
        same(expected, actual, "mean_rows")


@cases
@given(
    dtype=st.sampled_from(ROWS),
    numel=st.integers(1, 3 << 15),
    at=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 31),
    shift=SHIFTS,
    seed=SEEDS,
)
def test_fingerprint(native, *, dtype, numel, at, bit, shift, seed):
    row, out = numbers(numel, seed, dtype), torch.zeros(4, dtype=torch.int64)
    torch_kernels.fingerprint(row, out[:1])
    native.fingerprint(shifted(row, shift), out[1:2])
    payload = row.view(torch.uint8)[: row.nbytes - 1 - bit % 8]
    torch_kernels.fingerprint(payload, out[2:3])
    native.fingerprint(shifted(payload, shift), out[3:])
    assert out[2] == out[3]
    words = row.view(torch.int32)
    place = int(at * words.numel())
    total = (words.long() * (2 * (torch.arange(words.numel()) % (1 << 16)) + 1)).sum()
    words[place] ^= (1 << bit) - (bit == 31) * (1 << 32)
    native.fingerprint(row, out[2:3])
    assert out[0] == out[1] == total % (1 << 32)
    assert out[2] != out[0]


@pytest.mark.parametrize("how", [(1.0, False), (1.0, True), (0.3, False), (0.75, False)])
@cases
@given(
    dtype=st.sampled_from(ROWS),
    numel=NUMEL,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=SIZES,
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    shift=SHIFTS,
    seed=SEEDS,
)
def test_gather_and_merge(native, *, dtype, numel, kinds, sizes, how, ends, shift, seed):
    start, stop = sorted(int(numel * end) for end in ends)
    row = numbers(numel, seed + 1, dtype)
    results = []
    for kernels, by in ((torch_kernels, 0), (native, shift)):
        parts = [shifted(part, by) for part in cut(numbers(numel, seed, dtype), sizes, kinds)]
        values, gathered = FlatTensors(parts), shifted(torch.zeros(stop - start, dtype=dtype), by)
        kernels.gather(values, start, stop, gathered)
        kernels.merge(values, shifted(row, by), how[0], add=how[1])
        results.append([gathered, *parts])
    for expected, actual in zip(*results, strict=True):
        same(expected, actual, "gather and merge")


# --- bytes of a payload --------------------------------------------------------------------------

INT8 = ([0.0, 1.0, -2.5, 127.0], "0000803f 00 01 fe 7f")
INT4 = (
    [7.0, -7.0, 0.5, 1.5, 2.5, -3.4, *[0.0] * 10, 3.0, -1.0],
    "803f bf 71 88 8a 8a 85 88 88 88 88 88 88 88 88 88 88",
)
ZEROS_INT8, ZEROS_INT4 = ([0.0] * 3, "00000000 00 00 00"), ([0.0] * 3, "0000 88 88 88")
INT4_NONFINITE = ([1.0, math.nan, 2.0], "c07f 88 88 88")
# Byte 0 holds numbers 0, 8, 16 and 24 of the block. Halves are rounded to even: to 0.
INT2 = (
    [
        *(2.0, 1.0, -1.0, 1.25, *[0.0] * 4, -2.0, *[0.0] * 7),
        *(0.5, *[0.0] * 7, -1.5, 2.0, *[0.0] * 6, -4.0, 0.0),
    ],
    "0040 67 ea aa ab aa aa aa aa 8040 a9 aa",
)
ZEROS_INT2, INT2_NONFINITE = ([0.0] * 3, "0000 aa aa aa"), ([1.0, math.inf], "c07f aa aa")
INT2_LARGEST = ([3.4e38, -3e38, 1e38], "7f7f ab a9 aa")  # as bf16 the first would be infinite
TOPK = (
    [-2.0 if at == 5 else at / 64 if at in (64, 129) else 0.0 for at in range(130)],
    "0500 4000 8100 00c0 803f 0140",
)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize(
    ("wire", "values", "expected"),
    [
        *(("int8", *INT8), ("int8", *ZEROS_INT8)),
        *(("int4", *INT4), ("int4", *ZEROS_INT4), ("int4", *INT4_NONFINITE)),
        *(("int2", *INT2), ("int2", *ZEROS_INT2), ("int2", *INT2_NONFINITE)),
        ("int2", *INT2_LARGEST),
        ("topk", *TOPK),
    ],
)
def test_payloads_have_these_bytes(kernels, dtype, wire, values, expected):
    codec = codec_named(wire, dtype)
    payload = torch.full((codec.nbytes(len(values)),), GUARD, dtype=torch.uint8)
    row = torch.tensor(values, dtype=dtype)
    kernels.encode(codec, FlatTensors([row]), [(0, len(values))], payload)
    assert bytes(payload.tolist()) == bytes.fromhex(expected).ljust(payload.numel(), b"\0")


# --- limits --------------------------------------------------------------------------------------


@each_wire
def test_empty_rows_change_nothing(kernels, wire):
    codec, empty = codec_named(wire), torch.empty(0)
    payload, sums = torch.empty(0, dtype=torch.uint8), torch.zeros(3, dtype=torch.float64)
    first = torch.full((), NOWHERE, dtype=torch.int64)
    rows = {"reference": empty, "residual": empty, "rounding": empty}
    kernels.encode(codec, FlatTensors([empty]), [(0, 0)], payload, EncodeRows(**rows, first=first))
    kernels.encode(codec, FlatTensors([]), [], payload)
    mean = Mean(codec, [payload, payload], (1, 1), 2)
    kernels.reduce(mean, 0, payload=payload, row=empty, carry=empty)
    reference = torch.ones(5)
    kernels.accept(mean, payload, 5, 5, ShardRows(reference, shown=reference.clone()), sums)
    kernels.mean_rows([empty, empty], 2, total=empty)
    kernels.gather(FlatTensors([]), 0, 0, empty)
    kernels.merge(FlatTensors([]), empty, 0.5)
    assert first == NOWHERE
    assert sums.tolist() == [0.0] * 3
    assert reference.tolist() == [1.0] * 5


@each_wire
def test_payloads_shorter_than_their_row_are_refused(native, wire):
    codec, numel = codec_named(wire), 300
    row = torch.zeros(numel)
    payload = payload_of(codec, row)
    short = payload[: codec.offset(numel) - 1]
    mean, short_mean = Mean(codec, [payload]), Mean(codec, [payload, short], (1, 1), 2)
    sums = torch.zeros(3, dtype=torch.float64)
    with pytest.raises(ValueError, match="a payload must be"):
        native.encode(codec, FlatTensors([row]), [(0, numel)], short)
    with pytest.raises(ValueError, match="a payload must be"):
        native.reduce(mean, numel, payload=short)
    with pytest.raises(ValueError, match="a payload must be"):
        native.reduce(short_mean, numel, row=row)
    with pytest.raises(ValueError, match="a payload must be"):
        native.accept(short_mean, payload, 0, numel, ShardRows(row), sums)
    with pytest.raises(ValueError, match="a payload must be"):
        native.accept(mean, short, 0, numel, ShardRows(row), sums)


def test_a_fingerprint_without_a_reference_is_refused(kernels):
    payload = torch.zeros(12, dtype=torch.uint8)
    rows = EncodeRows(fingerprint=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="must be that of a reference"):
        kernels.encode(codec_named("fp32"), FlatTensors([torch.zeros(3)]), [(0, 3)], payload, rows)


@pytest.mark.parametrize("rows", [{}, {"residual": torch.zeros(3), "reference": torch.zeros(3)}])
def test_gradients_without_a_residual_or_with_another_row_are_refused(kernels, rows):
    codec, row = codec_named("int4"), torch.zeros(3)
    payload = torch.empty(codec.nbytes(3), dtype=torch.uint8)
    with pytest.raises(ValueError, match="gradients must be encoded with a residual"):
        kernels.encode(
            codec, FlatTensors([row]), [(0, 3)], payload, EncodeRows(gradients=True, **rows)
        )


@pytest.mark.parametrize(
    "row",
    [torch.zeros(300, dtype=torch.float64), torch.zeros(299), torch.zeros(600)[::2]],
    ids=["another type", "shorter", "not contiguous"],
)
def test_rows_that_do_not_fit_are_refused(native, row):
    codec, values, numel = codec_named("bf16"), torch.zeros(300), 300
    payload = payload_of(codec, values)
    mean, sums = Mean(codec, [payload]), torch.zeros(3, dtype=torch.float64)
    for name in ("reference", "residual", "rounding"):
        with pytest.raises(ValueError, match="a row must be"):
            native.encode(
                codec, FlatTensors([values]), [(0, numel)], payload, EncodeRows(**{name: row})
            )
    for name in ("row", "carry"):
        with pytest.raises(ValueError, match="a row must be"):
            native.reduce(mean, numel, **{name: row})
    with pytest.raises(ValueError, match="a row must be"):
        native.accept(mean, payload, 0, numel, ShardRows(row), sums)
    for name in ("negated", "shown", "residual", "others"):
        with pytest.raises(ValueError, match="a row must be"):
            native.accept(mean, payload, 0, numel, ShardRows(values, **{name: row}), sums)
    with pytest.raises(ValueError, match="a row must be"):
        native.mean_rows([values, row], 2, total=values)
