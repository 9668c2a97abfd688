"""Moments that are seldom: copies that load, what is wrapped twice, frozen late, left out."""

import copy
import threading
import time

import numpy as np
import pytest
import torch
from models import batch_loss, bits, mlp, seeded, sgd
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from training import train_batches
from worlds import SEVERAL_NODES

import daso
from daso.comm import control
from daso.comm.engine import Engine
from daso.train.model.state_sync import zero_nonfinite


@pytest.mark.nodes((1, 1), (2, 2))
def test_a_copy_that_loads_a_state_before_its_first_step_exchanges(topology):
    model = seeded(mlp)()
    policy = daso.Fixed(1, 0)
    first = daso.DASO(sgd(model), module=model, topology=topology, policy=policy)
    train_batches(first, model, topology.rank, range(3))
    other, copied = copy.deepcopy((model, first))
    copied.load_state_dict(copy.deepcopy(first.state_dict()))
    train_batches(copied, other, topology.rank, range(3, 6))
    assert topology.equal_on_all_ranks(bits(other))
    assert copied.report()["batches"] == 6
    copied.close()
    first.close()


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_copy_that_takes_up_states_of_nodes_that_went_apart_joins_them(topology):
    model = seeded(mlp)()
    policy = daso.Fixed(4, 1)
    with daso.DASO(sgd(model), module=model, topology=topology, policy=policy) as optimizer:
        train_batches(optimizer, model, topology.rank, range(3))
        saved = copy.deepcopy(optimizer.state_dict())
    again = seeded(mlp)()
    policy = daso.Fixed(1, 0)
    first = daso.DASO(sgd(again), module=again, topology=topology, policy=policy)
    other, copied = copy.deepcopy((again, first))
    copied.load_state_dict(saved)
    train_batches(copied, other, topology.rank, range(3, 5))
    assert topology.equal_on_all_ranks(bits(other))
    copied.close()
    first.close()


@pytest.mark.nodes((1, 1), (2, 2))
@pytest.mark.parametrize("again", ["attach", "wrap"])
def test_an_optimizer_that_is_attached_again_goes_on(topology, again):
    model = seeded(mlp)()
    inner = sgd(model)
    earlier = daso.attach(inner, module=model, topology=topology, policy=daso.Fixed(3, 1))
    train_batches(inner, model, topology.rank, range(2))
    door = daso.attach if again == "attach" else daso.DASO
    handle = door(inner, module=model, topology=topology, policy=daso.Fixed(1, 0))
    train_batches(inner if again == "attach" else handle, model, topology.rank, range(2, 5))
    assert topology.equal_on_all_ranks(bits(model))
    assert "daso" in (inner if again == "attach" else handle).state_dict()
    handle.close()
    earlier.close()
    assert not inner._optimizer_step_pre_hooks
    assert not hasattr(inner, "_step_supports_amp_scaling")


@pytest.mark.nodes(*SEVERAL_NODES)
def test_frozen_layer_joins_when_trained_synchronously(topology):
    model = seeded(mlp)()
    policy = daso.Plateau(2, warmup=0, cooldown=1, max_skip=4)
    last = next(reversed(list(model.parameters())))
    with daso.DASO(sgd(model), module=model, topology=topology, policy=policy) as optimizer:
        train_batches(optimizer, model, topology.rank, range(4))
        last.requires_grad_(False)
        train_batches(optimizer, model, topology.rank, range(4, 5))
        optimizer.end_epoch(1.0)  # synchronous from here
        last.requires_grad_(True)
        train_batches(optimizer, model, topology.rank, range(5, 7))
        assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_a_history_of_each_node_is_dropped_where_they_go_on_in_step(topology, search):
    model = seeded(mlp)()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn=search)
    policy = daso.Plateau(2, warmup=0, cooldown=1, max_skip=4)
    with daso.DASO(inner, module=model, topology=topology, policy=policy) as optimizer:

        def step(number):
            def closure():
                optimizer.zero_grad()
                loss = batch_loss(model, topology.rank, number)
                loss.backward()
                return loss

            optimizer.step(closure)

        for number in range(4):
            step(number)
        optimizer.end_epoch(1.0)
        for number in range(4, 6):
            step(number)
            assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1), (2, 2))
