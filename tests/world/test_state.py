"""Invariants 7 and 8: a run resumed, or replayed from its log, has the same bits."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from compare import ORDERED
from models import batch_loss, mlp, nesterov, seeded, sgd
from pairwise import pairwise
from worlds import APART, SEVERAL_NODES

import daso
from daso.plan import exchange as plan_exchange
from daso.plan.auto import SMALL_BUDGETS
from daso.plan.options import Settings
from daso.plan.policies import Replay
from daso.train.simulated.nodes import SimulatedNodes, Times


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def train(model, optimizer, rank, steps):
    """Train, and return the bits after every step."""
    seen = []
    for step in steps:
        optimizer.zero_grad()
        batch_loss(model, rank, step).backward()
        optimizer.step()
        seen.append(bits(model))
    return seen


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pairwise(
    policy=[daso.Fixed(1, 0), daso.Fixed(4, 3), daso.Fixed(3, 1, warmup=4)],
    fragments=[1, 2],
    gradient_wire=["fp32", "bf16", "int4"],
    options=[
        {"wire": "bf16", "merge": "daso"},
        {"wire": "int4", "merge": "delta"},
        {"wire": "topk", "merge": "delta"},
        {"wire": "fp32", "merge": 0.5},
        {"wire": "bf16", "merge": "eager"},
        {"wire": "int8", "outer": nesterov},
    ],
)
def test_a_run_resumed_anywhere_has_the_same_bits(
    topology, policy, fragments, gradient_wire, options
):
    exchange = daso.Exchange(algorithm="direct", chunk_bytes=512, fragments=fragments)

    def start(seed):
        torch.manual_seed(seed)
        model = mlp()
        gradients = daso.Gradients(wire=gradient_wire, bucket_bytes=256)
        options_of_all = {"topology": topology, "policy": policy, "exchange": exchange}
        options_of_all["gradients"] = gradients
        return model, daso.DASO(sgd(model), module=model, **options_of_all, **options)

    rank = topology.rank
    model, optimizer = start(1)
    with optimizer:
        whole = train(model, optimizer, rank, range(12))
    for cut in (5, 7):
        model, optimizer = start(1)
        with optimizer:
            train(model, optimizer, rank, range(cut))
            saved = through_a_file([model.state_dict(), optimizer.state_dict()])
            # Saving changes nothing.
            assert all(map(torch.equal, train(model, optimizer, rank, [cut])[0], whole[cut]))
        model, optimizer = start(2)
        with optimizer:
            train(model, optimizer, rank, range(40, 43))  # something else was in flight
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            rest = train(model, optimizer, rank, range(cut, 12))
        for mine, before in zip(rest, whole[cut:], strict=True):
            assert all(map(torch.equal, mine, before))


@pytest.mark.parametrize(
    "how", [{"wire": "int4", "merge": "delta"}, {"wire": "bf16", "merge": "daso"}]
)
def test_a_run_resumed_with_small_tensors_in_flight_has_the_same_bits(topology, how):
    def start(seed):
        torch.manual_seed(seed)
        model = mlp()
        options = {"policy": Replay(((0, 9, 2),), selective=1), "exchange": ORDERED, **how}
        return model, daso.DASO(sgd(model), module=model, topology=topology, **options)

    rank = topology.rank
    model, optimizer = start(1)
    with optimizer:
        whole = train(model, optimizer, rank, range(24))
    for cut in (2, 6, 12):
        model, optimizer = start(1)
        with optimizer:
            train(model, optimizer, rank, range(cut))
            assert optimizer._session.schedule.small.in_flight
            assert optimizer.report()["in_flight"]
            saved = through_a_file([model.state_dict(), optimizer.state_dict()])
        model, optimizer = start(2)
        with optimizer:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            rest = train(model, optimizer, rank, range(cut, 24))
            assert optimizer.report()["small_exchanges"] == 7  # after 2, 4, 6, 12, 14, 16, 21
        for mine, before in zip(rest, whole[cut:], strict=True):
            assert all(map(torch.equal, mine, before))


@pytest.mark.parametrize(
    ("wire", "outer"),
    [("fp32", nesterov), ("bf16", None), ("int4", nesterov), ("int2", None), ("topk", None)],
)
def test_a_run_resumed_right_after_a_send_may_stop_there(topology, wire, outer):
    def start(seed):
        torch.manual_seed(seed)
        model = mlp()
        options = {"policy": daso.Fixed(4, 3), "exchange": ORDERED, "wire": wire, "outer": outer}
        return model, daso.DASO(sgd(model), module=model, topology=topology, **options)

    model, optimizer = start(1)
    with optimizer:
        train(model, optimizer, topology.rank, range(4))
        saved = through_a_file([model.state_dict(), optimizer.state_dict()])
        optimizer.synchronize()
        expected = bits(model)
    model, optimizer = start(2)
    with optimizer:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        optimizer.synchronize()
    assert all(map(torch.equal, bits(model), expected))


def test_an_exchange_in_flight_belongs_to_the_rank_that_saved_it(topology, rank_info):
    def start():
        model = seeded(mlp)()
        options = {"policy": daso.Fixed(4, 3), "exchange": ORDERED}
        return model, daso.DASO(sgd(model), module=model, topology=topology, **options)

    model, optimizer = start()
    with optimizer:
        train(model, optimizer, rank_info.rank, range(4))
        assert optimizer.report()["in_flight"]
        first = topology.world_comm.bcast([model.state_dict(), optimizer.state_dict()])
        saved = through_a_file(first)
    model, optimizer = start()
    with optimizer:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert not optimizer.report()["in_flight"]
        assert optimizer.report()["batches"] == 4


def other_wire(now, _, *, timed, choices, numel):
    """Choose the other wire at every chance, so that both carry what the other rounded away."""
    assert numel
    assert timed in choices
    return next((one for one in choices if one != now), now)


@pytest.mark.nodes(*APART)  # simulated nodes have one rank each
@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4", "topk", "auto"])
def test_one_process_replays_a_run_from_its_log(topology, rank_info, monkeypatch, wire):
    monkeypatch.setattr(plan_exchange, "next_wire", other_wire)
    build, how = seeded(mlp), {"wire": wire, "merge": "delta", "exchange": ORDERED}
    model = build()
    policy = daso.Auto(drift=0.05, warmup=3, selective=1)
    optimizer = daso.DASO(sgd(model), module=model, topology=topology, policy=policy, **how)
    with optimizer:
        for step in range(40):
            train(model, optimizer, rank_info.rank, [step])
            if step == 24:
                optimizer.end_epoch(1.0)
    history = tuple(optimizer.report()["skip_history"])
    small = tuple(optimizer.report()["small_history"])
    assert len(history) > 2  # what Auto measured made a difference
    assert (small[0] == (0, 0)) == (wire == "topk")
    wires = [one["wire"] for one in optimizer.report()["events"] if one["kind"] == "exchange"]
    assert set(wires) == ({"int2", "int4"} if wire == "auto" else {wire})
    settings = Settings(**how, gradients=daso.Gradients(), selective=1)
    on_devices = optimizer.report()["node_transport"] != "shared memory"
    log = [one for one in optimizer.report()["events"] if one["kind"] == "exchange"]
    sent = {one["sent"]: one["wire"] for one in log}
    monkeypatch.undo()  # the log alone says which wire it was
    with torch.device("cpu"):  # wherever it ran
        nodes = SimulatedNodes(
            *(build, sgd, rank_info.world_size),
            policy=Replay(history, selective=1, small=small),
            settings=settings,
            times=Times(on_devices=on_devices),
            wires=sent,
        )
        for step in range(40):
            nodes.step(
                [lambda m, r=r, s=step: batch_loss(m, r, s) for r in range(rank_info.world_size)]
            )
            if step == 24:
                nodes.end_epoch(1.0)
        nodes.synchronize()
    for mine, theirs in zip(
        model.parameters(), nodes.models[rank_info.rank].parameters(), strict=True
    ):
        assert torch.equal(mine.cpu(), theirs)


class Fickle(daso.Fixed):
    """Exchanges small tensors more seldom after 10 batches, not at all after 22, and again."""

    selective = 1

    def tune_batch(self, state):
        period = {10: 3, 22: 0, 30: 2}.get(state.batch, state.small.period)
        return replace(state, small=replace(state.small, period=period))


@pytest.mark.nodes(*APART)  # simulated nodes have one rank each
def test_one_process_replays_how_often_small_tensors_went(topology, rank_info):
    build, how = seeded(mlp), {"wire": "bf16", "merge": "delta", "exchange": ORDERED}
    model = build()
    with daso.DASO(
        sgd(model), module=model, topology=topology, policy=Fickle(9, 2), **how
    ) as optimizer:
        train(model, optimizer, rank_info.rank, range(40))
        optimizer.synchronize()
    report = optimizer.report()
    assert report["small_history"] == [(0, 2), (10, 3), (22, 0), (30, 2)]
    assert report["small_exchanges"] == 9  # after 2, 4, 6, 12, 15, 21, 32, 34, 39
    policy = Replay(
        tuple(report["skip_history"]), selective=1, small=tuple(report["small_history"])
    )
    settings = Settings(**how, gradients=daso.Gradients(), selective=1)
    times = Times(on_devices=report["node_transport"] != "shared memory")
    with torch.device("cpu"):
        nodes = SimulatedNodes(
            *(build, sgd, rank_info.world_size), policy=policy, settings=settings, times=times
        )
        for step in range(40):
            nodes.step(
                [lambda m, r=r, s=step: batch_loss(m, r, s) for r in range(rank_info.world_size)]
            )
        nodes.synchronize()
    theirs = nodes.models[rank_info.rank].parameters()
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), theirs, strict=True))


class Thrifty(daso.Fixed):
    """Exchanges small tensors as often as `Auto` does."""

    selective = 1

    def tune_exchange(self, state, measurements):
        most = SMALL_BUDGETS * daso.Auto().budget * measurements.step_seconds
        period = state.small.period_within(most)
        return replace(state, small=replace(state.small, period=period))


@pytest.mark.also_real
@pytest.mark.nodes(*SEVERAL_NODES)
@pytest.mark.parametrize("slow", [None, 0, -1])
def test_all_ranks_go_by_who_loses_most_by_small_tensors(topology, rank_info, slow):
    model = mlp()
    how = {"policy": Thrifty(9, 2), "exchange": ORDERED}
    with daso.DASO(sgd(model), module=model, topology=topology, **how) as optimizer:
        train(model, optimizer, rank_info.rank, range(8))
        known = optimizer._session.runner.deltas._meter.local
        assert len(known.small_own_seconds) == len(known.small_exposed_seconds) == 3
        loses = slow is not None and rank_info.rank == slow % rank_info.world_size
        known.small_own_seconds, known.small_exposed_seconds = [float(loses)], [0.0]
        train(model, optimizer, rank_info.rank, range(8, 16))  # everything goes after the 9th
        history = optimizer.report()["small_history"]
    assert history == [(0, 2), *([] if slow is None else [(11, 0)])]


@pytest.mark.nodes((1, 1), (2, 2))  # the first step averages what is a mean: exact by halves
def test_after_one_copy_was_loaded_gradients_are_clipped_as_before(topology, rank_info):
    """By the norm of the mean over all ranks, not by that of a node's."""
    model = seeded(mlp)()
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    policy = daso.Fixed(1, 0)
    optimizer = daso.DASO(inner, module=model, topology=topology, policy=policy)

    def steps(first):
        for step in range(first, first + 3):
            optimizer.zero_grad()
            batch_loss(model, rank_info.rank, step).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()

    steps(0)
    optimizer.synchronize(optimizer_state=True)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    first = topology.world_comm.bcast(saved)
    steps(3)
    optimizer.synchronize()
    expected = bits(model)
    model.load_state_dict(first[0])
    optimizer.load_state_dict(first[1])
    steps(3)
    optimizer.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(bits(model), expected, strict=True))
    optimizer.close()


