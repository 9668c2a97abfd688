"""What is saved for backward lies in the neighbour's memory meanwhile, on every rank."""

import pytest
import torch
from plans import with_ways
from torch import nn

import daso
from daso.comm import topology as topologies
from daso.errors import ConfigError
from daso.memory.course import BOTH, KEEP, SWAP

pytestmark = pytest.mark.mpi


@pytest.fixture
def here(topology, monkeypatch):
    """Make the topology the one that is taken when none is given."""
    monkeypatch.setattr(topologies, "_default", {"": topology})
    return topology


def trained(rank, plan_with=None, second="host"):
    torch.manual_seed(rank)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.2))]
    model, x = nn.Sequential(*layers), torch.randn(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = daso.memory.plan(model, x, "1GiB", second=second)
    with daso.memory.apply(with_ways(plan, plan_with or KEEP)) as applied:
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    return [param.detach() for param in model.parameters()], applied.report()


@pytest.mark.parametrize("way", [SWAP, BOTH])
def test_training_is_the_same(here, way):
    rank = here.rank
    plain, _ = trained(rank)
    found, report = trained(rank, way, "neighbour:64MiB")
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    assert report.swapped_bytes > 0
    assert report.diverged == 0


def test_a_neighbour_memory_that_is_too_small_is_refused(here):
    with pytest.raises(ConfigError, match="the neighbour's has 4,096"):
        trained(here.rank, SWAP, "neighbour:4KiB")
