"""Where all ranks meet outside of steps, one that never comes is named within the stall limit."""

import pytest
import torch
from torch import nn

import daso
from daso.checkpoint.state import Checkpoints
from daso.cli import doctor
from daso.comm import control
from daso.comm.control import RENDEZVOUS
from daso.comm.health import liveness
from daso.errors import ExchangeError, StallError
from daso.plan.options import Exchange

# Threads alone: of real ranks the topology would be of no use to the tests behind these.
pytestmark = pytest.mark.nodes((1, 1))
LIMIT = 0.5
SHORT = Exchange(timeout_seconds=LIMIT)


def stores(path, topology):
    return Checkpoints(path, topology, timeout_seconds=LIMIT)


def wrap(topology, model):
    return daso.DASO(torch.optim.SGD(model.parameters(), 0.1), topology=topology, exchange=SHORT)


def serve(topology, model):
    make = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731 - passed on
    return daso.ParameterServer(model, make, topology=topology, exchange=SHORT)


def nothing(*_):
    return lambda: None


# What all ranks do first, giving what one of them then does alone.
MEET = {
    "wrap an optimizer": lambda top, model, _: lambda: wrap(top, model),
    "close an optimizer": lambda top, model, _: wrap(top, model).close,
    "make a daso.ParameterServer": lambda top, model, _: lambda: serve(top, model),
    "close a daso.ParameterServer": lambda top, model, _: serve(top, model).close,
    "save a checkpoint": lambda top, _, path: lambda: stores(path, top).save(1, {}),
    "load a checkpoint": lambda top, _, path: stores(path, top).load,
    "free a daso.Topology": lambda top, *_: type(top).free.__get__(top),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(control, "STALL_SECONDS", LIMIT)


@pytest.mark.parametrize("what", MEET)
def test_who_never_comes_is_named(topology, rank_info, shared_folder, what):
    act = MEET[what](topology, nn.Linear(3, 2), shared_folder)
    topology.free = nothing()  # a program ends there
    if rank_info.rank == 0:
        text = f"all ranks must {what} within {LIMIT:g} s: no answer from world rank 1"
        with pytest.raises(StallError, match=text):
            act()


def test_ranks_that_come_to_different_places_are_told_where_the_others_are(topology, rank_info):
    mine, other = ("save a checkpoint", "wrap an optimizer")[:: 1 - 2 * rank_info.rank]
    with pytest.raises(ExchangeError, match=f"about to {mine}, and rank . to {other}"):
        topology.rendezvous(mine, 5.0)


def test_all_are_in_the_table():
    assert set(MEET) <= set(RENDEZVOUS)


def test_a_problem_that_any_rank_has_is_told_on_all(topology, rank_info):
    seen = ["no mpirun", *(["the GPU is full"] if rank_info.rank == 1 else [])]
    host = topology.liveness.hosts[1]
    told = doctor._gather_problems(topology, seen)
    assert told == ["no mpirun", f"rank 1 on {host}: the GPU is full"]
