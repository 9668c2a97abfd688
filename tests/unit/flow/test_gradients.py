"""A flow of every kind of node has the loss and the gradients of plain torch."""

from dataclasses import replace

import pytest
import torch
from flows import (
    Mix,
    One,
    Two,
    assert_like_plain,
    at_once,
    bend,
    cases_in,
    numbers,
    product,
    square,
)
from hypothesis import given, settings
from hypothesis import strategies as st

checked = settings(derandomize=True, max_examples=25, deadline=None)
CASES = {}  # by name: builders of flows
case = cases_in(CASES)


# --- computing -----------------------------------------------------------------------------------


@case()
def layers(graph, net, start):
    graph.loss(square, graph.layer(net.b, graph.layer(net.a, start)))


@case()
def a_layer_with_several_inputs_and_outputs(graph, net, start):
    two, mix = Two(net.a, net.b), Mix(net.c)
    graph.loss(square, graph.layer(mix, graph.layer(two, start, outputs=2)))


@case()
def a_function_is_given_the_item(graph, net, start):
    def change(item, x, y):
        assert item.state == ()
        assert item.payload[0] is x
        return x * y.tanh() * item.instance.n + x, y * y

    a, b = graph.layer(net.a, start), graph.layer(net.b, start)
    graph.loss(square, graph.function(change, a, b, outputs=2))


@case()
def a_function_returns_its_input_and_a_tensor_twice(graph, net, start):
    y = graph.layer(net.a, start)
    three = graph.function(lambda item, x: (x, x, x[:2]), y, outputs=3)
    graph.loss(lambda item, x, y, z: (x * y.tanh()).sum() + square(item, z), three)


@case()
def several_losses(graph, net, start):
    y = graph.layer(net.a, start)
    graph.loss(lambda item, x: (square(item, x), {"n": item.instance.n}), y)
    graph.loss(lambda item, x: x.tanh().sum().view(1, 1), graph.layer(net.b, y))


# --- ways ----------------------------------------------------------------------------------------

CHOICES = {"bool": lambda n: n > 2, "int": lambda n: n % 2, "never": lambda n: False}


@case(*CHOICES)
def a_cond_and_a_phi(choice, graph, net, start):
    choose = CHOICES[choice]
    fork = graph.cond(lambda item: choose(item.instance.n), graph.layer(net.a, start))
    ends = [graph.layer(layer, way) for layer, way in zip((net.b, net.c), fork, strict=True)]
    graph.loss(square, graph.phi(*ends))


@case()
def a_cond_of_several_ways(graph, net, start):
    fork = graph.cond(lambda item: item.instance.n, graph.layer(net.a, start), ways=4)
    ways = [graph.layer(net.b, fork[0]), fork[1], graph.layer(net.c, fork[2]), fork[3]]
    graph.loss(square, graph.phi(*ways))


def more_turns(item):
    return item.state[-1] < item.instance.n


@case()
def a_loop(graph, net, start):
    def body(port):
        return graph.function(bend, graph.layer(net.b, port))

    end = graph.loop(body, graph.layer(net.a, start), go_on=more_turns)
    graph.loss(square, graph.layer(net.c, end))


@case()
def a_loop_in_a_loop(graph, net, start):
    def inner(port):
        return graph.function(bend, graph.layer(net.b, port))

    def outer(port):
        more = graph.loop(inner, port, go_on=lambda item: item.state[-1] < item.state[-2])
        return graph.layer(net.c, more)

    graph.loss(square, graph.layer(net.a, graph.loop(outer, start, go_on=more_turns)))


@case()
def a_message_meets_itself_behind_nodes_that_pass_it_on(graph, net, start):
    y = graph.layer(net.a, start)
    around = graph.update(lambda item: (), graph.update(lambda item: (1,), y))
    graph.loss(square, graph.function(product, graph.phi(y), around))


# --- states --------------------------------------------------------------------------------------


@case()
def an_update(graph, net, start):
    changed = graph.update(lambda item: (item.instance.n, 7), graph.layer(net.a, start))
    scaled = graph.function(lambda item, x: x * item.state[0] + item.state[1], changed)
    graph.loss(square, graph.layer(net.b, scaled))


@case()
def a_flatmap_and_a_group(graph, net, start):
    def states(item):
        return [(state, 5) for state in reversed(range(item.instance.n + 1))]

    def weighed(item, rows):
        return rows * torch.arange(1, len(rows) + 1)[:, None]

    many = graph.flatmap(states, graph.layer(net.a, start))
    bent = graph.function(lambda item, x: torch.tanh(x * (1 + item.state[0])), many)
    group = graph.group(lambda item: (), bent, count=lambda item: item.instance.n + 1)
    graph.loss(square, graph.function(weighed, graph.layer(net.b, group)))


@case()
def an_ungroup(graph, net, start):
    def rows(item, x):
        scale = torch.arange(1, item.instance.n + 2)[:, None]
        return x * scale, (x * x * scale).sum(1)

    def states(item):
        return [(state,) for state in reversed(range(item.instance.n + 1))]

    each = graph.ungroup(states, graph.function(rows, graph.layer(net.a, start), outputs=2))
    scaled = graph.function(lambda item, x, y: x * y * (1 + item.state[0]), each)
    graph.loss(square, graph.layer(net.b, scaled))


