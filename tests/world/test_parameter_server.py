"""The eager server: one process, bit for bit, where all go together; replayed where none waits."""

import copy
import math
import threading
import time
from functools import partial

import pytest
import torch
import training
from expected_errors import raises
from jobs import HANG_SECONDS, slowness
from models import Odd, adamw, batch_loss, mlp, seeded
from pairwise import pairwise
from sequential import add
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import train_batches

import daso
from daso.checkpoint.state import Checkpoints
from daso.comm.p2p.send_queue import SendQueue
from daso.errors import (
    CheckpointError,
    ConfigError,
    ExchangeError,
    LayoutError,
    NonFiniteError,
    StallError,
)
from daso.server.partition import Partition, layers_of
from daso.server.plan import FLOOR_BYTES, MESSAGE_SECONDS, Apply, Send
from daso.server.replay import replay
from daso.server.service import AHEAD


@pytest.fixture
def real_floor():
    """Leave the bytes that a message should have as they are."""


@pytest.fixture(autouse=True)
def _small_floor(request, monkeypatch):
    """Let shares of small layers be worth a message, so that these have many owners."""
    if "real_floor" not in request.fixturenames:
        monkeypatch.setattr("daso.server.plan.FLOOR_BYTES", 24)


sgd = partial(training.sgd, weight_decay=1e-3)


def sequential(build, make, ranks, steps, mode, rates=None, clip=lambda _: None):
    """Take synchronous steps in one process, in the most obvious way."""
    models = [build() for _ in range(ranks)]  # of which buffers differ
    stands = {"sharded": 1, "local_rows": ranks}[mode]
    masters = [build() for _ in range(stands)]
    inners = [make([p for p in m.parameters() if p.requires_grad]) for m in masters]
    current = [p.detach().clone() for p in masters[0].parameters() if p.requires_grad]
    owners = owners_of_params(masters[0], ranks)
    for step in range(steps):
        grads = []
        for rank, model in enumerate(models):
            params = [p for p in model.parameters() if p.requires_grad]
            for p, value in zip(params, current, strict=True):
                p.data.copy_(value)
                p.grad = None
            batch_loss(model, rank, step).backward()
            grads.append([p.grad for p in params])
        results = []
        for stand, (master, inner) in enumerate(zip(masters, inners, strict=True)):
            params = [p for p in master.parameters() if p.requires_grad]
            for at, p in enumerate(params):
                p.data.copy_(current[at])
                chosen = [one[at] for one in grads] if mode == "sharded" else [grads[stand][at]]
                there = [g for g in chosen if g is not None]
                total = None
                for g in there:
                    total = add(total, g)
                p.grad = None if total is None else (total / len(chosen)).to(p.dtype)
            for group in inner.param_groups:
                group["lr"] = group["lr"] if rates is None else rates(step)
            clip(master)
            inner.step()
            results.append([p.detach().clone() for p in params])
        current = [joined(mode, [one[at] for one in results], owners[at]) for at in owners]
    return current


class Clip:
    """Clips the mean gradient of one process: by the norm of the step before, then by value."""

    def __init__(self, ranks, clip_value=None, clip_norm=None):
        self.ranks, self.value, self.norm = ranks, clip_value, clip_norm
        self.last = None
        self.bites = 0  # steps that it changed

    def __call__(self, model):
        params = [p for p in model.parameters() if p.requires_grad]
        before = [None if p.grad is None else p.grad.clone() for p in params]
        if self.norm is not None:
            last, self.last = self.last, mean_norm(model, self.ranks)
            for p in params if last is not None else ():
                if p.grad is not None:
                    p.grad.mul_(min(1.0, self.norm / (last + 1e-6)))
        if self.value is not None:
            nn.utils.clip_grad_value_(params, self.value)
        same_bits = [
            a is None or torch.equal(a, p.grad) for a, p in zip(before, params, strict=True)
        ]
        self.bites += not all(same_bits)


def mean_norm(model, ranks):
    """Return the norm of gradients, added in the order of the rows' owners."""
    _, named, layers = layers_of(model)
    shares = Partition(named, layers, ranks)
    total = 0.0
    for owner in range(ranks):
        for layer in shares.owned(owner):
            grads = [(at, named[at][1].grad) for at in layers[layer]]
            rows = [shares.of(owner, at, grad) for at, grad in grads if grad is not None]
            wide = [
                one.contiguous().to(torch.promote_types(one.dtype, torch.float32)) for one in rows
            ]
            total += math.fsum(one.norm().item() ** 2 for one in wide)
    return math.sqrt(total)


def owners_of_params(model, ranks):
    """Return the ranks that own rows of each trained parameter, by its number."""
    _, named, layers = layers_of(model)
    shares = Partition(named, layers, ranks)
    return dict(
        sorted((at, shares.owners[layer]) for layer, own in enumerate(layers) for at in own)
    )


