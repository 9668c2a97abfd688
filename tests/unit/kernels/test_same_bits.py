"""C kernels give the bits of torch's, at every instruction set that this processor has."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.kernels import torch_kernels
from daso.kernels.codecs import codec_named
from daso.kernels.native import load_native, supported_variants
from daso.kernels.rows import NOWHERE, FlatTensors, Mean, ShardRows

WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "topk")
VARIANTS = supported_variants()
NUMEL = st.one_of(
    st.integers(0, 3 * 128 + 5), st.integers(1000, 1100), st.sampled_from([4095, 4096, 4097, 9001])
)
KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ODD = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38, -70000.0, 65520.0, 1e-8, 1.0)
CASES = {"max_examples": 150, "deadline": None, "derandomize": True}
from hypothesis import Phase

CASES["phases"] = (Phase.generate,)


@pytest.fixture(scope="module", params=VARIANTS)
def native(request):
    return load_native(request.param)


def numbers(numel, seed, dtype, odd=0.0):
    """Numbers of many magnitudes; a share of them odd."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    values *= (
        10
        ** torch.randint(-6, 3, (max(1, -(-numel // 50)),), generator=generator)
        .double()
        .repeat_interleave(50)[:numel]
    )
    where = torch.rand(numel, generator=generator) < odd
    some = torch.tensor(ODD, dtype=torch.float64)
    values[where] = some[torch.randint(0, len(ODD), (int(where.sum()),), generator=generator)]
    return values.to(dtype)


def cut(row, sizes):
    """A row as tensors of its own memory, of sizes that repeat."""
    parts, at, turn = [], 0, 0
    while at < row.numel():
        some = max(1, sizes[turn % len(sizes)])
        parts.append(row[at : at + some].clone())
        at, turn = at + some, turn + 1
    return parts


def same(mine, theirs, what):
    """Equal bits; of numbers of a row that are not, both are NaN."""
    assert mine.dtype == theirs.dtype
    if mine.dtype == torch.uint8:
        assert torch.equal(mine, theirs), what
        return
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}[mine.dtype.itemsize]
    equal = mine.view(whole) == theirs.view(whole)
    assert bool((equal | (mine.isnan() & theirs.isnan())).all()), what


def spans_of(numel, pieces, codec):
    """Spans without a gap that begin where a codec can begin anywhere, or not."""
    edges = sorted({0, numel, *(min(numel, one) for one in pieces)})
    return [(a, b) for a, b in zip(edges, edges[1:], strict=False)] or [(0, numel)]


@settings(**CASES)
@given(
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    numel=NUMEL,
    pieces=st.lists(st.integers(1, 5000), max_size=3),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    rows=st.sets(st.sampled_from(("reference", "residual", "rounding"))),
    gradients=st.booleans(),
    odd=st.sampled_from((0.0, 0.0, 0.02, 0.5)),
    seed=st.integers(0, 10**6),
)
def test_encode(native, wire, dtype, numel, pieces, kinds, sizes, rows, gradients, odd, seed):
    codec = codec_named(wire, dtype)
    parts = cut(numbers(numel, seed, dtype, odd), sizes)
    parts = [one.to(kinds[at % len(kinds)]) for at, one in enumerate(parts)]
    values, spans = FlatTensors(parts), spans_of(numel, pieces, codec)
    if gradients:
        rows = {"residual"}
    results = []
    for kernels in (torch_kernels, native):
        given_rows = {
            name: numbers(numel, seed + 1 + at, dtype) for at, name in enumerate(sorted(rows))
        }
        payload = torch.full((sum(codec.nbytes(b - a) for a, b in spans),), 171, dtype=torch.uint8)
        first = torch.full((), NOWHERE, dtype=torch.int64)
        distance = torch.zeros((), dtype=torch.float64)
        more = {} if gradients else {"first": first, "distance": distance}
        kernels.encode(codec, values, spans, payload, **given_rows, gradients=gradients, **more)
        if wire == "fp32":  # NaN has many bits there
            payload = payload.view(torch.float32)
        results.append({"payload": payload, "first": first, "distance": distance, **given_rows})
    for name, mine in results[0].items():
        same(mine.view(-1), results[1][name].view(-1), name)


@settings(**CASES)
@given(
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    numel=NUMEL,
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=16),
    total=st.integers(1, 40),
    carry=st.booleans(),
    gradients=st.booleans(),
    odd=st.sampled_from((0.0, 0.0, 0.02)),
    seed=st.integers(0, 10**6),
)
def test_reduce(native, wire, dtype, numel, weights, total, carry, gradients, odd, seed):
    codec = codec_named(wire, dtype)
    mean = Mean(codec, payloads(codec, numel, len(weights), seed, odd), weights, total)
    results = []
    for kernels in (torch_kernels, native):
        kept = numbers(numel, seed, dtype) if carry else None
        payload = torch.full((codec.nbytes(numel),), 171, dtype=torch.uint8)
        row = torch.full((numel,), 7.0, dtype=dtype)
        kernels.reduce(mean, numel, payload=payload, carry=kept, gradients=gradients)
        kernels.reduce(mean, numel, row=row)
        payload = payload.view(torch.float32) if wire == "fp32" else payload
        results.append([payload, row, *([] if kept is None else [kept])])
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs, "reduce")


