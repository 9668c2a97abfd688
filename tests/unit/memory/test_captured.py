"""Steps run in a planned arena: the values of ordinary steps to the bit, or an ordinary step."""

import copy
import random
import warnings
from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from expected_errors import raises
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss
from torch.utils.checkpoint import checkpoint

from daso.errors import ConfigError
from daso.memory.captured.guards import ModelWithLoss, ModuleTensors
from daso.memory.captured.planner import WAYS
from daso.memory.captured.step import CapturedStep
from daso.memory.captured.tracing import capture

CLASSES = 5
X, Y = torch.ones(8, 6), torch.ones(8, dtype=torch.int64)


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), linear())


def linear():
    return nn.Linear(16, CLASSES)


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        linear(),
    )


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.place = nn.Parameter(torch.randn(7, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = linear()

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens) + self.place)).mean(1)


def batches(kind, count=1, size=8):
    shape = {mlp: (size, 6), cnn: (size, 3, 8, 8)}.get(kind)
    for _ in range(count):
        tokens = torch.randint(11, (size, 7))
        yield (
            torch.randn(shape) if shape else tokens,
            torch.randint(CLASSES, (size,)),
        )


def pair(kind):
    torch.manual_seed(7)
    model = kind()
    return model, copy.deepcopy(model)


def ordinary(model, loss_fn, inputs, targets):
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    loss = loss_fn(model(*inputs), targets)
    loss.backward()
    return loss.detach()


def state(model):
    tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    return [None if one is None else one.detach().clone() for one in tensors]


def equal(some, others):
    return len(some) == len(others) and all(
        a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)
        for a, b in zip(some, others, strict=True)
    )


def both(step, model, twin, batch, loss_fn=cross_entropy):
    """Run a captured and an ordinary step with the same random numbers; they must be equal."""
    before = torch.get_rng_state()
    loss = step(*batch)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    assert torch.equal(loss, ordinary(twin, loss_fn, *batch))
    assert torch.equal(after, torch.get_rng_state())
    assert equal(state(model), state(twin))
    assert not loss.requires_grad


def unfit(match, model, loss_fn, *batch):
    with pytest.warns(UserWarning, match=match) as said:
        step = CapturedStep(model, loss_fn, *batch)
    assert len(said) == 1
    return step


KINDS = [mlp, cnn, pytest.param(Transformer, marks=pytest.mark.later("the slowest of three"))]
FASTER = ["greedy", "greedy_size"]  # ways to place tensors


# --- the same, to the bit -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_ordinary_ones(kind):
    model, twin = pair(kind)
    step = CapturedStep(model, cross_entropy, *next(batches(kind)))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, twin)]
    for batch in batches(kind, 20):
        both(step, model, twin, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert equal(state(model), state(twin))
    assert step.report().fallbacks == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "way",
    [
        "best_fit",
        *(pytest.param(way, marks=pytest.mark.later("another way")) for way in FASTER),
    ],
)
def test_poisoning_dead_memory_changes_no_result(kind, way):
    model, twin = pair(kind)
    whole, given = ModelWithLoss(model, cross_entropy), next(batches(kind))
    tensors = ModuleTensors(whole)
    run = capture(whole, tensors, given, way, _poison=True)
    for batch in batches(kind, 3):
        before = torch.get_rng_state()
        with torch.no_grad():
            loss, *grads = run([*tensors.read(), *batch])
        torch.set_rng_state(before)
        twin.zero_grad()
        assert torch.equal(loss, ordinary(twin, cross_entropy, *batch))
        assert equal(grads, [param.grad for param in twin.parameters()])
    assert run._arena.view(torch.float32).isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_live_tensors_do_not_share_memory(kind):
    model, _ = pair(kind)
    whole = ModelWithLoss(model, cross_entropy)
    run = capture(whole, ModuleTensors(whole), next(batches(kind)), "best")
    blocks = run.recording.blocks
    spans = {home: (blocks[home], at, at + blocks[home].nbytes) for home, at in run.offsets.items()}
    assert {*range(len(blocks))} - {*spans} == run.recording.loose
    assert all(start % 64 == 0 and stop <= run.plan.nbytes for _, start, stop in spans.values())
    assert run._arena.data_ptr() % 64 == 0
    for (one, start, stop), (other, begin, end) in combinations(spans.values(), 2):
        assert not one.overlaps(other) or stop <= begin or end <= start
    # What an operation is given and writes is needed while it runs: seen from the views themselves.
    places, env = run.recording.places, run._env
    for index, step in enumerate(run.recording.steps):
        for node in [*step.node.all_input_nodes, step.node]:
            place = places[node]
            if isinstance(place, list) or place is None or place.home not in spans:
                continue
            block, start, stop = spans[place.home]
            assert block.begin <= index < block.end
            if node in env:  # used by an operation itself, not by views alone
                first = env[node].data_ptr() - run._arena.data_ptr()
                assert start <= first <= stop


