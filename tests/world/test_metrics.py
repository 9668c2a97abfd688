"""Means of metrics, and lines of rank 0, in a program's own loop."""

import pickle

import pytest
import torch

from daso.comm import control
from daso.errors import ConfigError, ExchangeError

pytestmark = pytest.mark.nodes((2, 1), (1, 1))


@pytest.mark.parametrize(
    ("op", "number", "tensor"),
    [
        ("mean", lambda n: (n + 1) / 2, lambda n: (n + 1) / 2),
        ("sum", lambda n: n * (n + 1) // 2, lambda n: n * (n + 1) / 2),
        ("min", lambda n: 1, lambda n: 1.0),
        ("max", lambda n: n, float),
    ],
)
def test_every_rank_gets_the_value_of_all(topology, op, number, tensor):
    mine, ranks = topology.rank + 1, topology.world_size
    assert topology.all_reduce(mine, op) == number(ranks)
    row = torch.tensor([float(mine), 0.0], requires_grad=True)
    reduced = topology.all_reduce(row, op)
    assert reduced.tolist() == [tensor(ranks), 0.0]
    assert row.tolist() == [mine, 0.0]
    assert not reduced.requires_grad


def test_sums_have_the_same_bits_on_all_ranks(topology):
    number = 0.1 * 3**topology.rank
    assert topology.equal_on_all_ranks(topology.all_reduce(number, "sum"))


def test_whole_numbers_stay_exact(topology):
    assert topology.all_reduce(2**60 + 1, "max") == 2**60 + 1


def test_a_value_of_another_kind_on_one_rank_is_refused_on_all(topology):
    value = torch.zeros(2 + (topology.rank == 1))
    with pytest.raises(ConfigError, match=r"rank 0 asked for the mean of a tensor of \(2,\)"):
        topology.all_reduce(value)
    problem = "x" if topology.rank == 1 else 1.0
    with pytest.raises(ConfigError, match="rank 1: a value must be a number or a tensor, not 'x'"):
        topology.all_reduce(problem)
    with pytest.raises(ConfigError, match="op must be one of mean, sum, min, max, not 'avg'"):
        topology.all_reduce(1.0, "avg")


def test_other_operations_and_meetings_are_refused_on_all(topology):
    op = "sum" if topology.rank == 1 else "mean"
    with pytest.raises(ConfigError, match="the mean of a number and rank 1 for the sum"):
        topology.all_reduce(1.0, op)
    with pytest.raises(ExchangeError, match="all ranks must reach the same operation"):
        topology.barrier() if topology.rank == 1 else topology.all_reduce(1.0)


def test_a_view_is_sent_without_the_memory_behind_it(topology, monkeypatch):
    rows = torch.zeros(1000, 1000)
    sizes = []
    gather = control.gather

    def measured(ranks, value, *rest):
        sizes.append(len(pickle.dumps(value)))
        return gather(ranks, value, *rest)

    monkeypatch.setattr(control, "gather", measured)
    assert topology.all_reduce(rows[0]).shape == (1000,)
    assert max(sizes) < 10_000


def test_rank_0_prints_alone(topology, capsys):
    topology.barrier()
    topology.print("epoch", 3, sep="=")
    topology.barrier()
    if topology.rank == 0:
        assert "epoch=3\n" in capsys.readouterr().out
