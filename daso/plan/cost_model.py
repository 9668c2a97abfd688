"""What an order of transfers costs, from the seconds of its parts: models to hold runs against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from daso.plan.allreduce_plan import (
    Algorithm,
    AllReducePlan,
    candidate_plans,
    direct_plan,
    named_plan,
)
from daso.plan.layout import Span
from daso.plan.portions import Order, Portion, PriorityQueue, efficient_bytes

__all__ = [
    "AllReduceCost",
    "Layers",
    "LinkCosts",
    "allreduce_cost",
    "choose_plan",
    "depends_on_costs",
    "efficient_portion_bytes",
    "fitted_costs",
    "flow_shop_seconds",
    "pipelined_seconds",
    "slots",
    "step_seconds",
    "vote_rounds",
]

FEW = 16  # ranks up to which each sends to each: few messages, each rounded twice in all
LEAST_SECONDS = 1e-6  # of a message
ROUGHLY = 0.95
LARGEST_PORTION = 25 << 20  # bytes: a larger one holds up what is needed sooner
SMALL_BYTES = 64 << 10  # of a message: below, what the host does for it costs more than the wire


def vote_rounds(nodes: int) -> int:
    """Return how many messages follow each other when nodes agree: up a tree and down again."""
    return 2 * math.ceil(math.log2(nodes)) if nodes > 1 else 0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """What messages between nodes cost (Hockney's model, with the host's own time).

    Args:
        latency_seconds: Until a message of no bytes is there (alpha).
        byte_seconds: Of the link for each byte (beta).
        message_seconds: Of the host for each message that it sends or receives.
        add_seconds: Of the host for each byte that arrives and is added or delivered (gamma).
    """

    latency_seconds: float = 50e-6
    byte_seconds: float = 8.5e-9  # 1 Gbit/s
    message_seconds: float = 20e-6
    add_seconds: float = 0.6e-9


def fitted_costs(small_seconds: float, large_seconds: float, nbytes: int) -> LinkCosts:
    """Return costs from the seconds of an empty message and of one of so many bytes.

    In powers of two, so that what is chosen by them does not change with every measurement.
    """
    byte_seconds = max(large_seconds - small_seconds, LEAST_SECONDS) / nbytes
    return LinkCosts(
        latency_seconds=_power_of_two(max(small_seconds, LEAST_SECONDS)),
        byte_seconds=_power_of_two(byte_seconds),
    )


def _power_of_two(number: float) -> float:
    return float(2.0 ** round(math.log2(number)))


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """What a mean takes of each rank."""

    messages: int  # sent
    smallest_bytes: float  # of a message, on average over chunks
    sent_bytes: float
    rounds: int  # messages that follow each other, of one chunk
    seconds: float


def allreduce_cost(
    plan: AllReducePlan, nbytes: float, costs: LinkCosts, message_bytes: int = 256 << 10
) -> AllReduceCost:
    """Return what a mean of so many bytes on the wire costs by a plan."""
    chunks = max(1, math.ceil(nbytes / (message_bytes * plan.messages_of_chunk)))
    held, messages, sent, smallest = nbytes / chunks, 0, 0.0, math.inf
    for level in plan.levels:
        part, others = held / level.parts, level.size - 1
        ways = 1 if level.way == "whole" else 2  # there and back
        messages += ways * others
        sent += ways * others * part
        smallest, held = min(smallest, part), part
    link = chunks * sent * costs.byte_seconds
    host = chunks * (2 * messages * costs.message_seconds + sent * costs.add_seconds)
    seconds = plan.rounds * costs.latency_seconds + max(link, host) + min(link, host) / chunks
    return AllReduceCost(chunks * messages, smallest, chunks * sent, plan.rounds, seconds)


def efficient_portion_bytes(efficiency: float, plan: AllReducePlan, costs: LinkCosts) -> int:
    """Return the size of portions with which the link does a share of what it could.

    A portion's mean takes its rounds and the host's work on its messages, whatever its size, and
    the link for its bytes; see `efficient_bytes`.
    """
    one = allreduce_cost(plan, LARGEST_PORTION, costs, message_bytes=LARGEST_PORTION)
    fixed = one.rounds * costs.latency_seconds + 2 * one.messages * costs.message_seconds
    rate = LARGEST_PORTION / (one.sent_bytes * costs.byte_seconds)
    nbytes = efficient_bytes(efficiency, latency_seconds=fixed, bytes_per_second=rate)
    return min(max(nbytes, SMALL_BYTES), LARGEST_PORTION)


def depends_on_costs(algorithm: Algorithm, peers: int) -> bool:
    """Return whether `choose_plan` asks what messages cost."""
    return algorithm in ("auto", "planned") and peers > FEW


@lru_cache(maxsize=4096)
def choose_plan(
    algorithm: Algorithm, peers: int, nbytes: float, costs: LinkCosts | None = None
) -> AllReducePlan:
    """Return the plan by which ranks take the mean of so many bytes on the wire.

    Up to 16 ranks ``"auto"`` is direct, so that bits do not depend on costs there. Between more it
    is the plan that costs least of those whose messages are of 64 KiB at the least, about, or of a
    row too small for that a rank's share of it.
    """
    if algorithm not in ("auto", "planned", "mpi"):
        return named_plan(algorithm, peers)
    if not depends_on_costs(algorithm, peers):
        return direct_plan(peers)
    known = costs or LinkCosts()
    plans = [(plan, allreduce_cost(plan, nbytes, known)) for plan in candidate_plans(peers)]
    # A row is cut into chunks of about a size: the direct plan's messages may be a little smaller.
    direct = allreduce_cost(direct_plan(peers), nbytes, known)
    least = ROUGHLY * min(SMALL_BYTES, nbytes / peers, direct.smallest_bytes)
    large = [(plan, cost) for plan, cost in plans if cost.smallest_bytes >= least]
    return min(large, key=lambda one: (one[1].seconds, len(one[0].levels)))[0]


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


def slots(ranks: int) -> list[tuple[int, ...]]:
    """Return to whom each rank sends in every slot: in slot k rank r sends to r + k.

    Where all push to all in the same order, a receiver is hit by everybody at once and the others
    have nothing to do: about 2 (p - 1) services for p ranks. In slots, each a permutation, nobody
    is hit twice: p - 1.
    """
    return [tuple((rank + turn) % ranks for rank in range(ranks)) for turn in range(1, ranks)]


def pipelined_seconds(ranks: int, segments: int, latency_seconds: float, seconds: float) -> float:
    """Return how long a row takes from the first rank of a chain to the last, in segments.

    Each is passed on while the next one comes (cut-through). One segment is store-and-forward.
    """
    return (ranks - 2 + segments) * (latency_seconds + seconds / segments)
