"""How a node takes in a mean that is some batches old: one affine map with three numbers.

With x the local parameters now, s the local parameters when the exchange was sent, and g the new
reference (the mean over all nodes), every rule here is

    x  <-  keep * x  +  pull * g  -  drop * s

- ``daso``: x <- (2 W x + P g) / (2 W + P), W batches waited, P nodes
  (Coquelin et al. 2022, doi 10.1186/s40537-021-00556-1).
- ``delta``: x <- g + (x - s), the local work since the send is kept whole.
- After waiting 0 batches x equals s, and every rule is ``x <- g``, taken over bit for bit.
"""

from dataclasses import dataclass

from daso.errors import ConfigError

__all__ = ["ADOPT", "MERGES", "Merge", "merge_rule"]

MERGES = ("daso", "delta")


@dataclass(frozen=True, slots=True)
class Merge:
    """The three numbers of ``x <- keep * x + pull * g - drop * s``."""

    keep: float
    pull: float
    drop: float


ADOPT = Merge(keep=0.0, pull=1.0, drop=0.0)


def merge_rule(name: str, *, waited: int, nodes: int) -> Merge:
    """Return the numbers of a merge.

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
        return Merge(keep=1.0, pull=1.0, drop=1.0)
    weight = 2 * waited + nodes
    return Merge(keep=2 * waited / weight, pull=nodes / weight, drop=0.0)
