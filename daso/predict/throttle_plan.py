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

from daso.checks import NONE, check, either, instance_of, number, positive, validated_record
from daso.errors import ConfigError

__all__ = ["LEAST_STEPS", "RATES", "Estimate", "Machine", "ThrottlePlan", "estimate"]

BLOCKS = 12  # into which steps are cut: means of many steps in a row are about independent
LEAST_STEPS = 2 * BLOCKS  # of an estimate
QUANTILE = 2.201  # 0.975 of Student's t with 11 degrees of freedom
LABELS = {
    "memory_bytes_per_second": "memory",
    "copy_bytes_per_second": "copies between host and device",
    "disk_write_bytes_per_second": "writes to the disk",
    "disk_read_bytes_per_second": "reads from the disk",
}
RATES = ("link_bytes_per_second", *LABELS)  # beside computing, which every machine has
ALWAYS = (
    "emulated, not measured on the target: caches and cores are those of the machine at hand; "
    "Python's time between operations and that of the thread that exchanges do not shrink",
    "a link carries one message at a time; switches are never full",
    "what is left of computing is stretched at the end of each step: code of a forward or backward "
    "that is no torch operation on the CPU has less time here beside what crosses",
)


@validated_record
@dataclass(frozen=True, slots=True)
class Machine:
    """What counts of the nodes of a machine; `measure_machine` measures the one at hand.

    Args:
        compute: How fast a node computes this model, in any unit that both machines are given in:
            samples or steps per second, FLOP/s.
        link_bytes_per_second: Of a node's link, each way; None: not counted, as below.
        latency_seconds: From one node to another.
        memory_bytes_per_second: That a rank reads and writes.
        copy_bytes_per_second: Between host and device, each way.
        disk_write_bytes_per_second: Until they are on the disk.
        disk_read_bytes_per_second: That no cache holds.
    """

    compute: float
    link_bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    memory_bytes_per_second: float | None = None
    copy_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check("compute", self.compute, positive(1e30))
        for name in RATES:
            check(name, getattr(self, name), either(positive(1e18), NONE))
        check("latency_seconds", self.latency_seconds, number(0, 1e12))


@validated_record
@dataclass(frozen=True, slots=True)
class ThrottlePlan:
    """How to slow the current machine down to imitate another one; counts what both give.

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
        has_latency = self.current.latency_seconds > 0 and "link_bytes_per_second" in self.counted
        if has_latency and self.target.latency_seconds == 0:
            raise ConfigError(
                f"latency_seconds of the target must be above 0 where the current machine's is "
                f"{self.current.latency_seconds:g}, not 0; leave both out, or give both"
            )

    @property
    def counted(self) -> tuple[str, ...]:
        """Rates that both machines give, by name; the others are left as they are."""
        both = self.current, self.target
        return tuple(name for name in RATES if all(getattr(one, name) is not None for one in both))

    @property
    def ratio(self) -> float:
        """How many times as long as on the target all takes: that of the part that is best there.

        Not below what brings everything down, and not above.
        """
        current, target = self.current, self.target
        names = ("compute", *self.counted)
        ratios: list[float] = [getattr(target, name) / getattr(current, name) for name in names]
        if self.has_link and current.latency_seconds > 0:
            ratios.append(current.latency_seconds / target.latency_seconds)
        return max(ratios)

    @property
    def has_link(self) -> bool:
        """Whether both machines give their link between nodes."""
        return "link_bytes_per_second" in self.counted

    @property
    def compute_factor(self) -> float:
        """How many times as long computing must take here; 1 at least."""
        return self.factor("compute")

    @property
    def link_bytes_per_second(self) -> float | None:
        """What the link must carry here, no more than it can; None: it is not counted."""
        return self.rate("link_bytes_per_second")

    @property
    def latency_seconds(self) -> float:
        """What a message must take here beside its bytes, no less than it does."""
        return self.target.latency_seconds * self.ratio

    def rate(self, name: str) -> float | None:
        """Return what a rate must be here, no more than it is; None: it is not counted."""
        target: float = getattr(self.target, name)
        return target / self.ratio if name in ("compute", *self.counted) else None

    def factor(self, name: str) -> float:
        """Return how many times as long that which goes at a rate must take here; 1 at least."""
        rate = self.rate(name)
        current: float = getattr(self.current, name)
        return 1.0 if rate is None else max(1.0, current / rate)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What stands behind an estimate."""
        if not self.counted:
            return (
                f"nothing is slowed down: computing alone is compared, so that this is the time "
                f"measured here divided by {self.ratio:.3g}; give the link or another rate of both "
                f"machines to see what computing hides",
            )
        words = [f"computing is stretched {self.compute_factor:.3g} times by sleeping"]
        if self.link_bytes_per_second is not None:
            words.append(
                f"the link is held to {self.link_bytes_per_second / 1e6:.4g} MB/s and "
                f"{1e6 * self.latency_seconds:.4g} us"
            )
        for name in self.counted:
            if name in LABELS:
                words.append(f"{LABELS[name]} to {(self.rate(name) or 0) / 1e6:.4g} MB/s")
        aside = [LABELS.get(name, "the link") for name in RATES if name not in self.counted]
        return (
            f"everything takes {self.ratio:.3g} times as long as on the target: {', '.join(words)}",
            *([f"taken for as much better as all: {', '.join(aside)}"] if aside else ()),
            *ALWAYS,
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
    if len(seconds) < LEAST_STEPS:
        raise ConfigError(
            f"an estimate needs {LEAST_STEPS} steps at least, not {len(seconds)}; take more"
        )
    kept = seconds[len(seconds) // 4 :]
    ends = [len(kept) * block // BLOCKS for block in range(BLOCKS + 1)]
    means = [statistics.fmean(kept[a:b]) for a, b in itertools.pairwise(ends)]
    off = QUANTILE * statistics.stdev(means) / math.sqrt(BLOCKS)
    mean, ratio = statistics.fmean(kept), plan.ratio
    return Estimate(mean / ratio, (mean - off) / ratio, (mean + off) / ratio, plan.assumptions)
