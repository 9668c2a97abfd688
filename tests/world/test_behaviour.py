"""What users rely on; numbers in brackets: the reference implementation's ten defects."""

import threading
import time

import pytest
import torch
from jobs import slowness
from models import Stays
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from training import train
from worlds import SEVERAL_NODES

import daso
from daso.comm.engine import Engine
from daso.comm.step_timer import LATE_SECONDS
from daso.errors import (
    ConfigError,
    ExchangeError,
    LayoutError,
    NonFiniteError,
    StallError,
    TopologyError,
)
from daso.plan.schedule import MEASURE_EVERY

PHASES = [daso.Fixed(1, 0), daso.Fixed(4, 0), daso.Fixed(4, 1), daso.Fixed(4, 4, warmup=50)]


def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def bits(model):
    tensors = [*model.parameters(), *model.buffers()]
    return b"".join(
        t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy() for t in tensors
    )


def wrap(topology, model, *, lr=0.1, **options):
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    return daso.DASO(inner, module=model, topology=topology, **options)


def small(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


# --- wrapping ----------------------------------------------------------------------------------


def test_wrapping_changes_nothing_but_makes_all_ranks_equal_to_rank_0(topology, rank_info):  # [4]
    model = small(seed=rank_info.rank)
    before = bits(model)
    optimizer = wrap(topology, model)
    assert topology.equal_on_all_ranks(bits(model))
    if rank_info.rank == 0:
        assert bits(model) == before
    optimizer.close()


@pytest.mark.nodes(*SEVERAL_NODES)
def test_ranks_rest_until_all_have_come(topology, rank_info, monkeypatch):
    naps, rest = [], Engine._sleep_until_peers
    monkeypatch.setattr(Engine, "_sleep_until_peers", lambda *told: _noted(naps, rest(*told)))
    model = small()
    with wrap(topology, model, policy=daso.Fixed(2, 1)) as optimizer:
        for step in range(8):
            time.sleep(0.04 if rank_info.rank == 0 else 0.02)
            train(optimizer, model, topology.rank, 1, first=step)
        told = optimizer.report()["measurements"]["step_seconds"]
        assert 0.01 < told < 1
        # Who comes last may find all others there at once.
        assert any(naps) or rank_info.node == 0


def _noted(notes, value):
    notes.append(value)
    return value


def test_frozen_layers_start_as_rank_0s_too(topology, rank_info):
    model = small(seed=rank_info.rank)
    model[0].requires_grad_(False)
    before = bits(model)
    with wrap(topology, model):
        assert topology.equal_on_all_ranks(bits(model))
        assert rank_info.rank > 0 or bits(model) == before


def test_the_groups_and_state_are_the_inner_optimizers_own(topology):
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with daso.DASO(inner, module=model, topology=topology) as optimizer:
        train(optimizer, model, topology.rank, 2)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        assert len(optimizer.state) == 6


@pytest.mark.parametrize("first", ["scheduler", "wrapper"])
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # of torch 2.6 itself
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.StepLR(o, 2, 0.5),
        lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
        ),
    ],
)
def test_any_scheduler_works_built_before_or_after_wrapping(topology, make, first):  # [6]
    model, bare_model = small(), small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    bare = torch.optim.SGD(bare_model.parameters(), lr=0.1, momentum=0.9)
    if first == "scheduler":
        schedule = make(inner)
        optimizer = daso.DASO(inner, module=model, topology=topology)
    else:
        optimizer = daso.DASO(inner, module=model, topology=topology)
        schedule = make(optimizer)
    expected = make(bare)
    with optimizer:
        for _ in range(6):
            train(optimizer, model, topology.rank, 1)
            bare.step()
            for one in (schedule, expected):
                loss = [1.0] if isinstance(one, lr_scheduler.ReduceLROnPlateau) else []
                one.step(*loss)
            assert optimizer.param_groups[0]["lr"] == bare.param_groups[0]["lr"]


def test_step_hooks_run_once_each_in_order(topology):
    calls = []
    model = small()
    with wrap(topology, model) as optimizer:
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        train(optimizer, model, topology.rank, 2)
    assert calls == ["pre", "post"] * 2


