"""Steps made longer between exchanges, on ranks; its bits: compare.py and test_simulated.py."""

import copy
from unittest import mock

import pytest
import torch
from compare import ORDERED
from models import MuonOrLion, Stays, adamw, batch_loss, bits, mlp, seeded, sgd
from worlds import INSIDE, SEVERAL_NODES

import daso
from daso.errors import CheckpointError
from daso.train.deltas.meter import CpuContention

OFF = daso.Exchange(step_restoration="off")
pytestmark = pytest.mark.nodes(*SEVERAL_NODES)


def wrapped(topology, inner, model, **options):
    options = {"policy": daso.Fixed(2, 1), "exchange": ORDERED, **options}
    return daso.DASO(inner, module=model, topology=topology, **options)


def steps(topology, optimizer, model, numbers, rates=None):
    for step in numbers:
        optimizer.zero_grad()
        batch_loss(model, topology.rank, step).backward()
        optimizer.step()
        if rates is not None:
            rates.append([group["lr"] for group in optimizer.param_groups])


def rates_inside(inner):
    """List what the optimizer itself steps with, as it does."""
    inside = []
    inner.register_step_pre_hook(lambda one, *_: inside.append(one.param_groups[0]["lr"]))
    return inside


def test_hooks_step_as_the_wrapper_does_and_rates_are_the_users(topology):
    build, seen, gains, rates = seeded(mlp), [], [], []
    for door in ("wrapper", "hooks"):
        model = build()
        inner = adamw(model)
        if door == "wrapper":
            optimizer = handle = wrapped(topology, inner, model)
        else:
            optimizer, options = inner, {"policy": daso.Fixed(2, 1), "exchange": ORDERED}
            handle = daso.attach(inner, module=model, topology=topology, **options)
        inside = rates_inside(inner)
        steps(topology, optimizer, model, range(9), rates)
        gains.append(handle.report()["gain"])
        handle.synchronize()
        seen.append(bits(model))
        handle.close()
        assert inside[0] == 0.01 < inside[-1]
    assert seen[0] == seen[1]
    assert gains[0] == gains[1] > 1
    assert rates == [[0.01]] * 18


def decays_by_a_hook(inner):
    """Let a scheduler step in a hook, from the rate that it finds."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    inner.register_step_post_hook(lambda *_: scheduler.step())


def is_set_by_a_hook(inner):
    """Let a hook set the rate, whatever it finds."""
    rates = iter(0.01 * 0.9**step for step in range(1, 100))
    inner.register_step_post_hook(lambda one, *_: one.param_groups[0].update(lr=next(rates)))


class Tuning(torch.optim.Optimizer):
    """Steps by signs, at a rate that it lowers while it steps."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])
            group["lr"] *= 0.9


def tuning(model):
    return Tuning(model.parameters())


@pytest.mark.parametrize("door", ["wrapper", "hooks"])
@pytest.mark.parametrize(
    ("make", "change"),
    [(adamw, decays_by_a_hook), (adamw, is_set_by_a_hook), (tuning, lambda _: None)],
)
def test_rates_that_change_while_the_optimizer_steps_stay_changed(topology, door, make, change):
    model = seeded(mlp)()
    inner = make(model)
    change(inner)
    if door == "wrapper":
        optimizer = handle = wrapped(topology, inner, model)
    else:
        options = {"policy": daso.Fixed(2, 1), "exchange": ORDERED}
        handle = daso.attach(inner, module=model, topology=topology, **options)
        optimizer = inner
    steps(topology, optimizer, model, range(12))
    assert handle.report()["gain"] > 1.03
    group, first = inner.param_groups[0], make(model).param_groups[0]
    assert group["lr"] == pytest.approx(0.01 * 0.9**12, rel=1e-9)
    assert group.get("weight_decay") == first.get("weight_decay")
    handle.close()


def test_a_run_that_is_loaded_in_the_middle_has_the_same_gain_and_bits(topology):
    build, found = seeded(mlp), []
    for cut in (None, 6):
        model = build()
        optimizer = wrapped(topology, adamw(model), model)
        steps(topology, optimizer, model, range(cut or 12))
        if cut is not None:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.close()
            model = build()
            optimizer = wrapped(topology, adamw(model), model)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            steps(topology, optimizer, model, range(cut, 12))
        found.append((optimizer.report()["gain"], bits(model)))
        optimizer.close()
    assert found[0] == found[1]
    assert found[0][0] > 1


