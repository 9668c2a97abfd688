"""Rows packed and taken in by kernels against torch's operations; test_fused.py starts it.

Triton interprets them, on the CPU.
"""

import itertools

import pytest
import torch
from daso.comm.compression import codec_named
from daso.train.deltas.fused import Fused
from hypothesis import given, settings
from hypothesis import strategies as st

from daso.plan.layout import split
from daso.train.deltas.shard import DeltaShard, MergeOptions

WIRES = ("fp32", "bf16", "fp16")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def kernels():
    from daso.comm.device import triton_kernels as kernels

    assert kernels.interpreted()
    return kernels


class Model:
    """Parameters of several types one after the other in memory of their own, and two parts."""

    def __init__(self, kernels, numels, types, seed, way=MergeOptions()):  # noqa: B008 - frozen
        generator = torch.Generator().manual_seed(seed)
        self.params = [
            torch.randn(numel, generator=generator).to(dtype)
            for numel, dtype in zip(numels, types, strict=True)
        ]
        starts = itertools.accumulate(numels, initial=0)
        self.views = [(p, at) for p, at in zip(self.params, starts, strict=False) if p.numel()]
        self.numel = sum(numels)
        made = Fused(kernels, lambda: self.views)
        self.parts = [DeltaShard(torch.zeros(self.numel), way, on_device=True) for _ in range(2)]
        self.parts[1].fused = made
        reference = torch.randn(self.numel, generator=generator)
        for part in self.parts:
            part.reference.copy_(reference)
        self.generator = generator

    def gather(self, start, stop, row):
        whole = torch.cat([p.float() for p in self.params])
        row.copy_(whole[start:stop])

    def move(self):
        for p in self.params:
            p.data += torch.randn(p.shape, generator=self.generator).to(p.dtype) / 8

    def exchange(self, wire, chunks, *, keeps):
        """Send, and take in a mean; return what each part says of it."""
        spans = [span for span in split(self.numel, chunks) if span.numel]
        mean = torch.randn(self.numel, generator=self.generator)
        told = []
        for part in self.parts:
            codec = codec_named(wire)
            part.encode(codec, spans, self.gather, keeps=keeps)
            found = part.first_nonfinite(part.checks().tolist())
            sent = part.outbox.memory.clone()
            for start, stop, fields in part.sent():
                part.deliver(start, stop, mean[start:stop].clone(), fields)
            told.append((found, sent, part.measured(part.finish().tolist())))
        return told


