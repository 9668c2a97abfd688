"""Replay of epochs in one process from the logs of all ranks, to the same bits."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from daso.errors import ConfigError
from daso.flow.controller import Controller
from daso.flow.messages import FINISHED, OVER, Message, pack, unpack
from daso.flow.model.base import Pass
from daso.flow.model.checks import Wiring, wire
from daso.flow.model.graph import Graph
from daso.flow.model.layers import mean_of, tensors_of
from daso.flow.model.node import MakeOptimizer
from daso.flow.model.weights import Weights
from daso.flow.plan import Log, TaskRecord, count_lanes
from daso.flow.worker import LocalNodes, Worker

Key = tuple[int, ...]
HOST = torch.device("cpu")


class _LocalPost:
    """Delivers messages to the inboxes of other ranks, in place of MPI."""

    def __init__(self, boxes: list[list[Message]]) -> None:
        self._boxes = boxes

    def put(self, rank: int, message: Message) -> None:
        """Add a copy of a message to a rank's inbox."""
        self._boxes[rank] += unpack(pack([message]), HOST)


class _ReplayWorker(Worker):
    """A worker that repeats the computations of one rank's log."""

    def begin(self, tasks: Sequence[TaskRecord], box: list[Message]) -> None:
        """Set the log to repeat."""
        self._tasks, self._next, self._box = tasks, 0, box
        self._messages: dict[tuple[int, bool, Key], Message] = {}
        self._finished: set[Key] = set()  # keys of finished instances

    @property
    def is_done(self) -> bool:
        """All logged computations are done."""
        return self._next == len(self._tasks)

    def _queue(self, message: Message) -> None:
        self._messages[message.node, message.back, message.key] = message

    def admit(self) -> bool:
        """Admit the next instance, if one is left."""
        controller = self._controller
        return controller is not None and controller.may_admit() and self._control(controller)

    def advance(self) -> bool:
        """Compute as far as messages allow; return whether it made progress."""
        before = self._next
        box, self._box[:] = list(self._box), []
        for message in box:
            if message.node == FINISHED:
                self._finished.add(message.key)
            elif message.node != OVER:
                self._enter(message)
        while not self.is_done and self._repeat(self._tasks[self._next]):
            self._next += 1
        return self._next > before or bool(box)

    def _repeat(self, task: TaskRecord) -> bool:
        if task.node == FINISHED:
            if task.keys[0] in self._finished:
                super()._finish(task.keys[0][0])
            return task.keys[0] in self._finished
        inputs = [(task.node, task.back, key) for key in task.keys]
        if not all(message in self._messages for message in inputs):
            return False
        self.compute([self._messages.pop(message) for message in inputs])
        return True

    def _count_returned(self, number: int) -> None:
        """Count a returned message; notify ranks of a finished instance."""
        if self._controller is not None and self._controller.count_returned(number):
            self._notify_finished(number, self._controller.lane_of[number])

    def _finish(self, number: int) -> None:
        """Record a finished instance: the log determines when it counts."""
        self._finished.add((number,))


def replay(
    logs: Sequence[Sequence[Log]],
    graph: Graph,
    optimizer_factory: MakeOptimizer,
    instances: Sequence[Sequence[Any]],
) -> None:
    """Train a flow again in this process, in the logged order of all ranks.

    Args:
        logs: For each epoch the logs of all ranks, in rank order.
        graph: The flow, with the parameters with which the first epoch began. Afterwards its layers
            have the parameters at the end of the last epoch.
        optimizer_factory: As given to `daso.flow.Runtime`.
        instances: The instances of each epoch.

    Raises:
        ConfigError: A layer differs from the log in a bit, or the logs do not belong together.
    """
    wiring = wire(graph)
    ranks = len(logs[0])
    if any([log.rank for log in epoch] != [*range(ranks)] for epoch in logs):
        raise ConfigError(
            "logs must be those of all ranks, in rank order, for every epoch",
            code="flow-logs-incomplete",
        )
    weights = [_weights(wiring, logs[0][rank], optimizer_factory) for rank in range(ranks)]
    for epoch, of_epoch in zip(logs, instances, strict=True):
        _replay_epoch(wiring, epoch, weights, of_epoch)
    with torch.no_grad():
        for index, homes in enumerate(logs[0][0].ranks_of):
            node = wiring.nodes[index]
            if node.kind == "layer":
                node.call.load_state_dict(weights[homes[0]][index].module.state_dict())


def _weights(wiring: Wiring, log: Log, make: MakeOptimizer) -> dict[int, Weights]:
    return {
        node.index: Weights(copy.deepcopy(node.call), node.optimizer or make, log.updates)
        for node in wiring.nodes
        if node.kind == "layer" and log.rank in log.ranks_of[node.index]
    }


@torch.no_grad()
def _replay_epoch(
    wiring: Wiring,
    logs: Sequence[Log],
    weights: Sequence[dict[int, Weights]],
    instances: Sequence[Any],
) -> None:
    boxes: list[list[Message]] = [[] for _ in logs]
    workers = [_worker(wiring, log, weights[log.rank], instances, boxes) for log in logs]
    while not all(worker.is_done for worker in workers):
        if not any([worker.advance() for worker in workers]) and not workers[0].admit():
            raise ConfigError(
                "logs must be those of one epoch with these instances, but a logged computation "
                "never gets its inputs; pass those that were logged together",
                code="flow-logs-differ",
            )
    for compute in chain.from_iterable(worker.here.computes.values() for worker in workers):
        compute.settle()
    _average(wiring, logs[0].ranks_of, weights)
    for log in logs:
        for index, digest in log.digests:
            if weights[log.rank][index].digest() != digest:
                raise ConfigError(
                    f"a replay must give the bits that were logged, but layer "
                    f"{wiring.nodes[index].name!r} on rank {log.rank} differs; "
                    f"use the model, data and torch with which it was logged",
                    code="flow-replay-differs",
                )


def _worker(
    wiring: Wiring,
    log: Log,
    weights: dict[int, Weights],
    instances: Sequence[Any],
    boxes: list[list[Message]],
) -> _ReplayWorker:
    # This rank's own copies of its layers.
    nodes = tuple(
        replace(node, call=weights[node.index].module) if node.index in weights else node
        for node in wiring.nodes
    )
    own = Wiring(nodes, wiring.edges)
    all_ = Pass(instances.__getitem__, True, log.seed)
    count = len(instances)
    source = wiring.nodes[wiring.source]
    lanes = count_lanes(log.ranks_of)
    controller = Controller(count, count, source, lanes, log.lanes) if log.rank == 0 else None
    here = LocalNodes.of(own, log.rank, log.ranks_of, all_, weights)
    ways: Any = _LocalPost(boxes)
    worker = _ReplayWorker(here, len(boxes), post=ways, controller=controller)
    worker.begin(log.tasks, boxes[log.rank])
    return worker


@torch.no_grad()
def _average(
    wiring: Wiring, ranks_of: Sequence[Sequence[int]], weights: Sequence[dict[int, Weights]]
) -> None:
    for index, homes in enumerate(ranks_of):
        if len(homes) < 2 or wiring.nodes[index].kind != "layer":
            continue
        replicas = [tensors_of(weights[rank][index].module) for rank in homes]
        for tensors in zip(*replicas, strict=True):
            mean = mean_of(tensors)
            for tensor in tensors:
                tensor.copy_(mean)
        for rank in homes:
            weights[rank][index].update_twins()
