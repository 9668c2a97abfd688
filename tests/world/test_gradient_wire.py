"""Synchronous training whose gradients cross between nodes on a narrow wire."""

import copy
from dataclasses import replace

import pytest
import torch
from compare import ORDERED
from models import Odd, Stays, adamw, batch_loss, bits, mlp, seeded, sgd
from training import train_batches
from worlds import APART, SEVERAL_NODES

import daso
from daso.errors import ConfigError
from daso.plan.layout import fragments
from daso.plan.options import BITS, Settings
from daso.plan.policies import Replay
from daso.plan.schedule import MEASURE_EVERY
from daso.train.channels import Channels
from daso.train.simulated.nodes import SimulatedNodes

pytestmark = pytest.mark.nodes(*SEVERAL_NODES)
NARROW = ["bf16", "int8", "int4"]


def wrapped(topology, inner, model, gradient_wire, **options):
    options = {"policy": daso.Fixed(1, 0), "exchange": ORDERED, **options}
    gradients = daso.Gradients(wire=gradient_wire)
    return daso.DASO(inner, module=model, topology=topology, gradients=gradients, **options)


@pytest.mark.parametrize("wire", NARROW)
def test_ranks_are_alike_after_every_step_and_bytes_are_fewer(topology, wire):
    sent = {}
    for one in ("fp32", wire):
        model = seeded(mlp)()
        with wrapped(topology, adamw(model), model, one) as optimizer:
            for step in range(6):
                train_batches(optimizer, model, topology.rank, [step])
                assert all(
                    mine == bits(model) for mine in topology.world_comm.allgather(bits(model))
                )
            report = optimizer.report()
        assert report["gradient_wire"] == one
        sent[one] = sum(topology.world_comm.allgather(report["global_bytes_sent"]))
    # Beside a number for each parameter, and a scale for each payload.
    assert sent[wire] < {"bf16": 0.7, "int8": 0.5, "int4": 0.4}[wire] * sent["fp32"]


@pytest.mark.parametrize("wire", NARROW)
def test_flags_of_several_types_are_averaged_exactly_once_a_step(
    topology, rank_info, monkeypatch, wire
):
    """A tensor that one rank alone used has a gradient on all; one that none used has none."""
    means, mean = [], Channels.gradient_mean
    monkeypatch.setattr(
        Channels, "gradient_mean", lambda self, row: means.append(self) or mean(self, row)
    )
    model = seeded(Odd)()
    params = dict(model.named_parameters())
    with wrapped(topology, sgd(model), model, wire) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            model(inputs, rank_info.rank == step % 2).square().mean().backward()
            assert params["unused"].grad is None
            assert params["sometimes.weight"].grad is not None
            assert params["always.weight"].grad.dtype == torch.float64
            optimizer.step()
        # Where each rank has a lane: of fp32 and fp64 sums.
        assert means.count(optimizer._session.runner.parts.channels) in (2 * 3, 3 * 3)
        assert {bits(model)} == set(topology.world_comm.allgather(bits(model)))


class Pull(torch.nn.Module):
    """A row whose gradient is what it is told."""

    def __init__(self, numel):
        super().__init__()
        self.row = torch.nn.Parameter(torch.zeros(numel))

    def forward(self, gradient):
        return (self.row * gradient).sum()


@pytest.mark.parametrize("wire", NARROW)
def test_after_many_steps_no_more_is_missing_than_after_one(topology, wire):
    rank_info, numel = topology.rank_info, 500
    torch.manual_seed(rank_info.rank)
    gradient, model = torch.randn(numel) * torch.logspace(-4, 0, numel), Pull(numel)
    everyones = topology.world_comm.allgather(gradient)
    mean = sum(everyones) / rank_info.world_size
    with wrapped(topology, torch.optim.SGD(model.parameters(), lr=1.0), model, wire) as optimizer:
        for _ in range(40):
            optimizer.zero_grad()
            model(gradient).backward()
            optimizer.step()
    largest = max(float(one.abs().max()) for one in everyones)
    bits_of = {"bf16": 8, "int8": 8, "int4": 4}[wire]
    assert (model.row + 40 * mean).abs().max() < 4 * largest / 2 ** (bits_of - 1)


