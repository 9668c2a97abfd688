"""A flow as it runs: copies put in where a port is used twice, and checked as a whole."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from daso.errors import FlowError
from daso.flow.model.graph import Edge, Graph, Node

__all__ = ["Wiring", "wire"]

CHANGES_STATE = ("update", "group", "ungroup", "flatmap")


@dataclass(frozen=True, slots=True)
class Wiring:
    """A flow that was checked.

    Args:
        nodes: All of them; a node's index is its place.
        edges: From each port that messages leave by to one that they come in by, and no other.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    def named(self, name: str) -> int:
        """Return the index of a node."""
        for node in self.nodes:
            if node.name == name:
                return node.index
        names = ", ".join(repr(node.name) for node in self.nodes if node.kind == "layer")
        raise FlowError(f"there must be a node {name!r}, but there is none; layers are {names}")

    @property
    def source(self) -> int:
        """The node where instances come in."""
        return next(node.index for node in self.nodes if node.kind == "source")


def wire(graph: Graph) -> Wiring:
    """Return a graph as it runs."""
    nodes, edges = _with_copies(graph)
    _check_ends(nodes, edges)
    _check_modules(nodes)
    _check_loops(nodes, edges)
    _check_joins(nodes, edges)
    return Wiring(tuple(nodes), tuple(edges))


def _with_copies(graph: Graph) -> tuple[list[Node], list[Edge]]:
    """Put a broadcast behind every port that several nodes use."""
    nodes, edges = list(graph.nodes), []
    users: dict[tuple[int, int], list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        users[edge.source, edge.out].append(edge)
    for (source, out), found in users.items():
        if len(found) == 1:
            edges += found
            continue
        width = nodes[source].outputs[out]
        name = f"copies of {nodes[source].name}" + (f" [{out}]" if out else "")
        while name in {node.name for node in nodes}:
            name += "'"
        node = Node(len(nodes), name, "broadcast", 1, (width,) * len(found))
        nodes.append(node)
        edges.append(Edge(source, out, node.index, 0))
        edges += [Edge(node.index, copy, edge.target, edge.into) for copy, edge in enumerate(found)]
    return nodes, edges


def _check_ends(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    sources = [node for node in nodes if node.kind == "source"]
    if len(sources) != 1:
        raise FlowError(
            f"a flow must have one source, not {len(sources)}; a source can send several tensors, "
            f"and several messages"
        )
    used = {(edge.source, edge.out) for edge in edges}
    for node in nodes:
        for port in range(len(node.outputs)):
            if (node.index, port) not in used:
                raise FlowError(
                    f"every message must come to an end, but nothing takes those of port {port} "
                    f"of {node.kind} {node.name!r}; give it to a loss, or to drop()"
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
                    f"a parameter must be of one node, which updates it, but {other!r} and "
                    f"{node.name!r} share one; use one node, and phi() and cond() around it"
                )


# --- loops ----------------------------------------------------------------------------------------


def _check_loops(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    following: dict[int, set[int]] = defaultdict(set)
    for edge in edges:
        following[edge.source].add(edge.target)
    for loop in _components(range(len(nodes)), following):
        names = ", ".join(repr(nodes[node].name) for node in sorted(loop))
        leaves = [
            node for node in loop if nodes[node].kind == "cond" and not following[node] <= loop
        ]
        if not leaves:
            raise FlowError(
                f"a loop must have a way out, a cond of which one port leads outside, but there "
                f"is none in {names}"
            )
        fixed = {node for node in loop if nodes[node].kind not in CHANGES_STATE}
        inner = {node: following[node] & fixed for node in fixed}
        if _components(fixed, inner):
            raise FlowError(
                f"a message must change its state on every way around a loop, or its states "
                f"repeat, but there is no update, group, ungroup or flatmap on one in {names}"
            )


def _components(members: Iterable[int], following: Mapping[int, set[int]]) -> list[set[int]]:
    """Return the sets of nodes that can all reach each other, of two nodes or a loop to itself."""
    members = list(members)
    reached = {node: _reachable(node, following) for node in members}
    found: list[set[int]] = []
    seen: set[int] = set()
    for node in members:
        if node in reached[node] and node not in seen:
            loop = {other for other in reached[node] if node in reached.get(other, ())}
            seen |= loop
            found.append(loop)
    return found


def _reachable(start: int, following: Mapping[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    todo = list(following.get(start, ()))
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += following.get(node, ())
    return seen


# --- joins ----------------------------------------------------------------------------------------

Taken = frozenset[tuple[int, int]]  # cond and way


def _check_joins(nodes: Sequence[Node], edges: Sequence[Edge]) -> None:
    """Refuse a concat two of whose ports are on different ways of the same cond.

    A message takes one of them, so the other port waits for ever. What is followed is which ways
    every message that comes to a port must have taken since its state was last changed.
    """
    incoming: dict[int, list[Edge]] = defaultdict(list)
    for edge in edges:
        incoming[edge.target].append(edge)
    taken: dict[tuple[int, int], Taken | None] = {
        (node.index, port): None for node in nodes for port in range(len(node.outputs))
    }
    changed = True
    while changed:
        changed = False
        for node in nodes:
            into = [taken[edge.source, edge.out] for edge in incoming[node.index]]
            for port in range(len(node.outputs)):
                now = _after(node, port, into)
                if now != taken[node.index, port]:
                    taken[node.index, port] = now
                    changed = True
    for node in nodes:
        if node.kind == "concat":
            _check_join(node, nodes, [(e, taken[e.source, e.out]) for e in incoming[node.index]])


def _after(node: Node, port: int, into: Sequence[Taken | None]) -> Taken | None:
    """Return which ways messages must have taken that leave here; None: not known yet."""
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
    node: Node, nodes: Sequence[Node], into: Sequence[tuple[Edge, Taken | None]]
) -> None:
    for number, (edge, ways) in enumerate(into):
        for other, more in into[:number]:
            for cond, way in ways or ():
                for second, second_way in more or ():
                    if cond == second and way != second_way:
                        raise FlowError(
                            f"messages at the ports of {node.name!r} must be able to meet, but "
                            f"those of port {other.into} took way {second_way} of "
                            f"{nodes[cond].name!r} and those of port {edge.into} way {way}; a "
                            f"message takes one: use phi() instead"
                        )
