"""Task of `daso train`: the data set, model and loss that a configuration names."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from daso.cli.train.config import Config, DataConfig, OptimizerConfig
from daso.data import find_fashion, load_digits, load_fashion, load_text
from daso.data.synthetic import images
from daso.data.text import find_text
from daso.environment import data_folder
from daso.examples.cnn import CNN
from daso.examples.transformer import ByteTransformer
from daso.paths import path_of
from daso.train.deltas.outer import MakeOuter

TEXT_BYTES = 1_000_000  # of Python's library: an epoch takes seconds


@dataclass(frozen=True, slots=True)
class Task:
    """Data set, and a model for it."""

    data: str  # name of the loaded data set
    train: Dataset[tuple[torch.Tensor, ...]]
    test: Dataset[tuple[torch.Tensor, ...]]
    model: nn.Module

    @property
    def train_length(self) -> int:
        """Samples to train on."""
        return _length(self.train)


def _length(data: Dataset[Any]) -> int:
    assert isinstance(data, Sized)
    return len(data)


def make_task(config: DataConfig) -> Task:
    """Load data and build a model for it."""
    folder = path_of(config.folder) if config.folder else data_folder()
    name = config.name
    if name == "auto":
        name = "fashion" if find_fashion(folder) else "digits"
    if name == "fashion":
        train, test = load_fashion(folder, train=True), load_fashion(folder, train=False)
        return Task(name, train, test, CNN(28))
    if name == "digits":
        return Task(name, load_digits(train=True), load_digits(train=False), CNN(8))
    if name == "synthetic":
        return Task(name, images(4096, seed=1), images(1024, seed=2), CNN(28))
    if folder is not None and not config.folder:
        folder = find_text(folder)  # DASO_DATA may hold only other data sets
    size = config.context
    windows = load_text(folder, train=True, context=size, max_bytes=TEXT_BYTES)
    unseen = load_text(folder, train=False, context=size, max_bytes=TEXT_BYTES)
    return Task(name, windows, unseen, ByteTransformer(size))


def make_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Return the inner optimizer."""
    if config.name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def make_outer(config: Config) -> MakeOuter | None:
    """Return the factory of the outer optimizer; None for plain averaging."""
    if config.outer == "none":
        return None
    lr, momentum = config.outer_lr, config.outer_momentum
    return lambda params: torch.optim.SGD(params, lr, momentum, nesterov=True)


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of class scores (..., classes) against targets (...)."""
    scores = model(inputs)
    return cross_entropy(scores.flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset[Any], *, rank: int, size: int) -> tuple[int, int]:
    """Return (correct, total) counts on this rank's share of a data set."""
    model.eval()
    device = next((tensor.device for tensor in model.parameters()), None)
    share = torch.utils.data.Subset(data, range(rank, _length(data), size))
    right = total = 0
    for inputs, targets in DataLoader(share, batch_size=256):
        right += int((model(inputs.to(device)).argmax(-1) == targets.to(device)).sum())
        total += targets.numel()
    model.train()
    return right, total
