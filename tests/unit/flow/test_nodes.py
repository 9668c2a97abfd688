"""Nodes of a flow as they compute, in a world of one rank, held against the same in plain torch."""

import copy
import io
import json
import math
import time
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from torch import nn

import daso
from daso.errors import CheckpointError, ConfigError, FlowError
from daso.flow import Epoch, Graph, Runtime, Updates, replay
from daso.flow.compute import gradients, gradients_of_linear, is_linear
from daso.flow.epoch import digest_of
from daso.flow.model.weights import Weights

checked = settings(derandomize=True, max_examples=25, deadline=None)
active = pytest.mark.parametrize("most", [1, 3], ids=lambda most: f"{most} at once")


@pytest.fixture(scope="module")
def running():
    """Runtimes in a world of this rank only, closed whatever happens."""
    alone = daso.Topology(MPI.COMM_SELF)

    def start(graph, make=None, **keywords):
        return closing(Runtime(graph, make or sgd, topology=alone, **keywords))

    yield start
    alone.free()


@pytest.fixture(scope="module", autouse=True)
def _warned():
    # What torch warns of once in a process would fail one test, whichever comes first.
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


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


class One(NamedTuple):
    """An instance.

    Args:
        x: Numbers (3,).
        n: What control flow depends on.
    """

    x: torch.Tensor
    n: int


