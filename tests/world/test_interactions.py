"""What goes wrong only when two things meet: late ranks, drops, scalers, fragments, worlds."""

import copy
import time

import pytest
import torch
from compare import ORDERED
from models import mlp, nesterov, seeded, sgd
from torch import nn
from training import train, train_batches
from world.test_behaviour import bits, small, wrap
from worlds import SEVERAL_NODES

import daso
from daso.errors import NonFiniteError
from daso.plan.policies import Replay


def test_a_ring_for_a_rank_that_came_late_is_forgotten(topology, rank_info):
    model = small()
    with wrap(topology, model, policy=daso.Fixed(2, 0)) as optimizer:
        train(optimizer, model, topology.rank, 3)
        if rank_info.rank == 0:
            time.sleep(2.6)  # evaluates: the others ring meanwhile
        optimizer.synchronize()
        assert optimizer._session.runner.parts.channels.watchdog._announced == (rank_info.rank > 0)
        train(optimizer, model, topology.rank, 2, first=3)
        if rank_info.rank == rank_info.world_size - 1:
            time.sleep(2.6)  # the others listen meanwhile
        train(optimizer, model, topology.rank, 2, first=5)
    assert topology.equal_on_all_ranks(bits(model))


def scaled_steps(model, optimizer, scaler, rank, steps, *, blow=False):
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 4)).square().mean()
        scaler.scale(loss * (1e38 * 1e10 if blow and rank == 0 and step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("later", ["scaler", "plain", "closure", "unfrozen"])
def test_scalers_that_went_apart_do_not_part_the_nodes(topology, rank_info, later):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    model[0].bias.requires_grad_(later != "unfrozen")
    policy = daso.Plateau(3, warmup=0, cooldown=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with wrap(topology, model, policy=policy, lr=0.01) as optimizer:
        torch.manual_seed(rank_info.rank)
        scaled_steps(model, optimizer, scaler, rank_info.rank, 4, blow=True)
        optimizer.end_epoch(1.0)
        if rank_info.nodes > 1:
            assert len(set(topology.world_comm.allgather(scaler.get_scale()))) == 2
        model[0].bias.requires_grad_(True)
        for step in range(3):
            if later == "plain":
                train(optimizer, model, topology.rank, 1, first=step)
            elif later == "closure":

                def closure():
                    optimizer.zero_grad()
                    loss = model(torch.randn(6, 4)).square().mean()
                    loss.backward()
                    return loss

                optimizer.step(closure)
            else:
                scaled_steps(model, optimizer, scaler, rank_info.rank, 1)
            assert topology.equal_on_all_ranks(bits(model)), step


def test_inf_on_one_node_drops_the_step_on_all(topology, rank_info):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    policy = daso.Plateau(3, warmup=0, cooldown=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with wrap(topology, model, policy=policy, lr=0.01) as optimizer:
        torch.manual_seed(rank_info.rank)
        scaled_steps(model, optimizer, scaler, rank_info.rank, 4, blow=True)
        optimizer.end_epoch(1.0)
        scaled_steps(model, optimizer, scaler, rank_info.rank, 2, blow=True)
        assert topology.equal_on_all_ranks(bits(model))
        assert all(bool(param.isfinite().all()) for param in model.parameters())


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("merge", ["delta", "eager"])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("policy", [daso.Fixed(2, 1), daso.Fixed(2, 2)], ids=repr)
def test_one_nan_costs_one_exchange_and_no_other_nodes_work(
    topology, rank_info, policy, fragments, merge
):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    exchange = daso.Exchange(fragments=fragments)
    options = {"policy": policy, "merge": merge, "exchange": exchange}
    with wrap(topology, model, **options) as optimizer:
        train(optimizer, model, topology.rank, 5)
        if rank_info.node == 0:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan
        train(optimizer, model, topology.rank, 9, first=5)
        optimizer.synchronize()
        assert bool(torch.cat([p.flatten() for p in model.parameters()]).isfinite().all())
        assert optimizer.report()["dropped"] in (1, 2)
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("nonfinite", ["drop", "raise"])
def test_one_nan_costs_one_exchange_of_small_tensors(topology, rank_info, nonfinite):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    policy = Replay(((0, 16, 2),), selective=1)
    exchange = daso.Exchange(nonfinite=nonfinite)
    with wrap(topology, model, policy=policy, exchange=exchange) as optimizer:
        train(optimizer, model, topology.rank, 7)
        if rank_info.node == 0:
            with torch.no_grad():
                model[0].weight[0, 0] = torch.nan
        train(optimizer, model, topology.rank, 1, first=7)  # sends it after 8
        assert optimizer.report()["small_exchanges"] == 3
        if nonfinite == "raise":
            with pytest.raises(NonFiniteError, match="is not finite"):
                train(optimizer, model, topology.rank, 2, first=8)
        else:
            train(optimizer, model, topology.rank, 2, first=8)
            assert optimizer.report()["dropped"] == 1
        train(optimizer, model, topology.rank, 6, first=10)
        assert optimizer.report()["small_exchanges"] == 6  # after 10, 12 and 14 too
        optimizer.synchronize()
        assert bool(torch.cat([p.flatten() for p in model.parameters()]).isfinite().all())
        assert optimizer.report()["dropped"] == 1
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_eager_node_reverts_a_dropped_exchange_with_its_work(topology, rank_info):
    model = nn.Linear(4, 2)
    options = {"policy": daso.Fixed(4, 2), "outer": nesterov, "wire": "fp32"}
    with wrap(topology, model, **options) as optimizer:
        train(optimizer, model, topology.rank, 3)
        if rank_info.node == 0:
            with torch.no_grad():
                model.weight[0, 0] = torch.nan
        start = model.weight.detach().clone()
        moved = torch.zeros_like(start)
        for step in range(3, 6):
            before = model.weight.detach().clone()
            hooked = optimizer.inner.register_step_post_hook(
                lambda *_, b=before: moved.add_(model.weight.detach() - b)
            )
            train(optimizer, model, topology.rank, 1, first=step)
            hooked.remove()
        if rank_info.node > 0:  # its own three steps, and nothing else
            torch.testing.assert_close(model.weight.detach(), start + moved)


def test_what_a_sparse_wire_holds_back_goes_out_when_nodes_agree(topology, rank_info):
    model = nn.Linear(40, 30)
    with wrap(topology, model, policy=daso.Fixed(4, 0), wire="topk") as optimizer:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(3, 40)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
        deltas = optimizer._session.runner.deltas
        rows = [] if deltas is None else deltas.rows[0]
        assert all(row.part.residual is None for row in rows)


def test_after_too_many_drops_the_schedule_stands_where_it_says(topology, rank_info):
    model = nn.Linear(4, 2)
    exchange = daso.Exchange(nonfinite="raise")
    optimizer = wrap(topology, model, policy=daso.Fixed(2, 2), exchange=exchange)
    train(optimizer, model, topology.rank, 2)
    with torch.no_grad():
        model.weight.fill_(torch.nan if rank_info.node == 0 else 1.0)
    train(optimizer, model, topology.rank, 2, first=2)  # sends it
    with pytest.raises(NonFiniteError):
        train(optimizer, model, topology.rank, 2, first=4)
    train(optimizer, model, topology.rank, 4, first=6)
    optimizer.synchronize()
    assert topology.equal_on_all_ranks(bits(model))
    optimizer.close()


def test_state_of_two_nodes_loads_into_one_and_back(topology, rank_info):
    def fresh():
        model = nn.Linear(4, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, daso.DASO(inner, module=model, topology=topology, policy=daso.Fixed(1, 0))

    model, optimizer = fresh()
    with optimizer:
        train(optimizer, model, topology.rank, 3)
        saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["momentum_buffer"] = entry["momentum_buffer"] + rank_info.rank  # as of other nodes
    saved["daso"]["shape"]["node_sizes"] = [99]
    model, optimizer = fresh()
    with optimizer:
        optimizer.load_state_dict(saved)
        again = optimizer.state_dict()  # before anything was set up anew
        train(optimizer, model, topology.rank, 2, first=3)
        assert optimizer.report()["batches"] == 5
        assert topology.equal_on_all_ranks(bits(model))
        optimizer.load_state_dict(again)
        train(optimizer, model, topology.rank, 1, first=3)
        assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.nodes((1, 1))
def test_a_dropped_exchange_says_nothing_of_how_long_others_take(topology):
    model = small()
    optimizer = wrap(topology, model, policy=daso.Fixed(4, 2))
    train(optimizer, model, topology.rank, 7)  # one sent after 4, merged after 6
    metrics = optimizer._session.runner.parts.metrics
    before = metrics.recent.exchange_seconds
    if topology.rank == 0:
        with torch.no_grad():
            next(model.parameters()).fill_(float("nan"))
    train(optimizer, model, topology.rank, 3, first=7)  # sent after 8, dropped after 10
    assert metrics.dropped == 1
    assert metrics.recent.exchange_seconds == before > 0
    train(optimizer, model, topology.rank, 4, first=10)
    assert metrics.recent.exchange_seconds != before
    optimizer.close()


def learn(model, optimizer, rank_info, steps):
    train_batches(optimizer, model, rank_info.rank, steps)


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=repr)
@pytest.mark.parametrize("thaws", [True, False])
def test_state_saved_after_freezing_is_of_earlier_steps(topology, rank_info, policy, thaws):
    """Gradients lie as in the step before: who resumes with other ones begins them anew."""
    options = {"topology": topology, "policy": policy, "wire": "fp32", "exchange": ORDERED}
    model = seeded(mlp)()
    model[0].requires_grad_(not thaws)
    optimizer = daso.DASO(sgd(model), module=model, **options)
    learn(model, optimizer, rank_info, range(3))
    optimizer.synchronize()
    model[0].requires_grad_(thaws)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.close()
    again = seeded(mlp)()
    again[0].requires_grad_(thaws)
    with daso.DASO(sgd(again), module=again, **options) as optimizer:
        again.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        learn(again, optimizer, rank_info, range(3, 6))
        optimizer.synchronize()
        grads = [p.grad for p in again.parameters() if p.grad is not None]
        assert len(grads) == (4 if thaws else 2)
        if policy.skip == 1:
            assert topology.equal_on_all_ranks(str([grad.tolist() for grad in grads]))


@pytest.mark.nodes(*SEVERAL_NODES)
def test_an_optimizer_may_have_no_learning_rate_of_its_own(topology, rank_info):
    """As transformers' Adafactor, which finds its own: lr=None."""

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                group["lr"] = 0.05
            super().step(closure)
            for group, rate in zip(self.param_groups, rates, strict=True):
                group["lr"] = rate

    model = seeded(mlp)()
    inner = Own(model.parameters(), lr=0.1)
    inner.param_groups[0]["lr"] = None
    with daso.DASO(inner, module=model, topology=topology) as optimizer:
        before = bits(model)
        learn(model, optimizer, rank_info, range(4))
        optimizer.synchronize()
    assert bits(model) != before
    assert topology.equal_on_all_ranks(str(bits(model)))


def test_an_optimizer_of_another_family_is_taken(topology, rank_info):
    """What wraps one without being a torch.optim.Optimizer itself."""

    class Around:
        def __init__(self, base):
            self.base = base

        param_groups = property(lambda self: self.base.param_groups)
        state = property(lambda self: self.base.state)

        def step(self, closure=None):
            return self.base.step(closure)

        def zero_grad(self, set_to_none=True):
            self.base.zero_grad(set_to_none)

        def state_dict(self):
            return self.base.state_dict()

        def load_state_dict(self, state):
            self.base.load_state_dict(state)

    model = seeded(mlp)()
    options = {"module": model, "topology": topology, "policy": daso.Fixed(2, 1)}
    with daso.DASO(Around(sgd(model)), **options) as optimizer:
        learn(model, optimizer, rank_info, range(4))
        optimizer.load_state_dict(optimizer.state_dict())
        learn(model, optimizer, rank_info, range(4, 6))
        optimizer.synchronize()
    assert topology.equal_on_all_ranks(str(bits(model)))