def test_a_state_of_synchronous_batches_brings_the_outer_optimizer_back(topology):
    torch.manual_seed(1)
    model, seen = mlp(), []
    options = {"outer": nesterov, "wire": "fp32", "exchange": ORDERED}
    policy = daso.Fixed(3, 1, warmup=4)
    with daso.DASO(sgd(model), module=model, topology=topology, policy=policy, **options) as one:
        train(model, one, topology.rank, range(2))
        saved = [model.state_dict(), one.state_dict()]
        copies = [through_a_file(saved), through_a_file(saved)]
        for state in copies:  # the second time there is momentum to forget
            model.load_state_dict(state[0])
            one.load_state_dict(state[1])
            seen.append(train(model, one, topology.rank, range(2, 20)))
    assert all(map(torch.equal, seen[0][-1], seen[1][-1]))


@pytest.mark.nodes((1, 1))
def test_a_state_is_left_alone_by_who_loads_it(topology, rank_info):
    model = seeded(mlp)()
    inner = torch.optim.SGD(model.parameters(), lr=0.05)  # without a state of its own
    options = {"policy": daso.Fixed(2, 1), "exchange": ORDERED}
    with daso.DASO(inner, module=model, topology=topology, **options) as optimizer:
        train(model, optimizer, rank_info.rank, range(9))
        state = optimizer.state_dict()
        before = copy.deepcopy(state["daso"])
        optimizer.load_state_dict(state)
        train(model, optimizer, rank_info.rank, range(9, 20))
    after = state["daso"]["sync"]["exchanges"]
    assert after["local"] == before["sync"]["exchanges"]["local"]
    assert after["state"] == before["sync"]["exchanges"]["state"]


