"""A captured step under daso.DASO and daso.attach: the bits of ordinary steps, in their order."""

import pytest
import torch
from doors import DOORS
from models import adamw, bits, seeded, sgd
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import daso
from daso.errors import ConfigError

SMALL = daso.Gradients(bucket_bytes=256)


class Net(nn.Module):
    """Convolution, BatchNorm, a tied layer, one that is frozen, and a parameter without use."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, (1, 3), bias=False), nn.BatchNorm2d(4)
        self.tied, self.frozen, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)
        self.scale, self.unused = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = torch.relu(self.norm(self.conv(x.view(-1, 1, 1, 6)))).flatten(1)
        return self.last(self.tied(self.frozen(torch.tanh(self.tied(h)))) * self.scale)


class Uncapturable(Net):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 1)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=generator)
    return x, torch.randint(0, 3, (5,), generator=generator)


def ordinary(model):
    def step(x, y):
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return step


def captured(model):
    return daso.memory.CapturedStep(model, cross_entropy, *batch(0, 0))


def once(optimizer, _handle, run, rank, step):
    optimizer.zero_grad()
    run(*batch(rank, step))


def in_place(optimizer, _handle, run, rank, step):
    optimizer.zero_grad(set_to_none=False)
    run(*batch(rank, step))


def accumulated(optimizer, handle, run, rank, step):
    optimizer.zero_grad()
    with handle.no_sync():
        run(*batch(rank, step))
        run(*batch(rank, step + 100))
    run(*batch(rank, step + 200))


def twice(optimizer, _handle, run, rank, step):
    optimizer.zero_grad()
    run(*batch(rank, step))
    run(*batch(rank, step + 100))


def train(topology, make_step, inner=sgd, each=once, *, make=Net, door=DOORS[0], steps=5, **more):
    """Return losses, gradients and parameters of a training, and what its step says."""
    model, found = seeded(make)(), []
    more = {"policy": daso.Fixed(1, 0), "wire": "fp32", "gradients": SMALL, **more}
    with door(inner(model), module=model, topology=topology, **more) as (optimizer, handle):
        run = make_step(model)
        for step in range(steps):
            each(optimizer, handle, run, topology.rank, step)
            grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            found.append((grads, bits(model)))
        handle.synchronize()
    buffers = [one.clone() for one in model.buffers()]
    return found, bits(model), buffers, run


def assert_alike(topology, **how):
    plain, mine = train(topology, ordinary, **how), train(topology, captured, **how)
    assert mine[1] == plain[1]
    assert all(map(torch.equal, mine[2], plain[2]))
    for (grads, params), (others, those) in zip(mine[0], plain[0], strict=True):
        assert [one is None for one in grads] == [one is None for one in others]
        pairs = [(a, b) for a, b in zip(grads, others, strict=True) if a is not None]
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)
        assert params == those
    return mine[3]


CUTS = pytest.mark.nodes((1, 1), (1, 1, 1), (2,), (2, 1))


@CUTS
@pytest.mark.parametrize(
    "policy", [daso.Fixed(1, 0), daso.Fixed(3, 1), daso.Plateau(5, warmup=1, cooldown=1)]
)
@pytest.mark.parametrize("inner", [sgd, adamw])
def test_training_is_that_of_ordinary_steps(topology, policy, inner):
    step = assert_alike(topology, policy=policy, inner=inner)
    assert step.report().fallbacks == 0


@CUTS
@pytest.mark.parametrize("each", [in_place, accumulated, twice])
def test_gradients_add_up_as_those_of_ordinary_steps(topology, each):
    step = assert_alike(topology, each=each)
    assert step.report().fallbacks == 0


@pytest.mark.nodes((2,), (1, 1))
def test_a_step_is_captured_under_attach_too(topology):
    door = next(one for one in DOORS if one.name != DOORS[0].name)
    step = assert_alike(topology, door=door, policy=daso.Fixed(1, 0))
    assert step.report().fallbacks == 0


@pytest.mark.nodes((2,), (1, 1))
@pytest.mark.parametrize("reducer", ["host", "prioritized"])
def test_other_reducers_take_gradients_in_backward_too(topology, reducer):
    gradients = daso.Gradients(reducer=reducer, step="model", bucket_bytes=256)
    step = assert_alike(topology, gradients=gradients)
    assert step.report().fallbacks == 0


class Computed(TorchDispatchMode):
    """Logs the products, convolutions and sums that a thread computes."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"mm", "convolution_backward", "native_batch_norm_backward", "sum"}:
            self.log.append((name,))
        return func(*args, **(kwargs or {}))


