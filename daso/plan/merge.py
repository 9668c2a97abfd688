"""How a node takes in a mean that is some batches old.

With x the local parameters now, s the local parameters when the exchange was sent, g the new
reference (the mean over all nodes, or what an outer optimizer made of it), W the batches waited and
P the nodes:

- ``daso``: x <- (2 W x + P g) / (2 W + P), worked out as x + (g - x) P / (2 W + P), which leaves x
  alone where it equals g (Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1).
- ``delta``: x <- x + (g - s), so the local work since the send is kept whole; more exactly,
  x <- x + (mean - own) of what crossed, so what a wire rounds away stays in x until it crosses.
- ``eager``: when the exchange is sent, the node goes at once to e, where it would stand if its own
  part of the mean were new and the other nodes' as in the exchange before; when the mean is there,
  x <- x + (g - e). With an outer optimizer, e is one step of it (eager updates, Kale et al. 2025,
  arXiv 2502.12996).
- a number a between 0 and 1: x <- a x + (1 - a) g (the mixing of Streaming DiLoCo, Douillard et al.
  2025, arXiv 2501.18512).
- ``auto``: ``eager`` with an outer optimizer; else, decided when the exchange is sent, ``delta`` as
  long as the drift that nodes make while they wait is small, because it loses no work, and ``daso``
  above, because it pulls nodes together where ``delta`` would diverge.
- After waiting 0 batches x equals s, and every rule is x <- g, taken over bit for bit.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from daso.errors import ConfigError

__all__ = [
    "ADOPT",
    "KEEP",
    "LEAVE",
    "MERGES",
    "Merge",
    "MergeName",
    "check_merge",
    "is_eager",
    "keeps_local",
    "merge_rule",
]

MergeName = Literal["auto", "daso", "delta", "eager"]
MERGES = get_args(MergeName)
MOST_DRIFT = 0.1  # relative distance made while waiting, above which auto contracts


@dataclass(frozen=True, slots=True)
class Merge:
    """One merge, decided: x <- x + pull (g - x), or x <- x + (g - s) where ``since_send``."""

    pull: float
    since_send: bool = False


ADOPT = Merge(pull=1.0)
KEEP = Merge(pull=1.0, since_send=True)
LEAVE = Merge(pull=0.0)


def check_merge(merge: str | float) -> None:
    """Raise unless ``merge`` is a known name or a number between 0 and 1."""
    if isinstance(merge, str):
        if merge in MERGES:
            return
    elif isinstance(merge, int | float) and not isinstance(merge, bool) and 0 <= merge <= 1:
        return
    raise ConfigError(
        f"merge must be one of {', '.join(MERGES)}, or a number between 0 and 1 (the weight of "
        f"local parameters), not {merge!r}"
    )


def keeps_local(merge: str | float, *, wait: int, drift: float = 0.0, outer: bool = False) -> bool:
    """Return whether the merge of an exchange that starts will keep local work whole."""
    check_merge(merge)
    if merge == "auto":
        return outer or math.sqrt(drift * wait) <= MOST_DRIFT
    return merge in ("delta", "eager")


def merge_rule(
    merge: str | float, *, waited: int, nodes: int, keeps: bool, settles: bool = False
) -> Merge:
    """Return the merge to carry out.

    Args:
        merge: The keyword.
        waited: Batches since the exchange was sent.
        nodes: Number of nodes.
        keeps: Whether local work since then is kept whole, as `keeps_local` said.
        settles: A blocking exchange follows: a weighted merge would only undo later work.
    """
    check_merge(merge)
    if waited == 0:
        return ADOPT
    if keeps:
        return KEEP
    if settles:
        return LEAVE
    if merge in ("auto", "daso"):
        return Merge(pull=nodes / (2 * waited + nodes))
    return Merge(pull=1.0 - float(merge))


def is_eager(merge: str | float, *, outer: bool) -> bool:
    """Return whether nodes go ahead when they send; see ``eager``."""
    return merge == "eager" or (merge == "auto" and outer)