def test_gradients_are_added_and_those_that_are_kept_do_not_change():
    model, twin = pair(mlp)
    first, second, third = batches(mlp, 3)
    step = CapturedStep(model, cross_entropy, *first)
    both(step, model, twin, first)
    both(step, model, twin, second)  # added to those of the first
    model.zero_grad()
    twin.zero_grad()
    loss = step(*first)
    kept = [param.grad for param in model.parameters()]
    copies = [loss.clone(), *(one.clone() for one in kept)]
    model.zero_grad()
    step(*third)
    assert equal([loss, *kept], copies)
    assert all(param.grad is not one for param, one in zip(model.parameters(), kept, strict=True))


class Pair(nn.Module):
    """Two parameters with one gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)
        self.a, self.b = (nn.Parameter(torch.zeros(8, CLASSES)) for _ in range(2))

    def forward(self, x):
        return self.linear(x) + self.a + self.b


def test_gradients_of_one_tensor_get_separate_memory():
    model, twin = pair(Pair)
    first, second = batches(mlp, 2)
    step = CapturedStep(model, cross_entropy, *first)
    both(step, model, twin, first)
    kept = model.a.grad, model.b.grad
    copies = [one.clone() for one in kept]
    model.zero_grad()
    step(*second)
    assert equal(kept, copies)
    model.a.grad.zero_()
    assert model.b.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_gradients_are_called_by_autograds_order(kind):
    model, twin = pair(kind)
    logs = []
    for one in (model, twin):
        params = [*one.parameters()]
        logs.append([])

        def hook(param, params=params, log=logs[-1]):
            index = next(at for at, other in enumerate(params) if other is param)
            log.append((index, sum(other.grad is not None for other in params)))
            param.grad.mul_(2)  # as a hook that scales

        for param in params:
            param.register_post_accumulate_grad_hook(hook)
    step = CapturedStep(model, cross_entropy, *next(batches(kind)))
    assert logs[0] == []
    for batch in batches(kind, 2):
        both(step, model, twin, batch)
    assert logs[0] == logs[1]
    assert {index for index, _ in logs[0]} == {*range(len(params))}
    assert step.report().fallbacks == 0


def test_a_hook_that_raises_ends_the_step():
    model, twin = pair(mlp)
    first, second = batches(mlp, 2)
    step = CapturedStep(model, cross_entropy, *first)

    def stop(_):
        raise KeyError("planned")

    handle = model[2].weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(KeyError, match="planned"):
        step(*first)
    assert model[0].weight.grad is None
    handle.remove()
    model.zero_grad()
    both(step, model, twin, second)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast(kind, cached):
    model, twin = pair(kind)
    casts = torch.autocast("cpu", torch.bfloat16, cache_enabled=cached)
    with casts:
        step = CapturedStep(model, cross_entropy, *next(batches(kind)))
    for batch in batches(kind, 3):
        with casts:
            both(step, model, twin, batch)
    assert step.report().fallbacks == 0
    with pytest.warns(UserWarning, match="autocast"):
        both(step, model, twin, batch)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(6, 6) for _ in range(3))
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x, y):
        return self.second(self.first(x).relu()) + y


@pytest.mark.parametrize("autocast", [False, True])
def test_tied_frozen_and_unused_parameters_and_several_inputs(autocast):
    model, twin = pair(Tied)
    inputs, targets = (torch.randn(4, 6), torch.randn(4, 6)), torch.randn(4, 6)
    with torch.autocast("cpu") if autocast else nullcontext():
        step = CapturedStep(model, mse_loss, inputs, targets)
        for _ in range(3):
            both(step, model, twin, (inputs, targets), mse_loss)
    assert model.unused.weight.grad is None
    assert model.first.bias.grad is None
    assert step.report().fallbacks == 0
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())
    with pytest.warns(UserWarning, match=r"second\.weight must share"):
        step(inputs, targets)


def test_channels_last_and_the_strides_of_gradients():
    model, twin = (one.to(memory_format=torch.channels_last) for one in pair(cnn))
    inputs, targets = next(batches(cnn))
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    step = CapturedStep(model, cross_entropy, inputs, targets)
    for _ in range(3):
        both(step, model, twin, (inputs, targets))
    assert step.report().fallbacks == 0
    strides = [[param.grad.stride() for param in one.parameters()] for one in (model, twin)]
    assert strides[0] == strides[1]


def test_double_precision_and_a_loss_that_is_a_module_with_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, found, targets):
            self.calls += 1
            return mse_loss(found * self.scale, targets)

    model, twin = (one.double() for one in pair(mlp))
    loss_fn = Scaled()
    loss_twin = copy.deepcopy(loss_fn)
    batch = torch.randn(8, 6).double(), torch.randn(8, CLASSES).double()
    step = CapturedStep(model, loss_fn, *batch)
    assert loss_fn.calls == 0
    for _ in range(3):
        assert torch.equal(step(*batch), ordinary(twin, loss_twin, *batch))
    assert equal(state(model) + state(loss_fn), state(twin) + state(loss_twin))
    assert loss_fn.calls == 3


def test_storages_of_parameters_and_parameters_may_be_replaced():
    model, twin = pair(mlp)
    step = CapturedStep(model, cross_entropy, *next(batches(mlp)))
    for batch in batches(mlp, 3):
        both(step, model, twin, batch)
        for one in (model, twin):
            one[0].weight.data = one[0].weight.data * 0.5
            one[2].weight = nn.Parameter(one[2].weight.detach() * 2)
            one[2].bias.data.add_(1)
            one.zero_grad()
    assert step.report().fallbacks == 0


@pytest.mark.parametrize("kind", KINDS)
def test_capturing_changes_nothing(kind):
    model, _ = pair(kind)
    batch = next(batches(kind))
    ordinary(model, cross_entropy, *batch)
    grads = [param.grad for param in model.parameters()]
    before, rng, python = state(model), torch.get_rng_state(), random.getstate()
    given = [one.clone() for one in batch]
    attributes = [dict(vars(module)) for module in model.modules()]
    CapturedStep(model, cross_entropy, *batch)
    assert equal(before, state(model))
    assert all(one is param.grad for one, param in zip(grads, model.parameters(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert python == random.getstate()
    assert equal(given, list(batch))
    assert attributes == [vars(module) for module in model.modules()]


# --- what it needs --------------------------------------------------------------------------------


def test_the_report_counts_memory_and_operations():
    report = CapturedStep(cnn(), cross_entropy, *next(batches(cnn))).report()
    assert report.bound <= report.arena < report.one_by_one
    assert report.ops == report.direct + report.in_place + sum(report.allocating.values())
    # torch 2.6 allocates for norms as well.
    before = report.allocating.get("aten._native_batch_norm_legit.default", 0)
    assert before in (0, 2)
    assert {op: n for op, n in report.allocating.items() if "norm_legit" not in op} == {
        "aten.convolution.default": 2,
        "aten.convolution_backward.default": 2,
        "aten.native_batch_norm_backward.default": 2,
    }
    assert 0 < report.allocated < report.one_by_one
    # What is allocated apart has no place in the arena, so that both together may be more.
    assert max(report.arena, report.allocated) <= report.ordinary <= report.arena + report.allocated
    assert report.way in WAYS
    with pytest.raises(AttributeError):
        report.arena = 0


class Nobody:
    """Takes gradients, and keeps none."""

    def memory(self, _):
        return None

    def take(self, index, gradient, *, own):
        pass


def allocated(run, values):
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.no_grad():
        run(values)
        with torch.profiler.profile(
            profile_memory=True, activities=activities, acc_events=True
        ) as seen:
            run.forward(values)
            run.backward(Nobody())
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.events())


def test_operations_that_write_directly_allocate_nothing():
    model, given = mlp(), next(batches(mlp))
    step = CapturedStep(model, cross_entropy, *given)
    report = step.report()
    assert report.direct == report.ops == 20
    assert allocated(step._run, [*step._guard.values(given)]) == 0
    other = CapturedStep(cnn(), cross_entropy, *(batch := next(batches(cnn))))
    assert allocated(other._run, [*other._guard.values(batch)]) > 0  # it would be seen


def test_nothing_is_resized(capfd):
    """Those that resize are copied: torch tells of it on stderr, past Python's warnings."""
    step = CapturedStep(nn.Linear(6, 6), mse_loss, X, X)
    step(X, X)
    assert step.report().allocating == {"aten.mse_loss.default": 1}
    assert capfd.readouterr().err == ""


