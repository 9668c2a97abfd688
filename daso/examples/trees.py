"""Trees of any shape: a Tree-LSTM as a flow, with a cell for each operator.

Two processes:  daso run -n 2 -m daso.examples.trees
"""

import argparse
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import daso
from daso.data import Expression, make_expressions

OPERATORS, VALUES = 3, 5


class Leaf(nn.Module):
    """Embedding of the number at a leaf."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.state, self.memory = nn.Embedding(VALUES, width), nn.Embedding(VALUES, width)

    def forward(self, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return state and memory, (n, width) each."""
        return self.state(label), self.memory(label)


class Cell(nn.Module):
    """An LSTM cell with two children."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * width, 5 * width)

    def forward(
        self, h: torch.Tensor, c: torch.Tensor, other_h: torch.Tensor, other_c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return state and memory of the parent, (n, width) each."""
        gates = self.gates(torch.cat([h, other_h], 1))
        entry, left, right, leave, new = gates.chunk(5, 1)
        memory = entry.sigmoid() * new.tanh() + left.sigmoid() * c + right.sigmoid() * other_c
        return leave.sigmoid() * memory.tanh(), memory


def build(width: int = 96, batch: int = 16) -> daso.flow.Graph:
    """Return the flow: from the leaves to the root; a message's state is its tree node.

    Args:
        width: Width of states.
        batch: Maximum number of messages that a layer computes together.
    """
    torch.manual_seed(0)

    def leaves(tree: Expression) -> dict[tuple[int], torch.Tensor]:
        return {(leaf,): torch.tensor([tree.labels[leaf]]) for leaf in tree.leaves}

    def loss(item: daso.flow.Item, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        (node,), value = item.state, item.instance.values[item.state]
        report = {"accuracy": float(logits.argmax() == value)} if node == 0 else {}
        return cross_entropy(logits, value.view(1)), report

    def is_root(item: daso.flow.Item) -> bool:
        return item.state == (0,)

    def is_left(item: daso.flow.Item) -> bool:
        return bool(item.instance.lefts[item.state[0]])

    def parent(item: daso.flow.Item) -> tuple[int]:
        return (item.instance.parents[item.state[0]],)

    def operator(item: daso.flow.Item) -> int:
        return int(item.instance.labels[item.state[0]])

    graph = daso.flow.Graph()
    begin = graph.source(leaves)
    nodes = graph.phi(graph.layer(Leaf(width), begin, outputs=2, batch=batch))
    state, memory = graph.split(nodes, (1, 1))
    graph.drop(memory)
    value = graph.layer(nn.Linear(width, VALUES), state, name="value", batch=batch)
    graph.loss(loss, value)
    up, root = graph.cond(is_root, nodes)
    graph.drop(root)
    right, left = graph.cond(is_left, up)
    both = graph.concat(graph.update(parent, left), graph.update(parent, right))
    for way, children in enumerate(graph.cond(operator, both, ways=OPERATORS)):
        cell = graph.layer(Cell(width), children, name=f"cell {way}", outputs=2, batch=batch)
        graph.connect(cell, nodes)
    return graph


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of one layer."""
    return torch.optim.Adam(params, lr=3e-3)


def main() -> None:
    """Train and print the fraction of trees with a correct root after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trees", type=int, default=3000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=32, help="trees under way")
    parser.add_argument("--interval", type=int, default=16, help="trees of an update")
    options = parser.parse_args()

    torch.set_num_threads(1)
    topology = daso.init()
    train, test = make_expressions(options.trees, seed=1), make_expressions(500, seed=2)
    updates = daso.flow.Updates(min_update_interval=options.interval)
    with daso.flow.Runtime(
        build(), adam, max_active_keys=options.at_once, updates=updates
    ) as runtime:
        for epoch in range(options.epochs):
            trees: list[Expression] = random.Random(epoch).sample(train, len(train))
            trained, tested = runtime.train_epoch(trees), runtime.evaluate(test)
            if topology.rank == 0:
                print(
                    f"epoch {epoch + 1}: loss {trained.loss:.3f}, test accuracy "
                    f"{tested.metrics['accuracy']:.3f}, {trained.instances_per_second:.0f} trees/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
