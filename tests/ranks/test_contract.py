"""The drop-in contract: 47 points, a test each, for every way in (`doors.DOORS`).

A point that speaks of what only one door has is tried through that door; a comment says why. At
world size 1 there is nobody to agree with: there, what has no other side is as without daso.
"""

import contextlib
import copy
import inspect
import io
import pickle
import sys
import time
import types
from functools import partial

import pytest
import torch
from doors import DOORS, HOOKS, INNERS, PHASES, WRAPPER, bits, network
from jobs import hidden_launcher, once, run, run_on, slowness
from pairwise import pairwise
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from training import adamw, batch, sgd, train

import daso
from daso.errors import ExchangeError, LayoutError, NonFiniteError

pytest_plugins = ["contract"]
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

SYNCHRONOUS = daso.Fixed(1, 0)
BACKGROUND = daso.Fixed(4, 1)
only_wrapper = pytest.mark.parametrize("door", [WRAPPER], ids=["DASO"])
only_hooks = pytest.mark.parametrize("door", [HOOKS], ids=["attach"])
policies = pytest.mark.parametrize("policy", [SYNCHRONOUS, BACKGROUND], ids=repr)


def assert_trains_as_one(door, topology, make, *, steps=5):
    """Synchronous ranks together do what one program does that sees all their data."""
    model, expected = network().double(), network().double()
    with door(make(model), module=model, topology=topology, policy=SYNCHRONOUS) as opened:
        train(opened.optimizer, model, topology.rank, steps)
    train(make(expected), expected, 0, steps, size=topology.world_size)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    assert topology.equal_on_all_ranks(bits(*model.parameters()))


# --- identity ----------------------------------------------------------------------------------


def test_01_it_is_a_torch_optimizer(door, topology, make):
    model = network()
    inner = make(model.parameters())
    kind = type(inner)
    with door(inner, module=model, topology=topology) as (optimizer, _):
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert type(door.inner_of(optimizer)) is kind  # nobody swapped its class
        assert kind.__name__ in repr(optimizer)


