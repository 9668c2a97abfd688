"""Errors of modules and keywords, their causes, and a flow after an epoch that failed."""

import pytest
import torch
from flows import (
    ONES,
    Gathers,
    Net,
    assert_near,
    at_once,
    gathered,
    one_layer,
    refused,
    square,
    started,
)
from torch import nn

import daso
from daso.errors import ConfigError, FlowError
from daso.flow import Updates


def test_modules_train_again_after_an_evaluation_that_failed(running):
    def fail(item, x):
        if not layer.training:
            raise RuntimeError("no")
        return x

    layer = Net().a
    graph, start = started()
    graph.loss(square, graph.function(fail, graph.layer(layer, start)))
    with running(graph) as runtime:
        with refused("RuntimeError: no"):
            runtime.evaluate(ONES)
        assert layer.training
        runtime.train_epoch(ONES)


@pytest.mark.parametrize("dim", [None, 0])
def test_a_complete_join_frees_its_inputs(running, dim):
    """Seen in what is told of an epoch that cannot go on: it names all that nodes hold."""
    graph, start = started()
    joined = graph.concat(start, start, dim=dim, name="joined")
    stuck = graph.group(lambda _: (9,), joined, count=lambda _: 2, name="stuck")
    graph.loss(square, stuck)
    with running(graph) as runtime, pytest.raises(FlowError) as error:
        runtime.train_epoch(ONES[:1])
    assert "group 'stuck' has 1 of the messages" in str(error.value)
    assert "joined" not in str(error.value)


class Fails(nn.Module):
    """Fails forward or backward for one message."""

    def __init__(self, when):
        super().__init__()
        self.when, self.p = when, nn.Parameter(torch.ones(()))

    def forward(self, x):
        three = x[0].item() == 3.0
        if self.when == "forward" and three:
            raise ZeroDivisionError("by three")
        return Backfires.apply(x * self.p, three)


class Backfires(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ZeroDivisionError("by three")
        return grad, None


@at_once
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_module_that_fails_is_named_with_instance_and_state(running, when, most):
    graph, start = started(lambda one: {(k, 5): torch.full((2,), float(one + k)) for k in range(2)})
    graph.loss(square, graph.layer(Fails(when), start, name="breaks"))
    words = (
        "layer 'breaks'",
        f"its {when} did",
        "instance 2, state (1, 5)",
        "ZeroDivisionError: by three",
    )
    with running(graph, max_active_keys=most) as runtime, refused(*words):
        runtime.train_epoch([0, 1, 2])


@pytest.mark.parametrize("kind", ["function", "loss"])
def test_a_failing_message_in_a_batch_is_named(running, kind):
    def fail(item, x):
        if item.instance == 3:
            raise KeyError("token")
        return x.sum() if kind == "loss" else x

    graph, start = started(lambda one: torch.full((2,), float(one)).requires_grad_())
    made = getattr(graph, kind)(fail, start, name="breaks")
    if kind == "function":
        graph.loss(square, made)
    words = (f"{kind} 'breaks'", "its forward did", "instance 3, state ()", "KeyError: 'token'")
    with running(graph, max_active_keys=8) as runtime, refused(*words):
        runtime.train_epoch(range(6))


def test_why_a_module_failed_is_kept(running):
    graph = one_layer(Fails("forward"), lambda one: torch.full((2,), 3.0))
    with running(graph) as runtime:
        with pytest.raises(FlowError) as error:
            runtime.train_epoch([0])
        assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_an_error_of_a_flow_is_not_its_own_cause(running):
    graph, start = started()
    for port in graph.cond(lambda item: 2, start):
        graph.loss(square, port)
    with running(graph) as runtime:
        with pytest.raises(FlowError) as error:
            runtime.train_epoch(ONES)
        assert error.value.__cause__ is None


def test_an_epoch_after_a_failed_one_starts_clean(running):
    def fail(item, y):
        if item.instance.n == 3:
            raise RuntimeError("three")
        return square(item, y)

    layer = Net().a
    graph, start = started()
    graph.loss(fail, graph.layer(layer, start))
    updates = Updates(min_update_interval=3)
    with running(graph, Gathers, max_active_keys=1, updates=updates) as runtime:
        with refused("RuntimeError: three"):
            runtime.train_epoch(ONES)
        runtime.train_epoch(ONES[:1])
        found = gathered(runtime, graph)
    square(None, layer(ONES[0].x)).backward()
    for p in layer.parameters():
        assert_near(found[id(p)], p.grad)


@pytest.mark.parametrize("go", ["train_epoch", "evaluate"])
def test_an_epoch_has_an_instance(running, go):
    with running(one_layer()) as runtime, refused("one instance at least", kind=ConfigError):
        getattr(runtime, go)([])


@pytest.mark.parametrize(
    ("keywords", "kind", "word"),
    [
        ({"max_active_keys": 0}, ConfigError, "max_active_keys"),
        ({"max_active_keys": True}, ConfigError, "max_active_keys"),
        ({"placement": {"liner": 0}}, FlowError, "'liner'"),
        ({"placement": {"linear": 1}}, FlowError, "from 0 to 0"),
        ({"placement": {"loss": [0, 0]}}, FlowError, "'loss'"),
        ({"replicas": {"liner": 1}}, FlowError, "'liner'"),
        ({"replicas": {"linear": 0}}, ConfigError, "not 0"),
        ({"replicas": {"linear": 2}}, ConfigError, "not 2"),
    ],
    ids=str,
)
def test_bad_keywords_are_named(running, keywords, kind, word):
    with refused(word, kind=kind), running(one_layer(), **keywords) as runtime:
        runtime.train_epoch(ONES)


def test_a_runtime_that_is_closed_says_so(running):
    with running(one_layer()) as runtime:
        runtime.close()
        runtime.close()
        with refused("close", kind=daso.errors.DasoError):
            runtime.train_epoch(ONES)
