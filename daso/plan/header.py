"""The few numbers that ride with every exchange, so that all ranks take the same branch.

The header is reduced by an elementwise maximum over the world. A number that needs a minimum is
carried as its negative beside it.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

__all__ = ["Header", "culprit", "decode_culprit"]

CULPRITS = 2**53  # float64 holds whole numbers exactly up to here


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank says of its side; after the reduction, what the world agreed on."""

    nonfinite: float = 0.0  # 0, or `culprit(...)` of the first value that is not finite
    layout: float = 0.0  # digest of the layout
    minus_layout: float = 0.0
    batch: float = 0.0  # batches counted when this was sent
    minus_batch: float = 0.0
    step_seconds: float = 0.0  # time between the last two steps; the slowest rank's after reduction
    exchange_seconds: float = 0.0  # duration of the exchange before this one

    def encode(self) -> list[float]:
        """Return the numbers in a fixed order."""
        return [float(number) for number in astuple(self)]

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> "Header":
        """Return the header whose numbers these are."""
        return cls(*(float(number) for number in numbers))

    @classmethod
    def width(cls) -> int:
        """How many numbers a header has."""
        return len(fields(cls))

    @property
    def aligned(self) -> bool:
        """Whether all ranks sent the same layout after the same number of batches."""
        return self.layout == -self.minus_layout and self.batch == -self.minus_batch


def culprit(element: int, rank: int, size: int) -> float:
    """Pack which element of the flat row is not finite, and on which world rank, into a number.

    Earlier elements give larger numbers, so that the maximum over ranks names the first.

    Args:
        element: Element of the flat row.
        rank: World rank.
        size: World size.

    Returns:
        A number above 0 and exact, as long as there are fewer than 2**53 pairs.
    """
    return float(CULPRITS - (element * size + rank))


def decode_culprit(code: float, size: int) -> tuple[int, int]:
    """Return (element, world rank) of a number made by `culprit`."""
    return divmod(CULPRITS - int(code), size)
