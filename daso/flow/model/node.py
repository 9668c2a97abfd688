"""Nodes, ports and edges of a flow, as plain data."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

State = tuple[int, ...]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS = (
    "source",
    "layer",
    "function",
    "cond",
    "phi",
    "update",
    "broadcast",
    "split",
    "concat",
    "group",
    "ungroup",
    "flatmap",
    "loss",
    "drop",
)


class Item(NamedTuple):
    """The message for which a flow's function is called.

    Args:
        instance: The instance, as given to ``train_epoch``.
        state: State of the message.
        payload: Tensors of the message.
    """

    instance: Any
    state: State
    payload: tuple[torch.Tensor, ...]


class Port(NamedTuple):
    """Output of a node.

    Args:
        node: Index of the node.
        port: Number of the port at the node.
        width: Number of tensors in its messages.
    """

    node: int
    port: int
    width: int


class Edge(NamedTuple):
    """Connection from an output port of a node to an input port of another."""

    source: int
    out: int
    target: int
    into: int


@dataclass(frozen=True, slots=True)
class Node:
    """Node of a flow."""

    index: int
    name: str  # unique
    kind: str  # one of `KINDS`
    inputs: int  # number of ports
    outputs: tuple[int, ...]  # number of tensors in a message, by port
    call: Any = None  # the user's module or function
    more: Any = None  # a second function, sizes, or maximum batch, by kind
    # For this layer only; None: the runtime's.
    optimizer: MakeOptimizer | None = field(default=None, repr=False)
