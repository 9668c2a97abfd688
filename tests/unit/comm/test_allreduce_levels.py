"""Means over many ranks by levels and rings, in one process; `tests/ranks` holds MPI against it."""

import pytest
import torch

from daso.comm.allreduce.levels import MultiLevelMean, Transfers
from daso.comm.allreduce.runners import SequentialAllReduce, copy_transfers
from daso.comm.reduction import Row, WeightedMean
from daso.kernels.codecs import codec_named, dense_codec, exact_codec
from daso.kernels.rows import FlatTensors
from daso.plan.allreduce_plan import BLOCK, AllReducePlan, Level
from daso.plan.cost_model import LinkCosts, allreduce_cost
from daso.train.deltas.shard import DeltaShard, MergeOptions
from daso.train.gradients.compression import CompressedSum

PLANS = [
    AllReducePlan(tuple(Level(*level) for level in levels))
    for levels in (
        [(3, "ring")],
        [(7, "ring")],
        [(5, "whole")],
        [(4, "scatter"), (3, "scatter")],
        [(3, "scatter"), (2, "scatter"), (2, "scatter")],
        [(4, "scatter"), (3, "whole")],
        [(3, "whole"), (4, "scatter")],
        [(2, "whole"), (3, "whole")],
        [(3, "scatter"), (4, "ring")],
        [(4, "ring"), (3, "scatter")],
        [(3, "ring"), (3, "ring")],
    )
]
NUMEL = 6 * BLOCK + 77
ROUNDING = [PLANS[at] for at in (0, 3, 5, 6, 9)]  # where something is rounded in another way


def ids(plan):
    return plan.name


def sequential(plan, leaf, rows, weights, total):
    """Add rows as the docstring of the plan says, for one of its leaves; nothing here is shared."""
    digits, rest = [], leaf
    for level in reversed(plan.levels):
        digits.insert(0, rest % level.parts)
        rest //= level.parts

    def subtotal(depth, rank):
        if depth == 0:
            return rows[rank] * weights[rank]
        level, group = plan.levels[depth - 1], plan.group(rank, depth - 1)
        first = digits[depth - 1] + 1 if level.way == "ring" else 0
        members = [group[(first + at) % level.size] for at in range(level.size)]
        result = subtotal(depth - 1, members[0])
        for member in members[1:]:
            result = result + subtotal(depth - 1, member)
        return result

    return subtotal(len(plan.levels), 0) / total


@pytest.mark.parametrize("plan", PLANS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("message", [BLOCK, 1 << 20, 333])
def test_a_mean_is_the_sequential_one_bit_for_bit(plan, dtype, message):
    generator = torch.Generator().manual_seed(1)
    weights = [1 + rank % 3 for rank in range(plan.peers)]
    rows = [torch.randn(NUMEL, generator=generator).to(dtype) for _ in weights]
    found = [Row(row.clone()) for row in rows]
    chunks = plan.chunks(NUMEL, message)
    codec = exact_codec(dtype)
    means = SequentialAllReduce(codec, weights, sum(weights), plan, [{} for _ in rows])
    means.run(found, chunks)
    for chunk in chunks:
        for leaf, span in enumerate(plan.leaf_spans(chunk)):
            if span.numel:
                parts = [row[slice(*span)] for row in rows]
                expected = sequential(plan, leaf, parts, weights, sum(weights))
                assert all(torch.equal(one.flat[slice(*span)], expected) for one in found)


def gradients(plan, codec, rows, residuals, chunks, means):
    """Average gradients once; return what each rank gets."""
    none = torch.zeros(0, dtype=torch.int64)
    totals = [row.clone() for row in rows]
    sources = [
        CompressedSum(total, 0, residual, none)
        for total, residual in zip(totals, residuals, strict=True)
    ]
    for source in sources:
        source.encode(codec, [span for parts in chunks for span in parts])
    means.run(sources, chunks)
    return totals


@pytest.mark.parametrize(
    ("plan", "wire", "largest"),
    [
        *((plan, "bf16", 1e-3) for plan in ROUNDING),
        *((plan, "fp16", 1.5e-4) for plan in ROUNDING),
        *((plan, "int8", 2e-3) for plan in ROUNDING),
        *((plan, "int4", 3e-2) for plan in ROUNDING),
        (ROUNDING[0], "topk", 1.0),
        pytest.param(ROUNDING[1], "topk", 1.0, marks=pytest.mark.later("150 rounds")),
    ],
)
def test_what_every_level_rounds_away_comes_back(plan, wire, largest):
    """The mean of many rounds is the mean, but for a part of what one round may be off by."""
    codec, peers, rounds = codec_named(wire), plan.peers, 150 if wire == "topk" else 20
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randn(NUMEL, generator=generator) + 0.1 for _ in range(peers)]
    means = SequentialAllReduce(
        codec, [1] * peers, peers, plan, [{} for _ in rows], of_gradients=True
    )
    residuals = [torch.zeros(NUMEL) for _ in rows]
    chunks, taken = plan.chunks(NUMEL, BLOCK), torch.zeros(NUMEL)
    for _ in range(rounds):
        totals = gradients(plan, codec, rows, residuals, chunks, means)
        assert all(torch.equal(total, totals[0]) for total in totals)
        taken += totals[0] / rounds
    assert (taken - sum(rows) / peers).abs().max() < largest


