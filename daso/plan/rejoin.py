"""Common schedule of ranks that are a few batches apart, after the loss of another rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from daso.plan.schedule import State


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a rank when another rank was lost."""

    node: int  # its index among the remaining nodes
    state: State | None  # after the step, or call, in which it detected the loss; None: a new rank


@dataclass(frozen=True, slots=True)
class Rejoined:
    """Schedule with which a rank rejoins ranks that were a few batches ahead."""

    state: State  # with this rank's count of batches
    aside_until: int  # last batch to skip: its node, or all nodes, had these batches already
    meets_at: int  # batch from which it performs the due actions; before, it trains alone


def rejoin(progress: Sequence[Progress], rank: int) -> Rejoined:
    """Return the schedule of a rank after all ranks have averaged their parameters.

    Every rank keeps its own count of batches, because its program counts too. All follow the
    schedule of the rank that is furthest ahead. In synchronous phases no rank trains alone. A new
    rank starts with the last batch of the rank that is furthest ahead, and skips it: it only
    performs the actions after that batch.

    Args:
        progress: Progress of every remaining rank.
        rank: The rank whose schedule is returned.
    """
    known = [(each.node, each.state) for each in progress if each.state is not None]
    own, states = progress[rank], [state for _, state in known]
    first = max(states, key=lambda state: state.batch)
    least = first.batch if first.synchronous else min(state.batch for state in states)
    batch = max(0, first.batch - 1) if own.state is None else own.state.batch
    in_node = max((state.batch for node, state in known if node == own.node), default=first.batch)
    state = replace(first, batch=batch, sent=None, last=first.batch, agreed=least)
    return Rejoined(state, first.batch if first.synchronous else in_node, first.batch)
