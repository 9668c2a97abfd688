"""Flows: models whose control flow depends on each instance, as plain data.

A flow is a graph of nodes. Messages go along its edges: a payload of tensors, and a *state*, whole
numbers that tell messages of one instance apart (which token, which vertex, how often around a
loop). Nodes compute payloads, choose where a message goes on, or change its state. For every
message that a node sends forward it receives exactly one backward, with the same state and the
gradients of the payload.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from daso.checks import check, whole
from daso.errors import FlowError
from daso.flow.model.draw import dot, listing, mermaid
from daso.flow.model.signatures import draws, takes

__all__ = ["Edge", "Graph", "Item", "Node", "Port", "State"]

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
    """What a function of a flow is told of the message that it is for.

    Args:
        instance: The caller's, as ``train_epoch`` was given it.
        state: Of the message.
        payload: Its tensors.
    """

    instance: Any
    state: State
    payload: tuple[torch.Tensor, ...]


class Port(NamedTuple):
    """Where messages leave a node.

    Args:
        node: Its index.
        port: Its number at the node.
        width: Tensors of a message there.
    """

    node: int
    port: int
    width: int


class Edge(NamedTuple):
    """Messages go from a port of a node to a port of another."""

    source: int
    out: int
    target: int
    into: int


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a flow.

    Args:
        index: Its number.
        name: For people; unique.
        kind: One of `KINDS`.
        inputs: Ports that messages come in by.
        outputs: Tensors of a message at each port that they leave by.
        call: The user's module or function.
        more: A second function, sizes, or messages of a batch: what the kind needs.
        optimizer: Makes the optimizer of this layer alone; None: the runtime's.
    """

    index: int
    name: str
    kind: str
    inputs: int
    outputs: tuple[int, ...]
    call: Any = None
    more: Any = None
    optimizer: MakeOptimizer | None = field(default=None, repr=False)


