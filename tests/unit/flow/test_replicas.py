"""What replicas of a layer become when they meet; nothing communicates."""

import pytest
import torch

from daso.flow.model.layers import mean_of


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_replicas_become_their_mean(count):
    replicas = [torch.tensor([4.0 * rank, 1.0, -6.0 * rank]) for rank in range(count)]
    mean = (count - 1) / 2  # of the ranks
    assert torch.equal(mean_of(replicas), torch.tensor([4.0 * mean, 1.0, -6.0 * mean]))


def test_replicas_of_16_bits_are_added_in_32():
    replicas = [torch.full((2,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert torch.equal(mean_of(replicas), torch.full((2,), 258.0) / 3)  # in 16 bits: 256 / 3


def test_whole_numbers_are_the_first_replicas():
    assert mean_of([torch.tensor(3), torch.tensor(8)]) == 3
