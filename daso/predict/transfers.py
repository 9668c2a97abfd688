"""Messages on virtual time, over network cards that send one and receive one at a time."""

import heapq
from collections.abc import Sequence

from daso.predict.network import Link

__all__ = ["chain_seconds", "push_seconds"]


def push_seconds(orders: Sequence[Sequence[int]], nbytes: float, link: Link) -> float:
    """Return how long it takes until all have received what each pushes to others, one by one.

    A message occupies the card that sends it and the one that receives it; who comes first to a
    card that is taken goes first, and its sender waits.
    """
    takes = link.latency_seconds + link.seconds(nbytes)
    free = [0.0] * len(orders)  # when each card can receive
    ready = [(0.0, 0.0, rank, 0) for rank in range(len(orders)) if orders[rank]]
    heapq.heapify(ready)
    last = 0.0
    while ready:
        at, came, rank, turn = heapq.heappop(ready)
        target = orders[rank][turn]
        if free[target] > at:  # taken: come again when it is free
            heapq.heappush(ready, (free[target], came, rank, turn))
            continue
        free[target] = last = at + takes
        if turn + 1 < len(orders[rank]):
            heapq.heappush(ready, (last, last, rank, turn + 1))
    return max([last, *free])


def chain_seconds(ranks: int, segments: int, nbytes: float, link: Link) -> float:
    """Return when a row that goes from rank to rank in segments has come to the last one.

    A rank passes a segment on when it has all of it and its card has sent the one before.
    """
    takes = link.latency_seconds + link.seconds(nbytes / segments)
    came = [0.0] * segments  # when each segment is at the rank that sends
    for _ in range(ranks - 1):
        free = 0.0
        for number, at in enumerate(came):
            free = came[number] = max(at, free) + takes
    return came[-1]
