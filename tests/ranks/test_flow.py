"""Flows on ranks: as one process, bit for bit, or replayed from what the ranks logged."""

import math
import time
from functools import partial

import pytest
import torch
from benchmarks.plain_torch import LOSSES, MAKERS, build_flow, layers_of
from expected_errors import raises
from mpi4py import MPI
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from daso import flow
from daso.comm.p2p.packets import Messages
from daso.flow.messages import NO_ADMISSION, Message, Post
from daso.flow.plan import ranks_of_lane

pytestmark = pytest.mark.nodes((2,), (4,))  # nodes make no difference to flows
WORLD = MPI.COMM_WORLD
WIDTH = 16
NEVER = 10**9


def sgd(params):
    return torch.optim.SGD(params, lr=0.001, momentum=0.9, weight_decay=1e-3)


def plain(params):
    return torch.optim.SGD(params, lr=1.0)


def perceptron(batch=1):
    torch.manual_seed(0)
    graph = flow.Graph()
    found = graph.source(lambda one: one[0].view(1, -1))
    for number in range(3):
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        found = graph.layer(layer, found, name=f"layer {number}", batch=batch)
    graph.loss(lambda item, y: cross_entropy(y, item.instance[1]), found)
    return graph


def images(count):
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, generator=draw), torch.randint(8, (1,), generator=draw))
        for _ in range(count)
    ]


FLOWS = {
    "perceptron": (perceptron, images(12)),
    **{
        task: (partial(build_flow, task, WIDTH), MAKERS[task](8, seed=1))
        for task in ("lists", "trees", "deductions", "molecules")
    },
}


def modules(graph):
    return {node.name: node.call for node in graph.nodes if node.kind == "layer"}


def parameters(graph):
    return [p for module in modules(graph).values() for p in module.parameters()]


def assert_equal(graph, other):
    assert all(bool(p.isfinite().all()) for p in parameters(graph))
    for a, b in zip(parameters(graph), parameters(other), strict=True):
        assert torch.equal(a, b)


# --- plain programs that do the same --------------------------------------------------------------


class Uses:
    """Layers as they are used, each use with parameters of its own.

    The gradients of a layer's uses can then be added in any order, to the last bit.
    """

    def __init__(self, graph):
        self.modules, self.uses = modules(graph), {}

    def __call__(self, name, *inputs, at=()):
        module = self.modules[name]
        own = {key: p.detach().requires_grad_() for key, p in module.named_parameters()}
        assert (name, at) not in self.uses
        self.uses[name, at] = list(own.values())
        outputs = functional_call(module, own, inputs)
        for one in outputs if isinstance(outputs, tuple) else (outputs,):
            if one.requires_grad:
                one.register_hook(torch.Tensor.contiguous)  # as a message's: sums differ otherwise
        return outputs

    def give_gradients(self, loss, order):
        """Add the gradients of uses, of which the order has each once, into the parameters'."""
        assert sorted(order) == sorted(self.uses)
        apart = [p for use in order for p in self.uses[use]]
        grads = iter(torch.autograd.grad(loss, apart, allow_unused=True))
        for name, _ in order:
            for p in self.modules[name].parameters():
                grad = next(grads)
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad + grad


def loss_of_image(layer, one, _width):
    found = one[0].view(1, -1)
    for number in range(3):
        found = layer(f"layer {number}", found)
    return cross_entropy(found, one[1])


def loss_of(name, layer, one):
    return {"perceptron": loss_of_image, **LOSSES}[name](layer, one, WIDTH)


def trained(name, topology, epochs=1, make=sgd, batch=1, **keywords):
    """Train, with all ranks; return the graph, epochs and logs of all ranks."""
    build, instances = FLOWS[name]
    graph = build(batch)
    with flow.Runtime(graph, make, topology=topology, **keywords) as runtime:
        runtime.keep_log()
        found, logs = [], []
        for _ in range(epochs):
            found.append(runtime.train_epoch(instances))
            logs.append(WORLD.allgather(runtime.logged()))
    return graph, found, logs


def gradients_of(name, graph, instances):
    """Return all losses, sums of gradients, and how many instances came to each one's layer."""
    parts, tensors = modules(graph), parameters(graph)
    layer_of = [name for name, module in parts.items() for _ in module.parameters()]
    losses, sums, came = [], [torch.zeros_like(p) for p in tensors], dict.fromkeys(parts, 0)
    for one in instances:
        loss = loss_of(name, layers_of(graph), one)
        losses.append(float(loss.detach()))
        grads = torch.autograd.grad(loss, tensors, allow_unused=True)
        for layer in {
            layer for layer, grad in zip(layer_of, grads, strict=True) if grad is not None
        }:
            came[layer] += 1
        for total, grad in zip(sums, grads, strict=True):
            if grad is not None:
                total += grad  # noqa: PLW2901 - in place
    counts = [came[layer] for layer in layer_of]
    return losses, sums, counts


