"""Flows: models whose control flow depends on each instance, as plain data.

A flow is a graph of nodes. Messages travel along its edges: a payload of tensors, and a *state*,
integers that distinguish the messages of one instance (token, vertex, iteration of a loop). Nodes
compute payloads, choose the next edge of a message, or change its state. For every message that a
node sends forward it receives exactly one backward, with the same state and the gradients of the
payload.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

from torch import nn

from daso.checks import check, whole
from daso.errors import FlowError
from daso.flow.model.draw import dot, listing, mermaid
from daso.flow.model.node import Edge, Item, MakeOptimizer, Node, Port, State
from daso.flow.model.signatures import check_width, draws


class Graph:
    """Builds a flow: every method adds a node, and returns its output ports.

    The caller's functions get an `Item` as first argument: the instance, the state and the payload
    of the message. Several nodes may use one port; each gets copies. Nodes that compute may use
    several ports; they wait for one message with the same state from each.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []

    # --- payloads ----------------------------------------------------------------------------

    def source(self, make: Callable[[Any], Any], *, name: str = "source", outputs: int = 1) -> Port:
        """Add the source: it turns instances into messages.

        Args:
            make: Returns, for an instance, a tensor or a tuple of tensors: one message with the
                empty state; or a dict from states to those: one message for each.
            name: Name in messages and drawings.
            outputs: Number of tensors in a message.
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
        """Add a layer: a module, called with the tensors of a message and trained.

        Args:
            module: The module; only this node may use it.
            ports: Ports whose messages it gets.
            name: Name in messages and drawings.
            outputs: Number of tensors that it returns.
            batch: Maximum number of waiting messages, of any instances, that are computed
                together, with their rows (the first dimension) concatenated. The module must treat
                rows independently; sums may then differ in their last bits.
            optimizer: Makes the layer's optimizer from a list of parameters; None: the runtime's.
        """
        if not isinstance(module, nn.Module):
            raise FlowError(
                f"a layer must be a torch.nn.Module, not {module!r}; use function() for it",
                code="layer-not-a-module",
            )
        name = type(module).__name__.lower() if name is None else name
        check("batch", batch, whole(1))
        if batch > 1 and draws(module):
            raise FlowError(
                f"layer {name!r} draws random numbers (dropout), which depend on a message's state "
                f"alone, so it must compute messages one by one; leave batch at 1",
                code="random-layer-in-batch",
            )
        port = self._joined(name, ports)
        check_width(name, module.forward, port.width, 0)
        return self._add("layer", name, (port,), (outputs,), module, batch, optimizer)[0]

    def function(
        self, call: Callable[..., Any], *ports: Port, name: str | None = None, outputs: int = 1
    ) -> Port:
        """Add a function without parameters.

        Args:
            call: Returns, for the `Item` and its tensors, ``outputs`` tensors.
            ports: Ports whose messages it gets.
            name: Name in messages and drawings.
            outputs: Number of tensors that it returns.
        """
        name = _named(call, name)
        port = self._joined(name, ports)
        check_width(name, call, port.width, 1)
        return self._add("function", name, (port,), (outputs,), call)[0]

    def loss(self, call: Callable[..., Any], *ports: Port, name: str = "loss") -> None:
        """Add a loss, where messages end and gradients begin.

        Args:
            call: Returns, for the `Item` and its tensors, the loss, a tensor of one number; or
                the loss and a dict of numbers, whose means are reported.
            ports: Ports whose messages it gets.
            name: Name in messages and drawings.
        """
        port = self._joined(name, ports)
        check_width(name, call, port.width, 1)
        self._add("loss", name, (port,), (), call)

    def drop(self, port: Port, *, name: str = "drop") -> None:
        """Discard messages: they get no gradients.

        Args:
            port: The port whose messages are discarded.
            name: Name in messages and drawings.
        """
        self._check_ports(name, port)
        self._add("drop", name, (port,), ())

    # --- branches and loops ------------------------------------------------------------------

    def cond(
        self, choose: Callable[[Item], int], port: Port, *, ways: int = 2, name: str | None = None
    ) -> tuple[Port, ...]:
        """Send each message to one of several ports.

        Args:
            choose: Returns the port, from 0 to ``ways`` - 1; False and True are 0 and 1.
            port: The port whose messages are sent.
            ways: Number of output ports.
            name: Name in messages and drawings.
        """
        check("ways", ways, whole(1))
        self._check_ports(_named(choose, name), port)
        return self._add("cond", _named(choose, name), (port,), (port.width,) * ways, choose)

    def phi(self, *ports: Port, name: str = "phi") -> Port:
        """Merge the messages of several ports into one port; `connect` adds more ports.

        Args:
            ports: Ports whose messages are merged.
            name: Name in messages and drawings.
        """
        self._check_ports(name, *ports)
        self._same_width(name, ports, ports[0].width)
        return self._add("phi", name, ports, (ports[0].width,))[0]

    def connect(self, port: Port, phi: Port) -> None:
        """Add a port to a phi: the back edge of a loop.

        Args:
            port: The port whose messages are added.
            phi: The port that `phi` returned.
        """
        self._check_ports("phi", port, phi)
        node = self.nodes[phi.node]
        if node.kind != "phi":
            raise FlowError(
                f"a port can be connected to a phi, not to {node.kind} {node.name!r}; give it to "
                f"the node's own method",
                code="port-not-to-phi",
            )
        self._same_width(node.name, [port], phi.width, node.inputs)
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
        """Repeat a part of the flow while a condition holds.

        Inside, the state has one more number at the end: the iterations of the message so far.

        Args:
            body: Builds the nodes of the loop between the given port and the returned one.
            port: The port whose messages enter the loop.
            go_on: Returns whether a message enters the body (again).
            name: Name in messages and drawings.
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
            port: The port whose messages are changed.
            name: Name in messages and drawings.
        """
        return self._change("update", _named(change, name), port, change)

    def flatmap(
        self, states: Callable[[Item], Sequence[State]], port: Port, *, name: str | None = None
    ) -> Port:
        """Send a copy of a message for each of some states; backward adds the gradients.

        Args:
            states: Returns the states; none may repeat.
            port: The port whose messages are copied.
            name: Name in messages and drawings.
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
        """Stack the messages of a group into one, its rows in the order of their states.

        Args:
            by: Returns the state of a message's group.
            port: The port whose messages are stacked.
            count: Returns the number of messages in the group of an item.
            name: Name in messages and drawings.
        """
        return self._change("group", _named(by, name), port, by, count)

    def ungroup(
        self, states: Callable[[Item], Sequence[State]], port: Port, *, name: str | None = None
    ) -> Port:
        """Send each row of a message's tensors as one message.

        Args:
            states: Returns the rows' states; none may repeat.
            port: The port whose messages are split.
            name: Name in messages and drawings.
        """
        return self._change("ungroup", _named(states, name), port, states)

    # --- copies and parts --------------------------------------------------------------------

    def broadcast(self, port: Port, copies: int, *, name: str = "broadcast") -> tuple[Port, ...]:
        """Send copies of a message; backward adds the gradients, in the order of the ports.

        Args:
            port: The port whose messages are copied.
            copies: Number of copies.
            name: Name in messages and drawings.
        """
        check("copies", copies, whole(1))
        self._check_ports(name, port)
        return self._add("broadcast", name, (port,), (port.width,) * copies)

    def split(
        self, port: Port, sizes: Sequence[int], *, dim: int | None = None, name: str = "split"
    ) -> tuple[Port, ...]:
        """Split messages into parts, one for each output port.

        Args:
            port: The port whose messages are split.
            sizes: Number of tensors in each part; with ``dim``, the length of each part.
            dim: Dimension along which tensors are split; None: the tensors are distributed.
            name: Name in messages and drawings.
        """
        self._check_ports(name, port)
        if not sizes or min(sizes) < 0:
            raise FlowError(
                f"the sizes of split {name!r} must be 0 or more, not {tuple(sizes)}",
                code="split-below-zero",
            )
        if dim is None and sum(sizes) != port.width:
            raise FlowError(
                f"the sizes of split {name!r} must add up to the tensors of a message there, "
                f"{port.width}, not to {sum(sizes)}; give dim to cut the tensors themselves",
                code="split-wrong-sum",
            )
        widths = tuple(sizes) if dim is None else (port.width,) * len(sizes)
        return self._add("split", name, (port,), widths, dim, tuple(sizes))

    def concat(self, *ports: Port, dim: int | None = None, name: str = "concat") -> Port:
        """Join messages with the same state, one of each port.

        Args:
            ports: Ports whose messages are joined.
            dim: Dimension along which tensors are concatenated; None: the joined message has all
                tensors.
            name: Name in messages and drawings.
        """
        self._check_ports(name, *ports)
        if dim is not None:
            self._same_width(name, ports, ports[0].width)
        width = sum(port.width for port in ports) if dim is None else ports[0].width
        return self._add("concat", name, ports, (width,), dim)[0]

    # --- drawings ----------------------------------------------------------------------------

    def __str__(self) -> str:
        """Return one line for each node: number, kind, name and inputs."""
        return listing(self.nodes, self.edges)

    def mermaid(self) -> str:
        """Return the graph as Mermaid text."""
        return mermaid(self.nodes, self.edges)

    def dot(self) -> str:
        """Return the graph as Graphviz text."""
        return dot(self.nodes, self.edges)

    # --- building ----------------------------------------------------------------------------

    def _change(self, kind: str, name: str, port: Port, call: Any, more: Any = None) -> Port:
        self._check_ports(name, port)
        return self._add(kind, name, (port,), (port.width,), call, more)[0]

    def _check_ports(self, name: str, *ports: Port) -> None:
        if not ports:
            raise FlowError(
                f"node {name!r} must be given a port at least", code="node-without-port"
            )
        for port in ports:
            known = isinstance(port, Port) and 0 <= port.node < len(self.nodes)
            widths = self.nodes[port.node].outputs if known else ()
            if not known or widths[port.port : port.port + 1] != (port.width,):
                raise FlowError(
                    f"node {name!r} must be given ports of this graph, not {port!r}",
                    code="port-of-other-graph",
                )

    def _joined(self, name: str, ports: Sequence[Port]) -> Port:
        self._check_ports(name, *ports)
        if len(ports) == 1:
            return ports[0]
        return self.concat(*ports, name=f"{name} inputs")

    def _same_width(self, name: str, ports: Sequence[Port], width: int, first: int = 0) -> None:
        for number, port in enumerate(ports, first):
            if port.width != width:
                raise FlowError(
                    f"messages must have as many tensors at every port of node {name!r}, {width}, "
                    f"but those that {self.nodes[port.node].name!r} sends to its port {number} "
                    f"have {port.width}",
                    code="ports-of-unequal-tensors",
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
        candidates = chain((name,), (f"{name} {number}" for number in count(2)))
        return next(free for free in candidates if free not in names)


def _named(call: Any, name: str | None) -> str:
    if name is not None:
        return name
    own_name = getattr(call, "__name__", type(call).__name__)
    return "function" if own_name == "<lambda>" else own_name


def _push(item: Item) -> State:
    return (*item.state, 0)


def _count(item: Item) -> State:
    return (*item.state[:-1], item.state[-1] + 1)


def _pop(item: Item) -> State:
    return item.state[:-1]