@pytest.mark.parametrize("name", [*INNERS, "Adagrad"])
def test_02_any_optimizer_trains_as_one_program_that_sees_all_data(door, topology, name):
    make = {**INNERS, "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05)}[name]
    assert_trains_as_one(door, topology, lambda model: make(model.parameters()))


def test_03_one_rank_gives_the_bits_of_the_bare_optimizer(door, alone, make):
    model, bare_model = network(), network()
    inner, bare = make(model.parameters()), make(bare_model.parameters())
    with door(inner, module=model, topology=alone, policy=BACKGROUND) as (optimizer, handle):
        train(optimizer, model, 0, 50)
        train(bare, bare_model, 0, 50)
        assert bits(model) == bits(bare_model)
        assert bits(inner.state_dict()["state"]) == bits(bare.state_dict()["state"])
        assert handle.report()["batches"] == 50


class Odd(nn.Module):
    """One parameter of every kind that is easily forgotten."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.tied = nn.Linear(4, 4), nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.frozen, self.unused = nn.Linear(4, 4).requires_grad_(False), nn.Linear(3, 3)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x):
        y = self.frozen(self.tied(self.first(x))) * self.scale
        return torch.cat([y, nn.functional.linear(x, self.empty)], 1)

    def groups(self):
        slow = [self.scale, self.empty, *self.frozen.parameters(), *self.unused.parameters()]
        fast = [*self.first.parameters(), self.tied.bias]
        return [{"params": fast}, {"params": slow, "lr": 0.01}]


@policies
def test_04_all_groups_and_odd_parameters_are_trained(door, topology, rank_info, policy):
    model, expected = Odd(), Odd()
    untouched = bits(model.frozen, model.unused)
    inner = torch.optim.SGD(model.groups(), lr=0.05, momentum=0.9)
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 6)
        handle.synchronize()
    assert topology.equal_on_all_ranks(bits(model))
    assert bits(model.frozen, model.unused) == untouched
    assert model.unused.weight.grad is None
    if policy == SYNCHRONOUS:
        bare = torch.optim.SGD(expected.groups(), lr=0.05, momentum=0.9)
        train(bare, expected, 0, 6, size=rank_info.world_size)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    for layer, remedy in [
        (nn.Linear(2, 2, dtype=torch.complex64), "view_as_real"),
        (nn.Embedding(4, 2, sparse=True), "sparse=False"),
    ]:
        inner = torch.optim.SGD(layer.parameters(), lr=0.1)
        refused = pytest.raises(LayoutError, match=remedy)
        with (
            refused if rank_info.world_size > 1 else contextlib.nullcontext(),
            door(inner, module=layer, topology=topology),
        ):
            pass


def test_05_importing_starts_neither_mpi_nor_cuda(topology):
    program = (
        "import sys, daso\n"
        "assert not {'torch', 'mpi4py', 'mpi4py.MPI', 'cupy'} & set(sys.modules)\n"
        f"{', '.join(f'daso.{door.name}' for door in DOORS)}\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized() and 'cupy' not in sys.modules\n"
        "import mpi4py; mpi4py.rc.initialize = False\n"
        "from mpi4py import MPI\n"
        "assert not MPI.Is_initialized()\n"
    )
    ended = once(topology.world_comm, partial(run, [sys.executable, "-c", program]))
    assert ended.returncode == 0, ended.stderr


def test_06_parameter_names_are_kept(door, topology, rank_info):
    model = network()
    names = [name for name, _ in model.named_parameters()]
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    with door(inner, module=model, topology=topology) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 2)
        assert optimizer.param_groups[0]["param_names"] == names
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups[0]["param_names"] == names


def test_07_the_learning_rate_may_be_a_tensor(door, topology, rank_info):
    lr = torch.tensor(0.01)
    assert_trains_as_one(door, topology, lambda model: adamw(model, lr=lr.clone()))
    model = network()
    inner = adamw(model, lr=lr)
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 2)
        assert optimizer.param_groups[0]["lr"] is lr
        lr.zero_()
        before = bits(*model.parameters())
        train(optimizer, model, rank_info.rank, 1, first=2)
        assert bits(*model.parameters()) == before


@pytest.mark.parametrize("way", ["foreach", "fused", "maximize", "capturable"])
@pytest.mark.parametrize("family", [sgd, adamw])
def test_08_every_implementation_of_torch_works(door, topology, rank_info, family, way):
    if way != "capturable":
        assert_trains_as_one(door, topology, lambda model: family(model, **{way: True}))
        return
    if family is sgd:
        family = partial(adamw, amsgrad=True)  # SGD has no such keyword
    # Capturable is for graphs on a GPU: on a CPU it is torch's own error, the same behind a door.
    model = network()
    inner = family(model, capturable=True)
    with door(inner, module=model, topology=topology) as (optimizer, _):
        with pytest.raises(AssertionError, match="If capturable=True, params"):
            train(optimizer, model, rank_info.rank, 1)
        assert topology.equal_on_all_ranks("nobody is left waiting")


# --- shared state ------------------------------------------------------------------------------


def test_09_the_groups_are_the_inner_optimizers_own(door, topology, rank_info, accelerator):
    model = network()
    inner = sgd(model)
    groups, group = inner.param_groups, inner.param_groups[0]
    with door(inner, module=model, topology=topology) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 3)
        assert optimizer.param_groups is groups
        assert optimizer.param_groups[0] is group
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.param_groups is inner.param_groups
        accelerator.prepare(optimizer)  # saves and loads its state
        assert optimizer.param_groups is inner.param_groups
        for other in (copy.deepcopy(optimizer), repickled(optimizer)):
            assert other.param_groups is door.inner_of(other).param_groups
            assert other.param_groups[0]["params"][0] is not group["params"][0]


@pytest.fixture
def accelerator():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    with hidden_launcher():
        yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_10_state_and_defaults_are_shared_and_assignment_goes_through(door, topology, rank_info):
    model = network()
    inner = sgd(model)
    with door(inner, module=model, topology=topology) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 2)
        assert optimizer.state is inner.state
        assert optimizer.defaults is inner.defaults
        assert set(optimizer.state) == set(model.parameters())
        for name in ("param_groups", "state", "defaults"):
            new = copy.copy(getattr(inner, name))
            setattr(optimizer, name, new)
            assert getattr(inner, name) is new
        train(optimizer, model, rank_info.rank, 2, first=2)
        assert set(inner.state) == set(model.parameters())


@pytest.mark.parametrize("side", ["inner", "optimizer"])
def test_11_an_edited_learning_rate_acts_at_the_next_step(door, topology, rank_info, make, side):
    model = network()
    inner = make(model.parameters())
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 2)
        optimizer.load_state_dict(optimizer.state_dict())  # where copies go stale
        edited = inner if side == "inner" else optimizer
        edited.param_groups[0]["lr"] = 0.0
        before = bits(*model.parameters())
        train(optimizer, model, rank_info.rank, 1, first=2)
        assert bits(*model.parameters()) == before
        edited.param_groups[0]["lr"] = 0.1
        train(optimizer, model, rank_info.rank, 1, first=3)
        assert bits(*model.parameters()) != before


# --- step --------------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS", "Lion", "line search"])
def test_12_a_closure_runs_as_often_as_inner_asks_and_ranks_agree(
    door, topology, rank_info, name, policy
):
    search = partial(torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    model = network()
    inner = (search if name == "line search" else INNERS[name])(model.parameters())
    calls, returned, asked = [], [], []
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        for step in range(4):

            def closure(step=step):
                optimizer.zero_grad()
                loss = model(batch(step, rank_info.rank)).square().mean()
                loss.backward()
                calls.append(loss.item())
                return loss

            asked.append(len(calls))
            returned.append(float(torch.as_tensor(optimizer.step(closure)).detach()))
        report = handle.report()
    together = topology.world_comm if policy == SYNCHRONOUS else topology.node_comm
    assert len(set(together.allgather(len(calls)))) == 1
    if name in ("SGD", "AdamW", "Lion"):
        assert len(calls) == 4
    elif name == "LBFGS":
        assert len(calls) == 12
    # What inner saw first is what it returns: the mean over those that step together.
    means = torch.tensor(together.allgather([calls[at] for at in asked])).mean(0)
    torch.testing.assert_close(torch.tensor(returned), means, rtol=1e-4, atol=1e-6)
    assert report["batches"] == 4
    if rank_info.nodes > 1:
        assert report["exchanges"] == (4 if policy == SYNCHRONOUS else 0)  # merged after batch 5


@policies
def test_13_step_is_a_bound_method_that_may_be_overwritten(door, topology, rank_info, policy):
    model, expected = network(), network()
    inner, plain = sgd(model), sgd(expected)
    calls = []

    def counting(self, *arguments, **keywords):
        calls.append(self)
        return step.__func__(self, *arguments, **keywords)

    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        step = optimizer.step
        assert inspect.ismethod(step)
        assert step.__self__ is optimizer
        optimizer.step = types.MethodType(counting, optimizer)
        train(optimizer, model, rank_info.rank, 5)
        assert calls == [optimizer] * 5
        assert handle.report()["batches"] == 5
    with door(plain, module=expected, topology=topology, policy=policy) as (optimizer, _):
        train(optimizer, expected, rank_info.rank, 5)
    assert bits(model) == bits(expected)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [3]
    ),
}


@pytest.mark.parametrize("first", ["scheduler", "door"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_14_schedulers_work_made_before_or_after(door, topology, rank_info, name, first):
    make = SCHEDULERS[name]
    model, bare_model = network(), network()
    inner, bare = sgd(model), sgd(bare_model)
    schedule = make(inner) if first == "scheduler" else None
    expected = make(bare)
    with door(inner, module=model, topology=topology) as (optimizer, _):
        schedule = schedule or make(optimizer)
        for step in range(8):
            train(optimizer, model, rank_info.rank, 1, first=step)
            bare.step()
            for each in (schedule, expected):  # a warning about their order is an error here
                each.step(*[1.0] * isinstance(each, lr_scheduler.ReduceLROnPlateau))
            seen = [(g["lr"], g["momentum"]) for g in (optimizer.param_groups[0],)]
            assert seen == [(g["lr"], g["momentum"]) for g in bare.param_groups]
    assert bare.param_groups[0]["lr"] != 0.05


def test_15_step_hooks_run_once_in_order_the_last_after_communication(door, topology, rank_info):
    calls, seen = [], []
    model = network()
    inner = sgd(model)
    with (
        door(inner, module=model, topology=topology, policy=daso.Fixed(2, 0)) as (optimizer, _),
        contextlib.ExitStack() as hooks,
    ):

        def look(*_):
            calls.append("post")
            seen.append(bits(*model.parameters()))

        def note(stepped, args, kwargs):
            assert stepped is optimizer
            assert args == (optimizer,)  # as torch has it, ready to be given on
            calls.append("pre")

        for register, hook in [
            (optimizer.register_step_pre_hook, note),
            (optimizer.register_step_post_hook, look),
            (register_optimizer_step_pre_hook, lambda *_: calls.append("global pre")),
            (register_optimizer_step_post_hook, lambda *_: calls.append("global post")),
        ]:
            hooks.callback(register(hook).remove)
        train(optimizer, model, rank_info.rank, 4)
        assert seen[3] == bits(*model.parameters())  # nothing came after
    assert [call for call in calls if call in ("pre", "post")] == ["pre", "post"] * 4
    assert calls.count("global pre") == calls.count("global post") == 4
    assert topology.equal_on_all_ranks(seen[3])
    assert rank_info.world_size == 1 or not topology.equal_on_all_ranks(seen[2])


def test_16_a_step_without_backward_joins_the_others(door, topology, rank_info):
    weight = nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([weight], lr=1.0)
    with door(inner, topology=topology, policy=SYNCHRONOUS) as (optimizer, handle):
        for step in range(3):
            optimizer.zero_grad()
            if rank_info.rank == 0 or step == 1:
                weight.sum().backward()
            optimizer.step()
        assert handle.report()["batches"] == 3
    torch.testing.assert_close(weight.detach(), torch.full((3,), -(1 + 2 / rank_info.world_size)))


@policies
def test_17_gradients_may_be_set_to_none_or_zero(door, topology, rank_info, policy):
    ends = []
    for clear in (True, False, None):
        model = network()
        with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, _):
            for step in range(5):
                model.zero_grad() if clear is None else optimizer.zero_grad(set_to_none=clear)
                left = {p.grad is None for p in model.parameters()}
                assert left == {clear is not False or step == 0}
                assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)
                model(batch(step, rank_info.rank)).square().mean().backward()
                optimizer.step()
            ends.append(bits(model))
    assert ends[0] == ends[1] == ends[2]


@pytest.mark.parametrize("quiet", [True, False])
def test_18_only_step_counts_when_gradients_pile_up(door, topology, rank_info, quiet):
    weight = nn.Parameter(torch.zeros(3))
    inner = torch.optim.SGD([weight], lr=1.0)
    with door(inner, topology=topology, policy=SYNCHRONOUS) as (optimizer, handle):
        for _ in range(2):
            optimizer.zero_grad()
            with handle.no_sync() if quiet else contextlib.nullcontext():
                for _ in range(3):
                    (weight.sum() * (rank_info.rank + 1.0)).backward()
                if quiet:
                    assert weight.grad.tolist() == [3 * (rank_info.rank + 1.0)] * 3
            (weight.sum() * (rank_info.rank + 1.0)).backward()
            optimizer.step()
        assert handle.report()["batches"] == 2
        if rank_info.nodes > 1:
            assert handle.report()["exchanges"] == 2
    torch.testing.assert_close(weight.detach(), torch.full((3,), -4.0 * (rank_info.world_size + 1)))


def test_19_clipping_sees_the_gradients_that_are_used(door, topology, rank_info):
    model = network()
    inner = sgd(model, momentum=0)
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        for step in range(3):
            optimizer.zero_grad()
            expected = mean_gradients(topology, model, batch(step, rank_info.rank))
            model(batch(step, rank_info.rank)).square().mean().backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(norm, nn.utils.get_total_norm(expected))
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            after = [p.detach().sub(p.grad, alpha=0.05) for p in model.parameters()]
            optimizer.step()
            assert bits(*model.parameters()) == bits(*after)
    assert topology.equal_on_all_ranks(bits(*model.parameters()))


def mean_gradients(topology, model, inputs):
    """Return the mean of all ranks' gradients, computed beside any door."""
    buffers = copy.deepcopy([*model.buffers()])
    mine = torch.autograd.grad(model(inputs).square().mean(), [*model.parameters()])
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    everyones = topology.world_comm.allgather(mine)
    return [torch.stack(same).mean(0) for same in zip(*everyones, strict=True)]


@policies
@pytest.mark.parametrize("late", ["first", "last"])
def test_20_uneven_batch_counts_are_named_on_all_ranks(door, topology, rank_info, policy, late):
    odd_rank = 0 if late == "first" else rank_info.world_size - 1
    model = network()
    inner = sgd(model)
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 5)
        if rank_info.world_size == 1:  # nobody to be uneven with
            handle.synchronize()
            train(optimizer, model, 0, 1)
            assert handle.report()["batches"] == 6
            return
        start = time.monotonic()
        with pytest.raises(ExchangeError, match=r"rank \d+ took \d+ .*rank \d+ took \d+") as caught:
            if rank_info.rank != odd_rank:
                train(optimizer, model, rank_info.rank, 1, first=5)
            handle.synchronize()
        assert time.monotonic() - start < 10 * slowness()
    assert {f"took {n}" in str(caught.value) for n in (5, 6)} == {True}


