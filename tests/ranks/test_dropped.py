"""What users drop without close() is closed by the next one: communicators are few."""

import gc
import logging
import threading

import pytest
import torch
from torch import nn
from training import batch

import daso
from daso.comm.reclaim import COLLECT_FROM
from daso.comm.topology import MANY

pytestmark = pytest.mark.mpi
ROUNDS = 2 * COLLECT_FROM


def wrapped(topology):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, daso.DASO(optimizer, module=model, topology=topology, policy=daso.Fixed(3, 1))


def attached(topology):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = daso.attach(optimizer, module=model, topology=topology, policy=daso.Fixed(3, 1))
    return model, optimizer, handle


def server(topology):
    model = nn.Linear(4, 2)
    return model, daso.ParameterServer(model, lambda p: torch.optim.SGD(p, 0.1), topology=topology)


def by_priority(topology):
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = daso.Gradients(reducer="prioritized")
    return model, daso.DASO(optimizer, module=model, topology=topology, gradients=gradients)


def threads():
    """Threads of daso."""
    return sum(one.name.startswith("daso") for one in threading.enumerate())


@pytest.mark.parametrize("make", [wrapped, server, by_priority])
def test_threads_and_communicators_of_dropped_optimizers_are_given_back(topology, rank_info, make):
    if rank_info.nodes == 1 and make is by_priority:
        pytest.skip("gradients cross between nodes in portions")
    gc.collect()
    wrapped(topology)[1].close()  # and those of tests before
    before, counts = threads(), []
    for number in range(ROUNDS):
        model, optimizer = make(topology)
        counts.append(threads() - before)
        model(batch(number, rank_info.rank)).sum().backward()
        optimizer.step()
        del model, optimizer
    each, most = counts[0], max(counts)
    assert each > 0
    assert most <= each * (COLLECT_FROM + 2)
    last = wrapped(topology)[1]
    last.close()


def test_an_optimizer_that_one_rank_holds_stays_open_on_all(topology, rank_info):
    gc.collect()
    wrapped(topology)[1].close()  # and those of tests before
    before = threads()
    _, held = wrapped(topology)
    late = held if rank_info.rank == 0 else None
    del held
    with wrapped(topology)[1]:
        assert threads() == before + 2
    del late
    with wrapped(topology)[1]:
        assert threads() == before + 1  # the one that rank 0 held is closed


def test_optimizers_that_keep_themselves_are_told_at_the_tenth(topology, rank_info, caplog):
    """Hooks of daso.attach keep an optimizer, its model and its threads."""
    wrapped(topology)[1].close()
    with caplog.at_level(logging.WARNING, logger="daso"):
        held = [attached(topology) for _ in range(10)]
    said = [one for one in caplog.messages if "optimizers are open" in one]
    assert len(said) == (rank_info.rank == 0)
    for _, optimizer, handle in held:
        optimizer.zero_grad()
        handle.close()


@pytest.mark.nodes((2,))
def test_gradients_outlive_a_dropped_optimizer(topology, rank_info):
    """They lie in memory of the node, which is given back."""
    model = nn.Linear(500, 500)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = daso.DASO(inner, module=model, topology=topology)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 500), step + 1.0 + rank_info.rank)).sum().backward()
        optimizer.step()
    del optimizer
    gc.collect()
    expected = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        wrapped(topology)[1].close()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, grad)


def test_dropped_in_different_states_they_are_not_closed_together(topology, rank_info):
    """A rank took a step more, as after an error that all caught: its exchange is under way."""
    model, optimizer = wrapped(topology)
    for step in range(3 if rank_info.rank == 0 else 2):
        if rank_info.rank == 0 and step >= 2 and rank_info.local_size > 1:
            break  # inside a node a step is in common
        model(batch(step, rank_info.rank)).sum().backward()
        optimizer.step()
    del optimizer, model
    with wrapped(topology)[1]:
        pass


def test_a_flow_that_was_dropped_gives_its_communicators_back(topology):
    def runtime():
        graph = daso.flow.Graph()
        row = graph.source(lambda _: torch.zeros(1, 2))
        graph.loss(lambda _, y: y.square().mean(), graph.layer(nn.Linear(2, 2), row))
        return daso.flow.Runtime(graph, lambda p: torch.optim.SGD(p, 0.1), topology=topology)

    comm = next(iter(runtime()._runner._packets.values()))._comm
    made = runtime()
    assert not comm
    made.close()


def test_init_is_one_topology_and_many_are_told(topology, rank_info, caplog, monkeypatch):
    from daso.comm import topology as topologies

    monkeypatch.setattr(topologies, "_default", {})
    assert daso.init(ranks_per_node=1) is daso.init(ranks_per_node=1)
    made = [daso.init(ranks_per_node=1)]
    with caplog.at_level(logging.WARNING, logger="daso"):
        made += [daso.Topology(ranks_per_node=1) for _ in range(MANY)]
    said = [one for one in caplog.messages if "topologies are open" in one]
    assert len(said) == (rank_info.rank == 0)
    for one in made:
        one.free()
    assert daso.init(ranks_per_node=1) is not made[0]
    daso.init(ranks_per_node=1).free()
