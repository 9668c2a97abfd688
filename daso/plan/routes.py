"""Chooses an all-reduce plan for unequal links, from the measured rate between each pair of ranks.

A plan is as fast as its slowest rank on each level. If slow links connect racks, little data should
use them: sums over a rack are computed first, and sent once. On a ring, the order of ranks decides
which links are used at all. A rank with a slow link should not reduce anything: then it sends its
buffer once and receives the mean once; an equal part would nearly double its traffic.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean, median

from daso.plan.allreduce_plan import AllReducePlan, Level, direct_plan

Rates = Sequence[Sequence[float]]  # bytes per second from a rank (row) to another (column)

SAME_RATE = 1.5  # factor up to which rates count as equal: other load delays messages
SAME_RACK = 0.5  # of the fastest links: a faster link connects ranks of one rack
MIN_IMPROVEMENT = 0.8  # of a plan's seconds: only a faster plan replaces it
CHANGE_FACTOR = 1.5  # of exchange seconds, up or down: links have changed
RECENT = 2  # consecutive exchanges that must show it
SHARE_UNITS = 16  # units of an equal share: shares are integers
MIN_HISTORY = 4  # earlier exchanges that define the usual seconds
MAX_RING = 64  # ranks of a ring whose order is optimized, in cubic time
MAX_SWEEPS = 8  # of the search for a better order


def plan_routes(rounds: Sequence[Rates], current: AllReducePlan | None = None) -> AllReducePlan:
    """Return the plan for links that were measured in rounds; the same on every rank.

    A plan replaces the current one if it is faster by at least a fifth in every round, and on the
    usual rates. Without such a plan the current one is kept while it is faster than the direct
    plan. So measurements of equal links, which differ by chance, keep the order of ranks.

    Args:
        rounds: Rates of all links, several times.
        current: The plan in use; None: the direct plan.
    """
    peers, usual = len(rounds[0]), _usual(rounds)
    direct = direct_plan(peers)
    if peers <= 2:
        return direct
    seconds = partial(seconds_of, rates=usual)
    if current is None or current.peers != peers or seconds(current) >= seconds(direct):
        current = direct
    best = min(_candidates(usual), key=seconds, default=current)
    is_faster = all(
        seconds_of(best, rates) < MIN_IMPROVEMENT * seconds_of(current, rates)
        for rates in (usual, *rounds)
    )
    return best if is_faster else current


def _usual(rounds: Sequence[Rates]) -> Rates:
    """Return the median rate of each link, and the same rate for links that are about equal."""
    ranks = range(len(rounds[0]))
    medians = [[median(rates[a][b] for rates in rounds) for b in ranks] for a in ranks]
    left = sorted((medians[a][b] for a in ranks for b in ranks if a != b), reverse=True)
    level: dict[float, float] = {}
    while left:
        equal = [rate for rate in left if rate * SAME_RATE >= left[0]]
        level |= dict.fromkeys(equal, median(equal))
        left = left[len(equal) :]
    return [[level.get(medians[a][b], 0.0) if a != b else 0.0 for b in ranks] for a in ranks]


def _candidates(rates: Rates) -> Iterator[AllReducePlan]:
    peers, groups = len(rates), racks(rates)
    if peers <= MAX_RING:
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
    """Return the seconds of a mean of one byte by a plan, without latency.

    Rates were measured in time slots, and the slowest link of a slot counts, since all messages
    over a slow link between racks share it.
    """
    if plan.shares:
        equal = _direct_seconds([1] * plan.peers, rates)
        scale = _direct_seconds(plan.shares, rates) / equal
        return scale * seconds_of(direct_plan(plan.peers), rates)
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
    """Return the seconds of a direct plan with these shares: those of the busiest link."""
    peers, total = len(shares), sum(shares)
    return max(
        (1 + share / total * (peers - 2)) / width
        for share, width in zip(shares, _widths(rates), strict=True)
    )


def _widths(rates: Rates) -> list[float]:
    """Return the rate of each rank's own link: the highest rate to any other rank."""
    ranks = range(len(rates))
    return [max(_both(rates, rank, other) for other in ranks if other != rank) for rank in ranks]


