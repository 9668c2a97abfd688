"""A flow on every node, kept in step by `daso.DASO`, is a plain program that it wraps."""

import copy

import pytest
import torch
from expected_errors import raises
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy
from training import sgd

import daso
from daso import flow
from daso.comm.topology import Topology
from daso.errors import CheckpointError, ConfigError

WORLD = MPI.COMM_WORLD
pytestmark = pytest.mark.ranks(2, 4)
EVEN = {2: [1, 2], 4: [2]}.get(WORLD.size, [])
WIDTH, COUNT = 8, 24
POLICIES = {
    "every batch": daso.Fixed(1, 0),
    "blocking": daso.Fixed(3, 0),
    "in the background": daso.Fixed(4, 1),
    "after warming up": daso.Fixed(4, 2, warmup=5),
}


@pytest.fixture(params=EVEN, ids=lambda size: f"{size} a node")
def nodes(request):
    made = Topology(ranks_per_node=request.param)
    yield made
    made.free()


def layers():
    torch.manual_seed(WORLD.rank)  # all begin with world rank 0's
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]


def build(parts):
    graph = flow.Graph()
    found = graph.source(lambda one: one[0])
    for number, part in enumerate(parts):
        found = graph.layer(part, found, name=f"layer {number}")
    graph.loss(lambda item, y: cross_entropy(y, item.instance[1]), found)
    return graph


def images(node, count=COUNT):
    draw = torch.Generator().manual_seed(node)
    return [
        (torch.randn(1, WIDTH, generator=draw), torch.randint(WIDTH, (1,), generator=draw))
        for _ in range(count)
    ]


def parameters(parts):
    return [p.detach().clone() for part in parts for p in part.parameters()]


def plain_sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def train(topology, policy, batch=1, make=sgd, **keywords):
    parts = layers()

    def between(moves, across):
        return daso.DASO(moves, topology=across, policy=policy, wire="fp32")

    with flow.Runtime(
        build(parts),
        make,
        topology=topology,
        between_nodes=between,
        instances_per_batch=batch,
        **keywords,
    ) as runtime:
        for _ in range(2):
            runtime.train_epoch(images(topology.node))
    return parameters(parts)


def train_plainly(topology, policy, make):
    """Let one rank of each node train all layers, wrapped as ever."""
    rank_info = topology.rank_info
    heads = topology.world_comm.Split(int(rank_info.local_rank > 0), rank_info.rank)
    found = None
    if rank_info.local_rank == 0:
        across = Topology(heads, ranks_per_node=1)
        parts = layers()
        whole = nn.Sequential(*parts)
        inner = make(whole.parameters())
        with daso.DASO(inner, topology=across, policy=policy, wire="fp32") as optimizer:
            for _ in range(2):
                for image, label in images(rank_info.node):
                    optimizer.zero_grad()
                    cross_entropy(whole(image), label).backward()
                    optimizer.step()
                optimizer.end_epoch(0.0)
        found = parameters(parts)
        across.free()
    heads.Free()
    return topology.node_comm.bcast(found)


@pytest.mark.parametrize("name", POLICIES)
def test_one_at_once_is_a_plain_program_wrapped(nodes, name):
    policy = POLICIES[name]
    spread = {f"layer {n}": n % nodes.local_size for n in range(4)}
    # Where gradients are averaged, ours are what a step has moved, rounded once more; momentum
    # stays each node's own.
    exact = nodes.nodes == 1 or not (policy.warmup or policy == daso.Fixed(1, 0))
    make = sgd if exact else plain_sgd
    ours = train(nodes, policy, make=make, placement=spread, max_active_keys=1)
    plain = train_plainly(nodes, policy, make)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b) if exact else torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [*POLICIES, "auto"])
@pytest.mark.parametrize(
    ("updates", "batch"),
    [
        (flow.Updates(min_update_interval=3), 5),
        (flow.Updates(weights="stashed"), 5),
        (flow.Updates(min_update_interval=16), 4),  # what is left is taken in after the last batch
    ],
    ids=str,
)
def test_all_ranks_end_with_the_same(nodes, name, updates, batch):
    policy = POLICIES.get(name, daso.Auto())
    copies = {"layer 1": nodes.local_size}
    ours = train(nodes, policy, batch, replicas=copies, updates=updates, max_active_keys=8)
    for p in ours:
        assert bool(p.isfinite().all())
        assert all(torch.equal(p, other) for other in WORLD.allgather(p))


