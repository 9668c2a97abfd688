"""Plans of memory as they are used: around loops, failures, copies; and what is told."""

import copy
import gc
import resource
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from expected_errors import raises
from jobs import HANG_SECONDS
from plans import (
    PICTURES,
    Residual,
    loss_of,
    made,
    mixed,
    planned,
    same,
    train,
    with_ways,
)
from torch import nn
from torch.nn import functional

import daso
from daso.errors import ConfigError
from daso.memory.course import RECOMPUTE, SWAP, floor
from daso.memory.sizes import parse_bytes
from daso.memory.static import static_bytes

# --- as it is used --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["residual", "transformer"])
def test_under_autocast(name):
    model, batch = made(name)

    def around():
        return torch.autocast("cpu", torch.bfloat16)

    plain, _ = train(copy.deepcopy(model), batch, steps=4, around=around)
    with around():
        plan = mixed(planned(model, batch))
    other = replace(plan, model=copy.deepcopy(model))
    found, report = train(other.model, batch, other, steps=4, around=around)
    assert report.diverged == 0
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
        plan = replace(mixed(planned(model, batch)), model=copy.deepcopy(model))
    found, applied = accumulated(plan.model, batch, plan, cast=cast, together=together)
    assert applied.report().diverged == 0
    assert same(found, plain)


def test_backward_twice_through_one_graph():
    model, batch = made("residual")
    model.eval()
    plan = mixed(planned(model, batch))
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
    plan = replace(mixed(planned(model, batch)), second=f"file:{tmp_path}")
    with daso.memory.apply(plan) as applied:
        losses = [loss_of(model(batch)), loss_of(model(batch))]
    for loss in losses:
        assert same(torch.autograd.grad(loss, [*model.parameters()]), plain)
    del losses, loss
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
    plan = mixed(planned(model, PICTURES))
    copied = copy.deepcopy(model)
    with daso.memory.apply(replace(plan, model=copied)) as applied:
        copied.fails = True
        copied.eval()
        with pytest.raises(ValueError, match="no"):
            copied(PICTURES)
        assert not list(applied._passes)
        copied.fails = False
        copied.train()
    assert not caplog.records
    found, _ = train(copied, PICTURES, replace(plan, model=copied), steps=2)
    assert same(found, plain)
    assert not copied._forward_hooks
    assert not copied._forward_pre_hooks


def test_a_model_is_copied_and_saved_inside_a_plan(tmp_path):
    model, batch = made("residual")
    kept = planned(model, batch)
    plan = with_ways(kept, RECOMPUTE)
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


def test_a_context_may_be_reentered_while_an_earlier_pass_is_pending(tmp_path):
    model, batch = made("residual")
    plan = planned(model, batch)
    plan = with_ways(plan, SWAP)
    applied, kept = daso.memory.apply(plan), None
    for _ in range(3):
        with applied:
            value = loss_of(model(batch))
            kept = value  # the last one's goes only now
            value.backward(retain_graph=True)
    kept.backward()
    assert applied.report().diverged == 0


def test_transforms_of_torch_func_go_unplanned():
    model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(8, 64)
    kept = daso.memory.plan(model, batch, "1GiB")
    plan = with_ways(kept, RECOMPUTE)
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
    plan = mixed(planned(model, batch))
    gc.disable()
    try:
        with daso.memory.apply(plan) as applied:
            for _ in range(3):
                model(batch)
            assert not list(applied._passes)
            with torch.no_grad():
                model(batch)
            assert applied.report().passes == 3
    finally:
        gc.enable()


def test_named_arguments_and_several_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x, *, scale):
            return {"left": torch.tanh(self.left(x)) * scale, "right": [self.right(x)]}

    model, x = Two(), torch.randn(64, 64)
    plan = daso.memory.plan(model, {"x": x, "scale": 2.0}, "1GiB")
    plan = with_ways(plan, SWAP)
    expected = torch.autograd.grad(
        model(x, scale=2.0)["left"].sum(), [*model.parameters()], allow_unused=True
    )
    with daso.memory.apply(plan) as applied:
        loss = model(x, scale=2.0)["left"].sum()
        found = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    assert applied.report().diverged == 0
    assert same(found[:2], expected[:2])


