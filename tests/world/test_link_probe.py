"""Rates and costs of links between nodes: which message was timed, and what all ranks agree on."""

from collections import defaultdict
from threading import get_ident
from types import SimpleNamespace

import pytest

from daso.comm import link_probe
from daso.comm.link_probe import PROBE_BYTES, ROUNDS, TURNS, link_costs, link_rates
from daso.comm.mpi import load
from daso.plan.cost_model import fitted_costs, slots

pytestmark = pytest.mark.nodes((2, 1), (1, 1), (1, 1, 1))


def result_of(work):
    """Carry out work of an engine in this thread."""
    while True:
        try:
            requests = next(work)
        except StopIteration as ended:
            return ended.value
        for request in requests:
            request.Wait()


def seconds_between(sender, receiver):
    """A link of its own for each pair and direction."""
    return 1e-3 * (1 + 10 * sender + receiver)


def test_rates_are_those_of_messages_from_a_node_to_another(topology, monkeypatch):
    rounds_of = defaultdict(int)  # of each thread: ranks may share a process

    def timed(comm, slot, nbytes, count):
        yield []
        assert (nbytes, count) == (PROBE_BYTES, 1)
        rank = comm.Get_rank()
        if slot == slots(comm.Get_size())[0]:
            rounds_of[get_ident()] += 1
        return rounds_of[get_ident()] * seconds_between(slot.index(rank), rank)

    monkeypatch.setattr(link_probe, "_seconds_in_slot", timed)
    lane, world, rank_info = topology.lane_comm, topology.world_comm, topology.rank_info
    rounds = result_of(link_rates(lane, world, rank_info.node, rank_info.nodes))
    assert len(rounds) == ROUNDS
    for number, rates in enumerate(rounds, start=2):  # the first opens connections
        for sender in range(rank_info.nodes):
            for receiver in range(rank_info.nodes):
                if sender != receiver:
                    expected = PROBE_BYTES / seconds_between(sender, receiver) / number
                    assert rates[sender][receiver] == pytest.approx(expected)
    assert topology.equal_on_all_ranks(rounds)


def test_costs_are_those_of_the_slowest_link(topology, monkeypatch):
    def timed(comm, slot, nbytes):
        yield []
        return (1 + comm.Get_rank()) * (1e-4 + 1e-9 * nbytes)

    monkeypatch.setattr(link_probe, "_seconds_in_slot", timed)
    costs = result_of(link_costs(topology.lane_comm, topology.world_comm))
    slowest = [topology.nodes * (1e-4 + 1e-9 * nbytes) for nbytes in (1, PROBE_BYTES)]
    assert costs == fitted_costs(*slowest, PROBE_BYTES)
    assert topology.equal_on_all_ranks(costs)


def test_one_slow_message_of_several_does_not_count(topology, monkeypatch):
    if topology.lane_comm == load().COMM_NULL:
        return
    late = [1.0] * TURNS
    late[1] = 9.0
    moments = [moment for turn in late for moment in (0.0, turn)]
    ticks = defaultdict(lambda: iter(moments))  # of each thread: ranks may share a process
    clock = SimpleNamespace(perf_counter=lambda: next(ticks[get_ident()]))
    monkeypatch.setattr(link_probe, "time", clock)
    ranks = topology.lane_comm.Get_size()
    slot = [(rank + 1) % ranks for rank in range(ranks)]
    assert result_of(link_probe._seconds_in_slot(topology.lane_comm, slot, 1)) == 1.0