def test_a_checkpoint_of_another_version_is_refused_by_what_it_lacks(topology):
    model = seeded(mlp)()
    with wrapped(topology, adamw(model), model) as optimizer:
        state = optimizer.state_dict()
        del state["daso"]["schedule"]["gain"]
        with pytest.raises(CheckpointError, match="its schedule lacks gain; leave it out to load"):
            optimizer.load_state_dict(state)
        state["daso"]["shape"]["format"] = 3
        state["daso"]["schedule"]["gain"] = 1.0
        with pytest.raises(CheckpointError, match="format is 4, but it is of format 3; leave"):
            optimizer.load_state_dict(state)
        state["daso"]["schedule"] = None
        with pytest.raises(CheckpointError, match="its schedule lacks batch, epoch"):
            optimizer.load_state_dict(state)


def test_hooks_put_the_rate_back_after_a_step_that_raised(topology):
    model = seeded(mlp)()
    inner = adamw(model)
    handle = daso.attach(
        inner, module=model, topology=topology, policy=daso.Fixed(2, 1), exchange=ORDERED
    )
    steps(topology, inner, model, range(6))
    with mock.patch.object(inner, "_init_group", side_effect=RuntimeError):
        batch_loss(model, topology.rank, 6).backward()
        with pytest.raises(RuntimeError):
            inner.step()
    assert inner.param_groups[0]["lr"] > 0.01  # nothing of ours was called since
    inside = rates_inside(inner)
    steps(topology, inner, model, range(6, 7))
    assert inside == [pytest.approx(0.01 * handle.report()["gain"], rel=0.2)]
    assert inner.param_groups[0]["lr"] == 0.01
    handle.close()


def test_the_gain_comes_and_goes_as_the_memory_of_squares_does(topology):
    """Synchronous first: the step is as long as it should be. Later it is too short for a while."""
    model = seeded(mlp)()
    policy = daso.Plateau(4, warmup=1, cooldown=1, max_skip=2)
    inner = adamw(model)
    with wrapped(topology, inner, model, policy=policy) as optimizer:
        inside = rates_inside(inner)
        for epoch in range(4):
            steps(topology, optimizer, model, range(6 * epoch, 6 * epoch + 6))
            optimizer.end_epoch(1.0)
        assert optimizer.report()["gain"] > 1
    assert inside[:6] == [0.01] * 6
    assert inside[6] == 0.01 < inside[17]
    assert inside[18:] == sorted(inside[18:], reverse=True)
    assert inside[18] > inside[-1] > 0.01


def test_a_dropped_exchange_leaves_the_gain(topology):
    model = seeded(mlp)()
    with wrapped(topology, adamw(model), model) as optimizer:
        steps(topology, optimizer, model, range(6))
        before = optimizer.report()["gain"]
        if topology.rank == 0:
            with torch.no_grad():
                model[0].weight[0, 0] = float("nan")
        steps(topology, optimizer, model, range(6, 8))
        assert optimizer.report()["dropped"] == 0
        at_most = optimizer.report()["gain"]  # of the exchange that was on its way
        steps(topology, optimizer, model, range(8, 9))
        report = optimizer.report()
    assert (report["dropped"], report["gain"]) == (1, at_most)
    assert before > 1


@pytest.mark.parametrize(
    ("make", "options", "how"),
    [
        (adamw, {}, "a measured gain on the learning rate"),
        (adamw, {"exchange": OFF}, "none"),
        (adamw, {"outer": lambda p: torch.optim.SGD(p, lr=0.7)}, "none"),
        (adamw, {"wire": "topk"}, "none"),
        (sgd, {}, "none"),
    ],
)
def test_what_is_restored_is_reported(topology, make, options, how):
    model = seeded(mlp)()
    with wrapped(topology, make(model), model, **options) as optimizer:
        steps(topology, optimizer, model, range(9))
        report = optimizer.report()
    assert report["step_restoration"] == how
    assert (report["gain"] > 1) == (how != "none")
    seen = [event["required_gain"] for event in report["events"] if event["kind"] == "exchange"]
    assert any(seen) == (how != "none")


