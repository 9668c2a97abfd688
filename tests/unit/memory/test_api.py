"""Plans of memory carried out: bit for bit as without, and never more bytes than were planned."""

import copy
import gc
import random
import resource
import subprocess
import sys
import textwrap
import time
import weakref
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from jobs import HANG_SECONDS
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import daso
from daso.errors import ConfigError
from daso.memory import passes
from daso.memory.planner import BOTH, KEEP, RECOMPUTE, SWAP, WAYS, Link, Plan, floor, simulate_plan
from daso.memory.sizes import parse_bytes
from daso.memory.static import static_bytes
from daso.memory.tiers import HostTier


class Residual(nn.Module):
    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = functional.relu(block(x) + x)
        return self.out(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, layers=2, width=32):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, width), nn.Linear(width, 10)
        self.place = nn.Parameter(torch.randn(16, width) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 64, 0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


class Skips(nn.Module):
    """A skip over everything, a tensor used three times, buffers of its own, spectral norm."""

    def __init__(self):
        super().__init__()
        self.down = spectral_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.mid, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        first = torch.tanh(self.down(x))
        if self.training:
            self.mean.mul_(0.9).add_(first.detach().mean((0, 2, 3)), alpha=0.1)
        mid = torch.sigmoid(self.mid(first - self.mean.view(1, -1, 1, 1))) * first
        x = functional.gelu(self.up(torch.cat([mid, first], 1)))
        return self.out((x * mid).mean((2, 3)))


class Checkpointed(nn.Module):
    """Uses torch's own checkpointing in its middle."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.mid = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x):
        x = functional.gelu(self.first(x))
        x = checkpoint(self.mid, x, use_reentrant=False)
        return self.last(x.mean((2, 3)))


PICTURES, WORDS = torch.randn(8, 3, 12, 12), torch.randint(0, 50, (8, 16))
MODELS = {
    "residual": (Residual, PICTURES),
    "transformer": (Transformer, WORDS),
    "skips": (Skips, PICTURES),
    "checkpointed": (Checkpointed, PICTURES),
}
TARGETS = torch.randint(0, 10, (8,))


def loss_of(output):
    return functional.cross_entropy(output.float(), TARGETS[: len(output)])


def made(name):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    return build(), batch


def planned(model, batch, budget="1GiB", **options):
    return daso.memory.plan(model, batch, budget, loss=loss_of, **options)


def with_ways(plan, ways, capacity=float("inf")):
    """The same plan with other ways."""
    course = simulate_plan(plan.script.units, tuple(ways), capacity, plan.link)
    return None if course is None else replace(plan, chosen=Plan(tuple(ways), course))


def train(model, batch, plan=None, steps=20, around=nullcontext):
    """Losses, gradients, parameters and buffers of a training; what was done of the plan."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    with daso.memory.apply(plan) if plan is not None else nullcontext() as applied:
        for _ in range(steps):
            optimizer.zero_grad()
            with around():
                loss = loss_of(model(batch))
            loss.backward()
            seen += [loss.detach(), *(param.grad.clone() for param in model.parameters())]
            optimizer.step()
    found = [*seen, *(one.detach().clone() for one in (*model.parameters(), *model.buffers()))]
    return found, None if applied is None else applied.report()


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


class Live(TorchDispatchMode):
    """Bytes of all storages that were made while it is entered, and still are there."""

    def __init__(self):
        super().__init__()
        self.there, self.now, self.most = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for one in tree_leaves((args, kwargs)):
            self.see(one, new=False)
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            self.see(one, new=True)
        self.most = max(self.most, self.now)
        return found

    def see(self, tensor, *, new):
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if new else 0
        if key not in self.there:

            def gone(_):
                self.now -= nbytes
                del self.there[key]

            self.there[key] = weakref.ref(storage, gone)
            self.now += nbytes


def live_bytes(model, batch, plan):
    with daso.memory.apply(plan):
        model(batch)  # the second memory is there from then on
        with Live() as live:
            output = model(batch)
            loss = loss_of(output)
            grads = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    del output, loss, grads
    return live.most


# --- bit for bit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second", ["host", pytest.param("file", marks=pytest.mark.later("another second memory"))]
)
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_trains_as_plain_training_does(name, second, tmp_path):
    model, batch = made(name)
    plain, _ = train(copy.deepcopy(model), batch)
    plan = planned(model, batch, second="host" if second == "host" else f"file:{tmp_path}")
    units, draw = plan.script.units, random.Random(0)
    all_ways = [[way] * len(units) for way in WAYS]
    all_ways += [[draw.choice(WAYS) for _ in units] for _ in range(4)]
    for ways in all_ways:
        other = replace(with_ways(plan, ways), model=copy.deepcopy(model))
        found, report = train(other.model, batch, other)
        assert same(found, plain), ways
        assert report.strayed == 0
        assert report.swapped_bytes == 20 * other.chosen.course.swapped_bytes
        assert report.passes == (20 if passes.Steps(plan.script, other.chosen).follows else 0)
        gone = [unit for unit, way in zip(units, ways, strict=True) if way in (RECOMPUTE, BOTH)]
        assert report.made_again == 20 * sum(1 for unit in gone if unit.tail.nbytes)
        assert report.resident_bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_what_is_there_is_what_was_planned(name):
    model, batch = made(name)
    plan = planned(model, batch)
    units, draw = plan.script.units, random.Random(1)
    least, plain = floor(units), plan.plain.peak_bytes
    assert live_bytes(model, batch, plan) <= plain + plan.static.gradients
    tried = 0
    for capacity in (least, (least + plain) // 2, (least + 3 * plain) // 4):
        for ways in [[SWAP] * len(units), *([draw.choice(WAYS) for _ in units] for _ in range(6))]:
            other = with_ways(plan, ways, capacity)
            if other is not None:
                tried += 1
                with_grads = other.chosen.course.peak_bytes + plan.static.gradients
                assert live_bytes(model, batch, other) <= with_grads, (capacity, ways)
    assert tried >= 3


class SlowTier(HostTier):
    def out(self, source, at):
        there = self.row(at, source.numel())
        return self.begin(lambda row: (time.sleep(0.002), there.copy_(row)), source)


def test_plans_hold_however_fast_copies_were_predicted():
    model, batch = made("residual")
    plan = planned(model, batch, second=lambda _: SlowTier(None))
    draw = random.Random(0)
    units = plan.script.units
    least, tried = floor(units), 0
    for _ in range(60):
        link = Link(draw.choice([1e7, 1e8, 1e9, 1e10]), draw.choice([1e-5, 1e-3]))
        capacity = draw.randint(least, plan.plain.peak_bytes)
        ways = [draw.choice(WAYS) for _ in units]
        other = with_ways(replace(plan, link=link), ways, capacity)
        if other is not None:
            tried += 1
            with_grads = other.chosen.course.peak_bytes + plan.static.gradients
            assert live_bytes(model, batch, other) <= with_grads, (capacity, ways, link)
    assert tried > 20


def test_a_budget_holds_what_it_names():
    model, batch = made("residual")
    plain = planned(model, batch)
    least = plain.static.total + floor(plain.script.units)
    for policy in ("all_swap", "greedy", "search"):
        for budget in (least, (least + plain.plain_bytes) // 2):
            plan = planned(model, batch, budget, policy=policy)
            assert plan.peak_bytes <= budget
            assert live_bytes(model, batch, plan) <= budget - plan.static.total + (
                plan.static.gradients
            )
    whole = planned(model, batch, plain.plain_bytes)
    assert set(whole.chosen.ways) == {KEEP}
    assert whole.slowdown == 1.0


def test_what_has_left_is_read_by_nobody(monkeypatch):
    model, batch = made("residual")
    plain, _ = train(copy.deepcopy(model), batch, steps=5)
    leave = passes.SavedTensor.leave

    def poisoned(held):
        base = held._base
        leave(held)
        if base is not None and held._base is None:
            base.fill_(float("nan")) if base.is_floating_point() else base.zero_()

    monkeypatch.setattr(passes.SavedTensor, "leave", poisoned)
    plan = planned(model, batch)
    least = floor(plan.script.units)
    for way in (SWAP, BOTH):
        capacity = least if way == SWAP else float("inf")
        other = with_ways(plan, [way] * len(plan.script.units), capacity)
        assert any(other.chosen.course.waits)
        other = replace(other, model=copy.deepcopy(model))
        found, _ = train(other.model, batch, other, steps=5)
        assert same(found, plain)


AT_ONCE = Link(float("inf"))  # so that nothing measured decides what leaves and comes when


class WatchedTier(HostTier):
    """Counts copies that begin to come back."""

    def __init__(self, begun):
        super().__init__(None)
        self.begun = begun

    def back(self, target, at):
        self.begun[-1] += 1
        return super().back(target, at)


def test_what_was_swapped_begins_to_come_back_when_that_was_planned(monkeypatch):
    model, batch = made("residual")
    begun = [0]  # copies: by the pass in a moment of backward, then by who reads, and so on
    plan = replace(planned(model, batch, second=lambda _: WatchedTier(begun)), link=AT_ONCE)
    units = plan.script.units
    plan = with_ways(plan, [SWAP] * len(units), (floor(units) + plan.plain.peak_bytes) // 2)
    moment = passes.Pass._moment

    def noted(one, unit):
        begun.append(0)
        moment(one, unit)
        begun.append(0)

    monkeypatch.setattr(passes.Pass, "_moment", noted)
    with daso.memory.apply(plan):
        loss = loss_of(model(batch))
        begun.clear()
        loss.backward()
    swapped = passes.Steps(plan.script, plan.chosen).swapped
    fetches = plan.chosen.course.fetches[len(units) :]
    assert sum(map(bool, fetches)) > 1
    assert begun[::2] == [sum(len(swapped[part]) for part in parts) for parts in fetches]
    assert not any(begun[1::2])


def test_a_tail_that_was_dropped_is_made_of_what_it_says(monkeypatch):
    # The test of the tests: a tail made of something else is noticed.
    model, batch = made("residual")
    plain, _ = train(copy.deepcopy(model), batch, steps=2)
    plan = planned(model, batch)
    other = with_ways(plan, [RECOMPUTE] * len(plan.script.units))
    other = replace(other, model=copy.deepcopy(model))
    fill = passes.SavedTensor.fill
    monkeypatch.setattr(
        passes.SavedTensor, "fill", lambda held, one: fill(held, one + (held._tail is not None))
    )
    found, _ = train(other.model, batch, other, steps=2)
    assert not same(found, plain)


# --- as it is used --------------------------------------------------------------------------------


def tight(model, batch, **options):
    """A plan that swaps and recomputes."""
    plain = planned(model, batch, **options)
    units = plain.script.units
    ways = [WAYS[1 + number % 3] for number in range(len(units))]
    return with_ways(plain, ways)


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_under_autocast(name):
    model, batch = made(name)

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    plain, _ = train(copy.deepcopy(model), batch, steps=4, around=around)
    with around():
        plan = tight(model, batch)
    other = replace(plan, model=copy.deepcopy(model))
    found, report = train(other.model, batch, other, steps=4, around=around)
    assert report.strayed == 0
    assert same(found, plain)


def accumulated(model, batch, plan=None, *, cast=False, together=False):
    torch.manual_seed(3)
    with (
        daso.memory.apply(plan) if plan else nullcontext() as applied,
        torch.autocast("cpu", torch.bfloat16, enabled=cast),
    ):
        if together:
            (loss_of(model(batch)) + loss_of(model(batch * 2))).backward()
        else:
            for factor in (1, 2):
                loss_of(model(batch * factor)).backward()
    found = [param.grad.clone() for param in model.parameters()]
    return found + [one.clone() for one in model.buffers()], applied


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_accumulated_and_two_forwards_go_into_one_backward(together, cast):
    model, batch = made("residual")
    plain, _ = accumulated(copy.deepcopy(model), batch, cast=cast, together=together)
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        plan = replace(tight(model, batch), model=copy.deepcopy(model))
    found, applied = accumulated(plan.model, batch, plan, cast=cast, together=together)
    assert applied.report().strayed == 0
    assert same(found, plain)


def test_backward_twice_through_one_graph():
    model, batch = made("residual")
    model.eval()
    plan = tight(model, batch)
    with daso.memory.apply(plan):
        loss = loss_of(model(batch))
        first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        second = torch.autograd.grad(loss, [*model.parameters()])
    assert same(first, second)
    assert same(first, torch.autograd.grad(loss_of(model(batch)), [*model.parameters()]))


def test_backward_after_the_end_of_a_plan(tmp_path):
    model, batch = made("residual")
    model.eval()
    plain = torch.autograd.grad(loss_of(model(batch)), [*model.parameters()])
    plan = replace(tight(model, batch), second=f"file:{tmp_path}")
    with daso.memory.apply(plan) as applied:
        losses = [loss_of(model(batch)), loss_of(model(batch))]
    for loss in losses:
        assert same(torch.autograd.grad(loss, [*model.parameters()]), plain)
    del losses, loss
    assert applied.report().resident_bytes == 0
    assert applied._tier._file == -1  # closed


def test_a_forward_that_fails_leaves_nothing_behind(caplog):
    class Failing(Residual):
        fails = False

        def forward(self, x):
            x = super().forward(x)
            if self.fails:
                raise ValueError("no")
            return x

    torch.manual_seed(0)
    model = Failing()
    plain, _ = train(copy.deepcopy(model), PICTURES, steps=2)
    plan = tight(model, PICTURES)
    copied = copy.deepcopy(model)
    with daso.memory.apply(replace(plan, model=copied)) as applied:
        copied.fails = True
        copied.eval()
        with pytest.raises(ValueError, match="no"):
            copied(PICTURES)
        assert applied.report().resident_bytes == 0
        copied.fails = False
        copied.train()
    assert not caplog.records
    found, _ = train(copied, PICTURES, replace(plan, model=copied), steps=2)
    assert same(found, plain)
    assert not copied._forward_hooks
    assert not copied._forward_pre_hooks


def test_sparse_gradients_and_complex_numbers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 64, sparse=True)
            self.out = nn.Linear(64, 64)

        def forward(self, x):
            x = torch.fft.fft(torch.tanh(self.embed(x))).conj() * 2
            return torch.tanh(self.out((x * x.conj()).real))

    torch.manual_seed(0)
    model = Odd()
    plain = torch.autograd.grad(model(WORDS).sum(), [*model.parameters()])
    plan = daso.memory.plan(model, WORDS, "1GiB")
    for way in (SWAP, RECOMPUTE, BOTH):
        other = with_ways(plan, [way] * len(plan.script.units))
        with daso.memory.apply(other) as applied:
            found = torch.autograd.grad(model(WORDS).sum(), [*model.parameters()])
        assert applied.report().strayed == 0
        assert torch.equal(found[0].to_dense(), plain[0].to_dense())
        assert same(found[1:], plain[1:])


@pytest.mark.parametrize("view", [lambda h: h.conj() + 1, lambda h: h.conj().imag * 3])
def test_conjugated_and_negated_views_are_not_taken_for_their_memory(view):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = 0.1 * torch.fft.fft(self.a(x))
            return self.b(torch.tanh((torch.sin(h) + torch.sin(view(h))).real))

    torch.manual_seed(0)
    model, batch = Spectral(), torch.randn(32, 64)
    plain = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    plan = daso.memory.plan(model, batch, "1GiB")
    other = with_ways(plan, [RECOMPUTE] * len(plan.script.units))
    with daso.memory.apply(other):
        found = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    assert same(found, plain)


def test_straying_before_a_tensor_is_changed_that_was_to_be_saved_is_exact():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            a = self.a(x)
            b = torch.tanh(a)
            c = a.sin() if self.training else a.mul_(2)
            return self.b(b * c)

    torch.manual_seed(0)
    model, batch = Changing(), torch.randn(32, 64)
    plan = daso.memory.plan(model, batch, "1GiB")
    model.eval()
    plain = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    for way in (SWAP, RECOMPUTE, BOTH):
        other = with_ways(plan, [way] * len(plan.script.units))
        with daso.memory.apply(other):
            found = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
        assert same(found, plain)


def test_a_model_is_copied_and_saved_inside_a_plan(tmp_path):
    model, batch = made("residual")
    kept = planned(model, batch)
    plan = with_ways(kept, [RECOMPUTE] * len(kept.script.units))
    with daso.memory.apply(plan) as applied:
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for one in (copied, loaded, averaged):
            loss_of(one(batch)).backward()
        assert applied.report().passes == 0
        loss_of(model(batch)).backward()
        assert applied.report().passes == 1


def test_a_context_may_be_entered_again_while_a_pass_of_before_lives_on(tmp_path):
    model, batch = made("residual")
    plan = planned(model, batch)
    plan = with_ways(plan, [SWAP] * len(plan.script.units))
    applied, kept = daso.memory.apply(plan), None
    for _ in range(3):
        with applied:
            value = loss_of(model(batch))
            kept = value  # the last one's goes only now
            value.backward(retain_graph=True)
    kept.backward()
    assert applied.report().strayed == 0


def test_transforms_of_torch_func_go_unplanned():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(8, 64)
    kept = daso.memory.plan(model, batch, "1GiB")
    plan = with_ways(kept, [RECOMPUTE] * len(kept.script.units))
    expected = torch.func.grad(lambda x: model(x).sum())(batch)
    with daso.memory.apply(plan) as applied:
        found = torch.func.grad(lambda x: model(x).sum())(batch)
    assert torch.equal(found, expected)
    assert applied.report().passes == 0
    assert torch._C._len_torch_dispatch_stack() == 0


def test_planning_leaves_a_batch_alone_that_forward_changes():
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(64, 64)

        def forward(self, x):
            return self.a(x.sub_(1.0))

    batch = torch.randn(32, 64)
    before = batch.clone()
    daso.memory.plan(Shifts(), batch, "1GiB")
    assert torch.equal(batch, before)


def test_a_forward_without_backward_leaves_nothing_behind():
    model, batch = made("residual")
    plan = tight(model, batch)
    gc.disable()
    try:
        with daso.memory.apply(plan) as applied:
            for _ in range(3):
                model(batch)
            assert applied.report().resident_bytes == 0
            with torch.no_grad():
                model(batch)
            assert applied.report().passes == 3
    finally:
        gc.enable()


def test_a_smaller_batch_follows_and_a_larger_one_is_exact_and_said(caplog):
    model, batch = made("residual")
    plan = tight(model, batch[:6])
    plan = replace(plan, model=copy.deepcopy(model))
    plain = [train(copy.deepcopy(model), batch[:count], steps=2)[0] for count in (3, 8)]
    start = copy.deepcopy(model.state_dict())
    found, report = train(plan.model, batch[:3], plan, steps=2)
    assert same(found, plain[0])
    assert not report.strayed
    assert not caplog.records
    plan.model.load_state_dict(start)
    found, report = train(plan.model, batch, plan, steps=2)
    assert same(found, plain[1])
    assert report.strayed == 2
    assert [one.message.count("beyond the budget") for one in caplog.records] == [1]


def test_a_model_that_does_something_else_is_exact_and_said_once(caplog):
    class Branching(Residual):
        extra = False

        def forward(self, x):
            if self.extra:
                x = torch.tanh(x) * 2
            return super().forward(x)

    torch.manual_seed(0)
    model, batch = Branching(), PICTURES
    plan = tight(model, batch)
    model.extra = True
    plain, _ = train(copy.deepcopy(model), batch, steps=3)
    found, report = train(model, batch, plan, steps=3)
    assert report.strayed == 3
    assert same(found, plain)
    assert len(caplog.records) == 1


def test_straying_in_the_middle_is_exact():
    class Late(Residual):
        extra = False

        def forward(self, x):
            x = functional.relu(self.norm(self.stem(x)))
            for number, block in enumerate(self.blocks):
                x = functional.relu(block(x) + x)
                if self.extra and number == 1:
                    x = torch.tanh(x)
            return self.out(x.mean((2, 3)))

    torch.manual_seed(0)
    model = Late()
    plain = planned(model, PICTURES)
    for way in (SWAP, RECOMPUTE, BOTH):
        start = copy.deepcopy(model)
        plan = replace(with_ways(plain, [way] * len(plain.script.units)), model=start)
        start.extra = True
        expected, _ = train(copy.deepcopy(start), PICTURES, steps=3)
        found, report = train(start, PICTURES, plan, steps=3)
        assert report.strayed == 3
        assert same(found, expected)


def test_named_arguments_and_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, *, scale):
            return {"left": torch.tanh(self.left(x)) * scale, "right": [self.right(x)]}

    model, x = Two(), torch.randn(64, 64)
    plan = daso.memory.plan(model, {"x": x, "scale": 2.0}, "1GiB")
    plan = with_ways(plan, [SWAP] * len(plan.script.units))
    expected = torch.autograd.grad(
        model(x, scale=2.0)["left"].sum(), [*model.parameters()], allow_unused=True
    )
    with daso.memory.apply(plan) as applied:
        loss = model(x, scale=2.0)["left"].sum()
        found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    assert applied.report().strayed == 0
    assert same(found[:2], expected[:2])


def test_modules_that_are_units_are_recomputed_as_wholes():
    model, batch = made("residual")
    plain, _ = train(copy.deepcopy(model), batch, steps=5)
    plan = planned(model, batch, units=[f"blocks.{number}" for number in range(3)])
    tails = [unit.tail.nbytes for unit in plan.script.units]
    inside = [number for number, closure in plan.script.closures.items() if closure.items]
    convs = [
        plan.script.funcs[op].name() for number in inside for op in plan.script.closures[number].ops
    ]
    assert any("convolution" in name for name in convs)
    assert sum(tails) > 0
    other = replace(with_ways(plan, [RECOMPUTE] * len(tails)), model=copy.deepcopy(model))
    found, report = train(other.model, batch, other, steps=5)
    assert same(found, plain)
    assert report.made_again


def test_with_daso_around_the_optimizer():
    model, batch = made("residual")
    plan = tight(model, batch)
    results = []
    for given in (None, plan):
        one = copy.deepcopy(model)
        torch.manual_seed(5)
        optimizer = daso.DASO(torch.optim.SGD(one.parameters(), lr=0.1), module=one)
        around = nullcontext() if given is None else daso.memory.apply(replace(given, model=one))
        with around:
            for _ in range(3):
                optimizer.zero_grad()
                loss_of(one(batch)).backward()
                optimizer.step()
        optimizer.close()
        results.append([*(p.detach().clone() for p in one.parameters()), *one.buffers()])
    assert same(*results)


# --- what is told ---------------------------------------------------------------------------------


def test_planning_changes_nothing():
    model, batch = made("residual")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    planned(model, batch)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert all((param.grad == 1).all() for param in model.parameters())


def test_what_stays_is_counted():
    model, batch = made("residual")
    params = sum(param.nbytes for param in model.parameters())
    largest = max(param.nbytes for param in model.parameters())
    buffers = sum(one.nbytes for one in model.buffers())
    assert static_bytes(model, None, batch) == (
        params + buffers,
        params + largest,
        0,
        batch.nbytes,
        0,
    )
    adam = torch.optim.AdamW(model.parameters())
    assert static_bytes(model, adam, batch).optimizer == 2 * params
    loss_of(model(batch)).backward()
    adam.step()
    steps = sum(4 for _ in model.parameters())
    assert static_bytes(model, adam, batch).optimizer == 2 * params + steps
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert static_bytes(model, plain, batch).optimizer == 0
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert static_bytes(model, momentum, batch).optimizer == params
    ours = daso.DASO(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), module=model)
    assert static_bytes(model, ours, batch).optimizer >= params
    ours.close()