@pytest.mark.nodes((1, 1), (2, 1))
def test_a_closure_is_called_and_its_loss_averaged(topology):
    model = small()
    x = torch.ones(3, 4) * (1 + topology.rank)
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            calls.append(loss.item())
            return loss

        losses = topology.world_comm.allgather(optimizer.step(closure).item())
        assert len(set(losses)) == 1
        assert losses[0] == pytest.approx(
            sum(topology.world_comm.allgather(calls[0])) / len(losses)
        )
        assert len(calls) == 1
    assert topology.equal_on_all_ranks(bits(model))


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["daso", "delta"])
@pytest.mark.parametrize("policy", PHASES, ids=repr)
def test_a_small_wire_never_freezes_a_weight(topology, policy, merge):  # [1]
    ends = {}
    for wire in ("fp32", "bf16", "fp16", "int8", "int4", "int2"):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        with wrap(topology, model, lr=0.001, policy=policy, wire=wire, merge=merge) as optimizer:
            for _ in range(100):
                optimizer.zero_grad()
                model.weight.sum().backward()
                optimizer.step()
        ends[wire] = model.weight.item()
    exact = ends["fp32"]
    assert ends == dict.fromkeys(ends, pytest.approx(exact, abs=2e-5))
    if merge == "delta" or policy.wait == 0:
        assert ends == dict.fromkeys(ends, pytest.approx(0.9, abs=2e-5))


@pytest.mark.parametrize("policy", PHASES, ids=repr)
@pytest.mark.parametrize("frozen", [(0,), (1, 3), (0, 1, 2)])
def test_freezing_layers_at_lr_0_changes_no_weight(topology, policy, frozen):  # [2]
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    for index in frozen:
        model[index].requires_grad_(False)
    before = flat(model)
    with wrap(topology, model, lr=0.0, policy=policy) as optimizer:
        for _ in range(9):
            optimizer.zero_grad()
            model(torch.randn(2, 5)).sum().backward()
            optimizer.step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("elements", [100, 256, 257, 512, 513, 1000])
@pytest.mark.parametrize("policy", PHASES[:3], ids=repr)
def test_a_tensor_of_any_number_of_chunks_is_exchanged(topology, policy, elements):  # [3]
    model = nn.Linear(elements, 1, bias=False)
    nn.init.zeros_(model.weight)
    options = {"wire": "bf16", "merge": "delta", "exchange": daso.Exchange(chunk_bytes=512)}
    rank_info = topology.rank_info
    with wrap(topology, model, lr=1.0, policy=policy, **options) as o:
        for _ in range(4):
            o.zero_grad()
            (model.weight * (rank_info.rank + 1.0)).sum().backward()
            o.step()
    expected = -4 * (rank_info.world_size + 1) / 2
    torch.testing.assert_close(model.weight, torch.full((1, elements), expected), rtol=3e-3, atol=0)
    assert topology.equal_on_all_ranks(bits(model))


def test_batchnorm_statistics_are_equal_and_the_mean_of_all_ranks(topology, rank_info):  # [10]
    model = small()
    with wrap(topology, model, policy=daso.Fixed(4, 1)) as optimizer:
        train(optimizer, model, topology.rank, 5)
        mine = model[1].running_mean.cpu().clone()
        everyone = topology.world_comm.allgather(mine)
        assert rank_info.world_size == 1 or not all(torch.equal(other, mine) for other in everyone)
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))
        torch.testing.assert_close(model[1].running_mean.cpu(), torch.stack(everyone).mean(0))
        assert model[1].num_batches_tracked == 5


def test_epochs_of_any_length_keep_the_grid(topology, rank_info):  # [7]
    model = small()
    with wrap(topology, model, policy=daso.Fixed(4, 0)) as optimizer:
        done = 0
        for length in (5, 3, 8):
            train(optimizer, model, topology.rank, length, first=done)
            done += length
            optimizer.end_epoch(1.0)
        report = optimizer.report()
    sent = [event["sent"] for event in report["events"] if event["kind"] == "exchange"]
    assert report["batches"] == 16
    assert sent == ([4, 5, 8, 12, 16] if rank_info.nodes > 1 else [])


def test_the_node_is_told_once_per_exchange_whatever_the_tensors(topology, rank_info):  # [9]
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    with wrap(topology, model, policy=daso.Fixed(4, 1)) as optimizer:
        deltas = optimizer._session.runner.deltas
        if deltas is None:
            assert rank_info.nodes == 1
            return
        ((row,),) = deltas.rows.values()
        told = []
        for _ in range(9):
            before = row.shared.round
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            told.append(row.shared.round - before)
        assert told == [0, 0, 0, 0, 1, 0, 0, 0, 1]


