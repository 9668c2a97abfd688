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
from local_world import run_ranks
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