def joined(mode, versions, owners):
    if mode == "sharded":
        return versions[0]
    rows = [v if v.ndim else v.unsqueeze(0) for v in versions]
    rows = [rows[owner] for owner in owners]
    out, count = rows[0].clone(), len(rows)
    size, longer = divmod(len(out), count)
    at = 0
    for rank, one in enumerate(rows):
        until = at + size + (rank < longer)
        out[at:until] = one[at:until]
        at = until
    return out.view(versions[0].shape)


def train(topology, build, make, steps=5, each=None, **how):
    model = seeded(build)()
    rank = topology.rank
    with daso.ParameterServer(model, make, topology=topology, **how) as server:
        server.keep_log()
        for step in range(steps):
            if each is not None:
                each(server, step)
            server.zero_grad()
            batch_loss(model, rank, step).backward()
            server.step()
        server.synchronize()
        return model, server.report(), server.logged()


def params(model):
    return [p.detach() for p in model.parameters() if p.requires_grad]


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("every", "packet_bytes"), [(1, 33), (1, 1 << 20), (2, 100), (100, 100), ("auto", 1 << 20)]
)
@pytest.mark.parametrize(("build", "make"), [(mlp, adamw), (Odd, sgd)])
def test_without_staleness_every_step_equals_one_process(
    topology, build, make, every, packet_bytes
):
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else make
    packets = daso.Exchange(chunk_bytes=packet_bytes)
    model, report, _ = train(topology, build, make_flat, push_every=every, exchange=packets)
    expected = sequential(seeded(build), make_flat, topology.world_size, 5, "sharded")
    assert same(params(model), expected)
    assert report["steps"] == 5
    assert (report["bytes_sent"] > 0) == (topology.world_size > 1)


@pytest.mark.parametrize(("build", "make"), [(mlp, sgd), (Odd, sgd)])
def test_local_rows_equal_one_process_too(topology, build, make):
    model, *_ = train(topology, build, make, mode="local_rows", push_every=1)
    expected = sequential(seeded(build), make, topology.world_size, 5, "local_rows")
    assert same(params(model), expected)


def test_all_ranks_end_with_the_same_bits(topology):
    model, *_ = train(topology, Odd, sgd, staleness=None)
    everyones = topology.world_comm.allgather([t.clone() for t in model.state_dict().values()])
    assert all(same(one, everyones[0]) for one in everyones)


def test_learning_rates_are_those_of_each_step(topology):
    def rates(step):
        return 0.1 / (1 + step)

    def each(server, step):
        server.param_groups[0]["lr"] = rates(step)

    model, *_ = train(topology, mlp, sgd, each=each)
    assert same(
        params(model), sequential(seeded(mlp), sgd, topology.world_size, 5, "sharded", rates)
    )


CLIPS = [{"clip_value": 0.01}, {"clip_norm": 0.3}, {"clip_norm": 0.3, "clip_value": 0.05}]


@pytest.mark.nodes((1, 1), (2, 1))
@pytest.mark.parametrize("clips", CLIPS, ids=str)
@pytest.mark.parametrize(("build", "make"), [(mlp, adamw), (mlp, sgd), (Odd, sgd), (Odd, adamw)])
def test_clipped_steps_equal_one_process(topology, build, make, clips):
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else make
    model, report, _ = train(topology, build, make_flat, **clips)
    clip = Clip(topology.world_size, **clips)
    expected = sequential(seeded(build), make_flat, topology.world_size, 5, "sharded", clip=clip)
    assert same(params(model), expected)
    assert clip.bites >= 2
    assert report["norm"] == clip.last
    assert {*topology.world_comm.allgather(report["norm"])} == {clip.last}


@pytest.mark.nodes((1, 1))
def test_rows_of_one_ranks_gradients_are_clipped_by_value(topology):
    model, *_ = train(topology, mlp, sgd, mode="local_rows", clip_value=0.01)
    clip = Clip(topology.world_size, clip_value=0.01)
    expected = sequential(seeded(mlp), sgd, topology.world_size, 5, "local_rows", clip=clip)
    assert same(params(model), expected)
    assert clip.bites


