"""What a step costs the training thread does not grow with the number of ranks (invariant 13).

What still grows, and why it may:
- beside steps: `Channels.gather` (8 bytes a rank) for the mean loss of an epoch, which all ranks
  add in one order, and `Topology.rendezvous` (8 bytes a rank), which names who came elsewhere;
- when something is made: the table of nodes, hosts' names, options and errors of all ranks;
- when ranks are missing: whoever gives up asks all others, once, as its last act.
"""

import statistics
import time

import pytest
import torch
from local_world import calls_of, run_ranks
from mirror_world import mirrored

import daso

STEPS = 60
MOST_SECONDS = 50e-6  # that 4,096 ranks may add to a step


def steps(optimizer, model):
    """Return the seconds of each of some steps, gradients included."""
    seconds, x = [], torch.ones(2, 4)
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


def trained(nodes, ranks_per_node, policy):
    topology = mirrored(nodes, ranks_per_node)
    assert topology.rank_info.node_sizes == (ranks_per_node,) * nodes
    model = torch.nn.Linear(4, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-6)
    return daso.DASO(inner, module=model, topology=topology, policy=policy), model


@pytest.mark.parametrize(
    "ranks_per_node", [1, pytest.param(4, marks=pytest.mark.later("1,024 nodes, after 4,096"))]
)
def test_a_step_among_4096_ranks_takes_no_longer_than_among_a_few(ranks_per_node):
    policy = daso.Fixed(skip=1_000_000)

    def measure(_):
        few, many = (
            trained(nodes, ranks_per_node, policy) for nodes in (2, 4096 // ranks_per_node)
        )
        for pair in (few, many):
            steps(*pair)
        taken = [[], []]
        for _ in range(50):  # where the machine is busy, few rounds are not disturbed
            for seconds, pair in zip(taken, (few, many), strict=True):
                seconds.append(statistics.median(steps(*pair)))
            if min(taken[1]) - min(taken[0]) <= MOST_SECONDS and len(taken[0]) >= 5:
                break
        for optimizer, _ in (few, many):
            optimizer.close()
        return min(taken[1]) - min(taken[0])

    (added,) = run_ranks(1, measure)
    assert added <= MOST_SECONDS


def test_rank_tables_are_counted_once():
    (sizes,) = run_ranks(1, lambda _: mirrored(3, 2).rank_info)
    assert (sizes.nodes, sizes.local_size, sizes.lanes, sizes.largest_node) == (3, 2, 2, 2)
    assert sizes.node_sizes is sizes.node_sizes


def calls_of_a_start(ranks, ranks_per_node):
    """Return the most collectives and sends of a rank, up to the end of its first step."""

    def start(world):
        topology = daso.Topology(world, ranks_per_node=ranks_per_node)
        torch.manual_seed(world.Get_rank())
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        policy = daso.Fixed(4, 1)
        with daso.DASO(inner, module=model, topology=topology, policy=policy) as optimizer:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            return calls_of(world.Get_rank())

    return max(run_ranks(ranks, start))


def test_a_start_takes_as_many_calls_of_each_rank_among_16_as_among_4():
    assert calls_of_a_start(4, 1) == calls_of_a_start(16, 1) <= 96


@pytest.mark.later("64 ranks in one process")
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "probes"),
    [(64, 4, 0), (18, 1, 21)],  # links are probed from 17
)
def test_a_start_of_many_ranks_takes_few_more_calls(ranks, ranks_per_node, probes):
    few = calls_of_a_start(4 * ranks_per_node, ranks_per_node)
    assert calls_of_a_start(ranks, ranks_per_node) == few + probes
