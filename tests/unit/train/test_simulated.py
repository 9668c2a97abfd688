"""Simulated nodes against the sequential program, bit for bit: as real ranks are in tests/ranks."""

import pytest
import torch
from sequential import Sequential
from torch import nn

import daso
from daso.plan.options import Settings
from daso.train.simulated import SimulatedNodes


def build():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def batch_loss(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=generator)
    y = torch.randint(0, 3, (5,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.parametrize("nodes", [3, 16])
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("merge", "outer", "fragments"),
    [
        ("daso", None, 1),
        ("delta", None, 2),
        (0.5, None, 3),
        ("eager", None, 1),
        ("auto", nesterov, 2),
    ],
)
@pytest.mark.parametrize(
    "policy", [daso.Fixed(1, 0), daso.Fixed(3, 1), daso.Fixed(2, 2, warmup=3)], ids=repr
)
def test_they_are_the_sequential_program(nodes, policy, wire, merge, outer, fragments):
    exchange = daso.Exchange(fragments=fragments)
    settings = Settings(
        wire=wire,
        merge=merge,
        exchange=exchange,
        gradients=daso.Gradients(),
        outer=outer is not None,
    )
    simulated = SimulatedNodes(build, sgd, nodes, policy=policy, settings=settings, outer=outer)
    options = {"wire": wire, "merge": merge, "outer": outer, "fragments": fragments}
    oracle = Sequential(build, sgd, batch_loss, [1] * nodes, policy=policy, **options)
    for epoch in range(2):
        for step in range(6 * epoch, 6 * epoch + 6):
            simulated.step([lambda m, r=rank, s=step: batch_loss(m, r, s) for rank in range(nodes)])
            oracle.run(1)
        simulated.end_epoch(1.0)
        oracle.end_epoch(1.0)
        for node in range(nodes):
            mine = simulated.models[node].parameters()
            assert all(map(torch.equal, mine, oracle.params(node)))
