"""Layers, instances and optimizers that tests of flows share, and what they are compared by."""

from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from plain_flow import PlainFlow
from torch import nn

from daso.errors import FlowError
from daso.flow import Graph, Port

at_once = pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"{most} at once")


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)  # which moves a parameter by its gradient


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


class Gathers(torch.optim.Optimizer):
    """Adds up gradients, and moves nothing."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad


def gathered(runtime, graph):
    """Return the sums of gradients of all parameters by their ids."""
    sums = {}
    for node in graph.nodes:
        if node.kind == "layer" and node.name in runtime.optimizers:
            optimizer = runtime.optimizers[node.name]
            trained = [p for p in node.call.parameters() if p.requires_grad]
            for p, twin in zip(trained, optimizer.param_groups[0]["params"], strict=True):
                if "sum" in optimizer.state[twin]:
                    sums[id(p)] = optimizer.state[twin]["sum"]
    return sums


class One(NamedTuple):
    """An instance.

    Args:
        x: Numbers (3,).
        n: A number that control flow depends on.
    """

    x: torch.Tensor
    n: int


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


ONES = [One(numbers(seed, 3), n) for seed, n in enumerate([0, 2, 3])]


def rows_of(one):
    """Return five messages of one to three rows."""
    return {
        (place,): numbers(10 * one + place, 1 + place % 3, 3, dtype=torch.float32)
        for place in range(5)
    }


class Net(nn.Module):
    """Layers that flows are made of."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(3, 3, dtype=dtype) for _ in range(3))


class Two(nn.Module):
    """Returns two tensors."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = left, right

    def forward(self, x):
        return self.left(x), self.right(x).tanh()


class Mix(nn.Module):
    """Takes two tensors."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, y):
        return self.layer(x) * y


class Shift(nn.Module):
    """Passes on the gradient that it is given, as it lies, to its input and both parameters."""

    def __init__(self):
        super().__init__()
        self.p, self.q = (nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))

    def forward(self, x):
        return x + self.p + self.q


class Normed(nn.Module):
    """Has buffers, dropout, and modules of which some do not train."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)
        self.drop = nn.Dropout()
        self.still = nn.BatchNorm1d(3, dtype=torch.float64).eval()

    def forward(self, x):
        return self.still(self.drop(self.norm(x)))


def square(item, *tensors):
    return sum((tensor * tensor).sum() for tensor in tensors)


def bend(item, x):
    return torch.tanh(x)


def cut(item, x):
    return x.detach()


def product(item, x, y):
    return x * y


# --- flows ---------------------------------------------------------------------------------------


def started(take=lambda one: one.x, **keywords):
    graph = Graph()
    return graph, graph.source(take, **keywords)


def one_layer(layer=None, take=lambda one: one.x, **keywords):
    graph, start = started(take)
    graph.loss(square, graph.layer(Net().a if layer is None else layer, start, **keywords))
    return graph


def two_layers():
    graph, start = started()
    net = Net()
    graph.loss(square, graph.layer(net.b, graph.layer(net.a, start)))
    return graph


def normed():
    """Return a flow whose layers have buffers and dropout, and these layers."""
    graph, start = started(lambda one: torch.outer(one.x, one.x))
    layer, net = Normed(), Net()
    many = graph.flatmap(lambda item: [(0,), (1,)], graph.layer(layer, start))
    graph.loss(square, graph.layer(net.a, many))
    return graph, nn.ModuleList([layer, net.a])


def modes(module):
    return [one.training for one in module.modules()]


# --- flows that are built ------------------------------------------------------------------------


def same(item, x):
    return x


def both(item, x, y):
    return x + y


def total(item, *tensors):
    return sum(tensor.sum() for tensor in tensors)


def choose(item):
    return 0


def empty(item):
    return ()


def linear():
    return nn.Linear(2, 2)


def changed(graph, kind, port):
    """Add a node that changes states."""
    if kind == "group":
        return graph.group(empty, port, count=choose)
    return getattr(graph, kind)(empty, port)


def end_all(graph):
    """End every port that nothing takes in a loss."""
    used = {(edge.source, edge.out) for edge in graph.edges}
    for node in list(graph.nodes):
        for port, width in enumerate(node.outputs):
            if (node.index, port) not in used:
                graph.loss(total, Port(node.index, port, width))


def small_loop():
    graph, start = started()
    end = graph.loop(lambda port: graph.layer(linear(), port), start, go_on=choose)
    graph.loss(total, end)
    return graph


# --- comparisons ---------------------------------------------------------------------------------


@contextmanager
def refused(*words, kind=FlowError):
    """Hold what is raised against the words that its message must have."""
    with pytest.raises(kind) as error:
        yield error
    for word in words:
        assert word in str(error.value)


def copied(module):
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def assert_all_near(module, other):
    for p, q in zip(module.parameters(), other.parameters(), strict=True):
        assert_near(p, q)


# --- flows beside the same in plain torch ---------------------------------------------------------


def cases_in(table):
    """Return a decorator that adds a builder by its name, or one for each of some values.

    A builder is given (graph, net, start), behind its value if it has one, and builds a flow from
    the layers of the net.
    """

    def case(*values):
        def add(build):
            name = build.__name__.replace("_", " ")
            for value in values:
                table[f"{name}, {value}"] = partial(build, value)
            if not values:
                table[name] = build
            return build

        return add

    return case


def assert_like_plain(running, build, ones=ONES, most=1, *, has_slopes=True):
    """Hold a flow's loss and gradients against plain torch's, and against differences of losses."""
    net = Net()
    graph, start = started()
    build(graph, net, start)
    with running(graph, Gathers, max_active_keys=most) as runtime:
        epoch = runtime.train_epoch(ones)
        assert epoch.in_flight == min(most, len(ones))
        loss = sum(PlainFlow(graph, one).loss_of_instance() for one in ones)
        assert_near(torch.tensor(epoch.loss * len(ones), dtype=torch.float64), loss.detach())
        if loss.requires_grad:
            loss.backward()
        sums = gathered(runtime, graph)
        for name, p in net.named_parameters():
            assert (id(p) in sums) == (p.grad is not None), name
            if p.grad is not None:
                assert_near(sums[id(p)], p.grad)
                if has_slopes:
                    way = numbers(len(name), *p.shape)
                    slope = slope_along(runtime, p, way, ones)
                    assert slope == pytest.approx(float((way * p.grad).sum()), rel=1e-6, abs=1e-6)


def slope_along(runtime, p, way, ones, step=1e-5):
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            before = p.clone()
            p.add_(way, alpha=sign * step)
            losses.append(runtime.evaluate(ones).loss * len(ones))
            p.copy_(before)
    return (losses[0] - losses[1]) / (2 * step)
