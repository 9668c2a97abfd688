"""Simulated nodes against the sequential oracle, bit for bit: the whole product of options."""

import itertools

import pytest
import torch
from models import adam, adamw, batch_loss, mlp, nesterov, seeded, sgd
from pairwise import pairwise
from sequential import Sequential

import daso
from daso.plan.options import Settings
from daso.plan.policies import Replay
from daso.train.simulated.nodes import SimulatedNodes, Times

SELECTIVE = Replay(((0, 9, 2),), selective=1)
POLICIES = [
    *(daso.Fixed(1, 0), daso.Fixed(3, 1), daso.Fixed(2, 2, warmup=3), daso.Fixed(3, 0)),
    SELECTIVE,
]
MERGES = ["daso", "delta", 0.5, "eager", "auto"]
OUTERS = [None, nesterov, adam]


def assert_equal(nodes, policy, wire, merge, outer, fragments):
    batches = 14 if policy is SELECTIVE else 6
    settings = Settings(
        wire=wire,
        merge=merge,
        exchange=daso.Exchange(fragments=fragments),
        gradients=daso.Gradients(),
        outer=outer is not None,
        selective=policy.selective if policy is SELECTIVE else None,
    )
    build = seeded(mlp)
    simulated = SimulatedNodes(build, sgd, nodes, policy=policy, settings=settings, outer=outer)
    options = {"wire": wire, "merge": merge, "outer": outer, "fragments": fragments}
    oracle = Sequential(build, sgd, batch_loss, [1] * nodes, policy=policy, **options)
    for epoch in range(2):
        for step in range(batches * epoch, batches * (epoch + 1)):
            simulated.step([lambda m, r=rank, s=step: batch_loss(m, r, s) for rank in range(nodes)])
            oracle.run(1)
        simulated.end_epoch(1.0)
        oracle.end_epoch(1.0)
        for node in range(nodes):
            mine = simulated.models[node].parameters()
            assert all(map(torch.equal, mine, oracle.params(node))), (policy, wire, options)
    assert (simulated.state.small.last > 0) == bool(oracle.small)


@pytest.mark.later("every pair of options is below")
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_three_nodes_are_the_oracle_with_all_options(policy, wire):
    for merge, outer, fragments in itertools.product(MERGES, OUTERS, (1, 2, 3)):
        assert_equal(3, policy, wire, merge, outer, fragments)


@pairwise(
    nodes=[2, 3, 16],
    policy=POLICIES,
    wire=["fp32", "bf16"],
    merge=MERGES,
    outer=OUTERS,
    fragments=[1, 2, 3],
)
def test_nodes_are_the_oracle_with_every_pair_of_options(
    nodes, policy, wire, merge, outer, fragments
):
    assert_equal(nodes, policy, wire, merge, outer, fragments)


def test_gradient_seconds_are_estimated_from_parts():
    settings = Settings(
        wire="int4",
        merge="auto",
        exchange=daso.Exchange(fragments=2),
        gradients=daso.Gradients(),
        outer=False,
    )
    times = Times(1.0, exchange_seconds=0.25, own_seconds=0.125)
    nodes = SimulatedNodes(
        seeded(mlp), adamw, 2, policy=daso.Fixed(1, 1), settings=settings, times=times
    )
    for step in range(5):
        nodes.step([lambda m, r=rank, s=step: batch_loss(m, r, s) for rank in range(2)])
    nodes.end_epoch(1.0)
    nodes.step([lambda m, r=rank: batch_loss(m, r, 5) for rank in range(2)])
    nodes.step([lambda m, r=rank: batch_loss(m, r, 6) for rank in range(2)])
    first, *parts, everything = nodes.events  # each tells of the exchange before
    weights, others = 6 * 17, 17 + 17 * 3 + 3
    whole = weights + others
    assert (first["exchange_seconds"], first["gradient_seconds"]) == (0.0, 0.0)
    assert sorted({one["gradient_seconds"] for one in parts}) == pytest.approx(
        [0.25 * whole / weights, 0.25 * whole / others]
    )
    assert {(one["exchange_seconds"], one["own_seconds"]) for one in parts} == {(0.25, 0.125)}
    found = everything["exchange_seconds"], everything["own_seconds"]
    assert (*found, everything["gradient_seconds"]) == (0.5, 0.25, 0.0)
