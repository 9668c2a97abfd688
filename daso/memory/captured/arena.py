"""Runs a recorded step in one arena of memory, planned in advance.

Every result has a place in the arena, which is known before the step begins and to which the
operation itself writes. Results of operations that can only allocate stay in their own memory until
they are not needed any more; the tensors that stand for them are pointed there.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Node

from daso.memory.captured.planner import pack
from daso.memory.captured.recorded import Output, Recording, TensorView, filled
from daso.memory.captured.writes import Call

HUGE_PAGE = 1 << 21  # bytes: fewer page faults and TLB misses
ALIGNMENT = 64  # bytes: a cache line, and torch's own alignment
POISON = 0xFF  # byte that makes NaN in all floating-point types


class Receiver(Protocol):
    """Receives gradients during backward."""

    def memory(self, index: int) -> torch.Tensor | None:
        """Return memory for a gradient, laid out as its parameter; None: any memory."""
        ...

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        """Take a gradient; its memory is overwritten later unless ``own``."""
        ...


class ArenaRun:
    """Runs a recording's operations with their results at planned places in an arena.

    Args:
        recording: The recording.
        way: Heuristic that plans the arena: see `daso.memory.captured.planner.pack`.
        device: Device of the arena.
        _poison: Fill blocks with NaN at the end of their lifetimes; for tests.
    """

    def __init__(
        self, recording: Recording, way: str, device: torch.device, *, _poison: bool = False
    ) -> None:
        blocks = recording.blocks
        planned = [home for home in range(len(blocks)) if home not in recording.loose]
        self.plan = pack([blocks[home] for home in planned], way, alignment=ALIGNMENT)
        self.recording = recording
        self.offsets = dict(zip(planned, self.plan.offsets, strict=True))
        self._arena = _make_arena(self.plan.nbytes, device)
        self._tensors: list[list[tuple[torch.Tensor, TensorView]]] = [[] for _ in blocks]
        self._env, self._outs = self._views(), self._results()
        self._held: list[tuple[torch.Tensor | None, int]] = [(None, 0)] * len(recording.roots)
        self._touched: dict[tuple[int, ...], tuple[list[tuple[Node, Node | None]], list[int]]] = {}
        self._handed: set[int] = set()  # blocks in memory of the receiver
        self._receiver: Receiver = _Copies()
        self._calls: list[Call] = []
        self._at: list[int] = []  # position of each operation in them
        self._forward = 0  # number of them in the forward pass
        for home in planned:
            self._to_arena(home)
        self._arrange(poison=_poison)

    # --- a run -------------------------------------------------------------------------------

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Run a step; return copies of loss and gradients."""
        copies, loss = _Copies(), self.forward(values).clone()
        self.backward(copies)
        return [loss, *map(copies.gradients.get, range(len(self.recording.outputs) - 1))]

    def forward(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the forward pass; return the loss, which later operations overwrite."""
        values = [*values, *self.recording.own]
        changed = [
            index
            for index, (value, (held, pointer)) in enumerate(zip(values, self._held, strict=True))
            if value is not held or value.data_ptr() != pointer
        ]
        if changed:
            self._bind(tuple(changed), values)
        for call in self._calls[: self._forward]:
            call()
        loss = self.recording.outputs[0]
        assert loss is not None
        result: torch.Tensor = self._env[loss.node]
        return result

    def backward(self, receiver: Receiver) -> None:
        """Run the backward pass; hand over each gradient as soon as it is complete."""
        self._receiver = receiver
        try:
            for call in self._calls[self._forward :]:
                call()
        finally:
            self._receiver = _Copies()

    def forget(self, numbers: Sequence[int]) -> None:
        """Release some values, so that they are not kept alive until the next call."""
        recording = self.recording
        outside, steps = self._touched_by(tuple(numbers))
        for node in [*(recording.roots[i] for i in numbers), *(node for node, _ in outside)]:
            self._env.pop(node, None)
        for index in steps:
            self._calls[self._at[index]] = _unbound
        for number in numbers:
            self._held[number] = (None, 0)

    # --- order of calls ----------------------------------------------------------------------

    def _arrange(self, *, poison: bool) -> None:
        """List the calls of a run: operations, and the events before each."""
        steps = range(len(self.recording.steps))
        events = [*self._deliveries(), *self._releases(), *self._preparations()]
        events += self._poisonings() if poison else []
        events += [_Event(index, OPERATION, index, _unbound) for index in steps]
        self._at = [0] * len(steps)
        for event in sorted(events, key=lambda event: event[:3]):
            if event.kind == OPERATION:
                self._at[event.order] = len(self._calls)
            if event.kind == BACKWARD:
                self._forward = len(self._calls)
            self._calls.append(event.call)
        for index, step in enumerate(self.recording.steps):
            if all(self.recording.places[node].home >= 0 for node in step.node.all_input_nodes):
                self._calls[self._at[index]] = self._bound(index)

    def _deliveries(self) -> Iterator["_Event"]:
        order = {node: at for at, node in enumerate(self.recording.graph.nodes)}
        for index, output in enumerate(self.recording.outputs):
            if output is not None:
                kind = GRADIENT if index else BACKWARD
                call = partial(self._deliver, index - 1, output) if index else _nothing
                yield _Event(output.step, kind, order[output.node], call)

    def _releases(self) -> Iterator["_Event"]:
        for home in {*self.recording.loose, *(home for _, home in self._placed_gradients())}:
            end = self.recording.blocks[home].end
            yield _Event(end, RELEASE, home, partial(self._release, home))

    def _preparations(self) -> Iterator["_Event"]:
        for index, home in self._placed_gradients():
            begin = self.recording.blocks[home].begin
            yield _Event(begin, PREPARE, home, partial(self._prepare, index, home))

    def _poisonings(self) -> Iterator["_Event"]:
        for home, at in self.offsets.items():
            block = self.recording.blocks[home]
            dead = self._arena[at : at + block.nbytes]
            yield _Event(block.end, RELEASE, home, partial(dead.fill_, POISON))

    def _placed_gradients(self) -> Iterator[tuple[int, int]]:
        """Yield gradients that an operation may write to ``.grad`` directly, and their blocks."""
        for index, output in enumerate(self.recording.outputs):
            if output is not None and output.alone:
                home = self.recording.places[output.node].home
                if home in self.offsets:
                    yield index - 1, home

    def _prepare(self, index: int, home: int) -> None:
        """Point a gradient's block to memory of its receiver, or back to the arena."""
        memory = self._receiver.memory(index)
        if memory is not None:
            start = int(memory.storage_offset()) * memory.itemsize
            self._point(home, memory.untyped_storage(), start)
            self._handed.add(home)
        elif home in self._handed:
            self._to_arena(home)

    def _deliver(self, index: int, output: Output) -> None:
        gradient, home = self._env[output.node], self.recording.places[output.node].home
        own = output.alone and (home in self._handed or home in self.recording.loose)
        self._receiver.take(index, gradient.detach() if own else gradient, own=own)

    def _release(self, home: int) -> None:
        """Release a block's memory outside the arena."""
        if home in self.recording.loose or home in self._handed:
            for tensor, _ in self._tensors[home]:
                tensor.set_()  # type: ignore[call-overload]

    # --- places of tensors -------------------------------------------------------------------

    def _point(self, home: int, storage: torch.UntypedStorage, start: int) -> None:
        """Point all tensors of a block to a storage, from a byte on."""
        for tensor, place in self._tensors[home]:
            offset = start // place.dtype.itemsize + place.offset
            tensor.set_(storage, offset, place.size, place.stride)

    def _to_arena(self, home: int) -> None:
        start = int(self._arena.storage_offset()) + self.offsets[home]
        self._point(home, self._arena.untyped_storage(), start)
        self._handed.discard(home)

    def _adopt(self, home: int, result: torch.Tensor) -> None:
        """Point a block to the memory that an operation allocated."""
        self._point(home, result.untyped_storage(), 0)

    def _tensor(self, place: TensorView) -> torch.Tensor:
        """Return a tensor of a block, not yet pointed to memory."""
        tensor = torch.empty(0, dtype=place.dtype, device=self._arena.device)
        self._tensors[place.home].append((tensor, place))
        return tensor

    def _views(self) -> dict[Node, Any]:
        """Return the tensors that operations or outputs use, by node."""
        used = {node for step in self.recording.steps for node in step.node.all_input_nodes}
        used |= {output.node for output in self.recording.outputs if output is not None}
        return {
            node: self._tensor(place)
            for node, place in self.recording.places.items()
            if node in used and isinstance(place, TensorView) and place.home >= 0
        }

    def _results(self) -> list[list[Any]]:
        """Return for each operation the targets of its results: tensors, or receiving functions."""

        def target(place: TensorView | None) -> Any:
            if place is None:
                return None
            if place.home in self.recording.loose:
                return partial(self._adopt, place.home)
            return self._tensor(place)

        return [[target(place) for place in step.outs] for step in self.recording.steps]

    # --- arguments of operations -------------------------------------------------------------

    def _bind(self, changed: tuple[int, ...], values: Sequence[torch.Tensor]) -> None:
        """Rebind operations to the current inputs."""
        outside, steps = self._touched_by(changed)
        for index in changed:
            self._env[self.recording.roots[index]] = values[index]
        for node, source in outside:
            if source is not None:
                self._env[node] = self._env[source]
            else:
                kwargs = {name: filled(value, self._env) for name, value in node.kwargs.items()}
                self._env[node] = node.target(*filled(node.args, self._env), **kwargs)  # type: ignore[operator]
        for step_index in steps:
            self._calls[self._at[step_index]] = self._bound(step_index)
        for index in changed:
            self._held[index] = (values[index], values[index].data_ptr())

    def _touched_by(
        self, changed: tuple[int, ...]
    ) -> tuple[list[tuple[Node, Node | None]], list[int]]:
        """Return the views and operations that use any of some values."""
        if changed not in self._touched:
            places, homes = self.recording.places, {-1 - index for index in changed}
            self._touched[changed] = (
                [view for view in self.recording.outside if _home(places[view[0]]) in homes],
                [
                    index
                    for index, step in enumerate(self.recording.steps)
                    if any(_home(places[node]) in homes for node in step.node.all_input_nodes)
                ],
            )
        return self._touched[changed]

    def _bound(self, index: int) -> Call:
        """Return a call of an operation with its arguments."""
        step = self.recording.steps[index]
        kwargs = {name: filled(value, self._env) for name, value in step.node.kwargs.items()}
        return step.make(self._outs[index], filled(step.node.args, self._env), kwargs)


GRADIENT, RELEASE, PREPARE, OPERATION = range(1, 5)  # kinds of events, in their order
BACKWARD = 0  # kind of the event that begins the backward pass


class _Event(NamedTuple):
    """A call at a point of the run."""

    step: int  # number of operations before it
    kind: int
    order: int  # among events of one kind
    call: Call


class _Copies:
    """Receiver that keeps copies of gradients."""

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor] = {}

    def memory(self, _: int) -> torch.Tensor | None:
        return None

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        self.gradients[index] = gradient if own else gradient.clone()


def _nothing() -> None: ...


def _unbound() -> None:
    raise AssertionError("an operation runs before its arguments are bound")


def _home(place: Any) -> int:
    """Return the home of an operation's results; several are views of one value."""
    if isinstance(place, list):
        return next((view.home for view in place if view is not None), 0)
    return 0 if place is None else int(place.home)


def _make_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return aligned memory; on the host in huge pages, if supported."""
    align = ALIGNMENT if device.type != "cpu" else HUGE_PAGE if nbytes >= HUGE_PAGE else ALIGNMENT
    size = max(1, nbytes) + align
    if align == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages = mmap.mmap(-1, size)
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(pages, dtype=torch.uint8)
    else:
        room = torch.empty(size, dtype=torch.uint8, device=device)
    start = -room.data_ptr() % align
    return room[start : start + nbytes]