# --- equal ----------------------------------------------------------------------------------------


def orders(logs, graph):
    """Return of each instance which uses of layers gave gradients, in their order on their rank."""
    found = {}
    for log in logs:
        for did in log.tasks:
            if did.back and graph.nodes[did.node].kind == "layer":
                for number, *state in did.keys:
                    use = graph.nodes[did.node].name, tuple(state)
                    found.setdefault(number, []).append(use)
    return found


@pytest.mark.parametrize("name", FLOWS)
def test_one_at_once_is_training_one_by_one_bit_for_bit(topology, name):
    graph, _, (logs,) = trained(name, topology, max_active_keys=1)
    build, instances = FLOWS[name]
    other = build()
    optimizer = sgd(parameters(other))
    order = orders(logs, graph)
    for number, one in enumerate(instances):
        optimizer.zero_grad()
        uses = Uses(other)
        uses.give_gradients(loss_of(name, uses, one), order[number])
        optimizer.step()
    assert_equal(graph, other)


# The plain programs above go the usual way: a chain's order is autograd's.
@pytest.mark.parametrize("name", ["perceptron", "lists"])
def test_a_chain_one_at_once_is_a_plain_program_bit_for_bit(topology, name):
    graph, _, _ = trained(name, topology, max_active_keys=1)
    build, instances = FLOWS[name]
    other = build()
    optimizer = sgd(parameters(other))
    for one in instances:
        optimizer.zero_grad()
        loss_of(name, layers_of(other), one).backward()
        optimizer.step()
    assert_equal(graph, other)


@pytest.mark.parametrize(("most", "shuffle"), [(1, False), (3, True), (8, False), (8, True)])
@pytest.mark.parametrize("name", FLOWS)
def test_without_updates_gradients_are_those_of_one_process(topology, name, most, shuffle):
    never = flow.Updates(min_update_interval=NEVER)
    build, instances = FLOWS[name]
    keywords = {"max_active_keys": most, "updates": never, "shuffle": shuffle}
    graph, (epoch,), _ = trained(name, topology, make=plain, batch=4, **keywords)
    other = build()
    losses, sums, counts = gradients_of(name, other, instances)
    assert epoch.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    start = parameters(build())
    for a, before, total, count in zip(parameters(graph), start, sums, counts, strict=True):
        # A layer takes the mean over the instances that came to it.
        assert torch.allclose(before - a, total / max(1, count), rtol=1e-3, atol=2e-6)
    assert epoch.in_flight <= most


@pytest.mark.parametrize(
    "name",
    [
        name if name == "molecules" else pytest.param(name, marks=pytest.mark.later("another flow"))
        for name in FLOWS
    ],
)
@pytest.mark.parametrize(
    "keywords",
    [
        {"max_active_keys": 4},
        {"max_active_keys": 8, "batch": 4},
        {"updates": flow.Updates(min_update_interval=5, unit="message")},
        {
            "updates": flow.Updates(
                min_update_interval=3, weights="stashed", scale_by_staleness=True
            )
        },
        {"batch": 3, "updates": flow.Updates(unit="message", weights="stashed")},
        {"shuffle": True, "max_active_keys": 8},
    ],
    ids=str,
)
def test_a_training_is_replayed_to_the_same_bits(topology, name, keywords):
    graph, _, logs = trained(name, topology, epochs=2, **keywords)
    build, instances = FLOWS[name]
    other = build(keywords.get("batch", 1))
    flow.replay(logs, other, sgd, [instances] * 2)
    assert_equal(graph, other)


@pytest.mark.parametrize("name", ["lists", "trees"])
def test_replicas_are_averaged_and_replayed(topology, name):
    build, instances = FLOWS[name]
    copies = dict.fromkeys(modules(build()), WORLD.size)
    graph, _, logs = trained(name, topology, epochs=2, replicas=copies)
    other = build()
    flow.replay(logs, other, sgd, [instances] * 2)
    assert_equal(graph, other)
    layers = [node.index for node in graph.nodes if node.kind == "layer"]
    assert all(len(logs[0][0].ranks_of[node]) == WORLD.size for node in layers)
    for log in logs[0]:  # nobody is told of what others do
        told = {did.keys[0][0] for did in log.tasks if did.node < 0}
        lanes = enumerate(logs[0][0].lanes)
        assert told == {n for n, lane in lanes if log.rank in ranks_of_lane(log.ranks_of, lane)}
    assert set(logs[0][0].lanes) == set(range(WORLD.size))


