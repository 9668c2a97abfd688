"""What measuring some instances tells, and that it changes nothing."""

import time

import torch
from flows import (
    ONES,
    Net,
    adam,
    assert_equal,
    copied,
    modes,
    normed,
    one_layer,
    rows_of,
    square,
    started,
)
from torch import nn


def test_measuring_changes_nothing(running):
    graph, net = normed()
    with running(graph, adam) as runtime:
        for _ in range(2):
            before, mode, random = copied(net), modes(net), torch.get_rng_state()
            measured = runtime.measure(ONES, 2)
            assert measured.instances == 2
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
    graph = one_layer(layer)
    with running(graph) as runtime:
        runtime.measure(ONES)
    assert torch.equal(layer.mean, torch.zeros(3, dtype=torch.float64))


def test_seconds_and_bytes_are_measured_for_each_node_and_pair_of_nodes(running):
    graph, _ = normed()
    with running(graph) as runtime:
        measured = runtime.measure(ONES)
    assert measured.instances == len(ONES)
    assert [taken > 1e-6 for taken in measured.seconds] == [True] * len(graph.nodes)
    traffic = {(source, target): nbytes for source, target, nbytes in measured.traffic}
    assert traffic[0, 1] == 3 * 72
    assert traffic[2, 3] == 2 * traffic[1, 2]
    pairs = [edge[:2] for edge in measured.crossing]
    assert pairs == [edge[:2] for edge in measured.traffic]
    assert all(taken > 0 for _, _, taken in measured.crossing)


def test_fewer_instances_are_measured_where_they_take_long(running, monkeypatch):
    monkeypatch.setattr("daso.flow.runtime.MEASURED_SECONDS", 1e-9)
    with running(normed()[0]) as runtime:
        assert runtime.measure(ONES).instances == 1


def test_layers_that_compute_messages_together_can_be_measured(running):
    graph, start = started(rows_of)
    graph.loss(square, graph.layer(Net(torch.float32).a, start, batch=4))
    with running(graph) as runtime:
        assert runtime.measure(range(2)).instances == 2


def test_routes_are_timed_apart_from_the_nodes_before_them(running):
    def slow(item):
        time.sleep(0.01)
        return item.state

    graph, start = started(rows_of)
    layer = graph.layer(Net(torch.float32).a, start)
    graph.loss(square, graph.update(slow, layer, name="slow"))
    with running(graph) as runtime:
        seconds = runtime.measure(range(3)).seconds
    of = {node.name: taken for node, taken in zip(graph.nodes, seconds, strict=True)}
    slept = 3 * 5 * 0.01  # messages of three instances
    assert of.pop("slow") >= slept
    assert sum(of.values()) < slept