def payloads(codec, numel, count, seed, odd=0.0):
    made = []
    for one in range(count):
        values = FlatTensors([numbers(numel, seed + 10 * one, codec.row, odd)])
        payload = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
        torch_kernels.encode(codec, values, [(0, numel)], payload)
        made.append(payload)
    return made


@settings(**CASES)
@given(
    wire=st.sampled_from(WIRES),
    dtype=st.sampled_from((torch.float32, torch.float64)),
    numel=NUMEL,
    start=st.integers(0, 40),
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    rows=st.sets(st.sampled_from(("negated", "shown", "residual", "rounding", "others"))),
    odd=st.sampled_from((0.0, 0.0, 0.02)),
    seed=st.integers(0, 10**6),
)
def test_accept(native, wire, dtype, numel, start, weights, rows, odd, seed):
    codec, whole = codec_named(wire, dtype), start + numel + 3
    versions = payloads(codec, numel, len(weights), seed, odd)
    mean = Mean(codec, versions, weights, sum(weights))
    if "rounding" in rows:
        rows = {*rows, "residual"}
    results = []
    for kernels in (torch_kernels, native):
        made = {
            name: numbers(whole, seed + at, dtype)
            for at, name in enumerate(sorted({*rows, "reference"}))
        }
        sums = torch.zeros(3, dtype=torch.float64)
        taken = ShardRows(**made, share=0.375)
        kernels.accept(mean, versions[0], start, start + numel, taken, sums)
        results.append({**made, "sums": sums})
    for name, mine in results[0].items():
        same(mine, results[1][name], name)


@settings(**CASES)
@given(
    kind=st.sampled_from(KINDS),
    numel=NUMEL,
    count=st.integers(1, 6),
    divisor=st.integers(1, 9),
    spread=st.booleans(),
    in_place=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_mean_rows(native, kind, numel, count, divisor, spread, in_place, seed):
    wide = torch.float64 if kind == torch.float64 else torch.float32
    results = []
    for kernels in (torch_kernels, native):
        rows = [numbers(numel, seed + one, kind) for one in range(count)]
        total = rows[0] if in_place and wide == kind else torch.zeros(numel, dtype=wide)
        to = rows if spread else []
        kernels.mean_rows(rows, divisor, total=total, to=to)
        results.append([total, *rows])
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs, "mean_rows")


@settings(**CASES)
@given(
    dtype=st.sampled_from((torch.float32, torch.float64)),
    numel=NUMEL,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    how=st.sampled_from(((1.0, False), (1.0, True), (0.3, False), (0.75, False))),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    seed=st.integers(0, 10**6),
)
def test_gather_and_merge(native, dtype, numel, kinds, sizes, how, ends, seed):
    results = []
    start, stop = sorted(int(numel * one) for one in ends)
    for kernels in (torch_kernels, native):
        parts = cut(numbers(numel, seed, dtype), sizes)
        parts = [one.to(kinds[at % len(kinds)]) for at, one in enumerate(parts)]
        values, row = FlatTensors(parts), torch.zeros(stop - start, dtype=dtype)
        kernels.gather(values, start, stop, row)
        kernels.merge(values, numbers(numel, seed + 1, dtype), how[0], add=how[1])
        results.append([row, *parts])
    for mine, theirs in zip(*results, strict=True):
        same(mine, theirs, "gather and merge")
