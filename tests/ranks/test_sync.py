"""The optimizer against one sequential program, bit for bit."""

from dataclasses import replace

import pytest
import torch
from sequential import Sequential
from torch import nn

import daso

pytestmark = pytest.mark.mpi

ORDERED = daso.Exchange(reduce="ordered", chunk_bytes=512)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def seeded(make):
    def build():
        torch.manual_seed(7)
        return make()

    return build


def mlp():
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


class Odd(nn.Module):
    """Everything that trips flat buffers at once."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-dim
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Linear(6, 3)
        self.always = nn.Linear(6, 3).double()
        self.coarse = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)
        self.big = nn.Parameter(torch.linspace(-0.1, 0.1, 3000))

    def forward(self, x, sometimes):
        h = self.tied(torch.relu(self.tied(self.frozen(x)))) * self.scale
        y = self.always(h.double()).float() * self.coarse.float() + self.big.sum()
        y = y + self.conv(h.view(-1, 2, 1, 3)).mean((2, 3))
        return y + self.sometimes(h) if sometimes else y


class Wide(nn.Module):
    """A model in fp64, of an odd number of numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.layer(x.double()) + self.bias


def batch_loss(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=generator)
    y = torch.randint(0, 3, (5,), generator=generator)
    if isinstance(model, Odd):
        return nn.functional.cross_entropy(model(x, sometimes=(rank + step) % 3 == 0), y)
    return nn.functional.cross_entropy(model(x), y)


def many():
    return nn.Sequential(nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(100)))


def assert_equal_to_oracle(model, oracle, node):
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    for name, mine, theirs in zip(
        names,
        [p for p in model.parameters() if p.requires_grad],
        oracle.params(node),
        strict=True,
    ):
        assert torch.equal(mine, theirs), f"{name}: {(mine - theirs).abs().max()}"


def compare(topology, make, make_inner, policy, *, steps=11, epochs=1, **options):
    """Run both for some steps; compare after every step and at the end."""
    options.setdefault("merge", "daso")
    build, gradients = seeded(make), options.pop("gradients", daso.Gradients(bucket_bytes=256))
    known = {name: value for name, value in options.items() if name != "memory"}
    oracle = Sequential(
        build, make_inner, batch_loss, topology.place.node_sizes, policy=policy, **known
    )
    model = build()
    varied = {name: options.pop(name) for name in ("fragments", "memory") if name in options}
    exchange = replace(ORDERED, **varied)
    settings = {"exchange": exchange, "gradients": gradients}
    with daso.DASO(
        make_inner(model), module=model, topology=topology, policy=policy, **settings, **options
    ) as optimizer:
        for epoch in range(epochs):
            for step in range(steps):
                optimizer.zero_grad()
                batch_loss(model, topology.place.rank, epoch * steps + step).backward()
                optimizer.step()
                optimizer.flush()
                oracle.run(1)
                assert_equal_to_oracle(model, oracle, topology.place.node)
            optimizer.end_epoch(1.0)
            oracle.end_epoch(1.0)
            assert_equal_to_oracle(model, oracle, topology.place.node)
        optimizer.synchronize()
        oracle.synchronize()
        assert_equal_to_oracle(model, oracle, topology.place.node)
        assert topology.same(b"".join(flat_bytes(p) for p in model.parameters()))
        return optimizer.report()


def flat_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


@pytest.mark.parametrize("make", [mlp, Odd, many])
@pytest.mark.parametrize("inner", [sgd, adamw])
def test_synchronous_steps_equal_one_process_bit_for_bit(topology, make, inner):
    if make is many and inner is adamw:
        inner = sgd
    report = compare(topology, make, inner, daso.Fixed(1, 0), steps=4)
    if topology.place.nodes > 1:
        assert report["exchanges"] == 4


@pytest.mark.parametrize("merge", ["daso", "delta"])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(("skip", "wait"), [(4, 1), (3, 3), (2, 0), (1, 1)])
def test_skipping_equals_one_process_bit_for_bit(topology, skip, wait, wire, merge):
    report = compare(topology, mlp, sgd, daso.Fixed(skip, wait), wire=wire, merge=merge)
    if topology.place.nodes > 1:
        assert report["exchanges"] >= 11 // skip - 1


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("merge", ["auto", "delta", 0.25])
@pytest.mark.parametrize("outer", [nesterov, adam])
@pytest.mark.parametrize(("skip", "wait"), [(4, 1), (3, 3), (2, 0)])
def test_an_outer_optimizer_equals_one_process(topology, skip, wait, outer, merge, fragments):
    options = {"merge": merge, "outer": outer, "fragments": fragments, "wire": "bf16"}
    compare(topology, mlp, sgd, daso.Fixed(skip, wait), **options)