def test_every_shape_of_nodes_trains_to_the_same_model_when_synchronous(topology):  # [8]
    model = small()
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        train(optimizer, model, topology.rank, 3)
    alone = small()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(topology.world_size):
            generator = torch.Generator().manual_seed(97 * step + rank)
            x = (
                torch.randn(8, 4, generator=generator, device="cpu").to(torch.get_default_device())
                + rank
            )
            (alone(x).square().mean() / topology.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)


# --- gradients ---------------------------------------------------------------------------------


def test_gradients_are_the_nodes_mean_when_backward_returns(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    members = [rank for rank, node in enumerate(rank_info.node_of) if node == rank_info.node]
    with wrap(topology, model, policy=daso.Fixed(4, 1)) as optimizer:
        for way in (True, False):
            optimizer.zero_grad(set_to_none=way)
            (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            expected = sum(rank + 1.0 for rank in members) / len(members)
            torch.testing.assert_close(model.weight.grad, torch.full((1, 3), expected))
            optimizer.step()


def test_clipping_sees_the_mean_gradient(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        optimizer.zero_grad()
        (model.weight.sum() * (rank_info.rank + 1.0)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.item() == pytest.approx((rank_info.world_size + 1) / 2 * 3**0.5)
        optimizer.step()
        assert model.weight.grad.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_accumulation_without_sync_averages_the_sum_once(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for _ in range(3):
                    (model.weight.sum() * (rank_info.rank + 1.0)).backward()
                alone = torch.full((1, 3), 3 * (rank_info.rank + 1.0))
                torch.testing.assert_close(model.weight.grad, alone)
            (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            expected = 4 * (rank_info.world_size + 1) / 2
            torch.testing.assert_close(model.weight.grad, torch.full((1, 3), expected))
            optimizer.step()
        assert optimizer.report()["batches"] == 2


def test_an_inner_no_sync_does_not_end_the_outer_one(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        with optimizer.no_sync():
            with optimizer.no_sync():
                (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            alone = torch.full((1, 3), 2 * (rank_info.rank + 1.0))
            torch.testing.assert_close(model.weight.grad, alone)
        optimizer.step()
        expected = rank_info.world_size + 1.0
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), expected))


def test_a_scaler_is_taken_off_the_gradients_of_all_groups(topology, rank_info):
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False))
    groups = [{"params": layer.parameters()} for layer in model]
    inner = torch.optim.SGD(groups, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:
        loss = sum(layer.weight.sum() for layer in model) * (rank_info.rank + 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        expected = torch.full((1, 3), (rank_info.world_size + 1) / 2)
        for layer in model:
            torch.testing.assert_close(layer.weight.grad, expected)


def test_a_rank_that_did_no_backward_joins_with_zeros(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    with wrap(topology, model, lr=1.0, policy=daso.Fixed(1, 0)) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            if rank_info.rank == 0 or step == 1:
                model.weight.sum().backward()
            optimizer.step()
    expected = -(1 + 2 / rank_info.world_size)
    torch.testing.assert_close(model.weight, torch.full((1, 3), expected))


def test_a_parameter_that_no_rank_used_keeps_no_gradient(topology):
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    before = model["unused"].weight.detach().clone()
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:
        before.copy_(model["unused"].weight)  # rank 0's
        for _ in range(3):
            optimizer.zero_grad()
            model["used"](torch.ones(1, 2)).sum().backward()
            assert model["unused"].weight.grad is None
            optimizer.step()
    assert torch.equal(model["unused"].weight, before)


def test_gradients_survive_closing(topology):
    model = nn.Linear(3, 1)
    optimizer = wrap(topology, model)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.clone()
    optimizer.close()
    optimizer.close()
    assert torch.equal(model.weight.grad, expected)


# --- exchanges ---------------------------------------------------------------------------------


@pytest.mark.real_mpi
def test_only_the_training_thread_writes_parameters_and_only_inside_step(topology, rank_info):
    model = small()
    before_it = [thread.name for thread in threading.enumerate()]
    with wrap(topology, model, policy=daso.Fixed(2, 2)) as optimizer:
        for step in range(6):
            train(optimizer, model, topology.rank, 1, first=step)
            versions = [p._version for p in model.parameters()]
            before = flat(model)
            deltas = optimizer._session.runner.deltas
            if deltas is not None and deltas._flight is not None:
                handle = deltas._flight.handle
                handle.finished.wait(10)
                assert handle.done()
            assert [p._version for p in model.parameters()] == versions
            assert torch.equal(flat(model), before)
        names = [thread.name for thread in threading.enumerate()]
        own = names.count("daso-exchange") - before_it.count("daso-exchange")
        assert own == (1 if rank_info.world_size > 1 else 0), names


def test_an_exchange_goes_on_while_the_training_thread_is_elsewhere(topology, rank_info):
    model = nn.Linear(512, 512)
    with wrap(topology, model, policy=daso.Fixed(1, 1)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        if rank_info.nodes > 1:
            handle = optimizer._session.runner.deltas._flight.handle
            deadline = time.monotonic() + 20
            while not handle.done() and time.monotonic() < deadline:
                time.sleep(0.01)  # no MPI call on this thread
            assert handle.done()


def test_bytes_between_nodes_are_what_the_wire_promises(topology, rank_info):
    model = nn.Linear(64, 64, bias=False)
    sent = {}
    sizes = {"bf16": 2, "fp32": 4, "int8": 1 + 1 / 32, "int4": 0.5 + 1 / 16, "int2": 0.25 + 1 / 16}
    for wire in sizes:
        exchange = daso.Exchange(algorithm="direct")
        optimizer = wrap(topology, model, policy=daso.Fixed(2, 0), wire=wire, exchange=exchange)
        for _ in range(6):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        sent[wire] = optimizer.report()["global_bytes_sent"]
        optimizer.close()
    total = {wire: sum(topology.world_comm.allgather(nbytes)) for wire, nbytes in sent.items()}
    # Parts of 128 numbers' multiples where the nodes are equal powers of two: no padding then.
    whole = rank_info.nodes * rank_info.lanes in (1, 2, 4)
    for wire, nbytes in sizes.items():
        promised = 3 * 2 * (rank_info.nodes - 1) * 64 * 64 * nbytes
        if whole or wire == "fp32":
            assert total[wire] == promised
        else:
            assert promised <= total[wire] <= promised * 1.05


def test_parameters_added_mid_run_are_exchanged_too(topology, rank_info):
    model = nn.ModuleList([nn.Linear(3, 1, bias=False), nn.Linear(3, 1, bias=False)])
    inner = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(3, 1)) as optimizer:
        for step in range(10):
            if step == 4:
                optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.2})
            optimizer.zero_grad()
            sum(layer.weight.sum() for layer in model).mul(rank_info.rank + 1.0).backward()
            optimizer.step()
    assert topology.equal_on_all_ranks(bits(model))
    assert len(inner.param_groups) == 2
    assert model[1].weight.grad is not None
    report = optimizer.report()
    assert report["batches"] == 10
    # Counts are kept when the group comes: merged at 4, at the drain, at 8 and at the end.
    assert report["exchanges"] == (4 if rank_info.nodes > 1 else 0)


def test_layers_unfrozen_and_frozen_mid_run_are_followed(topology, rank_info):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    for policy in (daso.Fixed(1, 0), daso.Fixed(2, 1)):
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        before = model[0].weight.detach().clone()
        with daso.DASO(inner, module=model, topology=topology, policy=policy) as optimizer:
            before = model[0].weight.detach().clone()
            for step in range(12):
                if step == 3:
                    assert torch.equal(model[0].weight, before)
                    model[0].requires_grad_(True)
                if step == 9:
                    model[1].requires_grad_(False)
                    head = model[1].weight.detach().clone()
                optimizer.zero_grad()
                model(torch.ones(2, 3) * (rank_info.rank + 1.0)).sum().backward()
                optimizer.step()
        assert not torch.equal(model[0].weight, before)
        assert rank_info.nodes > 1 or torch.equal(model[1].weight, head)
        assert topology.equal_on_all_ranks(bits(model))
        model.requires_grad_(True)
        model[0].requires_grad_(False)


def test_a_layer_frozen_mid_run_stays_as_nodes_agreed_on_it(topology, rank_info):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    with wrap(topology, model, lr=0.01, policy=daso.Fixed(2, 1)) as optimizer:
        for step in range(8):
            if step == 3:
                model[1].requires_grad_(False)
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (rank_info.rank + 1.0)).sum().backward()
            optimizer.step()
            if step == 3:  # what the nodes did to it before has been merged
                head = bits(model[1])
                assert topology.equal_on_all_ranks(head)
            elif step > 3:
                assert bits(model[1]) == head


def test_drift_is_told_over_the_batches_in_which_nodes_drifted(topology, rank_info):
    """Here nodes part alike in all batches: drift is the same, whenever the next exchange comes."""
    model = nn.Linear(8, 1, bias=False)
    with wrap(topology, model, lr=0.01, policy=daso.Fixed(4, 0), wire="fp32") as optimizer:
        for _ in range(9):
            optimizer.zero_grad()
            (model.weight.sum() * (-1.0) ** rank_info.node).backward()
            optimizer.step()
        optimizer.synchronize()
        events = [one for one in optimizer.report()["events"] if one["kind"] == "exchange"]
    assert [one["sent"] for one in events] == [4, 8, 9]
    _, drift, last = [one["drift"] for one in events]
    assert drift > 0
    assert last == pytest.approx(drift, rel=1e-3)


def test_what_piles_up_after_a_backward_is_averaged_too(topology, rank_info):
    model = nn.Linear(3, 1, bias=False)
    with wrap(topology, model, lr=1.0, policy=daso.Fixed(1, 0)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            with optimizer.no_sync():
                (model.weight.sum() * (rank_info.rank + 1.0)).backward()
            optimizer.step()
        assert topology.equal_on_all_ranks(bits(model))
        expected = rank_info.world_size + 1.0
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), expected))


def test_state_dict_hooks_of_the_wrapper_run(topology):
    model = small()
    calls = []
    with wrap(topology, model) as optimizer:
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
        optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", "post"]


def test_buffers_equal_everywhere_stay_as_they_are(topology):
    model = small()
    model.register_buffer(
        "rate",
        torch.rand(100, generator=torch.Generator().manual_seed(1), device="cpu").to(
            torch.get_default_device()
        ),
    )
    model.register_buffer("mask", torch.full((3, 3), float("-inf")).triu(1))
    before = model.rate.clone(), model.mask.clone()
    with wrap(topology, model) as optimizer:
        train(optimizer, model, topology.rank, 2)
        optimizer.synchronize()
        assert torch.equal(model.rate, before[0])
        assert torch.equal(model.mask.isinf(), before[1].isinf())


# --- trouble -----------------------------------------------------------------------------------


def poison(model, topology, rank):
    if topology.rank == rank:
        with torch.no_grad():
            model[3].weight[1, 2] = float("nan")


@pytest.mark.nodes(*SEVERAL_NODES)
def test_nan_on_one_node_drops_that_exchange_everywhere_and_heals(
    topology, rank_info, caplog
):  # [5]
    model = small()
    bad_node_ranks = [rank for rank, node in enumerate(rank_info.node_of) if node == 1]
    with wrap(topology, model, policy=daso.Fixed(3, 1)) as optimizer:
        for step in range(9):
            if step == 4 and rank_info.rank in bad_node_ranks:
                with torch.no_grad():
                    model[3].weight[1, 2] = float("nan")
            train(optimizer, model, topology.rank, 1, first=step)
        report = optimizer.report()
    (drop,) = [event for event in report["events"] if event["kind"] == "dropped"]
    assert "parameter 0.weight" in drop["why"]  # the first; by then the step spread it to all
    assert any(f"rank {rank} " in drop["why"] for rank in bad_node_ranks)
    assert flat(model).isfinite().all()
    assert model[1].running_mean.isfinite().all()
    assert topology.equal_on_all_ranks(bits(model))


def test_nan_in_numbers_of_another_type_is_found_too(topology, rank_info):
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1).double()])
    with wrap(topology, model, policy=daso.Fixed(2, 1)) as optimizer:
        if rank_info.node == 1:
            nn.init.constant_(model[1].weight, float("nan"))
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.double().sum() for p in model.parameters()).backward()
            optimizer.step()
        (drop,) = [one for one in optimizer.report()["events"] if one["kind"] == "dropped"]
    assert "parameter 1.weight" in drop["why"]
    assert flat(model).isfinite().all()


