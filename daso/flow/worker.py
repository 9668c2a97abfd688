"""One rank's loop: takes messages, gradients first, computes, and sends what comes of it."""

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from daso import trace
from daso.comm.health.patience import Patience
from daso.comm.topology import RankInfo
from daso.errors import DasoError, FlowError
from daso.flow.compute import Compute, Loss
from daso.flow.controller import Controller
from daso.flow.messages import FINISHED, NO_TICKET, OVER, Message, Post, Ticket
from daso.flow.model.base import Base, Emit, Key, Pass, Payload
from daso.flow.model.checks import Wiring
from daso.flow.model.graph import Edge, Node
from daso.flow.model.weights import Weights
from daso.flow.plan import TaskRecord, rank_of, ranks_of_lane
from daso.flow.routes import ROUTES, Route

__all__ = ["Watch", "Worker", "behaviours"]

Ready = tuple[float, int, Message]  # urgency: less is sooner; number

SPINS = 200  # looks in vain before the thread sleeps between them
NAP_SECONDS = 5e-5
LOOK_SECONDS = 0.1
EXCHANGE_SECONDS = 5e-4  # of computing, between two looks for messages of other ranks
TOGETHER = 16  # messages, at most, that a node is given at once and computes one by one


class Watch:
    """Looks after a loop; this one does nothing."""

    hears_all = False  # whether every rank is told of every instance

    def look(self, idle_seconds: float) -> None:
        """Do what is to be done a few times a second."""

    def is_due(self) -> bool:
        """Return whether it is time to exchange, after one more instance was finished."""
        return False

    def exchange(self) -> None:
        """Exchange with other flows."""


class ReadyMessages:
    """Messages that can be computed: gradients first, and of these what was computed last.

    Args:
        wiring: The flow.
        shuffled: Draws messages in an order of its own.
    """

    def __init__(self, wiring: Wiring, shuffled: random.Random | None) -> None:
        self._shuffled = shuffled
        self._most = {(n.index, back): most for n in wiring.nodes for back, most in _together(n)}
        # Whose gradients are taken together for one instance alone: it may be finished by them.
        self._apart = {n.index for n in wiring.nodes if n.kind == "layer" and n.more == 1}
        self._heap: list[Ready] = []
        self._together: dict[tuple[int, bool, int], deque[Ready]] = {}
        self._count = itertools.count()
        self._order: dict[tuple[int, Key], int] = {}  # of forwards, as they were computed here

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, message: Message) -> None:
        """Queue a message; one whose node takes several is taken along with the first."""
        ready = (self._urgency(message), next(self._count), message)
        if message[:2] in self._most:
            waiting = self._together.setdefault(self._group(message), deque())
            waiting.append(ready)
            if len(waiting) > 1:
                return
        heapq.heappush(self._heap, ready)

    def _group(self, message: Message) -> tuple[int, bool, int]:
        """Return what messages that are taken together have in common."""
        node, back, _, key, _, _ = message
        return node, back, key[0] if back and node in self._apart else 0

    def _urgency(self, message: Message) -> float:
        # As autograd does in one graph.
        order = -1 - self._order.pop((message.node, message.key), 0) if message.back else 1
        return order if self._shuffled is None else self._shuffled.random()

    def pop(self) -> Sequence[Message]:
        """Return the next message, and those that wait for the same node if it takes several."""
        message = heapq.heappop(self._heap)[2]
        most = self._most.get(message[:2])
        if most is None:
            return [message]
        waiting = self._together[group := self._group(message)]
        messages = [waiting.popleft()[2] for _ in range(min(len(waiting), most))]
        if waiting:
            heapq.heappush(self._heap, waiting[0])
        else:
            del self._together[group]
        return messages

    def take_one_by_one(self) -> None:
        """Take no two messages together from now on."""
        self._most.clear()

    def note_forward(self, node: int, keys: Iterable[Key]) -> None:
        """Remember in which order forwards were computed."""
        self._order.update(((node, key), next(self._count)) for key in keys)


