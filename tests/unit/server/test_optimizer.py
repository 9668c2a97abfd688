"""One owner's arithmetic, held against steps written out by hand; nothing communicates."""

import pytest
import torch
from torch import nn

from daso.plan.options import Exchange
from daso.server.partition import Partition, layers_of
from daso.server.plan import Plan
from daso.server.shard import Contribution, ParameterShard
from daso.train.gradients.partial_step import values_of

RANKS, LR = 4, 0.5
PLAN = {
    "mode": "sharded",
    "staleness": None,
    "push_every": 1,
    "scale_by_staleness": False,
    "optimizer_state": "per_rank",
    "wire": None,
    "exchange": Exchange(),
}


def sgd(params):
    return torch.optim.SGD(params, lr=LR)


def momentum(params):
    return torch.optim.SGD(params, lr=LR, momentum=0.9)


def serving(rank=1, make=sgd, **keywords):
    torch.manual_seed(3)
    model = nn.Linear(8 << 10, 8)  # of which each rank owns two rows
    plan = Plan(**{**PLAN, **keywords})
    _, named, layers = layers_of(model)
    shares = Partition(named, layers, RANKS)
    server = ParameterShard(rank, shares, plan, make)
    server.logs = True
    return model, server


def contribution(server, model, source, step, *, read=0, grads=None, clip=1.0):
    if grads is None:
        generator = torch.Generator().manual_seed(100 * step + source)
        grads = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
    one = Contribution(
        source=source,
        step=step,
        layers=(0,),
        has=tuple(grad is not None for grad in grads),
        read=(read,),
        values=values_of(server.inner.param_groups),
        row=server.partition.pack(server.rank, [0], grads),
        clip=clip,
    )
    return one, grads


def rows(model, tensors, rank=1):
    return [tensor[2 * rank : 2 * rank + 2] for tensor in tensors]


def test_an_owner_waits_for_all_and_takes_the_mean():
    model, server = serving(staleness=0)
    expected = rows(model, [p.detach().clone() for p in model.parameters()])
    given = []
    for source in (2, 0, 3):
        one, grads = contribution(server, model, source, 0)
        given.append((source, grads))
        assert server.contribute(one) == []
    one, grads = contribution(server, model, 1, 0)
    given.append((1, grads))
    assert server.contribute(one) == [0]
    for at, before in enumerate(expected):
        total = torch.zeros_like(before)
        for _, grads in sorted(given, key=lambda pair: pair[0]):
            total = total + rows(model, grads)[at]
        assert torch.equal(server.stand_ins[at], before - LR * (total / RANKS))
    assert server.row_state(0, 2) == (1, 1.0, 0, 1.0)


@pytest.mark.parametrize("scale_by_staleness", [False, True])
def test_without_a_bound_each_gradient_is_a_share_of_a_step(scale_by_staleness):
    model, server = serving(scale_by_staleness=scale_by_staleness)
    expected = rows(model, [p.detach().clone() for p in model.parameters()])
    for number, (source, step, read) in enumerate([(2, 0, 0), (2, 1, 1), (0, 0, 0), (3, 0, 0)]):
        one, grads = contribution(server, model, source, step, read=read)
        assert server.contribute(one) == [0]
        rate = LR / RANKS / (1 + (number - read) / RANKS if scale_by_staleness else 1)
        expected = [x - rate * g for x, g in zip(expected, rows(model, grads), strict=True)]
        assert all(
            torch.allclose(a, b, rtol=0, atol=1e-7)
            for a, b in zip(server.stand_ins, expected, strict=True)
        )
    assert server.row_state(0, 2) == (4, 0.0, 1, 2.0)  # rank 1 has not brought any
    assert [one.of for one in server.log] == [((2, 0),), ((2, 1),), ((0, 0),), ((3, 0),)]
    server.finish(1)
    assert server.clock(0) == 1.0


@pytest.mark.parametrize("optimizer_state", ["per_rank", "shared"])
def test_each_ranks_gradients_have_a_momentum_and_rows_look_ahead(optimizer_state):
    """DANA-Slim written out: v[r] = 0.9 v[r] + g; x -= lr / P * (g + 0.9 v[r])."""
    model, server = serving(make=momentum, optimizer_state=optimizer_state)
    expected = rows(model, [p.detach().clone() for p in model.parameters()])
    buffers = {}
    for source, step in [(2, 0), (0, 0), (2, 1), (2, 2), (3, 0), (0, 1), (1, 0)]:
        one, grads = contribution(server, model, source, step)
        server.contribute(one)
        for at, grad in enumerate(rows(model, grads)):
            key = (at, source if optimizer_state == "per_rank" else "all")
            buffers[key] = 0.9 * buffers[key] + grad if key in buffers else grad.clone()
            move = grad + 0.9 * buffers[key] if optimizer_state == "per_rank" else buffers[key]
            expected[at] = expected[at] - LR / RANKS * move
    for stand_in, wanted in zip(server.stand_ins, expected, strict=True):
        torch.testing.assert_close(stand_in.detach(), wanted)


@pytest.mark.parametrize("clip_value", [None, 0.3])
def test_each_ranks_gradients_are_scaled_then_limited(clip_value):
    """In a step of momentum written out: g = clamp(factor * g), then as above."""
    model, server = serving(make=momentum, clip_value=clip_value, clip_norm=1.0)
    expected = rows(model, [p.detach().clone() for p in model.parameters()])
    buffers = {}
    for source, step, factor in [(2, 0, 1.0), (0, 0, 1.0), (2, 1, 0.5), (2, 2, 0.25), (0, 1, 0.7)]:
        one, grads = contribution(server, model, source, step, clip=factor)
        server.contribute(one)
        for at, grad in enumerate(rows(model, grads)):
            clipped = (grad * factor).clamp(-(clip_value or 1e9), clip_value or 1e9)
            key = (at, source)
            buffers[key] = 0.9 * buffers[key] + clipped if key in buffers else clipped.clone()
            expected[at] = expected[at] - LR / RANKS * (clipped + 0.9 * buffers[key])
    for stand_in, wanted in zip(server.stand_ins, expected, strict=True):
        torch.testing.assert_close(stand_in.detach(), wanted)
    assert [one.clip for one in server.log] == [1.0, 1.0, 0.5, 0.25, 0.7]


def test_where_all_gradients_are_taken_in_together_there_is_one_state():
    _, server = serving(make=momentum, staleness=0)
    assert [*server.optimizers] == [server.rank]
    assert server.inner.param_groups[0]["nesterov"] is False


def test_a_gradient_that_is_not_there_moves_nothing():
    model, server = serving()
    before = [p.detach().clone() for p in server.stand_ins]
    one, _ = contribution(server, model, 0, 0, grads=[None, None])
    assert server.contribute(one) == [0]
    assert all(torch.equal(a, b) for a, b in zip(server.stand_ins, before, strict=True))
    assert server.clock(0) == 0.0
    assert server.ahead(0, 0) == 1.0
