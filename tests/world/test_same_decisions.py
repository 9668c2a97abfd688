"""One decision core: the trainer, simulated nodes and `predict` decide alike."""

import math
from dataclasses import replace

import pytest
import torch
from models import seeded
from torch import nn

import daso
from daso.plan.options import BITS, Settings
from daso.predict.cluster import Cluster, exchange_seconds, synchronous_seconds
from daso.predict.jobs import Job
from daso.predict.links import Link
from daso.predict.simulator import simulate
from daso.train.deltas.exchange import DeltaExchange
from daso.train.deltas.meter import ExchangeMeter
from daso.train.simulated.nodes import SimulatedNodes, Times

WIDTH, LAYERS, STEPS = 144, 4, 130
NUMEL = LAYERS * WIDTH * WIDTH


def wide():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss(model, rank, step):
    inputs = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(inputs).square().mean()


def state_share(state):
    return state.timed_numel / NUMEL if state.timed_wire else 0.0


def give(monkeypatch, exchange, own):
    """Let headers have given seconds of the exchange before."""
    make = DeltaExchange.__init__

    def made(self, *args):
        make(self, *args)
        self._meter.deltas = self

    def header(self, batch):
        state = self.deltas._state
        seconds, share = math.inf, state_share(state)
        if state.timed_wire:
            seconds = exchange * share * BITS[state.timed_wire] / BITS["int4"]
        return replace(
            self.header(batch),
            minus_step_seconds=-1.0,
            minus_exchange_seconds=-seconds,
            own_seconds=own * share,
        )

    monkeypatch.setattr(DeltaExchange, "__init__", made)
    monkeypatch.setattr(ExchangeMeter, "measured_header", header)


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize(
    ("batches", "own", "fragments"),
    [
        (0.3, 0, 1),
        (0.7, 0.25, 4),
        (1.5, 0, 1),
        (1.5, 0, 4),
        (3.2, 0.7, 1),
        (3.2, 0.7, 4),
        (9, 0, 4),
    ],
)
def test_equal_measurements_give_equal_decisions(topology, monkeypatch, batches, own, fragments):
    how = {
        "wire": "auto",
        "merge": "auto",
        "exchange": daso.Exchange(fragments=fragments),
        "gradients": daso.Gradients(),
    }
    link = Link(NUMEL * BITS["int4"] / 8 / batches)
    job = Job(NUMEL, 1.0, own_seconds=own / NUMEL, lr=1e-3, normalizes=True)
    cluster = Cluster(2, link)
    exchange = exchange_seconds(job, cluster, "int4")
    exposed = synchronous_seconds(job, cluster, "int4") - 1.0
    predicted = simulate(job, cluster, daso.Auto(), Settings(**how), steps=STEPS)

    times = Times(1.0, exchange / fragments, own / fragments, exposed_seconds=exposed)
    build, options = seeded(wide), {"policy": daso.Auto(), "settings": Settings(**how)}
    simulated = SimulatedNodes(build, adamw, 2, times=times, **options)
    give(monkeypatch, exchange, own)
    measure = DeltaExchange.measure
    monkeypatch.setattr(
        DeltaExchange, "measure", lambda *args: replace(measure(*args), exposed_seconds=exposed)
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
        decided = (1, 0, "int8")
    assert (predicted.skip, predicted.wait, predicted.wire) == decided
