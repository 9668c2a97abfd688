"""Flows on ranks: as one process, bit for bit, or replayed from what the ranks logged."""

import math

import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy

from daso import flow
from daso.comm.topology import Topology
from daso.data import make_deductions, make_expressions, make_lists, make_molecules
from daso.errors import ConfigError, FlowError
from daso.examples import graphs, lists, trees

pytestmark = pytest.mark.mpi
WORLD = MPI.COMM_WORLD
WIDTH = 16
NEVER = 10**9


@pytest.fixture(scope="module")
def topology():
    """Nodes make no difference here: one way to cut the world is enough."""
    made = Topology()
    yield made
    made.free()


def sgd(params):
    return torch.optim.SGD(params, lr=0.002, momentum=0.9, weight_decay=1e-3)


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
    "perceptron": (perceptron, images(24)),
    "lists": (lambda batch=1: lists.build(WIDTH, batch), make_lists(24, seed=1)),
    "trees": (lambda batch=1: trees.build(WIDTH, batch), make_expressions(24, seed=1)),
    "deductions": (
        lambda batch=1: graphs.build("deductions", WIDTH, batch),
        make_deductions(16, seed=1),
    ),
    "molecules": (
        lambda batch=1: graphs.build("molecules", WIDTH, batch),
        make_molecules(16, seed=1),
    ),
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


def loss_of_image(parts, one):
    found = one[0].view(1, -1)
    for number in range(3):
        found = parts[f"layer {number}"](found)
    return cross_entropy(found, one[1])


def loss_of_list(parts, one):
    state = torch.zeros(1, WIDTH)
    for token in one.tokens:
        state = parts["cell"](parts["words"](token.view(1)), state)
    return cross_entropy(parts["answer"](state), one.answer)


def loss_of_tree(parts, one):
    """Go level by level, as messages do: whatever has both its children is computed next."""
    found, total = {}, 0.0
    todo = [(leaf, parts["leaf"](torch.tensor([one.labels[leaf]]))) for leaf in one.leaves]
    sides: dict[int, dict[bool, tuple]] = {}
    while todo:
        node, state = todo.pop(0)
        found[node] = state
        parent = one.parents[node]
        if parent < 0:
            continue
        both = sides.setdefault(parent, {})
        both[one.lefts[node]] = state
        if len(both) == 2:
            cell = parts[f"cell {one.labels[parent]}"]
            todo.append((parent, cell(*both[True], *both[False])))
    for node, (state, _) in found.items():
        total = total + cross_entropy(parts["value"](state), one.values[node].view(1))
    return total


def loss_of_graph(task):
    _, _, kinds, first, loss = graphs.TASKS[task]

    def of(parts, one):
        states = parts["begin"](first(one))
        for _ in range(graphs.ROUNDS):
            sums = []
            for kind in range(kinds):
                edges = one.edges()[kind]
                if edges:
                    sent = parts[f"edges {kind}"](states[[a for a, _ in edges]])
                    to = torch.tensor([b for _, b in edges])
                    sums.append(torch.zeros_like(states).index_add(0, to, sent))
            states = parts["cell"](torch.stack(sums).sum(0), states)
        return loss(flow.Item(one, (), ()), parts["score"](states))[0]

    return of


LOSSES = {
    "perceptron": loss_of_image,
    "lists": loss_of_list,
    "trees": loss_of_tree,
    "deductions": loss_of_graph("deductions"),
    "molecules": loss_of_graph("molecules"),
}


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
        loss = LOSSES[name](parts, one)
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

# Between ranks, messages of a tree or graph arrive in any order, in which gradients are then added.
CHAINS = ["perceptron", "lists"]


@pytest.mark.parametrize("name", FLOWS if WORLD.size == 1 else CHAINS)
def test_one_at_once_is_training_one_by_one_bit_for_bit(topology, name):
    graph, _, _ = trained(name, topology, max_active_keys=1)
    build, instances = FLOWS[name]
    other = build()
    parts = modules(other)
    optimizer = sgd(parameters(other))
    for one in instances:
        optimizer.zero_grad()
        LOSSES[name](parts, one).backward()
        optimizer.step()
    close = name not in CHAINS  # a tree's or graph's parts may be added in another order
    for a, b in zip(parameters(graph), parameters(other), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6) if close else torch.equal(a, b)


@pytest.mark.parametrize("most", [1, 3, 16])
@pytest.mark.parametrize("name", FLOWS)
def test_without_updates_gradients_are_those_of_one_process(topology, name, most):
    never = flow.Updates(min_update_interval=NEVER)
    build, instances = FLOWS[name]
    graph, (epoch,), _ = trained(
        name, topology, make=plain, max_active_keys=most, updates=never, batch=4
    )
    other = build()
    losses, sums, counts = gradients_of(name, other, instances)
    assert epoch.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)
    start = parameters(build())
    for a, before, total, count in zip(parameters(graph), start, sums, counts, strict=True):
        # A layer takes the mean over the instances that came to it.
        assert torch.allclose(before - a, total / max(1, count), rtol=1e-3, atol=2e-6)
    assert epoch.in_flight <= most


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize(
    "keywords",
    [
        {"max_active_keys": 4},
        {"max_active_keys": 8, "batch": 4},
        {"updates": flow.Updates(min_update_interval=5, unit="message")},
        {"updates": flow.Updates(min_update_interval=3, weights="stashed", damped=True)},
        {"batch": 3, "updates": flow.Updates(unit="message", weights="stashed")},
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


@pytest.mark.parametrize("name", FLOWS)
def test_no_more_are_under_way_than_may_be(topology, name):
    _, _, logs = trained(name, topology, max_active_keys=3)
    # On each rank, between what was computed first for an instance and when it was finished.
    for log in logs[0]:
        begun, over = set(), set()
        for did in log.did:
            (begun if did.node >= 0 else over).update(key[0] for key in did.keys)
            assert len(begun - over) <= 3


@pytest.mark.parametrize("name", FLOWS)
def test_an_evaluation_is_the_same_wherever_nodes_are(topology, name):
    build, instances = FLOWS[name]
    graph = build()
    parts = modules(graph)
    with flow.Runtime(graph, sgd, topology=topology) as runtime:
        found = runtime.evaluate(instances)
    with torch.no_grad():
        losses = [float(LOSSES[name](parts, one)) for one in instances]
    assert found.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    assert found.updates == 0
    assert_equal(graph, build())


# --- beside training ------------------------------------------------------------------------------


def test_a_runtime_goes_on_from_its_state(topology):
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


def test_ranks_that_differ_are_told(topology):
    if WORLD.size == 1:
        return
    build, instances = FLOWS["lists"]
    with pytest.raises(ConfigError, match="same keywords"):
        flow.Runtime(build(), sgd, topology=topology, max_active_keys=2 + WORLD.rank)
    with flow.Runtime(build(), sgd, topology=topology) as runtime:
        mine = instances[::-1] if WORLD.rank else instances
        with pytest.raises(FlowError, match="same instances"):
            runtime.train_epoch(mine)
        runtime.train_epoch(instances)


def test_nodes_are_where_the_caller_says(topology):
    build, instances = FLOWS["perceptron"]
    last = WORLD.size - 1
    with flow.Runtime(build(), sgd, topology=topology, placement={"layer 1": last}) as runtime:
        runtime.train_epoch(instances)
        assert runtime.placement["layer 1"] == (last,)
        assert ("layer 1" in runtime.optimizers) == (WORLD.rank == last)