def test_21_a_profiler_sees_each_step_once(door, topology, rank_info, make):
    from torch.profiler import ProfilerActivity, profile

    model = network()
    inner = make(model.parameters())
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            train(optimizer, model, rank_info.rank, 3, first=1)
    steps = [event.name for event in profiler.events() if event.name.startswith("Optimizer.step#")]
    assert steps == [f"Optimizer.step#{type(inner).__name__}.step"] * 3


# --- mixed precision ---------------------------------------------------------------------------


class Autocast(nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x):
        with torch.autocast("cpu", self.dtype):
            return self.model(x).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_22_autocast_trains_as_one_program(door, topology, rank_info, dtype):
    model, expected = Autocast(network(), dtype), Autocast(network(), dtype)
    with door(sgd(model), module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 4)
    train(sgd(expected), expected, 0, 4, size=rank_info.world_size)
    # A weight at the edge of two 16-bit numbers may fall either way.
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
    assert topology.equal_on_all_ranks(bits(*model.parameters()))


def scaled_step(optimizer, scaler, model, inputs, *, factor=1.0, clip=None):
    optimizer.zero_grad()
    scaler.scale(model(inputs).square().mean() * factor).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


def new_scaler(power=10):
    return torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=1000)


@pairwise(policy=PHASES, family=[sgd, adamw], clip=[None, 1.0], door=DOORS)
def test_23_an_inf_on_one_rank_leaves_all_at_the_same_batch(
    door, topology, rank_info, policy, family, clip
):
    model, scaler = network(), new_scaler()
    inner = family(model)
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        for step in range(12):
            bad = step == 5 and rank_info.rank == rank_info.world_size - 1
            inputs = batch(step, rank_info.rank)
            factor = float("inf") if bad else 1.0
            scaled_step(optimizer, scaler, model, inputs, factor=factor, clip=clip)
        report = handle.report()
        assert report["batches"] == 12
        assert topology.equal_on_all_ranks(report["skip_history"])
        assert all(p.isfinite().all() for p in model.parameters())
        handle.synchronize()
        assert topology.equal_on_all_ranks(bits(*model.parameters()))