def test_ranks_without_a_gradient_take_the_mean_of_others(topology):
    torch.manual_seed(0)
    parts = torch.nn.ModuleDict({name: torch.nn.Linear(30, 3) for name in ("all", "one", "none")})
    before = parts["none"].weight.detach().clone()
    inner = torch.optim.AdamW(parts.parameters(), lr=0.1, weight_decay=0.5)
    with wrapped(topology, inner, parts, "int4") as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(4, 30)
            loss = parts["all"](x).sum()
            if topology.rank == 0:
                loss = loss + parts["one"](x).sum()
            loss.backward()
            optimizer.step()
        assert all(mine == bits(parts) for mine in topology.world_comm.allgather(bits(parts)))
    assert torch.equal(parts["none"].weight, before)
    assert parts["one"].weight.grad is not None


def test_a_gradient_that_is_not_finite_drops_a_step_and_is_forgotten(topology):
    model = seeded(mlp)()
    with wrapped(topology, sgd(model), model, "int8") as optimizer:
        train_batches(optimizer, model, topology.rank, range(2))
        before = bits(model)
        optimizer.zero_grad()
        scale = float("nan") if topology.rank == 0 else 1.0
        (scale * batch_loss(model, topology.rank, 2)).backward()
        optimizer.step()
        assert bits(model) == before
        train_batches(optimizer, model, topology.rank, range(3, 6))
        assert bits(model) != before
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert optimizer.report()["dropped"] == 1


def test_a_batch_that_is_left_out_for_its_gradients_leaves_nothing_behind(topology):
    model = seeded(mlp)()
    with wrapped(topology, sgd(model), model, "int4") as optimizer:
        train_batches(optimizer, model, topology.rank, range(2))
        optimizer.zero_grad()
        scale = float("inf") if topology.rank == 0 else 1.0
        (scale * batch_loss(model, topology.rank, 2)).backward()
        optimizer.zero_grad()  # and no step
        before = bits(model)
        train_batches(optimizer, model, topology.rank, range(3, 6))
        assert optimizer.report()["dropped"] == 0
        assert bits(model) != before


