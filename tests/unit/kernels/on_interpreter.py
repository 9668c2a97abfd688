"""Triton kernels against torch's operations, bit for bit; test_triton.py starts it.

Triton interprets them, on the CPU.
"""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_operands import numbers, same
from triton.runtime.interpreter import TensorHandle

from daso.kernels import torch_kernels, triton_kernels
from daso.kernels.codecs import codec_named
from daso.kernels.native import KernelError
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean, ShardRows

# As on a device: infinities and NaN are numbers like others.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

WIRES = ("fp32", "bf16", "fp16", "int8", "int4", "int2")
KINDS = (torch.float32, torch.bfloat16, torch.float16)
NUMEL = st.one_of(
    st.integers(0, 140),
    st.sampled_from([159, 160, 161, 255, 257, 1023, 1024, 1025, 1040, 2047, 2048, 2100]),
)
SIZES = st.sampled_from([(9000,), (16, 1500), (137, 40, 1), (1040, 9000), (1030, 5)])
SHARES = st.sampled_from((0.0, 0.0, 0.02, 0.5))
SEEDS = st.integers(0, 10**6)
CASES = {
    "deadline": None, "derandomize": True, "database": None,
    "phases": (Phase.generate,),  # shrinking takes minutes here
}  # fmt: skip
BOTH = (torch_kernels, triton_kernels)


@pytest.fixture(scope="module", autouse=True)
def hints_hold():
    """On a device, an address that is not the promised multiple ends the process."""

    def set_attr(handle, name, values):
        assert name == "tt.divisibility"
        assert (handle.data % values[0] == 0).all(), f"not a multiple of {values[0]}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorHandle, "set_attr", set_attr)
        yield


def cut(values, sizes, kinds):
    """Numbers as tensors of sizes and types that repeat; the first type's lie in one memory."""
    parts, at, turn = [], 0, 0
    rows = {kind: values.to(kind) for kind in kinds}
    while at < values.numel():
        stop = min(at + sizes[turn % len(sizes)], values.numel())
        parts.append(rows[kinds[turn % len(kinds)]][at:stop])
        at, turn = stop, turn + 1
    return [part.clone() if turn % 2 else part for turn, part in enumerate(parts)]


def same_sums(mine, theirs, numel):
    """Equal sums of a tile; several tiles are added in another order, in fp64."""
    if numel <= torch_kernels.SUM_TILE:
        same(mine, theirs, "a sum")
    else:
        assert mine.tolist() == pytest.approx(theirs.tolist(), rel=1e-13, nan_ok=True)


def payloads(codec, numel, count, seed, odd=0.0):
    """Payloads, every other one at an address that is not aligned."""
    versions, shift = [], 4 if codec.wire in {"fp32", "int8"} else 2
    for version in range(count):
        values = FlatTensors([numbers(numel, seed + 10 * version, odd=odd)])
        payload = torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
        torch_kernels.encode(codec, values, [(0, numel)], payload)
        memory = torch.zeros(payload.numel() + shift, dtype=torch.uint8)
        begin = shift * (version % 2)
        versions.append(memory[begin : begin + payload.numel()].copy_(payload))
    return versions


def comparable(codec, payload):
    """A payload, in which every NaN of fp32 is alike."""
    return payload.view(torch.float32) if codec.wire == "fp32" else payload


@settings(max_examples=100, **CASES)
@given(
    wire=st.sampled_from(WIRES),
    numel=NUMEL,
    pieces=st.lists(st.sampled_from([1, 16, 33, 48, 1024, 1056]), max_size=2),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=SIZES,
    rows=st.sets(st.sampled_from(("reference", "residual", "rounding", "first", "distance"))),
    gradients=st.booleans(),
    odd=SHARES,
    seed=SEEDS,
)
def test_encode(wire, numel, pieces, kinds, sizes, rows, gradients, odd, seed):
    codec, rows = codec_named(wire), {"residual"} if gradients else rows
    values = FlatTensors(cut(numbers(numel, seed, odd=odd), sizes, kinds))
    edges = sorted({0, numel, *(min(numel, edge) for edge in pieces)})
    spans = list(pairwise(edges)) or [(0, 0)]
    results = []
    for kernels in BOTH:
        given_rows = {
            name: numbers(numel, seed + 1 + at, odd=odd / 4)
            for at, name in enumerate(("reference", "residual", "rounding"))
            if name in rows
        }
        if gradients and numel:
            given_rows["residual"][::3] = 0.25
        if "first" in rows:
            given_rows["first"] = torch.full((1,), NOWHERE)
        if "distance" in rows:
            given_rows["distance"] = torch.full((1,), 0.125, dtype=torch.float64)
        payload = torch.full((sum(codec.nbytes(b - a) for a, b in spans),), 171, dtype=torch.uint8)
        kernels.encode(codec, values, spans, payload, EncodeRows(gradients=gradients, **given_rows))
        results.append({"payload": comparable(codec, payload), **given_rows})
    for name, theirs in results[0].items():
        if name == "distance":
            same_sums(results[1][name], theirs, numel if len(spans) == 1 else math.inf)
        else:
            same(results[1][name], theirs, name)


