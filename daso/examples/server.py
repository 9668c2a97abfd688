"""Train without a common step: temporarily slow ranks do not delay the others.

Four processes:  daso run -n 4 -m daso.examples.server
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import daso
from daso.data import ShardedSampler, find_fashion, load_digits, load_fashion


def load(name: str, *, train: bool) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return Fashion-MNIST or scikit-learn's digits; "auto" prefers the first if it is on disk."""
    if name == "fashion" or (name == "auto" and find_fashion()):
        return load_fashion(train=train)
    return load_digits(train=train)


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset[tuple[torch.Tensor, ...]]) -> float:
    """Return the fraction of correctly classified images."""
    right = total = 0
    for images, labels in DataLoader(data, batch_size=500):
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    return right / total


def main() -> None:
    """Train and print the accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", choices=["auto", "fashion", "digits"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--staleness", type=int, help="steps that ranks may be apart (any number)")
    parser.add_argument(
        "--slow-ms", type=float, default=0.0, help="extra time of the last rank per step"
    )
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    topology = daso.init()
    train, test = load(options.data, train=True), load(options.data, train=False)
    sampler = ShardedSampler(
        len(train),  # type: ignore[arg-type]  # both data sets have a length
        rank=topology.rank,
        size=topology.world_size,
        batch_size=options.batch_size,
    )
    slow_seconds = options.slow_ms / 1e3 if topology.rank == topology.world_size - 1 else 0.0
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(train[0][0].numel(), 128), nn.ReLU(), nn.Linear(128, 10)
    )

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=options.lr)

    with daso.ParameterServer(model, sgd, staleness=options.staleness) as server:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(train, batch_sampler=sampler):
                server.zero_grad()
                cross_entropy(model(images), labels).backward()  # gradients leave here
                server.step()
                time.sleep(slow_seconds)
            server.synchronize()  # collective: now all ranks have the same parameters
            if topology.rank == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test):.3f}", flush=True)


if __name__ == "__main__":
    main()
