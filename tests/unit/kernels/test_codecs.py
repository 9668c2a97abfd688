"""Payloads of every wire: their size, what they round, and what each kernel makes of them."""

import math
from typing import get_args

import pytest
import torch

from daso.kernels import torch_kernels
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import codec_named
from daso.kernels.rows import NOWHERE, EncodeRows, FlatTensors, Mean
from daso.plan.options import BITS, Wire

WIRES = [wire for wire in get_args(Wire) if wire != "auto"]
SIZES = [0, 1, 2, 127, 128, 129, 1000, 4097]
CPU = torch.device("cpu")


def encoded(codec, values, room=None):
    payload = torch.full((codec.nbytes(values.numel()),), 255, dtype=torch.uint8)
    payload = payload if room is None else room
    kernels_for(CPU).encode(codec, FlatTensors([values]), [(0, values.numel())], payload)
    return payload


def decoded(codec, payload, numel):
    out = torch.full((numel,), 9.0, dtype=codec.row)
    kernels_for(CPU).reduce(Mean(codec, [payload]), numel, row=out)
    return out


def through(wire: str, values: torch.Tensor) -> torch.Tensor:
    codec = codec_named(wire, values.dtype)
    return decoded(codec, encoded(codec, values), values.numel())


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
        "int2": torch.full_like(values, 0.05 / 2),
        # What is not sent is whole in the residual; what is sent is rounded.
        "topk": values.abs(),
    }[wire]
    assert bool((error <= bound).all())


@pytest.mark.parametrize(("wire", "largest"), [("int8", 127.0), ("int4", 7.0)])
def test_numbers_become_the_nearest_that_a_wire_has(wire, largest):
    values = torch.tensor([largest, 0.6, -0.6, 1.4, -1.4, 5.9, -5.9, 0.0])  # a scale of 1
    assert through(wire, values).tolist() == [largest, 1, -1, 1, -1, 6, -6, 0]


@pytest.mark.parametrize("start", [0, 4096, 3 * 4096])
@pytest.mark.parametrize("wire", WIRES)
def test_a_part_that_starts_at_a_block_is_a_slice_of_the_payload(wire, start):
    codec, values = codec_named(wire), torch.randn(3 * 4096 + 77)
    whole = encoded(codec, values)
    for stop in {values.numel(), max(start, 2 * 4096)}:
        alone, part = encoded(codec, values[start:stop]), codec.part(whole, start, stop)
        assert torch.equal(alone[: part.numel()], part)
        assert alone.numel() - part.numel() < 4


@pytest.mark.parametrize("numel", [2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16 + 4097])
@pytest.mark.parametrize("wire", WIRES)
def test_long_rows_have_the_bytes_of_torch(wire, numel):
    """Torch's operations go piece by piece."""
    torch.manual_seed(numel)
    codec, values = codec_named(wire), torch.randn(numel)
    payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8)
    torch_kernels.encode(codec, FlatTensors([values]), [(0, numel)], payload)
    assert torch.equal(encoded(codec, values), payload)


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_are_few_and_whole_words(wire):
    nbytes = codec_named(wire).nbytes(128 * 1024)
    rates = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1 + 1 / 32, "int4": 0.5 + 1 / 16}
    rates["int2"] = 0.25 + 1 / 16
    rates["topk"] = 4 / 64  # a place and a value for one of 64
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
    # top-k sends 8 of these 500 at a time: a number waits for its turn, 63 rounds or a few more
    waiting = 100 * 2e-4 if wire == "topk" else 0.0
    assert residual.abs().max() < 0.01 * wanted.max() + waiting


@pytest.mark.parametrize("wire", ["fp16", "int8", "int4", "int2", "bf16", "topk"])
def test_large_numbers_do_not_become_infinite(wire):
    values = torch.tensor([1e30, -1e6, 70000.0, 1.0])
    assert bool(through(wire, values).isfinite().all())


# --- topk --------------------------------------------------------------------------------------