def _links_are_own(rates: Rates) -> bool:
    """Return whether the rate between any two ranks is about that of the slower of their links."""
    widths, ranks = _widths(rates), range(len(rates))
    return all(
        _both(rates, rank, other) >= SAME_RACK * min(widths[rank], widths[other])
        for rank in ranks
        for other in ranks[:rank]
    )


def shares_of(rates: Rates) -> tuple[int, ...]:
    """Return the share of a buffer that each rank should reduce, by the rate of its link.

    Of p ranks, a rank that reduces share s sends 1 - s of its buffer, and s of the mean to each of
    p - 1 others: 1 + s (p - 2) in total. All links are equally busy if s (p - 2) = T width - 1, for
    the T with which shares sum to 1. A rank with a negative share reduces nothing.
    """
    peers, widths = len(rates), _widths(rates)
    adding = [*range(peers)]
    while True:
        seconds = (peers - 2 + len(adding)) / sum(widths[rank] for rank in adding)
        left = [rank for rank in adding if seconds * widths[rank] >= 1]
        if left == adding:
            break
        adding = left
    share = {rank: (seconds * widths[rank] - 1) / (peers - 2) for rank in adding}
    return tuple(round(SHARE_UNITS * peers * share.get(rank, 0.0)) for rank in range(peers))


def _slowest(groups: Sequence[Sequence[int]], turn: int, rates: Rates) -> float:
    """Return the rate of the slowest link if each rank sends to the ``turn``-th after it."""
    return min(
        rates[rank][group[(index + turn) % len(group)]]
        for group in groups
        for index, rank in enumerate(group)
    )


def racks(rates: Rates) -> list[list[int]]:
    """Group ranks whose mean rate to each other is at least half of the typical highest rate."""
    each = [max(row[:rank] + row[rank + 1 :]) for rank, row in enumerate(map(list, rates))]
    widest = median(each)
    groups: list[list[int]] = []
    for rank in range(len(rates)):
        for group in groups:
            if fmean(_both(rates, rank, other) for other in group) >= SAME_RACK * widest:
                group.append(rank)
                break
        else:
            groups.append([rank])
    return groups


def ring_order(rates: Rates) -> tuple[int, ...]:
    """Return an order of ranks on a ring with a fast slowest link: nearest neighbor, then 2-opt."""
    left, order = set(range(1, len(rates))), [0]
    while left:
        order.append(max(sorted(left), key=lambda rank: _both(rates, order[-1], rank)))
        left.remove(order[-1])
    for _ in range(MAX_SWEEPS):
        width, before = _width(order, rates), order
        for i in range(1, len(order) - 1):
            for j in range(i + 1, len(order)):
                other = order[:i] + order[i : j + 1][::-1] + order[j + 1 :]
                if (wider := _width(other, rates)) > width:
                    order, width = other, wider
        if order == before:
            break
    return tuple(order)


def _both(rates: Rates, rank: int, other: int) -> float:
    """Return the rate between two ranks in the slower direction."""
    return min(rates[rank][other], rates[other][rank])


def _width(order: Sequence[int], rates: Rates) -> tuple[float, float]:
    """Return a sort key of a ring: the rate of its slowest link, then the total of all links."""
    links = [rates[a][b] for a, b in pairwise([*order, order[0]])]
    return min(links), -sum(1 / link for link in links)


def has_changed(seconds: Sequence[float]) -> bool:
    """Return whether the latest exchanges take much longer or shorter than the earlier ones."""
    if len(seconds) < MIN_HISTORY + RECENT:
        return False
    usual = sorted(seconds[:-RECENT])[(len(seconds) - RECENT - 1) // 2]
    recent = seconds[-RECENT:]
    return min(recent) > CHANGE_FACTOR * usual or max(recent) < usual / CHANGE_FACTOR
