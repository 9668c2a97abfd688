"""Graphs of any shape: a gated graph network as a flow, for deductions or molecules.

Two processes:  daso run -n 2 -m daso.examples.graphs --task=molecules
"""

import argparse
import random
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import daso
from daso.data import make_deductions, make_molecules

ROUNDS = 3  # of messages along edges
Loss = tuple[torch.Tensor, dict[str, float]]


def features_of_deduction(deduction: Any) -> torch.Tensor:
    """Return initial vertex states: species, individual, or subject of the question."""
    vertices = torch.zeros(deduction.vertices, 3)
    vertices[: deduction.species, 0] = 1
    vertices[deduction.species :, 1] = 1
    vertices[deduction.subject, 2] = 1
    return vertices


def features_of_molecule(molecule: Any) -> torch.Tensor:
    """Return initial atom states: the kind of each atom."""
    return torch.eye(4)[list(molecule.atoms)]


def loss_of_deduction(item: daso.flow.Item, scores: torch.Tensor) -> Loss:
    """Return the loss and accuracy of choosing the species with the highest score."""
    deduction = item.instance
    logits = scores[: deduction.species, 0][None]
    right = float(logits.argmax() == deduction.answer)
    return cross_entropy(logits, torch.tensor([deduction.answer])), {"accuracy": right}


def loss_of_molecule(item: daso.flow.Item, scores: torch.Tensor) -> Loss:
    """Return the loss and error of the sum of all atoms' scores."""
    total = scores.sum().view(1)
    error = float((total - item.instance.target).detach().abs())
    return mse_loss(total, item.instance.target), {"error": error}


TASKS: dict[str, tuple[Any, ...]] = {
    "deductions": (make_deductions, 3, 4, features_of_deduction, loss_of_deduction),
    "molecules": (make_molecules, 4, 3, features_of_molecule, loss_of_molecule),
}


def build(task: str, width: int = 64, batch: int = 16) -> daso.flow.Graph:
    """Return the flow: in each round, states are sent along edges of each kind, and summed.

    Args:
        task: "deductions" or "molecules".
        width: Width of states.
        batch: Maximum number of messages that a layer computes together.
    """
    torch.manual_seed(0)
    _, features, kinds, first, loss = TASKS[task]

    def used(item: daso.flow.Item) -> list[tuple[int, int]]:
        return [
            (item.state[-1], kind) for kind in range(kinds) if len(item.instance.edges[kind][0])
        ]

    def kind_of(item: daso.flow.Item) -> int:
        return item.state[-1]

    def leave(item: daso.flow.Item, states: torch.Tensor) -> torch.Tensor:
        return states[item.instance.edges[item.state[-1]][0]]

    def come(item: daso.flow.Item, sent: torch.Tensor) -> torch.Tensor:
        targets = item.instance.edges[item.state[-1]][1]
        return sent.new_zeros(item.instance.vertices, sent.shape[1]).index_add(0, targets, sent)

    def this_round(item: daso.flow.Item) -> tuple[int]:
        return (item.state[0],)

    def added(_: daso.flow.Item, parts: torch.Tensor) -> torch.Tensor:
        return parts.sum(0)

    graph = daso.flow.Graph()

    def go_round(states: daso.flow.Port) -> daso.flow.Port:
        leaving = graph.function(leave, graph.flatmap(used, states))
        ways = [
            graph.layer(nn.Linear(width, width), way, name=f"edges {kind}", batch=batch)
            for kind, way in enumerate(graph.cond(kind_of, leaving, ways=kinds))
        ]
        coming = graph.function(come, graph.phi(*ways))
        together = graph.group(this_round, coming, count=lambda item: len(used(item)))
        total = graph.function(added, together)
        return graph.layer(nn.GRUCell(width, width), total, states, name="cell", batch=batch)

    start = graph.layer(nn.Linear(features, width), graph.source(first), name="begin", batch=batch)
    end = graph.loop(go_round, start, go_on=lambda item: item.state[-1] < ROUNDS)
    score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    graph.loss(loss, graph.layer(score, end, name="score", batch=batch))
    return graph


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of one layer."""
    return torch.optim.Adam(params, lr=3e-3)


def main() -> None:
    """Train and print the fraction of correct answers, or the mean error, after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--task", choices=[*TASKS], default="deductions")
    parser.add_argument("--graphs", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=32, help="graphs under way")
    parser.add_argument("--interval", type=int, default=16, help="graphs of an update")
    options = parser.parse_args()

    torch.set_num_threads(1)
    topology = daso.init()
    make = TASKS[options.task][0]
    train, test = make(options.graphs, seed=1), make(300, seed=2)
    updates = daso.flow.Updates(min_update_interval=options.interval)
    with daso.flow.Runtime(
        build(options.task), adam, max_active_keys=options.at_once, updates=updates
    ) as runtime:
        for epoch in range(options.epochs):
            graphs: list[Any] = random.Random(epoch).sample(train, len(train))
            trained, tested = runtime.train_epoch(graphs), runtime.evaluate(test)
            if topology.rank == 0:
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in tested.metrics.items())
                print(
                    f"epoch {epoch + 1}: loss {trained.loss:.4f}, test {metrics}, "
                    f"{trained.instances_per_second:.0f} graphs/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
