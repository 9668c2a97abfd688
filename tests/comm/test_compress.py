from typing import get_args

import pytest
import torch

from daso.comm.compress import codec_named
from daso.plan.options import Wire

WIRES = get_args(Wire)

SIZES = [0, 1, 2, 127, 128, 129, 1000, 4097]


def through(wire: str, values: torch.Tensor) -> torch.Tensor:
    codec = codec_named(wire, values.dtype)
    payload = torch.full((codec.nbytes(values.numel()),), 255, dtype=torch.uint8)
    codec.encode(values.clone(), payload)
    out = torch.full_like(values, 9.0)
    codec.decode(payload, out)
    return out


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("wire", WIRES)
def test_every_size_goes_through_and_zero_stays_zero(wire, numel):
    torch.manual_seed(numel)
    assert torch.equal(through(wire, torch.zeros(numel)), torch.zeros(numel))
    values = torch.randn(numel) * 0.01
    error = (through(wire, values) - values).abs()
    bound = {
        "fp32": torch.zeros(numel),
        "bf16": values.abs() * 2**-8,
        "fp16": values.abs() * 2**-10 + 2**-24,
        "int8": torch.full_like(values, 0.05 / 127),
        "int4": torch.full_like(values, 0.05 / 7),
    }[wire]
    assert bool((error <= bound).all())


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_are_few_and_whole_words(wire):
    nbytes = codec_named(wire).nbytes(128 * 1024)
    rates = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1 + 1 / 32, "int4": 0.5 + 1 / 32}
    per_number = rates[wire]
    assert nbytes == per_number * 128 * 1024
    assert all(codec_named(wire).nbytes(numel) % 4 == 0 for numel in range(300))


@pytest.mark.parametrize("wire", WIRES)
def test_only_a_codec_that_loses_nothing_is_exact(wire):
    values = torch.randn(1000)
    codec = codec_named(wire)
    assert codec.exact == torch.equal(through(wire, values), values)
    assert not codec_named("fp32", torch.float64).exact


@pytest.mark.parametrize("wire", WIRES)
def test_with_a_residual_everything_arrives_in_the_end(wire):
    """What was sent, plus the residual, is what was to be sent: nothing is lost on the way."""
    torch.manual_seed(1)
    residual, wanted, arrived = torch.zeros(500), torch.zeros(500), torch.zeros(500)
    for _ in range(400):
        delta = 1e-4 * (1 + torch.rand(500))
        wanted += delta
        values = delta + residual
        sent = through(wire, values)
        residual = values - sent
        arrived += sent
    torch.testing.assert_close(arrived + residual, wanted, rtol=1e-4, atol=0)
    assert residual.abs().max() < 0.01 * wanted.max()


@pytest.mark.parametrize("wire", ["fp16", "int8", "int4", "bf16"])
def test_large_numbers_do_not_become_infinite(wire):
    values = torch.tensor([1e30, -1e6, 70000.0, 1.0])
    assert bool(through(wire, values).isfinite().all())