def test_buffers_are_mended_by_the_ranks_where_they_are_finite(topology, rank_info):
    model = nn.Linear(3, 1)
    model.register_buffer("seen", torch.zeros(2))
    with wrap(topology, model, policy=daso.Fixed(2, 0)) as optimizer:
        model.seen.fill_(rank_info.rank + 1.0)
        if rank_info.node == 0:
            nn.init.constant_(model.weight, float("nan"))
        if rank_info.rank == 0:
            model.seen[1] = float("nan")
        for _ in range(2):
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()
        assert optimizer.report()["dropped"] == 1
        others = sum(rank + 1.0 for rank in range(1, rank_info.world_size)) / (
            rank_info.world_size - 1
        )
        mended = [1.0, others] if rank_info.rank == 0 else [rank_info.rank + 1.0] * 2
        assert model.seen.tolist() == pytest.approx(mended)


def test_nan_raises_the_same_error_on_all_ranks_when_asked(topology, rank_info):  # [5]
    model = small()
    exchange = daso.Exchange(nonfinite="raise")
    optimizer = wrap(topology, model, policy=daso.Fixed(2, 1), exchange=exchange)
    train(optimizer, model, topology.rank, 1)
    with torch.no_grad():
        if rank_info.node == 0:
            model[0].bias.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"0\.") as caught:
        train(optimizer, model, topology.rank, 5)
    assert topology.equal_on_all_ranks(str(caught.value))
    optimizer.close()


