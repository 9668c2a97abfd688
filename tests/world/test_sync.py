"""The optimizer against one sequential program, bit for bit."""

import pytest
import torch
from compare import compare
from models import Odd, Wide, adam, adamw, batch_loss, flat_bytes, many, mlp, nesterov, seeded, sgd
from pairwise import pairwise
from sequential import Sequential
from training import train_batches

import daso


@pytest.mark.parametrize(
    ("make", "inner"), [(mlp, sgd), (mlp, adamw), (Odd, sgd), (Odd, adamw), (many, sgd)]
)
def test_synchronous_steps_equal_one_process_bit_for_bit(topology, make, inner):
    report = compare(topology, make, inner, daso.Fixed(1, 0), steps=4)
    if topology.nodes > 1:
        assert report["exchanges"] == 4


@pairwise(
    policy=[daso.Fixed(4, 1), daso.Fixed(3, 3), daso.Fixed(2, 0), daso.Fixed(1, 1)],
    wire=["fp32", "bf16"],
    merge=["daso", "delta"],
)
def test_skipping_equals_one_process_bit_for_bit(topology, policy, wire, merge):
    report = compare(topology, mlp, sgd, policy, wire=wire, merge=merge)
    assert report["exchanges"] >= (11 // policy.skip - 1 if topology.nodes > 1 else 0)


@pairwise(
    policy=[daso.Fixed(4, 1), daso.Fixed(3, 3), daso.Fixed(2, 0)],
    outer=[nesterov, adam],
    merge=["auto", "delta", 0.25],
    fragments=[1, 3],
)
def test_an_outer_optimizer_equals_one_process(topology, policy, outer, merge, fragments):
    options = {"merge": merge, "outer": outer, "fragments": fragments, "wire": "bf16"}
    compare(topology, mlp, sgd, policy, **options)


@pairwise(
    case=[(mlp, daso.Fixed(2, 2), 11), (Odd, daso.Fixed(3, 1, warmup=2), 9)],
    wire=["fp32", "bf16"],
    merge=["eager", "daso", 0.0, 1.0],
    fragments=[1, 2, 7],
)
def test_fragments_that_take_turns_equal_one_process(topology, case, wire, merge, fragments):
    make, policy, steps = case
    options = {"merge": merge, "fragments": fragments, "wire": wire}
    compare(topology, make, sgd, policy, **options, steps=steps)


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
            wire="bf16",  # blocks of int4 begin where chunks do
            exchange=daso.Exchange(algorithm="direct", chunk_bytes=chunk_bytes),
            gradients=daso.Gradients(bucket_bytes=bucket_bytes),
        ) as optimizer:
            train_batches(optimizer, model, topology.rank, range(6))
        return b"".join(flat_bytes(p) for p in model.parameters())

    for policy in (daso.Fixed(1, 0), daso.Fixed(2, 1)):
        assert run(size, max(size, 16), policy) == run(1 << 20, 1 << 20, policy)


@pytest.mark.parametrize("order", ["bucketed", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_iallreduce_stays_near_the_oracle_and_identical(topology, dtype, order):
    build = seeded(lambda: Wide() if dtype == torch.float64 else mlp())
    for policy in (daso.Fixed(1, 0), daso.Fixed(3, 1)):
        oracle = Sequential(build, sgd, batch_loss, topology.node_sizes, policy=policy, wire="fp32")
        model = build()
        with daso.DASO(
            sgd(model),
            module=model,
            topology=topology,
            policy=policy,
            wire="fp32",
            merge="daso",
            exchange=daso.Exchange(algorithm="mpi"),
            gradients=daso.Gradients(reducer=order),
        ) as optimizer:
            train_batches(optimizer, model, topology.rank, range(10))
        oracle.run(10)
        oracle.synchronize()
        for mine, theirs in zip(model.parameters(), oracle.params(0), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
        assert topology.equal_on_all_ranks(b"".join(flat_bytes(p) for p in model.parameters()))


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(4, 1)])
def test_one_rank_is_the_bare_optimizer_bit_for_bit(rank_info, topology, policy):
    if rank_info.world_size > 1:
        topology = daso.Topology(topology.world_comm.Split(rank_info.rank))  # a world of its own
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
