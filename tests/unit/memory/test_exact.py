"""Plans of memory carried out: the bits of plain training, and no more bytes than were allowed."""

import copy
import gc
import random
import time
import weakref
from dataclasses import replace

import pytest
import torch
from plans import (
    MODELS,
    MOVING,
    PICTURES,
    WORDS,
    Residual,
    loss_of,
    made,
    mixed,
    planned,
    same,
    taken_bytes,
    train,
    with_ways,
)
from torch import nn
from torch.nn import functional

import daso
from daso.memory import passes
from daso.memory.course import BOTH, KEEP, RECOMPUTE, SWAP, WAYS, Link, floor
from daso.memory.tiers import HostTier

# --- models that are hard to recompute ------------------------------------------------------------


class Shared(nn.Module):
    """A block called twice, and one module in two places."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.again, self.out = nn.Sequential(self.block, nn.Dropout(0.1)), nn.Linear(8, 10)

    def forward(self, x):
        x = self.again(self.block(self.stem(x)))
        return self.out(self.block(x).mean((2, 3)))


class Mutating(nn.Module):
    """In-place operations on results, and on inputs of modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)),
        )
        self.out = nn.Linear(8, 10)

    def forward(self, x):
        x = self.layers(x)
        x.mul_(0.5).add_(1)
        return self.out(x.mean((2, 3)))


class Branch(nn.Module):
    """Takes and gives dicts, tuples, numbers and None."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, given, *, scale, nothing=None):
        x = functional.gelu(self.conv(given["x"])) * scale
        return {"x": x, "seen": given["seen"] + 1}, nothing, "text"


class Structured(nn.Module):
    """Modules that are given, and return, more than tensors."""

    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Branch(8) for _ in range(3))

    def forward(self, x):
        given = {"x": self.stem(x), "seen": 0}
        for block in self.blocks:
            given, nothing, _ = block(given, scale=0.5)
            assert nothing is None
        assert given["seen"] == 3
        return self.out(given["x"].mean((2, 3)))


class Frozen(Residual):
    """Frozen layers in front and in the middle, a block without gradients."""

    def __init__(self):
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        with torch.no_grad():
            shift = self.blocks[0](x)
        for block in self.blocks:
            x = functional.relu(block(x) + shift)
        return self.out(x.mean((2, 3)))


class Casting(Residual):
    """Autocast inside of the model, and none inside of that."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = functional.relu(self.norm(self.stem(x)))
            for number, block in enumerate(self.blocks):
                with torch.autocast("cpu", torch.bfloat16, enabled=number != 1):
                    x = functional.relu(block(x.float() if number == 1 else x) + x)
        return self.out(x.float().mean((2, 3)))


class Noisy(nn.Module):
    """Draws from a generator of its own, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(8, 8, 3, padding=1), 0
        self.own = torch.Generator().manual_seed(4)

    def forward(self, x):
        self.calls += 1
        noise = torch.rand(x.shape, generator=self.own)
        return torch.tanh(self.conv(x) * noise) * self.calls


class Restless(nn.Module):
    """A module that does not do the same again."""

    def __init__(self):
        super().__init__()
        self.stem, self.noisy, self.out = nn.Conv2d(3, 8, 3), Noisy(), nn.Linear(8, 10)

    def forward(self, x):
        return self.out(self.noisy(self.stem(x)).mean((2, 3)))


class Statistics(nn.Module):
    """Reads and replaces a buffer in forward."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        x = torch.tanh(self.conv(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3))
        return torch.sin(x - self.mean.view(1, -1, 1, 1)) * x


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.blocks = nn.ModuleList(Statistics() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((2, 3)))


HARD = {
    one.__name__: (one, PICTURES)
    for one in (Shared, Mutating, Structured, Frozen, Casting, Replacing)
}
ALL = {**MODELS, **HARD}


def fresh(name):
    build, batch = ALL[name]
    torch.manual_seed(0)
    return build(), batch


# --- bit for bit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "second", ["host", pytest.param("file", marks=pytest.mark.later("another second memory"))]
)
@pytest.mark.parametrize("name", ALL)
def test_every_plan_trains_as_plain_training_does(name, second, tmp_path):
    model, batch = fresh(name)
    plain, _ = train(copy.deepcopy(model), batch, steps=6)
    plan = planned(model, batch, second="host" if second == "host" else f"file:{tmp_path}")
    units, draw = plan.profile.units, random.Random(0)
    assert name in ("skips", "checkpointed") or any(unit.recomputed_bytes for unit in units)
    every = [[way] * len(units) for way in WAYS]
    every += [[draw.choice(WAYS) for _ in units] for _ in range(4)]
    for ways in every:
        other = with_ways(plan, ways, model=copy.deepcopy(model))
        ends, report = train(other.model, batch, other, steps=6)
        assert same(ends, plain), other.ways
        assert report.diverged == 0
        assert report.swapped_bytes == 6 * other.chosen.simulated.swapped_bytes
        moving = [way for way in other.chosen.ways if way != KEEP]
        assert report.passes == (6 if moving else 0)
        assert (report.recomputed > 0) == any(way in (RECOMPUTE, BOTH) for way in moving)