def test_lasting_nan_ends_in_the_same_error_on_all_ranks(topology, rank_info):
    model = small()
    optimizer = wrap(topology, model, policy=daso.Fixed(1, 1))
    with pytest.raises(NonFiniteError, match="drop number 3"):
        for step in range(20):
            poison(model, topology, rank_info.world_size - 1)
            if rank_info.local_size > 1 and rank_info.node == rank_info.node_of[-1]:
                with torch.no_grad():
                    model[3].weight[1, 2] = float("nan")
            train(optimizer, model, topology.rank, 1, first=step)
    optimizer.close()


def test_a_nan_gradient_in_a_synchronous_phase_drops_the_step_everywhere(topology, rank_info):
    model = small()
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        before = flat(model)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 4)).sum()
        (loss * (float("nan") if rank_info.rank == 0 else 1.0)).backward()
        optimizer.step()
        assert torch.equal(flat(model), before)
        assert optimizer.report()["dropped"] == 1
        train(optimizer, model, topology.rank, 2)
        assert not torch.equal(flat(model), before)


def test_a_nan_gradient_of_a_closure_drops_the_step_everywhere(topology, rank_info):
    model = small()
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:

        def closure(factor):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 4)).sum() * factor
            loss.backward()
            return loss

        before = flat(model)
        optimizer.step(lambda: closure(float("nan") if rank_info.rank == 0 else 1.0))
        assert torch.equal(flat(model), before)
        assert optimizer.report()["dropped"] == 1
        optimizer.step(lambda: closure(1.0))
        assert not torch.equal(flat(model), before)
        assert flat(model).isfinite().all()


