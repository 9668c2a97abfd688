"""Ranks against simulated nodes, which equal the sequential oracle: pairs of all options."""

import pytest
import torch
from compare import ORDERED
from models import adam, adamw, batch_loss, mlp, nesterov, seeded, sgd
from pairwise import pairwise
from worlds import APART

import daso
from daso.plan.options import Settings
from daso.plan.policies import Replay
from daso.train.simulated.nodes import SimulatedNodes

# Small tensors go after batches 2, 4 and 6, everything after 9, the small ones after 12 and 14.
SELECTIVE = Replay(((0, 9, 2),), selective=1)


@pytest.mark.also_real
@pytest.mark.nodes(*APART)  # simulated nodes have one rank each
@pairwise(
    make=[sgd, adamw],
    policy=[
        daso.Fixed(1, 0),
        daso.Fixed(3, 1),
        daso.Fixed(2, 2, warmup=3),
        daso.Fixed(3, 0),
        daso.Plateau(2, warmup=1, cooldown=0),
    ],
    wire=["fp32", "bf16", "fp16", "int8", "int4", "int2", "topk"],
    gradient_wire=["fp32", "bf16", "int8", "int4"],
    merge=["daso", "delta", 0.5, "eager", "auto"],
    outer=[None, nesterov, adam],
    fragments=[1, 2, 3],
    algorithm=["direct", "two-level", "halving", "ring"],
    only=lambda wire, merge, **_: wire != "topk" or merge in ("delta", "eager", "auto"),
)
def test_they_have_the_same_bits(
    topology, make, policy, wire, gradient_wire, merge, outer, fragments, algorithm
):
    simulated, _ = compare(
        *(topology, make, policy, wire, gradient_wire, merge, outer, fragments, algorithm)
    )
    restored = make is adamw and outer is None and wire != "topk" and policy != daso.Fixed(1, 0)
    assert (simulated.state.gain > 1) == restored


@pytest.mark.also_real
@pytest.mark.nodes(*APART)
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("merge", ["auto", "daso", 0.5])
def test_small_tensors_alone_have_the_same_bits(topology, wire, merge):
    simulated, report = compare(
        topology, sgd, SELECTIVE, wire, "fp32", merge, None, 1, "direct", batches=14
    )
    sent = [(one["sent"], one["received"]) for one in simulated.events]
    assert sent == [(9, 11), (14, 14), (23, 25), (28, 28)]
    # The last of each epoch is received by its end.
    assert report["small_exchanges"] == 10
    assert report["small_tensors"] == "3 of 173 numbers alone, too"


@pytest.mark.nodes(*APART)
@pytest.mark.parametrize(
    ("make", "outer", "fragments"), [(adamw, None, 1), (sgd, nesterov, 1), (sgd, None, 2)]
)
def test_where_everything_is_measured_or_takes_turns_they_do_not_go_alone(
    topology, make, outer, fragments
):
    _, report = compare(
        topology, make, SELECTIVE, "bf16", "fp32", "auto", outer, fragments, "direct"
    )
    assert report["small_exchanges"] == 0
    assert report["small_tensors"] == "none"


def compare(
    topology,
    make,
    policy,
    wire,
    gradient_wire,
    merge,
    outer,
    fragments,
    algorithm,
    *,
    batches=6,
):
    """Train on ranks and on simulated nodes: parameters are the same after each epoch."""
    rank_info, build = topology.rank_info, seeded(mlp)
    exchange = daso.Exchange(
        algorithm=algorithm, chunk_bytes=ORDERED.chunk_bytes, fragments=fragments
    )
    gradients = daso.Gradients(wire=gradient_wire)
    settings = Settings(
        wire=wire,
        merge=merge,
        exchange=exchange,
        gradients=gradients,
        outer=outer is not None,
        selective=getattr(policy, "selective", None),
    )
    simulated = SimulatedNodes(
        build, make, rank_info.world_size, policy=policy, settings=settings, outer=outer
    )
    model = build()
    options = {"wire": wire, "merge": merge, "outer": outer}
    options |= {"exchange": exchange, "gradients": gradients}
    with daso.DASO(
        make(model), module=model, topology=topology, policy=policy, **options
    ) as optimizer:
        for epoch in range(2):
            for step in range(batches * epoch, batches * (epoch + 1)):
                optimizer.zero_grad()
                batch_loss(model, rank_info.rank, step).backward()
                optimizer.step()
                simulated.step(
                    [
                        lambda m, r=rank, s=step: batch_loss(m, r, s)
                        for rank in range(rank_info.world_size)
                    ]
                )
            optimizer.end_epoch(1.0)
            simulated.end_epoch(1.0)
            theirs = simulated.models[rank_info.rank].parameters()
            assert all(map(torch.equal, model.parameters(), theirs))
            assert optimizer.report()["gain"] == simulated.state.gain
        return simulated, optimizer.report()