@pytest.mark.nodes(*APART)
def test_fragments_of_other_sizes_take_the_other_wire_too(topology, rank_info, monkeypatch):
    monkeypatch.setattr(plan_exchange, "next_wire", other_wire)
    model = seeded(mlp)()
    exchange = daso.Exchange(algorithm="direct", fragments=2)  # of 102 and 71 numbers
    options = {"policy": daso.Fixed(2, 1), "exchange": exchange}
    with daso.DASO(sgd(model), module=model, topology=topology, **options) as optimizer:
        train(model, optimizer, rank_info.rank, range(30))
        events = optimizer.report()["events"]
    assert {one["wire"] for one in events if one["kind"] == "exchange"} == {"int2", "int4"}


class Leap(daso.Fixed):
    """Waits longer from an exchange on that is received and followed by another at once."""

    def tune_exchange(self, state, _):
        return replace(state, skip=8, wait=8) if state.batch == 6 else state


def test_a_replay_keeps_local_work_as_the_run_did(monkeypatch):
    settings = Settings(wire="fp32", merge="auto", exchange=ORDERED, gradients=daso.Gradients())

    def run(policy):
        nodes = SimulatedNodes(seeded(mlp), sgd, 2, policy=policy, settings=settings)
        for step in range(16):
            nodes.step([lambda m, r=r, s=step: batch_loss(m, r, s) for r in range(2)])
        return nodes

    drift = next(one["drift"] for one in run(Leap(2, 2)).events if one["sent"] == 4)
    monkeypatch.setattr("daso.plan.exchange.MOST_DRIFT", (4 * drift) ** 0.5)  # between both waits
    ran, replayed = run(Leap(2, 2)), run(Replay(((0, 2, 2), (6, 8, 8))))
    assert [one["sent"] for one in ran.events] == [one["sent"] for one in replayed.events]
    pairs = zip(ran.models[0].parameters(), replayed.models[0].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