def test_training_can_go_on_in_step_after_an_error_that_all_ranks_got(topology, rank_info):
    model = small()
    exchange = daso.Exchange(nonfinite="raise")
    optimizer = wrap(topology, model, policy=daso.Fixed(2, 0), exchange=exchange)
    with torch.no_grad():
        if rank_info.node == 0:
            model[0].bias[0] = float("nan")
    with pytest.raises(NonFiniteError):
        train(optimizer, model, topology.rank, 2)
    small_again = small()
    model.load_state_dict(small_again.state_dict())
    train(optimizer, model, topology.rank, 4)
    optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(model))
    optimizer.close()


def test_uneven_numbers_of_steps_are_named_on_all_ranks(topology, rank_info):
    last = rank_info.node == rank_info.nodes - 1 and rank_info.nodes > 1
    model = small()
    optimizer = wrap(topology, model, policy=daso.Fixed(4, 0))
    train(optimizer, model, topology.rank, 5 - last)
    if rank_info.nodes == 1:
        optimizer.synchronize()
    else:
        with pytest.raises(ExchangeError, match="took 4 and rank 0 took 5") as caught:
            optimizer.synchronize()
        assert topology.equal_on_all_ranks(str(caught.value))
    optimizer.close()


def test_options_that_differ_between_ranks_are_named_on_all(topology, rank_info):
    policy = daso.Fixed(4 + (rank_info.rank == rank_info.world_size - 1), 1)
    with pytest.raises(ConfigError, match=r"skip=5.* here and .*skip=4.* on rank 0"):
        wrap(topology, small(), policy=policy)
    assert topology.equal_on_all_ranks("still in step")


