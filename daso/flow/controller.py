"""Where instances come in, and are counted until they are finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.base import Key, Payload, leaf
from daso.flow.model.graph import Node
from daso.flow.plan import choose_lane

__all__ = ["Controller"]


@dataclass(slots=True)
class Controller:
    """Lets instances in, no more at once than may be.

    Args:
        most: That may be under way.
        count: Of all instances.
        source: The node.
        lanes: In how many ways instances go through replicas.
        chosen: Lanes of all instances, of a run before; else they are chosen.
    """

    most: int
    count: int
    source: Node
    lanes: int = 1
    chosen: Sequence[int] = ()
    admitted: int = 0
    finished: int = 0
    highest: int = 0  # that were under way at once
    waiting: dict[int, int] = field(default_factory=dict)  # messages of each, that are to come back
    lane_of: list[int] = field(default_factory=list)  # every instance that was let in
    _under_way: list[int] = field(default_factory=list)  # of each lane

    def __post_init__(self) -> None:
        self._under_way = [0] * self.lanes

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
        lane = self.chosen[number] if self.chosen else choose_lane(self._under_way, number)
        self.lane_of.append(lane)
        self._under_way[lane] += 1
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
        self._under_way[self.lane_of[number]] -= 1
        self.finished += 1
        return True


def _payload(made: Any) -> Payload:
    found = made if isinstance(made, tuple) else (made,)
    for one in found:
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"{one!r} is no tensor")
    return tuple(map(leaf, found))
