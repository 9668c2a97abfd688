"""How a node takes in a mean that is some batches old.

With x the local parameters now, s the local parameters when the exchange was sent, g the new
reference (the mean over all nodes), W the batches waited and P the nodes:

- ``daso``: x <- (2 W x + P g) / (2 W + P), worked out as x + (g - x) P / (2 W + P), which leaves x
  alone where it equals g (Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1).
- ``delta``: x <- x + (g - s), so the local work since the send is kept whole.
- After waiting 0 batches x equals s, and every rule is x <- g, taken over bit for bit.
"""

from dataclasses import dataclass

from daso.errors import ConfigError

__all__ = ["ADOPT", "MERGES", "Merge", "merge_rule"]

MERGES = ("daso", "delta")


@dataclass(frozen=True, slots=True)
class Merge:
    """One merge, decided: x <- x + pull (g - x), or x <- x + (g - s) where ``since_send``."""

    pull: float
    since_send: bool = False


ADOPT = Merge(pull=1.0)


def merge_rule(name: str, *, waited: int, nodes: int) -> Merge:
    """Return the merge to carry out.

    Args:
        name: ``"daso"`` or ``"delta"``.
        waited: Batches between the send and now.
        nodes: Nodes that took part in the mean.

    Returns:
        The merge.

    Raises:
        ConfigError: The name is not known.
    """
    if name not in MERGES:
        raise ConfigError(f"merge must be one of {', '.join(MERGES)}, not {name!r}")
    if waited == 0:
        return ADOPT
    if name == "delta":
        return Merge(pull=1.0, since_send=True)
    return Merge(pull=nodes / (2 * waited + nodes))
