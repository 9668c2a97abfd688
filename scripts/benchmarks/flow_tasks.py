"""Tasks of a flow's instances for the simulator: measured one instance after the other."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.flow_simulator import Task
from daso.flow.measuring import worker_alone
from daso.flow.messages import Message
from daso.flow.model.base import Emit, Key, Payload
from daso.flow.model.checks import Wiring
from daso.flow.routes import Flatmap, Group
from daso.flow.worker import Worker

__all__ = ["tasks_of"]


class _Metered(Worker):
    """A loop over one instance that notes tasks, and the tasks that each waited for."""

    def begin(self) -> None:
        """Note tasks from now on."""
        self.tasks: list[Task] = []
        self._ready.take_one_by_one()
        self._causes: dict[tuple[Any, ...], set[int]] = {}
        self._held: dict[tuple[int, Any], set[int]] = defaultdict(set)
        self._now: set[int] = set()  # tasks behind the messages that are being sent

    def compute(self, messages: Sequence[Message]) -> None:
        """Compute, and note the seconds."""
        (message,) = messages
        causes = self._causes.pop(message[:4], set())
        tasks = self.tasks
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

    def _pass_route(
        self, node: int, back: bool, port: int, key: Key, payload: Payload
    ) -> Sequence[Emit]:
        causes = self._causes.pop((node, back, port, key), set())
        behind = self._behind(node, back, key, causes)
        emits = super()._pass_route(node, back, port, key, payload)
        for emit in emits:
            self._note(node, emit, behind)
        return emits

    def _behind(self, node: int, back: bool, key: Key, causes: set[int]) -> set[int]:
        """Return the tasks behind the messages that a route will send for a message."""
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
        """Note the tasks behind a message to the next node."""
        back, port, key, _ = emit
        one = self.here.nodes.get(node)
        if isinstance(one, Group) and not back:
            behind = set().union(*(self._held.pop((node, member)) for member in one.cache[key]))
        to, into = self.here.targets[node, back, port]
        self._causes[to, back, into, key] = set(behind)


def _only(instances: Callable[[int], Any], number: int, _: int) -> Any:
    return instances(number)


def tasks_of(
    wiring: Wiring, instances: Callable[[int], Any], count: int, most_seconds: float = 2.0
) -> list[list[Task]]:
    """Return the tasks of the first instances; of fewer if they take longer than some seconds."""
    found: list[list[Task]] = []
    with torch.random.fork_rng(devices=[]):
        worker_alone(Worker, wiring, instances, 1).run()  # loads what torch loads late
        end = time.perf_counter() + most_seconds
        for number in range(count):
            worker = worker_alone(_Metered, wiring, partial(_only, instances, number), 1)
            worker.begin()
            worker.run()
            found.append(worker.tasks)
            if time.perf_counter() > end:
                break
    return found
