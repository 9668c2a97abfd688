"""Models of several kinds, and batches for them without loading time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from daso.data import find_fashion, load_fashion, load_text
from daso.environment import data_folder
from daso.examples.transformer import ByteTransformer

KEPT = 4096  # samples in each rank's memory
SIDE, CLASSES = 28, 10
Batch = tuple[torch.Tensor, torch.Tensor]


def small_cnn() -> nn.Module:
    """Return two convolutions and a wide linear layer: 4.6 M parameters, most of them in one."""
    cells = 64 * (SIDE // 4) ** 2
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(cells, 1450), nn.ReLU(), nn.Linear(1450, CLASSES)),
    )


def tiny_mlp() -> nn.Module:
    """Return two linear layers over 14 x 14 pixels: 10 k parameters, a step of a millisecond."""
    cells = (SIDE // 2) ** 2
    return nn.Sequential(
        *(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(cells, 48), nn.ReLU(), nn.Linear(48, CLASSES)),
    )


class Residual(nn.Module):
    """Two convolutions and a way past them (He et al. 2015, basic block)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            straight = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.past = nn.Sequential(straight, nn.BatchNorm2d(outside))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, inside, side, side) to (batch, outside, side / stride, side / stride)."""
        y: torch.Tensor = torch.relu(self.body(images) + self.past(images))
        return y


class ResNet18(nn.Sequential):
    """ResNet-18 in its full width for small images: 11.2 M parameters in 62 tensors."""

    def __init__(self) -> None:
        stem = [nn.Conv2d(1, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        widths = [64, 64, 128, 256, 512]
        blocks = [
            block
            for at, (inside, outside) in enumerate(pairwise(widths))
            for block in (
                Residual(inside, outside, 2 if at else 1),
                Residual(outside, outside, 1),
            )
        ]
        end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
        super().__init__(*stem, nn.MaxPool2d(2), *blocks, *end)


@dataclass(frozen=True, slots=True)
class Case:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    batch: int  # samples of a rank
    text: bool
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]

    def batches(self, seed: int) -> Iterator[Batch]:
        """Draw batches endlessly from samples in memory."""
        inputs, targets = (_text if self.text else _images)()
        generator = torch.Generator().manual_seed(seed)
        while True:
            chosen = torch.randint(len(inputs), (self.batch,), generator=generator)
            yield inputs[chosen], targets[chosen]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def score(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the percentage that the model gets right."""
    model.eval()
    parts = zip(inputs.split(500), targets.split(500), strict=True)
    right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in parts)
    model.train()
    return 100 * right / targets.numel()


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.02, momentum=0.9)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _images() -> Batch:
    """Return Fashion-MNIST where it is on disk, else noise."""
    folder = data_folder()
    if find_fashion(folder) is None:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(KEPT, 1, SIDE, SIDE, generator=generator)
        return noise, torch.randint(CLASSES, (KEPT,), generator=generator)
    images, labels = load_fashion(folder, train=True).tensors
    return images[:KEPT], labels[:KEPT]


def _text() -> Batch:
    data = load_text(train=True, context=128, max_bytes=KEPT * 128)
    pairs = [data[at] for at in range(min(KEPT, len(data)))]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


CASES = {
    "cnn": Case(small_cnn, 64, text=False, optimizer=_sgd),
    "resnet18": Case(ResNet18, 8, text=False, optimizer=_sgd),
    "gpt": Case(
        lambda: ByteTransformer(context=128, width=320, layers=8, heads=5),
        batch=2,
        text=True,
        optimizer=_adamw,
    ),
    "tiny": Case(tiny_mlp, 64, text=False, optimizer=_sgd),
}
