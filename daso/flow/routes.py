"""Nodes of a flow that route, copy, split and join messages."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.base import Base, Emit, Key, Pass, Payload, leaf, settled
from daso.flow.model.node import Node


class Route(Base, ABC):
    """A node that passes messages on without computing."""

    @abstractmethod
    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Handle a message at an input port; return the emitted messages."""

    @abstractmethod
    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Handle the gradients of a message sent by an output port; return the emitted messages."""


# --- ways -----------------------------------------------------------------------------------------


class Cond(Route):
    """Sends each message to one of several ports."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Send the message to the chosen port."""
        way = index(self.node.call(self.item(key, payload)))
        if not 0 <= way < len(self.node.outputs):
            raise FlowError(
                f"cond {self.node.name!r} must choose one of its ways, 0 to "
                f"{len(self.node.outputs) - 1}, not {way}",
                code="cond-out-of-range",
            )
        return [(False, way, key, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return the gradients to the sender."""
        return [(True, 0, key, payload)]


class Phi(Route):
    """Merges the messages of several ports into one stream."""

    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Forward the message, and record its port."""
        self.keep(key, port)
        return [(False, 0, key, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return the gradients to that port."""
        return [(True, self.cache.pop(key), key, payload)]


class Drop(Route):
    """Discards messages."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Discard the message; return no gradients to its sender."""
        return [(True, 0, key, (None,) * len(payload))]

    def backward(self, _port: int, _key: Key, _payload: Payload) -> Sequence[Emit]:
        """Never called: a discarded message has no backward."""
        raise AssertionError(self.node.name)


# --- states ---------------------------------------------------------------------------------------


class Update(Route):
    """Changes the states of messages."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Change the state, and record the previous one for backward."""
        new = (key[0], *self.state(self.node.call(self.item(key, payload))))
        self.keep(new, key)
        return [(False, 0, new, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Restore the previous state."""
        return [(True, 0, self.cache.pop(key), payload)]


class _FanOut(Route):
    """Sends several messages for each one, and adds up their gradients."""

    def _expect(self, key: Key, width: int, parts: Sequence[Any]) -> None:
        self.keep(key, (width, parts, {}))

    def _gather(self, key: Key, part: Any, payload: Payload) -> Sequence[Emit]:
        width, parts, arrived = self.cache[key]
        arrived[part] = payload
        if len(arrived) < len(parts):
            return []
        del self.cache[key]
        if not self.all.trains:
            return [(True, 0, key, ())]
        return [(True, 0, key, self._combine(width, [arrived[part_key] for part_key in parts]))]

    def _combine(self, width: int, parts: list[Payload]) -> Payload:
        # In autograd's order: the last message that was sent comes first.
        return tuple(_sum([part[place] for part in reversed(parts)]) for place in range(width))


def _sum(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [grad for grad in grads if grad is not None]
    if not present:
        return None
    total = present[0]
    for grad in present[1:]:
        total = total + grad
    return total


class Broadcast(_FanOut):
    """Copies messages to all ports."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Send a copy to each port."""
        ways = range(len(self.node.outputs))
        self._expect(key, len(payload), ways)
        return [(False, way, key, payload) for way in ways]

    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Add the gradients of all copies, once they arrived."""
        return self._gather(key, port, payload)


class Flatmap(_FanOut):
    """Sends a copy of each message for each of some states."""

    def __init__(self, node: Node, all_: Pass) -> None:
        super().__init__(node, all_)
        self._from: dict[Key, Key] = {}  # parent, by the key of a sent message

    def _keys(self, key: Key, payload: Payload) -> list[Key]:
        """Return the keys of the states that the user's function returns, checked."""
        states = [self.state(state) for state in self.node.call(self.item(key, payload))]
        if len(set(states)) < len(states) or not states:
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must be given at least one state, and none "
                f"twice, but its function returned {states} for state {key[1:]}",
                code="states-missing-or-repeated",
            )
        return [(key[0], *state) for state in states]

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Send a message for each state."""
        keys = self._keys(key, payload)
        self._expect(key, len(payload), keys)
        for child in keys:
            self._remember(child, key)
        return [
            (False, 0, child, part)
            for child, part in zip(keys, self._parts(payload, keys), strict=True)
        ]

    def _remember(self, child: Key, key: Key) -> None:
        if self._from.setdefault(child, key) is not key:
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must make each state once per instance, but "
                f"state {child[1:]} was made from {self._from[child][1:]} and from {key[1:]}",
                code="state-made-twice",
            )

    def _parts(self, payload: Payload, keys: Sequence[Key]) -> Sequence[Payload]:
        return [payload] * len(keys)

    def parent(self, child: Key) -> Key:
        """Return the key of the message for which a message under way was sent."""
        return self._from[child]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Combine the gradients of all messages, once they arrived."""
        return self._gather(self._from.pop(key), key, payload)


class Ungroup(Flatmap):
    """Sends each row of a message as one message."""

    def _parts(self, payload: Payload, keys: Sequence[Key]) -> Sequence[Payload]:
        for tensor in payload:
            assert tensor is not None
            if len(tensor) != len(keys):
                raise FlowError(
                    f"ungroup {self.node.name!r} must be given one state for each row of its "
                    f"tensors, {len(tensor)}, but was given {len(keys)}",
                    code="ungroup-count-differs",
                )
        return [tuple(leaf(t[row], t) for t in payload) for row in range(len(keys))]  # type: ignore[index]

    def _combine(self, width: int, parts: list[Payload]) -> Payload:
        return tuple(_stack_grads([part[place] for part in parts]) for place in range(width))


def _stack_grads(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Stack gradients; rows without one are 0."""
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


class Group(Route):
    """Stacks the messages of a group into one."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Stack the group, once all members arrived."""
        item = self.item(key, payload)
        group = (key[0], *self.state(self.node.call(item)))
        count = int(self.node.more(item))
        members = self.open.setdefault(group, {})
        if key in members or count < 1:
            raise FlowError(
                f"a group of {self.node.name!r} must have at least one member, and none twice, "
                f"but state {key[1:]} of a group of {count} came to {len(members)} others",
                code="group-members-invalid",
            )
        members[key] = payload
        if len(members) < count:
            return []
        del self.open[group]
        order = sorted(members)
        self.keep(group, order)
        rows = [members[member] for member in order]
        stacked = tuple(_stack_rows([row[place] for row in rows]) for place in range(len(payload)))
        return [(False, 0, group, stacked)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return each member's rows of the gradients."""
        order = self.cache.pop(key)
        if not self.all.trains:
            return [(True, 0, member, ()) for member in order]
        return [
            (
                True,
                0,
                member,
                tuple(None if grad is None else settled(grad[row]) for grad in payload),
            )
            for row, member in enumerate(order)
        ]


def _stack_rows(rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    present = [row for row in rows if row is not None]
    return torch.stack(present).requires_grad_(any(row.requires_grad for row in present))


# --- parts ----------------------------------------------------------------------------------------


class Concat(Route):
    """Joins the messages of all ports that have the same state."""

    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Join the messages, once all ports have one."""
        parts = self.open.setdefault(key, {})
        if port in parts:
            raise FlowError(
                f"concat {self.node.name!r} must get each state once at each port, but state "
                f"{key[1:]} came twice to port {port}",
                code="concat-state-twice",
            )
        parts[port] = payload
        if len(parts) < self.node.inputs:
            return []
        del self.open[key]
        rows = [parts[number] for number in range(self.node.inputs)]
        dim = self.node.call
        if dim is None:
            self.keep(key, [len(row) for row in rows])
            return [
                (False, 0, key, _without_repeats(tuple(tensor for row in rows for tensor in row)))
            ]
        self.keep(key, [[tensor.shape[dim] for tensor in same] for same in zip(*rows, strict=True)])
        return [
            (
                False,
                0,
                key,
                tuple(_concatenate(tensors, dim) for tensors in zip(*rows, strict=True)),
            )
        ]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return each port's part of the gradients."""
        sizes = self.cache.pop(key)
        if not self.all.trains:
            return [(True, port, key, ()) for port in range(self.node.inputs)]
        dim = self.node.call
        parts = _deal(payload, sizes) if dim is None else _cut(payload, sizes, dim)
        return [(True, port, key, part) for port, part in enumerate(parts)]


class Split(Route):
    """Splits messages into one part for each port."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Send each port its part."""
        parts = self._parts(payload)
        self.keep(key, ({}, parts))
        return [(False, way, key, part) for way, part in enumerate(parts)]

    def _parts(self, payload: Payload) -> list[Payload]:
        dim, sizes = self.node.call, self.node.more
        return _deal(payload, sizes) if dim is None else _cut(payload, [sizes] * len(payload), dim)

    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Join the gradients of all parts, once they arrived."""
        parts, sent = self.cache[key]
        parts[port] = payload
        if len(parts) < len(self.node.outputs):
            return []
        del self.cache[key]
        if not self.all.trains:
            return [(True, 0, key, ())]
        dim = self.node.call
        rows = [parts[way] for way in range(len(self.node.outputs))]
        if dim is None:
            return [(True, 0, key, tuple(grad for row in rows for grad in row))]
        cut = zip(*sent, strict=True)
        whole = [
            _join_grads(list(grads), list(like), dim)
            for grads, like in zip(zip(*rows, strict=True), cut, strict=True)
        ]
        return [(True, 0, key, tuple(whole))]


def _without_repeats(payload: Payload) -> Payload:
    """Clone repeated tensors so that each gets its own gradient."""
    ids: set[int] = set()
    tensors = []
    for tensor in payload:
        is_repeat = tensor is not None and id(tensor) in ids
        ids.add(id(tensor))
        tensors.append(leaf(tensor) if is_repeat and tensor is not None else tensor)
    return tuple(tensors)


def _deal(payload: Payload, sizes: Sequence[int]) -> list[Payload]:
    """Distribute tensors over parts of given sizes."""
    ends = accumulate(sizes)
    return [payload[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _cut(payload: Payload, sizes: Sequence[Sequence[int]], dim: int) -> list[Payload]:
    """Split each tensor into parts of its sizes."""
    cut = [
        [None] * len(lengths)
        if tensor is None
        else [leaf(part, tensor) for part in tensor.split(list(lengths), dim)]
        for tensor, lengths in zip(payload, sizes, strict=True)
    ]
    return [tuple(parts) for parts in zip(*cut, strict=True)]


def _concatenate(tensors: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present, dim).requires_grad_(any(tensor.requires_grad for tensor in present))


def _join_grads(
    grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor | None], dim: int
) -> torch.Tensor | None:
    """Concatenate the gradients of parts; those without one are 0."""
    if all(grad is None for grad in grads):
        return None
    pairs = zip(grads, like, strict=True)
    return torch.cat([torch.zeros_like(part) if g is None else g for g, part in pairs], dim)  # type: ignore[arg-type]


ROUTES: dict[str, type[Route]] = {
    "cond": Cond,
    "phi": Phi,
    "update": Update,
    "broadcast": Broadcast,
    "flatmap": Flatmap,
    "ungroup": Ungroup,
    "group": Group,
    "concat": Concat,
    "split": Split,
    "drop": Drop,
}
