"""The ways into daso that the contract holds for, and the small programs it is tried with.

A `Door` is all that the contract knows of a wrapper: another one, of this project or of another,
is one more entry in `DOORS`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lion_pytorch import Lion
from torch import nn

import daso


class Opened(NamedTuple):
    """What a user holds after the one new line."""

    optimizer: Any  # what is stepped, saved and given to schedulers
    handle: Any  # synchronize, no_sync, end_epoch, close, report


@dataclass(frozen=True)
class Door:
    """A way in.

    Args:
        name: For test ids.
        open: (inner, **keywords) -> Opened.
        inner_of: Opened.optimizer -> the user's own optimizer.
        line: The same in a program that has ``inner``, ``model`` and ``keywords``.
    """

    name: str
    open: Callable[..., Opened]
    inner_of: Callable[[Any], torch.optim.Optimizer]
    line: str

    @contextmanager
    def __call__(self, inner: torch.optim.Optimizer, **keywords: Any) -> Iterator[Opened]:
        opened = self.open(inner, **keywords)
        yield opened
        opened.handle.close()  # collective: not after an error, which other ranks may not have


def open_wrapper(inner: torch.optim.Optimizer, **keywords: Any) -> Opened:
    wrapper = daso.DASO(inner, **keywords)
    return Opened(wrapper, wrapper)


def open_hooks(inner: torch.optim.Optimizer, **keywords: Any) -> Opened:
    return Opened(inner, daso.attach(inner, **keywords))


WRAPPER = Door(
    "DASO",
    open_wrapper,
    lambda optimizer: optimizer.inner,
    "optimizer = handle = daso.DASO(inner, module=model, **keywords)",
)
HOOKS = Door(
    "attach",
    open_hooks,
    lambda optimizer: optimizer,
    "optimizer, handle = inner, daso.attach(inner, module=model, **keywords)",
)
DOORS = [WRAPPER, HOOKS]

INNERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "Lion": lambda params: Lion(params, lr=0.001),
}
# Fixed(skip, wait): synchronous, blocking, in the background, after a warm-up, always in flight.
PHASES = [
    daso.Fixed(1, 0),
    daso.Fixed(4, 0),
    daso.Fixed(4, 1),
    daso.Fixed(4, 4, warmup=3),
    daso.Fixed(3, 2),
]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def bits(*things: Any) -> bytes:
    """Return all tensors of modules, optimizer state dicts and tensors, bit for bit."""
    return b"".join(
        t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors(things)
    )


def tensors(thing: Any) -> Iterator[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from [*thing.parameters(), *thing.buffers()]
    elif isinstance(thing, dict):
        for key in sorted(thing, key=str):
            yield from tensors(thing[key])
    elif isinstance(thing, list | tuple):
        for part in thing:
            yield from tensors(part)