class Graph:
    """Builds a flow: every method adds a node, and returns where its messages leave.

    Functions of the caller are given an `Item` first: the instance, the state and the payload of
    the message. A port may be used by several nodes, which then get copies, and nodes that compute
    may be given several ports, whose messages of equal state they wait for.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []

    # --- payloads ----------------------------------------------------------------------------

    def source(self, make: Callable[[Any], Any], *, name: str = "source", outputs: int = 1) -> Port:
        """Let instances in.

        Args:
            make: Given an instance, returns a tensor or a tuple of tensors, which gets the empty
                state; or a dict from states to those: a message for each.
            name: For people.
            outputs: Tensors of a message.
        """
        return self._add("source", name, (), (outputs,), make)[0]

    def layer(
        self,
        module: nn.Module,
        *ports: Port,
        name: str | None = None,
        outputs: int = 1,
        batch: int = 1,
        optimizer: MakeOptimizer | None = None,
    ) -> Port:
        """Compute with a module, given the tensors of a message; its parameters are trained.

        Args:
            module: Of this node alone.
            ports: Where messages come from.
            name: For people.
            outputs: Tensors that it returns.
            batch: Messages that wait, of any instances, are computed together, so many at most:
                their tensors' rows (the first dimension) are put together. The module must treat
                rows independently; sums may then differ in their last bits.
            optimizer: Makes its optimizer from a list of parameters; None: the runtime's.
        """
        if not isinstance(module, nn.Module):
            raise FlowError(
                f"a layer must be a torch.nn.Module, not {module!r}; use function() for it"
            )
        name = type(module).__name__.lower() if name is None else name
        check("batch", batch, whole(1))
        if batch > 1 and draws(module):
            raise FlowError(
                f"layer {name!r} draws random numbers (dropout), which depend on a message's state "
                f"alone, so it must compute messages one by one; leave batch at 1"
            )
        port = self._joined(name, ports)
        self._fits(name, module.forward, port.width, 0)
        return self._add("layer", name, (port,), (outputs,), module, batch, optimizer)[0]

    def function(
        self, call: Callable[..., Any], *ports: Port, name: str | None = None, outputs: int = 1
    ) -> Port:
        """Compute with a function, without parameters.

        Args:
            call: Given the `Item` and its tensors, returns a tensor, or as many as ``outputs``.
            ports: Where messages come from.
            name: For people.
            outputs: Tensors that it returns.
        """
        name = _named(call, name)
        port = self._joined(name, ports)
        self._fits(name, call, port.width, 1)
        return self._add("function", name, (port,), (outputs,), call)[0]

    def loss(self, call: Callable[..., Any], *ports: Port, name: str = "loss") -> None:
        """End here: the loss, from which gradients go back.

        Args:
            call: Given the `Item` and its tensors, returns the loss, a tensor of one number; or
                the loss and a dict of numbers, whose means are reported.
            ports: Where messages come from.
            name: For people.
        """
        port = self._joined(name, ports)
        self._fits(name, call, port.width, 1)
        self._add("loss", name, (port,), (), call)

    def drop(self, port: Port, *, name: str = "drop") -> None:
        """End here without a loss: no gradient comes from here.

        Args:
            port: Where messages come from.
            name: For people.
        """
        self._check_ports(name, port)
        self._add("drop", name, (port,), ())

    # --- ways --------------------------------------------------------------------------------

    def cond(
        self, choose: Callable[[Item], int], port: Port, *, ways: int = 2, name: str | None = None
    ) -> tuple[Port, ...]:
        """Let every message go on by one of several ways.

        Args:
            choose: Returns which: 0 up to, not including, ``ways``; False and True are 0 and 1.
            port: Where messages come from.
            ways: How many there are.
            name: For people.
        """
        check("ways", ways, whole(1))
        self._check_ports(_named(choose, name), port)
        return self._add("cond", _named(choose, name), (port,), (port.width,) * ways, choose)

    def phi(self, *ports: Port, name: str = "phi") -> Port:
        """Go on with messages of several ports, of which each has one; see `connect` for more.

        Args:
            ports: Where messages come from.
            name: For people.
        """
        if not ports:
            raise FlowError(f"node {name!r} must be given a port at least")
        self._check_ports(name, *ports)
        for number, port in enumerate(ports):
            self._same_width(name, number, port, ports[0].width)
        return self._add("phi", name, ports, (ports[0].width,))[0]

    def connect(self, port: Port, phi: Port) -> None:
        """Let messages of a port go on with those of a phi: the way back of a loop.

        Args:
            port: Where they come from.
            phi: As `phi` returned it.
        """
        self._check_ports("phi", port, phi)
        node = self.nodes[phi.node]
        if node.kind != "phi":
            raise FlowError(
                f"a port can be connected to a phi, not to {node.kind} {node.name!r}; give it to "
                f"the node's own method"
            )
        self._same_width(node.name, node.inputs, port, phi.width)
        self.edges.append(Edge(port.node, port.port, node.index, node.inputs))
        self.nodes[phi.node] = replace(node, inputs=node.inputs + 1)

    def loop(
        self,
        body: Callable[[Port], Port],
        port: Port,
        *,
        go_on: Callable[[Item], bool],
        name: str = "loop",
    ) -> Port:
        """Go around while a condition holds.

        Inside, the state has one number more, the last: how often the message went around so far.

        Args:
            body: Builds what is in the loop, from where messages enter it to where they leave it.
            port: Where messages come from.
            go_on: Whether a message goes around (once more), asked before each time.
            name: For people.
        """
        begin = self.update(_push, port, name=f"{name} begin")
        around = self.phi(begin, name=f"{name} phi")
        over, again = self.cond(lambda item: bool(go_on(item)), around, name=f"{name} cond")
        back = self.update(_count, body(again), name=f"{name} next")
        self.connect(back, around)
        return self.update(_pop, over, name=f"{name} end")

    # --- states ------------------------------------------------------------------------------

    def update(
        self, change: Callable[[Item], State], port: Port, *, name: str | None = None
    ) -> Port:
        """Change states; backward changes them back.

        Args:
            change: Returns the new state; different states must stay different.
            port: Where messages come from.
            name: For people.
        """
        return self._change("update", _named(change, name), port, change)

    def flatmap(
        self, states: Callable[[Item], Sequence[State]], port: Port, *, name: str | None = None
    ) -> Port:
        """Send a message on once for each of some states; backward adds the gradients.

        Args:
            states: Returns them; none may repeat.
            port: Where messages come from.
            name: For people.
        """
        return self._change("flatmap", _named(states, name), port, states)

    def group(
        self,
        by: Callable[[Item], State],
        port: Port,
        *,
        count: Callable[[Item], int],
        name: str | None = None,
    ) -> Port:
        """Stack messages: wait for all of a group, and send one, its rows in order of their states.

        Args:
            by: Returns the state of a message's group.
            port: Where messages come from.
            count: Returns how many messages a group has; the item is one of them.
            name: For people.
        """
        return self._change("group", _named(by, name), port, by, count)

    def ungroup(
        self, states: Callable[[Item], Sequence[State]], port: Port, *, name: str | None = None
    ) -> Port:
        """Send each row of the tensors by itself.

        Args:
            states: Returns the rows' states; none may repeat.
            port: Where messages come from.
            name: For people.
        """
        return self._change("ungroup", _named(states, name), port, states)

    # --- copies and parts --------------------------------------------------------------------

    def broadcast(self, port: Port, copies: int, *, name: str = "broadcast") -> tuple[Port, ...]:
        """Send copies of a message; backward adds the gradients, in the order of the ports.

        Args:
            port: Where messages come from.
            copies: How many.
            name: For people.
        """
        check("copies", copies, whole(1))
        self._check_ports(name, port)
        return self._add("broadcast", name, (port,), (port.width,) * copies)

    def split(
        self, port: Port, sizes: Sequence[int], *, dim: int | None = None, name: str = "split"
    ) -> tuple[Port, ...]:
        """Cut messages into parts.

        Args:
            port: Where messages come from.
            sizes: Of the parts: tensors, or with ``dim`` the length of each tensor there.
            dim: Which dimension is cut; None: the tensors are dealt out.
            name: For people.
        """
        self._check_ports(name, port)
        if not sizes or min(sizes) < 0:
            raise FlowError(f"the sizes of split {name!r} must be 0 or more, not {tuple(sizes)}")
        if dim is None and sum(sizes) != port.width:
            raise FlowError(
                f"the sizes of split {name!r} must add up to the tensors of a message there, "
                f"{port.width}, not to {sum(sizes)}; give dim to cut the tensors themselves"
            )
        widths = tuple(sizes) if dim is None else (port.width,) * len(sizes)
        return self._add("split", name, (port,), widths, dim, tuple(sizes))

    def concat(self, *ports: Port, dim: int | None = None, name: str = "concat") -> Port:
        """Join messages of equal state, one of each port.

        Args:
            ports: Where messages come from.
            dim: Along which tensors are put together; None: they go on side by side.
            name: For people.
        """
        if not ports:
            raise FlowError(f"node {name!r} must be given a port at least")
        self._check_ports(name, *ports)
        if dim is not None:
            for number, port in enumerate(ports):
                self._same_width(name, number, port, ports[0].width)
        width = sum(port.width for port in ports) if dim is None else ports[0].width
        return self._add("concat", name, ports, (width,), dim)[0]

    # --- for people --------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return one line for each node: what it is, and where its messages come from."""
        return listing(self)

    def mermaid(self) -> str:
        """Return the graph as Mermaid text."""
        return mermaid(self)

    def dot(self) -> str:
        """Return the graph as Graphviz text."""
        return dot(self)

    # --- building ----------------------------------------------------------------------------

    def _change(self, kind: str, name: str, port: Port, call: Any, more: Any = None) -> Port:
        self._check_ports(name, port)
        return self._add(kind, name, (port,), (port.width,), call, more)[0]

    def _check_ports(self, name: str, *ports: Port) -> None:
        for port in ports:
            known = isinstance(port, Port) and 0 <= port.node < len(self.nodes)
            widths = self.nodes[port.node].outputs if known else ()
            if not known or widths[port.port : port.port + 1] != (port.width,):
                raise FlowError(f"node {name!r} must be given ports of this graph, not {port!r}")

    def _joined(self, name: str, ports: Sequence[Port]) -> Port:
        self._check_ports(name, *ports)
        if len(ports) == 1:
            return ports[0]
        return self.concat(*ports, name=f"{name} inputs")

    def _fits(self, name: str, call: Any, width: int, before: int) -> None:
        least, most = takes(call)
        if not least - before <= width <= most - before:
            wanted = (
                f"{least - before}" if least == most else f"{least - before} to {most - before}"
            )
            item = "the item and " if before else ""
            raise FlowError(
                f"node {name!r} must be given as many tensors as it takes, {item}{wanted}, but "
                f"messages come there with {width}"
            )

    def _same_width(self, name: str, number: int, port: Port, width: int) -> None:
        if port.width != width:
            raise FlowError(
                f"messages must have as many tensors at every port of node {name!r}, {width}, but "
                f"those that {self.nodes[port.node].name!r} sends to its port {number} have "
                f"{port.width}"
            )

    def _add(
        self,
        kind: str,
        name: str,
        ports: Sequence[Port],
        outputs: tuple[int, ...],
        call: Any = None,
        more: Any = None,
        optimizer: MakeOptimizer | None = None,
    ) -> tuple[Port, ...]:
        index, name = len(self.nodes), self._free_name(name)
        for number, port in enumerate(ports):
            self.edges.append(Edge(port.node, port.port, index, number))
        node = Node(index, name, kind, len(ports), outputs, call, more, optimizer)
        self.nodes.append(node)
        return tuple(Port(index, number, width) for number, width in enumerate(outputs))

    def _free_name(self, name: str) -> str:
        names = {node.name for node in self.nodes}
        if name not in names:
            return name
        number = 2
        while f"{name} {number}" in names:
            number += 1
        return f"{name} {number}"


def _named(call: Any, name: str | None) -> str:
    if name is not None:
        return name
    found = getattr(call, "__name__", type(call).__name__)
    return "function" if found == "<lambda>" else found


def _push(item: Item) -> State:
    return (*item.state, 0)


def _count(item: Item) -> State:
    return (*item.state[:-1], item.state[-1] + 1)


def _pop(item: Item) -> State:
    return item.state[:-1]