def test_optimizer_state_loaded_on_one_rank_only_is_refused_on_all(topology, rank_info):
    model = small()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank_info.rank == 0:
        model(torch.ones(4, 4)).sum().backward()
        inner.step()
    with pytest.raises(LayoutError, match="state must be the same on every rank"):
        daso.DASO(inner, module=model, topology=topology)


def test_a_rank_that_stalls_in_the_first_backward_is_told(topology, rank_info):
    model = small()
    exchange = daso.Exchange(timeout_seconds=0.3)
    optimizer = wrap(topology, model, policy=daso.Fixed(1, 0), exchange=exchange)
    if rank_info.rank == 0:
        host = topology.liveness.hosts[0]
        late = ", ".join(f"{rank} on host {host}" for rank in range(1, rank_info.world_size))
        with pytest.raises(StallError, match=f"no answer from world rank {late}"):
            model(torch.ones(4, 4)).sum().backward()
    topology.world_comm.Barrier()
    parts = optimizer._session.runner.parts
    parts.gradients.close()
    parts.channels.engine.abandon()  # close() is collective, and rank 0 is out of step


def test_parameters_that_differ_between_ranks_are_named_on_all(topology, rank_info):
    width = 5 if rank_info.rank == rank_info.world_size - 1 else 4
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width))
    with pytest.raises(LayoutError, match=r"1\.weight \(5, 3\).* against 1\.weight \(4, 3\)"):
        wrap(topology, model)
    assert topology.equal_on_all_ranks("still in step")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "must be real, but weight"),
        (lambda: nn.Embedding(4, 2, sparse=True), "sparse=False"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "at least one parameter"),
        (lambda: nn.Linear(2, 2, device="meta"), "must be on the CPU"),
    ],
)
def test_parameters_that_cannot_be_exchanged_are_refused(topology, rank_info, make, match):
    if rank_info.world_size == 1:
        assert wrap(topology, make()).report()["world"] == 1  # alone, anything goes
        return
    with pytest.raises((LayoutError, TopologyError), match=match):
        wrap(topology, make())


def test_a_sparse_gradient_nobody_could_foresee_is_refused_in_backward(topology, rank_info):
    weight = nn.Parameter(torch.zeros(4, 2))
    inner = torch.optim.SGD([weight], lr=0.1)
    optimizer = daso.DASO(inner, topology=topology)
    with pytest.raises(LayoutError, match="sparse"):
        nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum().backward()
    optimizer.close()


