"""Messages that bring no gradient, and parameters that want none, leave the others as they are."""

import copy

import pytest
import torch
from flows import (
    ONES,
    Net,
    adam,
    assert_equal,
    assert_like_plain,
    assert_near,
    cases_in,
    copied,
    cut,
    square,
    started,
)
from torch import nn

DETACHED = {}  # by name
detached = cases_in(DETACHED)


@detached()
def copies(graph, net, start):
    one, two, three = graph.broadcast(graph.layer(net.a, start), 3)
    graph.loss(square, graph.function(cut, one))
    graph.loss(square, two)
    graph.loss(lambda item, x: x.detach().sum(), three)


@detached()
def rows(graph, net, start):
    def part(item, x):
        return x.detach() if item.state[0] % 2 else x * x

    outer = graph.function(lambda item, x: torch.outer(x, x), graph.layer(net.a, start))
    each = graph.ungroup(lambda item: [(row,) for row in range(3)], outer)
    graph.loss(square, graph.function(part, each))


@detached("tensors", "dim 0")
def parts(kind, graph, net, start):
    y = graph.layer(net.a, start)
    if kind == "tensors":
        left, right = graph.split(graph.function(tanh_and_same, y, outputs=2), [1, 1])
    else:
        left, right = graph.split(y, [2, 1], dim=0)
    graph.loss(square, left)
    graph.loss(square, graph.function(cut, right))


def tanh_and_same(item, x):
    return x.tanh(), x


def last_of_three(item, x):
    return x.detach() if item.state[0] < 2 else x


@detached()
def states(graph, net, start):
    many = graph.flatmap(lambda item: [(0,), (1,), (2,)], graph.layer(net.a, start))
    graph.loss(square, graph.function(last_of_three, many))


@detached()
def messages_of_a_batch(graph, net, start):
    many = graph.flatmap(lambda item: [(0,), (1,), (2,)], graph.layer(net.a, start))
    table = graph.function(lambda item, x: x[None], many)
    graph.loss(square, graph.function(last_of_three, graph.layer(net.b, table, batch=3)))


@detached("tensors", "dim 0")
def a_concat_of_an_input_that_wants_no_gradient(kind, graph, net, start):
    def product_of(item, x, y):
        return (x * y.tanh()).sum()

    y, layer = graph.layer(net.a, start), Halves(net.b)
    if kind == "tensors":
        graph.loss(product_of, graph.concat(start, y))
    else:
        graph.loss(square, graph.layer(layer, graph.concat(start, y, dim=0)))


class Halves(nn.Module):
    """Takes rows of twice three numbers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:3] * x[3:])


@detached()
def all_of_them(graph, net, start):
    graph.loss(square, graph.function(cut, graph.layer(net.a, start)))


@pytest.mark.parametrize("name", DETACHED)
def test_messages_without_a_gradient_bring_zeros(running, name):
    # A loss of detached numbers has no slope that could be measured.
    assert_like_plain(running, DETACHED[name], most=2, has_slopes=False)


def test_a_flow_without_a_loss_has_none(running):
    graph, start = started()
    graph.drop(graph.layer(Net().a, start))
    with running(graph) as runtime:
        assert runtime.measure(ONES).instances == 3
        assert (runtime.train_epoch(ONES).loss, runtime.evaluate(ONES).loss) == (0.0, 0.0)


def test_a_layer_without_a_gradient_takes_no_step_and_does_not_move(running):
    net = Net()
    graph, start = started()
    graph.loss(square, graph.function(cut, graph.layer(net.a, start)))
    before = copied(net)
    with running(graph, adam) as runtime:
        assert runtime.train_epoch(ONES).updates == 0
    assert_equal(copied(net), before)


@pytest.mark.parametrize("frozen", ["weight", "all"])
def test_frozen_parameters_stay_and_gradients_go_through_them(running, frozen):
    net = Net()
    net.b.weight.requires_grad_(False)
    net.b.bias.requires_grad_(frozen == "weight")
    graph, start = started()
    graph.loss(square, graph.layer(net.b, graph.layer(net.a, start, name="a"), name="b"))
    twin = copy.deepcopy(net)
    with running(graph) as runtime:
        runtime.train_epoch(ONES[:1])
        assert set(runtime.optimizers) == ({"a", "b"} if frozen == "weight" else {"a"})
    square(None, twin.b(twin.a(ONES[0].x))).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_near(p, q if q.grad is None else q - q.grad)
    assert torch.equal(net.b.weight, twin.b.weight)