class Once(nn.Module):
    """Calls one of its layers in its first forward only."""

    def __init__(self):
        super().__init__()
        self.body, self.spare, self.calls = mlp(), nn.Linear(6, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.body(x) + self.spare(x) if self.calls == 1 else self.body(x)


@pytest.mark.nodes((1, 1), (2, 1))
def test_a_norm_that_arrives_late_is_waited_for(topology):
    """Forward does not wait for a layer that it does not call; its norm is needed all the same."""
    rank, size = topology.rank, topology.world_size
    model, how = seeded(Once)(), {"clip_norm": 0.3, "push_every": 1}
    with daso.ParameterServer(model, sgd, topology=topology, **how) as server:
        for step in range(6):
            if step == 3:
                server.synchronize()
            server.zero_grad()
            batch_loss(model, rank, step).backward()
            if rank == size - 1:
                time.sleep(0.05)  # the gradient of the spare layer leaves in step()
            server.step()
    clip = Clip(size, clip_norm=0.3)
    assert same(params(model), sequential(seeded(Once), sgd, size, 6, "sharded", clip=clip))


@pytest.mark.nodes((1, 1))
def test_constant_gradients_are_clipped_as_by_torch_from_the_second_step(topology):
    rank, size = topology.rank, topology.world_size
    torch.manual_seed(5)
    x = torch.randn(size, 4, 6)
    model, expected = seeded(lambda: nn.Linear(6, 3))(), seeded(lambda: nn.Linear(6, 3))()
    make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    inner = make(expected.parameters())
    with daso.ParameterServer(model, make, topology=topology, clip_norm=0.2) as server:
        for step in range(4):
            server.zero_grad()
            model(x[rank]).sum().backward()
            server.step()
            inner.zero_grad()
            (expected(x.flatten(0, 1)).sum() / size).backward()
            if step:
                norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.2)
            inner.step()
    assert norm > 1
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.nodes((1, 1), (2, 1))
@pytest.mark.parametrize("staleness", [1, None])
@pytest.mark.parametrize(("build", "make"), [(mlp, adamw), (Odd, sgd)])
def test_stale_gradients_are_clipped_by_their_own_ranks_last_norm(topology, build, make, staleness):
    limit, norms = 0.3, {}
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else make
    how = {"staleness": staleness, "clip_norm": limit, "clip_value": 0.05, "each": uneven}
    model, report, log = train(topology, build, make_flat, steps=8, **how)
    logs = topology.world_comm.allgather(log)

    def measured(model, rank, step):
        backward(model, rank, step)
        grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
        norms[rank, step] = torch.cat([one.flatten() for one in grads]).norm().item()

    found = replay(logs, seeded(build), make_flat, measured)
    assert same(params(found.model), params(model))
    applied = [one for log in logs for one in log.events if isinstance(one, Apply)]
    assert applied
    for one in applied:
        ((source, step),) = one.of
        last = norms.get((source, step - 1), 0.0)
        assert one.clip == pytest.approx(min(1.0, limit / (last + 1e-6)), rel=1e-5)
    assert min(one.clip for one in applied) < 0.9
    assert report["norm"] == pytest.approx(norms[topology.rank, 7], rel=1e-5)


@pytest.mark.nodes((1, 1))
def test_the_last_norm_is_saved(topology):
    """Each rank's own, where gradients are applied one by one."""
    rank, limit = topology.rank, 0.3
    how = {"topology": topology, "staleness": None, "clip_norm": limit}
    model, other = seeded(mlp)(), seeded(mlp)()
    with daso.ParameterServer(model, sgd, **how) as server:
        train_batches(server, model, rank, range(3))
        server.synchronize()
        saved = copy.deepcopy(server.state_dict())
        other.load_state_dict(model.state_dict())
    norms = topology.world_comm.allgather(saved["norm"])
    assert min(norms) > limit
    with daso.ParameterServer(other, sgd, **how) as server:
        server.load_state_dict(saved)
        server.keep_log()
        train_batches(server, other, rank, range(3, 4))
        server.synchronize()
        applied = [one for one in server.logged().events if isinstance(one, Apply)]
    factors = {source: limit / (norm + 1e-6) for source, norm in enumerate(norms)}
    assert {one.of[0][0]: one.clip for one in applied} == factors


def uneven(server, step):
    """Ranks take different times, and not the same in every step."""
    time.sleep(0.002 * ((server._serving.rank * 7 + step * 3) % 5))


@pairwise(
    mode=["sharded", "local_rows"],
    staleness=[0, 1, 4, None],
    case=[(mlp, adamw), (Odd, sgd)],
    push_every=["auto", 1],
)
def test_a_replay_gives_the_same_bits(topology, mode, staleness, case, push_every):
    build, make = case
    make_flat = (lambda p: torch.optim.AdamW(p, lr=1e-2)) if make is adamw else make
    how = {"mode": mode, "staleness": staleness, "push_every": push_every}
    for scale_by_staleness in {False, mode == "sharded" and staleness != 0}:
        model, report, log = train(
            topology,
            build,
            make_flat,
            steps=8,
            each=uneven,
            scale_by_staleness=scale_by_staleness,
            **how,
        )
        sends = [one for one in log.events if isinstance(one, Send)]
        handed_over = [(one.step, one.owner, layer) for one in sends for layer in one.layers]
        assert len(set(handed_over)) == len(handed_over)  # each gradient once to each owner
        logs = topology.world_comm.allgather(log)

        found = replay(logs, seeded(build), make_flat, backward)
        assert same(params(found.model), params(model))
        total = sum(topology.world_comm.allgather(report["updates"]))
        assert found.versions == total > 0
        if staleness is not None:
            assert found.oldest <= staleness


# --- when they leave, and who waits for whom ------------------------------------------------------


