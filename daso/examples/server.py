"""Train without a step in common: ranks that are slower for a while hold nobody up.

Four processes:  daso run -n 4 -m daso.examples.server
"""

import argparse
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import daso
from daso.data import ShardedSampler
from daso.examples.cnn import CNN, accuracy, load


def main() -> None:
    """Train and print the accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", choices=["auto", "fashion", "digits"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--staleness", type=int, help="steps that ranks may be apart (any number)")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="more on the last rank per step")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    place = daso.init().place
    train, test = load(options.data, train=True), load(options.data, train=False)
    sampler = ShardedSampler(
        len(train),  # type: ignore[arg-type]  # both data sets have a length
        rank=place.rank,
        size=place.size,
        batch_size=options.batch_size,
    )
    slow_seconds = options.slow_ms / 1e3 if place.rank == place.size - 1 else 0.0
    model = CNN(train[0][0].shape[-1])

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=options.lr, momentum=0.9)

    with daso.EagerServer(model, sgd, staleness=options.staleness) as server:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(train, batch_sampler=sampler):
                server.zero_grad()
                cross_entropy(model(images), labels).backward()  # gradients leave here
                server.step()
                time.sleep(slow_seconds)
            server.synchronize()  # ranks meet: now all have the same parameters
            if place.rank == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test):.3f}", flush=True)


if __name__ == "__main__":
    main()