def numbers(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


ONES = [One(numbers(seed, 3), n) for seed, n in enumerate([0, 2, 3])]


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


def square(item, *tensors):
    return sum((tensor * tensor).sum() for tensor in tensors)


def bend(item, x):
    return torch.tanh(x)


def product(item, x, y):
    return x * y


def started(take=lambda one: one.x, **keywords):
    graph = Graph()
    return graph, graph.source(take, **keywords)


@contextmanager
def refused(*words, kind=FlowError):
    """Hold what is raised against the words that its message must have."""
    with pytest.raises(kind) as error:
        yield
    for word in words:
        assert word in str(error.value)


def copied(module):
    return [tensor.detach().clone() for tensor in (*module.parameters(), *module.buffers())]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- gradients -----------------------------------------------------------------------------------


def gathered(runtime, graph):
    """Return the sums of gradients of all parameters by their ids."""
    found = {}
    for node in graph.nodes:
        if node.kind == "layer" and node.name in runtime.optimizers:
            optimizer = runtime.optimizers[node.name]
            mine = [p for p in node.call.parameters() if p.requires_grad]
            for p, twin in zip(mine, optimizer.param_groups[0]["params"], strict=True):
                if "sum" in optimizer.state[twin]:
                    found[id(p)] = optimizer.state[twin]["sum"]
    return found


def assert_near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def hold_against(running, build, plain, ones=ONES, most=1):
    """Hold a flow's loss and gradients against plain torch's, and against differences of losses."""
    net = Net()
    graph, start = started()
    build(graph, net, start)
    with running(graph, Gathers, max_active_keys=most) as runtime:
        epoch = runtime.train_epoch(ones)
        assert epoch.in_flight == min(most, len(ones))
        twin = copy.deepcopy(net)
        loss = sum(plain(twin, one) for one in ones)
        loss.backward()
        assert_near(torch.tensor(epoch.loss * len(ones), dtype=torch.float64), loss.detach())
        found = gathered(runtime, graph)
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert (id(p) in found) == (q.grad is not None), name
            if q.grad is not None:
                assert_near(found[id(p)], q.grad)
                way = numbers(len(name), *p.shape)
                slope = slope_along(runtime, p, way, ones)
                assert slope == pytest.approx(float((way * q.grad).sum()), rel=1e-6, abs=1e-6)


def slope_along(runtime, p, way, ones, step=1e-5):
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            before = p.clone()
            p.add_(way, alpha=sign * step)
            losses.append(runtime.evaluate(ones).loss * len(ones))
            p.copy_(before)
    return (losses[0] - losses[1]) / (2 * step)


@active
def test_a_layer(running, most):
    def build(graph, net, start):
        graph.loss(square, graph.layer(net.b, graph.layer(net.a, start)))

    hold_against(running, build, lambda net, one: square(one, net.b(net.a(one.x))), most=most)


@active
def test_a_layer_with_several_inputs_and_outputs(running, most):
    def build(graph, net, start):
        two = graph.layer(Two(net.a, net.b), start, outputs=2)
        graph.loss(square, graph.layer(Mix(net.c), two))

    def plain(net, one):
        return square(one, Mix(net.c)(*Two(net.a, net.b)(one.x)))

    hold_against(running, build, plain, most=most)


@active
def test_a_function_knows_the_item(running, most):
    def change(item, x, y):
        assert item.state == ()
        assert item.payload[0] is x
        return x * y.tanh() * item.instance.n + x, y * y

    def build(graph, net, start):
        a, b = graph.layer(net.a, start), graph.layer(net.b, start)
        graph.loss(square, graph.function(change, a, b, outputs=2))

    def plain(net, one):
        x, y = net.a(one.x), net.b(one.x)
        return square(one, x * y.tanh() * one.n + x, y * y)

    hold_against(running, build, plain, most=most)


@active
@pytest.mark.parametrize(
    "choose", [lambda n: n > 2, lambda n: n % 2, lambda n: False], ids=["bool", "int", "never"]
)
def test_a_cond_and_a_phi(running, most, choose):
    def build(graph, net, start):
        fork = graph.cond(lambda item: choose(item.instance.n), graph.layer(net.a, start))
        ends = [graph.layer(layer, way) for layer, way in zip((net.b, net.c), fork, strict=True)]
        graph.loss(square, graph.phi(*ends))

    def plain(net, one):
        return square(one, (net.c if choose(one.n) else net.b)(net.a(one.x)))

    hold_against(running, build, plain, most=most)


@active
def test_a_cond_of_several_ways(running, most):
    def build(graph, net, start):
        fork = graph.cond(lambda item: item.instance.n, graph.layer(net.a, start), ways=4)
        layers = [graph.layer(net.b, fork[0]), fork[1], graph.layer(net.c, fork[2]), fork[3]]
        graph.loss(square, graph.phi(*layers))

    def plain(net, one):
        y = net.a(one.x)
        return square(one, net.b(y) if one.n == 0 else net.c(y) if one.n == 2 else y)

    hold_against(running, build, plain, most=most)


@active
def test_an_update(running, most):
    def build(graph, net, start):
        changed = graph.update(lambda item: (item.instance.n, 7), graph.layer(net.a, start))
        scaled = graph.function(lambda item, x: x * item.state[0] + item.state[1], changed)
        graph.loss(square, graph.layer(net.b, scaled))

    def plain(net, one):
        return square(one, net.b(net.a(one.x) * one.n + 7))

    hold_against(running, build, plain, most=most)


@active
def test_a_loop(running, most):
    def build(graph, net, start):
        def body(port):
            return graph.function(bend, graph.layer(net.b, port))

        def go_on(item):
            return item.state[-1] < item.instance.n

        end = graph.loop(body, graph.layer(net.a, start), go_on=go_on)
        graph.loss(square, graph.layer(net.c, end))

    def plain(net, one):
        y = net.a(one.x)
        for _ in range(one.n):
            y = net.b(y).tanh()
        return square(one, net.c(y))

    hold_against(running, build, plain, most=most)


@active
def test_a_loop_in_a_loop(running, most):
    def build(graph, net, start):
        def inner(port):
            return graph.function(bend, graph.layer(net.b, port))

        def outer(port):
            more = graph.loop(inner, port, go_on=lambda item: item.state[-1] < item.state[-2])
            return graph.layer(net.c, more)

        end = graph.loop(outer, start, go_on=lambda item: item.state[-1] < item.instance.n)
        graph.loss(square, graph.layer(net.a, end))

    def plain(net, one):
        y = one.x
        for times in range(one.n):
            for _ in range(times):
                y = net.b(y).tanh()
            y = net.c(y)
        return square(one, net.a(y))

    hold_against(running, build, plain, most=most)


@active
def test_a_broadcast(running, most):
    def build(graph, net, start):
        one, two, three = graph.broadcast(graph.layer(net.a, start), 3)
        graph.loss(square, one)
        graph.loss(
            square, graph.function(product, graph.layer(net.b, two), graph.layer(net.c, three))
        )

    def plain(net, one):
        y = net.a(one.x)
        return square(one, y) + square(one, net.b(y) * net.c(y))

    hold_against(running, build, plain, most=most)


@active
def test_a_port_that_several_nodes_use(running, most):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        z = graph.layer(net.b, y)
        graph.loss(lambda item, y, z: (y * z).sum(), y, z)
        graph.loss(square, y)

    def plain(net, one):
        y = net.a(one.x)
        return (y * net.b(y)).sum() + square(one, y)

    hold_against(running, build, plain, most=most)


@pytest.mark.parametrize("by", ["function", "layer", "loss", "concat", "broadcast"])
def test_a_node_that_is_given_the_same_port_twice(running, by):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        if by == "loss":
            graph.loss(lambda item, x, z: (x * z.tanh()).sum(), y, y)
        elif by == "layer":
            graph.loss(square, graph.layer(Mix(net.b), y, y))
        elif by == "function":
            graph.loss(square, graph.function(lambda item, x, z: x * z.tanh(), y, y))
        else:
            ports = (y, y) if by == "concat" else graph.broadcast(y, 2)
            graph.loss(
                square, graph.function(lambda item, x, z: x * z.tanh(), graph.concat(*ports))
            )

    def plain(net, one):
        y = net.a(one.x)
        if by == "loss":
            return (y * y.tanh()).sum()
        return square(one, Mix(net.b)(y, y) if by == "layer" else y * y.tanh())

    hold_against(running, build, plain)


def test_a_message_that_meets_itself_behind_nodes_that_pass_it_on(running):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        around = graph.update(lambda item: (), graph.update(lambda item: (1,), y))
        graph.loss(square, graph.function(product, graph.phi(y), around))

    def plain(net, one):
        y = net.a(one.x)
        return square(one, y * y)

    hold_against(running, build, plain)


def test_a_function_may_return_what_it_was_given_and_the_same_tensor_twice(running):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        three = graph.function(lambda item, x: (x, x, x[:2]), y, outputs=3)
        graph.loss(lambda item, x, y, z: (x * y.tanh()).sum() + square(item, z), three)

    def plain(net, one):
        y = net.a(one.x)
        return (y * y.tanh()).sum() + square(one, y[:2])

    hold_against(running, build, plain)


@active
def test_a_split_of_tensors(running, most):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        three = graph.function(lambda item, x: (x, x.tanh(), x * x), y, outputs=3)
        left, right = graph.split(three, [1, 2])
        graph.loss(square, graph.layer(net.b, left))
        graph.loss(lambda item, x, y: (x * y).sum(), right)

    def plain(net, one):
        y = net.a(one.x)
        return square(one, net.b(y)) + (y.tanh() * y * y).sum()

    hold_against(running, build, plain, most=most)


@active
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_split_along_a_dimension(running, most, dim):
    def tables(item, x):
        return torch.outer(x, x), torch.outer(x, x.tanh())

    def build(graph, net, start):
        two = graph.function(tables, graph.layer(net.a, start), outputs=2)
        left, right = graph.split(two, [1, 2], dim=dim)
        graph.loss(lambda item, x, y: (x * y).sum(), left)
        graph.loss(lambda item, x, y: (x * y * y).sum(), right)

    def plain(net, one):
        (x, more_x), (y, more_y) = (t.split([1, 2], dim) for t in tables(one, net.a(one.x)))
        return (x * y).sum() + (more_x * more_y * more_y).sum()

    hold_against(running, build, plain, most=most)


@active
def test_a_concat_of_tensors(running, most):
    def build(graph, net, start):
        two = graph.layer(Two(net.a, net.b), start, outputs=2)
        three = graph.concat(graph.layer(net.c, start), two)
        graph.loss(lambda item, x, y, z: (x * y * z.tanh()).sum(), three)

    def plain(net, one):
        x, (y, z) = net.c(one.x), Two(net.a, net.b)(one.x)
        return (x * y * z.tanh()).sum()

    hold_against(running, build, plain, most=most)


@active
@pytest.mark.parametrize("dim", [0, -1])
def test_a_concat_along_a_dimension(running, most, dim):
    def build(graph, net, start):
        left = graph.layer(Two(net.a, net.b), start, outputs=2)
        right = graph.function(lambda item, x, y: (x[:2], y[:2]), left, outputs=2)
        graph.loss(lambda item, x, y: (x * y.tanh()).sum(), graph.concat(left, right, dim=dim))

    def plain(net, one):
        x, y = Two(net.a, net.b)(one.x)
        return (x * y.tanh()).sum() + (x * y.tanh())[:2].sum()

    hold_against(running, build, plain, most=most)


def test_tensors_of_a_message_may_be_of_different_lengths_where_a_concat_joins_them(running):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        left = graph.function(lambda item, x: (x, x[:1].tanh()), y, outputs=2)
        right = graph.function(lambda item, x: (x[:2], x * x), y, outputs=2)
        graph.loss(
            lambda item, x, y: (x[:4] * y * y).sum() + x[4], graph.concat(left, right, dim=0)
        )

    def plain(net, one):
        x = net.a(one.x)
        long, short = torch.cat([x, x[:2]]), torch.cat([x[:1].tanh(), x * x])
        return (long[:4] * short * short).sum() + long[4]

    hold_against(running, build, plain)


@active
def test_a_flatmap_and_a_group(running, most):
    def states(item):
        return [(state, 5) for state in reversed(range(item.instance.n + 1))]

    def build(graph, net, start):
        many = graph.flatmap(states, graph.layer(net.a, start))
        bent = graph.function(lambda item, x: torch.tanh(x * (1 + item.state[0])), many)
        group = graph.group(lambda item: (), bent, count=lambda item: item.instance.n + 1)
        graph.loss(square, graph.function(weighed, graph.layer(net.b, group)))

    def weighed(item, rows):
        return rows * torch.arange(1, len(rows) + 1)[:, None]

    def plain(net, one):
        y = net.a(one.x)
        rows = torch.stack([torch.tanh(y * (1 + state)) for state in range(one.n + 1)])
        return square(one, weighed(one, net.b(rows)))

    hold_against(running, build, plain, most=most)


@active
def test_an_ungroup(running, most):
    def rows(item, x):
        scale = torch.arange(1, item.instance.n + 2)[:, None]
        return x * scale, (x * x * scale).sum(1)

    def states(item):
        return [(state,) for state in reversed(range(item.instance.n + 1))]

    def build(graph, net, start):
        two = graph.function(rows, graph.layer(net.a, start), outputs=2)
        each = graph.ungroup(states, two)
        scaled = graph.function(lambda item, x, y: x * y * (1 + item.state[0]), each)
        graph.loss(square, graph.layer(net.b, scaled))

    def plain(net, one):
        y = net.a(one.x)
        loss = 0
        for row in range(one.n + 1):
            scale = row + 1
            x = y * scale * (y * y * scale).sum() * (1 + one.n - row)
            loss = loss + square(one, net.b(x))
        return loss

    hold_against(running, build, plain, most=most)


@active
def test_groups_are_put_together_again_in_a_loop_over_a_tree(running, most):
    def leaves(one):
        return {(one.n, place): one.x * (place + 1) for place in range(2**one.n)}

    def build(graph, net, start):
        around = graph.phi(graph.layer(net.a, start))
        over, again = graph.cond(lambda item: item.state[0] > 0, around)
        pair = graph.group(
            lambda item: (item.state[0] - 1, item.state[1] // 2), again, count=lambda item: 2
        )
        joined = graph.function(lambda item, two: torch.tanh(two[0] - 2 * two[1]), pair)
        graph.connect(graph.layer(net.b, joined), around)
        graph.loss(square, over)

    def build_from_leaves(graph, net, start):
        graph.nodes[0] = replace(graph.nodes[0], call=leaves)
        build(graph, net, start)

    def plain(net, one):
        level = [net.a(one.x * (place + 1)) for place in range(2**one.n)]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=True)
            level = [net.b(torch.tanh(left - 2 * right)) for left, right in pairs]
        return square(one, level[0])

    hold_against(running, build_from_leaves, plain, most=most)


@active
def test_messages_go_along_the_edges_of_a_graph(running, most):
    rounds = 2

    def vertices(one):
        return {(0, vertex): one.x * (vertex + 1) for vertex in range(one.n + 2)}

    def along(item):
        step, vertex = item.state
        return [(step, vertex, (vertex + more) % (item.instance.n + 2)) for more in (0, 1)]

    def build(graph, net, start):
        graph.nodes[0] = replace(graph.nodes[0], call=vertices)
        around = graph.phi(graph.layer(net.a, start))
        again, over = graph.cond(lambda item: item.state[0] == rounds, around)
        sent = graph.layer(net.b, graph.flatmap(along, again))
        met = graph.group(
            lambda item: (item.state[0] + 1, item.state[2]), sent, count=lambda item: 2
        )
        graph.connect(graph.function(lambda item, two: two.prod(0).tanh(), met), around)
        graph.loss(square, over)

    def plain(net, one):
        count = one.n + 2
        at = [net.a(one.x * (vertex + 1)) for vertex in range(count)]
        for _ in range(rounds):
            at = [(net.b(at[v]) * net.b(at[(v - 1) % count])).tanh() for v in range(count)]
        return sum(square(one, x) for x in at)

    hold_against(running, build, plain, most=most)


@active
@pytest.mark.parametrize("kind", ["copy", "part", "state", "all"])
def test_what_is_dropped_brings_no_gradient(running, most, kind):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        if kind == "copy":
            graph.drop(graph.layer(net.b, y))
        elif kind == "part":
            y, rest = graph.split(y, [2, 1], dim=0)
            graph.drop(rest)
        elif kind == "state":
            many = graph.flatmap(lambda item: [(0,), (1,), (2,)], y)
            y, rest = graph.cond(lambda item: item.state != (1,), many)
            graph.drop(rest)
        else:
            graph.drop(y)
            y = graph.layer(net.c, start)
        graph.loss(square, y)

    def plain(net, one):
        y = net.c(one.x) if kind == "all" else net.a(one.x)
        return square(one, y[:2] if kind == "part" else y)

    hold_against(running, build, plain, most=most)


def test_a_flow_without_a_loss_has_none(running):
    graph, start = started()
    graph.drop(graph.layer(Net().a, start))
    with running(graph) as runtime:
        assert len(runtime.measure(ONES).tasks) == 3
        assert (runtime.train_epoch(ONES).loss, runtime.evaluate(ONES).loss) == (0.0, 0.0)


@active
def test_several_losses(running, most):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        graph.loss(lambda item, x: (square(item, x), {"n": item.instance.n}), y)
        graph.loss(lambda item, x: x.tanh().sum().view(1, 1), graph.layer(net.b, y))

    def plain(net, one):
        y = net.a(one.x)
        return square(one, y) + net.b(y).tanh().sum()

    hold_against(running, build, plain, most=most)


@checked
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_gradients_are_the_same_however_many_instances_are_under_way(running, counts, most, batch):
    ones = [One(numbers(seed, 1, 3), n) for seed, n in enumerate(counts)]

    def build(graph, net, start):
        def body(port):
            return graph.function(bend, graph.layer(net.b, port, batch=batch))

        end = graph.loop(body, start, go_on=lambda item: item.state[-1] < item.instance.n)
        graph.loss(square, graph.layer(net.a, end, batch=batch))

    def plain(net, one):
        y = one.x
        for _ in range(one.n):
            y = net.b(y).tanh()
        return square(one, net.a(y))

    hold_against(running, build, plain, ones, most)


# --- gradients that are not there ----------------------------------------------------------------


def cut(item, x):
    return x.detach()


def test_gradients_of_copies_are_added_where_some_have_none(running):
    def build(graph, net, start):
        one, two, three = graph.broadcast(graph.layer(net.a, start), 3)
        graph.loss(square, graph.function(cut, one))
        graph.loss(square, two)
        graph.loss(lambda item, x: x.detach().sum(), three)

    def plain(net, one):
        y = net.a(one.x)
        return square(one, y) + square(one, y.detach()) + y.detach().sum()

    hold_differently(running, build, plain)


def hold_differently(running, build, plain):
    """Hold gradients against plain torch's alone: what is cut off changes the loss all the same."""
    net = Net()
    graph, start = started()
    build(graph, net, start)
    with running(graph, Gathers, max_active_keys=2) as runtime:
        runtime.train_epoch(ONES)
        found = gathered(runtime, graph)
    twin = copy.deepcopy(net)
    loss = sum(plain(twin, one) for one in ONES)
    if loss.requires_grad:
        loss.backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (id(p) in found) == (q.grad is not None)
        if q.grad is not None:
            assert_near(found[id(p)], q.grad)


def test_rows_that_bring_no_gradient_bring_zeros(running):
    def part(item, x):
        return x.detach() if item.state[0] % 2 else x * x

    def build(graph, net, start):
        rows = graph.function(lambda item, x: torch.outer(x, x), graph.layer(net.a, start))
        each = graph.ungroup(lambda item: [(row,) for row in range(3)], rows)
        graph.loss(square, graph.function(part, each))

    def plain(net, one):
        y = net.a(one.x)
        return square(one, torch.outer(y, y)[::2] ** 2)

    hold_differently(running, build, plain)


@pytest.mark.parametrize("dim", [None, 0])
def test_parts_that_bring_no_gradient_bring_zeros(running, dim):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        if dim is None:
            y = graph.function(lambda item, x: (x.tanh(), x), y, outputs=2)
            left, right = graph.split(y, [1, 1])
        else:
            left, right = graph.split(y, [2, 1], dim=dim)
        graph.loss(square, left)
        graph.loss(square, graph.function(cut, right))

    def plain(net, one):
        y = net.a(one.x)
        return square(one, y[:2] if dim == 0 else y.tanh())

    hold_differently(running, build, plain)


def test_states_that_bring_no_gradient_bring_zeros(running):
    def build(graph, net, start):
        many = graph.flatmap(lambda item: [(0,), (1,), (2,)], graph.layer(net.a, start))
        part = graph.function(lambda item, x: x.detach() if item.state[0] < 2 else x, many)
        graph.loss(square, part)

    hold_differently(running, build, lambda net, one: square(one, net.a(one.x)))


def test_messages_of_a_batch_that_bring_no_gradient_bring_zeros(running):
    def build(graph, net, start):
        many = graph.flatmap(lambda item: [(0,), (1,), (2,)], graph.layer(net.a, start))
        rows = graph.function(lambda item, x: x[None], many)
        part = graph.function(
            lambda item, x: x.detach() if item.state[0] < 2 else x,
            graph.layer(net.b, rows, batch=3),
        )
        graph.loss(square, part)

    hold_differently(running, build, lambda net, one: square(one, net.b(net.a(one.x))))


@pytest.mark.parametrize("dim", [None, 0])
def test_a_concat_of_what_wants_no_gradient_and_what_does(running, dim):
    def build(graph, net, start):
        y = graph.layer(net.a, start)
        if dim is None:
            graph.loss(product_of, graph.concat(start, y))
        else:
            graph.loss(square, graph.layer(Halves(net.b), graph.concat(start, y, dim=0)))

    def product_of(item, x, y):
        return (x * y.tanh()).sum()

    def plain(net, one):
        y = net.a(one.x)
        if dim is None:
            return product_of(one, one.x, y)
        return square(one, Halves(net.b)(torch.cat([one.x, y])))

    hold_differently(running, build, plain)


class Halves(nn.Module):
    """Takes rows of twice three numbers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x[:3] * x[3:])


def test_where_no_gradient_comes_back_nothing_moves(running):
    net = Net()
    graph, start = started()
    graph.loss(square, graph.function(cut, graph.layer(net.a, start)))
    before = copied(net)
    with running(graph, adam) as runtime:
        runtime.train_epoch(ONES)
    assert_equal(copied(net), before)


def test_no_step_is_taken_without_a_gradient(running):
    graph, start = started()
    graph.loss(square, graph.function(cut, graph.layer(Net().a, start)))
    with running(graph) as runtime:
        assert runtime.train_epoch(ONES).updates == 0


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


# --- payloads ------------------------------------------------------------------------------------


def test_whole_numbers_and_truth_values_pass_through_all_nodes(running):
    """Tokens go with a float that wants a gradient, and by themselves, into an embedding."""
    seen = []

    def tokens(one):
        return torch.arange(4), torch.arange(4) > 1, numbers(1, 4)

    def note(item, ids, mask, x):
        seen.append((item.state, ids.tolist(), mask.tolist(), ids.dtype, mask.dtype))
        return ids, mask, x

    embedding = nn.Embedding(4, 3, dtype=torch.float64)
    layer = nn.Linear(1, 1, dtype=torch.float64)
    before = copied(embedding)
    graph, start = started(tokens, outputs=3)
    ids_mask, x = graph.split(start, [2, 1])
    x = graph.layer(layer, graph.function(lambda item, x: x[:, None], x))
    many = graph.concat(ids_mask, graph.function(lambda item, x: x[:, 0], x))
    halves = graph.split(many, [2, 2], dim=0)
    many = graph.concat(*reversed(halves), dim=0)
    each = graph.ungroup(lambda item: [(row,) for row in range(4)], many)
    each = graph.phi(*graph.cond(lambda item: item.state[0] % 2, each))
    each = graph.flatmap(lambda item: [(*item.state, 0), (*item.state, 1)], each)
    pairs = graph.group(lambda item: item.state[:1], each, count=lambda item: 2)
    all_ = graph.group(lambda item: (), graph.function(note, pairs, outputs=3), count=lambda _: 4)
    ids, mask, x = graph.split(all_, [1, 1, 1])
    graph.loss(
        lambda item, vectors, mask, x: (vectors[mask] * x[mask][:, None]).sum(),
        graph.layer(embedding, ids),
        mask,
        x,
    )
    with running(graph) as runtime:
        runtime.train_epoch([None])
    assert [one[:3] for one in sorted(seen)] == [
        ((row,), [token] * 2, [token > 1] * 2) for row, token in enumerate([2, 3, 0, 1])
    ]
    assert {one[3:] for one in seen} == {(torch.int64, torch.bool)}
    moved = [bool((a != b).any()) for a, b in zip(before[0], embedding.weight, strict=True)]
    assert moved == [False, False, True, True]


def test_numbers_without_a_dimension_go_through_layers(running):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x):
            return self.p * x

    first, second = Scale(), Scale()
    graph, start = started(lambda one: torch.tensor(3.0, dtype=torch.float64))
    y = graph.layer(second, graph.layer(first, start))
    many = graph.flatmap(lambda item: [(0,), (1,)], y)
    graph.loss(lambda item, x: x.prod(), graph.group(lambda item: (), many, count=lambda _: 2))
    with running(graph) as runtime:
        assert runtime.train_epoch([0]).loss == 144.0  # (2 * 2 * 3) ** 2
    assert (first.p.item(), second.p.item()) == (2.0 - 144.0, 2.0 - 144.0)


class See(torch.autograd.Function):
    """Notes how tensors and gradients lie."""

    seen: list[Any] = []  # noqa: RUF012 - emptied by the test

    @staticmethod
    def forward(ctx, x):
        See.seen.append((x.is_contiguous(), x.data_ptr() % 64))
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, grad):
        return See.forward(ctx, grad)


def see(item, *tensors):
    return tuple(See.apply(tensor) for tensor in tensors)


def see_in_a_concat(graph, start):
    rows = [graph.function(see, start) for _ in range(2)]
    graph.loss(square, graph.concat(*rows, dim=1))


def see_in_a_group(graph, start):
    many = graph.flatmap(lambda item: [(0,), (1,)], start)
    group = graph.group(lambda _: (), graph.function(see, many), count=lambda _: 2)
    graph.loss(square, graph.function(see, group))


def see_in_an_ungroup(graph, start):
    each = graph.ungroup(lambda item: [(0,), (1,), (2,)], graph.function(see, start))
    graph.loss(square, graph.function(see, each))


def see_in_a_split(dim):
    def build(graph, start):
        for part in graph.split(graph.function(see, start), [1, 2], dim=dim):
            graph.loss(square, graph.function(see, part))

    return build


def see_behind(change):
    def build(graph, start):
        graph.loss(square, graph.function(see, change(graph, start)))

    return build


@pytest.mark.parametrize(
    "build",
    [
        see_behind(lambda graph, start: start),
        see_behind(lambda graph, start: graph.layer(Turn(), start)),
        see_behind(lambda graph, start: graph.function(lambda item, x: x[1:, 1:], start)),
        see_in_a_split(0),
        see_in_a_split(1),
        see_in_a_concat,
        see_in_a_group,
        see_in_an_ungroup,
    ],
    ids=["nothing", "layer", "function", "split rows", "split", "concat", "group", "ungroup"],
)
def test_numbers_lie_the_same_whether_they_come_from_another_rank_or_not(running, build):
    """Strides and alignment change the order in which kernels add: placement would change bits."""
    See.seen = []
    graph, start = started(lambda one: torch.outer(one.x, one.x))
    build(graph, graph.layer(Net().a, start))
    with running(graph) as runtime:
        runtime.train_epoch(ONES[:1])
    assert set(See.seen) == {(True, 0)}


def test_an_instance_lies_the_same_whether_it_goes_to_another_rank_or_not(running):
    See.seen = []
    graph, start = started(lambda one: torch.outer(one.x, one.x).t()[1:])
    graph.loss(square, graph.function(see, start))
    with running(graph) as runtime:
        runtime.train_epoch(ONES[:1])
    assert set(See.seen) == {(True, 0)}


class Turn(nn.Module):
    """Returns rows that lie as columns."""

    def forward(self, x):
        return x.t()


# --- weights -------------------------------------------------------------------------------------


class Clips(torch.optim.SGD):
    """Changes gradients in place, as many do."""

    def step(self, closure=None):
        for group in self.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 0.01)
        return super().step(closure)


@pytest.mark.parametrize("unit", ["instance", "message"])
def test_an_optimizer_that_writes_to_gradients_changes_nobody_elses(running, unit):
    first, second = Shift(), Shift()
    graph, start = started()
    y = graph.layer(first, start)
    graph.loss(square, graph.layer(second, y, optimizer=lambda p: Clips(p, lr=1.0)))
    with running(graph, updates=Updates(unit=unit)) as runtime:
        runtime.train_epoch(ONES[:1])
    assert_near(first.p.detach(), -2 * ONES[0].x)


@pytest.mark.parametrize("unit", ["instance", "message"])
def test_each_parameter_has_a_gradient_of_its_own(running, unit):
    def nesterov(params):
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, foreach=True)

    layer = Shift()
    twin = copy.deepcopy(layer)
    graph, start = started()
    graph.loss(square, graph.layer(layer, start))
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
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_near(p, q)


def test_a_layer_takes_a_step_with_the_mean_of_its_gradients_and_of_what_is_left(running):
    net = Net()
    graph, start = started()
    graph.loss(square, graph.layer(net.a, start))
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
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert_near(p, q)


@pytest.mark.parametrize("weights", ["current", "stashed"])
def test_backward_computes_with_the_weights_that_it_is_told_to(running, weights):
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


# --- batches -------------------------------------------------------------------------------------


def rows_of(one):
    return {
        (place,): numbers(10 * one + place, 1 + place % 3, 3, dtype=torch.float32)
        for place in range(5)
    }


@pytest.mark.parametrize("batch", [2, 3, 64])
def test_messages_computed_together_give_the_same(running, batch):
    def trained(batch):
        net = Net(torch.float32)
        calls = []
        net.b.register_forward_hook(lambda *_: calls.append(1))
        graph, start = started(rows_of)
        y = graph.layer(Two(net.a, net.b), start, outputs=2, batch=batch)
        y = graph.function(lambda item, x, y: x * y * item.state[0], y)
        graph.loss(square, graph.layer(net.c, y, batch=batch))
        updates = Updates(min_update_interval=4)
        with running(graph, lambda p: torch.optim.SGD(p, lr=0.01), updates=updates) as runtime:
            return net, runtime.train_epoch(range(4)), len(calls), runtime.evaluate(range(4)).loss

    net, epoch, calls, after = trained(batch)
    expected, alone, all_calls, loss = trained(1)
    assert calls < all_calls == 20
    assert epoch.loss == pytest.approx(alone.loss, rel=1e-6)
    assert after == pytest.approx(loss, rel=1e-6)
    assert (epoch.updates, epoch.mean_age) == (alone.updates, alone.mean_age)
    for p, q in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 5, 12, 33])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("sizes", [(128, 5), (5, 128), (7, 3), (64, 64)], ids=str)
def test_a_linear_layer_by_hand_has_the_bits_of_autograd(dtype, rows, bias, sizes):
    torch.manual_seed(rows)
    layer = nn.Linear(*sizes, bias=bias, dtype=dtype)
    assert is_linear(layer)
    weights = list(layer.parameters())
    given = torch.randn(rows, sizes[0], dtype=dtype).requires_grad_()
    grad = torch.randn(rows, sizes[1], dtype=dtype)
    expected = gradients([given], [layer(given)], [grad], weights)
    found = gradients_of_linear([given], [], [grad], weights)
    for a, b in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def _frozen(layer):
    layer.bias.requires_grad_(False)


def _hooked(layer):
    layer.register_forward_hook(lambda module, given, found: 2 * found)


def _parameter_hooked(layer):
    layer.weight.register_hook(lambda grad: 2 * grad)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Scaled, lambda _: None),
        (nn.Linear, _frozen),
        (nn.Linear, _hooked),
        (nn.Linear, _parameter_hooked),
        (nn.Linear, torch.nn.utils.parametrizations.weight_norm),
    ],
    ids=["subclass", "frozen", "hook", "hook of a parameter", "weight norm"],
)
def test_a_linear_layer_that_does_more_is_autograds(running, kind, change):
    def built():
        torch.manual_seed(0)
        layer = kind(3, 3, dtype=torch.float64)
        change(layer)
        return layer

    layer, twin = built(), built()
    assert not is_linear(layer)
    graph, start = started(lambda one: one.x.view(-1, 3))
    graph.loss(square, graph.layer(layer, start))
    optimizer = sgd([p for p in twin.parameters() if p.requires_grad])
    with running(graph, max_active_keys=1) as runtime:
        runtime.train_epoch(ONES)
    for one in ONES:
        optimizer.zero_grad()
        square(None, twin(one.x.view(-1, 3))).backward()
        optimizer.step()
    for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
        assert_near(p, q)


def test_messages_that_a_layer_computes_one_by_one_are_taken_together(running):
    """Forward of all instances; backward of one, which may be finished by it."""
    states = [(place,) for place in range(3)]
    graph, start = started(lambda one: dict.fromkeys(states, one.x))
    graph.loss(square, graph.layer(Shift(), start))
    with running(graph, max_active_keys=2) as runtime:
        runtime.keep_log()
        runtime.train_epoch(ONES[:2])
        did = [one for one in runtime.logged().did if one.node == 1]
    forward, *backward = [{key[0] for key in one.keys} for one in did]
    assert not did[0].back
    assert len(did[0].keys) > len(states)
    assert forward == {0, 1}
    assert all(one.back for one in did[1:])
    assert all(len(instances) == 1 for instances in backward)
    assert sum(len(one.keys) for one in did[1:]) == 2 * len(states)
    assert len(backward) < 2 * len(states)


def test_no_more_messages_are_computed_together_than_may_be(running):
    rows = []
    net = Net()
    net.a.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    graph, start = started(lambda one: {(k,): one.x[None] for k in range(5)})
    graph.loss(square, graph.layer(net.a, start, batch=3))
    with running(graph, max_active_keys=1) as runtime:
        runtime.train_epoch(ONES)
    assert rows == [3, 2] * 3


@pytest.mark.parametrize(
    ("reduce", "shape"), [(lambda x: x.sum(0), "(3,)"), (lambda x: x.sum(), "()")], ids=["0", "all"]
)
def test_a_layer_that_adds_up_rows_does_not_compute_messages_together(running, reduce, shape):
    class Sums(nn.Module):
        def forward(self, x):
            return reduce(x)

    graph, start = started(rows_of)
    graph.loss(square, graph.layer(Sums(), start, name="sums", batch=5))
    with running(graph) as runtime, refused("'sums'", shape, "9 rows", "batch=1"):
        runtime.train_epoch([0])


def test_tensors_of_a_message_have_as_many_rows_where_several_are_computed_together(running):
    # One row is multiplied by two, which is well by itself; of both messages there are three.
    def take(one):
        return {
            (0,): (numbers(0, 1, 3), numbers(1, 2, 3)),
            (1,): (numbers(2, 2, 3), numbers(3, 1, 3)),
        }

    graph, start = started(take, outputs=2)
    graph.loss(square, graph.layer(Mix(Net().a), start, name="mix", batch=2))
    with running(graph) as runtime, refused("layer 'mix'", "rows"):
        runtime.train_epoch([0])


# --- random numbers ------------------------------------------------------------------------------


def drops():
    torch.manual_seed(5)
    attention = nn.MultiheadAttention(4, 2, dropout=0.5)
    return {
        "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout()),
        "attention": Attends(attention),
        "lstm": First(nn.LSTM(4, 4, num_layers=2, dropout=0.5)),
    }


class Attends(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, x, x)[0]


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def dropped(running, kind, most, seed=0, **keywords):
    """Return the losses of two epochs, and the parameters after them."""
    layer = drops()[kind]
    tables = [numbers(k, 3, 4, dtype=torch.float32) for k in range(5)]
    graph, start = started(lambda x: x)
    end = graph.loop(
        lambda port: graph.layer(layer, port), start, go_on=lambda item: item.state[-1] < 2
    )
    graph.loss(square, end)
    updates = Updates(min_update_interval=5)
    with running(graph, adam, max_active_keys=most, updates=updates, seed=seed) as runtime:
        return [runtime.train_epoch(tables).loss for _ in range(2)], copied(layer)


@pytest.mark.parametrize("kind", ["dropout", "attention", "lstm"])
def test_dropout_is_the_same_however_many_instances_are_under_way(running, kind):
    torch.manual_seed(1)
    (first, _), _ = dropped(running, kind, 1)
    torch.manual_seed(2)  # on which nothing depends
    (again, _), _ = dropped(running, kind, 4)
    assert first == again


def test_dropout_depends_on_the_seed_and_the_epoch(running):
    (first, second), _ = dropped(running, "dropout", 2)
    (other, _), _ = dropped(running, "dropout", 2, seed=1)
    (same, _), _ = dropped(running, "dropout", 2)
    assert first == same
    assert len({first, second, other}) == 3


def test_dropout_draws_anew_for_each_state_of_an_instance(running):
    drawn = {}

    def see(item, x):
        drawn[item.instance, item.state] = tuple((x != 0).tolist())
        return x.sum()

    graph, start = started(lambda _: torch.ones(64).requires_grad_())
    states = graph.flatmap(lambda _: [(n,) for n in range(3)], start)
    graph.loss(see, graph.layer(nn.Dropout(), states))
    with running(graph) as runtime:
        runtime.train_epoch(range(2))
    assert len(drawn) == len(set(drawn.values())) == 6


def test_dropout_leaves_the_callers_random_numbers_alone(running):
    graph, start = started()
    graph.loss(square, graph.layer(nn.Dropout(), start))
    with running(graph) as runtime:
        before = torch.get_rng_state()
        runtime.train_epoch(ONES)
    assert torch.equal(torch.get_rng_state(), before)


# --- evaluation ----------------------------------------------------------------------------------


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


def normed():
    graph, start = started(lambda one: torch.outer(one.x, one.x))
    layer, net = Normed(), Net()
    many = graph.flatmap(lambda item: [(0,), (1,)], graph.layer(layer, start))
    graph.loss(square, graph.layer(net.a, many))
    return graph, nn.ModuleList([layer, net.a])


def modes(module):
    return [one.training for one in module.modules()]


def test_evaluation_changes_nothing(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        runtime.keep_log()
        runtime.train_epoch(ONES)
        before, mode, random = copied(net), modes(net), torch.get_rng_state()
        steps = copy.deepcopy([one.state_dict() for one in runtime.optimizers.values()])
        log = runtime.logged()
        first, again = (runtime.evaluate(ONES) for _ in range(2))
        assert first.loss == again.loss
        assert not first.trained
        assert (first.epoch, first.updates, runtime.epoch) == (1, 0, 1)
        assert_equal(copied(net), before)
        assert modes(net) == mode
        assert False in mode[1:]
        assert torch.equal(torch.get_rng_state(), random)
        assert str(steps) == str([one.state_dict() for one in runtime.optimizers.values()])
        assert runtime.logged() is log


def test_evaluation_computes_as_modules_do_in_their_evaluation_mode(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        runtime.train_epoch(ONES)
        found = runtime.evaluate(ONES)
    net.eval()
    with torch.no_grad():
        expected = [2 * square(None, net[1](net[0](torch.outer(one.x, one.x)))) for one in ONES]
    assert found.loss == pytest.approx(float(sum(expected) / len(ONES)), rel=1e-12)


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


def test_a_flow_may_be_evaluated_before_it_is_trained(running):
    with running(one_layer()) as runtime:
        found = runtime.evaluate(ONES)
        assert (found.epoch, found.trained, runtime.epoch) == (0, False, 0)
        runtime.train_epoch(ONES)
        assert found.loss != runtime.evaluate(ONES).loss


# --- what is reported ----------------------------------------------------------------------------


def test_losses_are_means_over_instances_and_metrics_over_reports(running):
    def take(one):
        return {(k,): torch.tensor(float(one + k)) for k in range(one)}

    def odd(item, x):
        return x, {"odd": int(x) % 2, "all": torch.tensor(1.0)} if int(x) % 2 else {"all": 2}

    graph, start = started(take)
    graph.loss(odd, start)
    graph.loss(lambda item, x: x * 10, start)
    with running(graph, max_active_keys=2) as runtime:
        epoch = runtime.train_epoch([1, 2, 3])
        values = [1, 2, 3, 3, 4, 5]
        assert epoch.loss == pytest.approx(11 * sum(values) / 3)
        assert epoch.metrics == {"odd": 1.0, "all": pytest.approx((4 * 1 + 2 * 2) / 6)}
        assert runtime.evaluate([1, 2, 3]).metrics == epoch.metrics


def test_an_epoch_says_what_happened(running):
    net = Net()
    graph, start = started()
    graph.loss(square, graph.layer(net.a, start))
    with running(graph, max_active_keys=2) as runtime:
        runtime.train_epoch(ONES)
        epoch = runtime.train_epoch(ONES)
        assert runtime.epoch == 2
        assert runtime.placement == {"source": (0,), "linear": (0,), "loss": (0,)}
    assert isinstance(epoch, Epoch)
    assert (epoch.epoch, epoch.trained, epoch.instances, epoch.in_flight) == (1, True, 3, 2)
    assert (epoch.updates, epoch.sent_bytes) == (3, 0)
    assert 0 < epoch.busy[0] <= 1
    assert epoch.instances_per_second == pytest.approx(3 / epoch.seconds)


def test_progress_is_told(running, monkeypatch):
    monkeypatch.setattr("daso.flow.loop_monitor.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("daso.flow.worker.LOOK_SECONDS", 0.0)
    graph, start = started()
    graph.loss(square, graph.layer(Net().a, start))
    for go in ("train_epoch", "evaluate"):
        told = []
        with running(graph, max_active_keys=1) as runtime:
            getattr(runtime, go)(ONES * 2, progress=lambda *pair, told=told: told.append(pair))
        assert {count for _, count in told} == {6}
        done = [finished for finished, _ in told]
        assert done == sorted(done)
        assert set(range(6)) <= set(done) <= set(range(7))


def test_epochs_are_written_as_lines(running, tmp_path):
    graph, start = started()
    graph.loss(lambda item, x: (square(item, x), {"n": item.instance.n}), start)
    path = tmp_path / "epochs.jsonl"
    path.write_text('{"earlier": 1}\n')
    with running(graph) as runtime:
        runtime.evaluate(ONES)
        runtime.write_lines(path)
        epochs = [runtime.train_epoch(ONES), runtime.train_epoch(ONES), runtime.evaluate(ONES)]
    earlier, *lines = map(json.loads, path.read_text().splitlines())
    assert earlier == {"earlier": 1}
    assert lines == [{**asdict(epoch), "busy": list(epoch.busy)} for epoch in epochs]


def test_a_loss_that_is_not_finite_is_written_by_its_name(running, tmp_path):
    graph, start = started()
    graph.loss(lambda item, x: (square(item, x) * math.nan, {"n": item.instance.n}), start)
    path = tmp_path / "epochs.jsonl"
    with running(graph) as runtime:
        runtime.write_lines(path)
        assert math.isnan(runtime.evaluate(ONES).loss)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] == "nan"


# --- logs ----------------------------------------------------------------------------------------


def logged(running, epochs=2):
    """Return a flow as it was, one that was trained, its logs, and what trained it."""
    graph, net = normed()
    before = copy.deepcopy(graph)
    ones = [ONES, ONES[::-1]][:epochs]
    with running(graph, adam, max_active_keys=2, updates=Updates(unit="message")) as runtime:
        runtime.keep_log()
        logs = []
        for some in ones:
            runtime.train_epoch(some)
            logs.append([runtime.logged()])
    return before, net, logs, ones


def test_a_log_must_be_kept_before_it_is_read(running):
    graph, start = started()
    graph.loss(square, start)
    with running(graph) as runtime:
        runtime.train_epoch(ONES)
        with refused("keep_log()", kind=ConfigError):
            runtime.logged()
        runtime.keep_log()
        with refused("keep_log()", kind=ConfigError):
            runtime.logged()
        runtime.train_epoch(ONES)
        assert runtime.logged().rank == 0


def test_a_replay_gives_the_bits_that_were_logged(running):
    before, net, logs, ones = logged(running)
    replay(logs, before, adam, ones)
    again = nn.ModuleList(node.call for node in before.nodes if node.kind == "layer")
    assert_equal(copied(again), copied(net))


class Plain(torch.optim.Optimizer):
    """Writes to parameters as they are: whoever calls it sees to it that autograd does not mind."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad)


def test_a_replay_lets_optimizers_write_to_parameters_as_training_does(running):
    graph = one_layer()
    before = copy.deepcopy(graph)
    with running(graph, Plain) as runtime:
        runtime.keep_log()
        runtime.train_epoch(ONES)
        replay([[runtime.logged()]], before, Plain, [ONES])
    assert_equal(copied(before.nodes[1].call), copied(graph.nodes[1].call))


def test_a_replay_of_other_instances_is_refused(running):
    before, _, logs, ones = logged(running, epochs=1)
    with refused("bits that were logged", "'normed'", "rank 0", kind=ConfigError):
        replay(logs, before, adam, [[one._replace(x=one.x + 1) for one in ones[0]]])


def test_a_replay_of_fewer_instances_is_refused(running):
    before, _, logs, ones = logged(running, epochs=1)
    with refused("could not have been", kind=ConfigError):
        replay(logs, before, adam, [ones[0][:2]])


def test_a_replay_of_some_ranks_is_refused(running):
    before, _, logs, ones = logged(running, epochs=1)
    with refused("rank order", kind=ConfigError):
        replay([[replace(logs[0][0], rank=1)]], before, adam, ones)


# --- checkpoints ---------------------------------------------------------------------------------


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("weights", ["current", "stashed"])
@pytest.mark.parametrize("unit", ["instance", "message"])
def test_training_goes_on_from_what_was_saved(running, unit, weights):
    keywords = {
        "max_active_keys": 2,
        "updates": Updates(unit=unit, weights=weights, min_update_interval=2),
    }

    def trained(runtime, epochs):
        return [runtime.train_epoch(ONES).loss for _ in range(epochs)]

    graph, net = normed()
    with running(graph, adam, **keywords) as runtime:
        losses = trained(runtime, 4)
        whole = copied(net)
    graph, _ = normed()
    with running(graph, adam, **keywords) as runtime:
        first = trained(runtime, 2)
        state = saved(runtime.state_dict())
    graph, net = normed()
    with running(graph, adam, **keywords) as runtime:
        runtime.load_state_dict(state)
        assert runtime.epoch == 2
        assert first + trained(runtime, 2) == losses
    assert_equal(copied(net), whole)


def test_a_runtime_may_go_back_to_what_was_saved(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        runtime.train_epoch(ONES)
        state = saved(runtime.state_dict())
        runtime.train_epoch(ONES)
        after = copied(net)
        runtime.load_state_dict(state)
        runtime.train_epoch(ONES)
    assert_equal(copied(net), after)


def test_training_goes_on_from_what_was_saved_before_the_first_epoch(running):
    graph, start = started()
    graph.loss(square, graph.layer(Net().a, start))
    with running(graph) as runtime:
        runtime.load_state_dict(saved(runtime.state_dict()))
        runtime.train_epoch(ONES)


def test_what_was_saved_before_the_first_epoch_brings_the_start_back(running):
    net = Net()
    graph, start = started()
    graph.loss(square, graph.layer(net.a, start))
    with running(graph) as runtime:
        first = {name: value.clone() for name, value in net.a.state_dict().items()}
        state = saved(runtime.state_dict())
        runtime.train_epoch(ONES)
        runtime.synchronize()
        moved = net.a.state_dict()
        assert any(not torch.equal(moved[name], value) for name, value in first.items())
        runtime.load_state_dict(state)
        assert all(torch.equal(value, first[name]) for name, value in net.a.state_dict().items())
        runtime.train_epoch(ONES)


@pytest.mark.parametrize("trains", [True, False])
def test_layers_that_are_frozen_or_unfrozen_between_epochs_are_refused(running, trains):
    net = Net()
    net.a.bias.requires_grad_(trains)
    graph, start = started()
    graph.loss(square, graph.layer(net.a, start))
    with running(graph) as runtime:
        runtime.train_epoch(ONES)
        net.a.bias.requires_grad_(not trains)
        word = "frozen" if trains else "unfrozen"
        with pytest.raises(ConfigError, match=f"bias of layer .* was {word};"):
            runtime.train_epoch(ONES)
        net.a.bias.requires_grad_(trains)
        runtime.train_epoch(ONES)


def one_layer(**keywords):
    graph, start = started()
    graph.loss(square, graph.layer(Net().a, start, **keywords))
    return graph


def two_layers():
    graph, start = started()
    net = Net()
    graph.loss(square, graph.layer(net.b, graph.layer(net.a, start)))
    return graph


@pytest.mark.parametrize("placed", [False, True], ids=["fresh", "placed"])
@pytest.mark.parametrize(
    ("make", "other"),
    [
        (two_layers, one_layer),
        (one_layer, two_layers),
        (one_layer, lambda: one_layer(name="other")),
    ],
    ids=["more", "fewer", "renamed"],
)
def test_the_state_of_another_flow_is_refused(running, make, other, placed):
    with running(make()) as runtime:
        runtime.train_epoch(ONES)
        state = saved(runtime.state_dict())
    with running(other()) as runtime:
        if placed:
            runtime.train_epoch(ONES)
        with refused("same flow", kind=CheckpointError):
            runtime.load_state_dict(state)


def test_the_state_of_more_ranks_is_refused(running):
    with running(one_layer()) as runtime:
        runtime.train_epoch(ONES)
        state = runtime.state_dict()
        state["ranks_of"][1] = [3]
        with refused("these, 1", "4 ranks", kind=CheckpointError):
            runtime.load_state_dict(state)


# --- measuring -----------------------------------------------------------------------------------


def test_measuring_changes_nothing(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        for _ in range(2):
            before, mode, random = copied(net), modes(net), torch.get_rng_state()
            measured = runtime.measure(ONES, 2)
            assert len(measured.tasks) == 2
            assert_equal(copied(net), before)
            assert modes(net) == mode
            assert torch.equal(torch.get_rng_state(), random)
            assert all(p.grad is None for p in net.parameters())
            runtime.train_epoch(ONES)
        assert runtime.epoch == 2


def test_measuring_changes_no_buffer_that_a_module_replaces(running):
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3, dtype=torch.float64))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach()
            return x - self.mean

    layer = Averages()
    graph, start = started()
    graph.loss(square, graph.layer(layer, start))
    with running(graph) as runtime:
        runtime.measure(ONES)
    assert torch.equal(layer.mean, torch.zeros(3, dtype=torch.float64))


def test_what_is_measured_says_who_computed_and_what_waited_for_what(running):
    graph, _ = normed()
    with running(graph) as runtime:
        measured = runtime.measure(ONES)
    assert len(measured.tasks) == len(ONES)
    for tasks in measured.tasks:
        # Forward: two layers, the second for two states, their losses; backward likewise.
        assert sorted((task.node, task.back) for task in tasks) == [
            *((1, False), (1, True)),
            *((3, False), (3, False), (3, True), (3, True)),
            *((4, False), (4, False)),
        ]
        assert all(before < place for place, task in enumerate(tasks) for before in task.after)
        last = next(task for task in tasks if task.node == 1 and task.back)
        behind = [tasks[place] for place in last.after]
        assert [task.node for task in behind if task.back] == [3, 3]  # both of the flatmap
    seconds = measured.seconds(len(graph.nodes))
    assert [taken > 0 for taken in seconds] == [False, True, False, True, True]
    crossed = {(source, target): nbytes for source, target, nbytes in measured.edges()}
    assert crossed[0, 1] == 3 * 72
    assert crossed[2, 3] == 2 * crossed[1, 2]


def test_layers_that_compute_messages_together_can_be_measured(running):
    graph, start = started(rows_of)
    graph.loss(square, graph.layer(Net(torch.float32).a, start, batch=4))
    with running(graph) as runtime:
        assert len(runtime.measure(range(2)).tasks) == 2


def test_ways_that_messages_take_are_measured_apart_from_what_sends_them(running):
    def slow(item):
        time.sleep(0.01)
        return item.state

    graph, start = started(rows_of)
    layer = graph.layer(Net(torch.float32).a, start)
    graph.loss(square, graph.update(slow, layer, name="slow"))
    with running(graph) as runtime:
        seconds = runtime.measure(range(3)).together
    of = {graph.nodes[node].name: taken for node, taken in seconds.items()}
    slept = 3 * 5 * 0.01  # messages of three instances
    assert of.pop("slow") >= slept
    assert sum(of.values()) < slept


# --- what cannot go on ---------------------------------------------------------------------------


def failing(running, build, *words, ones=ONES[1:2], take=lambda one: one.x, kind=FlowError):
    """Hold against these words what is raised as instances go through a flow."""
    for go in ("train_epoch", "evaluate"):
        graph, start = started(take)
        build(graph, start)
        with running(graph) as runtime, refused(*words, kind=kind):
            getattr(runtime, go)(ones)


def test_a_state_that_comes_twice_is_refused(running):
    def build(graph, start):
        graph.loss(square, graph.update(lambda item: (7,), start, name="all alike"))

    def take(one):
        return {(0,): one.x, (1,): one.x}

    failing(running, build, "state (7,) came twice", "update 'all alike'", take=take)


def test_a_state_that_comes_to_a_phi_by_two_ports_is_refused(running):
    def build(graph, start):
        graph.loss(square, graph.phi(start, start, name="meet"))

    failing(running, build, "state () came twice", "phi 'meet'")


@pytest.mark.parametrize("state", [3, None, ("a",), (0.5,), (None,)], ids=str)
@pytest.mark.parametrize("kind", ["update", "flatmap", "ungroup", "group"])
def test_a_state_is_whole_numbers(running, kind, state):
    def build(graph, start):
        given = [state] if kind in ("flatmap", "ungroup") else state
        keywords = {"count": lambda item: 1} if kind == "group" else {}
        graph.loss(square, getattr(graph, kind)(lambda _: given, start, name="odd", **keywords))

    failing(running, build, "tuple of whole numbers", f"{kind} 'odd'", repr(state))


@pytest.mark.parametrize("kind", ["flatmap", "ungroup"])
@pytest.mark.parametrize("states", [[(1,), (2,), (1,)], []], ids=["repeat", "none"])
def test_states_that_repeat_or_are_none_are_refused(running, kind, states):
    def build(graph, start):
        graph.loss(square, getattr(graph, kind)(lambda item: states, start, name="spread"))

    failing(running, build, f"{kind} 'spread'", "different", str(states), "for state ()")


@pytest.mark.parametrize("kind", ["flatmap", "ungroup"])
def test_a_state_made_from_two_messages_is_refused(running, kind):
    def build(graph, start):
        def states(item):
            return [(item.state[0] + more,) for more in range(3)]

        graph.loss(square, getattr(graph, kind)(states, start, name="spread"))

    def take(one):
        return {(0,): one.x, (1,): one.x}

    words = (f"{kind} 'spread'", "state (1,)", "from (0,) and from (1,)")
    failing(running, build, *words, take=take)


def test_an_ungroup_has_a_state_for_every_row(running):
    def build(graph, start):
        graph.loss(square, graph.ungroup(lambda item: [(0,), (1,)], start, name="apart"))

    failing(running, build, "ungroup 'apart'", "3,", "given 2")


def grouped(count, states):
    def build(graph, start):
        many = graph.flatmap(lambda item: [(k,) for k in range(states)], start)
        graph.loss(square, graph.group(lambda _: (9,), many, count=lambda _: count, name="all"))

    return build


def test_a_group_that_too_many_come_to_is_refused(running):
    failing(running, grouped(2, 4), "state (9,) came twice", "group 'all'")


def test_a_group_that_one_too_many_comes_to_cannot_go_on(running):
    words = ("nothing moves", "group 'all' has 1 of the messages", "state (9,) of instance 0")
    failing(running, grouped(2, 3), *words)


def test_a_group_that_too_few_come_to_cannot_go_on(running):
    words = ("nothing moves", "group 'all' has 3 of the messages", "state (9,) of instance 0")
    failing(running, grouped(4, 3), *words)


@pytest.mark.parametrize("count", [0, -1])
def test_a_group_has_a_member(running, count):
    failing(running, grouped(count, 1), "group of 'all'", "one at least", f"a group of {count}")


def test_a_join_to_which_one_way_never_comes_cannot_go_on(running):
    def build(graph, start):
        no, yes = graph.cond(lambda item: item.instance.n == 3, start)
        graph.loss(square, no, start, name="both")
        graph.loss(square, yes)

    words = (
        "nothing moves",
        "concat 'both inputs' has 1 of the messages",
        "state () of instance 2",
    )
    failing(running, build, *words, ones=ONES)


@pytest.mark.parametrize("dim", [None, 0])
def test_a_join_to_which_all_ways_came_keeps_nothing_and_waits_for_nothing(running, dim):
    """Seen in what is told of an epoch that cannot go on: it names all that nodes hold."""
    graph, start = started()
    joined = graph.concat(start, start, dim=dim, name="joined")
    stuck = graph.group(lambda _: (9,), joined, count=lambda _: 2, name="stuck")
    graph.loss(square, stuck)
    with running(graph) as runtime, pytest.raises(FlowError) as error:
        runtime.train_epoch(ONES[:1])
    assert "group 'stuck' has 1 of the messages" in str(error.value)
    assert "joined" not in str(error.value)


@pytest.mark.parametrize("way", [2, -1])
def test_a_way_that_a_cond_does_not_have_is_refused(running, way):
    def build(graph, start):
        for port in graph.cond(lambda item: way, start, name="fork"):
            graph.loss(square, port)

    failing(running, build, "cond 'fork'", "0 to 1", f"not {way}")


def test_a_source_makes_a_message(running):
    def build(graph, start):
        graph.loss(square, start)

    def take(one):
        return {} if one.n == 3 else one.x

    failing(running, build, "source 'source'", "instance 2", ones=ONES, take=take)


@pytest.mark.parametrize(
    "made", [[torch.ones(3)], 3.0, None, (torch.ones(3), torch.ones(3)), {(0,): 1}], ids=str
)
def test_a_source_makes_as_many_tensors_as_its_outputs_say(running, made):
    def build(graph, start):
        graph.loss(lambda item, *tensors: torch.zeros(()), start)

    failing(running, build, "source 'source'", "1", take=lambda one: made)


@pytest.mark.parametrize("made", [{"ab": torch.ones(3)}, {(0.5,): torch.ones(3)}], ids=str)
def test_states_that_a_source_makes_are_whole_numbers(running, made):
    def build(graph, start):
        graph.loss(lambda item, *tensors: torch.zeros(()), start)

    failing(running, build, "tuple of whole numbers", "'source'", take=lambda one: made)


def test_a_source_that_fails_is_named(running):
    def build(graph, start):
        graph.loss(square, start)

    def take(one):
        raise RuntimeError("no such image")

    failing(running, build, "'source'", "instance 0", "RuntimeError: no such image", take=take)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: (x, x), "Tensor, Tensor"),
        (lambda x: (), "it returned"),
        (lambda x: [x], "list"),
        (lambda x: 3.0, "float"),
        (lambda x: (x, (x, x)), "Tensor, tuple"),
        (lambda x: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("kind", ["layer", "function"])
def test_a_node_returns_as_many_tensors_as_its_outputs_say(running, kind, returned, said):
    class Returns(nn.Module):
        def forward(self, x):
            return returned(x)

    def build(graph, start):
        if kind == "layer":
            graph.loss(square, graph.layer(Returns(), start, name="odd"))
        else:
            graph.loss(square, graph.function(lambda _, x: returned(x), start, name="odd"))

    failing(running, build, f"{kind} 'odd'", "say, 1,", said)


@pytest.mark.parametrize(
    "loss",
    [lambda item, x: x, lambda item, x: 3.0, lambda item, x: (3.0, {}), lambda item, x: None],
)
def test_a_loss_is_a_tensor_of_one_number(running, loss):
    def build(graph, start):
        graph.loss(loss, start, name="odd")

    failing(running, build, "loss 'odd'", "one number")


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


@active
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


@pytest.mark.parametrize("kind", ["function", "loss", "cond", "update", "flatmap", "group"])
def test_a_function_that_fails_is_named_with_instance_and_state(running, kind):
    def fail(item, *tensors):
        raise KeyError("token")

    def build(graph, start):
        at = graph.update(lambda item: (item.instance.n, 4), start)
        if kind == "loss":
            graph.loss(fail, at, name="breaks")
            return
        keywords = {"count": lambda item: 1} if kind == "group" else {}
        made = getattr(graph, kind)(fail, at, name="breaks", **keywords)
        for port in made if kind == "cond" else [made]:
            graph.loss(square, port)

    failing(running, build, f"{kind} 'breaks'", "instance 0, state (2, 4)", "KeyError: 'token'")


@pytest.mark.parametrize("kind", ["function", "loss"])
def test_one_that_fails_among_some_that_wait_together_is_named(running, kind):
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


def test_gradients_of_what_shares_a_tensor_are_its_own(running):
    """A function is given the same tensor with several states, together."""
    net = nn.Linear(2, 2)
    graph, start = started(lambda one: torch.full((2,), float(one + 1)))
    states = graph.flatmap(lambda item: [(n,) for n in range(3)], graph.layer(net, start))
    scaled = graph.function(lambda item, x: x * (item.state[0] + 1), states)
    graph.loss(lambda item, x: x.sum(), scaled)
    before = [p.detach().clone() for p in net.parameters()]
    never = Updates(min_update_interval=10**9)
    with running(graph, max_active_keys=4, updates=never) as runtime:
        runtime.train_epoch(range(4))
    # Each instance's output gets 1 + 2 + 3; the mean over instances of input (n + 1) is 2.5.
    weight, bias = (b - p.detach() for b, p in zip(before, net.parameters(), strict=True))
    assert torch.allclose(weight, torch.full((2, 2), 6 * 2.5))
    assert torch.allclose(bias, torch.full((2,), 6.0))


def test_why_a_module_failed_is_kept(running):
    graph, start = started(lambda one: torch.full((2,), 3.0))
    graph.loss(square, graph.layer(Fails("forward"), start))
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


def test_an_epoch_after_one_that_failed_has_nothing_left_of_it(running):
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


def test_a_runtime_closes_at_the_end_of_with(running):
    with Runtime(one_layer(), sgd, topology=daso.Topology(MPI.COMM_SELF)) as runtime:
        runtime.train_epoch(ONES)
    runtime.close()


def test_instances_are_asked_for_where_they_are_no_list(running):
    class Slow:
        asked = 0

        def __len__(self):
            return len(ONES)

        def __getitem__(self, place):
            Slow.asked += 1
            return ONES[place]

    losses = []
    for instances in (ONES, Slow()):
        with running(one_layer()) as runtime:
            losses.append(runtime.train_epoch(instances).loss)
    assert losses[0] == losses[1]
    assert Slow.asked <= 2 + len(ONES)  # the first and the last are compared between ranks


def test_optimizers_stay_the_same_where_a_runtime_goes_back(running):
    def build():
        graph, start = started(lambda one: one.x)
        graph.loss(square, graph.layer(nn.Linear(3, 3, dtype=torch.float64), start))
        return graph

    with running(build()) as runtime:
        runtime.train_epoch(ONES)
        before, state = dict(runtime.optimizers), copy.deepcopy(runtime.state_dict())
        runtime.train_epoch(ONES)
        runtime.load_state_dict(state)
        assert before
        assert all(runtime.optimizers[name] is one for name, one in before.items())


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


class Lazy:
    def __init__(self, x):
        self.x = x

    @cached_property
    def twice(self):
        return 2 * self.x


def test_what_an_instance_has_computed_since_makes_it_no_other():
    one, other = Lazy(torch.ones(2)), Lazy(torch.ones(2))
    assert digest_of(one) == digest_of(other) != ""
    assert one.twice.sum() == 4
    assert digest_of([one]) == digest_of([other]) != digest_of([Lazy(torch.zeros(2))])


def test_instances_that_hold_sets_are_not_compared():
    assert digest_of(({"a", "b"}, 1)) == digest_of([frozenset("ab")]) == ""
    assert digest_of([1, "a", torch.ones(2)]) != ""