def test_inputs_are_not_kept_alive():
    from weakref import ref

    step = CapturedStep(mlp(), cross_entropy, *next(batches(mlp)))
    inputs, targets = next(batches(mlp))
    step(inputs, targets)
    gone = ref(inputs)
    del inputs
    assert gone() is None


# --- ordinary steps instead -----------------------------------------------------------------------


def test_another_batch_size_runs_as_an_ordinary_step_and_is_told_once():
    model, twin = pair(cnn)
    step = CapturedStep(model, cross_entropy, *next(batches(cnn)))
    small = next(batches(cnn, size=3))
    with pytest.warns(
        UserWarning, match=r"input 0 must be .*\(8, 3, 8, 8\).* not .*\(3, 3"
    ) as said:
        both(step, model, twin, small)
    assert len(said) == 1
    assert "CapturedStep" in str(said[0].message)
    assert said[0].filename == __file__
    for batch in (next(batches(cnn)), small, next(batches(cnn))):
        both(step, model, twin, batch)
    assert step.report().fallbacks == 2


def cast(model):
    return model[4].weight.requires_grad_(False)


CHANGES = {
    "input 0": lambda model: None,
    "training of 3": lambda model: model[3].eval(),
    "p of 3": lambda model: setattr(model[3], "p", 0.9),
    "4.*must share|module of the loss|module of .*": lambda model: setattr(
        model, "11", nn.Identity()
    ),
    "0.weight": lambda model: model[0].weight.requires_grad_(False),
    "module 0 has one": lambda model: model[0].register_forward_hook(lambda *_: None),
    "parameter 0.weight has one": lambda model: model[0].weight.register_hook(
        lambda grad: grad * 2
    ),
}


