"""Replays from logs, and training that goes on from a saved state."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from flows import (
    ONES,
    Net,
    adam,
    assert_equal,
    copied,
    normed,
    one_layer,
    refused,
    square,
    started,
    two_layers,
)
from torch import nn

from daso.errors import CheckpointError, ConfigError
from daso.flow import Updates, replay


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
    with refused("never gets its inputs", kind=ConfigError):
        replay(logs, before, adam, [ones[0][:2]])


def test_a_replay_of_some_ranks_is_refused(running):
    before, _, logs, ones = logged(running, epochs=1)
    with refused("rank order", kind=ConfigError):
        replay([[replace(logs[0][0], rank=1)]], before, adam, ones)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("weights", ["current", "stashed"])
@pytest.mark.parametrize("unit", ["instance", "message"])
def test_training_resumes_from_a_saved_state(running, unit, weights):
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


def test_a_runtime_may_load_an_earlier_state(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        runtime.train_epoch(ONES)
        state = saved(runtime.state_dict())
        runtime.train_epoch(ONES)
        after = copied(net)
        runtime.load_state_dict(state)
        runtime.train_epoch(ONES)
    assert_equal(copied(net), after)


def test_training_resumes_from_a_state_saved_before_the_first_epoch(running):
    graph = one_layer()
    with running(graph) as runtime:
        runtime.load_state_dict(saved(runtime.state_dict()))
        runtime.train_epoch(ONES)


def test_a_state_saved_before_the_first_epoch_restores_the_start(running):
    net = Net()
    graph = one_layer(net.a)
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
    graph = one_layer(net.a)
    with running(graph) as runtime:
        runtime.train_epoch(ONES)
        net.a.bias.requires_grad_(not trains)
        word = "frozen" if trains else "unfrozen"
        with pytest.raises(ConfigError, match=f"bias of layer .* was {word};"):
            runtime.train_epoch(ONES)
        net.a.bias.requires_grad_(trains)
        runtime.train_epoch(ONES)


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


def test_loading_a_state_keeps_the_optimizer_objects(running):
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
