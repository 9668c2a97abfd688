"""Train a small byte-level transformer on the source of Python's standard library.

One process:         python -m daso.examples.transformer
Four, as two nodes:  daso run -n 4 --ranks-per-node 2 -m daso.examples.transformer
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader, Dataset

import daso
from daso.data import ShardedSampler, load_text


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        y: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return y


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    Args:
        context: Maximum number of input bytes.
        width: Size of a token's vector.
        layers: Number of blocks.
        heads: Attention heads; must divide ``width``.
    """

    def __init__(self, context: int = 64, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.token.weight  # tied, as in GPT-2
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map bytes (batch, context) to scores (batch, context, 256)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        scores: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def batches(
    windows: "Dataset[Any]", sampler: ShardedSampler, steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Iterate over `steps` batches, across epochs."""
    loader = DataLoader(windows, batch_sampler=sampler)
    for epoch in range(-(-steps // len(sampler))):
        sampler.set_epoch(epoch)
        yield from itertools.islice(loader, steps - epoch * len(sampler))


def main() -> None:
    """Train and print the loss, in bits per byte."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="windows per rank")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    topology = daso.init()
    windows = load_text(train=True, context=options.context, max_bytes=4_000_000)
    sampler = ShardedSampler(
        len(windows), rank=topology.rank, size=topology.world_size, batch_size=options.batch_size
    )
    model = ByteTransformer(options.context)
    inner = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    with daso.DASO(inner, module=model) as optimizer:
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=options.lr, total_steps=options.steps
        )
        for step, (tokens, following) in enumerate(batches(windows, sampler, options.steps), 1):
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if topology.rank == 0 and (step % 50 == 0 or step == options.steps):
                print(f"step {step}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)


if __name__ == "__main__":
    main()