class Early(nn.Module):
    """Of three layers: a thin one, one just below the floor, and one above it for each owner."""

    def __init__(self, owners):
        super().__init__()
        self.thin = nn.Linear(6, 122, bias=False)
        self.below = nn.Linear(122, 128, bias=False)
        self.above = nn.Linear(128, 129 * owners, bias=False)

    def forward(self, x):
        self.early = self.thin(x).tanh()
        return self.above(self.below(self.early).tanh())


THIN, BELOW, ABOVE = range(3)


BACKWARD_SECONDS = 20 * MESSAGE_SECONDS  # of the first layer


@pytest.mark.parametrize("mode", ["sharded", "local_rows"])
@pytest.mark.parametrize(
    ("every", "early", "in_backward", "early_again"),
    [
        (1, [ABOVE, BELOW], [THIN], [ABOVE, BELOW]),
        (2, [ABOVE, BELOW], [], [ABOVE, BELOW]),
        (100, [], [ABOVE, BELOW, THIN], []),
        # How long backward goes on is known in the second step.
        ("auto", [ABOVE], [], [ABOVE, BELOW]),
    ],
)
def test_layers_leave_while_backward_goes_on(
    real_floor, topology, mode, every, early, in_backward, early_again, monkeypatch
):
    """Those before backward comes to the first layer, those before it returns, and the rest."""
    monkeypatch.setattr(SendQueue, "backlog_bytes", 0)  # so that the pace stays
    model = seeded(lambda: Early(topology.world_size))()
    thin, below, above = (one.weight.nbytes for one in model.children())
    assert thin + below < FLOOR_BYTES < above // topology.world_size
    with daso.ParameterServer(model, sgd, topology=topology, mode=mode, push_every=every) as server:
        server.keep_log()
        mine = {
            layer: who if mode == "sharded" else {topology.rank} & {*who}
            for layer, who in enumerate(server._client.partition.owners)
        }

        def left(step):
            events = [one for one in server.logged().events if isinstance(one, Send)]
            return {
                (layer, one.owner) for one in events for layer in one.layers if one.step == step
            }

        def expected(*layers):
            return {(layer, owner) for layer in layers for owner in mine[layer]}

        def look(_):
            seen.append(left(server._client.steps))
            time.sleep(BACKWARD_SECONDS)

        seen = []
        for step in range(2):
            loss = batch_loss(model, topology.rank, step)
            model.early.register_hook(look)
            loss.backward()
            if step == 0:
                assert left(step) == expected(*early, *in_backward)
            server.step()
            assert left(step) == expected(ABOVE, BELOW, THIN)
        assert seen == [expected(*early), expected(*early_again)]


@pytest.mark.parametrize("mode", ["sharded", "local_rows"])
def test_new_rows_of_a_layer_come_back_while_backward_goes_on(real_floor, topology, mode):
    """All ranks stand in the middle of backward until what they sent has come back as rows."""
    model = seeded(lambda: Early(topology.world_size))()
    with daso.ParameterServer(model, sgd, topology=topology, mode=mode) as server:
        serving, seen = server._serving, []

        def versions():
            return [rows.version for rows in serving.service.rows.newest(ABOVE).values()]

        def wait(_):
            limit = time.perf_counter() + HANG_SECONDS
            while min(versions()) < 1 and time.perf_counter() < limit:
                time.sleep(1e-3)
            seen.append(versions())

        loss = batch_loss(model, topology.rank, 0)
        model.early.register_hook(wait)
        loss.backward()
        server.step()
    assert seen == [[1] * topology.world_size]


@pytest.mark.parametrize("staleness", [1, 4])
def test_a_rank_goes_as_far_ahead_of_the_slowest_as_it_may_and_waits_there(topology, staleness):
    rank, world = topology.rank, topology.world_comm
    model, told = seeded(mlp)(), []
    with daso.ParameterServer(model, sgd, topology=topology, staleness=staleness) as server:
        server.keep_log()
        wait = server._serving._wait

        def tell(arrived, what, step=0):
            if rank and step and not told:
                told.append(step)
                world.send(step, 0)
            wait(arrived, what, step)

        server._serving._wait = tell
        for step in range(staleness + 3):
            server.zero_grad()
            loss = batch_loss(model, rank, step)
            if rank == 0 and step == 0:  # the slowest: until the others can go no further
                told += [world.recv(source=other) for other in range(1, topology.world_size)]
            loss.backward()
            server.step()
        server.synchronize()
        log = server.logged()
    assert set(told) == {staleness + 1}
    found = replay(world.allgather(log), seeded(mlp), sgd, backward)
    assert same(params(found.model), params(model))
    assert found.oldest == staleness


