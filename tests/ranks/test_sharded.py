"""Models that are sharded inside a node by FSDP2 or tensor parallelism, averaged between nodes."""

import itertools
import logging
import warnings
from contextlib import nullcontext

import pytest
import torch
from doors import DOORS, bits
from expected_errors import raises
from models import Stays
from torch import nn
from torch.distributed import checkpoint, new_group
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from training import adamw, batch, train

import daso
from daso.comm.process_group import node_mesh
from daso.errors import ConfigError, LayoutError
from daso.plan.policies import Replay

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("world_group")]
SHARDED = [(2, 2)]
POLICIES = [
    *(daso.Fixed(1, 0), daso.Fixed(2, 0), daso.Fixed(3, 1), daso.Fixed(3, 2, warmup=2)),
    Replay(((0, 9, 2),), selective=1),  # the last bias alone after 2, 4 and 6
]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def network(seed=0):
    """Sizes that two ranks cannot halve, one tensor of which the second rank holds nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def sharded(model, topology, **keywords):
    mesh = node_mesh(topology, "cpu")["local"]
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **keywords)
    return fully_shard(model, mesh=mesh, **keywords)


def whole(model):
    """Return all parameters, gathered over the node."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def trained(topology, model, steps=8, **keywords):
    """Return the parameters' bits after a training, and the report."""
    params, report = trained_values(topology, model, steps, **keywords)
    return bits(params), report


def trained_values(topology, model, steps=8, **keywords):
    """Return the parameters after a training, and the report."""
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = daso.DASO(inner, module=model, topology=topology, **keywords)
    train(optimizer, model, topology.rank, steps)
    optimizer.synchronize()
    report = optimizer.report()
    optimizer.close()
    return [one.clone() for one in whole(model)], report


@pytest.mark.nodes((2, 2), (1, 1))
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_shards_are_trained_to_the_bits_of_the_whole_model(topology, policy, wire):
    keywords = {"policy": policy, "wire": wire}
    expected, _ = trained(topology, network(), **keywords)
    found, _ = trained(topology, sharded(network(), topology), **keywords)
    assert found == expected
    assert topology.equal_on_all_ranks(found)


@pytest.mark.nodes(*SHARDED)
def test_what_is_exposed_of_synchronous_steps_is_measured(topology):
    model = sharded(network(), topology)
    with daso.DASO(adamw(model), module=model, topology=topology, policy=Stays()) as optimizer:
        train(optimizer, model, topology.rank, 51)
        told = [one for one in optimizer.report()["events"] if one["kind"] == "measured"]
    assert told[-1]["batch"] == 40
    assert told[-1]["exposed_seconds"] > 0


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("merge", ["daso", "delta", "eager", 0.3])
def test_every_merge_takes_shards(topology, merge):
    keywords = {"policy": daso.Fixed(3, 1), "merge": merge, "wire": "fp32"}
    expected, _ = trained(topology, network(), **keywords)
    assert trained(topology, sharded(network(), topology), **keywords)[0] == expected


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize(
    "keywords",
    [
        {"wire": "int4"},
        {"wire": "topk"},
        {"exchange": daso.Exchange(fragments=2)},
        {"outer": lambda p: torch.optim.SGD(p, 0.7, 0.9, nesterov=True), "wire": "bf16"},
        {"exchange": daso.Exchange(algorithm="mpi"), "wire": "fp32"},
        {"policy": daso.Fixed(1, 0), "gradients": daso.Gradients(wire="int8")},
    ],
    ids=str,
)
def test_other_ways_leave_all_ranks_with_the_same(topology, keywords):
    """Blocks of narrow wires lie elsewhere in shards: not the bits of the whole model."""
    keywords = {"policy": daso.Fixed(3, 1)} | keywords
    found, report = trained_values(topology, sharded(network(), topology), steps=12, **keywords)
    near, _ = trained_values(topology, network(), steps=12, **keywords)
    assert topology.equal_on_all_ranks(bits(found))
    assert report["exchanges"] >= 4
    for a, b in zip(found, near, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@pytest.mark.nodes(*SHARDED)
def test_nodes_start_from_the_first_ones_shards(topology, rank_info):
    model = sharded(network(seed=rank_info.node), topology)
    optimizer = daso.DASO(adamw(model), module=model, topology=topology)
    assert bits(whole(model)) == bits(whole(network(seed=0)))
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
def test_a_rank_holds_half_of_all_that_training_needs(topology):
    """Parameters, gradients, moments; reference, what is shown, and what crosses in bf16."""
    small, large = (bytes_of_training(topology, width) for width in (16384, 32768))
    user, ours = (
        (b - a) / (large[0] - small[0]) for a, b in zip(small[1:], large[1:], strict=True)
    )
    assert user == pytest.approx(16 / 2, rel=0.01)
    assert ours == pytest.approx((4 + 4 + 2) / 2, rel=0.01)


def bytes_of_training(topology, width):
    """Return the parameters of a model, and the bytes that a rank holds: the user's, and ours."""
    from benchmarks.growth_memory import held

    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64))
    numel = sum(p.numel() for p in model.parameters())
    model = sharded(model, topology)
    inner = adamw(model)
    policy = daso.Fixed(2, 1)
    optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire="bf16")
    for step in range(5):
        optimizer.zero_grad()
        model(batch(step, topology.rank).repeat(1, 16)).square().mean().backward()
        optimizer.step()
    moments = [one for state in inner.state.values() for one in state.values()]
    parts = [*model.parameters(), *(p.grad for p in model.parameters()), *moments]
    users = [one._local_tensor for one in parts if isinstance(one, DTensor)]
    ours = held(optimizer, users, local_rank=0)  # of one that shares with nobody
    optimizer.close()
    return numel, sum(one.nbytes for one in users), sum(ours.values())


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(3, 1)], ids=repr)
@pytest.mark.parametrize(
    "keywords",
    [
        {"reshard_after_forward": False},
        {"mp_policy": BF16},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=lambda one: next(iter(one)),
)
def test_policies_of_fsdp2(topology, policy, keywords):
    model = sharded(network(), topology, **keywords)
    found, report = trained_values(topology, model, policy=policy, wire="fp32")
    expected, _ = trained_values(topology, network(), policy=policy, wire="fp32")
    assert topology.equal_on_all_ranks(bits(found))
    assert report["dropped"] == 0
    if "mp_policy" not in keywords:
        assert bits(found) == bits(expected)
        return
    for a, b in zip(found, expected, strict=True):  # a forward in bf16
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=repr)
def test_gradients_pile_up_and_are_clipped_as_on_the_whole_model(topology, policy):
    def run(model):
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire="fp32")
        for step in range(4):
            optimizer.zero_grad()
            for half in range(2):
                last = half == 1
                if isinstance(next(iter(model.parameters())), DTensor):
                    model.set_requires_gradient_sync(last)
                x = batch(2 * step + half, topology.rank)
                with optimizer.no_sync() if not last else nullcontext():
                    model(x).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        optimizer.synchronize()
        optimizer.close()
        return [*whole(model), norm.full_tensor() if isinstance(norm, DTensor) else norm]

    found, expected = run(sharded(network(), topology)), run(network())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)  # norms are added in another order


