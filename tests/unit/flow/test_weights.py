"""Layers update their weights by themselves: when, with which gradients, in which memory."""

import copy

import pytest
import torch
from flows import (
    ONES,
    Net,
    Shift,
    adam,
    assert_all_near,
    assert_near,
    bend,
    one_layer,
    square,
    started,
)
from torch import nn

from daso.flow import Updates
from daso.flow.model.layers import mean_of
from daso.flow.model.weights import Weights


class Clips(torch.optim.SGD):
    """Changes gradients in place, as many do."""

    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
        return super().step(closure)


@pytest.mark.parametrize("unit", ["instance", "message"])
def test_an_optimizer_that_writes_to_gradients_changes_only_its_own(running, unit):
    first, second = Shift(), Shift()
    graph, start = started()
    y = graph.layer(first, start)
    graph.loss(square, graph.layer(second, y, optimizer=lambda p: Clips(p, lr=1.0)))
    with running(graph, updates=Updates(unit=unit)) as runtime:
        runtime.train_epoch(ONES[:1])
    assert_near(first.p.detach(), -2 * ONES[0].x)


@pytest.mark.parametrize("unit", ["instance", "message"])
def test_parameters_do_not_share_gradient_memory(running, unit):
    def nesterov(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)

    layer = Shift()
    twin = copy.deepcopy(layer)
    graph = one_layer(layer)
    with running(graph, nesterov, max_active_keys=1, updates=Updates(unit=unit)) as runtime:
        runtime.train_epoch(ONES)
    optimizer = nesterov(twin.parameters())
    for one in ONES:
        optimizer.zero_grad()
        square(None, twin(one.x)).backward()
        optimizer.step()
    assert_near(layer.p, twin.p)
    assert_near(layer.q, twin.q)


def test_one_instance_at_a_time_trains_as_plain_torch_does(running):
    net = Net()
    twin = copy.deepcopy(net)
    graph, start = started()
    y = graph.layer(net.b, graph.function(bend, graph.layer(net.a, start)))
    graph.loss(square, graph.layer(net.c, y))
    with running(graph, adam, max_active_keys=1) as runtime:
        for _ in range(3):
            runtime.train_epoch(ONES)
    optimizer = adam(twin.parameters())
    for one in ONES * 3:
        optimizer.zero_grad()
        square(one, twin.c(twin.b(twin.a(one.x).tanh()))).backward()
        optimizer.step()
    assert_all_near(net, twin)


def test_a_layer_steps_with_the_mean_of_its_gradients_and_of_the_remaining_ones(running):
    net = Net()
    graph = one_layer(net.a)
    twin = copy.deepcopy(net)
    with running(graph, max_active_keys=1, updates=Updates(min_update_interval=2)) as runtime:
        epoch = runtime.train_epoch(ONES)
    assert epoch.updates == 2
    for some in (ONES[:2], ONES[2:]):
        twin.zero_grad()
        (sum(square(one, twin.a(one.x)) for one in some) / len(some)).backward()
        with torch.no_grad():
            for q in twin.a.parameters():
                q.sub_(q.grad)
    assert_all_near(net, twin)


@pytest.mark.parametrize("weights", ["current", "stashed"])
def test_backward_uses_current_or_stashed_weights(running, weights):
    """Two gradients of an instance, of which the first moves the layer before the second."""

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return x * self.p * self.p

    layer = Square()
    graph, start = started(lambda one: {(0,): torch.tensor(1.0), (1,): torch.tensor(10.0)})
    graph.loss(lambda item, y: y * 0.01, graph.layer(layer, start))
    updates = Updates(unit="message", weights=weights)
    with running(graph, updates=updates) as runtime:
        epoch = runtime.train_epoch([0])
        assert runtime.evaluate([0]).loss == pytest.approx(0.11 * layer.p.item() ** 2)
    # Both went forward with 2; what was computed last comes back first. Products that forward left
    # behind are of its weights, whatever the weights are now.
    after = 2.0 - 0.01 * 10 * (2.0 + 2.0)
    second = after - 0.01 * (2.0 + (after if weights == "current" else 2.0))
    assert layer.p.item() == pytest.approx(second, rel=1e-12)
    assert (epoch.updates, epoch.mean_age, epoch.max_age) == (2, 0.5, 1)


def test_old_gradients_are_scaled_by_staleness(running):
    layer = Shift()
    graph, start = started(lambda one: {(0,): one.x, (1,): one.x, (2,): one.x})
    graph.loss(lambda item, y: y.sum(), graph.layer(layer, start))
    with running(graph, updates=Updates(unit="message", scale_by_staleness=True)) as runtime:
        runtime.train_epoch(ONES[:1])
    expected = torch.full((3,), -(1 + 1 / 2 + 1 / 3), dtype=torch.float64)
    assert_near(layer.p.detach(), expected)


def test_a_layer_may_have_an_optimizer_of_its_own(running):
    net = Net()
    graph, start = started()
    y = graph.layer(net.a, start, name="a", optimizer=adam)
    graph.loss(square, graph.layer(net.b, y, name="b"))
    with running(graph) as runtime:
        runtime.train_epoch(ONES)
        kinds = {name: type(one) for name, one in runtime.optimizers.items()}
    assert kinds == {"a": torch.optim.Adam, "b": torch.optim.SGD}


class Tied(nn.Module):
    """One parameter of two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(2.0))
        self.b = self.a


def test_both_names_of_a_stashed_parameter_are_replaced():
    layer = Tied()
    updates = Updates(unit="message", weights="stashed")
    weights = Weights(layer, lambda params: torch.optim.SGD(params, lr=0.1), updates)
    weights.add([torch.tensor(1.0)], 0, [0])
    weights.publish(in_use=True)
    assert layer.b is layer.a
    assert float(layer.a.detach()) == pytest.approx(1.9)


# --- replicas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_replicas_become_their_mean(count):
    replicas = [torch.tensor([4.0 * rank, 1.0, -6.0 * rank]) for rank in range(count)]
    mean = (count - 1) / 2  # of the ranks
    assert torch.equal(mean_of(replicas), torch.tensor([4.0 * mean, 1.0, -6.0 * mean]))


def test_replicas_of_16_bits_are_added_in_32():
    replicas = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert torch.equal(mean_of(replicas), torch.full((2,), 258.0) / 3)  # in 16 bits: 256 / 3


def test_whole_numbers_are_the_first_replicas():
    assert mean_of([torch.tensor(3), torch.tensor(8)]) == 3