def test_unbounded_server_waits_for_own_updates(topology):
    rank, world = topology.rank, topology.world_comm
    model, told = seeded(mlp)(), []
    with daso.ParameterServer(model, sgd, topology=topology, staleness=None) as server:
        serving = server._serving
        wait, contribute = serving._wait, serving.service.shard.contribute

        def tell(arrived, what, step=0):
            if rank and step and not told:
                told.append(step)
                world.send(step, 0)
            wait(arrived, what, step)

        def hold(one):
            """Take in no gradient before all others wait."""
            if rank == 0 and not told:
                told.extend(world.recv(source=other) for other in range(1, topology.world_size))
            return contribute(one)

        serving._wait, serving.service.shard.contribute = tell, hold
        train_batches(server, model, rank, range(4))
        server.synchronize()
    assert set(told) <= {AHEAD + 1}
    assert bool(told) == (topology.world_size > 1)


# --- odd ones -------------------------------------------------------------------------------------


def test_small_layers_have_one_owner_each(real_floor, topology):
    """All bits are the same as where every rank has rows of them."""
    model, report, _ = train(topology, many, sgd, steps=2, push_every=1)
    assert same(params(model), sequential(seeded(many), sgd, topology.world_size, 2, "sharded"))
    updates = topology.world_comm.allgather(report["updates"])
    assert sum(updates) == 2 * 201  # layers
    assert max(updates) - min(updates) <= 2


def many():
    return nn.Sequential(nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(200)))


