"""The few numbers that ride with every exchange, so that all ranks take the same branch.

The header is reduced by an elementwise maximum over the world. A number that needs a minimum is
carried as its negative. Beside it a tally is reduced by a sum: of whole numbers, so that the sum is
exact and the same on every rank, whatever order MPI adds in.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["Header", "Tally", "culprit", "decode_culprit", "decode_slow_rank", "slow_rank"]

CULPRITS = 2**53  # float64 holds whole numbers exactly up to here


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says of its side; after the reduction, what the world agreed on."""

    nonfinite: float = 0.0  # 0, or `culprit(...)` of the first value that is not finite
    layout: float = 0.0  # digest of the layout
    minus_layout: float = 0.0
    batch: float = 0.0  # batches counted when this was sent
    minus_batch: float = 0.0
    minus_step_seconds: float = -math.inf  # step to step without waiting: the fastest rank's
    minus_exchange_seconds: float = -math.inf  # of the exchange before: the rank's that came last
    lr: float = 0.0  # largest learning rate of the rank's groups
    minus_lr: float = 0.0
    # Of a core that training wanted, for the exchange before: the rank's that lost most.
    own_seconds: float = 0.0
    minus_exposed_seconds: float = -math.inf  # of a synchronous step: the rank's that lost least
    # Of exchanges of small tensors alone since: see `small_seconds`.
    small_own_seconds: float = 0.0  # the rank's that lost most
    minus_small_exposed_seconds: float = -math.inf  # the rank's that waited least
    clipping: float = 0.0  # largest factor by which clipping shortened steps; 0: not seen
    slowest: float = 0.0  # 0, or `slow_rank(...)` of the rank whose steps take longest
    written: float = 0.0  # 1 where the program wrote other parameters between steps

    def encode(self) -> list[float]:
        """Return the numbers in a fixed order."""
        return [float(getattr(self, name)) for name in _NAMES]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> "Header":
        """Return the header whose numbers these are."""
        return cls(*(float(number) for number in numbers))

    @classmethod
    def width(cls) -> int:
        """How many numbers a header has."""
        return len(_NAMES)

    @property
    def step_seconds(self) -> float:
        """Seconds from step to step of the fastest rank; 0 if nobody measured."""
        return _finite(-self.minus_step_seconds)

    @property
    def exchange_seconds(self) -> float:
        """Seconds of the exchange before, of the rank that came last; 0 if nobody measured."""
        return _finite(-self.minus_exchange_seconds)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that averages took from a synchronous step of each rank; 0: not measured."""
        return _finite(-self.minus_exposed_seconds)

    @property
    def small_seconds(self) -> float:
        """Seconds an exchange of small tensors took from training; 0 if nobody measured."""
        return self.small_own_seconds + _finite(-self.minus_small_exposed_seconds)

    @property
    def same_lr(self) -> bool:
        """Whether the largest learning rate is the same on every rank."""
        return self.lr == -self.minus_lr

    @property
    def aligned(self) -> bool:
        """Whether all ranks sent the same layout after the same number of batches."""
        return self.layout == -self.minus_layout and self.batch == -self.minus_batch


_NAMES = tuple(one.name for one in fields(Header))


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over all ranks, relative to a size that all ranks know, in whole units."""

    distance: float = 0.0  # squared, of this rank's part from the mean of all nodes; in `STEPS`
    norm: float = 0.0  # squared, of this rank's part of the reference; in `SIZES`
    moved: float = 0.0  # squared length of this rank's part of the mean delta; in `STEPS`

    @classmethod
    def measured(cls, distance: float, norm: float, moved: float, size: float) -> "Tally":
        """Return a rank's share."""
        return cls(
            _share(distance, size, STEPS), _share(norm, size, SIZES), _share(moved, size, STEPS)
        )

    def __add__(self, other: "Tally") -> "Tally":
        """Return the sums over the ranks of both."""
        pairs = zip(self.encode(), other.encode(), strict=True)
        return Tally(*(mine + theirs for mine, theirs in pairs))

    def encode(self) -> list[float]:
        """Return the numbers in a fixed order."""
        return [self.distance, self.norm, self.moved]

    def drift(self, *, nodes: int, batches: int) -> float:
        """Return the mean square drift of one batch, relative to the reference's norm.

        The distance of a node from the mean of all is what counts (consensus distance): of two
        nodes with the same noise its square is half of what it is of many.
        """
        if nodes < 2 or batches < 1 or self.norm <= 0:
            return 0.0
        return max(self.distance, 0.5) * (SIZES / STEPS) / batches / self.norm


SIZES = 2.0**30  # units in what is as large as the parameters
STEPS = 2.0**36  # units in what steps change, a few millionths of that and more
MOST_SHARES = 2.0**42  # of one rank: 2048 ranks' sum is exact


def _share(value: float, size: float, units: float) -> float:
    if not (value >= 0 and 0 < size < math.inf):  # NaN too: nothing was measured
        return 0.0
    return float(round(min(value / size * units, MOST_SHARES)))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def culprit(element: int, rank: int, size: int) -> float:
    """Pack which element of the flat row is not finite, and on which world rank, into a number.

    Earlier elements give larger numbers, so that the maximum over ranks names the first.
    """
    return float(CULPRITS - (element * size + rank))


def decode_culprit(code: float, size: int) -> tuple[int, int]:
    """Return (element, world rank) of a number made by `culprit`."""
    return divmod(CULPRITS - int(code), size)


def slow_rank(seconds: float, rank: int, size: int) -> float:
    """Pack the seconds of a step, without waits for other nodes, and the world rank."""
    return float(min(round(seconds * 1e6), CULPRITS // size - 1) * size + rank)


def decode_slow_rank(code: float, size: int) -> tuple[float, int]:
    """Return (seconds, world rank) of a number made by `slow_rank`."""
    microseconds, rank = divmod(int(code), size)
    return microseconds * 1e-6, rank