def test_all_units_of_usual_models_can_be_recomputed():
    for name in ("transformer", "Structured", "Replacing"):
        model, batch = fresh(name)
        plan = planned(model, batch)
        named = dict(zip(plan.trace.names, plan.profile.units, strict=True))
        assert all(unit.recomputed_bytes for name, unit in named.items() if "blocks" in name), named


def test_units_with_other_results_the_second_time_are_not_recomputed():
    torch.manual_seed(0)
    model = Restless()
    plain, _ = train(copy.deepcopy(model), PICTURES, steps=3)
    start = copy.deepcopy(model)
    plan = with_ways(planned(model, PICTURES), RECOMPUTE)
    assert plan.ways["noisy"] == KEEP
    for way in WAYS:
        other = with_ways(plan, way, model=copy.deepcopy(start))
        assert same(train(other.model, PICTURES, other, steps=3)[0], plain)


def test_a_module_whose_input_changes_later_is_not_recomputed():
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.act, self.last = nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Linear(64, 10)

        def forward(self, x):
            x = self.first(x)
            y = self.act(x)
            x.add_(1)  # nobody has saved it
            return self.last(y + x)

    torch.manual_seed(0)
    model, batch = Later(), torch.randn(64, 64)
    plain = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    plan = daso.memory.plan(model, batch, "1GiB")
    for way in WAYS:
        with daso.memory.apply(with_ways(plan, way)):
            assert same(torch.autograd.grad(model(batch).sum(), [*model.parameters()]), plain)


def test_recomputation_gets_one_tensor_for_repeated_inputs():
    model, batch = made("transformer")  # attention asks whether query and key are the same
    plain, _ = train(copy.deepcopy(model), batch, steps=2)
    plan = planned(model, batch, units=[f"layers.{number}.self_attn" for number in range(2)])
    assert plan.profile.units[1].recomputed_bytes
    for way in MOVING:
        other = with_ways(plan, way, model=copy.deepcopy(model))
        assert same(train(other.model, batch, other, steps=2)[0], plain)


def test_recomputation_uses_the_mode_of_forward():
    model, batch = made("residual")
    grads = []
    plan = planned(model, batch)
    for way in (KEEP, RECOMPUTE, BOTH):
        other = with_ways(plan, way, model=copy.deepcopy(model))
        torch.manual_seed(1)
        with daso.memory.apply(other):
            loss = loss_of(other.model(batch))
            other.model.eval()
            grads.append(torch.autograd.grad(loss, [*other.model.parameters()]))
            assert not any(module.training for module in other.model.modules())
    assert same(grads[0], grads[1])
    assert same(grads[0], grads[2])


def test_sparse_gradients_and_complex_numbers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 64, sparse=True)
            self.mid, self.out = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)

        def forward(self, x):
            x = torch.fft.fft(self.mid(self.embed(x))).conj() * 2
            x = torch.sin(x) + torch.sin(x.conj()) * x.conj().imag
            return torch.tanh(self.out((x * x.conj()).real))

    torch.manual_seed(0)
    model = Odd()
    plain = torch.autograd.grad(model(WORDS).sum(), [*model.parameters()])
    plan = daso.memory.plan(model, WORDS, "1GiB")
    for way in MOVING:
        with daso.memory.apply(with_ways(plan, way)) as applied:
            grads = torch.autograd.grad(model(WORDS).sum(), [*model.parameters()])
        assert applied.report().diverged == 0
        assert torch.equal(grads[0].to_dense(), plain[0].to_dense())
        assert same(grads[1:], plain[1:])


@pytest.mark.parametrize("view", [lambda h: h.conj(), lambda h: h.conj().imag])
def test_conjugated_and_negated_views_are_not_moved(view):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            h = view(0.1 * torch.fft.fft(self.a(x)))
            return self.b((h * h * h).real)

    torch.manual_seed(0)
    model, batch = Spectral(), torch.randn(32, 64)
    plain = torch.autograd.grad(model(batch).sum(), [*model.parameters()])
    plan = daso.memory.plan(model, batch, "1GiB")
    with daso.memory.apply(with_ways(plan, SWAP)):
        assert same(torch.autograd.grad(model(batch).sum(), [*model.parameters()]), plain)


