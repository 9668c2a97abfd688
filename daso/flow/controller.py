"""Admission of instances, and the count of their messages until they are finished."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.base import Key, Payload, leaf
from daso.flow.model.node import Node
from daso.flow.plan import choose_lane


@dataclass(slots=True)
class Controller:
    """Admits instances, up to a number under way at once."""

    max_active: int  # instances under way at once, at most
    count: int  # of all instances
    source: Node
    lanes: int = 1  # assignments of instances to replicas
    chosen: Sequence[int] = ()  # lanes of all instances, in a replay
    admitted: int = 0
    finished: int = 0
    highest: int = 0  # number of instances under way at once, so far
    waiting: dict[int, int] = field(default_factory=dict)  # messages of each that have not returned
    lane_of: list[int] = field(default_factory=list)  # of every admitted instance
    _under_way: list[int] = field(default_factory=list)  # of each lane

    def __post_init__(self) -> None:
        self._under_way = [0] * self.lanes

    @property
    def is_over(self) -> bool:
        """All instances are finished."""
        return self.finished == self.count

    def may_admit(self) -> bool:
        """Return whether the next instance may be admitted."""
        return self.admitted < self.count and len(self.waiting) < self.max_active

    def admit(self, instance: Any) -> list[tuple[Key, Payload]]:
        """Admit the next instance; return its messages."""
        number = self.admitted
        lane = self.chosen[number] if self.chosen else choose_lane(self._under_way, number)
        self.lane_of.append(lane)
        self._under_way[lane] += 1
        self.admitted += 1
        messages = self._make_messages(instance, number)
        self.waiting[number] = len(messages)
        self.highest = max(self.highest, len(self.waiting))
        return messages

    def _make_messages(self, instance: Any, number: int) -> list[tuple[Key, Payload]]:
        """Return the checked messages that the source makes from an instance."""
        width = self.source.outputs[0]
        try:
            result = self.source.call(instance)
            first = result if isinstance(result, Mapping) else {(): result}
            messages = [
                ((number, *map(index, state)), _payload(payload))
                for state, payload in first.items()
            ]
        except Exception as error:
            raise FlowError(
                f"source {self.source.name!r} must make {width} tensors of an instance, or a dict "
                f"to such from states, each a tuple of whole numbers, but failed for instance "
                f"{number}: {type(error).__name__}: {error}",
                code="source-failed",
            ) from error
        if not messages or any(len(payload) != width for _, payload in messages):
            raise FlowError(
                f"source {self.source.name!r} must make a message at least of every instance, with "
                f"as many tensors as its outputs say, {width}, but of instance {number} it made "
                f"messages with {[len(payload) for _, payload in messages]}",
                code="source-without-message",
            )
        return messages

    def count_returned(self, number: int) -> bool:
        """Count a returned message; return whether it was the last of its instance."""
        self.waiting[number] -= 1
        if self.waiting[number]:
            return False
        del self.waiting[number]
        self._under_way[self.lane_of[number]] -= 1
        self.finished += 1
        return True


def _payload(result: Any) -> Payload:
    tensors = result if isinstance(result, tuple) else (result,)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{tensor!r} is not a tensor")
    return tuple(map(leaf, tensors))
