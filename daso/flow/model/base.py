"""State shared by all nodes of a flow during a pass, and the base of all nodes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.node import Item, Node, State

Key = tuple[int, ...]  # number of the instance in its epoch, and the state
Payload = tuple[torch.Tensor | None, ...]  # backward: None where there is no gradient
Emit = tuple[bool, int, Key, Payload]  # backward; output port, or input port if backward
ALIGNMENT = 64  # bytes, of torch's allocations


@dataclass(slots=True)
class Pass:
    """Settings and results of one pass, shared by all nodes of a rank."""

    instances: Callable[[int], Any]  # by number
    trains: bool
    seed: int  # random numbers depend on it, the node and the key, not on the order
    # Key, loss and metrics of each message at a loss.
    results: list[tuple[Key, float, dict[str, float]]] = field(default_factory=list)


class Base:
    """Base of all nodes on one rank."""

    def __init__(self, node: Node, all_: Pass) -> None:
        self.node, self.all = node, all_
        self.cache: dict[Key, Any] = {}  # state of sent messages until their backward
        self.open: dict[Key, dict[Any, Payload]] = {}  # incomplete inputs

    def item(self, key: Key, payload: Payload) -> Item:
        """Return the item for a user's function."""
        return Item(self.all.instances(key[0]), key[1:], payload)  # type: ignore[arg-type]

    def keep(self, key: Key, state: Any) -> None:
        """Store the state that the backward of a key needs."""
        if key in self.cache:
            raise FlowError(
                f"a node must get every state of an instance once, but state {key[1:]} came "
                f"twice to {self.node.kind} {self.node.name!r}; let update, flatmap or ungroup "
                f"make the states different",
                code="state-came-twice",
            )
        self.cache[key] = state

    def state(self, state: Any) -> State:
        """Return a state from a user's function as a tuple of ints."""
        try:
            return tuple(map(index, state))
        except TypeError:
            raise FlowError(
                f"a state must be a tuple of whole numbers, but {self.node.kind} "
                f"{self.node.name!r} was given {state!r}",
                code="state-not-whole-numbers",
            ) from None


def leaf(tensor: torch.Tensor, of: torch.Tensor | None = None) -> torch.Tensor:
    """Return a detached copy or view of a tensor, for a message; requires grad like ``of``."""
    wants = tensor.requires_grad if of is None else of.requires_grad
    return settled(tensor.detach()).requires_grad_(wants)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous, aligned tensor, like a received one: else placement changes bits."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
