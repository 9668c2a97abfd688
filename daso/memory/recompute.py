"""A unit's tail, made once more: the operations that made it run again, on what they read."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from daso.memory.activation_trace import SHAPES_ALONE, Closure, keeps_statistics, name_of
from daso.memory.observe import tensors_in
from daso.memory.profile import View

__all__ = ["Content", "RecomputeSegment", "Taken"]


class Content(Protocol):
    """A saved storage that is, or can be brought, there."""

    def content(self) -> torch.Tensor:
        """Return a tensor that lies in it; blocks until it is there."""
        ...

    def fill(self, tensor: torch.Tensor) -> None:
        """Take what was made again."""
        ...


class _Given(NamedTuple):
    """A tensor that an operation reads: where it comes from, and how it lies there."""

    storage: int
    view: View
    held: torch.Tensor | None  # itself, where it is neither made again nor saved
    version: int


class Taken(NamedTuple):
    """What an operation runs with."""

    number: int
    func: Any
    leaves: list[Any]
    spec: Any
    random: torch.Tensor | None
    device: torch.device


class _Note(NamedTuple):
    """What is needed to run an operation again."""

    taken: Taken
    makes: tuple[int, ...]
    views: list[View]


class RecomputeSegment:
    """What a unit's tail is made of again.

    Args:
        closure: The operations.
    """

    def __init__(self, closure: Closure) -> None:
        self.closure = closure
        self.anchors: dict[int, Content] = {}
        self.items: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._waiting: dict[int, torch.Tensor] = {}
        self._notes: list[_Note] = []

    def anchor(self, storage: int, content: Content) -> None:
        """Take a saved storage of a head, from which something is made."""
        self.anchors[storage] = content
        self._waiting.pop(storage, None)

    def take(
        self, number: int, func: Any, args: Any, kwargs: Mapping[str, Any], reads: Sequence[int]
    ) -> Taken:
        """Return what an operation is about to run with, to run it again."""
        leaves, spec = tree_flatten((args, kwargs))
        numbers = iter(reads)
        tensors = (leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor))
        device = next(tensors, torch.device(kwargs.get("device") or "cpu"))
        if _reads_shapes_alone(func):
            return Taken(number, func, [], spec, None, device)
        kept = [
            self._given(leaf, next(numbers)) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        return Taken(number, func, kept, spec, _random_state(device) if seeded else None, device)

    def note(self, taken: Taken, found: Any, makes: Sequence[int]) -> None:
        """Note an operation with what it has given."""
        shapes = _reads_shapes_alone(taken.func)
        views = [View.of(tensor) for tensor in tensors_in(found)] if shapes else []
        self._notes.append(_Note(taken, tuple(makes), views))

    def _given(self, tensor: torch.Tensor, storage: int) -> _Given:
        held = None
        if storage in self.closure.anchors:
            if storage not in self.anchors:  # saved later: there until then
                self._waiting[storage] = tensor.detach()
        elif storage not in self.closure.makes:
            # Not with its history, which holds what is made again.
            held = tensor if tensor.is_leaf else tensor.detach()
        return _Given(storage, View.of(tensor), held, 0 if held is None else held._version)

    def make_early(self) -> None:
        """Run its operations again now where it waits for a tensor that is saved later.

        For a model that does other than planned: nothing tells whether that one stays as it is.
        """
        if self._waiting and self._notes:
            self.make()

    def make(self) -> None:
        """Run its operations again, and give what was saved of their results back."""
        made: dict[int, torch.Tensor] = {}
        device = self._notes[0].taken.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            for note in self._notes:
                self._again(note, made)
                for one in self.closure.ends.get(note.taken.number, ()):
                    made.pop(one, None)
        for one, item in self.items.items():
            item.fill(made[one])
        self._notes.clear()
        self.anchors.clear()
        self._waiting.clear()

    def _again(self, note: _Note, made: dict[int, torch.Tensor]) -> None:
        taken = note.taken
        if _reads_shapes_alone(taken.func):
            view = note.views[0]
            made[note.makes[0]] = torch.empty_strided(
                view.size, view.stride, dtype=view.dtype, device=taken.device
            )
            return
        leaves = [
            self._value(leaf, made) if isinstance(leaf, _Given) else leaf for leaf in taken.leaves
        ]
        if keeps_statistics(taken.func):
            # Running statistics changed in forward; they must not change again.
            leaves = [
                old.held.clone() if isinstance(old, _Given) and old.held is not None else new
                for old, new in zip(taken.leaves, leaves, strict=True)
            ]
        args, kwargs = tree_unflatten(leaves, taken.spec)
        with _random(taken.random, taken.device):
            found = taken.func(*args, **kwargs)
        for one, tensor in zip(note.makes, tensors_in(found), strict=True):
            made.setdefault(one, tensor)

    def _value(self, given: _Given, made: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if given.storage in made:
            return given.view.on(made[given.storage])
        if given.storage in self.anchors:
            return given.view.on(self.anchors[given.storage].content())
        if given.storage in self._waiting:
            return given.view.on(self._waiting[given.storage])
        assert given.held is not None
        if given.held._version != given.version:
            raise RuntimeError(
                f"what is recomputed must read what forward read, but a tensor of shape "
                f"{list(given.view.size)} was changed in place since; change it after backward"
            )
        return given.held


def _reads_shapes_alone(func: Any) -> bool:
    return name_of(func) in SHAPES_ALONE


def _random_state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


@contextmanager
def _random(state: torch.Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw the random numbers that follow on a state; leave the generator as it is."""
    if state is None:
        yield
        return
    before = _random_state(device)
    _set_random_state(state, device)
    try:
        yield
    finally:
        _set_random_state(before, device)
