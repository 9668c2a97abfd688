"""Gain of the learning rate that restores the step length of a normalizing optimizer.

Adam and similar optimizers divide by the size of their gradients, including noise. A single node
sees the noise of its own batch; a batch of all nodes has less noise. So the mean of the steps of P
nodes has the right direction, but is shorter than the step of one large batch: up to sqrt(P) times,
if gradients are only noise. Averaging more often does not change that; a longer step does.

With m = |mean delta|^2, d = the mean of |delta - mean delta|^2 over nodes, n the batches in a delta
and b the momentum, the noise of n steps that share a momentum adds up as

    c(n) = (1 - b) / (1 + b) * (1 + 2 * sum over j < n of (1 - j / n) * b^j)

so that of one step's squared length the noise is N = d * P / ((P - 1) * n * c(n)), the signal is
S = max(0, m - d / (P - 1)) / n^2, and the step needs the gain sqrt((S + N) / (S + N / P)). (The
square root rule of Malladi et al. 2022, arXiv 2205.10287, and Wang et al. 2024, arXiv 2402.18824,
with the noise measured.) Plain SGD is linear in its gradients and needs none.

This holds once the running mean of squares, by which the optimizer divides, contains the noise of
single nodes. After synchronous steps it contains that of the large batch, and the step is as long
as it should be. Then only a share of the gain is needed: the share of single nodes in the running
mean (`daso.plan.schedule.next_noise_share`).
"""

import math
from collections.abc import Mapping
from typing import Any


def momentum_noise(batches: int, momentum: float) -> float:
    """Return c(n): the variance of n steps with a momentum over that of n steps without."""
    b, n = momentum, batches
    if b == 0.0:
        return 1.0
    # The closed form of the sum over 0 < j < n of (1 - j / n) * b^j.
    inner = b / (1 - b) - b * (1 - b**n) / (n * (1 - b) ** 2)
    return (1 - b) / (1 + b) * (1 + 2 * inner)


def required_gain(
    distance: float, moved: float, *, nodes: int, batches: int, momentum: float
) -> float:
    """Return the gain that makes the mean of all nodes' steps as long as one large batch's.

    Args:
        distance: Sum over nodes of the squared distance of a delta from the mean delta.
        moved: Sum over nodes of the squared length of the mean delta.
        nodes: Number of nodes.
        batches: Batches in a delta.
        momentum: Of the optimizer.
    """
    if nodes < 2 or batches < 1 or not 0 < distance + moved < math.inf:
        return 0.0
    d, m = distance / nodes, moved / nodes
    noise = d * nodes / ((nodes - 1) * batches * momentum_noise(batches, momentum))
    signal = max(0.0, m - d / (nodes - 1)) / batches**2
    if not 0 < signal + noise / nodes < math.inf:
        return 0.0
    return min(max(1.0, math.sqrt((signal + noise) / (signal + noise / nodes))), math.sqrt(nodes))


def rate_of(group: Mapping[str, Any], default: float) -> float:
    """Return a parameter group's learning rate, or ``default`` if it is absent or None."""
    rate = group.get("lr")
    return default if rate is None else float(rate)