def test_with_daso_around_the_optimizer():
    model, batch = made("residual")
    plan = mixed(planned(model, batch))
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


def test_static_memory_is_counted():
    model, batch = made("residual")
    params = sum(param.nbytes for param in model.parameters())
    buffers = sum(one.nbytes for one in model.buffers())
    assert static_bytes(model, None, batch) == (params + buffers, params, 0, batch.nbytes)
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
    least = plan.static.total + floor(plan.profile)
    with pytest.raises(ConfigError, match=f"budget must be at least {least:,} bytes"):
        planned(model, batch, least - 1)
    planned(model, batch, least)


def test_decisions_are_told_by_names_of_modules():
    model, batch = made("residual")
    names = {name for name, _ in model.named_modules()}
    plan = mixed(planned(model, batch, units=[f"blocks.{number}" for number in range(3)]))
    assert {"blocks.0", "blocks.1", "blocks.2"} <= set(plan.ways)
    words = {name.removeprefix("after ").removeprefix("before ") for name in plan.ways}
    assert words <= names | {"(loss)"}
    total = sum(group.nbytes for group in plan.profile.groups if group.saved)
    assert sum(map(plan.bytes_of, ("keep", "swap", "recompute"))) == total


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
def test_invalid_budgets_are_refused(text):
    with pytest.raises(ConfigError, match="budget must be bytes"):
        parse_bytes("budget", text)


def test_what_cannot_be_planned_is_told(tmp_path):
    model, batch = made("residual")
    for options, told in [
        ({"second": "disk"}, "second must be 'host', 'file:FOLDER' or"),
        ({"second": "neighbour:much"}, "second must be bytes"),
        ({"second": f"file:{tmp_path}/none"}, "must be a writable folder"),
        ({"units": ["nobody"]}, "'nobody' is not"),
        ({"units": ["blocks.0", "blocks.0.1"]}, "'blocks.0.1' is inside 'blocks.0'"),
        ({"policy": "best"}, "policy must be one of"),
    ]:
        with pytest.raises(ConfigError, match=told):
            planned(model, batch, **options)
    with raises("planned-model-is-compiled"):
        planned(torch.compile(model, backend="eager"), batch)
    with raises("planned-model-without-parameters"):
        planned(nn.ReLU(), batch)
    with raises("loss-returns-no-number"):
        daso.memory.plan(model, batch, "1GiB", loss=lambda output: output)

    class Restless(Residual):
        turns = 0

        def forward(self, x):
            self.turns += 1
            x = functional.relu(self.norm(self.stem(x)))
            for block in [*self.blocks][: 2 + self.turns % 2]:
                x = functional.relu(block(x) + x)
            return self.out(x.mean((2, 3)))

    with pytest.raises(ConfigError, match="runs the same operations in every step"):
        planned(Restless(), batch)


def test_ctrl_c_in_forward_leaves_nothing_behind():
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    class Interrupted(Residual):
        def forward(self, x):
            super().forward(x)
            raise KeyboardInterrupt

    torch.manual_seed(0)
    plan = mixed(planned(Residual(), PICTURES))
    model = Interrupted()
    with pytest.raises(KeyboardInterrupt), daso.memory.apply(replace(plan, model=model)):
        model(PICTURES)
    assert _len_torch_dispatch_stack() == 0
    x = torch.randn(4, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result.data_ptr() == y.data_ptr()  # no hooks


def test_one_context_at_a_time():
    model, batch = made("residual")
    applied = daso.memory.apply(mixed(planned(model, batch)))
    with applied, raises("plan-applied-already"):
        applied.__enter__()


FULL = """
    import resource, torch, daso
    from dataclasses import replace
    from daso.memory.course import SWAP, valid_ways, simulate_plan
    from daso.memory.planner import Plan
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    plan = daso.memory.plan(model, torch.randn(512, 256), "1GiB", second="file:{folder}")
    profile = plan.profile
    ways = valid_ways(profile.units, (SWAP,) * len(profile.units))
    course = simulate_plan(profile, ways, float("inf"), plan.link)
    plan = replace(plan, chosen=Plan(ways, course))
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
