"""Ways to train where the control flow depends on the instance: flows, and plain torch programs."""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import daso
from benchmarks.plain_torch import LOSSES, Call, build_flow, layers_of
from daso.comm.mpi import load
from daso.comm.topology import Topology

__all__ = [
    "BATCHES",
    "EAGER",
    "EAGER_ALL",
    "LAYOUTS",
    "Contender",
    "Flow",
    "adam",
    "alone",
    "flow_name",
    "make_contender",
    "plain_names",
    "rest",
    "seeded",
]

EAGER = "eager, one by one"
EAGER_ALL = "eager on all ranks, gradients averaged"
EAGER_2, GRU, BATCHES = "eager, 2 BLAS threads", "nn.GRU, one by one", "batches of one length"
REST_SECONDS = 1e-3
LAYOUTS = ("replicas", "spread", "1 rank")


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all contenders."""
    return torch.optim.Adam(params, lr=2e-3)


def seeded(task: str, width: int, batch: int, seed: int) -> "daso.flow.Graph":
    """Return a flow whose parameters are drawn from a seed."""
    graph = build_flow(task, width, batch)
    torch.manual_seed(seed)
    for node in graph.nodes:
        for module in node.call.modules() if node.kind == "layer" else ():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return graph


def rest(topology: Topology) -> None:
    """Wait for all ranks, and take no core for it. Collective over the world; blocking."""
    everybody = topology.world_comm.Ibarrier()
    while not everybody.Test():
        time.sleep(REST_SECONDS)


def alone(topology: Topology) -> Topology:
    """Return a topology of this rank only. Collective over the world; blocking."""
    own = topology.world_comm.Split(topology.rank, 0)
    found = Topology(own, ranks_per_node=1)
    own.Free()
    return found


class Contender(Protocol):
    """A way to train."""

    graph: "daso.flow.Graph"

    def train(self, instances: Sequence[Any]) -> None:
        """Train with instances, in their order. Collective over the world; blocking."""
        ...

    def test(self, instances: Sequence[Any]) -> "daso.flow.Epoch | None":
        """Return how good it is; None where nothing was computed. Collective; blocking."""
        ...

    def close(self) -> None:
        """Give back what it holds. Collective over the world; blocking."""
        ...


# Goes through instances, and calls what it is given when it is time for an update.
Program = Callable[[Sequence[Any], Callable[[], None]], None]


class _Plain:
    """A plain program, whose layers a flow of one rank tests.

    Args:
        graph: Whose layers these are.
        topology: Of the world.
    """

    def __init__(self, graph: "daso.flow.Graph", topology: Topology) -> None:
        self.graph, self._world = graph, topology
        self._own = alone(topology)
        self._tested = daso.flow.Runtime(graph, adam, topology=self._own)

    def test(self, instances: Sequence[Any]) -> "daso.flow.Epoch | None":
        """Return how good it is, on rank 0."""
        found = self._tested.evaluate(instances) if self._world.rank == 0 else None
        rest(self._world)
        return found

    def close(self) -> None:
        """Give communicators back."""
        self._tested.close()
        self._own.free()


class _Alone(_Plain):
    """A plain program on world rank 0, with all of the machine's cores; the others rest.

    Args:
        graph: Whose layers it is tested with.
        program: Trains.
        params: What is trained.
        threads: Of BLAS.
        topology: Of the world.
    """

    def __init__(
        self,
        graph: "daso.flow.Graph",
        program: Program,
        params: list[nn.Parameter],
        threads: int,
        topology: Topology,
    ) -> None:
        super().__init__(graph, topology)
        self._program, self._threads = program, threads
        self._optimizer = adam(params)

    def train(self, instances: Sequence[Any]) -> None:
        """Train, on rank 0."""
        if self._world.rank == 0:
            cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
            torch.set_num_threads(self._threads)
            self._program(instances, self._update)
            torch.set_num_threads(threads)
            os.sched_setaffinity(0, cores)
        rest(self._world)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class _Together(_Plain):
    """The plain program on every rank: each takes its share of an update, and gradients are added.

    Args:
        task: What is learned.
        width: Of states.
        interval: Instances of an update, of all ranks together.
        seed: Of the parameters.
        topology: Of the world.
    """

    def __init__(self, task: str, width: int, interval: int, seed: int, topology: Topology) -> None:
        super().__init__(seeded(task, width, 1, seed), topology)
        self._interval = interval
        layer, loss_of = layers_of(self.graph), LOSSES[task]
        self._loss_of: Callable[[Any], torch.Tensor] = lambda one: loss_of(layer, one, width)
        params = [p for n in self.graph.nodes if n.kind == "layer" for p in n.call.parameters()]
        self._optimizer = adam(params)
        self._grads = torch.zeros(sum(p.numel() for p in params))
        parts = self._grads.split([p.numel() for p in params])
        for param, part in zip(params, parts, strict=True):
            param.grad = part.view_as(param)

    def train(self, instances: Sequence[Any]) -> None:
        """Train."""
        rank, ranks = self._world.rank, self._world.world_size
        for some in _chunks(instances, self._interval):
            for one in some[rank::ranks]:
                loss = self._loss_of(one)
                (loss / len(some)).backward()
                loss.item()
            self._world.world_comm.Allreduce(load().IN_PLACE, self._grads.numpy())
            self._optimizer.step()
            self._grads.zero_()
        rest(self._world)


def _chunks(instances: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [instances[at : at + size] for at in range(0, len(instances), size)]


def _one_by_one(loss_of: Callable[[Any], torch.Tensor], interval: int) -> Program:
    def go(instances: Sequence[Any], update: Callable[[], None]) -> None:
        for some in _chunks(instances, interval):
            for one in some:
                loss = loss_of(one)
                (loss / len(some)).backward()
                loss.item()  # somebody looks at it, as a flow does
            update()

    return go


def _of_one_length(layer: Call, width: int, interval: int) -> Program:
    """Lists of one length are a batch."""

    def go(instances: Sequence[Any], update: Callable[[], None]) -> None:
        by_length = defaultdict(list)
        for one in instances:
            by_length[len(one.tokens)].append(one)
        batches = [some for same in by_length.values() for some in _chunks(same, interval)]
        random.Random(0).shuffle(batches)
        for some in batches:
            states = torch.zeros(len(some), width)
            for column in torch.stack([one.tokens for one in some]).T:
                states = layer("cell", layer("words", column), states)
            answers = torch.cat([one.answer for one in some])
            loss = cross_entropy(layer("answer", states), answers)
            loss.backward()
            loss.item()
            update()

    return go


def _gru(graph: "daso.flow.Graph", width: int) -> tuple[Callable[[Any], torch.Tensor], nn.Module]:
    """Return the loss of a list that goes through torch's own loop, and what is trained."""
    parts = {n.name: n.call for n in graph.nodes if n.kind == "layer"}
    words, answer, gru = parts["words"], parts["answer"], nn.GRU(width, width)

    def loss_of(one: Any) -> torch.Tensor:
        states, _ = gru(words(one.tokens)[:, None])
        return cross_entropy(answer(states[-1]), one.answer)

    return loss_of, nn.ModuleList([words, answer, gru])


