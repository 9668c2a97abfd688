"""Small models, optimizers and batches that tests between ranks share."""

import torch
from torch import nn

import daso

if hasattr(torch.optim, "Muon"):
    MuonOrLion = torch.optim.Muon
else:  # before torch 2.9
    from lion_pytorch import Lion

    MuonOrLion = Lion


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def seeded(make):
    def build():
        torch.manual_seed(7)
        return make()

    return build


def mlp():
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


class Stays(daso.Auto):
    """Stays synchronous, however long that takes."""

    def tune_exchange(self, state, _):
        return state


class Odd(nn.Module):
    """Everything that trips flat buffers at once."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-dim
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Linear(6, 3)
        self.always = nn.Linear(6, 3).double()
        self.coarse = nn.Parameter(torch.linspace(-1, 1, 3, dtype=torch.bfloat16))
        self.conv = nn.Conv2d(2, 3, (1, 2)).to(memory_format=torch.channels_last)
        self.big = nn.Parameter(torch.linspace(-0.1, 0.1, 3000))

    def forward(self, x, sometimes):
        h = self.tied(torch.relu(self.tied(self.frozen(x)))) * self.scale
        y = self.always(h.double()).float() * self.coarse.float() + self.big.sum()
        y = y + self.conv(h.view(-1, 2, 1, 3)).mean((2, 3))
        return y + self.sometimes(h) if sometimes else y


class Wide(nn.Module):
    """A model in fp64, of an odd number of numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3).double()
        self.bias = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.scale * self.layer(x.double()) + self.bias


def batch_loss(model, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, 6, generator=generator, device="cpu")
    y = torch.randint(0, 3, (5,), generator=generator, device="cpu")
    x, y = x.to(torch.get_default_device()), y.to(torch.get_default_device())
    if isinstance(model, Odd):
        return nn.functional.cross_entropy(model(x, sometimes=(rank + step) % 3 == 0), y)
    return nn.functional.cross_entropy(model(x), y)


def many():
    return nn.Sequential(nn.Linear(6, 3), *(nn.Linear(3, 3) for _ in range(100)))


def nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def flat_bytes(tensor):
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()


def bits(model):
    """Return all parameters, bit for bit."""
    return b"".join(flat_bytes(p) for p in model.parameters())
