"""Better placements of a flow's nodes: the busiest rank has less to do, messages counted."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from daso.flow.plan import NEGLIGIBLE, Edge, follow, neighbours

__all__ = ["balanced"]

Homes = dict[int, int]  # rank of each node
Cost = tuple[float, float]  # seconds of the busiest rank, of all
WORK = 2_000_000  # pairs of nodes that are looked at, at most: about two seconds
WORTH = 0.99  # times the cost before: what gains less is not done


def balanced(
    seconds: Sequence[float],
    crossing: Sequence[Edge],
    ranks: int,
    fixed: Mapping[int, int],
    start: Mapping[int, int],
) -> tuple[int, ...]:
    """Return a rank for every node, none of which has replicas.

    Local search: nodes that take time are moved, and swapped, as long as the busiest rank has less
    to do by it. What takes none goes along with what it exchanges most with.

    Args:
        seconds: That each node takes.
        crossing: Seconds that messages between two nodes would take of either, on different ranks.
        ranks: How many there are.
        fixed: Ranks of nodes that stay.
        start: Ranks of all nodes to begin with; it begins too from all nodes on one rank, and from
            clusters of nodes that exchange most.
    """
    near = neighbours(crossing, len(seconds))
    least = NEGLIGIBLE * max(seconds)
    heavy = [n for n, taken in enumerate(seconds) if n not in fixed and taken > least]

    def settled(homes: Homes) -> Homes:
        placed: dict[int, tuple[int, ...]]
        placed = {node: (rank,) for node, rank in (*fixed.items(), *homes.items())}
        follow(placed, near, len(seconds), range(len(seconds)))
        return {node: ranks[0] for node, ranks in placed.items()}

    def cost(homes: Homes) -> Cost:
        return _cost(settled(homes), seconds, crossing, ranks)

    tries = WORK // len(seconds) ** 2
    mean = sum(seconds) / ranks
    starts = [start, dict.fromkeys(heavy, 0)]
    starts += [_clustered(seconds, crossing, ranks, fixed, mean / parts) for parts in (1, 2)]
    begins = [{node: homes[node] for node in heavy} for homes in starts]
    found = settled(min((_descend(one, ranks, cost, tries) for one in begins), key=cost))
    found = min(found, dict(start), key=lambda homes: _cost(homes, seconds, crossing, ranks))
    return tuple(found[node] for node in range(len(seconds)))


def _clustered(
    seconds: Sequence[float],
    crossing: Sequence[Edge],
    ranks: int,
    fixed: Mapping[int, int],
    most: float,
) -> Homes:
    """Merge nodes that exchange most, up to so many seconds; place the longest clusters first."""
    members = {node: [node] for node in range(len(seconds))}
    taken, pinned, of = dict(enumerate(seconds)), dict(fixed), list(range(len(seconds)))
    between: dict[tuple[int, int], float] = defaultdict(float)
    for source, target, weight in crossing:
        between[min(source, target), max(source, target)] += weight
    for source, target in sorted(between, key=lambda pair: (-between[pair], pair)):
        one, other = of[source], of[target]
        homes = {pinned[cluster] for cluster in (one, other) if cluster in pinned}
        if one == other or len(homes) > 1 or taken[one] + taken[other] > most:
            continue
        for node in members[other]:
            of[node] = one
        members[one] += members.pop(other)
        taken[one] += taken.pop(other)
        for rank in homes:
            pinned[one] = rank
    load = [0.0] * ranks
    found: Homes = {}
    for cluster in sorted(members, key=lambda one: (one not in pinned, -taken[one], one)):
        rank = pinned.get(cluster, min(range(ranks), key=load.__getitem__))
        load[rank] += taken[cluster]
        found |= dict.fromkeys(members[cluster], rank)
    return found


def _cost(homes: Homes, seconds: Sequence[float], crossing: Sequence[Edge], ranks: int) -> Cost:
    load = [0.0] * ranks
    for node, taken in enumerate(seconds):
        load[homes[node]] += taken
    for source, target, taken in crossing:
        if homes[source] != homes[target]:
            load[homes[source]] += taken
            load[homes[target]] += taken
    return max(load), sum(load)


def _descend(homes: Homes, ranks: int, cost: Callable[[Homes], Cost], tries: int) -> Homes:
    """Take the best change again and again, as long as one is worth it; look at so many."""
    before = cost(homes)
    while tries > 0:
        changes = [*islice(_changed(homes, ranks), tries)]
        tries -= len(changes) + 1
        best = min(changes, key=cost, default=homes)
        after = cost(best)
        if not _is_better(after, before):
            break
        homes, before = best, after
    return homes


def _is_better(after: Cost, before: Cost) -> bool:
    return after[0] < WORTH * before[0] or (after[0] <= before[0] and after[1] < WORTH * before[1])


def _changed(homes: Homes, ranks: int) -> Iterator[Homes]:
    """Yield placements in which one node is elsewhere, or two have changed places."""
    for node, rank in homes.items():
        yield from (homes | {node: other} for other in range(ranks) if other != rank)
        yield from (
            homes | {node: place, other: rank}
            for other, place in homes.items()
            if node < other and place != rank
        )
