"""A flow on many ranks, task by task, on virtual time: who waits for whom, and how fast it goes.

The seconds of each node are measured, by `benchmarks.flow_tasks`. Ranks do what those of a real run
do: let instances in, gradients first, one thing at a time.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from daso.flow.plan import choose_lane, count_lanes, rank_of, ranks_of_lane

__all__ = ["Costs", "Course", "Task", "run_flow"]


class Task(NamedTuple):
    """One node computed something for an instance.

    Args:
        node: Which.
        back: Gradients, or forward.
        seconds: That it took.
        after: Numbers of the tasks of this instance that it waited for.
    """

    node: int
    back: bool
    seconds: float
    after: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """What is not in the tasks.

    Args:
        message_seconds: That a message between two ranks takes of each of them.
        latency_seconds: That it is under way besides.
        stretch: Times that a task takes as long as it was measured to: with more instances under
            way, and steps of optimizers beside.
    """

    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    stretch: float = 1.0


@dataclass(frozen=True, slots=True)
class Course:
    """What came of it.

    Args:
        seconds: Until the last instance was finished.
        instances: How many there were.
        busy: Share of that time that each rank had something to do.
        highest: Instances that were under way at once.
    """

    seconds: float
    instances: int
    busy: tuple[float, ...]
    highest: int

    @property
    def instances_per_second(self) -> float:
        """How fast it went."""
        return self.instances / self.seconds


TINY = 1e-12  # seconds: where nothing takes any
# What a rank does first: less is sooner.
CONTROL, BACKWARD, FORWARD = range(3)


@dataclass(slots=True)
class _Rank:
    """What waits for a rank: (what, when it came, seconds, what is done then)."""

    ready: list[tuple[int, int, float, Callable[[], None]]] = field(default_factory=list)
    is_busy: bool = False
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Instance:
    """One that is under way.

    Args:
        number: Its.
        lane: Which replicas it goes through.
        tasks: What is computed for it.
        then: Numbers of the tasks that wait for each.
        waits: For how many others each still waits.
        came: Messages of other ranks for each.
        left: Tasks that are not done.
    """

    number: int
    lane: int
    tasks: Sequence[Task]
    then: Sequence[Sequence[int]]
    waits: list[int]
    came: list[int]
    left: int


class _Run:
    """Ranks, and what happens when.

    Args:
        measured: Tasks of some instances, which come again and again.
        ranks_of: Ranks of each node.
        ranks: How many there are.
        count: Of instances.
        most: That may be under way.
        costs: Beside the tasks.
    """

    def __init__(
        self,
        measured: Sequence[Sequence[Task]],
        ranks_of: Sequence[Sequence[int]],
        ranks: int,
        count: int,
        most: int,
        costs: Costs,
    ) -> None:
        self._measured, self._ranks_of, self._costs = measured, ranks_of, costs
        self._count, self._most = count, most
        self._ranks = [_Rank() for _ in range(ranks)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._admitted = self._finished = self._highest = 0
        self._now = self._ended = 0.0
        self._then = [_dependants(tasks) for tasks in measured]
        self._under_way = [0] * count_lanes(ranks_of)

    def go(self) -> Course:
        """Let all instances through."""
        for _ in range(min(self._most, self._count)):
            self._admit()
        while self._events:
            self._now, _, then = heapq.heappop(self._events)
            then()
        assert self._finished == self._count, "tasks wait for each other in a ring"
        busy = tuple(rank.busy_seconds / max(self._now, TINY) for rank in self._ranks)
        return Course(max(self._ended, TINY), self._count, busy, self._highest)

    # --- ranks -------------------------------------------------------------------------------

    def _at(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._number), then))

    def _give(self, rank: int, what: int, seconds: float, then: Callable[[], None]) -> None:
        number = next(self._number)
        # As autograd does: of gradients, those of what was computed last.
        order = -number if what == BACKWARD else number
        heapq.heappush(self._ranks[rank].ready, (what, order, seconds, then))
        self._start(rank)

    def _start(self, rank: int) -> None:
        one = self._ranks[rank]
        if one.is_busy or not one.ready:
            return
        _, _, seconds, then = heapq.heappop(one.ready)
        one.is_busy = True
        one.busy_seconds += seconds

        def end() -> None:
            one.is_busy = False
            then()
            self._start(rank)

        self._at(seconds, end)

    # --- instances ---------------------------------------------------------------------------

    def _admit(self) -> None:
        number, which = self._admitted, self._admitted % len(self._measured)
        self._admitted += 1
        self._highest = max(self._highest, self._admitted - self._finished)
        tasks = self._measured[which]
        waits, came = [max(1, len(task.after)) for task in tasks], [0] * len(tasks)
        lane = choose_lane(self._under_way, number)
        self._under_way[lane] += 1
        one = _Instance(number, lane, tasks, self._then[which], waits, came, len(tasks))
        first = [place for place, task in enumerate(tasks) if not task.after]
        self._give(0, CONTROL, self._posting(one, 0, first), lambda: self._send(one, 0, first))

    def _rank(self, one: _Instance, task: int) -> int:
        return rank_of(self._ranks_of[one.tasks[task].node], one.lane)

    def _posting(self, one: _Instance, source: int, tasks: Sequence[int]) -> float:
        """Return what messages for tasks take of the rank that sends them, one for each other."""
        others = {self._rank(one, task) for task in tasks} - {source}
        return len(others) * self._costs.message_seconds

    def _send(self, one: _Instance, source: int, tasks: Sequence[int]) -> None:
        for task in tasks:
            if self._rank(one, task) == source:
                self._come(one, task)
            else:
                one.came[task] += 1
                self._at(self._costs.latency_seconds, partial(self._come, one, task))

    def _come(self, one: _Instance, task: int) -> None:
        """Something that a task waits for is there."""
        one.waits[task] -= 1
        if one.waits[task]:
            return
        rank, costs, (_, back, seconds, _) = self._rank(one, task), self._costs, one.tasks[task]
        taken = seconds * costs.stretch + one.came[task] * costs.message_seconds
        taken += self._posting(one, rank, one.then[task])
        if not one.then[task] and rank:  # back to where instances come in
            taken += costs.message_seconds
        self._give(rank, BACKWARD if back else FORWARD, taken, partial(self._end, one, task))

    def _end(self, one: _Instance, task: int) -> None:
        rank = self._rank(one, task)
        self._send(one, rank, one.then[task])
        one.left -= 1
        if one.left == 0:
            comes = partial(self._come_back, one)
            self._at(self._costs.latency_seconds if rank else 0.0, comes)

    def _come_back(self, one: _Instance) -> None:
        """Tell the others that it passed through that it is finished, and let in the next."""
        ends = [task for task, then in enumerate(one.then) if not then and self._rank(one, task)]
        others = [rank for rank in ranks_of_lane(self._ranks_of, one.lane) if rank]
        taken = (len(ends) + len(others)) * self._costs.message_seconds
        self._give(0, CONTROL, taken, partial(self._finish, one, others))

    def _finish(self, one: _Instance, others: Sequence[int]) -> None:
        self._finished += 1
        self._ended = self._now
        costs = self._costs
        for rank in others:
            hears = partial(self._give, rank, CONTROL, costs.message_seconds, _nothing)
            self._at(costs.latency_seconds, hears)
        self._under_way[one.lane] -= 1
        if self._admitted < self._count:
            self._admit()


def _nothing() -> None:
    """Hear of it, and go on."""


def _dependants(tasks: Sequence[Task]) -> list[list[int]]:
    """Return for each task the numbers of those that wait for it."""
    found: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for before in task.after:
            found[before].append(number)
    return found


def run_flow(
    measured: Sequence[Sequence[Task]],
    ranks_of: Sequence[Sequence[int]],
    ranks: int,
    *,
    count: int,
    most: int,
    costs: Costs,
) -> Course:
    """Return how fast instances go through a flow."""
    return _Run(measured, ranks_of, ranks, count, most, costs).go()