class FinishedInstances:
    """Which instances were finished, as far as ranks were told.

    Args:
        rank: This one.
        world_size: Ranks.
        ranks_of: Ranks of every node.
        hears_all: Whether every rank is told of every instance.
    """

    def __init__(
        self, rank: int, world_size: int, ranks_of: Sequence[Sequence[int]], *, hears_all: bool
    ) -> None:
        self._rank, self._ranks_of, self._hears_all = rank, ranks_of, hears_all
        self._told = [0] * world_size  # how many instances each rank was told to be finished
        self.heard = 0  # instances, as far as this rank was told
        self._ranks_of_lane: dict[int, Sequence[int]] = {}
        self._early: list[Message] = []  # of instances that came in after one not yet told of

    def ranks_of_lane(self, lane: int) -> Sequence[int]:
        """Return the ranks that have to do with instances of a lane, and those that have no node.

        Who heard nothing for an epoch would take the others for lost.
        """
        if lane not in self._ranks_of_lane:
            everybody = range(len(self._told))
            idle = set(everybody).difference(*self._ranks_of)
            some = sorted({*ranks_of_lane(self._ranks_of, lane), *idle})
            self._ranks_of_lane[lane] = everybody if self._hears_all else some
        return self._ranks_of_lane[lane]

    def tell(self, lane: int) -> Sequence[int]:
        """Count an instance of a lane for the ranks that are to be told of it; return them."""
        ranks = self.ranks_of_lane(lane)
        for rank in ranks:
            self._told[rank] += 1
        return ranks

    def ticket(self, lane: int) -> Ticket:
        """Return what an instance that comes in now comes after."""
        return Ticket(lane, tuple(self._told[rank] for rank in self.ranks_of_lane(lane)))

    def holds(self, message: Message) -> bool:
        """Keep a message if this rank is yet to be told of instances that it comes after."""
        lane, after = message.ticket
        if after[self.ranks_of_lane(lane).index(self._rank)] <= self.heard:
            return False
        self._early.append(message)
        return True

    def hear(self) -> Sequence[Message]:
        """Count an instance that was finished; return what was kept until then."""
        self.heard += 1
        early, self._early = self._early, []
        return early


@dataclass(frozen=True, slots=True)
class LocalNodes:
    """The nodes of one rank, and where messages go from there."""

    wiring: Wiring
    rank: int
    nodes: Mapping[int, Base]  # by index
    ranks_of: Sequence[Sequence[int]]  # every node
    # Where messages go from a node, backward or not, by a port: to which, and its port.
    ways: Mapping[tuple[int, bool, int], tuple[int, int]]
    alone: frozenset[int]  # nodes that no other rank has
    routes: Mapping[int, Route]
    computes: Mapping[int, Compute]

    @classmethod
    def of(
        cls,
        wiring: Wiring,
        rank: int,
        nodes: Mapping[int, Base],
        ranks_of: Sequence[Sequence[int]],
    ) -> "LocalNodes":
        """Sort the nodes of a rank by what they do."""
        alone = frozenset(n for n, ranks in enumerate(ranks_of) if tuple(ranks) == (rank,))
        routes = {n: one for n, one in nodes.items() if isinstance(one, Route)}
        computes = {n: one for n, one in nodes.items() if isinstance(one, Compute)}
        return cls(wiring, rank, nodes, ranks_of, _ways(wiring), alone, routes, computes)

    def waiting(self) -> list[str]:
        """Return what nodes wait for, for people."""
        return [
            f"{one.node.kind} {one.node.name!r} has {len(parts)} of the messages that it waits for "
            f"with state {key[1:]} of instance {key[0]}"
            for one in self.nodes.values()
            for key, parts in one.open.items()
        ]

    def fail(self, messages: Sequence[Message], error: Exception) -> NoReturn:
        """Say which node failed, for one of these messages."""
        if isinstance(error, DasoError):
            raise error
        message, *others = messages
        more = f", or one of {len(others)} more that were computed with it" if others else ""
        node = self.wiring.nodes[message.node]
        way = "backward" if message.back else "forward"
        raise FlowError(
            f"{node.kind} {node.name!r} must not fail, but its {way} did, for instance "
            f"{message.key[0]}, state {message.key[1:]}{more}: {type(error).__name__}: {error}"
        ) from error


