"""What an eager parameter server decides: whose rows are whose, when they leave, how old they are.

The mechanism is that of US11630994B2: parameters of a layer leave the node while backward goes on
for the layers below, after every n-th layer, and n changes while backward runs. A bound on how far
ranks may be apart is that of stale-synchronous parallel training (Ho et al., NIPS 2013).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from daso.checks import NONE, check, choice, either, flag, instance_of, one_of, whole
from daso.errors import ConfigError
from daso.plan.layout import Span, split
from daso.plan.options import Exchange
from daso.plan.wires import Wire

__all__ = [
    "FLOOR_BYTES",
    "Apply",
    "Log",
    "Mode",
    "Pace",
    "Plan",
    "Read",
    "Send",
    "Transport",
    "age",
    "first_pace",
    "is_fresh",
    "leaves",
    "next_pace",
    "rows_of",
]

Mode = Literal["sharded", "local_rows", "replicated"]
Transport = Literal["messages", "windows"]

WIRES = tuple(wire for wire in get_args(Wire) if wire not in ("auto", "fp32"))
FLOOR_BYTES = 64 << 10  # a message of less is not worth its headers and polls
QUIET_LAYERS = 2  # that found nothing on its way, until n shrinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The server's keywords as one record, checked when made.

    Args:
        mode: Who updates what; see `daso.ParameterServer`.
        staleness: Steps that a rank may be ahead of the slowest; None: any number.
        push_every: Layers whose gradients leave together, or "auto".
        scale_by_staleness: Divide the learning rate of a gradient by one more than its age.
        wire: How gradients cross; None: as they are.
        transport: How packets cross.
        exchange: How large packets are, how long to wait, and what happens to NaN.
    """

    mode: Mode
    staleness: int | None
    push_every: int | Literal["auto"]
    scale_by_staleness: bool
    wire: str | None
    transport: Transport
    exchange: Exchange

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        if self.scale_by_staleness and (self.mode != "sharded" or self.staleness == 0):
            raise ConfigError(
                f"scale_by_staleness needs gradients that can be old: mode='sharded' and a "
                f"staleness other than 0, not mode={self.mode!r} and staleness={self.staleness}"
            )
        if self.wire is not None and self.mode != "sharded":
            raise ConfigError(
                f"wire is for gradients, which cross with mode='sharded' alone, not with mode="
                f"{self.mode!r}; leave it out"
            )

    def _check_names(self) -> None:
        check("mode", self.mode, choice(*get_args(Mode)))
        check("transport", self.transport, choice(*get_args(Transport)))
        check("wire", self.wire, choice(None, *WIRES))

    def _check_numbers(self) -> None:
        steps, layers = whole(0, of=" of steps"), whole(1, of=" of layers")
        check("staleness", self.staleness, either(steps, NONE))
        check("push_every", self.push_every, either(layers, one_of("auto")))
        check("scale_by_staleness", self.scale_by_staleness, flag())
        check("exchange", self.exchange, instance_of(Exchange))
        unused = Exchange(fragments=self.exchange.fragments, gpu_direct=self.exchange.gpu_direct)
        if self.exchange.algorithm == "mpi" or unused != Exchange():
            raise ConfigError(
                f"a ParameterServer adds on the host in rank order and sends every layer by "
                f"itself, so algorithm, fragments and gpu_direct of exchange must be left out, not "
                f"{self.exchange!r}"
            )

    @property
    def whole(self) -> bool:
        """Whether every rank updates all rows."""
        return self.mode == "replicated"

    def contributors(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks whose gradients an owner of rows takes in."""
        return tuple(range(ranks)) if self.mode == "sharded" else (rank,)

    @property
    def together(self) -> bool:
        """Whether an owner waits for all gradients of a step, and takes their mean."""
        return self.staleness == 0


def rows_of(rows: int, ranks: int, *, whole: bool) -> tuple[Span, ...]:
    """Return which rows of a tensor each rank updates."""
    return (Span(0, rows),) * ranks if whole else split(rows, ranks)


def is_fresh(clock: float, step: int, staleness: int | None) -> bool:
    """Return whether rows may be read for a step."""
    return staleness is None or clock >= step - staleness


def age(version: int, read: int, ranks: int) -> float:
    """Return how old a gradient is, in steps of all ranks."""
    return (version - read) / ranks


# --- when gradients leave -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """After how many finished layers gradients leave.

    Args:
        layers: How many (n).
        most: Layers of the model.
        fixed: It stays.
        quiet: Layers in a row that found nothing on its way.
    """

    layers: int
    most: int
    fixed: bool
    quiet: int = 0


def first_pace(every: int | Literal["auto"], layers: int) -> Pace:
    """Return the pace of the first step of a model of so many layers."""
    if every == "auto":
        return Pace(1, layers, fixed=False)
    return Pace(min(every, layers), layers, fixed=True)


def next_pace(pace: Pace, *, backlog_bytes: int, layer_bytes: int) -> Pace:
    """Return the pace after a layer: slower while more than one waits, faster while none does."""
    if pace.fixed:
        return pace
    if backlog_bytes > layer_bytes:
        return replace(pace, layers=min(2 * pace.layers, pace.most), quiet=0)
    if backlog_bytes:
        return replace(pace, quiet=0)
    if pace.quiet + 1 < QUIET_LAYERS:
        return replace(pace, quiet=pace.quiet + 1)
    return replace(pace, layers=max(1, pace.layers // 2), quiet=0)


def leaves(pace: Pace, *, layers: int, nbytes: int) -> bool:
    """Return whether finished layers leave now."""
    return layers >= pace.layers and (pace.fixed or nbytes >= FLOOR_BYTES)


# --- what is logged -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A rank took up a layer's rows before it computed with them."""

    step: int
    layer: int
    versions: tuple[int, ...]  # of each owner


@dataclass(frozen=True, slots=True)
class Send:
    """A rank handed over gradients of finished layers."""

    step: int
    layers: tuple[int, ...]
    every: int  # n at that moment
    values: tuple[Mapping[str, Any], ...]  # of each parameter group, as learning rates were


@dataclass(frozen=True, slots=True)
class Apply:
    """An owner made a new version of its rows of a layer."""

    layer: int
    version: int
    of: tuple[tuple[int, int], ...]  # the gradients: rank and step of each, in the order of adding
    digest: str  # of the rows afterwards


@dataclass(frozen=True, slots=True)
class Log:
    """What one rank did, in order; of all ranks together a single process replays the training."""

    rank: int
    plan: Plan
    meetings: tuple[int, ...]  # steps that it had taken at each meeting of all ranks
    events: tuple[Read | Send | Apply, ...]
