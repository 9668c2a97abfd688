"""Gradients on narrow wires: what is rounded away comes back, and flags cross as they are."""

import pytest
import torch

from daso.comm.reduction import WeightedMean, in_process
from daso.kernels.codecs import codec_named
from daso.plan.allreduce_plan import direct_plan
from daso.train.gradients.compression import CompressedSum, compressed_chunks

NUMEL, START, ROUNDS = 700, 40, 30
FLAGS = torch.tensor([99, 300, NUMEL - 1])


def rounds_of(nodes, wire, dtype, flags=FLAGS, chunk_bytes=128):
    """Average random gradients; return what went in, what came out, and what is kept."""
    torch.manual_seed(0)
    codec, rounded = codec_named(wire, dtype), {}
    adder = WeightedMean(codec, [1] * nodes, nodes, rounded, of_gradients=True)
    residuals = [torch.zeros(NUMEL, dtype=dtype) for _ in range(nodes)]
    given, means = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for _ in range(ROUNDS):
        totals = [1e-4 * torch.randn(NUMEL, dtype=dtype) for _ in range(nodes)]
        for total in totals:
            total[flags] = 1
            given += total.double()
        sources = [
            CompressedSum(total, START, residual, flags)
            for total, residual in zip(totals, residuals, strict=True)
        ]
        chunks = compressed_chunks(codec, chunk_bytes, START, NUMEL, direct_plan(nodes))
        for source in sources:
            source.encode(codec, [span for parts in chunks for span in parts])
        in_process(sources, adder, chunks)
        for source in sources:
            source.deliver_exact(source.exact)
        assert all(torch.equal(total, totals[0]) for total in totals)
        means += totals[0].double()
    kept = sum(residual.double() for residual in residuals)
    for start, row in rounded.items():
        kept[start - START : start - START + len(row)] += nodes * row.double()
    return given, means, kept


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_rounded_away_is_kept_to_the_last_bit_that_counts(nodes, wire, dtype):
    given, means, kept = rounds_of(nodes, wire, dtype)
    found = nodes * means + kept
    found[FLAGS] = given[FLAGS]  # of these every mean is a sum
    assert (found - given).abs().max() < 1e-6 * given[0].abs().max() + 1e-8
    numbers = torch.ones(NUMEL, dtype=torch.bool)
    numbers[FLAGS] = False
    # Less than one round's of all nodes, after thirty.
    assert 0 < kept[numbers].abs().max() < nodes * 1e-4


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
def test_what_is_kept_waits_for_a_batch_that_uses_the_parameter(nodes, wire):
    """Where no rank has a gradient its mean is taken by nobody: nothing may cross then."""
    codec, rounded, none = codec_named(wire), {}, torch.zeros(0, dtype=torch.int64)
    adder = WeightedMean(codec, [1] * nodes, nodes, rounded, of_gradients=True)
    residuals, taken = [torch.zeros(128) for _ in range(nodes)], torch.zeros(128)
    gradient = torch.full((128,), 0.05)
    gradient[7] = 1.0
    for batch in range(200):
        used = batch % 2 == 0
        sources = [CompressedSum(gradient * used, 0, residual, none) for residual in residuals]
        chunks = compressed_chunks(codec, 1 << 18, 0, 128, direct_plan(nodes))
        for source in sources:
            source.encode(codec, [span for parts in chunks for span in parts])
        in_process(sources, adder, chunks)
        taken += sources[0].total * used
    assert (taken - 100 * gradient).abs().max() < 0.6


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("wire", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_gone_with_the_next_batch(nodes, wire, bad):
    codec, none = codec_named(wire), torch.zeros(0, dtype=torch.int64)
    adder = WeightedMean(codec, [1] * nodes, nodes, {}, of_gradients=True)
    residuals = [torch.zeros(300) for _ in range(nodes)]
    for value in (0.3, bad, 0.3):
        totals = [torch.full((300,), 0.1) for _ in range(nodes)]
        totals[-1][11] = value
        sources = [
            CompressedSum(total, 0, residual, none)
            for total, residual in zip(totals, residuals, strict=True)
        ]
        chunks = compressed_chunks(codec, 1 << 18, 0, 300, direct_plan(nodes))
        for source in sources:
            source.encode(codec, [span for parts in chunks for span in parts])
        in_process(sources, adder, chunks)
        assert bool(totals[0].isfinite().all()) == (value == 0.3)


def test_flags_cross_as_they_are_and_do_not_flatten_gradients_beside_them():
    _, means, kept = rounds_of(2, "int4", torch.float32)
    assert means[FLAGS].tolist() == [ROUNDS] * 3
    assert kept[FLAGS].tolist() == [0, 0, 0]
    assert (means[90:99] != 0).all()