def test_a_budget_below_the_floor_names_it():
    model, batch = made("residual")
    plan = planned(model, batch)
    least = plan.static.total + floor(plan.script.units)
    with pytest.raises(ConfigError, match=f"budget must be at least {least:,} bytes"):
        planned(model, batch, least - 1)
    planned(model, batch, least)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5KiB", 1536), ("12", 12), (7, 7)),
        *(("8G", 8 << 30), ("8gib", 8 << 30), ("1e9", 10**9), ("1048576tib", 1 << 60)),
    ],
)
def test_budgets_are_read(text, nbytes):
    assert parse_bytes("budget", text) == nbytes


@pytest.mark.parametrize(
    "text",
    [True, -5, None, "lots", "", "GiB", "8 G B", "-3GiB", "nan", 0, "0.5", "1e308", "4194305TiB"],
)
def test_budgets_that_are_none(text):
    with pytest.raises(ConfigError, match="budget must be bytes"):
        parse_bytes("budget", text)


def test_what_cannot_be_planned_is_told(tmp_path):
    model, batch = made("residual")
    for options, told in [
        ({"second": "disk"}, "second must be 'host', 'file:FOLDER' or"),
        ({"second": "neighbour:much"}, "second must be bytes"),
        ({"second": f"file:{tmp_path}/none"}, "must be a folder that can be written to"),
        ({"units": ["nobody"]}, "'nobody' is not"),
        ({"policy": "best"}, "policy must be one of"),
    ]:
        with pytest.raises(ConfigError, match=told):
            planned(model, batch, **options)
    with pytest.raises(ConfigError, match="not compiled"):
        planned(torch.compile(model, backend="eager"), batch)
    with pytest.raises(ConfigError, match="parameters that are trained"):
        planned(nn.ReLU(), batch)
    with pytest.raises(ConfigError, match="one number"):
        daso.memory.plan(model, batch, "1GiB", loss=lambda output: output)

    class Restless(Residual):
        turns = 0

        def forward(self, x):
            self.turns += 1
            return super().forward(x * 2 if self.turns % 2 else x)

    with pytest.raises(ConfigError, match="does the same in every step"):
        planned(Restless(), batch)


