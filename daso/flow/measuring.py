"""Measurements of a flow in one process: the seconds of its nodes, and of messages between them."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from daso.flow.controller import Controller
from daso.flow.messages import NO_ADMISSION, Message, message_seconds
from daso.flow.model.base import Emit, Key, Pass, Payload
from daso.flow.model.checks import Wiring
from daso.flow.model.weights import Weights
from daso.flow.placement import Edge
from daso.flow.plan import Updates
from daso.flow.worker import LocalNodes, Worker

W = TypeVar("W", bound=Worker)


@dataclass(frozen=True, slots=True)
class Measured:
    """Costs of nodes and messages for some instances, all under way at once in this process.

    Args:
        instances: Number of instances.
        seconds: Compute time of each node.
        traffic: Bytes of the messages between two nodes.
        crossing: Seconds that these messages would cost each of two ranks.
    """

    instances: int
    seconds: list[float]
    traffic: list[Edge]
    crossing: list[Edge]


class _CountingWorker(Worker):
    """A worker that counts messages between nodes."""

    def begin(self) -> None:
        """Count from zero."""
        self.traffic: dict[tuple[int, int], float] = defaultdict(float)
        self.messages: dict[tuple[int, int], int] = defaultdict(int)
        self.samples: dict[tuple[int, int], Message] = {}

    def _send_on(self, node: int, emits: Sequence[Emit]) -> None:
        self._count(node, emits)
        super()._send_on(node, emits)

    def _pass_route(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        emits = super()._pass_route(node, back, port, key, payload)
        self._count(node, emits)
        return emits

    def _count(self, node: int, emits: Sequence[Emit]) -> None:
        for back, port, key, payload in emits:
            to, into = self.here.targets[node, back, port]
            self.messages[node, to] += 1
            self.samples[node, to] = Message(to, back, into, key, payload, NO_ADMISSION)
            self.traffic[node, to] += sum(t.nbytes for t in payload if t is not None)


class _TimingWorker(Worker):
    """A worker that times nodes while many instances are under way.

    Routes are timed separately: they may run on another rank than the node before them.
    """

    node_seconds: dict[int, float]
    _node: int | None = None  # the node that is timed now
    _since = 0.0

    def compute(self, messages: Sequence[Message]) -> None:
        with self._time_node(messages[0].node):
            super().compute(messages)

    def _pass_route(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        with self._time_node(node):
            return super()._pass_route(node, back, port, key, payload)

    def _control(self, controller: Controller) -> bool:
        with self._time_node(self.here.wiring.source):
            return super()._control(controller)

    @contextmanager
    def _time_node(self, node: int) -> Iterator[None]:
        """Count the time for a node, and not for its caller."""
        before = self._node
        self._switch_to(node)
        try:
            yield
        finally:
            self._switch_to(before)

    def _switch_to(self, node: int | None) -> None:
        now = time.perf_counter()
        if self._node is not None:
            self.node_seconds[self._node] += now - self._since
        self._node, self._since = node, now


def measure(
    wiring: Wiring, instances: Callable[[int], Any], count: int, most_seconds: float
) -> Measured:
    """Measure a flow in this process, forward and backward; leaves modules unchanged."""
    with _preserved_buffers(wiring), torch.random.fork_rng(devices=[]):
        worker_alone(Worker, wiring, instances, 1).run()  # loads what torch loads late
        start = time.perf_counter()
        worker_alone(Worker, wiring, instances, 1).run()
        seconds = time.perf_counter() - start
        count = max(1, min(count, int(most_seconds / 2 / seconds)))
        counted = worker_alone(_CountingWorker, wiring, instances, count)
        counted.begin()
        counted.run()
        timed = worker_alone(_TimingWorker, wiring, instances, count)
        timed.node_seconds = dict.fromkeys(range(len(wiring.nodes)), 0.0)
        timed.run()
    crossing_seconds = message_seconds(list(counted.samples.values()))
    pairs = zip(counted.samples, crossing_seconds, strict=True)
    return Measured(
        count,
        list(timed.node_seconds.values()),
        [Edge(*pair, nbytes) for pair, nbytes in counted.traffic.items()],
        [Edge(*pair, counted.messages[pair] * each) for pair, each in pairs],
    )


@contextmanager
def _preserved_buffers(wiring: Wiring) -> Iterator[None]:
    """Restore the buffers of all layers at the end."""
    saved = [
        (owner, name, buffer, buffer.clone())
        for node in wiring.layers
        for owner in node.call.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, before in saved:
            buffer.copy_(before)
            setattr(owner, name, buffer)  # the module may have replaced it


def worker_alone(kind: type[W], wiring: Wiring, instances: Callable[[int], Any], count: int) -> W:
    """Return a worker that has all nodes, for the first instances, all under way at once."""
    # Their gradients are part of a layer's time; no optimizer uses them.
    never = Updates(min_update_interval=sys.maxsize)
    weights = {node.index: Weights(node.call, torch.optim.SGD, never) for node in wiring.layers}
    everywhere = [(0,)] * len(wiring.nodes)
    here = LocalNodes.of(wiring, 0, everywhere, Pass(instances, trains=True, seed=0), weights)
    controller = Controller(count, count, wiring.nodes[wiring.source])
    return kind(here, 1, controller=controller)
