"""A loop as long as its list: a recurrent network as a flow, with many lists in flight.

Two processes:  daso run -n 2 -m daso.examples.lists
"""

import argparse
import random

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import daso
from daso.data import Digits, make_lists


def build(width: int = 128, batch: int = 16) -> daso.flow.Graph:
    """Return the flow: each token goes into a GRU, then the answer is predicted.

    Args:
        width: Width of all layers.
        batch: Maximum number of messages that a layer computes together.
    """
    torch.manual_seed(0)

    def token(item: daso.flow.Item, _: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = item.instance.tokens
        return tokens[item.state[-1]].view(1)

    def has_more(item: daso.flow.Item) -> bool:
        return bool(item.state[-1] < len(item.instance.tokens))

    def loss(item: daso.flow.Item, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        right = float(logits.argmax() == item.instance.answer)
        return cross_entropy(logits, item.instance.answer), {"accuracy": right}

    graph = daso.flow.Graph()

    def step(state: daso.flow.Port) -> daso.flow.Port:
        read = graph.function(token, state)
        word = graph.layer(nn.Embedding(14, width), read, name="words", batch=batch)
        return graph.layer(nn.GRUCell(width, width), word, state, name="cell", batch=batch)

    start = graph.source(lambda _: torch.zeros(1, width))
    end = graph.loop(step, start, go_on=has_more)
    answer = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    graph.loss(loss, graph.layer(answer, end, name="answer", batch=batch))
    return graph


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer of one layer."""
    return torch.optim.Adam(params, lr=2e-3)


def main() -> None:
    """Train and print the fraction of correct answers after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--lists", type=int, default=8000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=32, help="lists under way")
    parser.add_argument("--interval", type=int, default=16, help="lists of an update")
    options = parser.parse_args()

    torch.set_num_threads(1)
    topology = daso.init()
    train, test = make_lists(options.lists, seed=1), make_lists(1000, seed=2)
    updates = daso.flow.Updates(min_update_interval=options.interval)
    with daso.flow.Runtime(
        build(), adam, max_active_keys=options.at_once, updates=updates
    ) as runtime:
        for epoch in range(options.epochs):
            lists: list[Digits] = random.Random(epoch).sample(train, len(train))
            trained, tested = runtime.train_epoch(lists), runtime.evaluate(test)
            if topology.rank == 0:
                print(
                    f"epoch {epoch + 1}: loss {trained.loss:.3f}, test accuracy "
                    f"{tested.metrics['accuracy']:.3f}, {trained.instances_per_second:.0f} lists/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
