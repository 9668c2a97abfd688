"""Names nodes whose reference differs from the others, and payloads that changed on their way."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from daso.comm.allreduce.message_sums import find_damage
from daso.comm.control import gather
from daso.errors import DivergenceError
from daso.plan.exchange import Tally
from daso.train.coordinator import Coordinator
from daso.train.deltas.buffer import DeltaBuffer

logger = logging.getLogger("daso")

Prints = Sequence[tuple[str, int]]  # names of parameters, and fingerprints of their references


@dataclass(frozen=True, slots=True)
class Divergence:
    """Ranks whose reference differs from that of most nodes.

    Args:
        ranks: Their world ranks; the whole lane, where no reference has a majority.
        parameter: The first parameter that differs.
        is_known: Whether most nodes agree on another reference.
    """

    ranks: tuple[int, ...]
    parameter: str
    is_known: bool


def find_divergence(prints: Sequence[Prints], node_of: Sequence[int]) -> Divergence | None:
    """Return the ranks that differ from the majority of their lane; None if no rank differs.

    Of several lanes that differ, the first counts.

    Args:
        prints: Fingerprints of each world rank's part of the reference.
        node_of: Node of each world rank.
    """
    for ranks in _lanes(node_of):
        versions = Counter(tuple(prints[rank]) for rank in ranks)
        if len(versions) > 1:
            usual, count = versions.most_common(1)[0]
            others = [rank for rank in ranks if tuple(prints[rank]) != usual]
            pairs = zip(usual, prints[others[0]], strict=True)
            parameter = next(usual_print[0] for usual_print, other in pairs if usual_print != other)
            is_known = 2 * count > len(ranks)
            return Divergence(tuple(others if is_known else ranks), parameter, is_known)
    return None


def _lanes(node_of: Sequence[int]) -> list[list[int]]:
    """Return the world ranks of each lane, in the order of nodes."""
    local_ranks = [node_of[:rank].count(node) for rank, node in enumerate(node_of)]
    return [
        [rank for rank, local_rank in enumerate(local_ranks) if local_rank == lane]
        for lane in range(min(Counter(node_of).values()))
    ]


def refuse_divergence(coordinator: Coordinator, rows: Sequence[DeltaBuffer], tally: Tally) -> None:
    """Raise an error that names the ranks whose reference differs from that of most nodes.

    In an elastic job only their nodes raise it, if they are known: the others continue. If a
    payload changed on its way, all ranks raise an error that names its sender and receiver.

    Args:
        coordinator: Of all ranks.
        rows: All rows of the model.
        tally: Of the exchange before, summed over all ranks.

    Collective over the world; blocking.
    """
    if not tally.payloads_arrived:
        _refuse_damage(coordinator)
    topology, limit = coordinator.topology, coordinator.channels.settings.exchange.timeout_seconds
    prints = [pair for row in rows for pair in row.fingerprints()]
    node_of, hosts = topology.rank_info.node_of, topology.liveness.hosts
    divergence = find_divergence(gather(topology, prints, limit), node_of)
    if divergence is None:
        raise DivergenceError(
            "all nodes must hold the same reference, but fingerprints differed in one exchange, "
            "and are equal now; a processor or memory computed wrongly once: test all hosts, and "
            "resume from the last checkpoint",
            code="reference-differed-once",
        )
    named = ", ".join(f"rank {rank} on host {hosts[rank]}" for rank in divergence.ranks)
    problem = (
        f"all nodes must hold the same reference, but that of {named} "
        f"{'differs from the others' if divergence.is_known else 'differs from each other'}, "
        f"first in {divergence.parameter}"
    )
    nodes = {node_of[rank] for rank in divergence.ranks}
    continues = topology.is_elastic and divergence.is_known
    if continues and topology.rank_info.node not in nodes:
        first = min(rank for rank, node in enumerate(node_of) if node not in nodes)
        if topology.rank == first:
            logger.warning("%s; training continues without these nodes", problem)
        return
    raise DivergenceError(
        f"{problem}; a processor, memory or kernel there computed wrongly: test these hosts, and "
        f"resume from the last checkpoint without them",
        code="reference-differs",
    )


def _refuse_damage(coordinator: Coordinator) -> None:
    """Raise an error that names the ranks between which a payload changed. Collective; blocking."""
    topology, limit = coordinator.topology, coordinator.channels.settings.exchange.timeout_seconds
    message_sums = coordinator.channels.message_sums
    assert message_sums is not None, "nothing is counted between two nodes"
    sums = gather(topology, message_sums.of_peers, limit)
    hosts, place = topology.liveness.hosts, "between two ranks"
    for ranks in _lanes(topology.rank_info.node_of):
        damage = find_damage([sums[rank] for rank in ranks])
        if damage is not None:
            sender, receiver = (ranks[node] for node in damage)
            place = (
                f"between rank {sender} on host {hosts[sender]} and rank {receiver} on host "
                f"{hosts[receiver]}"
            )
            break
    raise DivergenceError(
        f"payloads must arrive as they were sent, but one changed {place}; memory or the network "
        f"there changes data: test both hosts, and resume from the last checkpoint",
        code="payload-changed",
    )