@pytest.mark.parametrize("family", [sgd, adamw])
def test_24_a_fused_optimizer_and_a_scaler_skip_what_is_not_finite(
    door, topology, alone, rank_info, family
):
    model, scaler = network(), new_scaler()
    inner = family(model, fused=True)
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        for step in range(4):
            before = bits(*model.parameters())
            factor = float("inf") if step == 2 else 1.0
            scaled_step(optimizer, scaler, model, batch(step, rank_info.rank), factor=factor)
            assert (bits(*model.parameters()) == before) == (step == 2)
        assert scaler.get_scale() == 2.0**9
        assert not {"grad_scale", "found_inf"} & {*vars(optimizer), *vars(inner)}
    model, bare_model = network(), network()
    inner, bare = family(model, fused=True), family(bare_model, fused=True)
    with door(inner, module=model, topology=alone) as (optimizer, _):
        for optimizer_, model_ in ((optimizer, model), (bare, bare_model)):
            scaler = new_scaler()
            for step in range(4):
                scaled_step(optimizer_, scaler, model_, batch(step, 0))
    assert bits(model) == bits(bare_model)


@policies
@pytest.mark.parametrize("family", [sgd, adamw, partial(adamw, fused=True)])
def test_25_unscale_clip_and_step_give_the_bits_of_no_scaling(
    door, topology, rank_info, policy, family
):
    ends = []
    for scaler in (new_scaler(), torch.amp.GradScaler("cpu", enabled=False)):
        model = network()
        inner = family(model)
        with door(inner, module=model, topology=topology, policy=policy) as (optimizer, _):
            for step in range(6):  # a power of two goes in and out without rounding
                scaled_step(optimizer, scaler, model, batch(step, rank_info.rank), clip=0.1)
        ends.append(bits(model))
    assert ends[0] == ends[1]


def test_26_scales_that_drifted_apart_do_no_harm(door, topology, rank_info):
    model, scaler = network(), new_scaler()
    policy = daso.Plateau(epochs=2, warmup=0, cooldown=1, max_skip=4)
    with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, handle):
        for step in range(6):  # only one node sees an inf: its scale is halved
            bad = step == 2 and rank_info.rank == rank_info.world_size - 1
            inputs, factor = batch(step, rank_info.rank), float("inf") if bad else 1.0
            scaled_step(optimizer, scaler, model, inputs, factor=factor)
        handle.end_epoch(1.0)
        assert topology.equal_on_all_ranks(bits(*model.parameters()))
        for step in range(6, 10):  # from here gradients are averaged between nodes
            inputs = batch(step, rank_info.rank)
            expected = mean_gradients(topology, model, inputs)
            scaled_step(optimizer, scaler, model, inputs, clip=1e9)
            assert topology.equal_on_all_ranks(bits(*model.parameters()))
            if step > 6:  # the first may be used to bring scales together
                for p, gradient in zip(model.parameters(), expected, strict=True):
                    torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-6)


def test_27_nan_is_caught_before_it_is_sent_and_named_on_all_ranks(door, topology, rank_info):
    model = network()
    strict = daso.Exchange(nonfinite="raise")
    keywords = {"policy": daso.Fixed(2, 1), "exchange": strict}
    with door(sgd(model), module=model, topology=topology, **keywords) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 1)
        with torch.no_grad():
            if rank_info.node == rank_info.nodes - 1:
                model[3].bias.fill_(float("nan"))
        if rank_info.world_size == 1:  # nothing is sent
            train(optimizer, model, 0, 5)
            assert model[3].bias.isnan().all()
            return
        with pytest.raises(NonFiniteError) as caught:
            train(optimizer, model, rank_info.rank, 5)
    culprits = [rank for rank, node in enumerate(rank_info.node_of) if node == rank_info.nodes - 1]
    assert any(f"rank {rank} " in str(caught.value) for rank in culprits)
    assert "parameter " in str(caught.value)
    assert topology.equal_on_all_ranks(str(caught.value))


