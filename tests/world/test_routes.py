"""Plans that follow measured links: all ranks change to another after the same exchange."""

import copy

import pytest
import torch
from models import bits, mlp, seeded, sgd
from training import train_batches

import daso
import daso.train.channels as channels_module
from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan
from daso.plan.cost_model import LinkCosts, choose_plan

pytestmark = [pytest.mark.mpi, pytest.mark.nodes((1, 1, 1), (1, 1, 1, 1)), pytest.mark.real_mpi]


def wrapped(topology, model, fragments=1, **options):
    exchange = daso.Exchange(algorithm="planned", chunk_bytes=512, fragments=fragments)
    return daso.DASO(*(sgd(model),), module=model, topology=topology, exchange=exchange, **options)


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
    monkeypatch.setattr("daso.train.channels.plan_routes", lambda rounds, current: next(chosen))
    return first


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize(("wire", "kind"), [("fp32", "ring"), ("int8", "ring"), ("int8", "shares")])
def test_all_ranks_change_after_the_same_exchange(topology, wire, kind, fragments, monkeypatch):
    first = routes(topology, monkeypatch, kind)
    asked = iter([False, False, True] + [False] * 100)
    monkeypatch.setattr("daso.train.deltas.meter.has_changed", lambda _: next(asked))
    model = seeded(mlp)()
    with wrapped(topology, model, fragments, policy=daso.Fixed(2, 1), wire=wire) as optimizer:
        assert optimizer.report()["allreduce"] == first.name
        train_batches(optimizer, model, topology.rank, range(16))
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
    monkeypatch.setattr("daso.train.deltas.meter.has_changed", lambda _: False)
    ended = []
    for cut in (None, 7):
        model = seeded(mlp)()
        routes(topology, monkeypatch, kind)
        optimizer = wrapped(topology, model, policy=daso.Fixed(2, 1), wire="int8")
        plan = optimizer.report()["allreduce"]
        train_batches(optimizer, model, topology.rank, range(cut or 12))
        if cut is not None:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            optimizer.close()
            model = seeded(mlp)()
            optimizer = wrapped(topology, model, policy=daso.Fixed(2, 1), wire="int8")
            assert optimizer.report()["allreduce"] != plan
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
            assert optimizer.report()["allreduce"] == plan
            train_batches(optimizer, model, topology.rank, range(cut, 12))
        optimizer.synchronize()
        ended.append(bits(model))
        optimizer.close()
    assert ended[0] == ended[1]


def test_what_messages_cost_is_measured_where_plans_depend_on_it(topology, monkeypatch):
    """As among more than 16 nodes: all ranks measure, choose alike, and stay the same bits."""
    monkeypatch.setattr("daso.plan.cost_model.MAX_DIRECT_RANKS", 2)
    choose_plan.cache_clear()
    try:
        model = seeded(mlp)()
        with daso.DASO(
            sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 1), wire="int8"
        ) as optimizer:
            plan = optimizer.report()["allreduce"]
            assert topology.equal_on_all_ranks(plan)
            assert plan != "direct" or topology.nodes == 3
            train_batches(optimizer, model, topology.rank, range(9))
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

    monkeypatch.setattr("daso.plan.cost_model.MAX_DIRECT_RANKS", 2)
    monkeypatch.setattr("daso.train.channels.link_costs", look)
    monkeypatch.setattr("daso.train.channels.choose_plan", lambda *asked: plans[asked[-1]])
    asked = iter([False, False, True] + [False] * 100)
    monkeypatch.setattr("daso.train.deltas.meter.has_changed", lambda _: next(asked))
    model = seeded(mlp)()
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=daso.Fixed(2, 1), wire="int8"
    ) as optimizer:
        assert optimizer.report()["allreduce"] == plans[costs[0]].name
        train_batches(optimizer, model, topology.rank, range(16))
        optimizer.synchronize()
        assert topology.equal_on_all_ranks(bits(model))
        report = optimizer.report()
        assert report["allreduce"] == "direct"
        links = [event for event in report["events"] if event["kind"] == "links"]
        assert [event["plan"] for event in links] == ["direct"]
        assert topology.equal_on_all_ranks([event["sent"] for event in links])


def test_means_of_gradients_follow_the_links_of_now(topology, monkeypatch):
    """The plan of a mean is chosen once, until links are measured again."""
    first = routes(topology, monkeypatch)
    model = seeded(mlp)()
    with wrapped(topology, model, policy=daso.Fixed(1, 0)) as optimizer:
        channels, plans = optimizer._session.runner.parts.channels, []
        make = channels_module.deterministic_allreduce

        def note(*args, plan, **how):
            plans.append((args[0], plan.name))
            return make(*args, plan=plan, **how)

        monkeypatch.setattr(channels_module, "deterministic_allreduce", note)
        for work in (None, None, channels.look_again(), None):
            if work is not None:
                channels.engine.run(work)
                continue
            total = torch.full((100,), float(topology.rank))
            channels.engine.run(channels.gradient_mean(total))
            assert total.tolist() == [(topology.world_size - 1) / 2] * 100
        ours = [name for comm, name in plans if comm is channels.comms.lane]
        assert ours == [first.name, direct_plan(topology.nodes).name]


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
            train_batches(optimizer, model, topology.rank, range(9))
            optimizer.synchronize()
            assert (optimizer.report()["allreduce"] == "direct") == (chosen == "direct")
        assert topology.equal_on_all_ranks(bits(model))
        ended.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
    torch.testing.assert_close(*ended, atol=2e-3, rtol=0)