class Flow(nn.Module):
    """Same operations in the same order, on other tensors."""

    def __init__(self, step):
        super().__init__()
        self.left, self.right, self.out = (nn.Linear(64, 64) for _ in range(3))
        self.flag, self.step = True, step
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x):
        return self.out(self.step(self, x))


def other_tensors(model, x):
    a, b = torch.tanh(model.left(x)), torch.tanh(model.right(x))
    return torch.cos(a if model.flag else b) * (b if model.flag else a)


def more_tensors(model, x):
    a, b = torch.tanh(model.left(x)), torch.tanh(model.right(x))
    return torch.cat([a, b] if model.flag else [a, b, a]).cos()


@pytest.mark.parametrize("way", [SWAP, RECOMPUTE, BOTH])
@pytest.mark.parametrize("step", [other_tensors, more_tensors])
def test_other_tensors_in_the_same_operations_are_noticed(step, way):
    torch.manual_seed(0)
    model, x = Flow(step), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB")
    plan = with_ways(plan, [way] * len(plan.script.units))
    params = [*model.parameters()]
    for flag in (True, False, True):
        model.flag = flag
        plain = torch.autograd.grad(model(x).sum(), params)
        with daso.memory.apply(plan) as applied:
            found = torch.autograd.grad(model(x).sum(), params)
        assert same(found, plain)
        assert applied.report().strayed == (not flag)


