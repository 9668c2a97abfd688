"""Who computes which node: as the caller says, or after measuring what each one takes."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from daso.comm.topology import RankInfo
from daso.errors import FlowError
from daso.flow.balance import balanced
from daso.flow.controller import Controller
from daso.flow.messages import NO_TICKET, Message, message_seconds
from daso.flow.model.base import Emit, Key, Pass, Payload
from daso.flow.model.checks import Wiring
from daso.flow.model.weights import Weights
from daso.flow.plan import Edge, Task, Updates, check_copies, place
from daso.flow.routes import Flatmap, Group
from daso.flow.worker import Watch, Worker, behaviours

__all__ = ["Measured", "copied", "measure", "placed", "said"]

ALONE = RankInfo(rank=0, world_size=1, local_rank=0, node=0, node_of=(0,))
Said = Mapping[str, int | Sequence[int]]
W = TypeVar("W", bound=Worker)


@dataclass(slots=True)
class Measured:
    """What some instances took, one after the other in this process.

    Args:
        tasks: Of each instance: what was computed, and what each waited for.
        traffic: Bytes that crossed each pair of nodes.
        messages: How many did.
        samples: One that did.
        together: Seconds of each node, with all these instances under way at once.
    """

    tasks: list[list[Task]] = field(default_factory=list)
    traffic: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    messages: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    samples: dict[tuple[int, int], Message] = field(default_factory=dict)
    together: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def seconds(self, nodes: int) -> list[float]:
        """Return the time that each of so many nodes took in all."""
        found = [0.0] * nodes
        for tasks in self.tasks:
            for task in tasks:
                found[task.node] += task.seconds
        return found

    def edges(self) -> list[Edge]:
        """Return what crosses between nodes."""
        return [Edge(*pair, nbytes) for pair, nbytes in self.traffic.items()]

    def crossing(self) -> list[Edge]:
        """Return the seconds that messages between nodes would take of either of two ranks."""
        taken = message_seconds(list(self.samples.values()))
        pairs = zip(self.samples, taken, strict=True)
        return [Edge(*pair, self.messages[pair] * seconds) for pair, seconds in pairs]


class _Metered(Worker):
    """A loop that measures."""

    measured: Measured

    def begin(self, measured: Measured) -> None:
        """Measure from now on."""
        self.measured = measured
        self._ready.take_one_by_one()
        self._causes: dict[tuple[Any, ...], set[int]] = {}
        self._held: dict[tuple[int, Any], set[int]] = defaultdict(set)
        self._now: set[int] = set()  # tasks behind what is sent at the moment

    def compute(self, messages: Sequence[Message]) -> None:
        """Compute and note how long it took."""
        (message,) = messages
        causes = self._causes.pop(message[:4], set())
        tasks = self.measured.tasks[0]
        number = len(tasks)
        self._now = {number}
        tasks.append(Task(message.node, message.back, 0.0, tuple(sorted(causes))))
        start = time.perf_counter()
        super().compute(messages)
        tasks[number] = tasks[number]._replace(seconds=time.perf_counter() - start)

    def _send_on(self, node: int, emits: Sequence[Emit]) -> None:
        for emit in emits:
            self._note(node, emit, self._now)
        super()._send_on(node, emits)

    def _go_through(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        causes = self._causes.pop((node, back, port, key), set())
        behind = self._behind(node, back, key, causes)
        emits = super()._go_through(node, back, port, key, payload)
        for emit in emits:
            self._note(node, emit, behind)
        return emits

    def _behind(self, node: int, back: bool, key: Key, causes: set[int]) -> set[int]:
        """Return the tasks behind what a node that shows the way will send for a message."""
        one = self.here.nodes.get(node)
        if isinstance(one, Group) and not back:
            self._held[node, key] = causes  # until its group is complete: see `_note`
            return causes
        if isinstance(one, Flatmap) and back:
            key = one.parent(key)
        held = self._held[node, key]
        held |= causes
        return held

    def _note(self, node: int, emit: Emit, behind: set[int]) -> None:
        """Note what crosses to the next node, and the tasks behind it."""
        back, port, key, payload = emit
        one = self.here.nodes.get(node)
        if isinstance(one, Group) and not back:
            behind = set().union(*(self._held.pop((node, member)) for member in one.cache[key]))
        to, into = self.here.ways[node, back, port]
        self._causes[to, back, into, key] = set(behind)
        self.measured.messages[node, to] += 1
        self.measured.samples[node, to] = Message(to, back, into, key, payload, NO_TICKET)
        self.measured.traffic[node, to] += sum(t.nbytes for t in payload if t is not None)


class _Timed(Worker):
    """A loop that measures what nodes take while many instances are under way.

    A node that shows the way is counted by itself: after another rank's node, it is another rank
    that goes it.
    """

    together: dict[int, float]
    _node: int | None = None  # at work
    _since = 0.0

    def compute(self, messages: Sequence[Message]) -> None:
        with self._at_work(messages[0].node):
            super().compute(messages)

    def _go_through(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        with self._at_work(node):
            return super()._go_through(node, back, port, key, payload)

    def _control(self, controller: Controller) -> bool:
        with self._at_work(self.here.wiring.source):
            return super()._control(controller)

    @contextmanager
    def _at_work(self, node: int) -> Iterator[None]:
        """Count the time to a node, and not to the one that let it begin."""
        before = self._node
        self._turn_to(node)
        try:
            yield
        finally:
            self._turn_to(before)

    def _turn_to(self, node: int | None) -> None:
        now = time.perf_counter()
        if self._node is not None:
            self.together[self._node] += now - self._since
        self._node, self._since = node, now


def measure(
    wiring: Wiring, instances: Callable[[int], Any], count: int, most_seconds: float
) -> Measured:
    """Run some instances through a flow in this process, forward and backward; change nothing."""
    kept = [
        (owner, name, buffer, buffer.clone())
        for node in _layers(wiring)
        for owner in node.call.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    measured = Measured()
    end = time.perf_counter() + most_seconds
    with torch.random.fork_rng(devices=[]):
        _let_through(wiring, instances, 0, Measured())
        for number in range(count):
            _let_through(wiring, instances, number, measured)
            if time.perf_counter() > end:
                break
        worker = _alone(_Timed, wiring, instances, len(measured.tasks))
        worker.together = measured.together
        worker.run()
    for owner, name, buffer, before in kept:
        buffer.copy_(before)
        setattr(owner, name, buffer)  # which the module may have replaced
    return measured


def _layers(wiring: Wiring) -> list[Any]:
    return [node for node in wiring.nodes if node.kind == "layer"]


def _let_through(
    wiring: Wiring, instances: Callable[[int], Any], number: int, measured: Measured
) -> None:
    worker = _alone(_Metered, wiring, lambda _: instances(number), 1)
    one = Measured([[]], measured.traffic, measured.messages, measured.samples)
    worker.begin(one)
    worker.run()
    measured.tasks += one.tasks


def _alone(kind: type[W], wiring: Wiring, instances: Callable[[int], Any], count: int) -> W:
    """Return a loop over the first instances, all under way at once, with all nodes."""
    all_ = Pass(instances, trains=True, seed=0)
    # Their gradients are part of what layers take; nothing is done with them.
    never = Updates(min_update_interval=sys.maxsize)
    weights = {node.index: Weights(node.call, torch.optim.SGD, never) for node in _layers(wiring)}
    nodes = behaviours(wiring, range(len(wiring.nodes)), all_, weights)
    controller = Controller(count, count, wiring.nodes[wiring.source])
    everywhere = [(0,)] * len(wiring.nodes)
    return kind(wiring, nodes, everywhere, ALONE, None, all_, controller, Watch())


def said(wiring: Wiring, placement: Said, ranks: int) -> dict[int, tuple[int, ...]]:
    """Return the ranks of nodes as the caller says."""
    found = {}
    for name, wanted in placement.items():
        node = wiring.named(name)
        homes = (wanted,) if isinstance(wanted, int) else tuple(wanted)
        if not homes or len(set(homes)) < len(homes) or not all(0 <= r < ranks for r in homes):
            raise FlowError(
                f"node {name!r} must be placed on different ranks from 0 to {ranks - 1}, not on "
                f"{wanted!r}"
            )
        if node == wiring.source and homes != (0,):
            raise FlowError(
                f"the source, {name!r}, must be on rank 0, where instances come in, not on "
                f"{wanted!r}"
            )
        if len(homes) > 1 and wiring.nodes[node].kind != "layer":
            raise FlowError(
                f"a layer can be on several ranks, which have replicas of it, but {name!r} is a "
                f"{wiring.nodes[node].kind}"
            )
        found[node] = homes
    return found


def copied(
    wiring: Wiring, replicas: Mapping[str, int], fixed: Mapping[int, tuple[int, ...]], ranks: int
) -> dict[int, int]:
    """Return on how many ranks layers are, as the caller says."""
    found = {wiring.named(name): count for name, count in replicas.items()}
    for node, count in found.items():
        check_copies(count, ranks)
        name = wiring.nodes[node].name
        if wiring.nodes[node].kind != "layer" or node in fixed:
            raise FlowError(
                f"replicas are of layers that placement does not place, but {name!r} is "
                f"{'placed' if node in fixed else 'a ' + wiring.nodes[node].kind}"
            )
    return found


def placed(
    wiring: Wiring,
    measured: Measured,
    ranks: int,
    fixed: Mapping[int, tuple[int, ...]],
    copies: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every node."""
    seconds = [measured.together.get(node, 0.0) for node in range(len(wiring.nodes))]
    layers = {node.index for node in _layers(wiring)}
    found = place(seconds, measured.edges(), ranks, copies, wiring.source, fixed, layers)
    if ranks == 1 or any(len(homes) > 1 for homes in found):
        return found  # an instance stays on its replicas' rank as far as it can
    fixed_ranks = {node: homes[0] for node, homes in fixed.items()} | {wiring.source: 0}
    start = {node: homes[0] for node, homes in enumerate(found)}
    crossing = measured.crossing()
    return tuple((rank,) for rank in balanced(seconds, crossing, ranks, fixed_ranks, start))
