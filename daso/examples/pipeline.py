"""The layers of a perceptron on different ranks: a pipeline without a common step.

Two processes:  daso run -n 2 -m daso.examples.pipeline
"""

import argparse
import random
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import daso
from daso.data import find_fashion, load_digits, load_fashion

Sample = tuple[torch.Tensor, torch.Tensor]


def load(name: str, *, train: bool) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return Fashion-MNIST or scikit-learn's digits; "auto" prefers the first if it is on disk."""
    if name == "fashion" or (name == "auto" and find_fashion()):
        return load_fashion(train=train)
    return load_digits(train=train)


def build(pixels: int, width: int = 256, batch: int = 16) -> daso.flow.Graph:
    """Return the flow: three consecutive layers.

    Args:
        pixels: Pixels of an image.
        width: Width of hidden layers.
        batch: Maximum number of images that a layer computes together.
    """
    torch.manual_seed(0)

    def loss(item: daso.flow.Item, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
        label = item.instance[1].view(1)
        return cross_entropy(logits, label), {"accuracy": float(logits.argmax() == label)}

    graph = daso.flow.Graph()
    images = graph.source(lambda sample: sample[0].view(1, -1))
    sizes = (pixels, width, width)
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        layer = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())
        images = graph.layer(layer, images, name=f"hidden {number + 1}", batch=batch)
    graph.loss(loss, graph.layer(nn.Linear(width, 10), images, name="logits", batch=batch))
    return graph


def main() -> None:
    """Train and print the fraction of correct images after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", choices=["auto", "fashion", "digits"], default="auto")
    parser.add_argument("--images", type=int, default=10_000, help="of an epoch, at most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--at-once", type=int, default=32, help="images under way")
    parser.add_argument("--interval", type=int, default=16, help="images of an update")
    options = parser.parse_args()

    torch.set_num_threads(1)
    topology = daso.init()
    train, test = load(options.data, train=True), load(options.data, train=False)
    count, tests = len(train), len(test)  # type: ignore[arg-type]  # both have a length
    graph = build(train[0][0].numel())
    updates = daso.flow.Updates(min_update_interval=options.interval)

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=options.lr)

    with daso.flow.Runtime(graph, sgd, max_active_keys=options.at_once, updates=updates) as runtime:
        for epoch in range(options.epochs):
            chosen = random.Random(epoch).sample(range(count), min(count, options.images))
            trained = runtime.train_epoch([train[index] for index in chosen])
            tested = runtime.evaluate([test[index] for index in range(min(tests, 2000))])
            if topology.rank == 0:
                print(
                    f"epoch {epoch + 1}: loss {trained.loss:.3f}, test accuracy "
                    f"{tested.metrics['accuracy']:.3f}, "
                    f"{trained.instances_per_second:.0f} images/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
