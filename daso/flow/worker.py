"""The loop of one rank: computes messages, gradients first, and sends the results."""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from daso import trace
from daso.comm.step_timer import RunningClock
from daso.errors import DasoError, FlowError
from daso.flow.compute import Compute, Loss
from daso.flow.controller import Controller
from daso.flow.messages import FINISHED, NO_ADMISSION, OVER, Admission, Message, Post
from daso.flow.model.base import Base, Emit, Key, Pass, Payload
from daso.flow.model.checks import Wiring
from daso.flow.model.node import Edge
from daso.flow.model.weights import Weights
from daso.flow.plan import TaskRecord, rank_of
from daso.flow.queues import FinishedInstances, ReadyMessages
from daso.flow.replicas import FlowReplicas
from daso.flow.routes import ROUTES, Route

SPINS = 200  # polls without a message before the thread sleeps between them
SLEEP_SECONDS = 5e-5
MONITOR_SECONDS = 0.1
EXCHANGE_SECONDS = 5e-4  # of computing between two polls for messages


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """The nodes of one rank, and the targets of their messages."""

    wiring: Wiring
    rank: int
    ranks_of: Sequence[Sequence[int]]  # of every node
    all: Pass
    nodes: Mapping[int, Base]  # of this rank, by index
    routes: Mapping[int, Route]  # those of them that do not compute
    computes: Mapping[int, Compute]  # those that do
    # Target node and port of messages, by sending node, direction (backward or not) and port.
    targets: Mapping[tuple[int, bool, int], tuple[int, int]]
    exclusive: frozenset[int]  # nodes that only this rank has

    @classmethod
    def of(
        cls,
        wiring: Wiring,
        rank: int,
        ranks_of: Sequence[Sequence[int]],
        all_: Pass,
        weights: Mapping[int, Weights],
    ) -> "LocalNodes":
        """Make the nodes of a rank, without the source: the controller runs it."""
        own = [node for node, ranks in zip(wiring.nodes, ranks_of, strict=True) if rank in ranks]
        routes = {n.index: ROUTES[n.kind](n, all_) for n in own if n.kind in ROUTES}
        computes = {
            n.index: Loss(n, all_, None)
            if n.kind == "loss"
            else Compute(n, all_, weights.get(n.index))
            for n in own
            if n.kind in ("layer", "function", "loss")
        }
        nodes = {**routes, **computes}
        exclusive = frozenset(n for n, ranks in enumerate(ranks_of) if tuple(ranks) == (rank,))
        return cls(
            wiring, rank, ranks_of, all_, nodes, routes, computes, _targets(wiring), exclusive
        )

    def waiting(self) -> list[str]:
        """Describe the incomplete inputs of this rank's nodes, for errors."""
        return [
            f"{local.node.kind} {local.node.name!r} has {len(parts)} of the messages that it needs "
            f"with state {key[1:]} of instance {key[0]}"
            for local in self.nodes.values()
            for key, parts in local.open.items()
        ]

    def fail(self, messages: Sequence[Message], error: Exception) -> NoReturn:
        """Raise an error that names the node that failed on one of these messages."""
        if isinstance(error, DasoError):
            raise error
        message, *others = messages
        more = f", or one of {len(others)} more that were computed with it" if others else ""
        node = self.wiring.nodes[message.node]
        way = "backward" if message.back else "forward"
        raise FlowError(
            f"{node.kind} {node.name!r} must not fail, but its {way} did, for instance "
            f"{message.key[0]}, state {message.key[1:]}{more}: {type(error).__name__}: {error}",
            code="flow-node-failed",
        ) from error


def ignore(_idle_seconds: float) -> None:
    """Monitor nothing."""


