"""A machine that is not at hand, imitated by slowing down parts of one that is.

How long any order of tasks takes is homogeneous in how long the tasks take: if all take rho times
as long, so does the whole. So a target whose parts are up to rho times as fast as what is here is
imitated by bringing every part here down to a rho-th of the target's, and a rho-th of what that
takes is what the target would take. For computing that is k times as fast over the same link, that
is the link slowed down k times: T(C / k, L) = T(C, k L) / k.

Source: US 2020/0065214 A1 (several parts and their ratio), US 10453167 B1 (one link).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from daso.checks import check, instance_of, number, positive, validated_record
from daso.errors import ConfigError

__all__ = ["Estimate", "Machine", "ThrottlePlan", "estimate"]

BLOCKS = 12  # into which steps are cut: means of many steps in a row are about independent
QUANTILE = 2.201  # 0.975 of Student's t with 11 degrees of freedom


@validated_record
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
        check("compute", self.compute, positive(1e30))
        check("link_bytes_per_second", self.link_bytes_per_second, positive(1e18))
        check("latency_seconds", self.latency_seconds, number(0, 1e12))


@validated_record
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
        check("current", self.current, instance_of(Machine))
        check("target", self.target, instance_of(Machine))
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
            "computing is stretched at the end of each step: what crosses while a backward goes on "
            "has less time here, so that synchronous training comes out slower than it would be",
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step would take on the target.

    Args:
        seconds: The mean.
        low: Seconds; with `high` the bounds between which the mean lies, 95 times of 100.
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
            f"emulated: {1e3 * self.seconds:.3f} ms a step (the mean lies between "
            f"{1e3 * self.low:.3f} and {1e3 * self.high:.3f}, 95 of 100 times)\n{said}"
        )


def estimate(plan: ThrottlePlan, seconds: Sequence[float]) -> Estimate:
    """Return what a step would take on the target, from steps that were taken throttled.

    The first quarter is left out, in which a schedule finds its place. A mean, not a median: most
    steps wait for nothing, and it is the others that a link costs.

    Args:
        plan: By which they were throttled.
        seconds: Of all steps, in order; many times as many as lie between exchanges.
    """
    least = 2 * BLOCKS
    if len(seconds) < least:
        raise ConfigError(
            f"an estimate needs {least} steps at least, not {len(seconds)}; take more"
        )
    kept = seconds[len(seconds) // 4 :]
    ends = [len(kept) * block // BLOCKS for block in range(BLOCKS + 1)]
    means = [statistics.fmean(kept[a:b]) for a, b in itertools.pairwise(ends)]
    off = QUANTILE * statistics.stdev(means) / math.sqrt(BLOCKS)
    mean, ratio = statistics.fmean(kept), plan.ratio
    return Estimate(mean / ratio, (mean - off) / ratio, (mean + off) / ratio, plan.assumptions)
