"""A construction that fails, at any step and on any rank, leaves nothing behind."""

import gc
import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import local_world
import pytest
import torch
from torch import nn
from training import sgd

import daso
from daso.comm import reclaim
from daso.comm.mpi import load
from daso.comm.node import shm
from daso.comm.node.shm import SharedWindow
from daso.errors import ExchangeError, StallError, TopologyError
from daso.torch_private import gradient_hooks
from daso.train import build, parts
from daso.train.deltas.shard import DeltaShard
from daso.train.recovery import survivor
from daso.train.runner import ScheduleRunner

RARE = daso.Fixed(3, 1)
IN_A_ROW = 100
STEPS = 4
KINDS = (TopologyError, MemoryError, OSError)


def network():
    """Two rows of each kind: fp32 and fp64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2), Double())


class Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x):
        return x * self.scale


def momentum(params):
    return torch.optim.SGD(params, 0.7, 0.9, nesterov=True)


CASES = {
    "auto": {"policy": RARE},
    "outer": {"policy": RARE, "outer": momentum},
    "fp32": {"policy": RARE, "wire": "fp32"},
    "host": {"policy": RARE, "gradients": daso.Gradients(reducer="host")},
    "prioritized": {"gradients": daso.Gradients(reducer="prioritized", step="model")},
    "by layers": {"gradients": daso.Gradients(reducer="prioritized", step="layerwise")},
}


def wrap(topology, model, inner, **keywords):
    return daso.DASO(inner, module=model, topology=topology, **keywords)


def train(topology, model, inner, **keywords):
    """Train and return the parameters."""
    with wrap(topology, model, inner, **keywords) as optimizer:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(97 * step + topology.rank)
            optimizer.zero_grad()
            model(torch.randn(3, 4, generator=generator)).square().mean().backward()
            optimizer.step()
        optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


# --- what is held ---------------------------------------------------------------------------------


def hooks(model, inner):
    """Count the hooks of parameters, modules and the optimizer."""
    dicts = [
        (type(one).__name__, name, len(value))
        for one in (*model.modules(), inner)
        for name, value in vars(one).items()
        if "hooks" in name and isinstance(value, dict)
    ]
    return [*dicts, *(len(gradient_hooks(param)) for param in model.parameters())]


def held(topology, model, inner):
    """Return what a wrapped optimizer holds, while all ranks stand still: threads share some."""
    topology.world_comm.Barrier()
    # Of these ranks alone: what other tests dropped is garbage, and goes at any moment.
    ours = [one for one in parts._open_parts.values() if one.topology is topology]
    found = {
        "mpi": local_world.open_handles() if load() is local_world.MPI else None,  # it tells none
        "threads": [one.name for one in threading.enumerate() if one.name.startswith("daso")],
        "hooks": hooks(model, inner),
        "open": (len(ours), reclaim.count_open(topology)),
    }
    topology.world_comm.Barrier()
    return found


# --- failures between steps -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A step of building that fails on some ranks."""

    step: int
    ranks: frozenset[int]
    behind: bool  # all ranks have made the part; else it is not made where it fails

    @property
    def kind(self):
        return KINDS[self.step % len(KINDS)]


class Faults:
    """Counts the steps of building on each rank, and lets one of them fail."""

    def __init__(self, call):
        self._call = call
        self.armed: dict[int, Fault] = {}  # by rank
        self.speaks: dict[int, list[bool]] = {}  # by rank: whether each step communicates

    def begin(self, rank, fault=None):
        self.armed[rank], self.speaks[rank] = fault, []

    def step(self, builder, make, *args, **keywords):
        rank = builder._topology.rank
        if rank not in self.armed:
            return self._call(builder, make, *args, **keywords)
        fault, speaks = self.armed[rank], self.speaks[rank]
        fails = fault is not None and fault.step == len(speaks)

        def fail():
            if rank in fault.ranks:
                raise fault.kind(f"no room on {rank}")

        def made():
            if fails and not fault.behind:
                fail()
            before = calls(rank)
            part = make()
            speaks.append(calls(rank) != before)
            return part

        part = self._call(builder, made, *args, **keywords)
        if fails:
            self._call(builder, fail)
        return part


def calls(rank):
    """Count the calls of MPI of a rank; of a real one none, so that each step differs."""
    return local_world.calls_of(rank) if load() is local_world.MPI else object()


@pytest.fixture
def faults(monkeypatch):
    made = Faults(build._Builder.__call__)

    def step(builder, *args, **keywords):
        return made.step(builder, *args, **keywords)

    monkeypatch.setattr(build._Builder, "__call__", step)
    return made


