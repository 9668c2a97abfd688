"""A machine that is not at hand, imitated by slowing down parts of one that is.

How long any order of tasks takes is homogeneous in how long the tasks take: if all take rho times
as long, so does the whole. So a target whose parts are up to rho times as fast as what is here is
imitated by bringing every part here down to a rho-th of the target's, and a rho-th of what that
takes is what the target would take. For computing that is k times as fast over the same link, that
is the link slowed down k times: T(C / k, L) = T(C, k L) / k.

Source: US 2020/0065214 A1 (several parts and their ratio), US 10453167 B1 (one link).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from daso.errors import ConfigError

__all__ = ["Estimate", "Machine", "ThrottlePlan", "estimate"]

CONFIDENCE = 0.95
LEAST = 6  # times from which that can be said of a median


@dataclass(frozen=True, slots=True)
class Machine:
    """What counts of the nodes of a machine.

    Args:
        compute: How fast a node computes this model, in any unit that both machines are given in:
            samples or steps per second, FLOP/s.
        link_bytes_per_second: Of a node's link, each way.
        latency_seconds: From one node to another.
    """

    compute: float
    link_bytes_per_second: float
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name in ("compute", "link_bytes_per_second"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number above 0, not {getattr(self, name)}")
        if not 0 <= self.latency_seconds < math.inf:
            raise ConfigError(
                f"latency_seconds must be a number of at least 0, not {self.latency_seconds}"
            )


@dataclass(frozen=True, slots=True)
class ThrottlePlan:
    """How to slow the current machine down to imitate another one.

    Args:
        current: What is at hand.
        target: What is to be imitated.

    Raises:
        ConfigError: The target has no latency, which no slowing down brings about.
    """

    current: Machine
    target: Machine

    def __post_init__(self) -> None:
        if self.current.latency_seconds > 0 and self.target.latency_seconds == 0:
            raise ConfigError(
                f"latency_seconds of the target must be above 0 where the current machine's is "
                f"{self.current.latency_seconds:g}, not 0; leave both out, or give both"
            )

    @property
    def ratio(self) -> float:
        """How many times as long as on the target all takes: that of the part that is best there.

        Not below what brings everything down, and not above.
        """
        current, target = self.current, self.target
        ratios = [
            target.compute / current.compute,
            target.link_bytes_per_second / current.link_bytes_per_second,
        ]
        if current.latency_seconds > 0:
            ratios.append(current.latency_seconds / target.latency_seconds)
        return max(ratios)

    @property
    def compute_factor(self) -> float:
        """How many times as long computing must take here; 1 at least."""
        return max(1.0, self.ratio * self.current.compute / self.target.compute)

    @property
    def link_bytes_per_second(self) -> float:
        """What the link must carry here, no more than it can."""
        return self.target.link_bytes_per_second / self.ratio

    @property
    def latency_seconds(self) -> float:
        """What a message must take here beside its bytes, no less than it does."""
        return self.target.latency_seconds * self.ratio

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What stands behind an estimate."""
        return (
            f"everything takes {self.ratio:.3g} times as long as on the target: computing is "
            f"stretched {self.compute_factor:.3g} times by sleeping, the link is held to "
            f"{self.link_bytes_per_second / 1e6:.4g} MB/s and {1e6 * self.latency_seconds:.4g} us",
            "emulated, not measured on the target: caches, cores and memory are those of the "
            "machine at hand; Python's time and that of the thread that exchanges do not shrink",
            "a link carries one exchange at a time; switches are never full",
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the target would take.

    Args:
        seconds: The median.
        low: Seconds; with `high` the bounds between which the median lies, 95 times of 100.
        high: Seconds.
        assumptions: What stands behind it.
    """

    seconds: float
    low: float
    high: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        said = "\n".join(f"- {line}" for line in self.assumptions)
        return (
            f"emulated: {1e3 * self.seconds:.3f} ms (median lies between {1e3 * self.low:.3f} and "
            f"{1e3 * self.high:.3f}, 95 of 100 times)\n{said}"
        )


def estimate(plan: ThrottlePlan, seconds: Sequence[float]) -> Estimate:
    """Return what the target would take, from times of the same thing that were taken throttled.

    Args:
        plan: By which it was throttled.
        seconds: One for each step, say; 6 at least.
    """
    if len(seconds) < LEAST:
        raise ConfigError(
            f"an estimate needs {LEAST} times at least, not {len(seconds)}; take more steps"
        )
    ordered = sorted(seconds)
    at = _below(len(ordered))
    low, high = ordered[at], ordered[-1 - at]
    ratio = plan.ratio
    return Estimate(statistics.median(ordered) / ratio, low / ratio, high / ratio, plan.assumptions)


def _below(count: int) -> int:
    """Return which of so many times in order is below the median, 97.5 times of 100.

    The number of times below the median is binomial: distribution-free (Conover 1999, 3.2).
    """
    tail, at = 0.0, -1
    while at + 1 < count:
        tail += math.comb(count, at + 1) / 2**count
        if tail > (1 - CONFIDENCE) / 2:
            break
        at += 1
    return max(0, at)