@pytest.mark.nodes(*SHARDED)
def test_a_sharded_teacher_is_the_mean_of_the_nodes(topology, rank_info):
    model = sharded(network(), topology)
    model[0].requires_grad_(False)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(2, 1)) as optimizer:
        train(optimizer, model, rank_info.rank, 3)
        teacher = model[0].weight.to_local()
        with torch.no_grad():
            teacher.add_(rank_info.node + 1)
        mine = teacher.clone()
        with optimizer.averaged():
            torch.testing.assert_close(teacher, mine - rank_info.node + 0.5)
        assert torch.equal(teacher, mine)
        optimizer.synchronize()
        torch.testing.assert_close(teacher, mine - rank_info.node + 0.5)


@pytest.mark.nodes(*SHARDED)
def test_frozen_layers_stay(topology):
    def make(seed=0):
        model = network(seed)
        model[0].requires_grad_(False)
        return model

    model = sharded(make(topology.node), topology)
    first = bits(make().state_dict()["0.weight"])
    optimizer = daso.DASO(
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        module=model,
        topology=topology,
        policy=daso.Fixed(2, 1),
    )
    train(optimizer, model, topology.rank, 5)
    optimizer.synchronize()
    assert bits(model[0].weight.full_tensor()) == first
    assert topology.equal_on_all_ranks(bits(whole(model)))
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
def test_one_shard_that_is_not_finite_sets_its_node_back(topology, rank_info, caplog):
    model = sharded(network(), topology)
    optimizer = daso.DASO(
        adamw(model), module=model, topology=topology, policy=daso.Fixed(2, 0), wire="bf16"
    )
    train(optimizer, model, topology.rank, 2)
    if rank_info.rank == 3:
        with torch.no_grad():
            model[2].weight._local_tensor[0, 3] = float("nan")
    with caplog.at_level(logging.WARNING):
        # The node's forward sees the NaN, and so do all its gradients.
        train(optimizer, model, topology.rank, 2, first=2)
    optimizer.synchronize()
    assert all(bool(p.isfinite().all()) for p in whole(model))
    assert topology.equal_on_all_ranks(bits(whole(model)))
    assert optimizer.report()["dropped"] == 1
    if rank_info.rank == 0:
        assert "is not finite; this exchange is dropped" in caplog.text
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
def test_step_with_a_nonfinite_shard_is_dropped_by_all(topology, rank_info, caplog):
    model = sharded(network(), topology)
    policy = daso.Fixed(1, 0)
    optimizer = daso.DASO(adamw(model), module=model, topology=topology, policy=policy)
    train(optimizer, model, topology.rank, 2)
    before = bits(whole(model))
    optimizer.zero_grad()
    model(batch(2, topology.rank)).square().mean().backward()
    if rank_info.local_rank == 1:  # the mean of a lane, as an overflow on one shard would make it
        model[2].weight.grad._local_tensor[0, 3] = float("inf")
    optimizer.step()
    assert bits(whole(model)) == before
    assert {int(one["step"]) for one in optimizer.state.values()} == {2}
    assert optimizer.report()["dropped"] == 1
    if rank_info.rank == 0:
        assert "the mean gradient of 2.weight is not finite" in caplog.text
    train(optimizer, model, topology.rank, 2, first=3)
    assert topology.equal_on_all_ranks(bits(whole(model)))
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
@pytest.mark.parametrize("policy", [daso.Fixed(4, 2), daso.Fixed(1, 0)], ids=repr)
def test_a_training_goes_on_to_the_same_bits(door, topology, rank_info, shared_folder, policy):
    path = shared_folder / f"rank {rank_info.rank}"
    keywords = {"topology": topology, "policy": policy, "wire": "bf16"}
    model = sharded(network(), topology)
    with door(adamw(model), module=model, **keywords) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 5)  # an exchange is on its way
        torch.save([model.state_dict(), optimizer.state_dict()], path)
        train(optimizer, model, rank_info.rank, 4, first=5)
        handle.synchronize()
        expected = bits(whole(model))
    again = sharded(network(seed=1), topology)
    with door(adamw(again), module=again, **keywords) as (optimizer, handle):
        of_model, of_optimizer = torch.load(path, weights_only=False)
        again.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        train(optimizer, again, rank_info.rank, 4, first=5)
        handle.synchronize()
        assert bits(whole(again)) == expected