class Attention(nn.Module):
    """Uses parameters of a module inside without calling it."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        y, _ = self.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))
        return self.last(self.norm(y.squeeze(1)))


def wide_one():
    return nn.Sequential(nn.Linear(6, 200_000), nn.ReLU(), nn.Linear(200_000, 3))


@pytest.mark.parametrize("build", [many, Attention, wide_one], ids=lambda build: build.__name__)
def test_400_tiny_tensors_one_huge_and_layers_that_are_not_called(topology, build):
    steps = 2 if build is wide_one else 4
    model, *_ = train(topology, build, sgd, steps=steps)
    assert same(
        params(model), sequential(seeded(build), sgd, topology.world_size, steps, "sharded")
    )


def backward(model, rank, step):
    batch_loss(model, rank, step).backward()


def rounded(source, step, index, grad, residuals):
    """Round a gradient to bf16, with what was lost before."""
    value = grad.float() + residuals.get((source, index), 0.0)
    carried = value.to(torch.bfloat16).float()
    residuals[source, index] = value - carried
    return carried


def test_gradients_on_a_16_bit_wire_lose_nothing_for_good(topology):
    size, residuals = topology.world_size, {}
    model, *_ = train(topology, mlp, sgd, steps=6, wire="bf16")
    expected = seeded(mlp)()
    inner = sgd(expected.parameters())
    for step in range(6):
        total = [None] * len(params(expected))
        for source in range(size):
            expected.zero_grad()
            batch_loss(expected, source, step).backward()
            grads = [
                rounded(source, step, index, p.grad, residuals)
                for index, p in enumerate(expected.parameters())
            ]
            total = [add(a, g) for a, g in zip(total, grads, strict=True)]
        for p, grad in zip(expected.parameters(), total, strict=True):
            p.grad = grad / size
        inner.step()
    assert same(params(model), params(expected))


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "topk"])
def test_a_replay_rounds_as_the_wire_did(topology, wire):
    model, report, log = train(topology, Odd, sgd, steps=8, each=uneven, staleness=None, wire=wire)
    assert report["wire"] == wire
    found = replay(topology.world_comm.allgather(log), seeded(Odd), sgd, backward)
    assert same(params(found.model), params(model))


@pytest.mark.parametrize("optimizer_state", ["per_rank", "shared"])
def test_the_state_of_each_ranks_gradients_is_saved(topology, optimizer_state):
    how = {"staleness": None, "optimizer_state": optimizer_state}
    with daso.ParameterServer(seeded(mlp)(), sgd, topology=topology, **how) as server:
        for step in range(3):
            server.zero_grad()
            batch_loss(server._model, topology.rank, step).backward()
            server.step()
        server.synchronize()
        saved = copy.deepcopy(server.state_dict())
        model = copy.deepcopy(server._model.state_dict())
    states = topology.world_size if optimizer_state == "per_rank" else 1
    assert len(saved["inner"]) == states
    momenta = [one["state"][0]["momentum_buffer"].flatten() for one in saved["inner"].values()]
    assert len({tuple(one.tolist()) for one in momenta if len(one)}) in (0, states)
    other = seeded(mlp)()
    other.load_state_dict(model)
    with daso.ParameterServer(other, sgd, topology=topology, **how) as server:
        server.load_state_dict(saved)
        again = server.state_dict()["inner"]
    for source, one in saved["inner"].items():
        assert again[source]["param_groups"] == one["param_groups"]
        for index, state in one["state"].items():
            assert torch.equal(
                again[source]["state"][index]["momentum_buffer"], state["momentum_buffer"]
            )


@pytest.mark.parametrize(("wire", "clip_norm"), [(None, None), ("int8", None), (None, 0.3)])
def test_training_goes_on_after_ranks_met_and_from_what_was_saved(
    topology, shared_folder, wire, clip_norm
):
    """With what the wire had lost by then, and had not sent, and with the norm that clips."""
    folder = shared_folder
    rank, size = topology.rank, topology.world_size
    make = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731
    model, how = seeded(Odd)(), {"topology": topology, "wire": wire, "clip_norm": clip_norm}
    with daso.ParameterServer(model, make, **how) as server:
        train_batches(server, model, rank, range(3))
        with raises("state-saved-in-training"):
            server.state_dict()
        server.synchronize()
        payload = {"model": model.state_dict(), "server": server.state_dict()}
        Checkpoints(folder, topology).save(3, payload)
        train_batches(server, model, rank, range(3, 6))
    other = seeded(Odd)()
    saved = Checkpoints(folder, topology).load().payload
    other.load_state_dict(saved["model"])
    with daso.ParameterServer(other, make, **how) as server:
        server.load_state_dict(saved["server"])
        assert server.report()["steps"] == 3
        train_batches(server, other, rank, range(3, 6))
    assert same(params(other), params(model))
    if wire is None:
        clip = Clip(size, clip_norm=clip_norm)
        expected = sequential(seeded(Odd), make, size, 6, "sharded", clip=clip)
        assert same(params(model), expected)
        assert bool(clip.bites) == (clip_norm is not None)


def test_state_of_other_rows_is_refused(topology):
    with daso.ParameterServer(mlp(), sgd, topology=topology) as server:
        saved = server.state_dict()
        saved["share"] = {**saved["share"], "ranks": 99}
        with pytest.raises(CheckpointError, match="99"):
            server.load_state_dict(saved)


@pytest.mark.parametrize("staleness", [1, None])
def test_ranks_may_take_different_numbers_of_steps(topology, staleness):
    rank, size = topology.rank, topology.world_size
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology, staleness=staleness) as server:
        for _ in range(2):
            train_batches(server, model, rank, range(3 + 2 * rank))
            server.synchronize()
        assert server.report()["steps"] == 2 * (3 + 2 * rank)
        updates = (
            2 * len(server._client.partition.owned(rank)) * sum(3 + 2 * r for r in range(size))
        )
        assert server.report()["updates"] == updates
    everyones = topology.world_comm.allgather(params(model))
    assert all(same(one, everyones[0]) for one in everyones)


def test_accumulation_sends_the_sum_once(topology):
    rank, size = topology.rank, topology.world_size
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        server.zero_grad()
        with server.no_sync():
            batch_loss(model, rank, 0).backward()
        batch_loss(model, rank, 1).backward()
        server.step()
    expected = seeded(mlp)()
    inner = sgd(expected.parameters())
    total = [None] * len([*expected.parameters()])
    for one in range(size):
        expected.zero_grad()
        batch_loss(expected, one, 0).backward()
        batch_loss(expected, one, 1).backward()
        total = [add(a, p.grad) for a, p in zip(total, expected.parameters(), strict=True)]
    for p, grad in zip(expected.parameters(), total, strict=True):
        p.grad = grad / size
    inner.step()
    assert same(params(model), params(expected))


def test_a_second_backward_in_a_step_is_refused_with_the_remedy(topology):
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        batch_loss(model, 0, 0).backward()
        with raises("second-backward-in-step"):
            batch_loss(model, 0, 0).backward()
        server.step()


def test_gradients_that_are_not_finite_are_left_out_and_raise_in_the_end(topology):
    rank = topology.rank
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        for step in range(3):
            server.zero_grad()
            loss = batch_loss(model, rank, step)
            if rank == 0 and step == 0:
                loss = loss * math.nan
            loss.backward()
            server.step()
        assert server.report()["dropped"] == (1 if rank == 0 else 0)
        server.synchronize()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        # What a rank raises alone ends the job; here all do.
        with raises("gradients-not-finite"):
            for step in range(3):
                server.zero_grad()
                (batch_loss(model, rank, step) * math.nan).backward()
                server.step()


def test_nonfinite_gradients_raise_on_request(topology):
    model = seeded(mlp)()
    exchange = daso.Exchange(nonfinite="raise")
    with daso.ParameterServer(model, sgd, topology=topology, exchange=exchange) as server:
        (batch_loss(model, 0, 0) * math.inf).backward()
        with pytest.raises(NonFiniteError, match="in step 0"):
            server.step()


def test_an_evaluation_leaves_parameters_alone(topology):
    rank = topology.rank
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology, staleness=None) as server:
        server.zero_grad()
        batch_loss(model, rank, 0).backward()
        server.step()
        before = [p.clone() for p in model.parameters()]
        with torch.no_grad():
            for _ in range(20):
                batch_loss(model, rank, 1)
                time.sleep(0.001)
        assert same(before, params(model))


def test_schedulers_drive_it(topology):
    rank, size = topology.rank, topology.world_size
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(server, 0.5)
        for step in range(4):
            server.zero_grad()
            batch_loss(model, rank, step).backward()
            server.step()
            scheduler.step()
        assert scheduler.get_last_lr() == [0.05 * 0.5**4]
    expected = sequential(seeded(mlp), sgd, size, 4, "sharded", lambda step: 0.05 * 0.5**step)
    assert same(params(model), expected)


@pytest.mark.parametrize(
    ("keywords", "text"), [({"mode": "all"}, "mode"), ({"push_every": -1}, "push_every")], ids=str
)
def test_bad_keywords_raise_before_anything_is_sent(topology, keywords, text):
    with pytest.raises(ConfigError, match=text):
        daso.ParameterServer(mlp(), sgd, topology=topology, **keywords)


def test_different_options_and_models_are_refused_on_all_ranks(topology):
    last = topology.rank == topology.world_size - 1
    with raises("options-differ-between-ranks"):
        daso.ParameterServer(mlp(), sgd, topology=topology, staleness=3 if last else 0)
    with pytest.raises(LayoutError):
        daso.ParameterServer(many() if last else mlp(), sgd, topology=topology)


def test_what_cannot_be_done_says_what_can(topology):
    with daso.ParameterServer(mlp(), sgd, topology=topology) as server:
        with raises("server-step-with-closure"):
            server.step(lambda: 0.0)
        with raises("server-parameters-are-fixed"):
            server.add_param_group({"params": []})
        with raises("server-cannot-be-copied"):
            copy.deepcopy(server)
    with raises("factory-ignores-parameters"):
        daso.ParameterServer(
            mlp(), lambda _: sgd([nn.Parameter(torch.zeros(1))]), topology=topology
        )


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_is_refused_with_the_remedy(topology, unscales):
    model, scaler = seeded(mlp)(), torch.amp.GradScaler("cpu", init_scale=64.0)
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        scaler.scale(batch_loss(model, topology.rank, 0)).backward()
        if unscales:
            scaler.unscale_(server)
        with pytest.raises(ConfigError, match=r"a GradScaler must .* use autocast .* daso\.DASO"):
            scaler.step(server)
        server.step()


@pytest.mark.nodes((1, 1))
def test_a_disabled_scaler_changes_nothing(topology):
    model, scaler = seeded(mlp)(), torch.amp.GradScaler("cpu", enabled=False)
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        for step in range(2):
            server.zero_grad()
            scaler.scale(batch_loss(model, topology.rank, step)).backward()
            scaler.step(server)
            scaler.update()
    assert same(params(model), sequential(seeded(mlp), sgd, topology.world_size, 2, "sharded"))


@pytest.mark.real_mpi
def test_nothing_stays_behind(topology):
    before = threading.active_count()
    for _ in range(3):
        train(topology, mlp, sgd, steps=1)
    assert threading.active_count() == before


@pytest.mark.real_mpi
@pytest.mark.parametrize("staleness", [0, None])
def test_bytes_on_the_wire_are_those_of_the_mode(topology, staleness, monkeypatch):
    queued, enqueue = [], SendQueue.enqueue

    def count(self, to, message):
        queued.append(message.payload.nbytes)
        enqueue(self, to, message)

    monkeypatch.setattr(SendQueue, "enqueue", count)
    size, steps = topology.world_size, 4
    numel = sum(p.numel() for p in wide_one().parameters())
    model_bytes = 4 * numel
    expected = {  # gradients there and rows back; rows to all
        "sharded": 2 * (size - 1) * model_bytes,
        "local_rows": (size - 1) * model_bytes,
    }
    for mode, least in expected.items():
        queued.clear()
        _, report, _ = train(topology, wide_one, sgd, steps=steps, mode=mode, staleness=staleness)
        sent = sum(topology.world_comm.allgather(report["bytes_sent"]))
        most = (steps + 1) * least  # the last rows go to all once more
        assert sent <= most + 1e5 * size * size
        # Newer rows may take the place of some that were queued. Closing meets once more.
        meetings = 0 if staleness == 0 else 2 * (least // 2 if mode == "sharded" else least)
        assert sum(topology.world_comm.allgather(sum(queued))) <= steps * least + meetings + 1000
        if staleness == 0:
            assert sent >= steps * least
        elif mode == "sharded":  # newer rows may replace some that wait, gradients never
            assert sent >= steps * least / 2


def test_what_would_be_wrong_without_a_word_is_refused(topology):
    rank = topology.rank
    model = seeded(mlp)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        server.zero_grad()
        x = torch.ones(2, 6)
        with raises("parameter-without-forward"):
            nn.functional.linear(x, model[0].weight).sum().backward()
        with raises("model-loaded-too-late"):
            model.load_state_dict(model.state_dict())
        batch_loss(model, rank, 0).backward()
        server.param_groups[0]["lr"] = 7.0
        with raises("group-changed-after-backward"):
            server.step()
        server.param_groups[0]["lr"] = 0.05
        server.step()
    model.load_state_dict(model.state_dict())  # it is free again


def test_a_forward_that_is_run_again_in_backward_is_refused(topology):
    rank = topology.rank

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            y = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
            return self.last(y)

    model = Again()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        batch_loss(model, rank, 0).backward()  # the model itself took all up
        server.step()
        server.zero_grad()
        with raises("parameters-changed-in-backward"):
            batch_loss(model, rank, 1).backward()
        server.step()


def test_layers_that_are_not_used_any_more_hold_no_memory(topology):
    rank = topology.rank
    model = seeded(Odd)()
    with daso.ParameterServer(model, sgd, topology=topology) as server:
        for step in range(20):
            server.zero_grad()
            generator = torch.Generator().manual_seed(step + rank)
            x = torch.randn(5, 6, generator=generator)
            model(x, sometimes=step == 0).tanh().mean().backward()
            server.step()
        rows = server._serving.service.rows._rows
        assert max(len(one) for layer in rows for one in layer.values()) <= 3


def test_it_closes_without_a_meeting_too(topology):
    model = seeded(mlp)()
    server = daso.ParameterServer(model, sgd, topology=topology)
    batch_loss(model, topology.rank, 0).backward()
    server.step()
    start = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - start < 5 * slowness()
    assert not server._serving.engine._thread.is_alive()


def test_without_staleness_uneven_steps_are_an_error_that_names_ranks(topology):
    rank = topology.rank
    model = seeded(mlp)()
    server = daso.ParameterServer(model, sgd, topology=topology, mode="local_rows")
    with pytest.raises(ExchangeError, match="same number of steps"):
        train_batches(server, model, rank, range(4 if rank == 0 else 3))
        server.synchronize()
    server.abandon()
    topology.world_comm.Barrier()


@pytest.mark.parametrize("staleness", [0, None])
def test_a_rank_that_does_not_come_to_synchronize_is_named(topology, rank_info, staleness):
    """Its serving thread answers, and says nothing of where the training thread is."""
    model = seeded(mlp)()
    exchange = daso.Exchange(timeout_seconds=0.3)
    server = daso.ParameterServer(
        model, sgd, topology=topology, staleness=staleness, exchange=exchange
    )
    batch_loss(model, rank_info.rank, 0).backward()
    server.step()
    if rank_info.rank == 0:
        text = "rank 0 waited for all ranks' last rows: every rank answers, but world rank 1 on"
        with pytest.raises(StallError, match=text):
            server.synchronize()
    topology.world_comm.Barrier()
    server.abandon()


@pytest.mark.nodes((1, 1), (2, 1))
def test_it_closes_after_one_rank_evaluated(topology):
    model = seeded(mlp)()
    exchange = daso.Exchange(timeout_seconds=5)
    server = daso.ParameterServer(model, sgd, topology=topology, exchange=exchange)
    batch_loss(model, topology.rank, 0).backward()
    server.step()
    server.synchronize()
    if topology.rank == 0:
        with torch.no_grad():
            batch_loss(model, 0, 1)
        with pytest.raises(CheckpointError, match="evaluated, since ranks synchronized"):
            server.state_dict()
    server.close()


@pytest.mark.nodes((1, 1))
def test_states_of_other_counts_of_steps_are_refused_where_all_go_together(topology):
    model = seeded(mlp)()
    how = {"topology": topology, "optimizer_state": "shared"}
    with daso.ParameterServer(model, sgd, staleness=None, **how) as server:
        train_batches(server, model, topology.rank, range(3 + 2 * topology.rank))
        server.synchronize()
        state = copy.deepcopy(server.state_dict())
    with daso.ParameterServer(model, sgd, **how) as server:
        with pytest.raises(CheckpointError, match="states are of 3 to 5"):
            server.load_state_dict(state)
        server.synchronize()


@pytest.mark.nodes((1, 1))
@pytest.mark.parametrize(
    "options", [{"elastic": True}, {"algorithm": "ring"}, {"step_restoration": "off"}], ids=str
)
def test_options_of_exchanges_that_it_would_ignore_are_refused(topology, options):
    with pytest.raises(ConfigError, match="of exchange only chunk_bytes"):
        daso.ParameterServer(
            seeded(mlp)(), sgd, topology=topology, exchange=daso.Exchange(**options)
        )


def test_a_parameter_that_is_trained_later_is_refused(topology):
    model = seeded(mlp)()
    model[0].weight.requires_grad_(False)
    server = daso.ParameterServer(model, sgd, topology=topology, staleness=0)
    batch_loss(model, topology.rank, 0).backward()
    server.step()
    server.synchronize()
    model[0].weight.requires_grad_(True)
    batch_loss(model, topology.rank, 1).backward()
    with pytest.raises(ConfigError, match=r"but 0\.weight was frozen when"):
        server.step()
    model[0].weight.requires_grad_(False)
    server.step()
    server.close()
