"""Placement: the ranks of each node of a flow, from the caller or from measurements."""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from daso.errors import ConfigError, FlowError
from daso.flow.model.checks import Wiring

Placement = Mapping[str, int | Sequence[int]]
Homes = dict[int, int]  # rank by node
Cost = tuple[float, float]  # seconds of the busiest rank, of all ranks
NEGLIGIBLE = 0.02  # of the longest node's time: shorter nodes hardly change the load
DIGITS = 2  # significant digits in which loads are compared
MAX_COMPARISONS = 2_000_000  # pairs of nodes in a search: about two seconds
MIN_GAIN = 0.99  # times the cost: a change must lower it at least to this


class Edge(NamedTuple):
    """Cost of the messages from one node of a graph to another."""

    source: int
    target: int
    weight: float  # bytes or seconds


def requested_homes(wiring: Wiring, placement: Placement, ranks: int) -> dict[int, tuple[int, ...]]:
    """Return the ranks of the nodes that the caller placed."""
    homes_of = {}
    for name, request in placement.items():
        node = wiring.named(name)
        homes = (request,) if isinstance(request, int) else tuple(request)
        if not homes or len(set(homes)) < len(homes) or not all(0 <= r < ranks for r in homes):
            raise FlowError(
                f"node {name!r} must be placed on different ranks from 0 to {ranks - 1}, not on "
                f"{request!r}",
                code="placement-on-wrong-ranks",
            )
        if node == wiring.source and homes != (0,):
            raise FlowError(
                f"the source, {name!r}, must be on rank 0, which reads the instances, not on "
                f"{request!r}",
                code="source-not-on-zero",
            )
        if len(homes) > 1 and wiring.nodes[node].kind != "layer":
            raise FlowError(
                f"only a layer can be placed on several ranks, but {name!r} is a "
                f"{wiring.nodes[node].kind}",
                code="only-layers-have-replicas",
            )
        homes_of[node] = homes
    return homes_of


def requested_replicas(
    wiring: Wiring, replicas: Mapping[str, int], fixed: Mapping[int, tuple[int, ...]], ranks: int
) -> dict[int, int]:
    """Return the number of replicas of the layers that the caller named."""
    counts = {wiring.named(name): count for name, count in replicas.items()}
    for node, count in counts.items():
        check_copies(count, ranks)
        name = wiring.nodes[node].name
        if wiring.nodes[node].kind != "layer" or node in fixed:
            raise FlowError(
                f"replicas can be given only for layers without a placement, but {name!r} is "
                f"{'placed' if node in fixed else 'a ' + wiring.nodes[node].kind}",
                code="replicas-of-placed-layer",
            )
    return counts


def choose_homes(
    wiring: Wiring,
    seconds: Sequence[float],
    traffic: Sequence[Edge],
    crossing: Sequence[Edge],
    ranks: int,
    fixed: Mapping[int, tuple[int, ...]],
    copies: Mapping[int, int],
) -> tuple[tuple[int, ...], ...]:
    """Choose the ranks of every node from the seconds of nodes and of messages between ranks."""
    layers = {node.index for node in wiring.nodes if node.kind == "layer"}
    homes = place_longest_first(seconds, traffic, ranks, copies, wiring.source, fixed, layers)
    if ranks == 1 or any(len(some) > 1 for some in homes):
        return homes  # with replicas, an instance stays on one rank where it can
    pinned = {node: some[0] for node, some in fixed.items()} | {wiring.source: 0}
    start = {node: some[0] for node, some in enumerate(homes)}
    return tuple((rank,) for rank in balance(seconds, crossing, ranks, pinned, start))


# --- longest first --------------------------------------------------------------------------------


def check_copies(count: object, ranks: int) -> None:
    """Raise unless a layer can have this number of replicas on these ranks."""
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= ranks:
        raise ConfigError(
            f"a layer can have at most one replica per rank, 1 to {ranks}, not {count!r}",
            code="too-many-replicas",
        )


