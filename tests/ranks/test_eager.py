"""The eager server: one process, bit for bit, where all go together; replayed where none waits."""

import time
from dataclasses import replace

import pytest
import torch
from ranks.test_sync import Odd, adamw, batch_loss, mlp, seeded
from sequential import add

import daso
from daso.comm.topology import Topology
from daso.plan.eager import Plan
from daso.train.replay import replay

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def topology():
    """Nodes make no difference here: one way to cut the world is enough."""
    made = Topology()
    yield made
    made.free()


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)


def sequential(build, make, ranks, steps, mode, rates=None):
    """Take synchronous steps in one process, in the most obvious way."""
    models = [build() for _ in range(ranks)]  # of which buffers differ
    stands = {"owner": 1, "block": ranks, "replica": ranks}[mode]
    masters = [build() for _ in range(stands)]
    inners = [make([p for p in m.parameters() if p.requires_grad]) for m in masters]
    current = [p.detach().clone() for p in masters[0].parameters() if p.requires_grad]
    for step in range(steps):
        grads = []
        for rank, model in enumerate(models):
            params = [p for p in model.parameters() if p.requires_grad]
            for p, value in zip(params, current, strict=True):
                p.data.copy_(value)
                p.grad = None
            batch_loss(model, rank, step).backward()
            grads.append([p.grad for p in params])
        results = []
        for stand, (master, inner) in enumerate(zip(masters, inners, strict=True)):
            params = [p for p in master.parameters() if p.requires_grad]
            for at, p in enumerate(params):
                p.data.copy_(current[at])
                chosen = [one[at] for one in grads] if mode == "owner" else [grads[stand][at]]
                there = [g for g in chosen if g is not None]
                total = None
                for g in there:
                    total = add(total, g)
                p.grad = None if total is None else (total / len(chosen)).to(p.dtype)
            for group in inner.param_groups:
                group["lr"] = group["lr"] if rates is None else rates(step)
            inner.step()
            results.append([p.detach().clone() for p in params])
        current = [joined(mode, [one[at] for one in results]) for at in range(len(current))]
    return current


def joined(mode, versions):
    if mode == "owner":
        return versions[0]
    if mode == "replica":
        total = None
        for version in versions:
            total = add(total, version)
        return (total / len(versions)).to(versions[0].dtype)
    rows = [v if v.ndim else v.unsqueeze(0) for v in versions]
    out, count = rows[0].clone(), len(rows)
    size, longer = divmod(len(out), count)
    at = 0
    for rank, one in enumerate(rows):
        until = at + size + (rank < longer)
        out[at:until] = one[at:until]
        at = until
    return out.view(versions[0].shape)


def train(topology, build, make, steps=5, each=None, **how):
    model = seeded(build)()
    rank = topology.place.rank
    with daso.EagerServer(model, make, topology=topology, **how) as server:
        for step in range(steps):
            if each is not None:
                each(server, step)
            server.zero_grad()
            batch_loss(model, rank, step).backward()
            server.step()
        server.synchronize()
        return model, server.report(), server.logged()


def params(model):
    return [p.detach() for p in model.parameters() if p.requires_grad]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("every", [1, 2, 100, "auto"])
@pytest.mark.parametrize("packet_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(("build", "make"), [(mlp, adamw), (Odd, sgd)])
def test_without_staleness_every_step_equals_one_process(
    topology, build, make, every, packet_bytes
):
    if packet_bytes == 1 and (every != 1 or build is Odd):
        packet_bytes = 33
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else sgd
    model, report, _ = train(topology, build, make_flat, every=every, packet_bytes=packet_bytes)
    expected = sequential(seeded(build), make_flat, topology.place.size, 5, "owner")
    assert same(params(model), expected)
    assert report["steps"] == 5
    assert report["bytes_sent"] == 0 or topology.place.size > 1


@pytest.mark.parametrize("mode", ["block", "replica"])
@pytest.mark.parametrize(("build", "make"), [(mlp, sgd), (Odd, sgd)])
def test_other_modes_equal_one_process_too(topology, build, make, mode):
    model, *_ = train(topology, build, make, mode=mode, every=1)
    assert same(params(model), sequential(seeded(build), make, topology.place.size, 5, mode))


def test_all_ranks_end_with_the_same_bits(topology):
    model, *_ = train(topology, Odd, sgd, staleness=None)
    everyones = topology.world.allgather([t.clone() for t in model.state_dict().values()])
    assert all(same(one, everyones[0]) for one in everyones)


def test_learning_rates_are_those_of_each_step(topology):
    def rates(step):
        return 0.1 / (1 + step)

    def each(server, step):
        server.param_groups[0]["lr"] = rates(step)

    model, *_ = train(topology, mlp, sgd, each=each)
    assert same(params(model), sequential(seeded(mlp), sgd, topology.place.size, 5, "owner", rates))


def uneven(server, step):
    """Ranks take different times, and not the same in every step."""
    time.sleep(0.002 * ((server._serving.rank * 7 + step * 3) % 5))


@pytest.mark.parametrize("mode", ["owner", "block", "replica"])
@pytest.mark.parametrize("staleness", [0, 1, 4, None])
@pytest.mark.parametrize(("build", "make"), [(mlp, adamw), (Odd, sgd)])
def test_a_replay_gives_the_same_bits(topology, build, make, staleness, mode):
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else sgd
    how = {"mode": mode, "staleness": staleness}
    for damped in {False, mode == "owner" and staleness != 0}:
        model, report, log = train(
            topology, build, make_flat, steps=8, each=uneven, log=True, damped=damped, **how
        )
        logs = topology.world.allgather(log)

        def backward(one, rank, step):
            batch_loss(one, rank, step).backward()

        plan = replace(PLAN, damped=damped, **how)
        found = replay(logs, seeded(build), make_flat, backward, plan=plan)
        assert same(params(found.model), params(model))
        total = sum(topology.world.allgather(report["updates"]))
        assert found.versions == total > 0
        if staleness is not None:
            assert found.oldest <= staleness


PLAN = Plan(
    mode="owner",
    staleness=0,
    every="auto",
    damped=False,
    log=True,
    packet_bytes=1 << 18,
    stall_seconds=60.0,
)
