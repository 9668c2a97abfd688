"""Operands of kernels that are compared with each other, and what counts as the same."""

import math

import torch

# 3.4e38 is beyond the largest bf16.
ODD = (
    *(math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38, 3.4e38, -70000.0, 65520.0),
    *(1e-8, 1.0),
)
RUN = 50  # numbers of one magnitude
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def numbers(numel, seed, dtype=torch.float32, odd=0.0):
    """Numbers of many magnitudes, some halves of steps; a share of them odd."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-6, 3, (numel // RUN + 1,), generator=generator)
    values *= (10.0 ** exponents.double()).repeat_interleave(RUN)[:numel]
    values[::7] = (values[::7] * 4).round() / 4  # rounded to even
    where = torch.rand(numel, generator=generator) < odd
    places = torch.randint(0, len(ODD), (int(where.sum()),), generator=generator)
    values[where] = torch.tensor(ODD, dtype=torch.float64)[places]
    return values.to(dtype)


def same(expected, actual, name):
    """Equal bits; numbers of a row that differ are both NaN."""
    assert expected.dtype == actual.dtype
    word = WORDS[expected.dtype.itemsize]
    equal = expected.reshape(-1).view(word) == actual.reshape(-1).clone().view(word)
    if expected.is_floating_point():
        equal |= (expected.isnan() & actual.isnan()).reshape(-1)
    assert bool(equal.all()), f"{name} differs at {(~equal).nonzero()[:5].flatten().tolist()}"