class Worker:
    """One rank's nodes, and its loop over messages.

    Args:
        wiring: The flow.
        nodes: Those of this rank, by index.
        ranks_of: Ranks of every node.
        rank_info: This rank's numbers.
        post: To and from the others; None: there are none.
        all_: What is the same for all nodes.
        controller: On the rank where instances come in.
        watch: Looks after the loop.
        shuffled: Draws messages in an order of its own, instead of gradients first.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - of one caller
        self,
        wiring: Wiring,
        nodes: Mapping[int, Base],
        ranks_of: Sequence[Sequence[int]],
        rank_info: RankInfo,
        post: Post | None,
        all_: Pass,
        controller: Controller | None,
        watch: "Watch",
        shuffled: random.Random | None = None,
    ) -> None:
        self.here = LocalNodes.of(wiring, rank_info.rank, nodes, ranks_of)
        self._world_size, self._post = rank_info.world_size, post
        self._all, self._controller, self._watch = all_, controller, watch
        self._ready = ReadyMessages(wiring, shuffled)
        self._instances = FinishedInstances(
            rank_info.rank, rank_info.world_size, ranks_of, hears_all=watch.hears_all
        )
        self._tickets: dict[int, Ticket] = {}  # of instances that are under way here
        self._due = 0  # batches of instances that are full
        self._over = False
        self._looks_at = self._exchanges_at = 0.0  # seconds of the clock
        self.log: list[TaskRecord] | None = None
        self.busy_seconds = 0.0

    def run(self) -> None:
        """Go on until all instances are finished."""
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
        """Send and receive, if nothing is ready or some time was computed."""
        now = time.perf_counter()
        if now < self._exchanges_at and self._ready:
            return
        self._exchanges_at = now + EXCHANGE_SECONDS
        post.send()
        for message in post.arrived():
            self._deliver(message)

    def _take_step(self) -> bool:
        """Do one thing, if there is one."""
        if self._due:
            self._exchange()
        if self._controller is not None and self._control(self._controller):
            return True
        if self._ready:
            self.compute(self._ready.pop())
            return True
        return self._over

    def _control(self, controller: Controller) -> bool:
        """Let an instance in, or find that all are finished."""
        if controller.is_over:
            for rank in range(1, self._world_size):
                self._put(rank, OVER, (0,))
            self._over = True
        elif controller.may_admit():
            number = controller.admitted
            messages = controller.admit(self._all.instances(number))
            self._tickets[number] = self._instances.ticket(controller.lane_of[-1])
            self._send_on(self.here.wiring.source, [(False, 0, *message) for message in messages])
        else:
            return False
        return True

    def _wait(self) -> None:
        """Nothing is to be done here: wait for other ranks."""
        if self._post is None:
            raise FlowError(self._stuck())
        self._post.send()
        patience, spins = Patience(), 0
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
                self._look_after(time.perf_counter(), patience.seconds())

    def _look_after(self, now: float, idle_seconds: float) -> None:
        if now > self._looks_at:
            self._looks_at = now + LOOK_SECONDS
            self._watch.look(idle_seconds)

    def _stuck(self) -> str:
        waits = self.here.waiting() or ["no node waits for anything"]
        return f"every instance must come to an end, but nothing moves: {'; '.join(waits[:3])}"

    # --- messages ----------------------------------------------------------------------------

    def _deliver(self, message: Message) -> None:
        """Take in a message of another rank."""
        if message.node == OVER:
            self._over = True
        elif message.node == FINISHED:
            self._finish(message.key[0])
        elif not self._instances.holds(message):
            self._enter(message)

    def _enter(self, message: Message) -> None:
        """Queue what is to be computed; let the rest go on at once."""
        self._tickets[message.key[0]] = message.ticket
        if message.node in self.here.computes:
            self._queue(message)
        else:
            self._send_on(message.node, self._go_through(*message[:5]))

    def _queue(self, message: Message) -> None:
        self._ready.push(message)

    def _go_through(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        """Return what leaves a node that only shows the way; nothing leaves the source again."""
        one = self.here.routes.get(node)
        if one is None:
            self._come_back(key[0])
            return ()
        try:
            return one.backward(port, key, payload) if back else one.forward(port, key, payload)
        except Exception as error:
            self.here.fail([Message(node, back, port, key, payload, NO_TICKET)], error)

    def compute(self, messages: Sequence[Message]) -> None:
        """Compute messages of one node together."""
        start = time.perf_counter()
        node, back = messages[0].node, messages[0].back
        one = self.here.computes[node]
        keys = [message.key for message in messages]
        payloads = [message.payload for message in messages]
        try:
            if back:
                emits = one.backward(keys, payloads)
            else:
                if not isinstance(one, Loss):  # to which nothing comes back
                    self._ready.note_forward(node, keys)
                emits = one.forward(keys, payloads)
        except Exception as error:
            self.here.fail([m for m in messages if m.key == one.at] or messages, error)
        if self.log is not None:
            self.log.append(TaskRecord(node, back, tuple(keys)))
        self._send_on(node, emits)
        now = time.perf_counter()
        self.busy_seconds += now - start
        self._look_after(now, 0.0)
        trace.record(trace.BACKWARD if back else trace.FORWARD, start, key=node)

    def _send_on(self, node: int, emits: Sequence[Emit]) -> None:
        """Let what a node emits go on, to queues and other ranks, by the nodes that show the way.

        Whatever the length of that way, nothing is queued on it.
        """
        here, tickets = self.here, self._tickets
        ways, alone, computes = here.ways, here.alone, here.computes
        left = deque([(node, emits)])
        while left:
            node, emits = left.popleft()
            for back, port, key, payload in emits:
                to, into = ways[node, back, port]
                if to not in alone and (rank := self._rank_for(to, key)) != here.rank:
                    assert self._post is not None
                    message = Message(to, back, into, key, payload, tickets[key[0]])
                    self._post.put(rank, message)
                elif to in computes:
                    self._queue(Message(to, back, into, key, payload, tickets[key[0]]))
                else:
                    left.append((to, self._go_through(to, back, into, key, payload)))

    def _rank_for(self, node: int, key: Key) -> int:
        """Return to which rank of a node an instance goes."""
        return rank_of(self.here.ranks_of[node], self._tickets[key[0]].lane)

    # --- instances ---------------------------------------------------------------------------

    def _come_back(self, number: int) -> None:
        controller = self._controller
        assert controller is not None
        if controller.come_back(number):
            self._tell_finished(number, controller.lane_of[number])

    def _tell_finished(self, number: int, lane: int) -> None:
        """Tell the ranks that have to do with it."""
        for rank in self._instances.tell(lane):
            if rank == self.here.rank:
                self._finish(number)
            else:
                self._put(rank, FINISHED, (number,))

    def _finish(self, number: int) -> None:
        early = self._instances.hear()
        if self.log is not None:
            self.log.append(TaskRecord(FINISHED, False, ((number,),)))
        self._tickets.pop(number, None)
        for one in self.here.computes.values():
            one.finish(number)
        self._due += self._watch.is_due()
        for message in early:
            self._deliver(message)

    def _exchange(self) -> None:
        """Let the flows of other nodes have part in what was learned; the other ranks go on."""
        if self._post is not None:
            self._post.send()  # or they would wait for this one, which waits for other nodes
        for _ in range(self._due):
            self._watch.exchange()
        self._due = 0
        for one in self.here.computes.values():
            one.take_up()

    def _put(self, rank: int, what: int, key: Key) -> None:
        assert self._post is not None
        self._post.put(rank, Message(what, False, 0, key, (), NO_TICKET))


def _ways(wiring: Wiring) -> dict[tuple[int, bool, int], tuple[int, int]]:
    """Return where messages go; see `LocalNodes.ways`."""
    ways = {(e.source, False, e.out): (e.target, e.into) for e in wiring.edges}
    return ways | {(e.target, True, e.into): _behind_conds(wiring, e) for e in wiring.edges}


def _behind_conds(wiring: Wiring, edge: Edge) -> tuple[int, int]:
    """Return where gradients go back to: a cond would only pass them on."""
    while wiring.nodes[edge.source].kind == "cond":
        edge = next(one for one in wiring.edges if one.target == edge.source)
    return edge.source, edge.out


def _together(node: Node) -> Sequence[tuple[bool, int]]:
    """Return in which direction how many messages a node is given together at most."""
    if node.kind == "layer":
        most = node.more if node.more > 1 else TOGETHER
        return [(False, most), (True, most)]
    return {"loss": [(False, TOGETHER)], "function": [(False, TOGETHER), (True, TOGETHER)]}.get(
        node.kind, []
    )


def behaviours(
    wiring: Wiring, indices: Iterable[int], all_: Pass, weights: Mapping[int, Weights]
) -> dict[int, Base]:
    """Return what nodes do on one rank; the source is the controller's."""
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
