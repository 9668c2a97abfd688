"""Flows as text: a list, Mermaid, Graphviz."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from daso.flow.model.graph import Graph, Node

__all__ = ["dot", "listing", "mermaid"]

COMPUTES = ("layer", "function", "loss")
SHAPES = {"source": ("([", "])"), "loss": ("([", "])"), "drop": ("([", "])"), "cond": ("{", "}")}
DOT_SHAPES = {"source": "oval", "loss": "oval", "drop": "oval", "cond": "diamond"}


def _label(node: "Node") -> str:
    text = node.name if node.kind in node.name else f"{node.name}: {node.kind}"
    return text.replace('"', "'")


def listing(graph: "Graph") -> str:
    """Return one line for each node: number, kind, name, and where its messages come from."""
    lines = []
    for node in graph.nodes:
        incoming = sorted((edge for edge in graph.edges if edge.target == node.index), key=_into)
        sources = ", ".join(
            graph.nodes[edge.source].name
            + (f" [{edge.out}]" if len(graph.nodes[edge.source].outputs) > 1 else "")
            for edge in incoming
        )
        parameters = sum(p.numel() for p in node.call.parameters()) if node.kind == "layer" else 0
        lines.append(
            f"{node.index:3}  {node.kind:9}  {node.name}"
            + (f"  from {sources}" if sources else "")
            + (f"  ({parameters:,} parameters)" if parameters else "")
        )
    return "\n".join(lines)


def _into(edge: "tuple[int, ...]") -> int:
    return edge[3]


def mermaid(graph: "Graph") -> str:
    """Return the graph as Mermaid text, for Markdown."""
    lines = ["flowchart TD"]
    for node in graph.nodes:
        left, right = SHAPES.get(node.kind, ("[", "]") if node.kind in COMPUTES else ("(", ")"))
        lines.append(f'    n{node.index}{left}"{_label(node)}"{right}')
    for source, out, target, _ in graph.edges:
        label = f"|{out}| " if graph.nodes[source].kind in ("cond", "split") else ""
        lines.append(f"    n{source} -->{label or ' '}n{target}")
    return "\n".join(lines)


def dot(graph: "Graph") -> str:
    """Return the graph as Graphviz text."""
    lines = ["digraph flow {", "    node [fontname=sans];"]
    for node in graph.nodes:
        usual = "box" if node.kind in COMPUTES else "plain"
        shape = DOT_SHAPES.get(node.kind, usual)
        lines.append(f'    n{node.index} [label="{_label(node)}", shape={shape}];')
    for source, out, target, _ in graph.edges:
        label = f' [label="{out}"]' if graph.nodes[source].kind in ("cond", "split") else ""
        lines.append(f"    n{source} -> n{target}{label};")
    return "\n".join([*lines, "}"])
