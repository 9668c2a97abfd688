"""One rank's loop: takes messages, gradients first, computes, and sends what comes of it."""

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NoReturn

import torch

from daso import trace
from daso.comm.topology import Place
from daso.errors import DasoError, FlowError
from daso.flow.base import Base, Emit, Key, Pass, Payload, leaf
from daso.flow.checks import Wiring
from daso.flow.compute import Compute, Loss
from daso.flow.graph import Node
from daso.flow.messages import FINISHED, OVER, Message, Post
from daso.flow.routes import ROUTES, Route
from daso.flow.weights import Weights
from daso.plan.flows import Did, rank_of

__all__ = ["Controller", "Worker", "behaviours"]

SPINS = 200  # looks in vain before the thread sleeps between them
NAP_SECONDS = 5e-5
LOOK_SECONDS = 0.1


@dataclass(slots=True)
class Controller:
    """Lets instances in, no more at once than may be.

    Args:
        most: That may be under way.
        count: Of all instances.
        source: The node.
    """

    most: int
    count: int
    source: Node
    admitted: int = 0
    finished: int = 0
    highest: int = 0  # that were under way at once
    waiting: dict[int, int] = field(default_factory=dict)  # messages of each, that are to come back

    @property
    def is_over(self) -> bool:
        """Whether all instances are finished."""
        return self.finished == self.count

    def may_admit(self) -> bool:
        """Whether the next instance may come in."""
        return self.admitted < self.count and len(self.waiting) < self.most

    def admit(self, instance: Any) -> list[tuple[Key, Payload]]:
        """Let the next instance in; return its messages."""
        number = self.admitted
        self.admitted += 1
        messages = self._made(instance, number)
        self.waiting[number] = len(messages)
        self.highest = max(self.highest, len(self.waiting))
        return messages

    def _made(self, instance: Any, number: int) -> list[tuple[Key, Payload]]:
        """Return what the source makes of an instance, checked."""
        wanted = self.source.outputs[0]
        try:
            made = self.source.call(instance)
            first = made if isinstance(made, Mapping) else {(): made}
            messages = [
                ((number, *map(index, state)), _payload(payload))
                for state, payload in first.items()
            ]
        except Exception as error:
            raise FlowError(
                f"source {self.source.name!r} must make {wanted} tensors of an instance, or a dict "
                f"to such from states, each a tuple of whole numbers, but failed for instance "
                f"{number}: {type(error).__name__}: {error}"
            ) from error
        if not messages or any(len(payload) != wanted for _, payload in messages):
            raise FlowError(
                f"source {self.source.name!r} must make a message at least of every instance, with "
                f"as many tensors as its outputs say, {wanted}, but of instance {number} it made "
                f"messages with {[len(payload) for _, payload in messages]}"
            )
        return messages

    def come_back(self, number: int) -> bool:
        """A message of an instance came back; return whether it was the last."""
        self.waiting[number] -= 1
        if self.waiting[number]:
            return False
        del self.waiting[number]
        self.finished += 1
        return True


def _payload(made: Any) -> Payload:
    found = made if isinstance(made, tuple) else (made,)
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"{one!r} is no tensor")
    return tuple(map(leaf, found))


