"""Models, and plans of their memory with given decisions."""

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import daso
from daso.memory.course import BOTH, RECOMPUTE, SWAP, WAYS, simulate_plan, valid_ways
from daso.memory.meter import open_meter
from daso.memory.planner import Plan

MOVING = (SWAP, RECOMPUTE, BOTH)


class Residual(nn.Module):
    def __init__(self, blocks=3, width=8):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = functional.relu(block(x) + x)
        return self.out(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self, layers=2, width=32):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, width), nn.Linear(width, 10)
        self.place = nn.Parameter(torch.randn(16, width) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 2, 64, 0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


class Skips(nn.Module):
    """A skip over everything, a tensor used three times, buffers of its own, spectral norm."""

    def __init__(self):
        super().__init__()
        self.down = spectral_norm(nn.Conv2d(3, 8, 3, padding=1))
        self.mid, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.out = nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        first = torch.tanh(self.down(x))
        if self.training:
            self.mean.mul_(0.9).add_(first.detach().mean((0, 2, 3)), alpha=0.1)
        mid = torch.sigmoid(self.mid(first - self.mean.view(1, -1, 1, 1))) * first
        x = functional.gelu(self.up(torch.cat([mid, first], 1)))
        return self.out((x * mid).mean((2, 3)))


class Checkpointed(nn.Module):
    """Uses torch's own checkpointing in its middle."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 10)
        self.mid = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x):
        x = functional.gelu(self.first(x))
        x = checkpoint(self.mid, x, use_reentrant=False)
        return self.last(x.mean((2, 3)))


PICTURES, WORDS = torch.randn(8, 3, 12, 12), torch.randint(0, 50, (8, 16))
MODELS = {
    "residual": (Residual, PICTURES),
    "transformer": (Transformer, WORDS),
    "skips": (Skips, PICTURES),
    "checkpointed": (Checkpointed, PICTURES),
}
TARGETS = torch.randint(0, 10, (8,))


def loss_of(output):
    return functional.cross_entropy(output.float(), TARGETS[: len(output)])


def made(name):
    torch.manual_seed(0)
    build, batch = MODELS[name]
    return build(), batch


def planned(model, batch, budget="1GiB", **options):
    return daso.memory.plan(model, batch, budget, loss=loss_of, **options)


def with_ways(plan, ways, capacity=float("inf"), model=None):
    """Return a plan with other decisions: one for all units, or one of each; None: no room."""
    units = plan.profile.units
    ways = valid_ways(units, [ways] * len(units) if isinstance(ways, str) else ways)
    course = simulate_plan(plan.profile, ways, capacity, plan.link)
    if course is None:
        return None
    return replace(plan, chosen=Plan(ways, course), model=model or plan.model)


def mixed(plan, model=None):
    """Return a plan that swaps and recomputes."""
    ways = [WAYS[1 + number % 3] for number in range(len(plan.profile.units))]
    return with_ways(plan, ways, model=model)


def train(model, batch, plan=None, steps=20, around=nullcontext):
    """Return losses, gradients, parameters and buffers of a training, and the plan's report."""
    torch.manual_seed(1)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    seen = []
    with daso.memory.apply(plan) if plan is not None else nullcontext() as applied:
        for _ in range(steps):
            optimizer.zero_grad()
            with around():
                loss = loss_of(model(batch))
            loss.backward()
            grads = (param.grad for param in params if param.grad is not None)
            seen += [loss.detach(), *(grad.clone() for grad in grads)]
            optimizer.step()
    ends = [*seen, *(one.detach().clone() for one in (*model.parameters(), *model.buffers()))]
    return ends, None if applied is None else applied.report()


def same(left, right):
    """Return whether all tensors are equal, bit for bit."""
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def taken_bytes(model, batch, plan, around=nullcontext):
    """Return the bytes that a step takes, as the allocator counts them, with what is static."""
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    meter = open_meter(torch.device("cpu"))
    with daso.memory.apply(plan), meter:
        with around():
            loss = loss_of(model(batch))
        loss.backward()
    for param in model.parameters():
        param.grad = None
    return plan.static.total + max(interval.peak for interval in meter.intervals)
