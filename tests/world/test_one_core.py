"""One decision core: the trainer, simulated nodes and `predict` decide alike."""

import math
from dataclasses import replace

import pytest
import torch
from models import seeded
from torch import nn

import daso
from daso.plan.options import BITS, Settings
from daso.predict.cluster import Cluster, Job, exchange_seconds, synchronous_seconds
from daso.predict.network import Link
from daso.predict.simulator import simulate
from daso.train.deltas.exchange import Exchanges
from daso.train.simulated.nodes import SimulatedNodes, Times

WIDTH, LAYERS, STEPS = 192, 4, 90
NUMEL = LAYERS * WIDTH * WIDTH


def wide():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss(model, rank, step):
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs).square().mean()


def given(exchange):
    """Return a header of given seconds of the exchange before."""

    def header(self, batch):
        state, seconds = self._state, math.inf
        if state.timed_wire:
            share = state.timed_numel / NUMEL * BITS[state.timed_wire] / BITS["int4"]
            seconds = exchange * share
        return replace(
            self._header(batch),
            minus_step_seconds=-1.0,
            minus_exchange_seconds=-seconds,
        )

    return header


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize("batches", [0.3, 0.7, 1.5, 3.2, 9.0])
def test_equal_measurements_give_equal_decisions(topology, monkeypatch, batches, fragments):
    how = {
        "wire": "auto",
        "merge": "auto",
        "exchange": daso.Exchange(fragments=fragments),
        "gradients": daso.Gradients(),
    }
    link = Link(NUMEL * BITS["int4"] / 8 / batches)
    job, cluster = Job(NUMEL, 1.0, lr=1e-3, normalizes=True), Cluster(2, link)
    exchange = exchange_seconds(job, cluster, "int4")
    exposed = synchronous_seconds(job, cluster, "int4") - 1.0
    predicted = simulate(job, cluster, daso.Auto(), Settings(**how), steps=STEPS)

    times = Times(1.0, exchange / fragments, exposed_seconds=exposed)
    build, options = seeded(wide), {"policy": daso.Auto(), "settings": Settings(**how)}
    simulated = SimulatedNodes(build, adamw, 2, times=times, **options)
    monkeypatch.setattr(Exchanges, "_measured_header", given(exchange))
    measure = Exchanges.measure
    monkeypatch.setattr(
        Exchanges, "measure", lambda *args: replace(measure(*args), exposed_seconds=exposed)
    )
    model, rank = build(), topology.rank
    with daso.DASO(adamw(model), module=model, topology=topology, **how) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            simulated.step([lambda m, r=r, s=step: loss(m, r, s) for r in range(2)])
        report = optimizer.report()
        trained = optimizer._session.schedule
    state = simulated.state
    assert (trained.skip, trained.wait, trained.hidden) == (state.skip, state.wait, state.hidden)
    assert report["wire"] == simulated._exchanged.wire
    decided = (state.skip, state.wait, report["wire"])
    if state.hidden:
        decided = (1, 0, "int4")
    assert (predicted.skip, predicted.wait, predicted.wire) == decided
