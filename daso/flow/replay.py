"""Epochs of a flow once more, in a single process, from what each rank logged: to the same bits."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from daso.comm.topology import RankInfo
from daso.errors import ConfigError
from daso.flow.compute import Compute
from daso.flow.controller import Controller
from daso.flow.messages import FINISHED, OVER, Message, pack, unpack
from daso.flow.model.base import Pass
from daso.flow.model.checks import Wiring, wire
from daso.flow.model.graph import Graph, MakeOptimizer
from daso.flow.model.layers import mean_of, tensors_of
from daso.flow.model.weights import Weights
from daso.flow.plan import Log, TaskRecord, count_lanes
from daso.flow.worker import Watch, Worker, behaviours

__all__ = ["replay"]

Key = tuple[int, ...]
HOST = torch.device("cpu")


class _Ways:
    """Takes messages of one rank to the others, instead of MPI."""

    def __init__(self, boxes: list[list[Message]]) -> None:
        self._boxes = boxes

    def put(self, rank: int, message: Message) -> None:
        """Put a message into a rank's box."""
        self._boxes[rank] += unpack(pack([message]), HOST)


class _Rank(Worker):
    """A rank that does what its log says."""

    def begin(self, did: Sequence[TaskRecord], box: list[Message]) -> None:
        """Do this, from now on."""
        self._did, self._at, self._box = did, 0, box
        self._there: dict[tuple[int, bool, Key], Message] = {}
        self._heard: set[Key] = set()  # instances that are finished

    @property
    def is_done(self) -> bool:
        """Whether all that was logged is done."""
        return self._at == len(self._did)

    def _queue(self, message: Message) -> None:
        self._there[message.node, message.back, message.key] = message

    def admit(self) -> bool:
        """Let the next instance in, if one is left."""
        controller = self._controller
        return controller is not None and controller.may_admit() and self._control(controller)

    def go_on(self) -> bool:
        """Do what can be done; return whether that was anything."""
        before = self._at
        box, self._box[:] = list(self._box), []
        for message in box:
            if message.node == FINISHED:
                self._heard.add(message.key)
            elif message.node != OVER:
                self._enter(message)
        while not self.is_done and self._do(self._did[self._at]):
            self._at += 1
        return self._at > before or bool(box)

    def _do(self, did: TaskRecord) -> bool:
        if did.node == FINISHED:
            if did.keys[0] in self._heard:
                super()._finish(did.keys[0][0])
            return did.keys[0] in self._heard
        wanted = [(did.node, did.back, key) for key in did.keys]
        if not all(one in self._there for one in wanted):
            return False
        self.compute([self._there.pop(one) for one in wanted])
        return True

    def _come_back(self, number: int) -> None:
        """Count a message, and tell of an instance that is finished."""
        if self._controller is not None and self._controller.come_back(number):
            self._tell_finished(number, self._controller.lane_of[number])

    def _finish(self, number: int) -> None:
        """Note it: the log says when that was heard of."""
        self._heard.add((number,))


def replay(
    logs: Sequence[Sequence[Log]],
    graph: Graph,
    optimizer_factory: MakeOptimizer,
    instances: Sequence[Sequence[Any]],
) -> None:
    """Train a flow once more, in this process, in the order in which all ranks computed.

    Args:
        logs: For each epoch those of all ranks, in rank order.
        graph: The flow, with the parameters with which the first epoch began. Its layers are those
            of the last one afterwards.
        optimizer_factory: As it was given to `daso.flow.Runtime`.
        instances: Of each epoch.

    Raises:
        ConfigError: A layer has other bits than were logged, or the logs do not fit together.
    """
    wiring = wire(graph)
    ranks = len(logs[0])
    if any([log.rank for log in epoch] != [*range(ranks)] for epoch in logs):
        raise ConfigError("logs must be those of all ranks, in rank order, for every epoch")
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
        if not any([worker.go_on() for worker in workers]) and not workers[0].admit():
            raise ConfigError(
                "logs must be those of one epoch with these instances, but something that was "
                "computed could not have been"
            )
    for one in chain.from_iterable(worker.here.nodes.values() for worker in workers):
        if isinstance(one, Compute):
            one.settle()
    _average(wiring, logs[0].ranks_of, weights)
    for log in logs:
        for index, digest in log.digests:
            if weights[log.rank][index].digest() != digest:
                raise ConfigError(
                    f"a replay must give the bits that were logged, but layer "
                    f"{wiring.nodes[index].name!r} on rank {log.rank} differs"
                )


def _worker(
    wiring: Wiring,
    log: Log,
    weights: dict[int, Weights],
    instances: Sequence[Any],
    boxes: list[list[Message]],
) -> _Rank:
    # This rank's own copies of its layers.
    nodes = tuple(
        replace(node, call=weights[node.index].module) if node.index in weights else node
        for node in wiring.nodes
    )
    own = Wiring(nodes, wiring.edges)
    here = [node for node, homes in enumerate(log.ranks_of) if log.rank in homes]
    all_ = Pass(instances.__getitem__, True, log.seed)
    count = len(instances)
    source = wiring.nodes[wiring.source]
    lanes = count_lanes(log.ranks_of)
    controller = Controller(count, count, source, lanes, log.lanes) if log.rank == 0 else None
    rank_info = RankInfo(log.rank, len(boxes), log.rank, 0, (0,) * len(boxes))
    ways: Any = _Ways(boxes)
    found = behaviours(own, here, all_, weights)
    worker = _Rank(own, found, log.ranks_of, rank_info, ways, all_, controller, Watch())
    worker.begin(log.did, boxes[log.rank])
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
            weights[rank][index].take_up()