@pytest.mark.nodes(*INSIDE)
def test_inside_a_node_steps_are_the_users(topology):
    model = seeded(mlp)()
    inner = adamw(model)
    with wrapped(topology, inner, model) as optimizer:
        inside = rates_inside(inner)
        steps(topology, optimizer, model, range(6))
        assert "step_restoration" not in optimizer.report()
    assert inside == [0.01] * 6


def two_optimizers(model):
    """Muon for matrices, AdamW for the rest, as people train transformers with Muon."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return MuonOrLion(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)


def test_two_optimizers_of_one_model_each_have_a_gain_of_their_own(topology):
    model = seeded(mlp)()
    inners = two_optimizers(model)
    wrappers = [wrapped(topology, inner, model) for inner in inners]
    for step in range(12):
        for one in wrappers:
            one.zero_grad()
        batch_loss(model, topology.rank, step).backward()
        for one in wrappers:
            one.step()
    gains = [one.report()["gain"] for one in wrappers]
    for one in wrappers:
        one.synchronize()
    assert topology.equal_on_all_ranks(bits(model))
    assert all(1 < gain <= topology.nodes**0.5 for gain in gains)
    assert gains[0] != gains[1]
    for one in wrappers:
        one.close()


def test_two_optimizers_in_step_are_one_big_batch(topology):
    model, alone = seeded(mlp)(), seeded(mlp)()
    wrappers = [
        wrapped(topology, inner, model, policy=daso.Fixed(1, 0)) for inner in two_optimizers(model)
    ]
    rank_info, theirs = topology.rank_info, two_optimizers(alone)
    for step in range(6):
        for one in (*wrappers, *theirs):
            one.zero_grad()
        batch_loss(model, rank_info.rank, step).backward()
        losses = [batch_loss(alone, rank, step) for rank in range(rank_info.world_size)]
        (sum(losses) / rank_info.world_size).backward()
        for one in (*wrappers, *theirs):
            one.step()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    for one in wrappers:
        one.close()


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("meeting", ["loss of a closure", "epochs", "none"])
def test_what_is_exposed_is_measured_however_often_ranks_meet(topology, monkeypatch, meeting):
    monkeypatch.setattr(CpuContention, "of_steps", lambda *_: 0.0)  # which is told with it
    model = seeded(mlp)()
    inner = adamw(model)
    with daso.DASO(inner, module=model, topology=topology, policy=Stays()) as optimizer:
        for step in range(101):

            def closure(step=step):
                optimizer.zero_grad()
                loss = batch_loss(model, topology.rank, step)
                loss.backward()
                return loss

            if meeting == "loss of a closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            if meeting == "epochs" and step % 40 == 39:
                optimizer.end_epoch(1.0)
        told = [one for one in optimizer.report()["events"] if one["kind"] == "measured"]
    assert [one["batch"] for one in told] == [2, 5, *range(20, 101, 20)]
    assert all(one["exposed_seconds"] > 0 for one in told[1:])


@pytest.mark.nodes((1, 1))
def test_a_group_of_frozen_parameters_may_be_added_to_what_hooks_train(topology):
    model = seeded(mlp)()
    inner = adamw(model)
    options = {"policy": daso.Fixed(2, 1), "exchange": ORDERED}
    with daso.attach(inner, module=model, topology=topology, **options) as handle:
        steps(topology, inner, model, range(9))
        assert handle.report()["gain"] > 1
        frozen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        inner.add_param_group({"params": [frozen]})
        steps(topology, inner, model, range(9, 14))
        assert [group["lr"] for group in inner.param_groups] == [0.01, 0.01]
        assert handle.report()["gain"] > 1


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("door", ["wrapper", "hooks"])
def test_closures_and_saved_state_see_the_users_rate(topology, door):
    model, seen = seeded(mlp)(), []
    inner = adamw(model)
    options = {"topology": topology, "policy": daso.Fixed(2, 1), "exchange": ORDERED}
    wrap = daso.DASO if door == "wrapper" else daso.attach
    handle = wrap(inner, module=model, **options)
    optimizer = handle if door == "wrapper" else inner
    steps(topology, optimizer, model, range(9))
    assert handle.report()["gain"] > 1
    inside = rates_inside(inner) if door == "hooks" else []

    def closure(fails=False):
        seen.append(inner.param_groups[0]["lr"])
        optimizer.zero_grad()
        loss = batch_loss(model, topology.rank, 9)
        loss.backward()
        if fails:
            raise ArithmeticError
        return loss

    optimizer.step(closure)
    with pytest.raises(ArithmeticError):
        optimizer.step(lambda: closure(fails=True))
    assert seen == [0.01, 0.01]
    assert inner.state_dict()["param_groups"][0]["lr"] == 0.01
    assert all(rate >= 0.01 for rate in inside)


# --- optimizers that are linear in gradients, which the program clips --------------------------


def clip(most):
    def change(params):
        torch.nn.utils.clip_grad_norm_(params, most)

    return change


def replace_clipped(params):
    """Give each parameter a new gradient, as old programs clip."""
    norm = torch.stack([p.grad.norm() for p in params]).norm()
    for p in params:
        p.grad = p.grad * (1e-3 / norm)


def halve(params):
    for p in params:
        p.grad.mul_(0.5)


def leave(params):
    pass


def clipped_steps(topology, optimizer, model, numbers, change):
    for step in numbers:
        optimizer.zero_grad()
        batch_loss(model, topology.rank, step).backward()
        change(list(model.parameters()))
        optimizer.step()


@pytest.mark.parametrize("door", ["wrapper", "hooks"])
@pytest.mark.parametrize(
    ("change", "restored"),
    [
        (clip(1e-3), True),
        (replace_clipped, True),
        (clip(1e6), False),  # which writes to gradients too
        (halve, False),
        (leave, False),
    ],
)
def test_steps_are_restored_where_clipping_shortens_them(topology, door, change, restored):
    model = seeded(mlp)()
    inner = sgd(model)
    if door == "wrapper":
        optimizer = handle = wrapped(topology, inner, model)
    else:
        options = {"policy": daso.Fixed(2, 1), "exchange": ORDERED}
        handle = daso.attach(inner, module=model, topology=topology, **options)
        optimizer = inner
    inside = rates_inside(inner)
    rate = inner.param_groups[0]["lr"]
    clipped_steps(topology, optimizer, model, range(16), change)
    gain = handle.report()["gain"]
    handle.close()
    assert inside[0] == rate == inner.param_groups[0]["lr"]
    assert inside[-1] > 1.03 * rate if restored else inside[-1] == rate
    assert gain > 1.03 if restored else gain == 1.0


@pytest.mark.nodes(*SEVERAL_NODES, (2, 2))
def test_sums_that_a_step_averages_are_no_clipping(topology):
    """All of a step's backwards are under `no_sync()`: the step itself averages them."""
    model = seeded(mlp)()
    with wrapped(topology, sgd(model), model) as optimizer:
        for number in range(12):
            optimizer.zero_grad()
            with optimizer.no_sync():
                batch_loss(model, topology.rank, number).backward()
            optimizer.step()
        assert optimizer.report()["gain"] == 1.0