@pytest.mark.nodes(*SHARDED)
def test_one_copy_is_saved_and_loaded_over_other_ranks(topology, rank_info, shared_folder):
    model = sharded(network(), topology)
    optimizer = daso.DASO(
        adamw(model), module=model, topology=topology, policy=daso.Fixed(4, 2), wire="bf16"
    )
    train(optimizer, model, rank_info.rank, 5)
    with raises("saved-between-exchanges"):
        get_state_dict(model, optimizer)
    optimizer.synchronize(optimizer_state=True)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(states, checkpoint_id=shared_folder / "copy")
    expected = bits(whole(model))
    moments = bits([s["exp_avg"].full_tensor() for s in optimizer.state.values()])
    optimizer.close()
    # Over all four ranks as one node: FSDP2 alone.
    mesh = init_device_mesh("cpu", (4,))
    alone = fully_shard(network(seed=1), mesh=mesh)
    inner = adamw(alone)
    target = dict(zip(("model", "optimizer"), get_state_dict(alone, inner), strict=True))
    checkpoint.load(target, checkpoint_id=shared_folder / "copy")
    set_state_dict(
        alone, inner, model_state_dict=target["model"], optim_state_dict=target["optimizer"]
    )
    assert bits(whole(alone)) == expected
    assert bits([s["exp_avg"].full_tensor() for s in inner.state.values()]) == moments


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(3, 1)], ids=repr)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_tensor_parallelism_in_a_node(topology, rank_info, policy, wire):
    """Ranks of a node see the same batch; the last layer is plain, and a copy on each of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 1))
    mesh = node_mesh(topology, "cpu")["local"]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = daso.DASO(adamw(model), module=model, topology=topology, policy=policy, wire=wire)
    train(optimizer, model, rank_info.node, 7)
    if not optimizer.report()["in_flight"]:
        copies = topology.node_comm.allgather(bits(model[3].weight))
        assert copies[0] == copies[1]
    optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(whole(model)))
    if policy == daso.Fixed(1, 0) and wire == "fp32":
        expected = plain_over_nodes(rank_info.nodes)
        for a, b in zip(whole(model), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    optimizer.close()


def plain_over_nodes(nodes):
    """Return what one process trains on the batches of all nodes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 1))
    optimizer = adamw(model)
    for step in range(7):
        optimizer.zero_grad()
        losses = [model(batch(step, node)).square().mean() for node in range(nodes)]
        (sum(losses) / nodes).backward()
        optimizer.step()
    return whole(model)


