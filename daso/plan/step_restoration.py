"""How much longer an optimizer that normalizes has to step where nodes average what it did.

Adam and its kin divide by the size of their gradients, noise included. A node alone sees the noise
of its own batch; all nodes together would see less of it. So the mean of what P nodes did points
the right way, and is shorter than the step of one big batch: up to sqrt(P) times, where gradients
are all noise. Averaging more often does not mend that; a longer step does.

With m = |mean delta|^2, d = the mean of |delta - mean delta|^2 over nodes, n the batches in a delta
and b the momentum, the noise of n steps that share a momentum adds up as

    c(n) = (1 - b) / (1 + b) * (1 + 2 * sum over j < n of (1 - j / n) * b^j)

so that of one step's squared length the noise is N = d * P / ((P - 1) * n * c(n)), the signal is
S = max(0, m - d / (P - 1)) / n^2, and the step needs the gain sqrt((S + N) / (S + N / P)). (The
square root rule of Malladi et al. 2022, arXiv 2205.10287, and Wang et al. 2024, arXiv 2402.18824,
with the noise measured.) Plain SGD is linear in its gradients and needs none.

That is so once the running mean of squares, by which the optimizer divides, has seen the noise of
single nodes. After synchronous steps it remembers that of all of them: then the step is as long as
it should be, and only a share of the gain is needed, the share of that memory which single nodes
made.
"""

import math
from collections.abc import Mapping
from typing import Any

__all__ = [
    "momentum_noise",
    "next_gain",
    "next_noise_share",
    "rate_of",
    "required_gain",
    "shared_gain",
]

SMOOTHING = 0.3  # part of the way to what was measured that the gain goes with each exchange


def momentum_noise(batches: int, momentum: float) -> float:
    """Return c(n): the variance of n steps with a momentum over that of n steps without."""
    b, n = momentum, batches
    if b == 0.0:
        return 1.0
    # The sum over 0 < j < n of (1 - j / n) * b^j, worked out.
    inner = b / (1 - b) - b * (1 - b**n) / (n * (1 - b) ** 2)
    return (1 - b) / (1 + b) * (1 + 2 * inner)


def required_gain(
    distance: float, moved: float, *, nodes: int, batches: int, momentum: float
) -> float:
    """Return the gain that makes the mean of all nodes' steps as long as one big batch's."""
    if nodes < 2 or batches < 1 or not 0 < distance + moved < math.inf:
        return 0.0
    d, m = distance / nodes, moved / nodes
    noise = d * nodes / ((nodes - 1) * batches * momentum_noise(batches, momentum))
    signal = max(0.0, m - d / (nodes - 1)) / batches**2
    if not 0 < signal + noise / nodes < math.inf:
        return 0.0
    return min(max(1.0, math.sqrt((signal + noise) / (signal + noise / nodes))), math.sqrt(nodes))


def next_noise_share(share: float, *, batch: int, memory: float, synchronous: bool) -> float:
    """Return which share of a running mean of squares saw the noise of single nodes."""
    kept = 1.0 - (1.0 - memory) / (1.0 - memory**batch)
    return share * kept if synchronous else 1.0 - (1.0 - share) * kept


def shared_gain(gain: float, share: float) -> float:
    """Return the gain where only a share of the memory saw the noise of single nodes."""
    if share in (0.0, 1.0):  # to the bit
        return gain if share else 1.0
    return math.sqrt(1.0 + (gain * gain - 1.0) * share)


def next_gain(gain: float, required: float) -> float:
    """Return the factor for the rate of the steps to come."""
    return gain + SMOOTHING * (required - gain) if required else gain


def rate_of(group: Mapping[str, Any], default: float) -> float:
    """Return a parameter group's learning rate, where it has one: None is for some their own."""
    rate = group.get("lr")
    return default if rate is None else float(rate)