def watch(reducer, log):
    take, start, end = reducer._take, reducer._start, reducer.finish_round
    reducer._take = lambda index, param: (log.append(("ready", index)), take(index, param))
    reducer._start = lambda one: (log.append(("start", one.params)), start(one))
    reducer.finish_round = lambda: (log.append(("end",)), end())


def logged(topology, make_step):
    """Return what a backward computes, and what the reducer does meanwhile."""
    log, model = [], seeded(Net)()
    more = {"policy": daso.Fixed(1, 0), "wire": "fp32", "gradients": SMALL, "module": model}
    with daso.DASO(sgd(model), topology=topology, **more) as optimizer:
        run = make_step(model)
        for step in range(2):
            once(optimizer, None, run, topology.rank, step)
            optimizer.step()
        watch(optimizer._session.runner.parts.gradients.reducer, log)
        optimizer.zero_grad()
        with Computed(log):
            run(*batch(topology.rank, 2))
        optimizer.step()
    return log


@pytest.mark.nodes((2,), (1, 1))
def test_buckets_start_in_backward_as_with_ordinary_steps(topology):
    """At the same moments: between the same operations."""
    log = logged(topology, captured)
    assert log == logged(topology, ordinary)
    kinds = [kind for kind, *_ in log]
    assert kinds.count("end") == 1
    assert "convolution_backward" in kinds[kinds.index("start") :]


@pytest.mark.nodes((2,))
def test_gradients_land_in_the_reducers_memory(topology):
    """None is copied once more when a bucket starts."""
    model = seeded(Net)()
    with daso.DASO(sgd(model), topology=topology, module=model, gradients=SMALL) as optimizer:
        run, rows = captured(model), optimizer._session.runner.parts.gradients.reducer.rows
        once(optimizer, None, run, topology.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        seen, fill = [], rows.fill

        def watched(bucket, moved):
            seen.extend(rows.holds(p.grad) for p in model.parameters() if p.grad is not None)
            fill(bucket, moved)

        rows.fill = watched
        run(*batch(topology.rank, 1))
        optimizer.step()
    assert seen
    assert all(seen)


@pytest.mark.filterwarnings("ignore:a step can be captured only")
@pytest.mark.nodes((1, 1), (2,))
def test_what_cannot_be_captured_trains_as_ordinary_steps(topology):
    step = assert_alike(topology, make=Uncapturable, steps=3)
    assert step.report().fallbacks == 3


@pytest.mark.filterwarnings("ignore:.*runs as an ordinary step")
@pytest.mark.nodes((2,))
def test_a_parameter_that_is_frozen_later_is_noticed(topology):
    def each(optimizer, handle, run, rank, step):
        if step == 3:
            param = optimizer.param_groups[0]["params"][-1]
            param.requires_grad_(False)
            param.grad = None
        once(optimizer, handle, run, rank, step)

    step = assert_alike(topology, each=each)
    assert step.report().fallbacks == 2


@pytest.mark.nodes((1, 1))
def test_steps_that_layers_take_by_themselves_are_refused_with_the_remedy(topology):
    model = seeded(Net)()
    gradients = daso.Gradients(reducer="prioritized", step="layerwise")
    with (
        daso.DASO(
            sgd(model),
            module=model,
            topology=topology,
            policy=daso.Fixed(1, 0),
            gradients=gradients,
        ),
        pytest.raises(ConfigError, match=r"has one: .*Gradients\(step='model'\)"),
    ):
        captured(model)


@pytest.mark.nodes((1, 1))
def test_an_error_in_backward_leaves_the_round_to_the_next_step(topology):
    """As after an ordinary backward that raised."""

    def stop(_):
        raise KeyError("planned")

    def failing(make_step):
        def make(model):
            run, steps = make_step(model), iter(range(9))

            def step(x, y):
                if next(steps) != 2:
                    return run(x, y)
                handle = model.tied.weight.register_post_accumulate_grad_hook(stop)
                with pytest.raises(KeyError, match="planned"):
                    run(x, y)
                handle.remove()
                model.zero_grad()
                return run(x, y)

            return step

        return make

    plain, mine = (train(topology, failing(one)) for one in (ordinary, captured))
    assert mine[1] == plain[1]
