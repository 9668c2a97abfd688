"""Checks of a graph, and its wiring with copies where several nodes use a port."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from torch import nn

from daso.errors import FlowError
from daso.flow.model.graph import Graph
from daso.flow.model.node import Edge, Node

CHANGES_STATE = ("update", "group", "ungroup", "flatmap")


@dataclass(frozen=True, slots=True)
class Wiring:
    """A checked flow: nodes by index, and one edge for each port."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def named(self, name: str) -> int:
        """Return the index of the node with this name."""
        for node in self.nodes:
            if node.name == name:
                return node.index
        names = ", ".join(repr(node.name) for node in self.nodes if node.kind == "layer")
        raise FlowError(
            f"the flow must have a node {name!r}, but has none; its layers are {names}",
            code="unknown-flow-node",
        )

    def description(self) -> list[Any]:
        """Return names, ports and shapes of all nodes, to compare ranks."""
        return [
            (node.name, node.kind, node.inputs, node.outputs, _shapes(node.call))
            for node in self.nodes
        ] + [self.edges]

    @property
    def layers(self) -> list[Node]:
        """The nodes that are layers."""
        return [node for node in self.nodes if node.kind == "layer"]

    @property
    def source(self) -> int:
        """The index of the source."""
        return next(node.index for node in self.nodes if node.kind == "source")


def _shapes(call: Any) -> list[Any]:
    if not isinstance(call, nn.Module):
        return []
    return [(name, tuple(t.shape), str(t.dtype)) for name, t in call.state_dict().items()]


def wire(graph: Graph) -> Wiring:
    """Check a graph; return its wiring."""
    nodes, edges = _with_copies(graph)
    _check_ends(nodes, edges)
    _check_modules(nodes)
    _check_loops(nodes, edges)
    _check_joins(nodes, edges)
    return Wiring(tuple(nodes), tuple(edges))


def _with_copies(graph: Graph) -> tuple[list[Node], list[Edge]]:
    """Insert a broadcast behind every port that several nodes use."""
    nodes, edges = list(graph.nodes), []
    users: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        users[edge.source, edge.out].append(edge)
    for (source, out), port_edges in users.items():
        if len(port_edges) == 1:
            edges += port_edges
            continue
        width = nodes[source].outputs[out]
        name = f"copies of {nodes[source].name}" + (f" [{out}]" if out else "")
        while name in {node.name for node in nodes}:
            name += "'"
        node = Node(len(nodes), name, "broadcast", 1, (width,) * len(port_edges))
        nodes.append(node)
        edges.append(Edge(source, out, node.index, 0))
        edges += [
            Edge(node.index, copy, edge.target, edge.into) for copy, edge in enumerate(port_edges)
        ]
    return nodes, edges


def _check_ends(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    sources = [node for node in nodes if node.kind == "source"]
    if len(sources) != 1:
        raise FlowError(
            f"a flow must have one source, not {len(sources)}; a source can send several tensors, "
            f"and several messages",
            code="several-flow-sources",
        )
    used = {(edge.source, edge.out) for edge in edges}
    for node in nodes:
        for port in range(len(node.outputs)):
            if (node.index, port) not in used:
                raise FlowError(
                    f"every port must be used, but no node takes the messages of port {port} of "
                    f"{node.kind} {node.name!r}; connect it to a loss, or to drop()",
                    code="port-not-used",
                )


def _check_modules(nodes: Sequence[Node]) -> None:
    owners: dict[int, str] = {}
    for node in nodes:
        if node.kind != "layer":
            continue
        for parameter in node.call.parameters():
            other = owners.setdefault(id(parameter), node.name)
            if other != node.name:
                raise FlowError(
                    f"each parameter must belong to one node, which updates it, but {other!r} and "
                    f"{node.name!r} share one; use one node, and phi() and cond() around it",
                    code="parameter-of-two-nodes",
                )


# --- loops ----------------------------------------------------------------------------------------


def _check_loops(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    following: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        following[edge.source].add(edge.target)
    for loop in _loops(range(len(nodes)), following):
        names = ", ".join(repr(nodes[node].name) for node in sorted(loop))
        if all(nodes[node].kind != "cond" or following[node] <= loop for node in loop):
            raise FlowError(
                f"a loop must have a way out, a cond with a port that leads outside, but {names} "
                f"have none",
                code="loop-without-exit",
            )
        fixed = {node for node in loop if nodes[node].kind not in CHANGES_STATE}
        if _loops(fixed, {node: following[node] & fixed for node in fixed}):
            raise FlowError(
                f"a message must change its state on every way around a loop, or its states "
                f"repeat, but one way in {names} has no update, group, ungroup or flatmap",
                code="loop-without-new-state",
            )


def _loops(members: Iterable[int], following: Mapping[int, set[int]]) -> list[frozenset[int]]:
    """Return the cycles: sets of nodes that can all reach each other and themselves."""
    reached = {node: _reachable(node, following) for node in members}
    loops = {
        frozenset(other for other in targets if node in reached[other])
        for node, targets in reached.items()
        if node in targets
    }
    return sorted(loops, key=min)


def _reachable(start: int, following: Mapping[int, set[int]]) -> set[int]:
    reached: set[int] = set()
    todo = [start]
    while todo:
        new = following.get(todo.pop(), set()) - reached
        reached |= new
        todo += new
    return reached


# --- joins ----------------------------------------------------------------------------------------

Choices = frozenset[tuple[int, int]]  # pairs of a cond and the way that messages took there


def _check_joins(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    """Refuse a concat with ports on different ways of a cond: it would wait for ever."""
    # Computed to a fixed point: the ways that every message at a port must have taken since its
    # state was last changed.
    incoming: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        incoming[edge.target].append(edge)
    choices_at: dict[tuple[int, int], Choices | None] = {}
    before = None
    while choices_at != before:
        before = dict(choices_at)
        for node in nodes:
            into = [choices_at.get((edge.source, edge.out)) for edge in incoming[node.index]]
            for port in range(len(node.outputs)):
                choices_at[node.index, port] = _after(node, port, into)
    for node in nodes:
        if node.kind == "concat":
            _check_join(
                node, nodes, [(e, choices_at[e.source, e.out]) for e in incoming[node.index]]
            )


def _after(node: Node, port: int, into: Sequence[Choices | None]) -> Choices | None:
    """Return the choices behind messages that leave a port; None: not known yet."""
    known = [ways for ways in into if ways is not None]
    if node.kind == "source" or (node.kind in CHANGES_STATE and known):
        return frozenset()
    if not known:
        return None
    if node.kind == "phi":
        return frozenset.intersection(*known)
    ways = frozenset.union(*known)
    if node.kind == "cond":
        return frozenset(way for way in ways if way[0] != node.index) | {(node.index, port)}
    return ways


def _check_join(
    node: Node, nodes: Sequence[Node], into: Sequence[tuple[Edge, Choices | None]]
) -> None:
    for (edge, ways), (other, more) in combinations(into, 2):
        for (cond, way), (second, second_way) in product(ways or (), more or ()):
            if cond == second and way != second_way:
                raise FlowError(
                    f"messages at the ports of {node.name!r} must be able to meet, but those of "
                    f"port {edge.into} took way {way} of {nodes[cond].name!r} and those of port "
                    f"{other.into} way {second_way}; a message takes one: use phi() instead",
                    code="ports-cannot-meet",
                )
