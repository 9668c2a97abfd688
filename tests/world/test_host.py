"""Gradients added on the host by a thread of its own: the bits are those of any other way."""

import math
import threading
import time
from itertools import cycle

import pytest
import torch
from compare import compare
from models import Odd, adamw, batch_loss, mlp, seeded, sgd
from pairwise import pairwise
from torch import nn
from world.test_priority import chain, plain, train, wrapped
from worlds import INSIDE

import daso
from daso.comm.emulation import CopyLink, pretend_device
from daso.errors import ConfigError, ExchangeError, StallError
from daso.plan.cost_model import flow_shop_seconds
from daso.train.gradients.host_reducer import HostReducer

UPDATES = ["model", "layerwise"]


@pytest.fixture(params=["cpu", "device"])
def machine(request):
    """Let ranks compute on the CPU, or as if on a device of their own."""
    if request.param == "cpu":
        yield
    else:
        with pretend_device(CopyLink(1e8, 1e-4)):
            yield


@pairwise(
    case=[(mlp, adamw), (Odd, sgd)],
    nbytes=[1, 100, 1 << 20, "search"],
    update=["model", "layerwise"],
)
def test_no_chunk_changes_a_bit(topology, machine, case, nbytes, update):
    make, inner = case
    same, before = train(topology, make, inner)
    found, report = train(topology, make, inner, reducer="host", bucket_bytes=nbytes, step=update)
    assert found == same
    assert report["batches"] == 4
    assert report["exchanges"] == before["exchanges"]


@pytest.mark.parametrize("order", ["bucketed", "prioritized"])
def test_other_orders_compute_on_devices_too(topology, order):
    same, _ = train(topology, Odd, sgd)
    with pretend_device(CopyLink(1e8, 1e-4)):
        assert train(topology, Odd, sgd, reducer=order, bucket_bytes=300)[0] == same


@pytest.mark.parametrize("policy", [daso.Fixed(1, 0), daso.Fixed(2, 1)], ids=str)
def test_every_step_equals_one_process(topology, machine, policy):
    gradients = daso.Gradients(reducer="host", bucket_bytes=100)
    compare(topology, Odd, sgd, policy, steps=6, gradients=gradients, wire="bf16")


@pytest.mark.parametrize("update", UPDATES)
def test_phases_change_between_synchronous_and_local(topology, machine, update):
    policy = daso.Plateau(epochs=5, warmup=1, cooldown=1, patience=1)
    gradients = daso.Gradients(reducer="host", step=update, bucket_bytes=100)
    compare(topology, Odd, sgd, policy, steps=3, epochs=5, gradients=gradients, wire="bf16")


@pytest.mark.parametrize("update", UPDATES)
def test_chunks_cut_anew_at_every_step_change_no_bit(topology, machine, update):
    sizes = cycle([1, 300, 64, 1 << 20, 4096])

    def cut(model, optimizer, rank, step):
        if optimizer._session.runner.parts is not None:
            optimizer._session.runner.parts.gradients.cut(next(sizes))
        plain(model, optimizer, rank, step)

    same, _ = train(topology, Odd, sgd, steps=7)
    how = {"reducer": "host", "bucket_bytes": 9, "step": update}
    assert train(topology, Odd, sgd, steps=7, each=cut, **how)[0] == same


# --- when things happen --------------------------------------------------------------------------


class Slow(nn.Module):
    """A layer whose backward takes a while, and no core."""

    seconds = 0.02

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        y = self.linear(x)
        y.register_hook(self.pause)
        return y

    def pause(self, _):
        time.sleep(self.seconds)


def slow_chain(count=4):
    torch.manual_seed(0)
    return nn.Sequential(*(Slow() for _ in range(count)), nn.Linear(6, 3))


@pytest.fixture
def told(monkeypatch):
    """Return a list of when chunks came back, for each round."""
    rounds = []
    carry = HostReducer._start_reducing

    def carried(self, portions, *, world):
        self.log = Log()
        rounds.append(self.log)
        return carry(self, portions, world=world)

    monkeypatch.setattr(HostReducer, "_start_reducing", carried)
    return rounds


class Log(list):
    """Notes with the time of each."""

    def append(self, note):
        super().append((*note, time.perf_counter()))


@pytest.mark.real_mpi
def test_chunks_come_back_while_backward_goes_on(topology, machine, told):
    model, rank = slow_chain(), topology.rank
    with wrapped(topology, model, sgd, reducer="host", bucket_bytes=1) as optimizer:
        for step in range(3):
            optimizer.zero_grad()
            loss = batch_loss(model, rank, step)
            loss.backward()
            ended = time.perf_counter()
            optimizer.step()
    before = [at for what, _, at in told[-1] if what == "delivered" and at < ended - Slow.seconds]
    assert before, "the first layers' backward takes twice as long"