def masked(model, x):
    mask = torch.triu(torch.ones(64, 64)) * (torch.rand(64, 64) > 0.3)
    return torch.sin(model.left(x) * mask) * torch.cos(model.right(x))


def drawn(model, x):
    mask = torch.bernoulli(torch.full((64, 64), 0.5), generator=model.own)
    return torch.sin(model.left(x) * mask) * mask


def running(model, x):
    x = torch.tanh(model.left(x))
    model.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return torch.sin(x - model.mean)


def replaced(model, x):
    x = torch.tanh(model.left(x))
    model.mean = 0.9 * model.mean + 0.1 * x.detach().mean(0)
    return torch.sin(x - model.mean)


@pytest.mark.parametrize("step", [masked, drawn, running, replaced])
def test_steps_that_draw_and_keep_things(step):
    torch.manual_seed(0)
    model, x = Flow(step), torch.randn(64, 64)
    model.own = torch.Generator().manual_seed(4)
    before = model.mean
    plan = daso.memory.plan(model, x, "1GiB")
    assert model.mean is before
    assert not before.any()
    results = []
    for way in (KEEP, SWAP, RECOMPUTE, BOTH):
        torch.manual_seed(1)
        model.own.manual_seed(4)
        model.mean = torch.zeros(64)
        with daso.memory.apply(with_ways(plan, [way] * len(plan.script.units))) as applied:
            loss = model(x).sum() + model(x).cos().sum()
            results.append([*torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)])
        results[-1] = [one for one in results[-1] if one is not None] + [model.mean]
        assert applied.report().strayed == 0
    assert all(same(one, results[0]) for one in results)


