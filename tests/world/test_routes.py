"""Plans that follow measured links: all ranks change to another after the same exchange."""

import copy

import pytest
import torch
from models import batch_loss, bits, mlp, seeded, sgd

import daso
from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan
from daso.plan.cost_model import LinkCosts, choose_plan

pytestmark = [pytest.mark.mpi, pytest.mark.nodes((1, 1, 1), (1, 1, 1, 1)), pytest.mark.real_mpi]


def wrapped(topology, model, fragments=1, **options):
    exchange = daso.Exchange(algorithm="planned", chunk_bytes=512, fragments=fragments)
    return daso.DASO(*(sgd(model),), module=model, topology=topology, exchange=exchange, **options)


def steps(topology, optimizer, model, numbers):
    for step in numbers:
        optimizer.zero_grad()
        batch_loss(model, topology.rank, step).backward()
        optimizer.step()


def ring_of(nodes):
    return AllReducePlan((Level(nodes, "ring"),), tuple(reversed(range(nodes))))


def routes(topology, monkeypatch, kind="ring"):
    """Let links tell of a plan, and of direct exchanges when they are measured again."""
    nodes = topology.nodes
    first = {
        "ring": ring_of(nodes),
        "shares": AllReducePlan((Level(nodes),), shares=(0, *range(1, nodes))),
    }[kind]
    chosen = iter([first, direct_plan(nodes), direct_plan(nodes), first])
    monkeypatch.setattr("daso.train.channels.plan_routes", lambda rates: next(chosen))
    return first


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("wire", "kind"), [("fp32", "ring"), ("int8", "ring"), ("int8", "shares")])
def test_all_ranks_change_after_the_same_exchange(topology, wire, kind, fragments, monkeypatch):
    first = routes(topology, monkeypatch, kind)
    asked = iter([False, False, True] + [False] * 100)
    monkeypatch.setattr("daso.train.deltas.exchange.has_changed", lambda _: next(asked))
    model = seeded(mlp)()
    with wrapped(topology, model, fragments, policy=daso.Fixed(2, 1), wire=wire) as optimizer:
        assert optimizer.report()["allreduce"] == first.name
        steps(topology, optimizer, model, range(16))
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))
        report = optimizer.report()
        assert report["allreduce"] == direct_plan(topology.nodes).name
        links = [event for event in report["events"] if event["kind"] == "links"]
        assert [event["plan"] for event in links] == [report["allreduce"]]
        assert topology.equal_on_all_ranks([event["sent"] for event in links])


@pytest.mark.parametrize("kind", ["ring", "shares"])
def test_a_run_goes_on_by_the_plan_it_had(topology, kind, monkeypatch):
    """To the same bits, whatever links would tell now."""
    monkeypatch.setattr("daso.train.deltas.exchange.has_changed", lambda _: False)
    ended = []
    for cut in (None, 7):
        model = seeded(mlp)()
        routes(topology, monkeypatch, kind)
        optimizer = wrapped(topology, model, policy=daso.Fixed(2, 1), wire="int8")
        plan = optimizer.report()["allreduce"]
        steps(topology, optimizer, model, range(cut or 12))
        if cut is not None:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.close()
            model = seeded(mlp)()
            optimizer = wrapped(topology, model, policy=daso.Fixed(2, 1), wire="int8")
            assert optimizer.report()["allreduce"] != plan
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            assert optimizer.report()["allreduce"] == plan
            steps(topology, optimizer, model, range(cut, 12))
        optimizer.synchronize()
        ended.append(bits(model))
        optimizer.close()
    assert ended[0] == ended[1]


def test_what_messages_cost_is_measured_where_plans_depend_on_it(topology, monkeypatch):
    """As among more than 16 nodes: all ranks measure, choose alike, and stay the same bits."""
    monkeypatch.setattr("daso.plan.cost_model.FEW", 2)
    choose_plan.cache_clear()
    try:
        model = seeded(mlp)()
        with daso.DASO(
            sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 1), wire="int8"
        ) as optimizer:
            plan = optimizer.report()["allreduce"]
            assert topology.equal_on_all_ranks(plan)
            assert plan != "direct" or topology.nodes == 3
            steps(topology, optimizer, model, range(9))
            optimizer.synchronize()
            assert topology.equal_on_all_ranks(bits(model))
            costs = optimizer.state_dict()["daso"]["sync"]["exchanges"]["costs"]
            assert topology.equal_on_all_ranks(costs)
            assert 0 < costs["byte_seconds"] < costs["latency_seconds"] < 1
    finally:
        choose_plan.cache_clear()


def test_costs_are_measured_again_where_exchanges_take_longer(topology, monkeypatch):
    """All ranks take the plan that suits the links of now, after the same exchange."""
    costs = [LinkCosts(latency_seconds=1.0), LinkCosts(latency_seconds=2**-20)]
    plans = {costs[0]: ring_of(topology.nodes), costs[1]: direct_plan(topology.nodes)}
    looks = iter(costs)

    def look(lane, world):
        yield []
        return next(looks)

    monkeypatch.setattr("daso.plan.cost_model.FEW", 2)
    monkeypatch.setattr("daso.train.channels.link_costs", look)
    monkeypatch.setattr("daso.train.channels.choose_plan", lambda *asked: plans[asked[-1]])
    asked = iter([False, False, True] + [False] * 100)
    monkeypatch.setattr("daso.train.deltas.exchange.has_changed", lambda _: next(asked))
    model = seeded(mlp)()
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 1), wire="int8"
    ) as optimizer:
        assert optimizer.report()["allreduce"] == plans[costs[0]].name
        steps(topology, optimizer, model, range(16))
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))
        report = optimizer.report()
        assert report["allreduce"] == "direct"
        links = [event for event in report["events"] if event["kind"] == "links"]
        assert [event["plan"] for event in links] == ["direct"]
        assert topology.equal_on_all_ranks([event["sent"] for event in links])


@pytest.mark.nodes((1, 1, 1), (2, 1, 1))
@pytest.mark.parametrize("algorithm", ["ring", "planned"])
@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_nodes_of_unequal_sizes_take_the_same_mean(topology, algorithm, wire, monkeypatch):
    """Where a rank has no lane too; synchronous first, then not, then drained."""
    routes(topology, monkeypatch)
    ended = []
    for chosen in ("direct", algorithm):
        model, exchange = seeded(mlp)(), daso.Exchange(algorithm=chosen)
        with daso.DASO(
            *(sgd(model),),
            module=model,
            topology=topology,
            policy=daso.Fixed(2, 1, warmup=2),
            exchange=exchange,
            wire=wire,
        ) as optimizer:
            steps(topology, optimizer, model, range(9))
            optimizer.synchronize()
            assert (optimizer.report()["allreduce"] == "direct") == (chosen == "direct")
        assert topology.equal_on_all_ranks(bits(model))
        ended.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    torch.testing.assert_close(*ended, atol=2e-3, rtol=0)