def test_a_closure_may_let_all_its_gradients_pile_up(topology):
    model = torch.nn.Linear(3, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:

        def closure():
            optimizer.zero_grad()
            with optimizer.no_sync():
                for _ in range(2):
                    loss = model.weight.sum() * (topology.rank + 1.0)
                    loss.backward()
            return loss

        optimizer.step(closure)
        mean = torch.full((1, 3), topology.world_size + 1.0)
        torch.testing.assert_close(model.weight.grad, mean)
        assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_a_layer_frozen_between_backward_and_step_stays_as_nodes_agreed(topology):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(4, 0)) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (topology.rank + 1.0)).sum().backward()
            if step == 2:
                model[1].requires_grad_(False)
            optimizer.step()
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((2, 2))
def test_a_step_behind_an_epochs_end_averages_as_the_new_phase(topology):
    model = torch.nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = daso.Plateau(3, warmup=0, cooldown=2)
    with daso.DASO(inner, module=model, topology=topology, policy=policy) as optimizer:
        for ends in (False, False, True):
            optimizer.zero_grad()
            model(torch.ones(8, 4) * (topology.rank + 1.0)).square().mean().backward()
            if ends:
                optimizer.end_epoch(1.0)  # synchronous from here
            optimizer.step()
        assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1))
def test_torchs_hidden_step_is_none_with_an_empty_parameter(topology):
    model = torch.nn.Linear(4, 2)
    model.nothing = torch.nn.Parameter(torch.empty(0, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        get_optimizer_state_dict(model, optimizer)
        assert optimizer.report()["batches"] == 2


@pytest.mark.nodes((2, 2))
def test_a_batch_left_out_before_a_meeting_is_no_step(topology, monkeypatch):
    monkeypatch.setattr("daso.comm.step_timer.LATE_SECONDS", 0.2)
    monkeypatch.setattr("daso.comm.engine.LATE_SECONDS", 0.2)
    model = torch.nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(4, 0)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        if topology.rank == 3:
            time.sleep(1.0)  # the first node rings, and rank 2 listens
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.zero_grad()
        optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1))
def test_who_closes_later_meets_who_waits_for_what_is_in_flight(topology, monkeypatch):
    monkeypatch.setattr(Engine.close, "__defaults__", (0.3,))
    model = torch.nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = daso.Exchange(timeout_seconds=5.0)
    optimizer = daso.DASO(inner, module=model, topology=topology, exchange=exchange)
    ends = time.monotonic() + 0.6

    def slow():
        yield lambda: time.monotonic() >= ends

    optimizer._session.runner.parts.channels.engine.submit(slow())
    if topology.rank == 1:
        time.sleep(0.4)
    optimizer.close()


@pytest.mark.nodes((1, 1))
def test_a_backward_waits_for_no_room_in_a_queue(topology):
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(300)])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"policy": daso.Fixed(1, 0), "gradients": daso.Gradients(bucket_bytes=1)}
    exchange = daso.Exchange(timeout_seconds=20.0)
    with daso.DASO(inner, topology=topology, exchange=exchange, **options) as optimizer:
        sum(p.sum() for p in model).backward()
        optimizer.step()
        optimizer.zero_grad()
        ready = threading.Event()
        if topology.rank == 0:
            optimizer._session.runner.parts.channels.engine.submit(_until(ready))
            submit = optimizer._session.runner.parts.channels.engine.submit
            handles = [submit(_until(ready)) for _ in range(400)]  # none of them blocks
            ready.set()
            assert len(handles) == 400


def _until(ready):
    yield ready.is_set


@pytest.mark.nodes((1, 1))
def test_tensors_of_any_length_are_handed_out_in_pieces(topology, monkeypatch):
    monkeypatch.setattr(control, "PIECE_BYTES", 1024)
    longest, kind = [], type(topology.world_comm)
    whole = kind.Ibcast

    def noted(comm, buffer, root=0):
        longest.append(np.asarray(buffer[0] if isinstance(buffer, tuple) else buffer).nbytes)
        return whole(comm, buffer, root)

    monkeypatch.setattr(kind, "Ibcast", noted)
    model = torch.nn.Linear(400, 30)
    daso.DASO(torch.optim.SGD(model.parameters(), lr=0.1), module=model, topology=topology).close()
    assert max(longest) == 1024
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1))
def test_a_history_that_is_not_finite_is_begun_anew(topology):
    model = seeded(mlp)()
    inner = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def closure():
        inner.zero_grad()
        loss = batch_loss(model, topology.rank, 0)
        loss.backward()
        return loss

    named = list(model.named_parameters())
    for _ in range(2):
        inner.step(closure)
    zero_nonfinite(inner, named)
    (state,) = inner.state.values()
    state["old_dirs"][0][0] = float("nan")
    zero_nonfinite(inner, named)
    assert not inner.state
