"""Cost models of transfers: their time from the seconds of their parts."""

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

MAX_DIRECT_RANKS = 16  # up to which the direct plan is used: few messages, two roundings in all
MIN_SECONDS = 1e-6  # of a message
SIZE_TOLERANCE = 0.95
LARGEST_PORTION = 25 << 20  # bytes: a larger one delays more urgent portions
SMALL_BYTES = 64 << 10  # of a message: below, its host time exceeds its time on the wire


def vote_rounds(nodes: int) -> int:
    """Return the number of consecutive messages of a vote of all nodes: up a tree and down."""
    return 2 * math.ceil(math.log2(nodes)) if nodes > 1 else 0


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """Cost of messages between nodes (Hockney's model, with the host's own time).

    Args:
        latency_seconds: Of an empty message (alpha).
        byte_seconds: Of the link, per byte (beta).
        message_seconds: Of the host, per message sent or received.
        add_seconds: Of the host, per received byte that is added or delivered (gamma).
    """

    latency_seconds: float = 50e-6
    byte_seconds: float = 8.5e-9  # 1 Gbit/s
    message_seconds: float = 20e-6
    add_seconds: float = 0.6e-9


def fitted_costs(small_seconds: float, large_seconds: float, nbytes: int) -> LinkCosts:
    """Return costs from the seconds of an empty message and of a message of ``nbytes`` bytes.

    Rounded to powers of two, so that decisions do not change with every measurement.
    """
    byte_seconds = max(large_seconds - small_seconds, MIN_SECONDS) / nbytes
    return LinkCosts(
        latency_seconds=_power_of_two(max(small_seconds, MIN_SECONDS)),
        byte_seconds=_power_of_two(byte_seconds),
    )


def _power_of_two(number: float) -> float:
    return float(2.0 ** round(math.log2(number)))


@dataclass(frozen=True, slots=True)
class AllReduceCost:
    """Cost of a mean for each rank."""

    messages: int  # sent
    smallest_bytes: float  # of a message, on average over chunks
    sent_bytes: float
    rounds: int  # consecutive messages of one chunk
    seconds: float


def allreduce_cost(
    plan: AllReducePlan, nbytes: float, costs: LinkCosts, message_bytes: int = 256 << 10
) -> AllReduceCost:
    """Return the cost of a mean of ``nbytes`` bytes on the wire by a plan."""
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
    """Return the portion size with which the link reaches a share of its rate.

    The mean of a portion takes a fixed time for its rounds and for the host's work on messages,
    plus the link's time for its bytes; see `efficient_bytes`.
    """
    cost = allreduce_cost(plan, LARGEST_PORTION, costs, message_bytes=LARGEST_PORTION)
    fixed = cost.rounds * costs.latency_seconds + 2 * cost.messages * costs.message_seconds
    rate = LARGEST_PORTION / (cost.sent_bytes * costs.byte_seconds)
    nbytes = efficient_bytes(efficiency, latency_seconds=fixed, bytes_per_second=rate)
    return min(max(nbytes, SMALL_BYTES), LARGEST_PORTION)


def depends_on_costs(algorithm: Algorithm, peers: int) -> bool:
    """Return whether the result of `choose_plan` depends on costs."""
    return algorithm in ("auto", "planned") and peers > MAX_DIRECT_RANKS


@lru_cache(maxsize=4096)
def choose_plan(
    algorithm: Algorithm, peers: int, nbytes: float, costs: LinkCosts | None = None
) -> AllReducePlan:
    """Return the plan for a mean of ``nbytes`` bytes on the wire.

    Up to 16 ranks ``"auto"`` is direct, so that bits do not depend on costs. For more ranks it is
    the fastest plan with messages of at least about 64 KiB, or for a smaller buffer of at least a
    rank's share of it.
    """
    if algorithm not in ("auto", "planned", "mpi"):
        return named_plan(algorithm, peers)
    if not depends_on_costs(algorithm, peers):
        return direct_plan(peers)
    known = costs or LinkCosts()
    plans = [(plan, allreduce_cost(plan, nbytes, known)) for plan in candidate_plans(peers)]
    # A buffer is cut into chunks of similar size: the direct plan's messages may be slightly
    # smaller.
    direct = allreduce_cost(direct_plan(peers), nbytes, known)
    least = SIZE_TOLERANCE * min(SMALL_BYTES, nbytes / peers, direct.smallest_bytes)
    large = [(plan, cost) for plan, cost in plans if cost.smallest_bytes >= least]
    return min(large, key=lambda pair: (pair[1].seconds, len(pair[0].levels)))[0]


def flow_shop_seconds(chunks: Sequence[Sequence[float]]) -> float:
    """Return the time of chunks that pass through the same stages.

    Each stage processes one chunk at a time, and chunks keep their order (a permutation flow shop;
    Johnson 1954): for example, gradients are copied to the host, added there and copied back.
    """
    ends = [0.0] * (len(chunks[0]) if chunks else 1)
    for seconds in chunks:
        before = 0.0
        for stage, duration in enumerate(seconds):
            before = ends[stage] = max(before, ends[stage]) + duration
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
    """Return the time of a step whose gradients share one link, portion after portion."""
    count = len(layers.forward_seconds)
    arrived, link, now, starts = [0.0] * count, 0.0, 0.0, [0.0]
    for _ in range(steps):
        now = max(now, *arrived) if barrier else max(now, arrived[0])
        starts.append(now)
        for layer, seconds in enumerate(layers.forward_seconds):
            now = max(now, arrived[layer]) + seconds
        ready = [0.0] * count
        for layer in reversed(range(count)):
            now += layers.backward_seconds[layer]
            ready[layer] = now
        arrived, link = _send_portions(layers, order, portions, ready, link)
    return starts[-1] - starts[-2]


def _send_portions(
    layers: Layers,
    order: Order,
    portions: Sequence[int],
    ready: Sequence[float],
    free: float,
) -> tuple[list[float], float]:
    """Return the time at which each layer's last portion arrives, and at which the link is free."""
    count = len(ready)
    cut = [
        Portion(Span(0, 0), (layer,), layer)
        for layer in range(count)
        for _ in range(portions[layer])
    ]
    # The next portion to become ready is last.
    coming = sorted(range(len(cut)), key=lambda portion: -ready[cut[portion].layer])
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
    """Return the receiver of each rank in every slot: in slot k rank r sends to r + k.

    If all ranks sent to all in the same order, one receiver at a time would get all messages while
    the others are idle: about 2 (p - 1) message times for p ranks. In slots, each a permutation,
    every rank receives one message: p - 1.
    """
    return [tuple((rank + turn) % ranks for rank in range(ranks)) for turn in range(1, ranks)]


def pipelined_seconds(ranks: int, segments: int, latency_seconds: float, seconds: float) -> float:
    """Return the time of a buffer from the first rank of a chain to the last, in segments.

    Each segment is forwarded while the next one arrives (cut-through). One segment is
    store-and-forward.
    """
    return (ranks - 2 + segments) * (latency_seconds + seconds / segments)
