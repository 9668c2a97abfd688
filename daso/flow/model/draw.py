"""Text forms of a flow: a list, Mermaid, Graphviz."""

from collections.abc import Sequence

from daso.flow.model.node import Edge, Node

COMPUTES = ("layer", "function", "loss")
SHAPES = {"source": ("([", "])"), "loss": ("([", "])"), "drop": ("([", "])"), "cond": ("{", "}")}
DOT_SHAPES = {"source": "oval", "loss": "oval", "drop": "oval", "cond": "diamond"}


def _label(node: Node) -> str:
    text = node.name if node.kind in node.name else f"{node.name}: {node.kind}"
    return text.replace('"', "'")


def listing(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return one line for each node: number, kind, name and inputs."""
    lines = []
    for node in nodes:
        incoming = sorted((edge for edge in edges if edge.target == node.index), key=_into)
        sources = ", ".join(
            nodes[edge.source].name
            + (f" [{edge.out}]" if len(nodes[edge.source].outputs) > 1 else "")
            for edge in incoming
        )
        parameters = sum(p.numel() for p in node.call.parameters()) if node.kind == "layer" else 0
        lines.append(
            f"{node.index:3}  {node.kind:9}  {node.name}"
            + (f"  from {sources}" if sources else "")
            + (f"  ({parameters:,} parameters)" if parameters else "")
        )
    return "\n".join(lines)


def _into(edge: Edge) -> int:
    return edge.into


def mermaid(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return the graph as Mermaid text, for Markdown."""
    lines = ["flowchart TD"]
    for node in nodes:
        left, right = SHAPES.get(node.kind, ("[", "]") if node.kind in COMPUTES else ("(", ")"))
        lines.append(f'    n{node.index}{left}"{_label(node)}"{right}')
    for source, out, target, _ in edges:
        label = f"|{out}| " if nodes[source].kind in ("cond", "split") else ""
        lines.append(f"    n{source} -->{label or ' '}n{target}")
    return "\n".join(lines)


def dot(nodes: Sequence[Node], edges: Sequence[Edge]) -> str:
    """Return the graph as Graphviz text."""
    lines = ["digraph flow {", "    node [fontname=sans];"]
    for node in nodes:
        usual = "box" if node.kind in COMPUTES else "plain"
        shape = DOT_SHAPES.get(node.kind, usual)
        lines.append(f'    n{node.index} [label="{_label(node)}", shape={shape}];')
    for source, out, target, _ in edges:
        label = f' [label="{out}"]' if nodes[source].kind in ("cond", "split") else ""
        lines.append(f"    n{source} -> n{target}{label};")
    return "\n".join([*lines, "}"])