class CountsCalls(nn.Module):
    """A layer with a buffer that forward changes, and a parameter that nobody trains."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().mean(0)
        return self.linear(x) + self.frozen


def test_buffers_and_frozen_parameters_end_the_same_too(nodes):
    torch.manual_seed(WORLD.rank)
    parts = [CountsCalls() for _ in range(3)]

    def between(moves, across):
        return daso.DASO(moves, topology=across, policy=daso.Fixed(4, 1))

    with flow.Runtime(build(parts), sgd, topology=nodes, between_nodes=between) as runtime:
        runtime.train_epoch(images(nodes.node))
    for part in parts:
        for tensor in part.state_dict().values():
            assert all(torch.equal(tensor, other) for other in WORLD.allgather(tensor))
        assert part.seen.abs().sum() > 0


def test_evaluating_changes_nothing(nodes):
    def between(moves, across):
        return daso.DASO(moves, topology=across, policy=daso.Fixed(4, 2), wire="fp32")

    def trained(*, tests):
        parts = layers()
        keywords = {"max_active_keys": 1, "instances_per_batch": 5, "between_nodes": between}
        with flow.Runtime(build(parts), sgd, topology=nodes, **keywords) as runtime:
            for _ in range(2):
                found = runtime.train_epoch(images(nodes.node))
                assert found.instances == nodes.nodes * COUNT
                assert found == WORLD.bcast(found)
                if tests:
                    before = parameters(parts)
                    tested = runtime.evaluate(images(9, count=17))
                    assert tested == WORLD.bcast(tested)
                    assert all(map(torch.equal, before, parameters(parts)))
        return parameters(parts)

    assert all(map(torch.equal, trained(tests=False), trained(tests=True)))


def test_a_policy_gets_epochs_and_learning_rates(nodes):
    made = []

    def between(moves, across):
        policy = daso.Plateau(epochs=9, warmup=1, cooldown=1, max_skip=4)
        made.append((moves, daso.DASO(moves, topology=across, policy=policy)))
        return made[-1][1]

    placement = {f"layer {n}": n % nodes.local_size for n in range(4)}
    keywords = {"placement": placement, "between_nodes": between, "instances_per_batch": 4}
    with flow.Runtime(build(layers()), sgd, topology=nodes, **keywords) as runtime:
        for _ in range(2):
            runtime.train_epoch(images(nodes.node))
        for moves, optimizer in made:
            _, skip, _ = optimizer.report()["skip_history"][-1]
            assert skip == 4
            assert moves.param_groups[0]["lr"] == 0.05


def test_a_state_of_a_flow_alone_is_refused_on_all_ranks(nodes):
    alone, beside = layers(), layers()
    with flow.Runtime(build(alone), sgd, topology=nodes) as runtime:
        runtime.train_epoch(images(0))
        state = runtime.state_dict()

    def between(moves, across):
        return daso.DASO(moves, topology=across)

    with flow.Runtime(build(beside), sgd, topology=nodes, between_nodes=between) as runtime:
        if WORLD.rank < WORLD.size - 1:
            state = {**state, "beside": {}}
        with pytest.raises(CheckpointError, match="state must be that of"):
            runtime.load_state_dict(state)


@pytest.mark.parametrize("nodes", EVEN[-1:], indirect=True)
@pytest.mark.ranks(2)
def test_one_node_is_a_flow_alone(nodes):
    ours = train(nodes, daso.Fixed(1, 0), max_active_keys=1, batch=2)
    parts = layers()
    with flow.Runtime(build(parts), sgd, topology=nodes, max_active_keys=1) as runtime:
        for _ in range(2):
            runtime.train_epoch(images(0))
    assert all(torch.equal(a, b) for a, b in zip(ours, parameters(parts), strict=True))


def test_it_resumes_from_its_state(nodes, caplog):
    def between(moves, across):
        return daso.DASO(moves, topology=across, policy=daso.Fixed(4, 1), wire="fp32")

    def opened(parts):
        keywords = {"max_active_keys": 1, "instances_per_batch": 3, "between_nodes": between}
        return flow.Runtime(build(parts), sgd, topology=nodes, **keywords)

    mine = images(nodes.node)
    whole, other = layers(), layers()
    with opened(whole) as runtime:
        runtime.train_epoch(mine)
        state = copy.deepcopy(runtime.state_dict())
        runtime.train_epoch(mine)
    with opened(other) as runtime:
        runtime.train_epoch(images(7))  # whatever it did before
        runtime.load_state_dict(state)
        runtime.train_epoch(mine)
    for a, b in zip(parameters(whole), parameters(other), strict=True):
        assert torch.equal(a, b)
    assert "it is unknown whether" not in caplog.text  # of an optimizer that no user made


def test_nodes_with_different_numbers_of_instances_are_refused(nodes):
    def between(moves, across):
        return daso.DASO(moves, topology=across)

    with flow.Runtime(build(layers()), sgd, topology=nodes, between_nodes=between) as runtime:
        with pytest.raises(ConfigError, match="leave between_nodes out"):
            runtime.keep_log()
        if nodes.nodes > 1:
            with raises("instances-uneven-on-nodes"):
                runtime.train_epoch(images(0, count=3 + nodes.node))


@pytest.mark.ranks(4)
def test_nodes_must_be_as_large():
    uneven = Topology(ranks_per_node=(WORLD.size - 1, 1))
    with pytest.raises(ConfigError, match="the same number of ranks on every node"):
        flow.Runtime(build(layers()), sgd, topology=uneven, between_nodes=daso.DASO)
    uneven.free()
