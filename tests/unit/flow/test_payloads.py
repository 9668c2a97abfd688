"""Tensors of every kind go through all nodes, and lie the same wherever they come from."""

from typing import Any

import pytest
import torch
from flows import ONES, Net, copied, numbers, square, started
from torch import nn

from daso.flow import Updates


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
def test_tensors_are_laid_out_alike_with_and_without_a_rank_between(running, build):
    """Strides and alignment change the order in which kernels add: placement would change bits."""
    See.seen = []
    graph, start = started(lambda one: torch.outer(one.x, one.x))
    build(graph, graph.layer(Net().a, start))
    with running(graph) as runtime:
        runtime.train_epoch(ONES[:1])
    assert set(See.seen) == {(True, 0)}


def test_instances_are_laid_out_alike_with_and_without_a_rank_between(running):
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


def test_messages_that_share_a_tensor_get_separate_gradients(running):
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
