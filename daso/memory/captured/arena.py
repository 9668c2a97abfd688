"""A recorded step's operations, run in one piece of memory that was planned in advance.

Every tensor that an operation makes has its place in the arena, known before the step begins, where
the operation itself writes it. What operations can only allocate stays where they put it, until it
is not needed any more: the tensors that stand for it are pointed there.
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

__all__ = ["ArenaRun", "Receiver"]

HUGE_PAGE = 1 << 21  # bytes: fewer pages to look up, and to make
ALIGNMENT = 64  # bytes: a cache line, and what torch gives to a tensor of its own
POISON = 0xFF  # in every byte: NaN in all floating-point types


class Receiver(Protocol):
    """Who is given gradients while backward goes on."""

    def memory(self, index: int) -> torch.Tensor | None:
        """Return memory for a gradient, laid out as its parameter; None: it may lie anywhere."""
        ...

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        """Take a gradient; its memory is overwritten afterwards unless it is the taker's own."""
        ...


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
        self._handed: set[int] = set()  # blocks that lie in memory of the receiver's
        self._receiver: Receiver = _Copies()
        self._calls: list[Call] = []
        self._at: list[int] = []  # where in them each operation is
        self._forward = 0  # how many of them are the forward pass's
        for home in planned:
            self._to_arena(home)
        self._arrange(poison=_poison)

    # --- a run -------------------------------------------------------------------------------

    def __call__(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return loss and gradients, in memory of their own."""
        copies, loss = _Copies(), self.forward(values).clone()
        self.backward(copies)
        return [loss, *map(copies.gradients.get, range(len(self.recording.outputs) - 1))]

    def forward(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Run the forward pass; return the loss, which is overwritten afterwards."""
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
        found: torch.Tensor = self._env[loss.node]
        return found

    def backward(self, receiver: Receiver) -> None:
        """Run the backward pass; hand over each gradient as soon as it is there."""
        self._receiver = receiver
        try:
            for call in self._calls[self._forward :]:
                call()
        finally:
            self._receiver = _Copies()

    def forget(self, which: Sequence[int]) -> None:
        """Let go of some values: they are not kept alive until the next call."""
        recording = self.recording
        outside, steps = self._touched_by(tuple(which))
        for node in [*(recording.roots[one] for one in which), *(node for node, _ in outside)]:
            self._env.pop(node, None)
        for index in steps:
            self._calls[self._at[index]] = _unbound
        for one in which:
            self._held[one] = (None, 0)

    # --- what is called, and in which order --------------------------------------------------

    def _arrange(self, *, poison: bool) -> None:
        """List operations, and what is due before each."""
        steps = range(len(self.recording.steps))
        events = [*self._deliveries(), *self._releases(), *self._preparations()]
        events += self._poisonings() if poison else []
        events += [_Event(index, OPERATION, index, _unbound) for index in steps]
        self._at = [0] * len(steps)
        for event in sorted(events, key=lambda one: one[:3]):
            if event.kind == OPERATION:
                self._at[event.order] = len(self._calls)
            if event.kind == BACKWARD:
                self._forward = len(self._calls)
            self._calls.append(event.call)
        for index, step in enumerate(self.recording.steps):
            if all(self.recording.places[one].home >= 0 for one in step.node.all_input_nodes):
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
        """Return gradients that an operation may write to ``.grad`` itself, and their blocks."""
        for index, output in enumerate(self.recording.outputs):
            if output is not None and output.alone:
                home = self.recording.places[output.node].home
                if home in self.offsets:
                    yield index - 1, home

    def _prepare(self, index: int, home: int) -> None:
        """Let a gradient be written where its receiver wants it."""
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
        """Let go of memory outside the arena."""
        if home in self.recording.loose or home in self._handed:
            for tensor, _ in self._tensors[home]:
                tensor.set_()  # type: ignore[call-overload]

    # --- where tensors lie -------------------------------------------------------------------

    def _point(self, home: int, storage: torch.UntypedStorage, start: int) -> None:
        """Let all tensors of a block lie in some memory, from a byte on."""
        for tensor, place in self._tensors[home]:
            offset = start // place.dtype.itemsize + place.offset
            tensor.set_(storage, offset, place.size, place.stride)

    def _to_arena(self, home: int) -> None:
        start = int(self._arena.storage_offset()) + self.offsets[home]
        self._point(home, self._arena.untyped_storage(), start)
        self._handed.discard(home)

    def _land(self, home: int, result: torch.Tensor) -> None:
        """Take what an operation allocated for a block."""
        self._point(home, result.untyped_storage(), 0)

    def _tensor(self, place: TensorView) -> torch.Tensor:
        """Return a tensor of a block, which lies nowhere yet."""
        tensor = torch.empty(0, dtype=place.dtype, device=self._arena.device)
        self._tensors[place.home].append((tensor, place))
        return tensor

    def _views(self) -> dict[Node, Any]:
        """Return the tensors that are used, by the nodes whose results they are."""
        used = {node for step in self.recording.steps for node in step.node.all_input_nodes}
        used |= {output.node for output in self.recording.outputs if output is not None}
        return {
            node: self._tensor(place)
            for node, place in self.recording.places.items()
            if node in used and isinstance(place, TensorView) and place.home >= 0
        }

    def _results(self) -> list[list[Any]]:
        """Return, for each operation, where its results go: a tensor, or who takes a result."""

        def target(place: TensorView | None) -> Any:
            if place is None:
                return None
            if place.home in self.recording.loose:
                return partial(self._land, place.home)
            return self._tensor(place)

        return [[target(place) for place in step.outs] for step in self.recording.steps]

    # --- what operations are given -----------------------------------------------------------

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
            self._calls[self._at[index]] = self._bound(index)
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
        kwargs = {name: filled(one, self._env) for name, one in step.node.kwargs.items()}
        return step.make(self._outs[index], filled(step.node.args, self._env), kwargs)


GRADIENT, RELEASE, PREPARE, OPERATION = range(1, 5)  # kinds of events, in their order
BACKWARD = 0  # begins


class _Event(NamedTuple):
    """A call, and when it is due."""

    step: int  # operations that run before it
    kind: int
    order: int  # of events of one kind
    call: Call


class _Copies:
    """Receives gradients and keeps copies."""

    def __init__(self) -> None:
        self.gradients: dict[int, torch.Tensor] = {}

    def memory(self, _: int) -> torch.Tensor | None:
        return None

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        self.gradients[index] = gradient if own else gradient.clone()


def _nothing() -> None: ...


def _unbound() -> None:
    raise AssertionError("an operation runs before its arguments are there")


def _home(place: Any) -> int:
    """Return where an operation's results lie; views of one value if there are several."""
    if isinstance(place, list):
        return next((one.home for one in place if one is not None), 0)
    return 0 if place is None else int(place.home)


def _make_arena(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory whose first byte is aligned; on the host in large pages, where it has such."""
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
