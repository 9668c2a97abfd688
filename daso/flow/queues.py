"""Queue of one rank's computable messages, and its count of finished instances."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterable, Sequence

from daso.flow.messages import Admission, Message
from daso.flow.model.base import Key
from daso.flow.model.checks import Wiring
from daso.flow.model.node import Node
from daso.flow.plan import ranks_of_lane

Ready = tuple[float, int, Message]  # urgency: less is sooner; number
MAX_TOGETHER = 16  # messages handed at once to a node that computes them one by one


class ReadyMessages:
    """Queue of computable messages: gradients first, those of the newest forward before others."""

    def __init__(self, wiring: Wiring, shuffled: random.Random | None) -> None:
        self._shuffled = shuffled
        self._most = {(n.index, back): most for n in wiring.nodes for back, most in _group_sizes(n)}
        # Nodes whose gradients are grouped per instance, because they may finish the instance.
        self._per_instance = {n.index for n in wiring.nodes if n.kind == "layer" and n.more == 1}
        self._heap: list[Ready] = []
        self._groups: dict[tuple[int, bool, int], deque[Ready]] = {}
        self._count = itertools.count()
        self._order: dict[tuple[int, Key], int] = {}  # in which this rank computed forwards

    def __bool__(self) -> bool:
        return bool(self._heap)

    def push(self, message: Message) -> None:
        """Queue a message; messages that a node computes together are popped as a group."""
        ready = (self._urgency(message), next(self._count), message)
        if message[:2] in self._most:
            waiting = self._groups.setdefault(self._group(message), deque())
            waiting.append(ready)
            if len(waiting) > 1:
                return
        heapq.heappush(self._heap, ready)

    def _group(self, message: Message) -> tuple[int, bool, int]:
        """Return the key of the messages that are popped together."""
        node, back, _, key, _, _ = message
        return node, back, key[0] if back and node in self._per_instance else 0

    def _urgency(self, message: Message) -> float:
        # The order in which autograd goes through one graph.
        order = -1 - self._order.pop((message.node, message.key), 0) if message.back else 1
        return order if self._shuffled is None else self._shuffled.random()

    def pop(self) -> Sequence[Message]:
        """Return the next message, or the next group for a node that computes several together."""
        message = heapq.heappop(self._heap)[2]
        most = self._most.get(message[:2])
        if most is None:
            return [message]
        waiting = self._groups[group := self._group(message)]
        messages = [waiting.popleft()[2] for _ in range(min(len(waiting), most))]
        if waiting:
            heapq.heappush(self._heap, waiting[0])
        else:
            del self._groups[group]
        return messages

    def take_one_by_one(self) -> None:
        """Pop messages one at a time from now on."""
        self._most.clear()

    def note_forward(self, node: int, keys: Iterable[Key]) -> None:
        """Record the order of forwards."""
        self._order.update(((node, key), next(self._count)) for key in keys)


class FinishedInstances:
    """Counts finished instances, and the notifications of each rank."""

    def __init__(
        self, rank: int, world_size: int, ranks_of: Sequence[Sequence[int]], *, notifies_all: bool
    ) -> None:
        self._rank, self._ranks_of, self._notifies_all = rank, ranks_of, notifies_all
        self._notified = [0] * world_size  # finished instances, by the ranks notified of them
        self.finished = 0  # instances that this rank was notified of
        self._ranks_of_lane: dict[int, Sequence[int]] = {}
        self._early: list[Message] = []  # arrived before the notifications that they follow

    def ranks_of_lane(self, lane: int) -> Sequence[int]:
        """Return the ranks with a node of a lane, and those without any node."""
        # A rank that received nothing for an epoch would report the others as lost.
        if lane not in self._ranks_of_lane:
            all_ranks = range(len(self._notified))
            idle = set(all_ranks).difference(*self._ranks_of)
            some = sorted({*ranks_of_lane(self._ranks_of, lane), *idle})
            self._ranks_of_lane[lane] = all_ranks if self._notifies_all else some
        return self._ranks_of_lane[lane]

    def notify(self, lane: int) -> Sequence[int]:
        """Count a finished instance for the ranks of its lane; return these ranks."""
        ranks = self.ranks_of_lane(lane)
        for rank in ranks:
            self._notified[rank] += 1
        return ranks

    def admission(self, lane: int) -> Admission:
        """Return the admission of an instance that is admitted now."""
        return Admission(lane, tuple(self._notified[rank] for rank in self.ranks_of_lane(lane)))

    def hold_back(self, message: Message) -> bool:
        """Hold a message whose notifications have not all arrived; return whether it was held."""
        lane, after = message.admission
        if after[self.ranks_of_lane(lane).index(self._rank)] <= self.finished:
            return False
        self._early.append(message)
        return True

    def count_finished(self) -> Sequence[Message]:
        """Count a finished instance; return the messages that were held until then."""
        self.finished += 1
        early, self._early = self._early, []
        return early


def _group_sizes(node: Node) -> Sequence[tuple[bool, int]]:
    """Return (backward, maximum group size) pairs of a node."""
    if node.kind == "layer":
        most = node.more if node.more > 1 else MAX_TOGETHER
        return [(False, most), (True, most)]
    return {
        "loss": [(False, MAX_TOGETHER)],
        "function": [(False, MAX_TOGETHER), (True, MAX_TOGETHER)],
    }.get(node.kind, [])
