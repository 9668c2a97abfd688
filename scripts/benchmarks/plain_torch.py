"""Plain torch programs of the flows in `daso.examples`: what one would write without flows.

Layers are called by name, as in the flows: ``layer(name, *inputs, at=state)``.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import daso
from daso.data import make_deductions, make_expressions, make_lists, make_molecules
from daso.examples import graphs, lists, trees

__all__ = ["LOSSES", "MAKERS", "Call", "build_flow", "layers_of"]

MAKERS: Mapping[str, Callable[..., list[Any]]] = {
    "lists": make_lists,
    "trees": make_expressions,
    "deductions": make_deductions,
    "molecules": make_molecules,
}
Call = Callable[..., Any]


def build_flow(task: str, width: int, batch: int = 1) -> "daso.flow.Graph":
    """Return a task's flow.

    Args:
        task: One of `MAKERS`.
        width: Of states.
        batch: Messages that a layer computes together, at most.
    """
    made: daso.flow.Graph
    if task in graphs.TASKS:
        made = graphs.build(task, width, batch)
    else:
        made = (lists if task == "lists" else trees).build(width, batch)
    return made


def layers_of(graph: "daso.flow.Graph") -> Call:
    """Return what calls a flow's layers by name."""
    parts: Mapping[str, Any] = {n.name: n.call for n in graph.nodes if n.kind == "layer"}

    def call(name: str, *inputs: Any, at: Sequence[int] = ()) -> Any:  # noqa: ARG001 - for others
        return parts[name](*inputs)

    return call


def _loss_of_list(layer: Call, one: Any, width: int) -> torch.Tensor:
    state = torch.zeros(1, width)
    for place, token in enumerate(one.tokens):
        state = layer("cell", layer("words", token.view(1), at=(place,)), state, at=(place,))
    return cross_entropy(layer("answer", state), one.answer)


def _loss_of_tree(layer: Call, one: Any, _width: int) -> torch.Tensor:
    """Go level by level: whatever has both its children is computed next."""
    found, total = {}, torch.zeros(())
    todo: deque[tuple[int, Any]] = deque(
        (leaf, layer("leaf", torch.tensor([one.labels[leaf]]), at=(leaf,))) for leaf in one.leaves
    )
    sides: dict[int, dict[bool, Any]] = {}
    while todo:
        node, state = todo.popleft()
        found[node] = state
        parent = one.parents[node]
        if parent < 0:
            continue
        both = sides.setdefault(parent, {})
        both[bool(one.lefts[node])] = state
        if len(both) == 2:
            name = f"cell {one.labels[parent]}"
            todo.append((parent, layer(name, *both[True], *both[False], at=(parent,))))
    for node, (state, _) in found.items():
        total = total + cross_entropy(layer("value", state, at=(node,)), one.values[node].view(1))
    return total


def _loss_of_graph(task: str) -> Call:
    _, _, kinds, first, loss = graphs.TASKS[task]

    def of(layer: Call, one: Any, _width: int) -> torch.Tensor:
        states = layer("begin", first(one))
        for turn in range(graphs.ROUNDS):
            sums = []
            leaving = states.view_as(states)  # whose gradients are added before the cell's is
            for kind in range(kinds):
                come_from, to = one.edges[kind]
                if len(to):
                    sent = layer(f"edges {kind}", leaving[come_from], at=(turn, kind))
                    sums.append(torch.zeros_like(states).index_add(0, to, sent))
            states = layer("cell", torch.stack(sums).sum(0), states, at=(turn,))
        found: torch.Tensor = loss(daso.flow.Item(one, (), ()), layer("score", states))[0]
        return found

    return of


LOSSES: Mapping[str, Call] = {
    "lists": _loss_of_list,
    "trees": _loss_of_tree,
    "deductions": _loss_of_graph("deductions"),
    "molecules": _loss_of_graph("molecules"),
}