@pytest.mark.parametrize("way", [SWAP, RECOMPUTE])
def test_what_plain_training_refuses_is_refused(way):
    def changed(model, x):
        x = torch.tanh(model.left(x))
        y = x.sigmoid()
        z = y * x
        y.add_(1)
        return z

    model, x = Flow(changed), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB")
    with daso.memory.apply(with_ways(plan, [way] * len(plan.script.units))):
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
    model = Flow(other_tensors)
    plan = daso.memory.plan(model, x, "1GiB")
    with daso.memory.apply(with_ways(plan, [way] * len(plan.script.units))):
        loss = model(x).sum()
        with torch.no_grad():
            model.out.weight.mul_(3)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


def test_results_that_autograd_saves_are_not_held_for_ever():
    class Results(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x):
            return torch.softmax(self.last(torch.tanh(self.first(x))), 1).sum(1).exp()

    model, x = Results(), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB")
    plan = with_ways(plan, [SWAP] * len(plan.script.units))
    seen = []
    with daso.memory.apply(plan):
        for _ in range(3):
            seen.append(weakref.ref(model(x).untyped_storage()))
    gc.collect()
    assert [one() for one in seen] == [None] * 3


def test_ctrl_c_in_forward_leaves_nothing_behind():
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    class Interrupted(Residual):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    torch.manual_seed(0)
    plan = tight(Residual(), PICTURES)
    model = Interrupted()
    with pytest.raises(KeyboardInterrupt), daso.memory.apply(replace(plan, model=model)):
        model(PICTURES)
    assert _len_torch_dispatch_stack() == 0
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # no hooks


