"""Header of every exchange: a few numbers that let all ranks take the same decisions.

The header is reduced by an elementwise maximum over the world. A number that needs a minimum is
stored as its negative.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from daso.errors import ExchangeError
from daso.plan.schedule import Measurements

MAX_EXACT = 2**53  # float64 represents integers exactly up to here


@dataclass(frozen=True, slots=True)
class Header:
    """Numbers of one rank; after the reduction, the numbers that all ranks agreed on."""

    nonfinite: float = 0.0  # 0, or `culprit(...)` of the first value that is not finite
    layout: float = 0.0  # digest of the layout
    minus_layout: float = 0.0
    batch: float = 0.0  # batches counted when this was sent
    minus_batch: float = 0.0
    minus_step_seconds: float = -math.inf  # from step to step without waiting: fastest rank
    minus_exchange_seconds: float = -math.inf  # of the previous exchange: slowest rank
    lr: float = 0.0  # largest learning rate of the rank's groups
    minus_lr: float = 0.0
    # Core time that the previous exchange took from training: the rank that lost most.
    own_seconds: float = 0.0
    minus_exposed_seconds: float = -math.inf  # of a synchronous step: the rank that lost least
    # Of exchanges of small tensors alone since then; see `small_seconds`.
    small_own_seconds: float = 0.0  # the rank that lost most
    minus_small_exposed_seconds: float = -math.inf  # the rank that waited least
    clipping: float = 0.0  # largest factor by which clipping shortened steps; 0: no clipping
    slowest: float = 0.0  # 0, or `slow_rank(...)` of the rank with the longest steps
    written: float = 0.0  # 1 if the program changed parameters between steps
    # For each lane, the fingerprint of its reference and minus that; -inf from other lanes.
    references: tuple[float, ...] = ()

    @classmethod
    def of(cls, layout: float, batch: int, groups: Iterable[Mapping[str, Any]]) -> "Header":
        """Return a header with the numbers that ranks compare at every exchange.

        Args:
            layout: Digest of the layout.
            batch: Number of batches.
            groups: Parameter groups of the inner optimizer.
        """
        lr = largest_rate(groups)
        return cls(
            layout=layout,
            minus_layout=-layout,
            batch=batch,
            minus_batch=-batch,
            lr=lr,
            minus_lr=-lr,
        )

    def encode(self) -> list[float]:
        """Return the numbers in a fixed order."""
        return [float(getattr(self, name)) for name in _NAMES] + list(self.references)

    @classmethod
    def decode(cls, numbers: Sequence[float]) -> "Header":
        """Return the header from its numbers in that order."""
        values: dict[str, Any] = dict(zip(_NAMES, map(float, numbers), strict=False))
        return cls(**values, references=tuple(map(float, numbers[len(_NAMES) :])))

    @classmethod
    def width(cls, lanes: int) -> int:
        """Return the number of numbers in a header."""
        return len(_NAMES) + 2 * lanes

    def with_reference(self, fingerprint: int, lane: int | None, lanes: int) -> "Header":
        """Return the header with the fingerprint of this rank's part of the reference.

        Args:
            fingerprint: Of the rows that are exchanged.
            lane: This rank's lane; None: it has no part.
            lanes: Number of lanes.
        """
        references = [-math.inf] * (2 * lanes)
        if lane is not None:
            references[2 * lane : 2 * lane + 2] = float(fingerprint), -float(fingerprint)
        return replace(self, references=tuple(references))

    @property
    def step_seconds(self) -> float:
        """Seconds from step to step of the fastest rank; 0: not measured."""
        return _finite(-self.minus_step_seconds)

    @property
    def exchange_seconds(self) -> float:
        """Seconds of the previous exchange on the slowest rank; 0: not measured."""
        return _finite(-self.minus_exchange_seconds)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a synchronous step that every rank lost to averages; 0: not measured."""
        return _finite(-self.minus_exposed_seconds)

    @property
    def small_seconds(self) -> float:
        """Training seconds lost to an exchange of small tensors; 0: not measured."""
        return self.small_own_seconds + _finite(-self.minus_small_exposed_seconds)

    def measurements(self) -> Measurements:
        """Return the measurements of an exchange."""
        return Measurements(
            self.step_seconds,
            self.exchange_seconds,
            self.lr,
            own_seconds=self.own_seconds,
            small_seconds=self.small_seconds,
        )

    @property
    def same_lr(self) -> bool:
        """True if the largest learning rate is the same on every rank."""
        return self.lr == -self.minus_lr

    @property
    def aligned(self) -> bool:
        """True if all ranks sent the same layout after the same number of batches."""
        return self.layout == -self.minus_layout and self.batch == -self.minus_batch

    @property
    def same_references(self) -> bool:
        """True if all nodes hold the same reference."""
        pairs = zip(self.references[::2], self.references[1::2], strict=True)
        return all(most == -minus_least for most, minus_least in pairs)

    def check_aligned(self) -> None:
        """Raise on every rank unless all ranks have taken the same number of steps."""
        if not self.aligned:
            raise ExchangeError(
                f"ranks must exchange the same parameters after the same number of steps, but they "
                f"were at steps {-self.minus_batch:.0f} to {self.batch:.0f}; give every rank the "
                f"same number of batches and let every rank call step() for each",
                code="exchanges-out-of-step",
            )


_NAMES = tuple(entry.name for entry in fields(Header) if entry.name != "references")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0


def culprit(element: int, rank: int, size: int) -> float:
    """Encode the index of a non-finite element of the flat buffer, and the world rank, as a number.

    Earlier elements give larger numbers, so that the maximum over ranks names the first.
    """
    return float(MAX_EXACT - (element * size + rank))


def decode_culprit(code: float, size: int) -> tuple[int, int]:
    """Return (element, world rank) from a number made by `culprit`."""
    return divmod(MAX_EXACT - int(code), size)


def slow_rank(seconds: float, rank: int, size: int) -> float:
    """Encode the seconds of a step, without waits for other nodes, and the world rank."""
    return float(min(round(seconds * 1e6), MAX_EXACT // size - 1) * size + rank)


def decode_slow_rank(code: float, size: int) -> tuple[float, int]:
    """Return (seconds, world rank) from a number made by `slow_rank`."""
    microseconds, rank = divmod(int(code), size)
    return microseconds * 1e-6, rank


def largest_rate(groups: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest learning rate of parameter groups; 0 without one."""
    return max([float(group.get("lr") or 0.0) for group in groups])