def every_fault(speaks, places):
    """Yield a failure of each step: on all ranks, and on each of these places alone."""
    ranks = range(len(speaks))
    for step in range(len(speaks[0])):
        yield Fault(step, frozenset(ranks), behind=False)
        for some in [frozenset({ranks[place]}) for place in places]:
            yield Fault(step, some, behind=True)
            if not any(spoke[step] for spoke in speaks):
                yield Fault(step, some, behind=False)


def check_failure(topology, faults, fault, wrapped):
    """Fail to build, on every rank with an error that names rank and cause."""
    rank = topology.rank
    faults.begin(rank, fault)
    with pytest.raises((*KINDS, ExchangeError)) as caught:
        wrapped()
    if rank in fault.ranks:
        assert type(caught.value) is fault.kind
        assert str(caught.value) == f"no room on {rank}"
    else:
        first = min(fault.ranks)
        text = f"rank {first} is not: {fault.kind.__name__}: no room on {first}"
        assert type(caught.value) is ExchangeError
        assert text in str(caught.value)
    faults.begin(rank)


def check_every_step(topology, faults, keywords, *, places=(-1,), times=None):
    """Let each step fail, or so many in turn; then train as if nothing had been."""
    other, rank = network(), topology.rank
    faults.begin(rank)
    expected = train(topology, other, sgd(other), **keywords)
    speaks = topology.world_comm.allgather(faults.speaks[rank])
    planned = list(every_fault(speaks, places))
    assert len(planned) > len(speaks[0]) > 8
    model = network()
    inner = sgd(model)
    before = held(topology, model, inner)
    for fault in itertools.islice(itertools.cycle(planned), times or len(planned)):
        check_failure(topology, faults, fault, lambda: wrap(topology, model, inner, **keywords))
        assert held(topology, model, inner) == before, fault
    trained = train(topology, model, inner, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))
    assert held(topology, model, inner) == before


@pytest.mark.nodes((2, 1))
def test_a_hundred_failed_constructions_leave_nothing(topology, faults):
    check_every_step(topology, faults, CASES["auto"], places=(0, -1), times=IN_A_ROW)


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("case", ["fp32", "by layers"])
def test_a_step_that_fails_where_each_rank_is_a_node_leaves_nothing(topology, faults, case):
    check_every_step(topology, faults, CASES[case])


@pytest.mark.nodes((2, 2))
@pytest.mark.parametrize("case", ["outer", "host", "prioritized"])
def test_a_step_that_fails_where_nodes_have_two_ranks_leaves_nothing(topology, faults, case):
    check_every_step(topology, faults, CASES[case])


@pytest.mark.nodes((2,), (1, 1), (2, 1))
def test_a_step_that_fails_on_the_first_rank_leaves_nothing(topology, faults):
    check_every_step(topology, faults, CASES["auto"], places=(0,))


# --- failures inside a step -----------------------------------------------------------------------


def always(error):
    def fail(*_, **__):
        raise error("no more")

    return fail


def no_room():
    return 0


@dataclass(frozen=True)
class Inside:
    """A function that fails inside of steps, of nodes of two ranks and of one."""

    owner: Any
    name: str
    ranks: tuple[int, ...]
    fail: Callable[..., Any]
    case: str = "auto"
    counts: Callable[..., bool] = lambda *_, **__: True  # whether a call may be the one


def copies(*ranks):
    """Return that MPI has no communicator left for these ranks, which all notice."""
    error = always(local_world.MPI.Exception)
    of = tuple(ranks)
    counts = lambda comm: tuple(comm._all.members) == of  # noqa: E731
    return Inside(local_world.Comm, "Dup", of, error, "host", counts)


INSIDE = {
    "communicators of the world": copies(0, 1, 2),
    "communicators of a lane": copies(0, 2),
    "communicator of a node": copies(0, 1),
    "threads": Inside(
        *(threading.Thread, "start", (2,), always(RuntimeError), "host"),
        counts=lambda thread: thread.name.startswith("daso"),
    ),
    "mapped memory": Inside(SharedWindow, "_segment", (1,), always(MemoryError)),
    "shared memory": Inside(shm, "free_bytes", (0,), no_room),
    "references": Inside(DeltaShard, "__init__", (1,), always(MemoryError)),
    "gradient hooks": Inside(
        *(torch.Tensor, "register_post_accumulate_grad_hook", (1,), always(RuntimeError)),
        "by layers",
    ),
    "load hooks": Inside(
        nn.Module, "register_load_state_dict_post_hook", (2,), always(RuntimeError)
    ),
    "forward hooks": Inside(
        nn.Module, "register_forward_pre_hook", (0,), always(OSError), "by layers"
    ),
}