class Worker:
    """One rank's nodes, and its loop over messages.

    Args:
        wiring: The flow.
        nodes: Those of this rank, by index.
        ranks_of: Ranks of every node.
        place: Where this rank stands.
        post: To and from the others; None: there are none.
        all_: What is the same for all nodes.
        controller: On the rank where instances come in.
        look: Called a few times a second, with the seconds since a message came.
        shuffled: Draws messages in an order of its own, instead of gradients first.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - of one caller
        self,
        wiring: Wiring,
        nodes: Mapping[int, Base],
        ranks_of: Sequence[Sequence[int]],
        place: Place,
        post: Post | None,
        all_: Pass,
        controller: Controller | None,
        look: Callable[[float], None],
        shuffled: random.Random | None = None,
    ) -> None:
        self.nodes, self._wiring, self._ranks_of = nodes, wiring, ranks_of
        self._rank, self._ranks, self._post = place.rank, place.size, post
        self._all, self._controller, self._look = all_, controller, look
        self._shuffled = shuffled
        self._next = {(e.source, e.out): (e.target, e.into) for e in wiring.edges}
        self._before = {(e.target, e.into): (e.source, e.out) for e in wiring.edges}
        self._routes = {n: one for n, one in nodes.items() if isinstance(one, Route)}
        self._computes = {n: one for n, one in nodes.items() if isinstance(one, Compute)}
        self._most = {n.index: n.more for n in wiring.nodes if n.kind == "layer" and n.more > 1}
        self._ready: list[tuple[Any, int, Message]] = []  # a heap
        self._together: dict[int, deque[Message]] = {node: deque() for node in self._most}
        self._passing: deque[Message] = deque()  # through nodes that only show the way
        self._count = itertools.count()
        self._order: dict[tuple[int, Key], int] = {}  # of forwards, as they were computed here
        self._finished = 0  # instances, as far as this rank was told
        self._early: list[Message] = []  # of instances that came in after one not yet told of
        self._over = False
        self._looks_at = 0.0
        self.log: list[Did] | None = None
        self.busy_seconds = 0.0

    def run(self) -> None:
        """Go on until all instances are finished.

        Raises:
            FlowError: A node failed, or waits for what cannot come.
        """
        with torch.no_grad():
            while not self._over:
                did = self._take_step()
                if self._post is not None:
                    self._post.send()
                if not did:
                    self._wait()

    def _take_step(self) -> bool:
        """Do one thing, if there is one."""
        if self._post is not None:
            for message in self._post.arrived():
                self._deliver(message)
        if self._controller is not None and self._control(self._controller):
            return True
        if self._ready:
            self._take(heapq.heappop(self._ready)[2])
            return True
        return self._over

    def _control(self, controller: Controller) -> bool:
        """Let an instance in, or find that all are finished."""
        if controller.is_over:
            self._tell(OVER, (0,))
            self._over = True
        elif controller.may_admit():
            after = controller.finished
            for key, payload in controller.admit(self._all.instances(controller.admitted)):
                self._send_on(self._wiring.source, (False, 0, key, payload), after)
            self._pass()
        else:
            return False
        return True

    def _wait(self) -> None:
        """Nothing is to be done here: wait for other ranks."""
        if self._post is None:
            raise FlowError(self._stuck())
        start, spins = time.perf_counter(), 0
        while not self._over:
            came = False
            for message in self._post.arrived():
                self._deliver(message)
                came = True
            if came:
                return
            spins += 1
            if spins > SPINS:
                time.sleep(NAP_SECONDS)
                self._look_after(time.perf_counter(), start)

    def _look_after(self, now: float, came_at: float) -> None:
        if now > self._looks_at:
            self._looks_at = now + LOOK_SECONDS
            self._look(now - came_at)

    def waiting(self) -> list[str]:
        """Return what nodes of this rank wait for, for people."""
        return [
            f"{one.node.kind} {one.node.name!r} has {len(parts)} of the messages that it waits for "
            f"with state {key[1:]} of instance {key[0]}"
            for one in self.nodes.values()
            for key, parts in one.open.items()
        ]

    def _stuck(self) -> str:
        waits = self.waiting() or ["no node waits for anything"]
        return f"every instance must come to an end, but nothing moves: {'; '.join(waits[:3])}"

    # --- messages ----------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        """Take in a message of another rank."""
        if message.node == OVER:
            self._over = True
        elif message.node == FINISHED:
            self._finish(message.key[0])
        elif message.after > self._finished:
            self._early.append(message)
        else:
            self._enter(message)
            self._pass()

    def _enter(self, message: Message) -> None:
        """Queue what is to be computed; what only shows the way is done soon."""
        node = message.node
        if node not in self._computes:
            self._passing.append(message)
            return
        if node in self._together and not message.back:
            self._together[node].append(message)
        heapq.heappush(self._ready, (self._urgency(message), next(self._count), message))

    def _urgency(self, message: Message) -> Any:
        if self._shuffled is not None:
            return self._shuffled.random()
        # Gradients first, and of these what was computed last: as autograd does in one graph.
        if message.back:
            return -1 - self._order.pop((message.node, message.key), 0)
        return 1

    def _pass(self) -> None:
        while self._passing:
            self._go_through(self._passing.popleft())

    def _go_through(self, message: Message) -> None:
        node, back, port, key, payload, after = message
        one = self._routes.get(node)
        if one is None:
            self._come_back(key[0])  # to the source
            return
        try:
            emits = one.backward(port, key, payload) if back else one.forward(port, key, payload)
        except Exception as error:
            self._fail(message, error)
        for emit in emits:
            self._send_on(node, emit, after)

    def _take(self, message: Message) -> None:
        """Compute a message, and those that wait for the same layer if it takes several."""
        messages = [message]
        if message.node in self._together and not message.back:
            waiting = self._together[message.node]
            messages = [
                waiting.popleft() for _ in range(min(len(waiting), self._most[message.node]))
            ]
            if not messages:  # it was taken along before
                return
        self.compute(messages)

    def compute(self, messages: Sequence[Message]) -> None:
        """Compute messages of one node together; gradients one by one."""
        start = time.perf_counter()
        node, back = messages[0].node, messages[0].back
        one = self._computes[node]
        keys = [message.key for message in messages]
        try:
            if back:
                emits = one.backward(keys[0], messages[0].payload)
            else:
                for key in keys:
                    self._order[node, key] = next(self._count)
                emits = one.forward(keys, [message.payload for message in messages])
        except Exception as error:
            self._fail(messages[0], error)
        if self.log is not None:
            self.log.append(Did(node, back, tuple(keys)))
        after = max(message.after for message in messages)
        for emit in emits:
            self._send_on(node, emit, after)
        self._pass()
        now = time.perf_counter()
        self.busy_seconds += now - start
        self._look_after(now, now)
        trace.record(trace.BACKWARD if back else trace.FORWARD, start, key=node)

    def _fail(self, message: Message, error: Exception) -> NoReturn:
        """Say which node failed."""
        if isinstance(error, DasoError):
            raise error
        node = self._wiring.nodes[message.node]
        way = "backward" if message.back else "forward"
        raise FlowError(
            f"{node.kind} {node.name!r} must not fail, but its {way} did, for instance "
            f"{message.key[0]}, state {message.key[1:]}: {type(error).__name__}: {error}"
        ) from error

    def _send_on(self, node: int, emit: Emit, after: int) -> None:
        back, port, key, payload = emit
        to, into = (self._before if back else self._next)[node, port]
        message = Message(to, back, into, key, payload, after)
        if self._post is None or (rank := rank_of(self._ranks_of[to], key[0])) == self._rank:
            self._enter(message)
        else:
            self._post.put(rank, message)

    # --- instances ---------------------------------------------------------------------------

    def _come_back(self, number: int) -> None:
        controller = self._controller
        assert controller is not None
        if controller.come_back(number):
            self._tell(FINISHED, (number,))
            self._finish(number)

    def _finish(self, number: int) -> None:
        self._finished += 1
        if self.log is not None:
            self.log.append(Did(FINISHED, False, ((number,),)))
        for one in self._computes.values():
            one.finish(number)
        early, self._early = self._early, []
        for message in early:
            self._deliver(message)

    def _tell(self, what: int, key: Key) -> None:
        if self._post is not None:
            for rank in range(self._ranks):
                if rank != self._rank:
                    self._post.put(rank, Message(what, False, 0, key, (), 0))


def behaviours(
    wiring: Wiring, indices: Iterable[int], all_: Pass, weights: Mapping[int, Weights]
) -> dict[int, Base]:
    """Return what nodes do on one rank; the source is the controller's.

    Args:
        wiring: The flow.
        indices: Of the nodes.
        all_: What is the same for all of them.
        weights: Of layers that train here.
    """
    found: dict[int, Base] = {}
    for number in indices:
        node = wiring.nodes[number]
        if node.kind in ROUTES:
            found[number] = ROUTES[node.kind](node, all_)
        elif node.kind == "loss":
            found[number] = Loss(node, all_, None)
        elif node.kind != "source":
            found[number] = Compute(node, all_, weights.get(number))
    return found
