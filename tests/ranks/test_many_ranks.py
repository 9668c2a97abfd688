"""Eight and sixteen ranks, more than there are cores: few small tests of what is for many."""

import copy
import time

import pytest
import torch
from jobs import slowness
from models import adamw, bits, mlp, seeded, sgd
from ranks.test_comm import encode, look_for_the_same_bits, rows_of_all_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import batch, train_batches
from world import test_checkpoint, test_simulated

import daso
from daso.comm.allreduce.direct import deterministic_allreduce
from daso.comm.engine import Engine
from daso.errors import ExchangeError
from daso.kernels.codecs import codec_named
from daso.plan.allreduce_plan import AllReducePlan, Level, named_plan
from daso.train.deltas.shard import DeltaShard, MergeOptions

folder, store = test_checkpoint.folder, test_checkpoint.store
EIGHT, SIXTEEN = (1,) * 8, (1,) * 16
pytestmark = [pytest.mark.mpi, pytest.mark.nodes(EIGHT, (4, 4), SIXTEEN, (2,) * 8)]


@pytest.fixture
def engine():
    made = Engine(60.0, str)
    yield made
    made.close()


@pytest.mark.nodes(EIGHT, SIXTEEN)
@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_means_have_the_bits_of_one_process(topology, engine, wire):
    size = topology.world_size
    plans = [named_plan(name, size) for name in ("direct", "two-level", "halving", "ring")]
    plans.append(AllReducePlan((Level(size // 4), Level(2, "ring"), Level(2, "whole"))))
    for plan in plans:
        look_for_the_same_bits(topology, engine, codec_named(wire), plan, keeps=True)


@pytest.mark.nodes(EIGHT, SIXTEEN)
def test_a_mean_ends_alike_on_all_ranks_whoever_comes_late(topology, engine):
    """A rank that is behind by chunks gets what was meant for each of them."""
    size, rank = topology.world_size, topology.rank
    plan, x = named_plan("two-level", size), rows_of_all_ranks(size, 60_000)[rank]
    part, chunks = DeltaShard(torch.zeros(60_000), MergeOptions()), plan.chunks(60_000, 300)
    exchange = deterministic_allreduce(
        topology.world_comm, codec_named("int8"), [1] * size, size, {}, plan=plan
    )
    for turn in range(3):
        encode(part, exchange.codec, chunks, x, keeps=True)
        if rank == turn * (size - 1) // 2:
            time.sleep(0.2)
        engine.run(exchange.run(part, chunks))
        part.finish()
        assert topology.equal_on_all_ranks(part.reference.numpy().tobytes())


@pytest.mark.nodes(EIGHT)
@pytest.mark.parametrize("algorithm", ["two-level", "ring"])
def test_training_has_the_bits_of_simulated_nodes(topology, algorithm):
    policy = daso.Fixed(2, 1, warmup=3)
    test_simulated.test_they_have_the_same_bits(
        topology, adamw, policy, "int4", "int8", "delta", None, 2, algorithm
    )


def test_nodes_of_several_ranks_end_an_epoch_alike(topology):
    """Optimizer state is averaged over lanes: all ranks hold the same bits of it too."""
    model = seeded(mlp)()
    inner = adamw(model)
    with daso.DASO(
        inner, module=model, topology=topology, policy=daso.Fixed(3, 1, warmup=2)
    ) as optimizer:
        train_batches(optimizer, model, topology.rank, range(6))
        optimizer.synchronize(optimizer_state=True)
        moments = [state["exp_avg"].numpy().tobytes() for state in inner.state.values()]
        assert topology.equal_on_all_ranks((bits(model), moments))


@pytest.mark.nodes((4, 4), SIXTEEN)
def test_a_checkpoint_comes_back(store, rank_info):
    store.save(3, test_checkpoint.payload(rank_info, 3))
    test_checkpoint.assert_is(store.load(), rank_info, 3)


@pytest.mark.nodes(EIGHT, SIXTEEN)
def test_a_rank_that_stops_early_is_named_within_seconds(topology):
    model = seeded(mlp)()
    optimizer = daso.DASO(sgd(model), topology=topology, policy=daso.Fixed(1, 0))
    who, start = topology.world_size - 2, time.monotonic()
    with pytest.raises(ExchangeError, match=rf"rank {who} took 3"):
        train_batches(optimizer, model, topology.rank, range(3 if topology.rank == who else 5))
        optimizer.synchronize()
    assert time.monotonic() - start < 20 * slowness()
    optimizer.close()


@pytest.mark.nodes((4, 4))
@pytest.mark.usefixtures("world_group")
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_fsdp2_and_tensor_parallelism_on_two_axes_of_a_node(topology, rank_info, wire):
    """Pairs of ranks see the same batch; all end with the same bits, near those of one process."""
    policy = daso.Fixed(1, 0) if wire == "fp32" else daso.Fixed(3, 1)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("node", "dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh())
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire=wire)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.01)
    pair = rank_info.rank // 2
    for step in range(6):
        optimizer.zero_grad()
        model(batch(step, pair)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        sum(alone(batch(step, one)).square().mean() / 4 for one in range(4)).backward()
        plain.step()
    optimizer.synchronize()
    found = [p.full_tensor().detach() for p in model.parameters()]
    assert topology.equal_on_all_ranks([one.numpy().tobytes() for one in found])
    rows = optimizer._session.runner.deltas._rows_of(None)
    assert {row.sharding.copies for row in rows} == {1, 2}
    if wire == "fp32":
        for a, b in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-3, atol=1e-4)
    optimizer.close()
