"""Storages of tensors: their bytes, their identity, and the layout of tensors in them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from daso.torch_private import storage_key, tree_leaves


def has_storage(leaf: object) -> bool:
    """Return whether an object is a tensor with a storage, hence not a sparse one."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def tensors_in(tree: object) -> list[torch.Tensor]:
    """Return the tensors with storages in arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if has_storage(leaf)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's whole storage as a row of bytes (nbytes, uint8)."""
    return storage_bytes(tensor.untyped_storage(), tensor.device)


def storage_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a storage as a row of bytes (nbytes, uint8)."""
    row = torch.empty(0, dtype=torch.uint8, device=device)
    return row.set_(storage, 0, (storage.nbytes(),), (1,))


class View(NamedTuple):
    """The type and layout of a tensor in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Return a tensor's view."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with this layout in the storage of another tensor."""
        placed = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return placed.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)


class Storages:
    """Numbers storages in the order in which they are first seen."""

    def __init__(self, on_free: Callable[[int], None] = lambda _: None) -> None:
        self.nbytes: list[int] = []
        self._on_free = on_free
        self._numbers: dict[int, int] = {}  # of living storages, by address
        self._references: dict[int, Any] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage; a new storage gets the next number."""
        storage = tensor.untyped_storage()
        address = storage_key(storage)
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self.nbytes)
            self.nbytes.append(storage.nbytes())

            def freed(_: object, number: int = number) -> None:
                del self._numbers[address], self._references[number]
                self._on_free(number)

            self._references[number] = weakref.ref(storage, freed)
        return number

    def living(self, number: int) -> torch.UntypedStorage | None:
        """Return a storage by its number; None when it is freed."""
        reference = self._references.get(number)
        return None if reference is None else reference()