@pytest.mark.parametrize("match", CHANGES)
def test_changes_since_the_capture_run_an_ordinary_step(match):
    model, twin = pair(cnn)
    inputs, targets = next(batches(cnn))
    step = CapturedStep(model, cross_entropy, inputs, targets)
    both(step, model, twin, (inputs, targets))
    for one in (model, twin):
        CHANGES[match](one)
    if match == "input 0":
        inputs = inputs.transpose(2, 3)
    with pytest.warns(UserWarning, match=match):
        both(step, model, twin, (inputs, targets))
    assert step.report().fallbacks == 1


def test_without_gradients_it_fails_like_an_ordinary_step():
    batch = next(batches(mlp))
    step = CapturedStep(mlp(), cross_entropy, *batch)
    fails = pytest.raises(RuntimeError, match="does not require grad")
    with torch.no_grad(), pytest.warns(UserWarning, match="grad False"), fails:
        step(*batch)


class Odd(nn.Module):
    """Does something that no recording can repeat."""

    def __init__(self, what):
        super().__init__()
        self.what, self.calls, self.outside = what, 0, [0]
        self.kept = torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x):
        x = self.linear(x)
        getattr(self, self.what)(x)
        return x * self.outside[0] if self.what == "lists" else x

    def item(self, x):
        return x * 2 if x.sum() > 0 else x

    def counts(self, x):
        self.calls += 1

    def lists(self, x):
        self.outside[0] += 1

    def draws(self, x):
        random.random()

    def masks(self, x):
        return x[x > 0].sum()

    def keeps(self, x):
        self.kept += 1

    def replaces(self, x):
        self.count = self.count + 1


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("item", "cannot be traced"),
        ("counts", r"sets model\.calls"),
        ("lists", "two traces of it differ"),
        ("draws", "Python's random"),
        ("masks", "depends on values"),
        ("keeps", "changes an input or a constant|not a buffer"),
        ("replaces", r"replaces model\.count"),
    ],
)
def test_models_that_cannot_be_captured_run_as_ordinary_steps(what, match):
    model, twin = pair(lambda: Odd(what))
    batch = next(batches(mlp))
    python = random.getstate()
    step = unfit(match, model, cross_entropy, *batch)
    assert random.getstate() == python
    assert (model.calls, model.kept, model.count) == (0, 0, 0)
    twin.outside = [*model.outside]
    for _ in range(3):
        both(step, model, twin, batch)
    assert (step.report().fallbacks, step.report().arena) == (3, 0)
    assert model.calls == twin.calls
    assert torch.equal(model.kept, twin.kept)