# --- saved state -------------------------------------------------------------------------------


def test_28_saved_state_is_inners_keys_and_one_of_ours_and_loads_both_ways(
    door, topology, rank_info, make
):
    model, bare_model = network(), network()
    inner, bare = make(model.parameters()), make(bare_model.parameters())
    with door(inner, module=model, topology=topology) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 5)
        saved = optimizer.state_dict()
        assert set(saved) == {*bare.state_dict(), "daso"}
        bare.load_state_dict(copy.deepcopy(saved))  # torch shares the tensors
        assert set(bare.state_dict()) == {"state", "param_groups"}
        assert bits(bare.state_dict()["state"]) == bits(saved["state"])
        train(bare, bare_model, 0, 2)
        plain = copy.deepcopy(bare.state_dict())
        plain = topology.world_comm.bcast(plain)  # a rank that loads another state is refused
        optimizer.load_state_dict(plain)
        assert bits(inner.state_dict()["state"]) == bits(plain["state"])
        train(optimizer, model, rank_info.rank, 2, first=5)


@pairwise(policy=PHASES, make=list(INNERS.values()), door=DOORS)
def test_29_saved_state_loads_with_weights_only(door, topology, rank_info, make, policy):
    model = network()
    inner = make(model.parameters())
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 10)
        saved = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(saved, file)
        loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        assert bits(loaded) == bits(saved)
        optimizer.load_state_dict(loaded)
        assert bits(optimizer.state_dict()) == bits(saved)


@pytest.mark.parametrize("policy", PHASES, ids=repr)
def test_30_saving_with_an_exchange_in_flight_changes_nothing(door, topology, rank_info, policy):
    ends = []
    for save in (True, False):
        model = network()
        with door(sgd(model), module=model, topology=topology, policy=policy) as opened:
            for step in range(12):
                train(opened.optimizer, model, rank_info.rank, 1, first=step)
                if save:
                    opened.optimizer.state_dict()
            ends.append((bits(model), opened.handle.report()["exchanges"]))
    assert ends[0] == ends[1]


# Policy and N such that an exchange is in flight after N steps, where there can be one; the last
# is saved in its warm-up.
RESUMES = [
    (daso.Fixed(1, 0), 10),
    (daso.Fixed(4, 0), 10),
    (daso.Fixed(4, 1), 8),
    (daso.Fixed(4, 4, warmup=3), 10),
    (daso.Fixed(3, 2), 10),
    (daso.Fixed(3, 3, warmup=6), 4),
]


@pairwise(resume=RESUMES, make=list(INNERS.values()), door=DOORS)
def test_31_resuming_gives_the_bits_of_going_on(door, topology, rank_info, make, resume):
    policy, steps = resume
    keywords = {"topology": topology, "policy": policy}
    model = network()
    with door(make(model.parameters()), module=model, **keywords) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, steps)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        train(optimizer, model, rank_info.rank, steps, first=steps)
        expected = [bits(model), bits(optimizer.state_dict()["state"])]
        handle.synchronize()
        expected += [bits(model), handle.report()["batches"]]
    again = network(seed=rank_info.rank + 1)
    with door(make(again.parameters()), module=again, **keywords) as (optimizer, handle):
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        again.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        assert handle.report()["batches"] == steps
        train(optimizer, again, rank_info.rank, steps, first=steps)
        ends = [bits(again), bits(optimizer.state_dict()["state"])]
        handle.synchronize()
        ends += [bits(again), handle.report()["batches"]]
    assert ends == expected
    assert topology.equal_on_all_ranks(ends[2])


@policies
def test_32_the_hidden_step_of_distributed_checkpoint_is_no_step(
    door, topology, rank_info, make, policy
):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = network()
    inner = make(model.parameters())
    if isinstance(inner, torch.optim.LBFGS):  # torch's own hidden step has no closure
        inner = torch.optim.Adagrad(model.parameters(), lr=0.01)
    with door(inner, module=model, topology=topology, policy=policy) as (optimizer, handle):
        before = bits(*model.parameters())
        for rank in range(rank_info.world_size):
            if rank == rank_info.rank:  # one alone would hang if it communicated
                saved = get_optimizer_state_dict(model, optimizer)
                assert {"state", "param_groups"} <= set(saved)
            topology.world_comm.Barrier()
        assert bits(*model.parameters()) == before
        assert handle.report()["batches"] == handle.report()["exchanges"] == 0
        train(optimizer, model, rank_info.rank, 5)
        handle.synchronize()
        assert handle.report()["batches"] == 5
        assert topology.equal_on_all_ranks(bits(model))


def test_32_a_step_of_ones_own_at_rate_0_counts(door, topology, rank_info):
    model = network()
    inner = sgd(model, lr=0.0, momentum=0)  # the first of a warm-up; SGD has no state
    with door(inner, module=model, topology=topology, policy=BACKGROUND) as (optimizer, handle):
        for step in range(4):
            optimizer.zero_grad(set_to_none=False)
            if step == 0 or rank_info.rank == 0:  # the others ran out of data: zeros are left
                model(batch(step, rank_info.rank)).square().mean().backward()
            optimizer.step()
        assert handle.report()["batches"] == 4


