"""What a part says of the numbers it sends."""

import torch

from daso.train.deltas.shard import _first_nonfinite

CPU = torch.device("cpu")
WRONG = (float("nan"), float("inf"), float("-inf"))


def check_first_nonfinite(device):
    generator = torch.Generator().manual_seed(0)

    def below(limit):
        return int(torch.randint(limit, (1,), generator=generator))

    for turn in range(300):
        numel = 1 + below(3000)
        dtype = torch.float64 if turn % 3 == 0 else torch.float32
        values = torch.randn(numel, generator=generator, dtype=dtype)
        values *= torch.finfo(dtype).max ** 0.9 if turn % 5 == 0 else 1  # their sum is not finite
        for _ in range(below(4)):
            values[below(numel)] = WRONG[below(3)]
        places = (~values.isfinite()).nonzero().flatten().tolist()
        there = values.to(device)
        found = int(_first_nonfinite(there, torch.empty_like(there)))
        assert found == (places[0] if places else -1)


def test_the_first_number_that_is_not_finite_is_found():
    check_first_nonfinite(CPU)