@settings(max_examples=50, **CASES)
@given(
    wire=st.sampled_from(WIRES),
    numel=NUMEL,
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    total=st.integers(1, 40),
    carry=st.booleans(),
    gradients=st.booleans(),
    both=st.booleans(),
    odd=SHARES,
    seed=SEEDS,
)
def test_reduce(wire, numel, weights, total, carry, gradients, both, odd, seed):
    codec = codec_named(wire)
    mean = Mean(codec, payloads(codec, numel, len(weights), seed, odd), weights, total)
    results = []
    for kernels in BOTH:
        kept = numbers(numel, seed, odd=odd) if carry else None
        payload = torch.full((codec.nbytes(numel),), 171, dtype=torch.uint8)
        row = torch.full((numel,), 7.0)
        more = {"row": row} if both else {}
        kernels.reduce(mean, numel, payload=payload, carry=kept, gradients=gradients, **more)
        if not both:
            kernels.reduce(mean, numel, row=row)
        results.append([comparable(codec, payload), row, *([kept] if carry else [])])
    for name, theirs, mine in zip(("payload", "row", "carry"), *results, strict=False):
        same(mine, theirs, name)


@settings(max_examples=50, **CASES)
@given(
    wire=st.sampled_from(WIRES),
    numel=NUMEL,
    start=st.sampled_from([0, 4, 5]),
    weights=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    rows=st.sets(st.sampled_from(("negated", "shown", "residual", "rounding", "others"))),
    odd=SHARES,
    seed=SEEDS,
)
def test_accept(wire, numel, start, weights, rows, odd, seed):
    codec, whole = codec_named(wire), start + numel + 3
    versions = payloads(codec, numel, len(weights), seed, odd)
    mean = Mean(codec, versions, weights, sum(weights))
    rows = {*rows, "reference", *({"residual"} if "rounding" in rows else ())}
    results = []
    for kernels in BOTH:
        shard = {
            name: numbers(whole, seed + at, odd=odd / 9) for at, name in enumerate(sorted(rows))
        }
        sums = torch.full((3,), 0.5, dtype=torch.float64)
        kernels.accept(
            mean, versions[0], start, start + numel, ShardRows(**shard, share=0.375), sums
        )
        results.append((shard, sums))
    for name, theirs in results[0][0].items():
        same(results[1][0][name], theirs, name)
    same_sums(results[1][1], results[0][1], numel)


@settings(max_examples=40, **CASES)
@given(
    kind=st.sampled_from(KINDS),
    written=st.sampled_from(KINDS),
    numel=NUMEL,
    count=st.integers(1, 5),
    divisor=st.integers(1, 9),
    spread=st.sampled_from(("nothing", "others", "rows")),
    in_place=st.booleans(),
    odd=SHARES,
    seed=SEEDS,
)
def test_mean_rows(kind, written, numel, count, divisor, spread, in_place, odd, seed):
    results = []
    for kernels in BOTH:
        rows = [
            numbers(numel + 1, seed + row, odd=odd).to(kind)[row % 2 :][:numel]
            for row in range(count)
        ]
        total = rows[0] if in_place and kind == torch.float32 else torch.zeros(numel)
        others = [torch.zeros(numel, dtype=written) for _ in range(2)]
        to = {"nothing": [], "others": others, "rows": rows}[spread]
        kernels.mean_rows(rows, divisor, total=total, to=to)
        if to:
            kernels.mean_rows(rows, divisor, to=to)
        results.append([total, *rows, *others])
    for theirs, mine in zip(*results, strict=True):
        same(mine, theirs, "a row")


@settings(max_examples=40, **CASES)
@given(
    numel=NUMEL,
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    sizes=SIZES,
    how=st.sampled_from(((1.0, False), (1.0, True), (0.3, False), (0.75, False))),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    odd=SHARES,
    seed=SEEDS,
)
def test_gather_and_merge(numel, kinds, sizes, how, ends, odd, seed):
    start, stop = sorted(int(numel * end) for end in ends)
    results = []
    for kernels in BOTH:
        parts = cut(numbers(numel, seed, odd=odd), sizes, kinds)
        values, row = FlatTensors(parts), torch.zeros(stop - start)
        kernels.gather(values, start, stop, row)
        kernels.merge(values, numbers(numel, seed + 1, odd=odd), how[0], add=how[1])
        results.append([row, *parts])
    for theirs, mine in zip(*results, strict=True):
        same(mine, theirs, "a row")


