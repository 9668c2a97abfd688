"""Synthetic data sets: the task is always the same, the seed draws the samples.

So two seeds make a train and a test set of one task. The same arguments give the same bits on the
same kind of machine, and torch's global random state is not changed.
"""

import math

import torch
from torch.utils.data import TensorDataset

_TASK_SEED = 20240
_HIDDEN = 32  # neurons of the teacher
_NOISE = 0.5  # standard deviation of a pixel; a blob is 1 high
_SUCCESSOR_ODDS = (0.6, 0.2, 0.15, 0.05)


def teacher_student(n: int, features: int, classes: int, *, seed: int) -> TensorDataset:
    """Return normal inputs, classified by a fixed random network, the teacher.

    Args:
        n: Samples.
        features: Numbers per sample.
        classes: Classes; the task depends on features and classes alone.
        seed: Draws the samples.

    Returns:
        Inputs, float32 (n, features), mean 0 and variance 1; targets, int64 (n,).
    """
    task = _generator(_TASK_SEED)
    hidden = torch.randn(features, _HIDDEN, generator=task, dtype=torch.float64, device="cpu")
    output = torch.randn(_HIDDEN, classes, generator=task, dtype=torch.float64, device="cpu")
    inputs = torch.randn(n, features, generator=_generator(seed), device="cpu")
    # In float64 the order of a sum, which depends on the number of threads, changes no label.
    scores = torch.tanh(inputs.double() @ hidden / math.sqrt(features)) @ output
    return TensorDataset(inputs, scores.argmax(dim=1))


def images(n: int, *, seed: int, size: int = 28, classes: int = 10) -> TensorDataset:
    """Return noisy grey images with one bright blob, whose position on a circle is the class.

    Args:
        n: Samples.
        seed: Draws the samples.
        size: Pixels of a side.
        classes: Classes; more of them lie closer together.

    Returns:
        Inputs, float32 (n, 1, size, size), of noise 0.5 and a blob 1 high; targets, int64 (n,).
    """
    generator = _generator(seed)
    targets = torch.randint(classes, (n,), generator=generator, device="cpu")
    jitter = torch.randn(n, 2, generator=generator, device="cpu") * size / 40  # (n, row and column)
    noise = torch.randn(n, size, size, generator=generator, device="cpu") * _NOISE
    angle = targets * (2 * math.pi / classes)
    centre = (size - 1) / 2 + 0.3 * size * torch.stack([angle.sin(), angle.cos()], dim=1) + jitter
    at = torch.arange(size, device="cpu")
    profile = _bell(at - centre.unsqueeze(2), width=size / 10)  # (n, 2, size)
    blob = profile[:, 0].unsqueeze(2) * profile[:, 1].unsqueeze(1)  # (n, size, size)
    return TensorDataset((blob + noise).unsqueeze(1), targets)


def tokens(n: int, context: int, vocabulary: int, *, seed: int) -> TensorDataset:
    """Return sequences in which each token has up to four successors, with fixed odds.

    The odds are 0.6, 0.2, 0.15 and 0.05, so no model does better than about 1.06 nats per token
    where the four differ.

    Args:
        n: Samples.
        context: Tokens per sample.
        vocabulary: Number of different tokens; the successors depend only on it.
        seed: Draws the samples.

    Returns:
        Inputs and targets, int64 (n, context) each; the target of a token is the one after it.
    """
    successors = torch.randint(
        vocabulary,
        (vocabulary, len(_SUCCESSOR_ODDS)),
        generator=_generator(_TASK_SEED),
        device="cpu",
    )
    generator = _generator(seed)
    chain = torch.empty(n, context + 1, dtype=torch.int64, device="cpu")
    chain[:, 0] = torch.randint(vocabulary, (n,), generator=generator, device="cpu")
    odds = torch.tensor(_SUCCESSOR_ODDS, dtype=torch.float64, device="cpu").cumsum(0)
    draws = torch.rand(n, context, generator=generator, dtype=torch.float64, device="cpu")
    choices = torch.bucketize(draws, odds[:-1], right=True)  # (n, context), 0..3
    for step in range(context):
        chain[:, step + 1] = successors[chain[:, step], choices[:, step]]
    return TensorDataset(chain[:, :-1].contiguous(), chain[:, 1:].contiguous())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _bell(distance: torch.Tensor, width: float) -> torch.Tensor:
    return torch.exp(-(distance**2) / (2 * width**2))