def test_the_gain_of_clipping_is_left_out_on_request(topology):
    model = seeded(mlp)()
    with wrapped(topology, sgd(model), model, exchange=OFF) as optimizer:
        clipped_steps(topology, optimizer, model, range(12), clip(1e-3))
        assert optimizer.report()["gain"] == 1.0


def test_a_gain_of_clipping_is_gone_soon_after_clipping_ends(topology):
    model = seeded(mlp)()
    with wrapped(topology, sgd(model), model, policy=daso.Fixed(1, 1)) as optimizer:
        clipped_steps(topology, optimizer, model, range(12), clip(1e-3))
        assert optimizer.report()["gain"] > 1.1
        clipped_steps(topology, optimizer, model, range(12, 42), leave)
        assert optimizer.report()["gain"] == pytest.approx(1.0, abs=1e-3)


def test_a_clipped_run_that_is_loaded_has_the_same_gain_and_bits(topology):
    build, found = seeded(mlp), []
    for cut in (None, 7):
        model = build()
        optimizer = wrapped(topology, sgd(model), model)
        clipped_steps(topology, optimizer, model, range(cut or 15), clip(1e-3))
        if cut is not None:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.close()
            model = build()
            optimizer = wrapped(topology, sgd(model), model)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            clipped_steps(topology, optimizer, model, range(cut, 15), clip(1e-3))
        found.append((optimizer.report()["gain"], bits(model)))
        optimizer.close()
    assert found[0] == found[1]
    assert found[0][0] > 1
