"""What evaluating does, what an epoch reports, and how instances are asked for."""

import copy
import json
import math
from dataclasses import asdict
from functools import cached_property

import pytest
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
    sgd,
    square,
    started,
    two_layers,
)
from mpi4py import MPI

import daso
from daso.flow import Epoch, Runtime
from daso.flow.epoch import digest_of


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


def test_a_flow_may_be_evaluated_before_it_is_trained(running):
    with running(one_layer()) as runtime:
        found = runtime.evaluate(ONES)
        assert (found.epoch, found.trained, runtime.epoch) == (0, False, 0)
        runtime.train_epoch(ONES)
        assert found.loss != runtime.evaluate(ONES).loss


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


def test_an_epoch_reports_counts_losses_and_times(running):
    net = Net()
    graph = one_layer(net.a)
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
    monkeypatch.setattr("daso.flow.epoch_runner.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("daso.flow.worker.MONITOR_SECONDS", 0.0)
    graph = one_layer()
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


def test_a_runtime_closes_at_the_end_of_with(running):
    with Runtime(one_layer(), sgd, topology=daso.Topology(MPI.COMM_SELF)) as runtime:
        runtime.train_epoch(ONES)
    runtime.close()


def test_instances_of_a_sequence_are_cached(running):
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


def test_random_order_is_that_of_the_seed(running):
    def weights_of(**keywords):
        """Return digests of the weights, which follow from the order of computations."""
        with running(two_layers(), max_active_keys=3, **keywords) as runtime:
            runtime.keep_log()
            runtime.train_epoch(ONES * 4)
            return runtime.logged().digests

    shuffled = weights_of(shuffle=True, seed=3)
    assert shuffled == weights_of(shuffle=True, seed=3)
    assert shuffled != weights_of(shuffle=True, seed=4)
    assert shuffled != weights_of(seed=3)


class Lazy:
    def __init__(self, x):
        self.x = x

    @cached_property
    def twice(self):
        return 2 * self.x


def test_cached_properties_do_not_change_an_instances_digest():
    one, other = Lazy(torch.ones(2)), Lazy(torch.ones(2))
    assert digest_of(one) == digest_of(other) != ""
    assert one.twice.sum() == 4
    assert digest_of([one]) == digest_of([other]) != digest_of([Lazy(torch.zeros(2))])


def test_instances_that_hold_sets_are_not_compared():
    assert digest_of(({"a", "b"}, 1)) == digest_of([frozenset("ab")]) == ""
    assert digest_of([1, "a", torch.ones(2)]) != ""