@case()
def groups_in_a_loop_over_a_tree(graph, net, start):
    def leaves(one):
        return {(one.n, place): one.x * (place + 1) for place in range(2**one.n)}

    def parent(item):
        return item.state[0] - 1, item.state[1] // 2

    graph.nodes[0] = replace(graph.nodes[0], call=leaves)
    around = graph.phi(graph.layer(net.a, start))
    over, again = graph.cond(lambda item: item.state[0] > 0, around)
    pair = graph.group(parent, again, count=lambda item: 2)
    joined = graph.function(lambda item, two: torch.tanh(two[0] - 2 * two[1]), pair)
    graph.connect(graph.layer(net.b, joined), around)
    graph.loss(square, over)


@case()
def messages_along_the_edges_of_a_graph(graph, net, start):
    def vertices(one):
        return {(0, vertex): one.x * (vertex + 1) for vertex in range(one.n + 2)}

    def along(item):
        step, vertex = item.state
        return [(step, vertex, (vertex + more) % (item.instance.n + 2)) for more in (0, 1)]

    graph.nodes[0] = replace(graph.nodes[0], call=vertices)
    around = graph.phi(graph.layer(net.a, start))
    again, over = graph.cond(lambda item: item.state[0] == 2, around)
    sent = graph.layer(net.b, graph.flatmap(along, again))
    met = graph.group(lambda item: (item.state[0] + 1, item.state[2]), sent, count=lambda _: 2)
    graph.connect(graph.function(lambda item, two: two.prod(0).tanh(), met), around)
    graph.loss(square, over)


# --- copies and parts ----------------------------------------------------------------------------


@case()
def a_broadcast(graph, net, start):
    first, *others = graph.broadcast(graph.layer(net.a, start), 3)
    graph.loss(square, first)
    parts = [graph.layer(layer, p) for layer, p in zip((net.b, net.c), others, strict=True)]
    graph.loss(square, graph.function(product, *parts))


@case()
def a_port_used_by_several_nodes(graph, net, start):
    y = graph.layer(net.a, start)
    z = graph.layer(net.b, y)
    graph.loss(lambda item, y, z: (y * z).sum(), y, z)
    graph.loss(square, y)


@case("function", "layer", "loss", "concat", "broadcast")
def the_same_port_twice(kind, graph, net, start):
    def mix(item, x, z):
        return x * z.tanh()

    y, layer = graph.layer(net.a, start), Mix(net.b)
    if kind == "loss":
        graph.loss(lambda item, x, z: mix(item, x, z).sum(), y, y)
    elif kind == "layer":
        graph.loss(square, graph.layer(layer, y, y))
    elif kind == "function":
        graph.loss(square, graph.function(mix, y, y))
    else:
        ports = (y, y) if kind == "concat" else graph.broadcast(y, 2)
        graph.loss(square, graph.function(mix, graph.concat(*ports)))


@case()
def a_split_of_tensors(graph, net, start):
    three = graph.function(lambda _, x: (x, x.tanh(), x * x), graph.layer(net.a, start), outputs=3)
    left, right = graph.split(three, [1, 2])
    graph.loss(square, graph.layer(net.b, left))
    graph.loss(lambda item, x, y: (x * y).sum(), right)


@case(0, 1, -1)
def a_split_along_a_dimension(dim, graph, net, start):
    def tables(item, x):
        return torch.outer(x, x), torch.outer(x, x.tanh())

    two = graph.function(tables, graph.layer(net.a, start), outputs=2)
    left, right = graph.split(two, [1, 2], dim=dim)
    graph.loss(lambda item, x, y: (x * y).sum(), left)
    graph.loss(lambda item, x, y: (x * y * y).sum(), right)


@case()
def a_concat_of_tensors(graph, net, start):
    two = Two(net.a, net.b)
    three = graph.concat(graph.layer(net.c, start), graph.layer(two, start, outputs=2))
    graph.loss(lambda item, x, y, z: (x * y * z.tanh()).sum(), three)


@case(0, -1)
def a_concat_along_a_dimension(dim, graph, net, start):
    two = Two(net.a, net.b)
    left = graph.layer(two, start, outputs=2)
    right = graph.function(lambda item, x, y: (x[:2], y[:2]), left, outputs=2)
    graph.loss(lambda item, x, y: (x * y.tanh()).sum(), graph.concat(left, right, dim=dim))


@case()
def a_concat_of_tensors_of_different_lengths(graph, net, start):
    y = graph.layer(net.a, start)
    left = graph.function(lambda item, x: (x, x[:1].tanh()), y, outputs=2)
    right = graph.function(lambda item, x: (x[:2], x * x), y, outputs=2)
    graph.loss(lambda item, x, y: (x[:4] * y * y).sum() + x[4], graph.concat(left, right, dim=0))


@case("copy", "part", "state", "all")
def a_drop(kind, graph, net, start):
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


# --- the cases ------------------------------------------------------------------------------------


@at_once
@pytest.mark.parametrize("name", CASES)
def test_a_flow_has_the_loss_and_gradients_of_plain_torch(running, name, most):
    assert_like_plain(running, CASES[name], most=most)


@checked
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 4))
def test_gradients_are_the_same_however_many_instances_are_under_way(running, counts, most, batch):
    def build(graph, net, start):
        def body(port):
            return graph.function(bend, graph.layer(net.b, port, batch=batch))

        end = graph.loop(body, start, go_on=more_turns)
        graph.loss(square, graph.layer(net.a, end, batch=batch))

    ones = [One(numbers(seed, 1, 3), n) for seed, n in enumerate(counts)]
    assert_like_plain(running, build, ones, most)