class Worker:
    """The nodes of one rank, and its loop over messages."""

    def __init__(
        self,
        here: LocalNodes,
        world_size: int,
        *,
        post: Post | None = None,
        controller: Controller | None = None,
        replicas: FlowReplicas | None = None,
        monitor: Callable[[float], None] = ignore,
        shuffled: random.Random | None = None,
    ) -> None:
        self.here, self._world_size, self._post = here, world_size, post
        self._controller, self._replicas, self._monitor = controller, replicas, monitor
        self._ready = ReadyMessages(here.wiring, shuffled)
        self._instances = FinishedInstances(
            here.rank, world_size, here.ranks_of, notifies_all=replicas is not None
        )
        self._admissions: dict[int, Admission] = {}  # of instances under way on this rank
        self._due = 0  # exchanges with other nodes that are due
        self._over = False
        self._monitors_at = self._exchanges_at = 0.0  # clock times
        self.log: list[TaskRecord] | None = None
        self.busy_seconds = 0.0

    def run(self) -> None:
        """Compute until all instances are finished."""
        with torch.no_grad():
            while not self._over:
                if self._post is not None:
                    self._exchange_messages(self._post)
                if not self._take_step():
                    self._wait()
            if self._post is not None:
                self._post.send()
            if self._due:
                self._exchange()

    def _exchange_messages(self, post: Post) -> None:
        """Send and receive, if nothing is ready or the last exchange is long enough ago."""
        now = time.perf_counter()
        if now < self._exchanges_at and self._ready:
            return
        self._exchanges_at = now + EXCHANGE_SECONDS
        post.send()
        for message in post.arrived():
            self._deliver(message)

    def _take_step(self) -> bool:
        """Perform one action; return whether one was due."""
        if self._due:
            self._exchange()
        if self._controller is not None and self._control(self._controller):
            return True
        if self._ready:
            self.compute(self._ready.pop())
            return True
        return self._over

    def _control(self, controller: Controller) -> bool:
        """Admit an instance, or end the pass; return whether either was due."""
        if controller.is_over:
            for rank in range(1, self._world_size):
                self._put(rank, OVER, (0,))
            self._over = True
        elif controller.may_admit():
            number = controller.admitted
            messages = controller.admit(self.here.all.instances(number))
            self._admissions[number] = self._instances.admission(controller.lane_of[-1])
            self._send_on(self.here.wiring.source, [(False, 0, *message) for message in messages])
        else:
            return False
        return True

    def _wait(self) -> None:
        """Wait for a message of another rank."""
        if self._post is None:
            raise FlowError(self._describe_deadlock(), code="flow-is-deadlocked")
        self._post.send()
        patience, spins = RunningClock(), 0
        while not self._over:
            came = False
            for message in self._post.arrived():
                self._deliver(message)
                came = True
            if came:
                return
            spins += 1
            if spins > SPINS:
                time.sleep(SLEEP_SECONDS)
                self._call_monitor(time.perf_counter(), patience.seconds())

    def _call_monitor(self, now: float, idle_seconds: float) -> None:
        if now > self._monitors_at:
            self._monitors_at = now + MONITOR_SECONDS
            self._monitor(idle_seconds)

    def _describe_deadlock(self) -> str:
        waits = self.here.waiting() or ["no node waits for anything"]
        return (
            f"every instance must finish, but no message is left to compute: {'; '.join(waits[:3])}"
        )

    # --- messages ----------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        """Handle a message of another rank."""
        if message.node == OVER:
            self._over = True
        elif message.node == FINISHED:
            self._finish(message.key[0])
        elif not self._instances.hold_back(message):
            self._enter(message)

    def _enter(self, message: Message) -> None:
        """Queue a message for a node that computes; pass others through their route at once."""
        self._admissions[message.key[0]] = message.admission
        if message.node in self.here.computes:
            self._queue(message)
        else:
            self._send_on(message.node, self._pass_route(*message[:5]))

    def _queue(self, message: Message) -> None:
        self._ready.push(message)

    def _pass_route(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        """Pass a message through a route; return the emitted messages, none for the source."""
        route = self.here.routes.get(node)
        if route is None:
            self._count_returned(key[0])
            return ()
        try:
            return route.backward(port, key, payload) if back else route.forward(port, key, payload)
        except Exception as error:
            self.here.fail([Message(node, back, port, key, payload, NO_ADMISSION)], error)

    def compute(self, messages: Sequence[Message]) -> None:
        """Compute messages of one node together."""
        start = time.perf_counter()
        node, back = messages[0].node, messages[0].back
        compute = self.here.computes[node]
        keys = [message.key for message in messages]
        payloads = [message.payload for message in messages]
        try:
            if back:
                emits = compute.backward(keys, payloads)
            else:
                if not isinstance(compute, Loss):  # a loss has no backward
                    self._ready.note_forward(node, keys)
                emits = compute.forward(keys, payloads)
        except Exception as error:
            self.here.fail([m for m in messages if m.key == compute.at] or messages, error)
        if self.log is not None:
            self.log.append(TaskRecord(node, back, tuple(keys)))
        self._send_on(node, emits)
        now = time.perf_counter()
        self.busy_seconds += now - start
        self._call_monitor(now, 0.0)
        trace.record(trace.BACKWARD if back else trace.FORWARD, start, key=node)

    def _send_on(self, node: int, emits: Sequence[Emit]) -> None:
        """Pass emitted messages through routes to nodes that compute, or to other ranks."""
        here, admissions = self.here, self._admissions
        targets, exclusive, computes = here.targets, here.exclusive, here.computes
        left = deque([(node, emits)])
        while left:
            node, emits = left.popleft()
            for back, port, key, payload in emits:
                to, into = targets[node, back, port]
                if to not in exclusive and (rank := self._rank_for(to, key)) != here.rank:
                    assert self._post is not None
                    message = Message(to, back, into, key, payload, admissions[key[0]])
                    self._post.put(rank, message)
                elif to in computes:
                    self._queue(Message(to, back, into, key, payload, admissions[key[0]]))
                else:
                    left.append((to, self._pass_route(to, back, into, key, payload)))

    def _rank_for(self, node: int, key: Key) -> int:
        """Return the rank of a node to which messages of an instance go."""
        return rank_of(self.here.ranks_of[node], self._admissions[key[0]].lane)

    # --- instances ---------------------------------------------------------------------------

    def _count_returned(self, number: int) -> None:
        controller = self._controller
        assert controller is not None
        if controller.count_returned(number):
            self._notify_finished(number, controller.lane_of[number])

    def _notify_finished(self, number: int, lane: int) -> None:
        """Notify the ranks of a lane that an instance is finished."""
        for rank in self._instances.notify(lane):
            if rank == self.here.rank:
                self._finish(number)
            else:
                self._put(rank, FINISHED, (number,))

    def _finish(self, number: int) -> None:
        early = self._instances.count_finished()
        if self.log is not None:
            self.log.append(TaskRecord(FINISHED, False, ((number,),)))
        self._admissions.pop(number, None)
        for compute in self.here.computes.values():
            compute.finish(number)
        self._due += self._replicas is not None and self._replicas.is_due()
        for message in early:
            self._deliver(message)

    def _exchange(self) -> None:
        """Exchange weight updates with other nodes; other ranks of this node train on meanwhile."""
        if self._post is not None:
            self._post.send()  # else they would wait for this rank, which waits for other nodes
        assert self._replicas is not None
        for _ in range(self._due):
            self._replicas.step()
        self._due = 0
        for compute in self.here.computes.values():
            compute.use_exchanged_weights()

    def _put(self, rank: int, notice: int, key: Key) -> None:
        assert self._post is not None
        self._post.put(rank, Message(notice, False, 0, key, (), NO_ADMISSION))


def _targets(wiring: Wiring) -> dict[tuple[int, bool, int], tuple[int, int]]:
    """Return the targets of messages; see `LocalNodes.targets`."""
    targets = {(e.source, False, e.out): (e.target, e.into) for e in wiring.edges}
    return targets | {(e.target, True, e.into): _gradient_target(wiring, e) for e in wiring.edges}


def _gradient_target(wiring: Wiring, edge: Edge) -> tuple[int, int]:
    """Return the target of an edge's gradients, past conds, which would only forward them."""
    while wiring.nodes[edge.source].kind == "cond":
        edge = next(incoming for incoming in wiring.edges if incoming.target == edge.source)
    return edge.source, edge.out