@pytest.mark.real_mpi
def test_no_parameter_changes_before_the_last_chunk_is_back(topology, machine, told):
    """One update for the whole model: until all sums are there, weights are the old ones."""
    model, rank = slow_chain(), topology.rank
    with wrapped(topology, model, sgd, reducer="host", bucket_bytes=1) as optimizer:
        plain(model, optimizer, rank, 0)
        params, seen = list(model.parameters()), []
        versions = [p._version for p in params]
        for param in params:
            param.register_post_accumulate_grad_hook(
                lambda _: seen.append([p._version for p in params] == versions)
            )
        optimizer.zero_grad()
        batch_loss(model, rank, 1).backward()
        assert seen == [True] * len(params)
        assert [p._version for p in params] == versions
        if topology.world_size > 1:
            back = [place for what, place, _ in told[-1] if what == "delivered"]
            assert sorted(back) == list(range(len(back)))
            assert len(back) == len(params)
        optimizer.step()
        assert all(p._version > old for p, old in zip(params, versions, strict=True))


@pytest.mark.nodes((2,), (2, 2))
def test_a_sum_in_the_node_does_not_wait_for_an_exchange_between_nodes(topology):
    """The exchange's thread may be busy for many batches; gradients are averaged meanwhile."""
    model, rank = seeded(mlp)(), topology.rank
    gate = threading.Event()
    policy = daso.Fixed(8, 8)
    optimizer = wrapped(topology, model, sgd, policy, reducer="host")
    plain(model, optimizer, rank, 0)
    engine = optimizer._session.runner.parts.channels.engine

    def busy():
        yield gate.is_set

    handle = engine.submit(busy())
    for step in range(3):
        plain(model, optimizer, rank, step)
    assert not handle.done()
    gate.set()
    optimizer.synchronize()
    optimizer.close()


@pytest.mark.real_mpi
def test_an_error_in_the_thread_that_adds_is_told_at_the_next_step(topology, monkeypatch):
    model, rank = seeded(chain)(), topology.rank
    optimizer = wrapped(topology, model, sgd, reducer="host")
    plain(model, optimizer, rank, 0)

    def broken(*_, **__):
        raise RuntimeError("no memory")

    monkeypatch.setattr(HostReducer, "_advance", broken)
    with pytest.raises(ExchangeError, match="an exchange failed: no memory"):
        plain(model, optimizer, rank, 1)
    optimizer._session.runner.parts.abandon()
    optimizer.close()


@pytest.mark.nodes(*INSIDE)
def test_a_rank_that_stays_away_inside_a_node_is_named(topology):
    rank_info = topology.rank_info
    model = seeded(mlp)()
    exchange = daso.Exchange(timeout_seconds=3.0)
    gradients = daso.Gradients(reducer="host")
    optimizer = daso.DASO(
        sgd(model), module=model, topology=topology, exchange=exchange, gradients=gradients
    )
    plain(model, optimizer, rank_info.rank, 0)
    if rank_info.rank == 0:
        with pytest.raises(StallError, match=r"world rank 1.* did not"):
            plain(model, optimizer, rank_info.rank, 1)
    optimizer._session.runner.parts.abandon()  # close() is collective, and rank 0 is out of step


# --- bad input -----------------------------------------------------------------------------------


def test_chunks_of_a_step_need_a_thread_of_their_own():
    with pytest.raises(ConfigError, match=r"reducer='prioritized' or 'host', not 'bucketed'"):
        daso.Gradients(step="layerwise")


# --- what it takes -------------------------------------------------------------------------------


def test_copies_sums_and_backward_overlap(topology):
    """They take longer than three machines one after another must, and less than one at a time."""
    link = CopyLink(math.inf, latency_seconds=5e-3)
    with pretend_device(link):
        model, rank = slow_chain(6), topology.rank
        with wrapped(topology, model, sgd, reducer="host", bucket_bytes=1) as optimizer:
            taken = []
            for step in range(6):
                optimizer.zero_grad()
                loss = batch_loss(model, rank, step)
                topology.world_comm.Barrier()
                start = time.perf_counter()
                loss.backward()
                taken.append(time.perf_counter() - start)
    copy = link.seconds(1)
    layers = [0.0] + [Slow.seconds] * 6
    chunks = [(seconds, copy, 0.0, copy) for each in layers for seconds in (each, 0.0)]
    assert flow_shop_seconds(chunks) <= min(taken[1:]) < 0.9 * sum(map(sum, chunks))
