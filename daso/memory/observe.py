"""What an iteration does to memory: every operation below autograd, and the storages it touches."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["ObservedStorage", "Observer", "Op", "bytes_of", "counts", "has_storage", "tensors_in"]

NEVER = 1 << 62  # died: it has not


@dataclass(slots=True)
class Op:
    """One operation.

    Args:
        func: What was called, an overload of `torch.ops`.
        reads: Storages of tensors among its arguments, in their order.
        makes: Storages of tensors among its results, in their order.
        writes: Storages that it says to change in place.
        plain: Whether all its tensors lie in storages, none is sparse, and random numbers are the
            default generator's.
        seconds: That it took.
    """

    func: Any
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    plain: bool
    seconds: float


@dataclass(slots=True)
class ObservedStorage:
    """A storage.

    Args:
        nbytes: Its size.
        born: Operation that made it; -1 where it was there before.
        died: Operation by which it was gone; `NEVER` where it was not.
    """

    nbytes: int
    born: int
    died: int = NEVER


def has_storage(leaf: object) -> bool:
    """Return whether something is a tensor that lies in a storage: not a sparse one."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors of arguments or results that have storages, in their order."""
    return [leaf for leaf in tree_leaves(tree) if has_storage(leaf)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as a row of bytes (nbytes, uint8)."""
    storage = tensor.untyped_storage()
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return row.set_(storage, 0, (storage.nbytes(),), (1,))


def counts(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation has a number.

    Casts of parameters have none: autocast keeps them, and the next forward then does without.
    """
    return not (func is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter))


@dataclass
class Memory:
    """Storages by the order in which they were seen."""

    seen: list[ObservedStorage] = field(default_factory=list)
    numbers: dict[int, int] = field(default_factory=dict)  # of those that are there, by address
    _references: dict[int, Any] = field(default_factory=dict)

    def number(self, tensor: torch.Tensor, born: int, now: Callable[[], int]) -> int:
        """Return a storage's number; it gets one if it has none."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.numbers:
            return self.numbers[address]
        number = len(self.seen)
        self.seen.append(ObservedStorage(storage.nbytes(), born))
        self.numbers[address] = number

        def gone(_: object) -> None:
            self.seen[number].died = now()
            self.numbers.pop(address, None)
            self._references.pop(address, None)

        self._references[address] = weakref.ref(storage, gone)
        return number


class Observer(TorchDispatchMode):
    """Writes down every operation while it is entered, below autograd and autocast.

    Args:
        before: Called before each operation, with its number and what is called.
    """

    def __init__(self, before: Callable[[int, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.memory = Memory()
        self.casts: dict[int, int] = {}  # bytes of parameters' casts, by storage
        self._before = before

    @property
    def next(self) -> int:
        """Number of the next operation."""
        return len(self.ops)

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, as one that was there before if it is new."""
        return self.memory.number(tensor, -1, lambda: self.next)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry out an operation, and write it down."""
        kwargs = kwargs or {}
        if not counts(func, args):
            found = func(*args, **kwargs)
            self.casts[self.number(found)] = found.untyped_storage().nbytes()
            return found
        number = self.next
        if self._before is not None:
            self._before(number, func)
        given = tensors_in((args, kwargs))
        reads = tuple(self.number(tensor) for tensor in given)
        writes = tuple(self.number(tensor) for tensor in _written(func, args, kwargs))
        start = time.perf_counter()
        found = func(*args, **kwargs)
        if given and given[0].is_cuda:
            torch.cuda.synchronize(given[0].device)
        seconds = time.perf_counter() - start
        made = tuple(
            self.memory.number(tensor, number, lambda: self.next) for tensor in tensors_in(found)
        )
        leaves = tree_leaves((args, kwargs, found))
        plain = all(_is_plain(one) for one in leaves if isinstance(one, torch.Tensor))
        plain = plain and not any(isinstance(one, torch.Generator) for one in leaves)
        self.ops.append(Op(func, reads, made, writes, plain, seconds))
        return found

    def live(self, without: set[int]) -> list[int]:
        """Return the bytes that were there during each operation, of what was made meanwhile."""
        changes = [0] * (len(self.ops) + 1)
        for number, seen in enumerate(self.memory.seen):
            if seen.born >= 0 and number not in without:
                changes[seen.born] += seen.nbytes
                changes[min(seen.died, len(self.ops))] -= seen.nbytes
        total, found = 0, []
        for change in changes[:-1]:
            total += change
            found.append(total)
        return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether its bytes, its sizes and its type say all of it."""
    return has_storage(tensor) and not (tensor.is_conj() or tensor.is_neg())


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Iterate over the arguments that an operation says to change."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from tensors_in(given)