def test_casts_that_autocast_keeps_are_counted():
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.randn(8, 256)
    with torch.autocast("cpu", torch.bfloat16):
        plan = daso.memory.plan(model, x, "1GiB")
    assert plan.static.casts == sum(param.numel() * 2 for param in model.parameters())


def test_one_context_at_a_time():
    model, batch = made("residual")
    applied = daso.memory.apply(tight(model, batch))
    with applied, pytest.raises(ConfigError, match="once at a time"):
        applied.__enter__()


def test_what_is_saved_may_not_be_changed():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            self.kept = torch.tanh(self.first(x))
            return self.last(self.kept)

    model, x = Changing(), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB")
    plan = with_ways(plan, [SWAP] * len(plan.script.units))
    with daso.memory.apply(plan):
        loss = model(x).sum()
        with torch.no_grad():
            model.kept.add_(1)
        with pytest.raises(RuntimeError, match=r"changed|modified"):
            loss.backward()


FULL = """
    import resource, torch, daso
    from dataclasses import replace
    from daso.memory.planner import SWAP, Plan, simulate_plan
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    plan = daso.memory.plan(model, torch.randn(512, 256), "1GiB", second="file:{folder}")
    ways = (SWAP,) * len(plan.script.units)
    units = plan.script.units
    plan = replace(plan, chosen=Plan(ways, simulate_plan(units, ways, float("inf"), plan.link)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    with daso.memory.apply(plan):
        model(torch.randn(512, 256)).sum().backward()
"""


def test_a_full_disk_is_named(tmp_path):
    assert resource.RLIMIT_FSIZE
    program = textwrap.dedent(FULL).format(folder=tmp_path)
    program = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 1
    assert "the second memory needs" in done.stderr
    assert str(tmp_path) in done.stderr
    assert not list(tmp_path.iterdir())
