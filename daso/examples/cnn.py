"""Train a small convolutional network on images.

One process:         python -m daso.examples.cnn
Four, as two nodes:  daso run -n 4 --ranks-per-node 2 -m daso.examples.cnn
"""

import argparse

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import daso
from daso.data import ShardedSampler, find_fashion, load_digits, load_fashion


class CNN(nn.Module):
    """Two convolutions with BatchNorm, two linear layers; about 50 k parameters on 28 x 28.

    Args:
        side: Height and width of the images, in pixels.
        classes: Number of classes.
        width: Channels of the first convolution.
    """

    def __init__(self, side: int = 28, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        cells = 2 * width * (side // 4) ** 2
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(cells, 2 * width), nn.ReLU(), nn.Linear(2 * width, classes)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (batch, 1, side, side) to scores (batch, classes)."""
        scores: torch.Tensor = self.head(self.features(images))
        return scores


def load(name: str, *, train: bool) -> Dataset[tuple[torch.Tensor, ...]]:
    """Return Fashion-MNIST or scikit-learn's digits; "auto" prefers the first if it is on disk."""
    if name == "fashion" or (name == "auto" and find_fashion()):
        return load_fashion(train=train)
    return load_digits(train=train)


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset[tuple[torch.Tensor, ...]]) -> float:
    """Return the fraction of correctly classified images."""
    model.eval()
    right = total = 0
    for images, labels in DataLoader(data, batch_size=500):
        right += int((model(images).argmax(1) == labels).sum())
        total += len(labels)
    model.train()
    return right / total


def main() -> None:
    """Train and print the accuracy after every epoch."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", choices=["auto", "fashion", "digits"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank")
    parser.add_argument("--lr", type=float, default=0.05)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    topology = daso.init()
    train, test = load(options.data, train=True), load(options.data, train=False)
    side = train[0][0].shape[-1]
    sampler = ShardedSampler(
        len(train),  # type: ignore[arg-type]  # both data sets have a length
        rank=topology.rank,
        size=topology.world_size,
        batch_size=options.batch_size,
    )
    model = CNN(side)
    inner = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    with daso.DASO(inner, module=model) as optimizer:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(train, batch_sampler=sampler):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            optimizer.synchronize()
            if topology.rank == 0:
                print(f"epoch {epoch + 1}: test accuracy {accuracy(model, test):.3f}", flush=True)


if __name__ == "__main__":
    main()