@pytest.mark.parametrize("merge", ["eager", "daso", 0.0, 1.0])
@pytest.mark.parametrize("fragments", [1, 2, 7])
def test_fragments_that_take_turns_equal_one_process(topology, merge, fragments):
    for wire in ("fp32", "bf16"):
        options = {"merge": merge, "fragments": fragments, "wire": wire}
        compare(topology, mlp, sgd, daso.Fixed(2, 2), **options)
        compare(topology, Odd, sgd, daso.Fixed(3, 1, warmup=2), **options, steps=9)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_odd_parameters_skip_alike(topology, wire):
    compare(topology, Odd, sgd, daso.Fixed(3, 1, warmup=2), wire=wire, merge="delta", steps=9)


@pytest.mark.parametrize("merge", ["daso", "delta"])
def test_odd_parameters_drain_alike(topology, merge):
    """At the end of an epoch what is on its way arrives early; fp64 loses something in fp32."""
    policy = daso.Fixed(3, 1, warmup=2)
    compare(topology, Odd, sgd, policy, wire="fp32", merge=merge, steps=5, epochs=4)


def test_the_papers_phases_equal_one_process(topology):
    policy = daso.Plateau(6, warmup=1, cooldown=1, max_skip=4)
    report = compare(topology, mlp, adamw, policy, steps=5, epochs=6, wire="bf16")
    history = [(skip, wait) for _, skip, wait in report["skip_history"]]
    assert history == [(1, 0), (4, 1), (2, 1), (1, 0)]


@pytest.mark.parametrize("size", [1, 7, 256, 1 << 20])
def test_any_bucket_and_chunk_size_gives_the_same_bits(topology, size):
    def run(bucket_bytes, chunk_bytes, policy):
        model = seeded(mlp)()
        with daso.DASO(
            sgd(model),
            module=model,
            topology=topology,
            policy=policy,
            exchange=daso.Exchange(reduce="ordered", chunk_bytes=chunk_bytes),
            gradients=daso.Gradients(bucket_bytes=bucket_bytes),
        ) as optimizer:
            for step in range(6):
                optimizer.zero_grad()
                batch_loss(model, topology.place.rank, step).backward()
                optimizer.step()
        return b"".join(flat_bytes(p) for p in model.parameters())

    for policy in (daso.Fixed(1, 0), daso.Fixed(2, 1)):
        assert run(size, max(size, 16), policy) == run(1 << 20, 1 << 20, policy)


@pytest.mark.parametrize("order", ["buckets", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iallreduce_stays_near_the_oracle_and_identical(topology, dtype, order):
    build = seeded(lambda: Wide() if dtype == torch.float64 else mlp())
    for policy in (daso.Fixed(1, 0), daso.Fixed(3, 1)):
        oracle = Sequential(
            build, sgd, batch_loss, topology.place.node_sizes, policy=policy, wire="fp32"
        )
        model = build()
        with daso.DASO(
            sgd(model),
            module=model,
            topology=topology,
            policy=policy,
            wire="fp32",
            merge="daso",
            exchange=daso.Exchange(reduce="iallreduce"),
            gradients=daso.Gradients(order=order),
        ) as optimizer:
            for step in range(10):
                optimizer.zero_grad()
                batch_loss(model, topology.place.rank, step).backward()
                optimizer.step()
        oracle.run(10)
        oracle.synchronize()
        for mine, theirs in zip(model.parameters(), oracle.params(0), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert topology.same(b"".join(flat_bytes(p) for p in model.parameters()))


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(4, 1)])
def test_one_rank_is_the_bare_optimizer_bit_for_bit(place, topology, policy):
    if place.size > 1:
        topology = daso.Topology(topology.world.Split(place.rank))  # a world of its own
    bare, wrapped = seeded(mlp)(), seeded(mlp)()
    inner, optimizer = sgd(bare), daso.DASO(sgd(wrapped), topology=topology, policy=policy)
    for step in range(50):
        for model, stepping in ((bare, inner), (wrapped, optimizer)):
            stepping.zero_grad()
            batch_loss(model, 0, step).backward()
            stepping.step()
    for a, b in zip(bare.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(a, b)
    assert optimizer.report()["batches"] == 50
