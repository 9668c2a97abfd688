"""What is trained on a GPU that is measured: models of their papers' sizes, on noise."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from daso.cli.bench.models import tiny_mlp
from daso.examples.transformer import ByteTransformer

__all__ = ["MODELS", "PRETENDED", "Shape"]

PRETENDED = "tiny"  # the model that needs no GPU: it runs on a CPU that pretends to be one
VOCABULARY = 50_257  # of GPT-2


class Bottleneck(nn.Module):
    """Three convolutions and a way past them (He et al. 2015; stride at the 3 x 3 one)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.body = nn.Sequential(
            *_convolution(inside, width, 1, 1),
            nn.ReLU(),
            *_convolution(width, width, 3, stride),
            nn.ReLU(),
            *_convolution(width, outside, 1, 1),
        )
        self.past: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.past = nn.Sequential(*_convolution(inside, outside, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map (batch, inside, side, side) to (batch, outside, side / stride, side / stride)."""
        y: torch.Tensor = torch.relu(self.body(images) + self.past(images))
        return y


def _convolution(inside: int, outside: int, side: int, stride: int) -> Iterator[nn.Module]:
    yield nn.Conv2d(inside, outside, side, stride, padding=side // 2, bias=False)
    yield nn.BatchNorm2d(outside)


def resnet50() -> nn.Module:
    """Return ResNet-50 for 1000 classes: 25.6 M parameters."""
    blocks: list[nn.Module] = []
    inside = 64
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for at in range(count):
            blocks.append(Bottleneck(inside, width, 2 if stage and not at else 1))
            inside = 4 * width
    return nn.Sequential(
        *(*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), *blocks),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)),
    )


def gpt2() -> nn.Module:
    """Return a transformer of GPT-2's shape: 124 M parameters."""
    model = ByteTransformer(context=1024, width=768, layers=12, heads=12)
    model.token = nn.Embedding(VOCABULARY, 768)
    model.head = nn.Linear(768, VOCABULARY, bias=False)
    model.head.weight = model.token.weight
    nn.init.normal_(model.token.weight, std=0.02)
    return model


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and one batch of noise for it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]
    targets: Callable[[], torch.Tensor]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-5)


def _tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (8, 1024))


MODELS = {
    "resnet50": Shape(
        resnet50,
        lambda: torch.randn(64, 3, 224, 224),
        lambda: torch.randint(1000, (64,)),
        _sgd,
    ),
    "gpt2": Shape(gpt2, _tokens, _tokens, _adamw),
    PRETENDED: Shape(
        tiny_mlp,
        lambda: torch.randn(64, 1, 28, 28),
        lambda: torch.randint(10, (64,)),
        _sgd,
    ),
}
