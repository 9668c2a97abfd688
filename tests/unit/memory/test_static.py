"""What is there all through a step."""

import torch
from models import MuonOrLion
from torch import nn

import daso
from daso.memory.static import static_bytes


def test_several_optimizers_are_counted_before_their_first_step():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == two] for two in (1, 0))
    both = [MuonOrLion(matrices, lr=0.1), torch.optim.AdamW(rest)]
    optimizer = daso.DASO(both, module=model)
    before = static_bytes(model, optimizer, torch.ones(1, 8)).optimizer
    moments = sum(p.nbytes for p in matrices) + 2 * sum(p.nbytes for p in rest)
    assert before >= moments
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    after = static_bytes(model, optimizer, torch.ones(1, 8)).optimizer
    assert abs(after - before) <= 64  # counts of steps
    optimizer.close()
