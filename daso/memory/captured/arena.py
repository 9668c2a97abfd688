"""A recorded step's operations, run in one piece of memory that was planned in advance.

Every tensor that an operation makes has its place in the arena, known before the step begins: the
operation writes there itself, or what it returns is copied there.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from daso.memory.captured.planner import pack
from daso.memory.captured.recorded import Recording, TensorView, filled
from daso.memory.captured.writes import Call

__all__ = ["ArenaRun"]

ALIGNMENT = 64  # bytes: a cache line, and what torch gives to a tensor of its own
POISON = 0xFF  # in every byte: NaN in all floating-point types


class ArenaRun:
    """Runs a recording's operations, each with its results where it was planned.

    Args:
        recording: What to run.
        way: How the arena is planned: see `daso.memory.captured.planner.pack`.
        device: Where the arena is.
        _poison: Fill with NaN what is not needed any more: for tests.
    """

    def __init__(
        self, recording: Recording, way: str, device: torch.device, *, _poison: bool = False
    ) -> None:
        self.plan = pack(recording.blocks, way, alignment=ALIGNMENT)
        self.recording = recording
        self._arena = _aligned(self.plan.nbytes, device)
        self._poison = _poison
        self._env = self._views()
        self._calls: list[Call | None] = [None] * len(recording.steps)
        self._held: list[tuple[torch.Tensor | None, int]] = [(None, 0)] * len(recording.roots)
        self._touched: dict[tuple[int, ...], tuple[list[tuple[Node, Node | None]], list[int]]] = {}
        if _poison:
            self._arena.fill_(POISON)
        for index, step in enumerate(recording.steps):
            if all(recording.places[one].home >= 0 for one in step.node.all_input_nodes):
                self._calls[index] = self._bound(index)

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run the operations."""
        values = [*values, *self.recording.own]
        changed = [
            index
            for index, (value, (held, pointer)) in enumerate(zip(values, self._held, strict=True))
            if value is not held or value.data_ptr() != pointer
        ]
        if changed:
            self._bind(tuple(changed), values)
        for call in self._calls:
            call()  # type: ignore[misc]
        return [None if one is None else self._env[one] for one in self.recording.outputs()]

    def forget(self, which: Sequence[int]) -> None:
        """Let go of some values: they are not kept alive until the next call."""
        recording = self.recording
        outside, steps = self._touched_by(tuple(which))
        for node in [*(recording.roots[one] for one in which), *(node for node, _ in outside)]:
            self._env.pop(node, None)
        for index in steps:
            self._calls[index] = None
        for one in which:
            self._held[one] = (None, 0)

    def _bind(self, changed: tuple[int, ...], values: Sequence[torch.Tensor]) -> None:
        """Let the operations that use values use those that are there now."""
        outside, steps = self._touched_by(changed)
        for one in changed:
            self._env[self.recording.roots[one]] = values[one]
        for node, source in outside:
            if source is not None:
                self._env[node] = self._env[source]
            else:
                kwargs = {name: filled(one, self._env) for name, one in node.kwargs.items()}
                self._env[node] = node.target(*filled(node.args, self._env), **kwargs)  # type: ignore[operator]
        for index in steps:
            self._calls[index] = self._bound(index)
        for one in changed:
            self._held[one] = (values[one], values[one].data_ptr())

    def _touched_by(
        self, changed: tuple[int, ...]
    ) -> tuple[list[tuple[Node, Node | None]], list[int]]:
        """Return which views and operations use any of some values."""
        if changed not in self._touched:
            places, homes = self.recording.places, {-1 - one for one in changed}
            self._touched[changed] = (
                [one for one in self.recording.outside if _home(places[one[0]]) in homes],
                [
                    index
                    for index, step in enumerate(self.recording.steps)
                    if any(_home(places[one]) in homes for one in step.node.all_input_nodes)
                ],
            )
        return self._touched[changed]

    def _bound(self, index: int) -> Call:
        """Return an operation with its arguments."""
        step = self.recording.steps[index]
        outs = [None if place is None else self._view(place) for place in step.outs]
        kwargs = {name: filled(one, self._env) for name, one in step.node.kwargs.items()}
        call = step.make(outs, filled(step.node.args, self._env), kwargs)
        if not self._poison:
            return call
        dead = [
            self._arena[at : at + block.nbytes]
            for at, block in zip(self.plan.offsets, self.recording.blocks, strict=True)
            if block.end == index + 1
        ]
        return partial(_then_fill, call, dead)

    def _views(self) -> dict[Node, Any]:
        """Return the tensors in the arena, by the nodes whose results they are."""
        return {
            node: self._view(place)
            for node, place in self.recording.places.items()
            if isinstance(place, TensorView) and place.home >= 0
        }

    def _view(self, place: TensorView) -> torch.Tensor:
        typed = self._arena.view(place.dtype)
        start = self.plan.offsets[place.home] // place.dtype.itemsize + place.offset
        return typed.as_strided(place.size, place.stride, typed.storage_offset() + start)


def _then_fill(call: Call, dead: Sequence[torch.Tensor]) -> None:
    call()
    for one in dead:
        one.fill_(POISON)


def _home(place: Any) -> int:
    """Return where an operation's results lie; views of one value if there are several."""
    if isinstance(place, list):
        return next((one.home for one in place if one is not None), 0)
    return 0 if place is None else int(place.home)


def _aligned(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory whose first byte is aligned."""
    room = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % ALIGNMENT
    return room[start : start + nbytes]