@pytest.mark.parametrize("policy", PHASES, ids=repr)
def test_33_state_of_another_world_size_is_taken_up(door, topology, alone, rank_info, policy):
    """Weights, the inner state and the count go on; what was under way between nodes does not."""
    model, other = network(), network()
    with door(sgd(model), module=model, topology=topology, policy=policy) as opened:
        train(opened.optimizer, model, rank_info.rank, 10)
        saved = copy.deepcopy(opened.optimizer.state_dict())
    with door(sgd(other), module=other, topology=alone, policy=policy) as (optimizer, handle):
        other.load_state_dict(model.state_dict())
        optimizer.load_state_dict(saved)
        assert bits(optimizer.state_dict()["state"]) == bits(saved["state"])
        assert handle.report()["batches"] == 10
        train(optimizer, other, 0, 3, first=10)
        assert handle.report()["batches"] == 13
        single = topology.world_comm.bcast(copy.deepcopy(optimizer.state_dict()))
        weights = topology.world_comm.bcast(other.state_dict())
    again = network(seed=1)
    with door(sgd(again), module=again, topology=topology, policy=policy) as (optimizer, handle):
        again.load_state_dict(weights)
        optimizer.load_state_dict(single)
        assert handle.report()["batches"] == 13
        train(optimizer, again, rank_info.rank, 6, first=13)
        handle.synchronize()
        assert topology.equal_on_all_ranks(bits(again))
        assert handle.report()["batches"] == 19


@policies
def test_34_a_group_may_be_added_on_the_way(door, topology, rank_info, policy):
    def grow(model, optimizer):
        torch.manual_seed(7)
        model.append(nn.Linear(2, 3))
        optimizer.add_param_group({"params": [*model[-1].parameters()], "lr": 0.02})

    model, expected = network(), network()
    with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 5)
        grow(model, optimizer)
        before = bits(model[-1])
        train(optimizer, model, rank_info.rank, 5, first=5)
        handle.synchronize()
        assert handle.report()["batches"] == 10
        assert optimizer.param_groups[1]["lr"] == 0.02
        assert bits(model[-1]) != before
    assert topology.equal_on_all_ranks(bits(model))
    if policy == SYNCHRONOUS:
        bare = sgd(expected)
        train(bare, expected, 0, 5, size=rank_info.world_size)
        grow(expected, bare)
        train(bare, expected, 0, 5, first=5, size=rank_info.world_size)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@policies
def test_34_another_layer_may_be_frozen_on_the_way(door, topology, rank_info, policy):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(False)
    with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 5)
        model[0].requires_grad_(True)  # as many parameters as before
        model[1].requires_grad_(False)
        train(optimizer, model, rank_info.rank, 5, first=5)
        handle.synchronize()
    assert topology.equal_on_all_ranks(bits(model))


def repickled(thing):
    return pickle.loads(pickle.dumps(thing))


# torch copies groups, state and defaults; LBFGS and Lion need more and cannot step after that, with
# or without us.
copiers = pytest.mark.parametrize("copied", [copy.deepcopy, repickled], ids=["deepcopy", "pickle"])
copyable = pytest.mark.parametrize("make", [INNERS["SGD"], INNERS["AdamW"]], ids=["SGD", "AdamW"])


@only_wrapper  # a user's own optimizer drops its hooks in a copy, as torch has it: next test
@copyable
@copiers
@pytest.mark.parametrize("policy", PHASES, ids=repr)
def test_35_a_copy_carries_no_communicator_and_trains_on(
    door, topology, rank_info, make, policy, copied
):
    model = network()
    inner = make(model.parameters())
    # What a 16-bit wire still owes is with the original: over fp32 there is nothing owed.
    keywords = {"topology": topology, "policy": policy, "wire": "fp32"}
    with door(inner, module=model, **keywords) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 8)
        handle.synchronize()
        if rank_info.rank == 0:  # one alone would hang if it communicated
            copied((model, optimizer))
        other_model, other = copied((model, optimizer))
        assert isinstance(other, type(optimizer))
        assert bits(other_model) == bits(model)
        train(optimizer, model, rank_info.rank, 6, first=8)
        train(other, other_model, rank_info.rank, 6, first=8)
        handle.synchronize()
        other.synchronize()
        # Its buffers are rank 0's of its first forward: it opened after that.
        assert bits(*other_model.parameters()) == bits(*model.parameters())
        assert topology.equal_on_all_ranks(bits(other_model))
        assert other.report()["batches"] == 14
        other.close()


@only_hooks
@copyable
@copiers
def test_35_a_copy_of_an_attached_optimizer_is_plain_until_attached(
    door, topology, rank_info, make, copied
):
    model = network()
    inner = make(model.parameters())
    with door(inner, module=model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 3)
        other_model, other = copied((model, optimizer))
        assert type(other) is type(inner)
        assert "daso" not in other.state_dict()
        if rank_info.rank == 0:
            alone_model, alone = copied((model, optimizer))
            train(alone, alone_model, 0, 2)  # nobody else is needed
    with door(other, module=other_model, topology=topology, policy=SYNCHRONOUS) as (optimizer, _):
        train(optimizer, other_model, rank_info.rank, 2)
        assert topology.equal_on_all_ranks(bits(*other_model.parameters()))


def test_36_state_dict_hooks_run_once_in_order(door, topology, rank_info):
    calls = []
    model = network()
    with door(sgd(model), module=model, topology=topology) as (optimizer, _):
        train(optimizer, model, rank_info.rank, 2)

        def mark(_, state):
            calls.append("saved")
            return {**state, "mark": "of the user"}

        def check(_, state):
            calls.append("loading")
            assert state["mark"] == "of the user"

        optimizer.register_state_dict_pre_hook(lambda _: calls.append("saving"))
        optimizer.register_state_dict_post_hook(mark)
        optimizer.register_load_state_dict_pre_hook(check)
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("loaded"))
        saved = optimizer.state_dict()
        assert {"state", "param_groups", "daso", "mark"} == set(saved)
        optimizer.load_state_dict(saved)
        assert calls == ["saving", "saved", "loading", "loaded"]


# --- frameworks --------------------------------------------------------------------------------