class Embedded(nn.Module):
    """An embedding that is split by rows, and a norm between layers that are split by sequence."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, tokens):
        return self.last(self.norm(self.embedding(tokens)))


def tokens(step, node):
    return torch.randint(7, (4, 2), generator=torch.Generator().manual_seed(31 * step + node))


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(3, 1)], ids=repr)
def test_gradients_that_are_spread_otherwise_than_their_parameters(topology, rank_info, policy):
    def run(model, nodes, optimizer):
        for step in range(6):
            optimizer.zero_grad()
            losses = [model(tokens(step, node)).square().mean() for node in nodes]
            (sum(losses) / len(losses)).backward()
            optimizer.step()

    torch.manual_seed(0)
    model, alone = Embedded(), Embedded()
    alone.load_state_dict(model.state_dict())
    mesh = node_mesh(topology, "cpu")["local"]
    plan = {
        "embedding": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
        ),
        "norm": SequenceParallel(),
        "last": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=True
        ),
    }
    parallelize_module(model, mesh, plan)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire="fp32")
    run(model, [rank_info.node], optimizer)
    optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(whole(model)))
    if policy == daso.Fixed(1, 0):
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        run(alone, range(rank_info.nodes), plain)
        for a, b in zip(whole(model), whole(alone), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
def test_a_model_that_is_sharded_in_part_is_refused_at_the_first_step(topology):
    model = network()
    fully_shard(model[0], mesh=node_mesh(topology, "cpu")["local"])
    optimizer = daso.DASO(adamw(model), module=model, topology=topology)
    with pytest.raises(ConfigError, match="same gradients on all ranks of a node, but"):
        train(optimizer, model, topology.rank, 1)
    optimizer.close()


@pytest.mark.nodes(*SHARDED)
@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=repr)
def test_plain_parameters_over_a_frozen_sharded_backbone(topology, policy):
    def make(shards):
        model = network(seed=topology.node)
        model[:4].requires_grad_(False)
        if shards:
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=node_mesh(topology, "cpu")["local"])
        return model

    found = []
    for shards in (True, False):
        model = make(shards)
        inner = torch.optim.SGD(model[4].parameters(), lr=0.1)
        optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy, wire="fp32")
        train(optimizer, model, topology.rank, 5)
        optimizer.synchronize()
        found.append(bits(whole(model)))
        optimizer.close()
    assert found[0] == found[1]
    assert topology.equal_on_all_ranks(found[0])


def refused(topology, model, match, kind=LayoutError, **keywords):
    with pytest.raises(kind, match=match):
        daso.DASO(adamw(model), module=model, topology=topology, **keywords)


@pytest.mark.nodes(*SHARDED)
def test_what_cannot_be_exchanged_is_refused(topology, rank_info):
    everybody = init_device_mesh("cpu", (4,))
    refused(
        topology,
        fully_shard(network(), mesh=everybody),
        r"sharded inside a node, but 0.weight is over ranks \[0, 1, 2, 3\] and this node has .*; "
        r"shard over daso.init\(torch_backend=...\).mesh\['local'\], the ranks of one node",
    )
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    refused(topology, fully_shard(network(), mesh=hybrid), "sharded inside a node, but")
    single = [DeviceMesh("cpu", [rank]) for rank in range(4)][rank_info.rank]
    refused(topology, fully_shard(network(), mesh=single), "over all 2 ranks of a node, but .* 1")
    there = sharded(network(), topology)
    host = daso.Gradients(reducer="host")
    refused(topology, there, "gradients of sharded parameters must", ConfigError, gradients=host)
    with pytest.raises(LayoutError, match=r"plain tensors for daso.ParameterServer.* use daso.DAS"):
        daso.ParameterServer(there, lambda p: torch.optim.SGD(p, lr=0.1), topology=topology)
    inside = node_mesh(topology, "cpu")["local"].get_group()
    old = FullyShardedDataParallel(network(), process_group=inside, device_id=torch.device("cpu"))
    refused(topology, old, "sharded by FSDP2, but .* is by FSDP1; use torch.*fully_shard")
    with warnings.catch_warnings(action="ignore"):  # of what torch imports there
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = network()
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, process_group=inside, lr=0.1
    )
    with pytest.raises(ConfigError, match="ZeroRedundancyOptimizer keeps a part on each rank"):
        daso.DASO(zero, module=model, topology=topology)


@pytest.mark.nodes((2, 1), (1, 2))
def test_nodes_of_several_sizes_are_refused(topology, rank_info):
    starts = itertools.accumulate(topology.node_sizes, initial=0)
    groups = [new_group(list(range(a, b))) for a, b in itertools.pairwise(starts)]
    mesh = DeviceMesh.from_group(groups[rank_info.node], "cpu")
    model = fully_shard(network(), mesh=mesh)
    refused(topology, model, "the same number of ranks where parameters are sharded")