def _plain(
    task: str, name: str, width: int, interval: int, seed: int, topology: Topology
) -> _Alone:
    graph = seeded(task, width, 1, seed)
    layer = layers_of(graph)
    params = [p for n in graph.nodes if n.kind == "layer" for p in n.call.parameters()]
    if name == BATCHES:
        program = _of_one_length(layer, width, interval)
    elif name == GRU:
        loss_of, whole = _gru(graph, width)
        program, params = _one_by_one(loss_of, interval), list(whole.parameters())
    else:
        program = _one_by_one(lambda one: LOSSES[task](layer, one, width), interval)
    return _Alone(graph, program, params, 2 if name == EAGER_2 else 1, topology)


class Flow:
    """A flow.

    Args:
        graph: Which.
        layout: One of `LAYOUTS`.
        at_once: Instances under way.
        interval: Instances of an update, of all ranks together.
        topology: Of the world.
    """

    def __init__(
        self, graph: "daso.flow.Graph", layout: str, at_once: int, interval: int, topology: Topology
    ) -> None:
        self.graph, self._world, self._held = graph, topology, ExitStack()
        self._takes_part = layout != "1 rank" or topology.rank == 0
        if layout == "1 rank":
            topology = alone(topology)
            self._held.callback(topology.free)
        ranks = topology.world_size
        copies = {n.name: ranks for n in graph.nodes if n.kind == "layer"}
        # As many updates of so many instances, whoever takes them.
        each = max(1, interval // ranks) if layout == "replicas" else interval
        self.runtime = daso.flow.Runtime(
            graph,
            adam,
            topology=topology,
            replicas=copies if layout == "replicas" else None,
            max_active_keys=at_once,
            updates=daso.flow.Updates(min_update_interval=each),
        )
        self._held.callback(self.runtime.close)

    def train(self, instances: Sequence[Any]) -> None:
        """Train."""
        if self._takes_part:
            self.runtime.train_epoch(instances)
        rest(self._world)

    def test(self, instances: Sequence[Any]) -> "daso.flow.Epoch | None":
        """Return how good it is."""
        found = self.runtime.evaluate(instances) if self._takes_part else None
        rest(self._world)
        return found

    def close(self) -> None:
        """Give communicators back."""
        self._held.close()


def flow_name(layout: str, at_once: int, *, batched: bool = True) -> str:
    """Return what a flow is called."""
    return f"flow, {layout}, {at_once} at once" + ("" if batched else ", unbatched")


def plain_names(task: str) -> list[str]:
    """Return the plain programs of a task."""
    return [EAGER, EAGER_2, EAGER_ALL, *((GRU, BATCHES) if task == "lists" else ())]


def make_contender(
    task: str, name: str, width: int, interval: int, seed: int, topology: Topology
) -> Contender:
    """Return a way to train by its name. Collective over the world; blocking."""
    if name == EAGER_ALL:
        return _Together(task, width, interval, seed, topology)
    if not name.startswith("flow"):
        return _plain(task, name, width, interval, seed, topology)
    _, layout, at_once, *unbatched = name.split(", ")
    graph = seeded(task, width, 1 if unbatched else 16, seed)
    return Flow(graph, layout, int(at_once.split()[0]), interval, topology)