@policies
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning 2.6 on torch 2.13
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.filterwarnings("ignore:The `srun` command is available")  # where SLURM is installed
def test_37_lightning_trains(door, topology, rank_info, make, policy):
    from lightning import pytorch as lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses, self.opened = network(), [], None

        def training_step(self, step):
            loss = self.model(batch(int(step), rank_info.rank)).square().mean()
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            keywords = {"topology": topology, "policy": policy}
            self.opened = door.open(make(self.model.parameters()), module=self.model, **keywords)
            schedule = lr_scheduler.StepLR(self.opened.optimizer, 2, 0.5)
            return [self.opened.optimizer], [{"scheduler": schedule, "interval": "step"}]

    lit = Lit()
    with hidden_launcher():
        trainer = lightning.Trainer(
            max_steps=5,
            accelerator="cpu",
            devices=1,
            accumulate_grad_batches=2,
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(lit, torch.utils.data.DataLoader(torch.arange(20)))
    optimizer, handle = lit.opened
    assert handle.report()["batches"] == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(
        make([lit.model[0].weight]).defaults["lr"] / 4
    )
    assert topology.equal_on_all_ranks(len(lit.losses))
    handle.synchronize()
    assert topology.equal_on_all_ranks(bits(lit.model))
    handle.close()


@policies
def test_38_accelerate_trains_to_the_same_bits(door, topology, rank_info, accelerator, policy):
    model, expected = network(), network()
    with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, handle):
        schedule = lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared, stepped, scheduled = accelerator.prepare(model, optimizer, schedule)
        for step in range(6):
            stepped.zero_grad()
            accelerator.backward(prepared(batch(step, rank_info.rank)).square().mean())
            accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
            stepped.step()
            scheduled.step()
        assert handle.report()["batches"] == 6
        assert optimizer.param_groups[0]["lr"] == 0.05 / 8
        handle.synchronize()
    with door(sgd(expected), module=expected, topology=topology, policy=policy) as opened:
        schedule = lr_scheduler.StepLR(opened.optimizer, 2, 0.5)
        for step in range(6):
            opened.optimizer.zero_grad()
            expected(batch(step, rank_info.rank)).square().mean().backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            opened.optimizer.step()
            schedule.step()
        opened.handle.synchronize()
    assert bits(model) == bits(expected)
    assert topology.equal_on_all_ranks(bits(model))


class Supervised(nn.Module):
    """Speaks as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.model = network()

    def forward(self, x):
        return {"loss": self.model(x).square().mean()}


@policies
def test_39_the_trainer_of_transformers_trains(door, topology, rank_info, policy, folder):
    import transformers

    model = Supervised()
    data = [{"x": row} for step in range(4) for row in batch(step, rank_info.rank)]
    with (
        hidden_launcher(),
        door(adamw(model), module=model, topology=topology, policy=policy) as (optimizer, handle),
    ):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.5,
        )
        schedule = lr_scheduler.StepLR(optimizer, 3, 0.5)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=data, optimizers=(optimizer, schedule)
        )
        trainer.train()
        assert handle.report()["batches"] == 6
        assert optimizer.param_groups[0]["lr"] == 0.01 / 4
        handle.synchronize()
    assert bits(model) != bits(Supervised())
    assert topology.equal_on_all_ranks(bits(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("whole", [False, True])
def test_40_a_compiled_model_or_step_trains_to_the_same_bits(
    door, topology, rank_info, backend, whole
):
    ends = []
    for compiled in (True, False):
        model = network()
        forward = torch.compile(model, backend=backend) if compiled and not whole else model

        with door(sgd(model), module=model, topology=topology, policy=BACKGROUND) as opened:

            def step(inputs, optimizer=opened.optimizer, forward=forward):
                optimizer.zero_grad()
                forward(inputs).square().mean().backward()
                optimizer.step()

            take = torch.compile(step, backend=backend) if compiled and whole else step
            for number in range(5):
                take(batch(number, rank_info.rank))
            assert opened.handle.report()["batches"] == 5
        ends.append([p.detach() for p in model.parameters()])
        torch._dynamo.reset()
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0 if backend == "eager" else 1e-5, atol=0)


@pytest.fixture
def node_group(topology, rank_info, folder, monkeypatch):
    """A gloo process group over the ranks of this node."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(
        str(folder / f"node {rank_info.node}"), rank_info.local_size
    )
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank_info.local_rank, world_size=rank_info.local_size
    )
    yield
    torch.distributed.destroy_process_group()


@policies
def test_41_ddp_may_be_inside(door, topology, rank_info, node_group, policy):
    model, expected = network(), network()
    inside = nn.parallel.DistributedDataParallel(model)  # first DDP, then the door
    with door(sgd(model), module=inside, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, inside, rank_info.rank, 6)
        handle.synchronize()
    with door(sgd(expected), module=expected, topology=topology, policy=policy) as opened:
        train(opened.optimizer, expected, rank_info.rank, 6)
        opened.handle.synchronize()
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    assert topology.equal_on_all_ranks(bits(model))


@policies
def test_42_batchnorm_buffers_are_the_mean_of_all_ranks(door, topology, rank_info, policy):
    model = network()
    with door(sgd(model), module=model, topology=topology, policy=policy) as (optimizer, handle):
        train(optimizer, model, rank_info.rank, 5)
        everyones = topology.world_comm.allgather(model[1].running_mean.clone())
        assert rank_info.world_size == 1 or not topology.equal_on_all_ranks(
            bits(model[1].running_mean)
        )
        handle.synchronize()
    torch.testing.assert_close(model[1].running_mean, torch.stack(everyones).mean(0))
    assert model[1].num_batches_tracked == 5
    assert topology.equal_on_all_ranks(bits(model))


