"""Nodes of a flow that show messages their way, copy, cut and join them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from operator import index
from typing import Any

import torch

from daso.errors import FlowError
from daso.flow.model.base import Base, Emit, Key, Pass, Payload, leaf, settled
from daso.flow.model.graph import Node

__all__ = ["ROUTES", "Flatmap", "Group", "Route"]


class Route(Base, ABC):
    """A node that does not compute."""

    @abstractmethod
    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return what leaves because of a message that came in by a port."""

    @abstractmethod
    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Return what goes back because of the gradients of a message that had left by a port."""


# --- ways -----------------------------------------------------------------------------------------


class Cond(Route):
    """Messages take one of several ways."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Choose."""
        way = index(self.node.call(self.item(key, payload)))
        if not 0 <= way < len(self.node.outputs):
            raise FlowError(
                f"cond {self.node.name!r} must choose one of its ways, 0 to "
                f"{len(self.node.outputs) - 1}, not {way}"
            )
        return [(False, way, key, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Go back."""
        return [(True, 0, key, payload)]


class Phi(Route):
    """Messages of several ways go on together."""

    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Remember where it came from."""
        self.keep(key, port)
        return [(False, 0, key, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Go back there."""
        return [(True, self.cache.pop(key), key, payload)]


class Drop(Route):
    """Messages end."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Go back without gradients."""
        return [(True, 0, key, (None,) * len(payload))]

    def backward(self, _port: int, _key: Key, _payload: Payload) -> Sequence[Emit]:
        """Nothing comes back to an end."""
        raise AssertionError(self.node.name)


# --- states ---------------------------------------------------------------------------------------


class Update(Route):
    """Messages get another state."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Change it, and remember it: that is how it is changed back."""
        new = (key[0], *self.state(self.node.call(self.item(key, payload))))
        self.keep(new, key)
        return [(False, 0, new, payload)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Change it back."""
        return [(True, 0, self.cache.pop(key), payload)]


class _Adding(Route):
    """Sends several messages for one, and adds their gradients in the order of sending."""

    def _await(self, key: Key, width: int, parts: Sequence[Any]) -> None:
        self.keep(key, (width, parts, {}))

    def _gather(self, key: Key, part: Any, payload: Payload) -> Sequence[Emit]:
        width, parts, came = self.cache[key]
        came[part] = payload
        if len(came) < len(parts):
            return []
        del self.cache[key]
        if not self.all.trains:
            return [(True, 0, key, ())]
        return [(True, 0, key, self._put_together(width, [came[one] for one in parts]))]

    def _put_together(self, width: int, parts: list[Payload]) -> Payload:
        # In the order in which autograd would: what was sent last comes back first.
        return tuple(_sum([part[place] for part in reversed(parts)]) for place in range(width))


def _sum(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [grad for grad in grads if grad is not None]
    if not there:
        return None
    total = there[0]
    for grad in there[1:]:
        total = total + grad
    return total


class Broadcast(_Adding):
    """Messages are copied to all ports."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Copy."""
        ways = range(len(self.node.outputs))
        self._await(key, len(payload), ways)
        return [(False, way, key, payload) for way in ways]

    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Wait for all, add."""
        return self._gather(key, port, payload)


class Flatmap(_Adding):
    """Messages are copied to states."""

    def __init__(self, node: Node, all_: Pass) -> None:
        super().__init__(node, all_)
        self._from: dict[Key, Key] = {}  # state before each that was made

    def _keys(self, key: Key, payload: Payload) -> list[Key]:
        """Return the keys that the user's function gives, all different."""
        found = [self.state(state) for state in self.node.call(self.item(key, payload))]
        if len(set(found)) < len(found) or not found:
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must be given states that are different, one "
                f"at least, but its function returned {found} for state {key[1:]}"
            )
        return [(key[0], *state) for state in found]

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Send a message for each state."""
        made = self._keys(key, payload)
        self._await(key, len(payload), made)
        for one in made:
            self._remember(one, key)
        return [
            (False, 0, one, part)
            for one, part in zip(made, self._parts(payload, made), strict=True)
        ]

    def _remember(self, made: Key, key: Key) -> None:
        if self._from.setdefault(made, key) is not key:
            raise FlowError(
                f"{self.node.kind} {self.node.name!r} must make a state once for an instance, but "
                f"state {made[1:]} was made from {self._from[made][1:]} and from {key[1:]}"
            )

    def _parts(self, payload: Payload, made: Sequence[Key]) -> Sequence[Payload]:
        return [payload] * len(made)

    def parent(self, made: Key) -> Key:
        """Return the key of the message for which one that is under way was sent."""
        return self._from[made]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Wait for all, put together."""
        return self._gather(self._from.pop(key), key, payload)


class Ungroup(Flatmap):
    """Rows go on by themselves."""

    def _parts(self, payload: Payload, made: Sequence[Key]) -> Sequence[Payload]:
        for tensor in payload:
            assert tensor is not None
            if len(tensor) != len(made):
                raise FlowError(
                    f"ungroup {self.node.name!r} must be given a state for each row of its "
                    f"tensors, {len(tensor)}, but was given {len(made)}"
                )
        return [tuple(leaf(t[row], t) for t in payload) for row in range(len(made))]  # type: ignore[index]

    def _put_together(self, width: int, parts: list[Payload]) -> Payload:
        return tuple(_stack([part[place] for part in parts]) for place in range(width))


def _stack(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Stack gradients; rows that have none are 0."""
    like = next((grad for grad in grads if grad is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if grad is None else grad for grad in grads])


class Group(Route):
    """Messages of a group are stacked."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Wait for the others, stack."""
        item = self.item(key, payload)
        group = (key[0], *self.state(self.node.call(item)))
        count = int(self.node.more(item))
        members = self.open.setdefault(group, {})
        if key in members or count < 1:
            raise FlowError(
                f"a group of {self.node.name!r} must have different members, and one at least, "
                f"but state {key[1:]} of a group of {count} came to {len(members)} others"
            )
        members[key] = payload
        if len(members) < count:
            return []
        del self.open[group]
        order = sorted(members)
        self.keep(group, order)
        rows = [members[one] for one in order]
        stacked = tuple(_stacked([row[place] for row in rows]) for place in range(len(payload)))
        return [(False, 0, group, stacked)]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Give every member its rows."""
        order = self.cache.pop(key)
        if not self.all.trains:
            return [(True, 0, one, ()) for one in order]
        return [
            (True, 0, one, tuple(None if grad is None else settled(grad[row]) for grad in payload))
            for row, one in enumerate(order)
        ]


def _stacked(rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    there = [row for row in rows if row is not None]
    return torch.stack(there).requires_grad_(any(row.requires_grad for row in there))


# --- parts ----------------------------------------------------------------------------------------


class Concat(Route):
    """Messages of all ports are joined."""

    def forward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Wait for the other ports' messages, join."""
        parts = self.open.setdefault(key, {})
        if port in parts:
            raise FlowError(
                f"concat {self.node.name!r} must be sent a state once at each port, but state "
                f"{key[1:]} came twice to port {port}"
            )
        parts[port] = payload
        if len(parts) < self.node.inputs:
            return []
        del self.open[key]
        rows = [parts[one] for one in range(self.node.inputs)]
        dim = self.node.call
        if dim is None:
            self.keep(key, [len(row) for row in rows])
            return [(False, 0, key, _apart(tuple(tensor for row in rows for tensor in row)))]
        self.keep(key, [[one.shape[dim] for one in same] for same in zip(*rows, strict=True)])
        return [
            (False, 0, key, tuple(_joined(tensors, dim) for tensors in zip(*rows, strict=True)))
        ]

    def backward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Give every port its part."""
        sizes = self.cache.pop(key)
        if not self.all.trains:
            return [(True, one, key, ()) for one in range(self.node.inputs)]
        dim = self.node.call
        parts = _dealt(payload, sizes) if dim is None else _cut(payload, sizes, dim)
        return [(True, one, key, part) for one, part in enumerate(parts)]


class Split(Route):
    """Messages are cut, and each port gets a part."""

    def forward(self, _port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Cut."""
        parts = self._parts(payload)
        self.keep(key, ({}, parts))
        return [(False, way, key, part) for way, part in enumerate(parts)]

    def _parts(self, payload: Payload) -> list[Payload]:
        dim, sizes = self.node.call, self.node.more
        return _dealt(payload, sizes) if dim is None else _cut(payload, [sizes] * len(payload), dim)

    def backward(self, port: int, key: Key, payload: Payload) -> Sequence[Emit]:
        """Wait for all, put together."""
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
            _whole(list(grads), list(like), dim)
            for grads, like in zip(zip(*rows, strict=True), cut, strict=True)
        ]
        return [(True, 0, key, tuple(whole))]


def _apart(payload: Payload) -> Payload:
    """Return tensors of which none is there twice: each is to have a gradient of its own."""
    seen: set[int] = set()
    found = []
    for tensor in payload:
        twice = tensor is not None and id(tensor) in seen
        seen.add(id(tensor))
        found.append(leaf(tensor) if twice and tensor is not None else tensor)
    return tuple(found)


def _dealt(payload: Payload, sizes: Sequence[int]) -> list[Payload]:
    """Deal tensors out: so many to each part."""
    ends = accumulate(sizes)
    return [payload[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _cut(payload: Payload, sizes: Sequence[Sequence[int]], dim: int) -> list[Payload]:
    """Cut tensors, each into parts of its sizes."""
    cut = [
        [None] * len(lengths)
        if tensor is None
        else [leaf(part, tensor) for part in tensor.split(list(lengths), dim)]
        for tensor, lengths in zip(payload, sizes, strict=True)
    ]
    return [tuple(parts) for parts in zip(*cut, strict=True)]


def _joined(tensors: Sequence[torch.Tensor | None], dim: int) -> torch.Tensor:
    there = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(there, dim).requires_grad_(any(tensor.requires_grad for tensor in there))


def _whole(
    grads: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor | None], dim: int
) -> torch.Tensor | None:
    """Put gradients of parts together; those that have none are 0."""
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
