"""What an order of transfers costs, from the seconds of its parts: models to hold runs against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from daso.plan.layout import Span
from daso.plan.portions import Order, Portion, PriorityQueue

__all__ = ["Layers", "flow_shop_seconds", "payload_rounds", "step_seconds", "vote_rounds"]


def vote_rounds(nodes: int) -> int:
    """Return how many messages follow each other when nodes agree: up a tree and down again."""
    return 2 * math.ceil(math.log2(nodes)) if nodes > 1 else 0


def payload_rounds(nodes: int) -> int:
    """Return how many messages follow each other in a mean: two nodes swap, more add and return."""
    return 1 if nodes == 2 else 2


def flow_shop_seconds(chunks: Sequence[Sequence[float]]) -> float:
    """Return how long chunks take that go through the same stages one after the other.

    Each stage holds one chunk at a time, and all chunks keep their order (a permutation flow shop;
    Johnson 1954): gradients that go to the host, are added there and come back.
    """
    ends = [0.0] * (len(chunks[0]) if chunks else 1)
    for seconds in chunks:
        before = 0.0
        for stage, taken in enumerate(seconds):
            before = ends[stage] = max(before, ends[stage]) + taken
    return ends[-1]


@dataclass(frozen=True, slots=True)
class Layers:
    """A model as a chain of layers, in the order of forward."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]  # of its gradient over the link


def step_seconds(
    layers: Layers, *, order: Order, portions: Sequence[int], barrier: bool, steps: int = 8
) -> float:
    """Return how long a step takes when gradients cross one link, portion after portion."""
    count = len(layers.forward_seconds)
    arrived, link, now, begun = [0.0] * count, 0.0, 0.0, [0.0]
    for _ in range(steps):
        now = max(now, *arrived) if barrier else max(now, arrived[0])
        begun.append(now)
        for layer, seconds in enumerate(layers.forward_seconds):
            now = max(now, arrived[layer]) + seconds
        ready = [0.0] * count
        for layer in reversed(range(count)):
            now += layers.backward_seconds[layer]
            ready[layer] = now
        arrived, link = _cross(layers, order, portions, ready, link)
    return begun[-1] - begun[-2]


def _cross(
    layers: Layers,
    order: Order,
    portions: Sequence[int],
    ready: Sequence[float],
    free: float,
) -> tuple[list[float], float]:
    """Return when each layer's last portion has crossed, and when the link is free again."""
    count = len(ready)
    cut = [Portion(Span(0, 0), (at,), at) for at in range(count) for _ in range(portions[at])]
    coming = sorted(range(len(cut)), key=lambda one: -ready[cut[one].layer])  # the next one last
    waiting, arrived = PriorityQueue(order, cut), list(ready)
    while coming or len(waiting):
        while coming and ready[cut[coming[-1]].layer] <= free:
            waiting.add(coming.pop())
        if not len(waiting):
            free = ready[cut[coming[-1]].layer]
            continue
        layer = cut[waiting.take()].layer
        free += layers.transfer_seconds[layer] / portions[layer]
        arrived[layer] = free
    return arrived, free
