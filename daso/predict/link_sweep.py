"""What faster devices over the same link would take, from runs whose copies are slowed down. Pure.

A device that is k times as fast over the same link is this one with a link that is k times as slow,
in all that takes k times as long: T(C / k, L) = T(C, k L) / k.

Source: US 10453167 B1, US 2019/0325549 A1.
"""

import statistics
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from daso.checks import check, positive
from daso.errors import ConfigError

__all__ = ["LinkSweep", "check_factors"]

LEAST_FACTORS = 3  # of a fit: it has three numbers


@dataclass(frozen=True, slots=True)
class LinkSweep:
    """What a run takes whose copies take ``factors`` times as long; max(floor, base + slope k).

    Args:
        factors: Of copies.
        seconds: Of the run with each.
        floor: Seconds that it takes however fast copies are: they are hidden behind computing.
        base: Seconds beside copies, where these are not hidden.
        slope: Seconds of copies that are not hidden.
    """

    factors: tuple[float, ...]
    seconds: tuple[float, ...]
    floor: float
    base: float
    slope: float

    @classmethod
    def fit(cls, factors: Sequence[float], seconds: Sequence[float]) -> "LinkSweep":
        """Return the closest such function: the least squares of all ways to cut the factors."""
        check_factors(factors)
        pairs = sorted(zip(factors, seconds, strict=True))
        fits = [_fit(pairs, hidden) for hidden in range(len(pairs) + 1)]
        best = min(fits, key=lambda one: _squares(pairs, *one))
        return cls(tuple(factors), tuple(seconds), *best)

    def seconds_with(self, factor: float) -> float:
        """Return what the run takes whose copies take so many times as long, as fitted."""
        return max(self.floor, self.base + self.slope * factor)

    def estimate(self, times: float) -> float:
        """Return what the run would take with a device so many times as fast over the same link.

        Args:
            times: As fast as the device at hand; between the least and the largest factor, or it
                warns that this was not measured.
        """
        check("times", times, positive())
        if not min(self.factors) <= times <= max(self.factors):
            warnings.warn(
                f"{times:g} times is beyond the factors that were measured, {min(self.factors):g} "
                f"to {max(self.factors):g}: this estimate is an extrapolation",
                stacklevel=2,
            )
        return self.seconds_with(times) / times


def check_factors(factors: Sequence[float]) -> None:
    """Refuse fewer factors than a fit needs."""
    if len(set(factors)) < LEAST_FACTORS:
        raise ConfigError(
            f"a sweep needs {LEAST_FACTORS} different factors at least, not {len(set(factors))}; "
            f"give more factors"
        )


def _fit(pairs: Sequence[tuple[float, float]], hidden: int) -> tuple[float, float, float]:
    """Return floor, base and slope where copies of the first factors are hidden."""
    floor = statistics.fmean(seconds for _, seconds in pairs[:hidden]) if hidden else 0.0
    rest = pairs[hidden:]
    if len({factor for factor, _ in rest}) < 2:
        held = statistics.fmean(seconds for _, seconds in rest) if rest else 0.0
        return max(floor, held), 0.0, 0.0
    fitted = statistics.linear_regression(*zip(*rest, strict=True))
    return floor, fitted.intercept, max(0.0, fitted.slope)


def _squares(
    pairs: Sequence[tuple[float, float]], floor: float, base: float, slope: float
) -> float:
    return sum((seconds - max(floor, base + slope * one)) ** 2 for one, seconds in pairs)