class Rewound(nn.Module):
    """Draws the same random numbers twice, which no trace shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, CLASSES)

    def forward(self, x):
        state = torch.get_rng_state()
        x = dropout(self.linear(x))
        torch.set_rng_state(state)
        return dropout(x)


def test_a_recording_with_other_results_is_not_used():
    model, twin = pair(Rewound)
    step = unfit("its results then differ", model, cross_entropy, X, Y)
    both(step, model, twin, (X, Y))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, CLASSES), nn.BatchNorm1d(CLASSES), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def test_parts_that_run_again_in_the_backward_pass_run_on_copies():
    model, twin = pair(Checkpointed)
    before, batch = state(model), next(batches(mlp))
    step = CapturedStep(model, cross_entropy, *batch)
    assert equal(before, state(model))
    both(step, model, twin, batch)
    assert step.report().fallbacks == 0


def test_steps_that_use_another_models_parameters_are_not_captured():
    other = nn.Linear(CLASSES, CLASSES)
    batch = next(batches(mlp))
    step = unfit("but is not a parameter", mlp(), lambda x, y: cross_entropy(other(x), y), *batch)
    step(*batch)
    assert other.weight.grad is not None


def test_steps_that_change_an_input_in_place_are_not_captured():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, CLASSES))
    inputs, targets = next(batches(mlp))
    step = unfit("changes an input or a constant", model, cross_entropy, inputs, targets)
    assert (inputs < 0).any()
    step(inputs, targets)
    assert (inputs >= 0).all()


# --- refused --------------------------------------------------------------------------------------


def with_hook(kind):
    model = mlp()
    if kind == "module":
        model[0].register_full_backward_hook(lambda *_: None)
    else:
        model[0].weight.register_hook(lambda grad: grad)
    return model


@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_hooks_are_refused(kind):
    name = "module 0" if kind == "module" else "parameter 0.weight"
    with pytest.raises(ConfigError, match=f"{name} has one: remove it"):
        CapturedStep(with_hook(kind), cross_entropy, *next(batches(mlp)))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((mlp, cross_entropy, X, Y), r"model must be a torch\.nn\.Module, not function"),
        ((mlp(), "mse", X, Y), "loss_fn must be callable"),
        ((mlp(), cross_entropy, [X], Y), "inputs must be a tensor or a tuple .* not list"),
        ((mlp(), cross_entropy, X, (Y,)), "targets must be a tensor, not tuple"),
        ((mlp(), cross_entropy, X.clone().requires_grad_(), Y), "detach it"),
        ((mlp().requires_grad_(False), cross_entropy, X, Y), "unfreeze one"),
        ((mlp(), lambda x, _: x, X, Y), r"one number that depends .* not \(8, 5\)"),
        ((mlp(), lambda x, _: x.detach().sum(), X, Y), "depends on the parameters"),
        ((mlp(), lambda x, _: (x.sum(), x), X, Y), "not tuple"),
    ],
)
def test_wrong_arguments_are_refused(arguments, match):
    with pytest.raises(ConfigError, match=match):
        CapturedStep(*arguments)


def test_an_unknown_way_is_refused():
    with raises("unknown-packing-way"):
        CapturedStep(mlp(), cross_entropy, X, Y, way="luck")


def test_errors_of_the_model_are_its_own():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        CapturedStep(mlp(), cross_entropy, torch.ones(8, 7), Y)


def test_a_captured_step_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CapturedStep(mlp(), cross_entropy, X, Y)(X, Y)