def test_single_rank_nodes_leave_gradients_alone(topology, rank_info):
    model = small()
    policy = daso.Plateau(4, warmup=1, cooldown=1)
    with wrap(topology, model, policy=policy) as optimizer:
        for epoch in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 4) * (rank_info.rank + 1)).square().mean().backward()
            grads = [p.grad.clone() for p in model.parameters()]
            averaged = topology.equal_on_all_ranks([g.tolist() for g in grads])
            synchronous = epoch in (0, 3)
            assert averaged == (synchronous or rank_info.nodes == 1), epoch
            optimizer.step()
            optimizer.end_epoch(1.0)
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_of_shared_weights_give_the_mean_gradient(topology, rank_info, reentrant):
    torch.manual_seed(3)
    model = nn.Linear(3, 3)
    alone = nn.Linear(3, 3)
    inputs = [torch.ones(1, 3) * (rank + 1.0) for rank in range(rank_info.world_size)]
    with wrap(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        alone.load_state_dict(model.state_dict())
        for _ in range(2):  # the buckets are made by the first
            optimizer.zero_grad()
            x = inputs[rank_info.rank].clone().requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant)
            checkpoint(model, y, use_reentrant=reentrant).square().sum().backward()
            alone.zero_grad()
            for x in inputs:
                (alone(alone(x)).square().sum() / rank_info.world_size).backward()
            torch.testing.assert_close(model.weight.grad, alone.weight.grad)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"wire": "int3"}, "wire must be one of auto, fp32, bf16, fp16, int8, int4"),
        ({"merge": "average"}, "merge must be one of auto, daso, delta, eager"),
        ({"exchange": daso.Exchange(algorithm="mpi")}, "needs wire='fp32'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_sent(topology, options, match):
    with pytest.raises(ConfigError, match=match):
        wrap(topology, small(), **options)


@pytest.mark.parametrize("early", ["first", "last"])
def test_ranks_stuck_in_different_exchanges_are_told_who_stopped_first(topology, rank_info, early):
    model, who = small(), 0 if early == "first" else rank_info.world_size - 1
    optimizer = wrap(topology, model, policy=daso.Fixed(4, 1))
    train(optimizer, model, topology.rank, 5)
    start = time.monotonic()
    with pytest.raises(ExchangeError, match=r"rank \d+ took [58] and rank \d+ took [5678];"):
        if rank_info.rank != who:
            train(optimizer, model, topology.rank, 3, first=5)  # the others send after 8 steps
        optimizer.synchronize()
    assert time.monotonic() - start < 20 * slowness()
    optimizer.close()  # does not wait for anybody


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(4, 1)])
def test_a_backward_more_on_one_rank_is_named(topology, rank_info, policy):
    """From then on ranks would average gradients of different steps, until the last."""
    model, node = small(), rank_info.local_size > 1
    optimizer = wrap(topology, model, policy=policy)
    train(optimizer, model, topology.rank, 3)
    if rank_info.rank == 0:
        model(torch.ones(4, 4)).sum().backward()
    # Between exchanges nodes may differ.
    if rank_info.world_size == 1 or (policy.skip > 1 and (rank_info.nodes > 1 or not node)):
        train(optimizer, model, topology.rank, 3, first=3)
        optimizer.synchronize()
    else:
        match = r"at step \d+ rank \d+ had averaged \d+ times and rank 0 \d+ times"
        with pytest.raises(ExchangeError, match=match):
            train(optimizer, model, topology.rank, 3, first=3)
            optimizer.synchronize()
    optimizer.close()


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1), daso.Auto()])
def test_a_slow_node_is_named_on_every_rank(topology, rank_info, policy):
    model, slow = small(), rank_info.nodes - 1
    with wrap(topology, model, policy=policy) as optimizer:
        assert optimizer.report()["slowest"] is None
        for step in range(8):
            time.sleep(0.05 * (rank_info.node == slow))
            train(optimizer, model, topology.rank, 1, first=step)
        optimizer.synchronize()
        slowest = optimizer.report()["slowest"]
    if rank_info.nodes == 1:
        assert slowest is None
    else:
        assert topology.equal_on_all_ranks(str(slowest))
        assert slowest["host"]
        assert topology.world_comm.allgather(rank_info.node)[slowest["rank"]] == slow
        assert slowest["step_seconds"] > 0.04 > slowest["fastest_seconds"]


@pytest.mark.nodes((2, 2))
def test_nodes_may_call_backward_differently_often_between_exchanges(topology, rank_info):
    """A rank that is late to an exchange is no rank that will never come."""
    model = small()
    with wrap(topology, model, policy=daso.Fixed(4, 1)) as optimizer:
        for step in range(5):
            optimizer.zero_grad()
            for _ in range(2 - rank_info.node):
                model(torch.full((4, 4), float(step))).square().mean().backward()
            if step == 4 and rank_info.rank == 0:
                time.sleep(2.5 * LATE_SECONDS)
            optimizer.step()
        optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1))
def test_an_evaluation_is_no_step_of_the_next_measurement(topology):
    model = small()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with daso.DASO(inner, module=model, topology=topology, policy=Stays()) as optimizer:
        train(optimizer, model, topology.rank, MEASURE_EVERY - 1)
        optimizer.synchronize()
        time.sleep(1.0)
        train(optimizer, model, topology.rank, 1, first=MEASURE_EVERY - 1)
        found = [one for one in optimizer.report()["events"] if one["kind"] == "measured"]
    assert found[-1]["batch"] == MEASURE_EVERY
    assert found[-1]["step_seconds"] < 0.5


class Stumbles(torch.optim.SGD):
    """Raises in its second step."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken == 2:
            raise RuntimeError("a step of the program's own")
        return super().step(closure)


@pytest.mark.nodes((2, 2), (2, 1))
def test_after_a_step_that_raised_a_node_waits_for_its_own_ranks_alone(topology, rank_info):
    """Other nodes may meet while this one averages: their rings are no verdict."""
    model = small()
    inner = Stumbles(model.parameters(), lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(6, 1)) as optimizer:
        train(optimizer, model, topology.rank, 1)
        with pytest.raises(RuntimeError, match="of the program's own"):
            train(optimizer, model, topology.rank, 1, first=1)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        position = optimizer._session.runner.parts.gradients.position()
        alone = rank_info.local_size == 1 and max(rank_info.node_sizes) == 1
        assert position.relevant_ranks == (None if alone else rank_info.ranks_of_node)
        assert position.steps == 2
        optimizer.step()
