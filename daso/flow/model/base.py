"""What is the same for all nodes of a flow while messages go through them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.graph import Item, Node, State

__all__ = ["ALIGNMENT", "Base", "Emit", "Key", "Pass", "Payload", "leaf", "settled"]

Key = tuple[int, ...]  # number of the instance in its epoch, and the state
Payload = tuple[torch.Tensor | None, ...]  # backward: None where there is no gradient
Emit = tuple[bool, int, Key, Payload]  # backward?; port that it leaves by (backward: came in by)
ALIGNMENT = 64  # bytes: of memory that torch allocates


@dataclass(slots=True)
class Pass:
    """What is the same for all nodes of a rank while it goes through instances.

    Args:
        instances: By their numbers.
        trains: Or evaluates.
        seed: Of random numbers: equal for a node and a key, whatever the order.
        results: Of losses: key, loss, and what is reported besides.
    """

    instances: Callable[[int], Any]
    trains: bool
    seed: int
    results: list[tuple[Key, float, dict[str, float]]] = field(default_factory=list)


class Base:
    """A node on one rank.

    Args:
        node: Which.
        all_: What is the same for all.
    """

    def __init__(self, node: Node, all_: Pass) -> None:
        self.node, self.all = node, all_
        self.cache: dict[Key, Any] = {}  # of what was sent on, and whose backward is to come
        self.open: dict[Key, dict[Any, Payload]] = {}  # what waits for the rest of it

    def item(self, key: Key, payload: Payload) -> Item:
        """Return what a user's function is told of a message."""
        return Item(self.all.instances(key[0]), key[1:], payload)  # type: ignore[arg-type]

    def keep(self, key: Key, what: Any) -> None:
        """Keep what backward needs."""
        if key in self.cache:
            raise FlowError(
                f"a node must be sent every state of an instance once, but state {key[1:]} came "
                f"twice to {self.node.kind} {self.node.name!r}; let update, flatmap or ungroup "
                f"make the states different"
            )
        self.cache[key] = what

    def state(self, state: Any) -> State:
        """Return a state that a user's function gave, as numbers."""
        try:
            return tuple(map(index, state))
        except TypeError:
            raise FlowError(
                f"a state must be a tuple of whole numbers, but {self.node.kind} "
                f"{self.node.name!r} was given {state!r}"
            ) from None


def leaf(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor as a message carries it; autograd begins anew from it."""
    wants = tensor.requires_grad if of is None else of.requires_grad
    return settled(tensor.detach()).requires_grad_(wants)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor as they lie when they come from another rank.

    Strides and alignment decide in which order some kernels add: so, where a node is computed does
    not change a bit.
    """
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