def same(model):
    one, other = model.parts
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, theirs[name]), name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(TYPES)), min_size=1, max_size=5),
    wires=st.lists(st.tuples(st.sampled_from(WIRES), st.booleans()), min_size=1, max_size=4),
    chunks=st.integers(1, 5),
    eager=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_no_bit_differs_from_torch(kernels, sizes, wires, chunks, eager, seed):
    numels, types = zip(*sizes, strict=True)
    if not sum(numels):
        return
    model = Model(kernels, numels, types, seed, MergeOptions(eager=eager))
    for wire, keeps in wires:
        model.move()
        (found, sent, measured), other = model.exchange(wire, chunks, keeps=keeps)
        assert (found, other[0]) == (None, None)
        pairs = zip(*(payloads(model, wire, chunks, one) for one in (sent, other[1])), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
        assert measured == pytest.approx(other[2], rel=1e-4)
        same(model)


def payloads(model, wire, chunks, memory):
    """Return the numbers of each payload, without what fills its last word."""
    codec, at = codec_named(wire), 0
    for span in split(model.numel, chunks):
        nbytes = codec.nbytes(span.numel)
        yield codec.fields(memory[at : at + nbytes], span.numel, 0, span.numel)[0]
        at += nbytes


@pytest.mark.parametrize("wire", WIRES)
def test_what_the_wire_lost_before_goes_where_local_work_is_kept(kernels, wire):
    model = Model(kernels, (3000, 500), TYPES[:2], 1)
    model.exchange("bf16", 2, keeps=False)
    assert all(part.residual.abs().max() > 0 for part in model.parts)
    model.move()
    one, other = model.exchange(wire, 2, keeps=True)
    assert one[2] == pytest.approx(other[2], rel=1e-4)
    same(model)


@pytest.mark.parametrize("outer", [None, lambda p: torch.optim.Adam(p, 0.1)])
def test_a_rehearsal_leaves_nothing_behind(kernels, outer):
    models = [
        Model(kernels, (3000, 500), TYPES[:2], 1, MergeOptions(outer=outer)) for _ in range(2)
    ]
    spans = [tuple(span) for span in split(3500, 2)]
    for part in models[0].parts:
        reference = part.reference.clone()
        part.warm_up([codec_named(wire) for wire in WIRES], spans, models[0].gather)
        assert not part.shown.any()
        assert not part.reference.any()
        assert part.residual is None
        part.reference.copy_(reference)
    for model in models:
        for keeps in (True, False, True):
            model.move()
            model.exchange("bf16", 2, keeps=keeps)
        same(model)
    mine, other = (model.parts[1].rows() for model in models)
    assert all(map(torch.equal, mine, other))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wire", WIRES)
def test_the_first_number_that_is_not_finite_is_found(kernels, wire, wrong):
    model = Model(kernels, (3000, 1, 5000), TYPES, 1)
    model.params[2][[7, 4999]] = wrong
    assert model.exchange(wire, 3, keeps=True)[1][0] == 3008
    model.params[1][0] = wrong
    assert model.exchange(wire, 3, keeps=True)[1][0] == 3000
    model.params[1].zero_()
    model.params[2].zero_()
    for part in model.parts:
        part.reference.zero_()
    assert model.exchange(wire, 3, keeps=True)[1][0] is None


@pytest.mark.filterwarnings("ignore:overflow encountered")  # of the square, as on a device
def test_large_numbers_are_finite_where_their_sums_are_not(kernels):
    model = Model(kernels, (4096,), TYPES[:1], 1)
    model.params[0].fill_(3e38)
    assert model.exchange("fp32", 1, keeps=True)[1][0] is None


def test_parameters_that_moved_are_found(kernels):
    model = Model(kernels, (4000, 500), TYPES[:2], 1)
    for _ in range(2):
        one, other = model.exchange("bf16", 2, keeps=True)
        assert torch.equal(one[1], other[1])
        model.params = [p.clone() + 1 for p in model.params]
        model.views = [(p, at) for p, (_, at) in zip(model.params, model.views, strict=True)]


def tables(model, wire, chunks):
    made = model.parts[1].fused
    spans = [tuple(span) for span in split(model.numel, chunks)]
    return made._tables(codec_named(wire), spans, torch.device("cpu"))


def test_blocks_that_begin_evenly_are_read_16_bytes_at_a_time(kernels):
    even = Model(kernels, (4096, 64, 1000), (torch.float32,) * 3, 1)
    assert [one.aligned for one in tables(even, "bf16", 1)] == [True]
    odd = Model(kernels, (4096, 10, 4096), (torch.float32,) * 3, 1)
    found = {one.aligned: one.jobs[:, 3].tolist() for one in tables(odd, "bf16", 1)}
    assert found == {True: [2048, 2048], False: [10, 2048, 2048]}
    mixed = Model(kernels, (4096, 4096), TYPES[:2], 1)
    assert len(tables(mixed, "fp32", 1)) == 2


def test_a_wire_without_kernels_is_left_to_torch(kernels):
    model = Model(kernels, (4096,), TYPES[:1], 1)
    assert not model.parts[1].fused.handles(codec_named("int4"))
    assert not model.parts[1].fused.handles(codec_named("topk"))
    one, other = model.exchange("int4", 2, keeps=False)
    assert torch.equal(one[1], other[1])
    same(model)