@pytest.mark.parametrize("name", FLOWS)
def test_at_most_max_active_keys_instances_are_under_way(topology, name):
    _, _, logs = trained(name, topology, max_active_keys=3)
    # On each rank, between what was computed first for an instance and when it was finished.
    for log in logs[0]:
        begun, over = set(), set()
        for did in log.tasks:
            (begun if did.node >= 0 else over).update(key[0] for key in did.keys)
            assert len(begun - over) <= 3


@pytest.mark.parametrize("name", FLOWS)
def test_an_evaluation_is_the_same_wherever_nodes_are(topology, name):
    build, instances = FLOWS[name]
    graph = build()
    with flow.Runtime(graph, sgd, topology=topology) as runtime:
        found = runtime.evaluate(instances)
    with torch.no_grad():
        losses = [float(loss_of(name, layers_of(graph), one)) for one in instances]
    assert found.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    assert found.updates == 0
    assert_equal(graph, build())


class Counted(Messages):
    """Counts what MPI sends."""

    starts = 0

    def start(self, to, packet):
        self.starts += 1
        return super().start(to, packet)


def test_queued_messages_are_sent_in_one_packet_in_order():
    sent = [
        Message(n, False, 0, (n,), (torch.full((3,), float(n)),), NO_ADMISSION) for n in range(50)
    ]
    comm = WORLD.Dup()
    counted = Counted(comm)
    others = [rank for rank in range(WORLD.size) if rank != WORLD.rank]
    post = Post(dict.fromkeys(others, counted), torch.device("cpu"))
    for rank in others:
        for one in sent:
            post.put(rank, one)
    post.send()
    assert counted.starts == len(others)
    came = []
    while len(came) < len(others) * len(sent):
        came += post.arrived()
    post.drain()
    comm.Barrier()
    comm.Free()
    numbers = [message.node for message in came]
    assert numbers == list(range(50)) * len(others)  # a packet is unpacked as a whole
    assert all(torch.equal(one.payload[0], sent[one.node].payload[0]) for one in came)


# --- beside training ------------------------------------------------------------------------------


def test_a_runtime_resumes_from_its_state(topology):
    build, instances = FLOWS["perceptron"]
    whole, _, _ = trained("perceptron", topology, epochs=2, max_active_keys=1)
    graph = build()
    with flow.Runtime(graph, sgd, topology=topology, max_active_keys=1) as runtime:
        runtime.train_epoch(instances)
        state = runtime.state_dict()
    other = build()
    with flow.Runtime(other, sgd, topology=topology, max_active_keys=1) as runtime:
        runtime.load_state_dict(state)
        runtime.train_epoch(instances)
    assert_equal(whole, other)


def test_ranks_that_differ_are_refused(topology):
    build, instances = FLOWS["lists"]
    with raises("flows-differ-between-ranks"):
        flow.Runtime(build(), sgd, topology=topology, max_active_keys=2 + WORLD.rank)
    with flow.Runtime(build(), sgd, topology=topology) as runtime:
        mine = instances[::-1] if WORLD.rank else instances
        with raises("instances-differ-between-ranks"):
            runtime.train_epoch(mine)
        runtime.train_epoch(instances)


def test_nodes_are_where_the_caller_says(topology):
    build, instances = FLOWS["perceptron"]
    last = WORLD.size - 1
    with flow.Runtime(build(), sgd, topology=topology, placement={"layer 1": last}) as runtime:
        runtime.train_epoch(instances)
        assert runtime.placement["layer 1"] == (last,)
        assert ("layer 1" in runtime.optimizers) == (WORLD.rank == last)


@pytest.mark.nodes((2,), (3,))
def test_a_rank_without_nodes_waits_as_long_as_the_others_compute(topology):
    graph = flow.Graph()
    y = graph.layer(nn.Linear(8, 8), graph.source(lambda one: one[0].view(1, -1)), name="l")

    def slow(item, y):
        time.sleep(0.05)
        return nn.functional.cross_entropy(y, item.instance[1])

    graph.loss(slow, y, name="end")
    where = {"l": 0, "end": 0}
    options = {"topology": topology, "placement": where, "timeout_seconds": 1.2}
    with flow.Runtime(graph, sgd, **options) as runtime:
        assert runtime.train_epoch(images(60)).instances == 60


@pytest.mark.nodes((2,), (3,))
def test_a_state_of_another_rank_is_refused_by_all(topology):
    graph = flow.Graph()
    y = graph.layer(nn.Linear(8, 8), graph.source(lambda one: one[0].view(1, -1)), name="l")
    graph.loss(lambda item, y: nn.functional.cross_entropy(y, item.instance[1]), y, name="end")
    with flow.Runtime(graph, sgd, topology=topology, placement={"l": 1}) as runtime:
        runtime.train_epoch(images(4))
        state = topology.world_comm.bcast(runtime.state_dict())
        with raises("state-of-other-rank"):
            runtime.load_state_dict(state)