@policies
def test_43_averaged_models_follow_and_do_not_disturb(door, topology, rank_info, policy):
    averages = {
        "EMA": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
        "SWA": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    }
    ends = []
    for watched in (True, False):
        model = network()
        with door(sgd(model), module=model, topology=topology, policy=policy) as opened:
            models = [swa_utils.AveragedModel(model, **kind) for kind in averages.values()]
            seen = []
            for step in range(5):
                train(opened.optimizer, model, rank_info.rank, 1, first=step)
                seen.append(copy.deepcopy(model[0].weight.detach()))
                for average in models if watched else []:
                    average.update_parameters(model)
            opened.handle.synchronize()
            ends.append(bits(model))
        if watched:
            torch.testing.assert_close(models[1].module[0].weight, torch.stack(seen).mean(0))
            assert policy != SYNCHRONOUS or topology.equal_on_all_ranks(
                bits(*models[0].parameters(), *models[1].parameters())
            )
    assert ends[0] == ends[1]


# --- processes ---------------------------------------------------------------------------------

LOADERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset
import daso
from daso import Topology  # all of the communication layer is loaded, in workers too


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def main():
    topology = daso.init(ranks_per_node=1)
    model, keywords = torch.nn.Linear(4, 1), {"policy": daso.Fixed(2, 1)}
    inner = torch.optim.SGD(model.parameters(), lr=0.001)
    DOOR
    for way in ("fork", "forkserver", "spawn"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=way)
        for inputs in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        handle.synchronize()
        print(f"{way} works on rank {topology.rank}", flush=True)
    assert handle.report()["batches"] == 6
    handle.close()


if __name__ == "__main__":
    main()
"""


@only_wrapper  # workers see the package, not the way in
def test_44_data_loader_workers_start_in_every_way(door, topology, rank_info, folder):
    ended = job(topology, folder, LOADERS.replace("DOOR", door.line), min(rank_info.world_size, 2))
    assert ended.returncode == 0, ended.stderr
    for way in ("fork", "forkserver", "spawn"):
        for rank in range(min(rank_info.world_size, 2)):
            assert f"{way} works on rank {rank}" in ended.stdout


def job(topology, folder, text, ranks, *arguments):
    def work():
        program = folder / "program.py"
        program.write_text(text)
        return run_on(ranks, program, *arguments)

    return once(topology.world_comm, work)


TROUBLE = """
import sys, time
import torch
import daso

topology = daso.init(ranks_per_node=1)
last, trouble_at = int(sys.argv[1]), int(sys.argv[2])


def open_one(line):
    model, keywords, names = torch.nn.Linear(100, 100), {"policy": daso.Fixed(4, 4)}, {}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(line, {**globals(), **locals()}, names)
    return model, names["optimizer"], names["handle"]


opened = [open_one(line) for line in DOORS]
for step in range(last):
    if step == trouble_at and topology.rank == topology.world_size - 1:
        print("raised at", time.time(), flush=True)
        raise RuntimeError("the disk is on fire")
    for model, optimizer, handle in opened:
        optimizer.zero_grad()
        model(torch.randn(8, 100)).square().mean().backward()
        optimizer.step()
print("leaves", flush=True)
""".replace("DOORS", repr([door.line for door in DOORS]))


def test_45_a_rank_that_raises_ends_the_job_in_5_seconds(topology, rank_info, folder):
    ended = job(topology, folder, TROUBLE, rank_info.world_size, 10**9, 10)
    seconds = topology.world_comm.bcast(time.time()) - float(ended.stdout.split("raised at")[1])
    assert ended.returncode != 0
    assert seconds < 5 * slowness()
    assert "the disk is on fire" in ended.stderr
    if rank_info.world_size > 1:
        assert f"rank {rank_info.world_size - 1} of {rank_info.world_size}" in ended.stderr


def test_46_differently_seeded_ranks_start_as_rank_0(door, topology, rank_info, make):
    model = network(seed=rank_info.rank)
    model[1].running_mean += rank_info.rank
    before = topology.world_comm.bcast(bits(model))
    with door(make(model.parameters()), module=model, topology=topology) as (optimizer, _):
        assert bits(model) == before
        train(optimizer, model, rank_info.rank, 1)
        assert bits(model) != before


def test_47_closing_is_idempotent_and_leaves_a_plain_optimizer(door, topology, rank_info, make):
    model, bare_model = network(), network()
    inner, bare = make(model.parameters()), make(bare_model.parameters())
    hooks = hooks_of(inner)
    opened = door.open(inner, module=model, topology=topology, policy=BACKGROUND)
    train(opened.optimizer, model, rank_info.rank, 3)
    time.sleep(0.02 * rank_info.rank)
    train(opened.optimizer, model, rank_info.rank, 1, first=3)  # one is in flight
    time.sleep(0.02 * rank_info.rank)
    start = time.monotonic()
    opened.handle.close()
    opened.handle.close()
    assert time.monotonic() - start < 5 * slowness()
    assert hooks_of(inner) == hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    bare_model.load_state_dict(model.state_dict())
    bare.load_state_dict(copy.deepcopy(inner.state_dict()))  # torch shares the tensors
    assert set(inner.state_dict()) == {"state", "param_groups"}
    train(inner, model, rank_info.rank, 3)  # it is a plain optimizer again
    train(bare, bare_model, rank_info.rank, 3)
    assert bits(model) == bits(bare_model)
    opened = door.open(make(model.parameters()), module=model, topology=topology)
    with opened.handle:
        train(opened.optimizer, model, rank_info.rank, 3)
    assert topology.equal_on_all_ranks(bits(model))  # leaving synchronizes, then closes
    opened.handle.close()


def hooks_of(optimizer):
    """Return every hook of an optimizer, and what it has of its own."""
    hooks = {key: list(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}
    return hooks, set(vars(optimizer))


def test_47_a_program_that_never_closes_ends_by_itself(topology, rank_info, folder):
    ended = job(topology, folder, TROUBLE, rank_info.world_size, 6, -1)  # an exchange is in flight
    assert ended.returncode == 0, ended.stderr
    (said,) = set(ended.stderr.splitlines()) - {""}  # of rank 0 alone
    assert "this one ends while they hold different parameters" in said
    assert ended.stdout.count("leaves") == rank_info.world_size
