"""Optimizers, batches and training loops that tests share; `models` has models of many kinds."""

from collections.abc import Iterable
from typing import Any

import torch
from models import batch_loss
from torch import nn

Trained = nn.Module | Iterable[torch.Tensor]


def params_of(trained: Trained) -> Any:
    return trained.parameters() if isinstance(trained, nn.Module) else trained


def sgd(trained: Trained, lr: float = 0.05, momentum: float = 0.9, **options: Any) -> Any:
    return torch.optim.SGD(params_of(trained), lr=lr, momentum=momentum, **options)


def adamw(trained: Trained, **options: Any) -> Any:
    return torch.optim.AdamW(params_of(trained), **{"lr": 0.01, **options})


def batch(step: int, rank: int) -> torch.Tensor:
    """Return what a rank sees at a step (8, 4); ranks see different things."""
    generator = torch.Generator().manual_seed(97 * step + rank)
    return (
        torch.randn(8, 4, generator=generator, device="cpu").to(torch.get_default_device()) + rank
    )


def train(
    optimizer: Any, model: nn.Module, rank: int, steps: int, *, first: int = 0, size: int = 1
) -> None:
    """Train as a user does.

    Args:
        rank: Whose data; with ``size``, this rank's and the next ones', as one program that does
            what ``size`` ranks should do together.
        first: Number of the first step.
    """
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            inputs = [batch(step, r).to(dtype) for r in range(rank, rank + size)]
            losses = [model(x).square().mean() for x in inputs]
            loss = torch.stack(losses).sum() / size
            loss.backward()
            return loss

        if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def train_batches(optimizer: Any, model: nn.Module, rank: int, steps: Iterable[int]) -> None:
    """Train on the batches of `models.batch_loss`."""
    for step in steps:
        optimizer.zero_grad()
        batch_loss(model, rank, step).backward()
        optimizer.step()