@pytest.mark.parametrize("wire", WIRES)
def test_mean_is_written_where_a_payload_was(wire):
    codec, numel = codec_named(wire), 1100
    results = []
    for kernels in BOTH:
        versions = payloads(codec, numel, 3, 5)
        kernels.reduce(Mean(codec, versions, (1, 1, 1), 3), numel, payload=versions[1])
        results.append(versions)
    for theirs, mine in zip(*results, strict=True):
        same(mine, theirs, "a payload")


def test_exact_payload_lies_where_the_mean_is_shown():
    codec, numel, results = codec_named("fp32"), 1100, []
    for kernels in BOTH:
        shown, sums = torch.zeros(numel), torch.zeros(3, dtype=torch.float64)
        payload = shown.view(torch.uint8)
        values = FlatTensors([numbers(numel, 1)])
        kernels.encode(
            codec, values, [(0, numel)], payload, EncodeRows(reference=numbers(numel, 2))
        )
        other = payloads(codec, numel, 1, 7)[0]
        rows = ShardRows(reference=numbers(numel, 2), shown=shown)
        kernels.accept(Mean(codec, [payload, other], (1, 1), 2), payload, 0, numel, rows, sums)
        results.append((rows.reference, shown))
    for theirs, mine in zip(*results, strict=True):
        same(mine, theirs, "a row")


@pytest.mark.parametrize(
    ("wire", "row", "kind"),
    [
        ("topk", torch.float32, torch.float32),
        ("int4", torch.float64, torch.float32),
        ("int4", torch.float32, torch.float64),
    ],
)
def test_other_types_are_left_to_torch(wire, row, kind, monkeypatch):
    monkeypatch.setattr(triton_kernels, "_launch", None)
    codec, numel, results = codec_named(wire, row), 300, []
    for kernels in BOTH:
        tensor = numbers(numel, 1).to(kind)
        values, payload = FlatTensors([tensor]), torch.zeros(codec.nbytes(numel), dtype=torch.uint8)
        rounding, gathered, total = (torch.zeros(numel, dtype=row) for _ in range(3))
        kernels.encode(codec, values, [(0, numel)], payload, EncodeRows(rounding=rounding))
        outputs = [payload, rounding]
        if torch.float64 in {row, kind}:
            kernels.gather(values, 0, numel, gathered)
            kernels.merge(values, numbers(numel, 2).to(row), 0.5)
            kernels.mean_rows([rounding.double(), rounding.double()], 2, to=[tensor.double()])
            outputs += [gathered, tensor]
        if kind != torch.float64:
            mean, sums = Mean(codec, [payload]), torch.zeros(3, dtype=torch.float64)
            kernels.reduce(mean, numel, row=total)
            kernels.accept(mean, payload, 0, numel, ShardRows(reference=gathered), sums)
            outputs += [total, gathered, sums]
        results.append(outputs)
    for theirs, mine in zip(*results, strict=True):
        same(mine, theirs, "an output")


def test_short_rows_and_payloads_are_refused():
    codec, numel = codec_named("bf16"), 64
    values, payload = FlatTensors([torch.zeros(numel)]), torch.zeros(128, dtype=torch.uint8)
    spans = [(0, numel)]
    triton_kernels.encode(codec, values, spans, payload)
    with pytest.raises(ValueError, match="payload must be 128"):
        triton_kernels.encode(codec, values, spans, payload[:-4])
    with pytest.raises(ValueError, match="multiple of 2"):
        triton_kernels.reduce(Mean(codec, [torch.zeros(129, dtype=torch.uint8)[1:]]), numel)
    with pytest.raises(ValueError, match="row must be 64"):
        triton_kernels.encode(codec, values, spans, payload, EncodeRows(residual=torch.zeros(63)))
    with pytest.raises(ValueError, match="row must be 64"):
        triton_kernels.gather(values, 0, numel, torch.zeros(128)[::2])


def test_tables_are_copied_once():
    host, parts = torch.device("cpu"), [torch.zeros(5), torch.zeros(7)]
    table = triton_kernels._tensor_table(FlatTensors(parts), host)
    assert triton_kernels._tensor_table(FlatTensors(parts), host) is table
    moved = FlatTensors([parts[0], parts[1].clone()])
    assert triton_kernels._tensor_table(moved, host) is not table


def test_interpreted_kernels_are_not_chosen():
    with pytest.raises(KernelError, match="TRITON_INTERPRET"):
        triton_kernels.check(torch.device("cuda"))


def test_check_compares_with_torch(monkeypatch):
    host = torch.device("cpu")
    assert triton_kernels.compare(host) == []
    monkeypatch.setattr(triton_kernels, "interpreted", lambda: False)
    with pytest.raises(KernelError, match="not on a cpu"):
        triton_kernels.check(host)

    def wrong(codec, values, spans, payload, rows):
        rows.rounding.add_(1)

    monkeypatch.setattr(triton_kernels, "encode", wrong)
    assert triton_kernels.compare(host) == ["payload", "rounding", "distance"]