@pytest.mark.parametrize("wire", NARROW)
def test_scales_that_went_apart_do_not_stop_training(topology, wire):
    model = seeded(mlp)()
    policy = daso.Plateau(3, warmup=0, cooldown=2, max_skip=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    with wrapped(topology, sgd(model), model, wire, policy=policy) as optimizer:
        for step in range(18):
            optimizer.zero_grad()
            loss = batch_loss(model, topology.rank, step)
            if step == 8 and topology.rank == 0:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if step % 6 == 5:
                optimizer.end_epoch(1.0)
            if step == 9:
                before = bits(model)
        assert bits(model) != before
        assert all(torch.isfinite(p).all() for p in model.parameters())


def step_as_simulated(topology, optimizer, model, simulated, step):
    """Take a step on ranks and on simulated nodes, to the same bits; return the gradients' wire."""
    train_batches(optimizer, model, topology.rank, [step])
    ranks = range(topology.rank_info.world_size)
    simulated.step([lambda m, r=rank: batch_loss(m, r, step) for rank in ranks])
    theirs = simulated.models[topology.rank].parameters()
    assert all(map(torch.equal, model.parameters(), theirs)), step
    return optimizer.report()["gradient_wire"]


@pytest.mark.nodes(*APART)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_phase_that_is_hidden_comes_and_goes_as_on_simulated_nodes(topology, parts):
    """Drained, joined, measured and left: bit for bit."""
    last = MEASURE_EVERY + 12
    policy = Replay(((0, 1, 1), (8, 1, 0), (last - 8, 1, 1)), hidden=(8,))
    exchange = replace(ORDERED, fragments=parts)
    settings = Settings(
        wire="bf16", merge="auto", exchange=exchange, gradients=daso.Gradients(), outer=False
    )
    rank_info, build = topology.rank_info, seeded(mlp)
    simulated = SimulatedNodes(build, adamw, rank_info.world_size, policy=policy, settings=settings)
    model, wires = build(), []
    options = {"policy": policy, "wire": "bf16", "exchange": exchange}
    with wrapped(topology, adamw(model), model, "auto", **options) as optimizer:
        for step in range(last):
            wires.append(step_as_simulated(topology, optimizer, model, simulated, step))
        kinds = [event["kind"] for event in optimizer.report()["events"]]
    assert wires[6:9] == ["fp32", "int4", "int4"]
    assert wires[-1] == "fp32"
    assert (kinds.count("measured"), kinds.count("join")) == (1, 1)


@pytest.mark.nodes((1, 1, 1), *APART)  # of two nodes none rounds a mean
def test_gradient_wire_changes_as_simulated_and_resumed(topology):
    """From 4 bits to 8 and back, with what was rounded away: bit for bit."""
    policy = Replay(((0, 1, 0),), hidden=(0,), wide=((0, False), (4, True), (9, False)))
    settings = Settings(
        wire="bf16", merge="auto", exchange=ORDERED, gradients=daso.Gradients(), outer=False
    )
    rank_info, build = topology.rank_info, seeded(mlp)
    simulated = SimulatedNodes(build, adamw, rank_info.world_size, policy=policy, settings=settings)
    model, wires, saved = build(), [], None
    for start, stop in ((0, 6), (6, 12)):
        options = {"policy": policy, "wire": "bf16", "exchange": ORDERED}
        with wrapped(topology, adamw(model), model, "auto", **options) as optimizer:
            if saved:
                optimizer.load_state_dict(saved)
            for step in range(start, stop):
                wires.append(step_as_simulated(topology, optimizer, model, simulated, step))
            saved = copy.deepcopy(optimizer.state_dict())
            assert optimizer.report()["wide_history"] == list(policy.wide[: 2 + (start > 0)])
    assert wires == ["int4"] * 3 + ["int8"] * 5 + ["int4"] * 4


@pytest.mark.nodes(*APART)
def test_a_model_in_parts_begins_with_gradients_at_every_batch(topology):
    model = seeded(mlp)()
    options = {"policy": Stays(), "wire": "auto", "exchange": replace(ORDERED, fragments=2)}
    with wrapped(topology, adamw(model), model, "auto", **options) as optimizer:
        train_batches(optimizer, model, topology.rank, range(3))
        report = optimizer.report()
        assert topology.equal_on_all_ranks(bits(model))
    assert report["skip_history"] == [(0, 1, 0)]
    assert report["gradient_wire"] == "int8"
    assert "exchange" not in {event["kind"] for event in report["events"]}


@pytest.mark.nodes(*APART)
def test_what_gradients_would_take_is_reckoned_from_the_part_that_crossed(topology):
    model = seeded(mlp)()
    numels = [p.numel() for p in model.parameters()]
    shares = [sum(numels[at] for at in cut) / sum(numels) for cut in fragments(numels, 2)]
    assert len(set(shares)) == 2
    options = {"policy": daso.Fixed(1, 1), "wire": "fp32"}
    options["exchange"] = replace(ORDERED, fragments=2)
    found = []
    with wrapped(topology, adamw(model), model, "auto", **options) as optimizer:
        for step in range(9):
            train_batches(optimizer, model, topology.rank, [step])
            measured = optimizer.report()["measurements"]
            if measured["exchange_seconds"]:
                narrower = BITS["int4"] / BITS["fp32"]
                found.append(measured["exchange_seconds"] * narrower / measured["gradient_seconds"])
    one, other = found[-2:]  # one of each part
    assert sorted([one, other]) == pytest.approx(sorted(shares))


@pytest.mark.parametrize(
    ("gradients", "exchange"),
    [
        ({"wire": "int8", "reducer": "prioritized"}, {}),
        ({"wire": "bf16", "reducer": "host"}, {}),
        ({"wire": "fp16"}, {}),
        ({"wire": "topk"}, {}),
        ({"wire": "int4"}, {"algorithm": "mpi"}),
    ],
)
def test_what_cannot_cross_so_is_refused(topology, gradients, exchange):
    model = seeded(mlp)()
    options = {"wire": "fp32", "policy": daso.Fixed(1, 0), "topology": topology}
    with pytest.raises(ConfigError, match=r"wire"):
        daso.DASO(
            sgd(model),
            exchange=daso.Exchange(**exchange),
            gradients=daso.Gradients(**gradients),
            **options,
        )