LENGTHS = [0, 1, 63, 64, 65, 4095, 4096, 4097, 12345]


def largest(values, block=4096, part=64):
    """The obvious top-k: of each block the largest magnitudes, rounded to bf16; zeros elsewhere."""
    out = torch.zeros_like(values)
    for start in range(0, values.numel(), block):
        row = values[start : start + block].tolist()
        keep = math.ceil(len(row) / part)
        for place in sorted(range(len(row)), key=lambda i: -abs(row[i]))[:keep]:
            out[start + place] = values[start + place].to(torch.bfloat16)
    return out


def distinct(numel, dtype):
    """Numbers of both signs, no two of the same magnitude, in no order."""
    torch.manual_seed(numel)
    signs = torch.randint(0, 2, (numel,)) * 2 - 1
    return ((torch.randperm(numel) + 1) * signs).to(dtype) / 12345


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", LENGTHS)
def test_topk_sends_the_largest_of_each_block(numel, dtype):
    values = distinct(numel, dtype)
    sent = through("topk", values)
    assert sent.dtype == dtype
    assert torch.equal(sent, largest(values))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("numel", [*LENGTHS, *range(2, 300, 37)])
def test_topk_writes_every_byte_that_it_says_and_none_beyond(numel, dtype):
    codec, values = codec_named("topk", dtype), distinct(numel, dtype)
    nbytes = codec.nbytes(numel)
    blocks, rest = divmod(numel, 4096)
    assert nbytes == 4 * (64 * blocks + math.ceil(rest / 64))

    def written(fill):
        room = torch.full((nbytes + 8,), fill, dtype=torch.uint8)
        encoded(codec, values, room[:nbytes])
        assert bool((room[nbytes:] == fill).all())
        return room[:nbytes]

    once, again = written(0), written(255)
    assert torch.equal(once, again)  # whatever was there before
    assert torch.equal(decoded(codec, again, numel), largest(values))


@pytest.mark.parametrize("wire", WIRES)
def test_the_row_that_is_sent_is_left_alone(wire):
    values = distinct(12345, torch.float32)
    kept = values.clone()
    encoded(codec_named(wire), values)
    assert torch.equal(values, kept)


def test_topk_sends_equal_numbers_as_often_as_it_may():
    sent = through("topk", torch.full((4096 + 65,), -0.5))
    assert set(sent.tolist()) == {-0.5, 0.0}
    assert [int((part != 0).sum()) for part in sent.split(4096)] == [64, 2]


def test_topk_sends_values_of_every_block():
    values = torch.cat([distinct(4096, torch.float32), 1e-6 * distinct(4096, torch.float32)])
    assert [int((part != 0).sum()) for part in through("topk", values).split(4096)] == [64, 64]


@pytest.mark.parametrize("wire", BITS)
def test_what_a_wire_is_chosen_by_is_what_its_codec_takes(wire):
    assert codec_named(wire).nbytes(1 << 20) * 8 / (1 << 20) == pytest.approx(BITS[wire], rel=1e-3)


# --- numbers that are not finite ---------------------------------------------------------------


def check_first_nonfinite(device):
    generator = torch.Generator().manual_seed(0)
    codec, wrong = codec_named("fp32"), (float("nan"), float("inf"), float("-inf"))

    def below(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    for turn in range(300):
        numel = 1 + below(3000)
        values = torch.randn(numel, generator=generator)
        values *= 1e35 if turn % 5 == 0 else 1  # their sum is not finite
        for _ in range(below(4)):
            values[below(numel)] = wrong[below(3)]
        places = (~values.isfinite()).nonzero().flatten().tolist()
        first = torch.full((1,), NOWHERE, dtype=torch.int64, device=device)
        payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
        there = FlatTensors([values.to(device)])
        kernels_for(device).encode(codec, there, [(0, numel)], payload, EncodeRows(first=first))
        assert first.item() == (places[0] if places else NOWHERE)


def test_the_first_number_that_is_not_finite_is_found():
    check_first_nonfinite(CPU)