class Countdown:
    """Lets one call of a function fail on some ranks."""

    def __init__(self, inside):
        self.inside, self.function = inside, getattr(inside.owner, inside.name)
        self.left: dict[str, int] = {}  # calls until the one that fails, by thread

    def arm(self, rank, number):
        self.left[f"rank {rank}"] = number if rank in self.inside.ranks else -1

    def __call__(self, *args, **keywords):
        name = threading.current_thread().name
        if self.inside.counts(*args, **keywords):
            self.left[name] = left = self.left.get(name, -1) - 1
            if left == -1:
                return self.inside.fail(*args, **keywords)
        return self.function(*args, **keywords)


@pytest.fixture
def countdown(monkeypatch, what):
    inside = INSIDE[what]
    made = Countdown(inside)

    def call(*args, **keywords):  # a function, which becomes a method
        return made(*args, **keywords)

    monkeypatch.setattr(inside.owner, inside.name, call)
    return made


def fails(topology, model, inner, keywords):
    """Wrap, and return whether that failed, the same on all ranks."""
    error = None
    try:
        wrap(topology, model, inner, **keywords).close()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors = topology.world_comm.allgather(error)
    assert None not in errors or not any(errors), errors
    return error is not None


@pytest.mark.nodes((2, 1))
@pytest.mark.parametrize("what", INSIDE)
def test_a_step_that_fails_half_way_leaves_nothing(topology, what, countdown):
    keywords = CASES[INSIDE[what].case]
    model = network()
    inner = sgd(model)
    assert not fails(topology, model, inner, keywords)
    before = held(topology, model, inner)
    for number in itertools.count():
        countdown.arm(topology.rank, number)
        if not fails(topology, model, inner, keywords):
            break
        assert held(topology, model, inner) == before, number
    assert number > 0
    countdown.arm(topology.rank, -1)
    train(topology, model, inner, **keywords)


@pytest.fixture
def failing_start(monkeypatch):
    """Ranks that are to fail behind the last step of building."""
    real, ranks = ScheduleRunner._start, set[int]()

    def start(runner, *args):
        real(runner, *args)
        if runner.topology.rank in ranks:
            raise OSError("no first step")

    monkeypatch.setattr(ScheduleRunner, "_start", start)
    return ranks


@pytest.mark.nodes((2, 1))
def test_what_fails_behind_the_last_step_is_given_back_with_the_next_wrap(topology, failing_start):
    model = network()
    inner = sgd(model)
    assert not fails(topology, model, inner, CASES["auto"])
    before = held(topology, model, inner)
    for _ in range(3):
        failing_start.add(topology.rank)
        assert fails(topology, model, inner, CASES["auto"])
        assert held(topology, model, inner)["hooks"] == before["hooks"]
        failing_start.discard(topology.rank)
        gc.collect()
        assert not fails(topology, model, inner, CASES["auto"])
        assert held(topology, model, inner) == before


@pytest.mark.nodes((1, 1))
def test_an_elastic_optimizer_that_fails_takes_no_part_in_later_losses(
    topology, failing_start, monkeypatch
):
    for name, value in {"problem": None, "die_on_error": None, "lost": False}.items():
        monkeypatch.setattr(survivor, name, lambda *_, value=value: value)
    model = network()
    failing_start.add(topology.rank)
    with pytest.raises(OSError) as caught:
        daso.DASO(sgd(model), module=model, topology=topology, exchange=daso.Exchange(elastic=True))
    assert caught.value is not None  # the session lives, in its traceback
    assert not [each for each in survivor._open if each.topology is topology]
    topology.is_elastic = False


@pytest.mark.parametrize("own", [None, OSError("no memory")])
def test_a_rank_that_the_others_do_not_meet_raises_its_own_error(topology, monkeypatch, own):
    stall, freed = StallError("rank 1 did not come"), []

    def gather(*_):
        raise stall

    def make():
        if own is not None:
            raise own

    with pytest.raises((OSError, StallError)) as caught, ExitStack() as stack:
        step = build._Builder(topology, 1.0, stack)
        step(lambda: "local", freed.append)
        step(lambda: "of all", freed.append, frees_together=True)
        monkeypatch.setattr(build, "gather_unlike", gather)
        step(make)
    assert caught.value is (own or stall)
    assert caught.value.__cause__ is None  # itself: who looks for a lost rank would never end
    assert freed == ["local"]  # what is given back together would wait for the others