@pytest.mark.parametrize("plan", PLANS, ids=ids)
def test_dense_exchange_sends_residuals_of_all_levels(plan):
    """On its levels owners hold back parts of running means: the dense one passes means, too."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randn(NUMEL, generator=generator) for _ in range(plan.peers)]
    parts = [DeltaShard(torch.zeros(NUMEL), MergeOptions()) for _ in rows]
    rounded, there = [{} for _ in rows], rows
    chunks = plan.chunks(NUMEL, BLOCK)
    spans = [span for one in chunks for span in one]
    for codec in (codec_named("topk"), dense_codec("topk")):
        means = SequentialAllReduce(codec, [1] * plan.peers, plan.peers, plan, rounded)
        for part, row in zip(parts, there, strict=True):
            part.encode(codec, spans, FlatTensors([row]), keeps=False)
        means.run(parts, chunks)
        for part in parts:
            part.finish()
        there = [part.reference.clone() for part in parts]  # which all take over
    for part in parts:
        torch.testing.assert_close(part.reference, sum(rows) / plan.peers, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", ROUNDING, ids=ids)
@pytest.mark.parametrize("wire", ["bf16", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_value_lasts_one_round(plan, wire, bad):
    codec, peers = codec_named(wire), plan.peers
    means = SequentialAllReduce(
        codec, [1] * peers, peers, plan, [{} for _ in range(peers)], of_gradients=True
    )
    residuals, chunks = [torch.zeros(NUMEL) for _ in range(peers)], plan.chunks(NUMEL, BLOCK)
    for value in (0.3, bad, 0.3):
        rows = [torch.full((NUMEL,), 0.1) for _ in range(peers)]
        rows[-1][11] = value
        totals = gradients(plan, codec, rows, residuals, chunks, means)
        assert all(bool(total.isfinite().all()) == (value == 0.3) for total in totals)


def test_a_sum_beyond_a_wires_range_crosses_as_a_mean():
    """Sixty thousand fits into fp16, twelve times as much does not."""
    for plan in PLANS:
        rows = [Row(torch.full((NUMEL,), 60_000.0)) for _ in range(plan.peers)]
        sources = [
            CompressedSum(row.flat, 0, torch.zeros(NUMEL), torch.zeros(0, dtype=torch.int64))
            for row in rows
        ]
        codec, chunks = codec_named("fp16"), plan.chunks(NUMEL, BLOCK)
        for source in sources:
            source.encode(codec, [span for parts in chunks for span in parts])
        peers = plan.peers
        means = SequentialAllReduce(codec, [1] * peers, peers, plan, [{} for _ in rows])
        means.run(sources, chunks)
        assert all((row.flat - 60_000).abs().max() <= 32 for row in rows)


@pytest.mark.parametrize("plan", PLANS, ids=ids)
def test_messages_are_those_of_the_cost_model(plan):
    numel = 2 * 3 * 4 * 7 * BLOCK
    codec, rows = codec_named("fp32"), [Row(torch.zeros(numel)) for _ in range(plan.peers)]
    ranks = [
        MultiLevelMean(plan, rank, WeightedMean(codec, [1] * plan.peers, plan.peers, {}))
        for rank in range(plan.peers)
    ]
    message = numel // plan.messages_of_chunk // 2
    chunks = plan.chunks(numel, message)
    sent = [
        tensor.numel()
        for mean, row in zip(ranks, rows, strict=True)
        for parts in chunks
        for step in mean.chunk(row, parts, 0)
        if isinstance(step, Transfers)
        for _, tensor in step.sends
    ]
    cost = allreduce_cost(plan, 4 * numel, LinkCosts(), message_bytes=4 * message)
    assert len(sent) == cost.messages * plan.peers
    assert sum(sent) == pytest.approx(cost.sent_bytes * plan.peers)
    assert min(sent) == pytest.approx(cost.smallest_bytes, rel=0.15)  # cut at blocks


def test_a_chunk_is_delivered_after_all_before_it():
    """What a row sums over chunks is added in one order, whichever ends first."""
    plan, codec = PLANS[3], codec_named("fp32")
    rows = [Row(torch.ones(NUMEL)) for _ in range(plan.peers)]
    chunks = plan.chunks(NUMEL, BLOCK // 4)
    ranks = [
        MultiLevelMean(plan, rank, WeightedMean(codec, [1] * plan.peers, plan.peers, {}))
        for rank in range(plan.peers)
    ]

    def to_the_end(index):
        each = [
            rank.chunk(row, chunks[index], index) for rank, row in zip(ranks, rows, strict=True)
        ]
        while True:
            found = [next(one) for one in each]
            if not any(isinstance(step, Transfers) for step in found):
                return each, found
            copy_transfers(found)

    _, wait = to_the_end(1)
    assert not any(step() for step in wait)
    first, go = to_the_end(0)
    assert all(step() for step in go)
    assert [next(one, None) for one in first] == [None] * plan.peers
    assert all(step() for step in wait)
