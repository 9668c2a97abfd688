"""Messages that a layer computes together, layers with hooks, and random numbers."""

import pytest
import torch
from flows import (
    ONES,
    Net,
    Shift,
    Two,
    adam,
    assert_all_near,
    copied,
    numbers,
    one_layer,
    rows_of,
    sgd,
    square,
    started,
)
from torch import nn

from daso.flow import Updates


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
def test_a_linear_layer_that_does_more_trains_as_in_plain_torch(running, kind, change):
    def built():
        torch.manual_seed(0)
        layer = kind(3, 3, dtype=torch.float64)
        change(layer)
        return layer

    layer, twin = built(), built()
    graph = one_layer(layer, lambda one: one.x.view(-1, 3))
    optimizer = sgd([p for p in twin.parameters() if p.requires_grad])
    with running(graph, max_active_keys=1) as runtime:
        runtime.train_epoch(ONES)
    for one in ONES:
        optimizer.zero_grad()
        square(None, twin(one.x.view(-1, 3))).backward()
        optimizer.step()
    assert_all_near(layer, twin)


def test_messages_of_a_layer_with_batch_1_are_computed_in_groups(running):
    """Forward of all instances; backward of one, which may be finished by it."""
    states = [(place,) for place in range(3)]
    graph = one_layer(Shift(), lambda one: dict.fromkeys(states, one.x))
    with running(graph, max_active_keys=2) as runtime:
        runtime.keep_log()
        runtime.train_epoch(ONES[:2])
        did = [one for one in runtime.logged().tasks if one.node == 1]
    forward, *backward = [{key[0] for key in one.keys} for one in did]
    assert not did[0].back
    assert len(did[0].keys) > len(states)
    assert forward == {0, 1}
    assert all(one.back for one in did[1:])
    assert all(len(instances) == 1 for instances in backward)
    assert sum(len(one.keys) for one in did[1:]) == 2 * len(states)
    assert len(backward) < 2 * len(states)


def test_batches_have_at_most_the_configured_size(running):
    rows = []
    net = Net()
    net.a.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    graph, start = started(lambda one: {(k,): one.x[None] for k in range(5)})
    graph.loss(square, graph.layer(net.a, start, batch=3))
    with running(graph, max_active_keys=1) as runtime:
        runtime.train_epoch(ONES)
    assert rows == [3, 2] * 3


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


def test_dropout_differs_between_states_of_an_instance(running):
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
    graph = one_layer(nn.Dropout())
    with running(graph) as runtime:
        before = torch.get_rng_state()
        runtime.train_epoch(ONES)
    assert torch.equal(torch.get_rng_state(), before)
