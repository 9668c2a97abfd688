"""Routes: which plan of a mean suits links that are unequal, from what each pair of ranks measured.

A plan is as fast as the slowest of its ranks on each level. Where racks are joined by thin links,
little must cross there: sums over a rack are made first, and cross once. On a ring, the order of
ranks decides which links are used at all. A rank whose own link is thin should add nothing: then it
sends its row once and receives the mean once, where an equal part costs it nearly twice as much.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean, median

from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan

__all__ = ["has_changed", "plan_routes", "racks", "ring_order", "seconds_of", "shares_of"]

Rates = Sequence[Sequence[float]]  # bytes per second from a rank (row) to another (column)

NEAR = 0.5  # of the widest links: what is as wide joins ranks of one rack
BETTER = 0.8  # of the direct plan's seconds: for less it is not left
CHANGED = 1.5  # times as long as before, or as short: links are others
LATELY = 2  # exchanges in a row that must be
UNITS = 16  # of what each adds where all add as much: shares are whole numbers of them
KNOWN = 4  # exchanges before, from which it is known what is usual
RING_MOST = 64  # ranks of a ring whose order is looked for, which takes as their cube
SWEEPS = 8  # of looking for a better order, at the most


def plan_routes(rates: Rates) -> AllReducePlan:
    """Return the plan that takes least on links of such rates; the same on every rank.

    Direct unless another is better by a fifth at least.
    """
    peers = len(rates)
    if peers <= 2:
        return direct_plan(peers)
    plans = [*_candidates(rates)]
    best = min(plans, key=lambda plan: seconds_of(plan, rates))
    direct = direct_plan(peers)
    return best if seconds_of(best, rates) < BETTER * seconds_of(direct, rates) else direct


def _candidates(rates: Rates) -> Iterator[AllReducePlan]:
    peers, groups = len(rates), racks(rates)
    if peers <= RING_MOST:
        yield AllReducePlan((Level(peers, "ring"),), ring_order(rates))
    if _links_are_own(rates):
        yield AllReducePlan((Level(peers),), shares=shares_of(rates))
    sizes = {len(group) for group in groups}
    if len(groups) > 1 and len(sizes) == 1 and sizes != {1}:
        order = tuple(rank for group in groups for rank in group)
        inside = Level(len(groups[0]))
        for way in ("scatter", "whole"):
            yield AllReducePlan((inside, Level(len(groups), way)), order)


def seconds_of(plan: AllReducePlan, rates: Rates) -> float:
    """Return how long a mean of one byte takes by a plan, latency apart.

    What is measured in slots is shared in slots: the slowest link of each counts, since all that
    crosses a thin link between racks shares it.
    """
    if plan.shares:
        return _direct_seconds(plan.shares, rates)
    seconds, held = 0.0, 1.0
    for depth, level in enumerate(plan.levels):
        part, ways = held / level.parts, 1 if level.way == "whole" else 2
        turns = [1] * (level.size - 1) if level.way == "ring" else range(1, level.size)
        groups = [*{plan.group(rank, depth) for rank in range(plan.peers)}]
        slowest = {turn: _slowest(groups, turn, rates) for turn in set(turns)}
        seconds += ways * part * sum(1 / slowest[turn] for turn in turns)
        held = part
    return seconds


def _direct_seconds(shares: Sequence[int], rates: Rates) -> float:
    """Return how long it takes where each adds such a share: what keeps the busiest link busy."""
    peers, total = len(shares), sum(shares)
    return max(
        (1 + share / total * (peers - 2)) / width
        for share, width in zip(shares, _widths(rates), strict=True)
    )


def _widths(rates: Rates) -> list[float]:
    """Return how wide each rank's own link is: as wide as the widest way over it."""
    ranks = range(len(rates))
    return [max(_both(rates, one, other) for other in ranks if other != one) for one in ranks]


def _links_are_own(rates: Rates) -> bool:
    """Return whether what is between two ranks is about as wide as the thinner of their links."""
    widths, ranks = _widths(rates), range(len(rates))
    return all(
        _both(rates, one, other) >= NEAR * min(widths[one], widths[other])
        for one in ranks
        for other in ranks[:one]
    )


def shares_of(rates: Rates) -> tuple[int, ...]:
    """Return how much of a row each rank should add, by the width of its own link.

    Of p ranks one that adds share s sends 1 - s of its row to be added, and s of the mean to each
    of p - 1: 1 + s (p - 2) in all. So all links are as busy where s (p - 2) = T width - 1, for the
    T with which shares sum to 1, and who would get less than nothing adds nothing.
    """
    peers, widths = len(rates), _widths(rates)
    adding = [*range(peers)]
    while True:
        seconds = (peers - 2 + len(adding)) / sum(widths[one] for one in adding)
        left = [one for one in adding if seconds * widths[one] >= 1]
        if left == adding:
            break
        adding = left
    share = {one: (seconds * widths[one] - 1) / (peers - 2) for one in adding}
    return tuple(round(UNITS * peers * share.get(one, 0.0)) for one in range(peers))


def _slowest(groups: Sequence[Sequence[int]], turn: int, rates: Rates) -> float:
    """Return the rate of the slowest link where each sends to so many after it in its group."""
    return min(
        rates[rank][group[(here + turn) % len(group)]]
        for group in groups
        for here, rank in enumerate(group)
    )


def racks(rates: Rates) -> list[list[int]]:
    """Group ranks whose links among each other are on average near as wide as a rank's widest."""
    each = [max(row[:rank] + row[rank + 1 :]) for rank, row in enumerate(map(list, rates))]
    widest = median(each)
    groups: list[list[int]] = []
    for rank in range(len(rates)):
        for group in groups:
            if fmean(_both(rates, rank, other) for other in group) >= NEAR * widest:
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def ring_order(rates: Rates) -> tuple[int, ...]:
    """Return an order of ranks on a ring whose narrowest link is wide: 2-opt from the nearest."""
    left, order = set(range(1, len(rates))), [0]
    while left:
        order.append(max(sorted(left), key=lambda rank: _both(rates, order[-1], rank)))
        left.remove(order[-1])
    for _ in range(SWEEPS):
        width, before = _width(order, rates), order
        for i in range(1, len(order) - 1):
            for j in range(i + 1, len(order)):
                other = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
                if (wider := _width(other, rates)) > width:
                    order, width = other, wider
        if order == before:
            break
    return tuple(order)


def _both(rates: Rates, one: int, other: int) -> float:
    """Return the rate of the slower direction."""
    return min(rates[one][other], rates[other][one])


def _width(order: Sequence[int], rates: Rates) -> tuple[float, float]:
    """Return the narrowest link of a ring, and then how wide all are together."""
    links = [rates[a][b] for a, b in pairwise([*order, order[0]])]
    return min(links), -sum(1 / link for link in links)


def has_changed(seconds: Sequence[float]) -> bool:
    """Return whether exchanges of one kind, the last ones last, take much longer or shorter now."""
    if len(seconds) < KNOWN + LATELY:
        return False
    usual = sorted(seconds[:-LATELY])[(len(seconds) - LATELY - 1) // 2]
    lately = seconds[-LATELY:]
    return min(lately) > CHANGED * usual or max(lately) < usual / CHANGED