def place_longest_first(
    seconds: Sequence[float],
    edges: Sequence[Edge],
    ranks: int,
    copies: Mapping[int, int],
    first: int,
    fixed: Mapping[int, tuple[int, ...]],
    single: Container[int] = (),
) -> tuple[tuple[int, ...], ...]:
    """Place nodes on the least loaded rank, the longest first.

    This is longest processing time first (Graham, 1969). Ties and nodes of negligible time go to
    the rank with which they exchange most. If a node has replicas, all nodes that may do so
    follow their neighbours, so that an instance stays on one rank.
    """
    for count in copies.values():
        check_copies(count, ranks)
    load = [0.0] * ranks
    homes_of: dict[int, tuple[int, ...]] = {first: (0,), **fixed}
    for node, homes in homes_of.items():
        for rank in homes:
            load[rank] += seconds[node] / len(homes)
    near = adjacency(edges, len(seconds))
    negligible = NEGLIGIBLE * max(seconds, default=0.0)
    replicated = bool(copies) or any(len(homes) > 1 for homes in fixed.values())
    heavy = [
        node
        for node, node_seconds in enumerate(seconds)
        if node not in homes_of
        and (node in copies or (node_seconds > negligible and (node in single or not replicated)))
    ]
    for node in sorted(heavy, key=lambda heavy_node: (-seconds[heavy_node], heavy_node)):
        count = copies.get(node, 1)
        pull = _pull(near[node], homes_of, ranks)
        order = sorted(range(ranks), key=lambda rank: (_rounded(load[rank]), -pull[rank], rank))
        homes_of[node] = tuple(sorted(order[:count]))
        for rank in homes_of[node]:
            load[rank] += seconds[node] / count
    place_near_neighbours(homes_of, near, len(seconds), single)
    return tuple(homes_of[node] for node in range(len(seconds)))


def _rounded(load: float) -> float:
    return float(f"{load:.{DIGITS - 1}e}")


def adjacency(edges: Sequence[Edge], nodes: int) -> list[list[tuple[int, float]]]:
    """Return the (neighbour, weight) pairs of each node."""
    near: list[list[tuple[int, float]]] = [[] for _ in range(nodes)]
    for source, target, weight in edges:
        near[source].append((target, weight))
        near[target].append((source, weight))
    return near


def _pull(
    near: Sequence[tuple[int, float]], homes_of: Mapping[int, Sequence[int]], ranks: int
) -> list[float]:
    """Return the weight of a node's edges to each rank."""
    pull = [0.0] * ranks
    for other, weight in near:
        homes = homes_of.get(other, ())
        for rank in homes:
            pull[rank] += weight / len(homes)
    return pull


def place_near_neighbours(
    homes_of: dict[int, tuple[int, ...]],
    near: Sequence[Sequence[tuple[int, float]]],
    nodes: int,
    single: Container[int],
) -> None:
    """Place each remaining node on the rank of the neighbour with which it exchanges most."""
    left = [node for node in range(nodes) if node not in homes_of]
    while left:
        # The heaviest edge first, on all ranks of the neighbour: its messages stay on one rank.
        best = {node: _nearest(near[node], homes_of) for node in left}
        node = max(left, key=lambda candidate: (best[candidate][0], -candidate))
        left.remove(node)
        _, other = best[node]
        homes = (0,) if other is None else homes_of[other]
        homes_of[node] = homes[:1] if node in single else homes


def _nearest(
    near: Sequence[tuple[int, float]], homes_of: Mapping[int, Sequence[int]]
) -> tuple[float, int | None]:
    """Return the heaviest edge of a node to a placed one: weight and neighbour."""
    return max(
        ((weight, other) for other, weight in near if other in homes_of),
        key=lambda pair: (pair[0], -pair[1]),
        default=(-1.0, None),
    )


# --- local search ---------------------------------------------------------------------------------


def balance(
    seconds: Sequence[float],
    crossing: Sequence[Edge],
    ranks: int,
    fixed: Mapping[int, int],
    start: Mapping[int, int],
) -> tuple[int, ...]:
    """Return a rank for every node; the busiest rank has at most its load in ``start``.

    A local search moves and swaps nodes while that lowers the load of the busiest rank, including
    messages. It begins from ``start``, from all nodes on one rank, and from clusters.
    """
    search = _Search(seconds, crossing, ranks, fixed)
    starts = [start, dict.fromkeys(search.heavy, 0), search.clustered(sum(seconds) / ranks)]
    ends = [search.descend({node: homes[node] for node in search.heavy}) for homes in starts]
    best = min(*map(search.settled, ends), dict(start), key=search.load)
    return tuple(best[node] for node in range(len(seconds)))