def test_swapped_out_memory_is_never_read(monkeypatch):
    model, batch = made("residual")
    plain, _ = train(copy.deepcopy(model), batch, steps=5)
    leave, gone = passes.SavedStorage.leave, []

    def poisoned(held):
        base = held._base
        leave(held)
        if base is not None and not held.is_in_memory:
            gone.append(held.nbytes)
            base.fill_(float("nan")) if base.is_floating_point() else base.zero_()

    plan = planned(model, batch)
    monkeypatch.setattr(passes.SavedStorage, "leave", poisoned)
    for way, capacity in ((SWAP, None), (BOTH, plan.plain.peak_bytes)):
        least = floor(plan.profile) if capacity is None else capacity
        steps = (least + plan.plain.peak_bytes * part // 8 for part in range(8))
        other = next(one for size in steps if (one := with_ways(plan, way, size)))
        if way == SWAP:
            assert any(other.chosen.simulated.waits)
        other = replace(other, model=copy.deepcopy(model))
        assert same(train(other.model, batch, other, steps=5)[0], plain)
    assert gone


def test_recomputed_values_are_used_in_backward(monkeypatch):
    # The test of the tests: what is computed otherwise is noticed.
    model, batch = made("residual")
    plain, _ = train(copy.deepcopy(model), batch, steps=2)
    other = with_ways(planned(model, batch), RECOMPUTE, model=copy.deepcopy(model))
    enter = passes._CountedRewind.__enter__

    def wrong(counted):
        enter(counted)
        torch.manual_seed(17)  # dropout draws something else

    monkeypatch.setattr(passes._CountedRewind, "__enter__", wrong)
    assert not same(train(other.model, batch, other, steps=2)[0], plain)


@pytest.mark.parametrize("way", MOVING)
def test_in_place_changes_of_saved_tensors_are_refused(way):
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
            self.mid = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
            self.last, self.spoil = nn.Linear(64, 64), False

        def forward(self, x):
            x = self.first(x)
            y = self.mid(x)
            z = y * x
            if self.spoil:
                y.add_(1)
            return self.last(z)

    model, x = Changed(), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB", units=["first", "mid", "last"])
    with daso.memory.apply(with_ways(plan, way)):
        model.spoil = True
        loss = model(x).sum()
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        model.spoil = False
        loss = model(x).sum()
        with torch.no_grad():
            model.mid[0].weight.mul_(3)
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()


# --- no more than was allowed ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual", "transformer", "skips", "Mutating", "Shared"])
def test_allocated_memory_stays_within_the_budget(name):
    model, batch = fresh(name)
    plain = planned(model, batch)
    most = taken_bytes(model, batch, plain)
    assert plain.measured_bytes <= plain.plain_bytes * 1.01
    assert abs(most - plain.measured_bytes) <= 0.01 * most
    least = plain.static.total + floor(plain.profile)
    for policy in ("least", "greedy", "search"):
        for part in (0, 1, 3):
            budget = least + (plain.plain_bytes - least) * part // 4
            plan = planned(model, batch, budget, policy=policy)
            assert plan.measured_bytes <= budget
            assert plan.peak_bytes <= budget
            assert taken_bytes(model, batch, plan) <= budget * 1.01, (policy, part)
    whole = planned(model, batch, plain.plain_bytes)
    assert set(whole.chosen.ways) == {KEEP}
    assert whole.slowdown == 1.0


class SlowTier(HostTier):
    def out(self, source, at):
        there = self.row(at, source.numel())
        return self.begin(lambda row: (time.sleep(0.002), there.copy_(row)), source)


def test_plans_stay_within_budget_at_any_copy_speed():
    model, batch = made("residual")
    plan = planned(model, batch, second=lambda _: SlowTier(None))
    units, draw, tried = plan.profile.units, random.Random(0), 0
    least = floor(plan.profile)
    for _ in range(40):
        link = Link(draw.choice([1e7, 1e8, 1e9, 1e10]), draw.choice([1e-5, 1e-3]))
        capacity = draw.randint(least, plan.plain.peak_bytes)
        ways = [draw.choice(WAYS) for _ in units]
        other = with_ways(replace(plan, link=link), ways, capacity)
        if other is not None:
            tried += 1
            taken = taken_bytes(model, batch, other)
            # Random states while a unit is computed again: 5 KB, of 700 here.
            assert taken <= other.peak_bytes + 16_384, (capacity, ways, link)
    assert tried > 10


def test_a_budget_that_a_step_exceeds_is_planned_again(monkeypatch):
    from daso.memory import api

    model, batch = made("residual")
    plain = planned(model, batch)
    budget = plain.plain_bytes
    rehearsed, seen = api._rehearse, []

    def more(made, *others):
        seen.append(made.chosen.simulated.peak_bytes)
        return rehearsed(made, *others) + 20_000

    monkeypatch.setattr(api, "_rehearse", more)
    plan = planned(model, batch, budget)
    assert plan.measured_bytes <= budget
    assert len(seen) > 1
    assert seen == sorted(seen, reverse=True)


AT_ONCE = Link(float("inf"))  # so that nothing measured decides what leaves and comes when


class WatchedTier(HostTier):
    """Counts copies that begin to come back."""

    def __init__(self, begun):
        super().__init__(None)
        self.begun = begun

    def back(self, target, at):
        self.begun[-1] += 1
        return super().back(target, at)


def test_copies_back_begin_at_the_planned_moments(monkeypatch):
    model, batch = made("residual")
    begun = [0]  # copies: by the pass in a moment of backward, then by the reader, and so on
    plan = replace(planned(model, batch, second=lambda _: WatchedTier(begun)), link=AT_ONCE)
    sizes = (floor(plan.profile) + plan.plain.peak_bytes * part // 8 for part in range(8))
    plan = next(one for size in sizes if (one := with_ways(plan, SWAP, size)))
    moment = passes.Pass._begin_backward

    def noted(one, unit):
        begun.append(0)
        moment(one, unit)
        begun.append(0)

    monkeypatch.setattr(passes.Pass, "_begin_backward", noted)
    with daso.memory.apply(plan):
        loss = loss_of(model(batch))
        begun.clear()
        loss.backward()
    fetches = plan.chosen.simulated.fetches[len(plan.profile.units) :]
    assert sum(map(bool, fetches)) > 1
    assert [count > 0 for count in begun[::2]] == [bool(parts) for parts in fetches]
    assert not any(begun[1::2])


def test_saved_tensors_are_freed_after_the_step():
    class Results(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
            self.last = nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Softmax(1))

        def forward(self, x):
            return self.last(self.first(x)).sum(1).exp()

    model, x = Results(), torch.randn(64, 64)
    plan = daso.memory.plan(model, x, "1GiB", units=["first", "last"])
    for way in MOVING:
        seen = []
        with daso.memory.apply(with_ways(plan, way)) as applied:
            for _ in range(3):
                y = model(x)
                seen.append(weakref.ref(y.untyped_storage()))
                seen += map(weakref.ref, applied._passes)
                del y
        gc.collect()
        assert not any(one() is not None for one in seen)


# --- what a plan does not know --------------------------------------------------------------------


def test_smaller_batches_follow_the_plan_and_larger_ones_are_exact_with_a_warning(caplog):
    model, batch = made("residual")
    plan = mixed(planned(model, batch[:6]), model=copy.deepcopy(model))
    plain = [train(copy.deepcopy(model), batch[:count], steps=2)[0] for count in (3, 8)]
    start = copy.deepcopy(model.state_dict())
    ends, report = train(plan.model, batch[:3], plan, steps=2)
    assert same(ends, plain[0])
    assert not report.diverged
    assert not caplog.records
    plan.model.load_state_dict(start)
    ends, report = train(plan.model, batch, plan, steps=2)
    assert same(ends, plain[1])
    assert report.diverged == 2
    assert [one.message.count("exceed the budget") for one in caplog.records] == [1]


class Branching(Residual):
    """Calls its blocks in another order, or some of them, or does more between."""

    order, extra = (0, 1, 2), False

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        for number in self.order:
            x = functional.relu(self.blocks[number](x) + x)
            if self.extra and number == 1:
                x = torch.tanh(x) * x
        return self.out(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("order", "extra", "diverged"),
    [((0, 2), False, 0), ((2, 1, 0), False, 3), ((0, 1, 2, 2), False, 3), ((0, 1, 2), True, 3)],
)
@pytest.mark.parametrize("way", MOVING)
def test_a_diverging_model_is_exact_with_one_warning(caplog, order, extra, diverged, way):
    torch.manual_seed(0)
    model = Branching()
    plan = with_ways(planned(model, PICTURES), way)
    model.order, model.extra = order, extra
    plain, _ = train(copy.deepcopy(model), PICTURES, steps=3)
    ends, report = train(model, PICTURES, plan, steps=3)
    assert same(ends, plain)
    if not (extra and way == RECOMPUTE):  # which saves nothing of its own between units
        assert report.diverged == diverged
        assert len(caplog.records) == min(diverged, 1)