class _Search:
    """Local search over placements without replicas; nodes of negligible time follow the others."""

    def __init__(
        self,
        seconds: Sequence[float],
        crossing: Sequence[Edge],
        ranks: int,
        fixed: Mapping[int, int],
    ) -> None:
        self._seconds, self._crossing, self._ranks, self._fixed = seconds, crossing, ranks, fixed
        self._near = adjacency(crossing, len(seconds))
        least = NEGLIGIBLE * max(seconds)
        self.heavy = [
            n for n, node_seconds in enumerate(seconds) if n not in fixed and node_seconds > least
        ]

    def settled(self, homes: Homes) -> Homes:
        """Return the ranks of all nodes, given those of the heavy ones."""
        fixed_homes = (*self._fixed.items(), *homes.items())
        every: dict[int, tuple[int, ...]] = {node: (rank,) for node, rank in fixed_homes}
        nodes = len(self._seconds)
        place_near_neighbours(every, self._near, nodes, range(nodes))
        return {node: ranks[0] for node, ranks in every.items()}

    def load(self, homes: Homes) -> Cost:
        """Return the seconds of the busiest rank, and the sum over ranks."""
        load = [0.0] * self._ranks
        for node, cost in enumerate(self._seconds):
            load[homes[node]] += cost
        for source, target, cost in self._crossing:
            if homes[source] != homes[target]:
                load[homes[source]] += cost
                load[homes[target]] += cost
        return max(load), sum(load)

    def clustered(self, most: float) -> Homes:
        """Merge nodes that exchange most, up to some seconds; place the longest clusters first."""
        members = {node: [node] for node in range(len(self._seconds))}
        cluster_seconds, pinned, of = (
            dict(enumerate(self._seconds)),
            dict(self._fixed),
            list(members),
        )
        between: dict[tuple[int, int], float] = defaultdict(float)
        for source, target, weight in self._crossing:
            between[min(source, target), max(source, target)] += weight
        for source, target in sorted(between, key=lambda pair: (-between[pair], pair)):
            first, other = of[source], of[target]
            homes = {pinned[cluster] for cluster in (first, other) if cluster in pinned}
            if (
                first == other
                or len(homes) > 1
                or cluster_seconds[first] + cluster_seconds[other] > most
            ):
                continue
            for node in members[other]:
                of[node] = first
            members[first] += members.pop(other)
            cluster_seconds[first] += cluster_seconds.pop(other)
            for rank in homes:
                pinned[first] = rank
        load = [0.0] * self._ranks
        homes_of: Homes = {}
        for cluster in sorted(
            members, key=lambda cluster: (cluster not in pinned, -cluster_seconds[cluster], cluster)
        ):
            rank = pinned.get(cluster, min(range(self._ranks), key=load.__getitem__))
            load[rank] += cluster_seconds[cluster]
            homes_of |= dict.fromkeys(members[cluster], rank)
        return homes_of

    def descend(self, homes: Homes) -> Homes:
        """Apply the best change repeatedly, while it gains enough."""

        def cost(changed: Homes) -> Cost:
            return self.load(self.settled(changed))

        tries, before = MAX_COMPARISONS // len(self._seconds) ** 2, cost(homes)
        while tries > 0:
            changes = [*islice(self._changed(homes), tries)]
            tries -= len(changes) + 1
            best = min(changes, key=cost, default=homes)
            after = cost(best)
            lowers_all = after[0] <= before[0] and after[1] < MIN_GAIN * before[1]
            if not (after[0] < MIN_GAIN * before[0] or lowers_all):
                break
            homes, before = best, after
        return homes

    def _changed(self, homes: Homes) -> Iterator[Homes]:
        """Yield placements with one node moved, or two nodes swapped."""
        for node, rank in homes.items():
            yield from (homes | {node: to} for to in range(self._ranks) if to != rank)
            for other, place in homes.items():
                if node < other and place != rank:
                    yield homes | {node: place, other: rank}
