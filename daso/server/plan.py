"""What an eager parameter server decides: who owns which rows, when they leave, how old they are.

The mechanism is that of US11630994B2: parameters of a layer leave the node while backward goes on
for the layers below, after every n-th layer, and n changes while backward runs. A bound on how far
ranks may be apart is that of stale-synchronous parallel training (Ho et al., NIPS 2013).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from daso.checks import NONE, check, choice, either, flag, instance_of, one_of, whole
from daso.errors import ConfigError
from daso.plan.layout import Span, split
from daso.plan.options import Exchange, Wire

__all__ = [
    "FLOOR_BYTES",
    "MESSAGE_SECONDS",
    "Apply",
    "Log",
    "Mode",
    "Moment",
    "OptimizerState",
    "Pace",
    "Plan",
    "Read",
    "Send",
    "Transport",
    "age",
    "first_pace",
    "is_fresh",
    "leaving",
    "next_pace",
    "owners_of",
    "rows_of",
]

Mode = Literal["sharded", "local_rows", "replicated"]
Transport = Literal["messages", "windows"]
OptimizerState = Literal["per_rank", "shared"]

# int2 is for deltas: three levels are too few for a gradient.
WIRES = tuple(wire for wire in get_args(Wire) if wire not in ("auto", "fp32", "int2"))
FLOOR_BYTES = 64 << 10  # a message of less is worth its headers and polls only where time is left
MESSAGE_SECONDS = 1e-3  # for each message of less: twenty times what its host works on it
QUIET_LAYERS = 2  # that found nothing on its way, until n shrinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The server's keywords as one record, checked when made.

    Args:
        mode: Who updates what; see `daso.ParameterServer`.
        staleness: Steps that a rank may be ahead of the slowest; None: any number.
        push_every: Layers whose gradients leave together, or "auto".
        scale_by_staleness: Divide the learning rate of a gradient by one more than its age.
        optimizer_state: Whether each rank's gradients have a state (momentum) of their own.
        wire: How gradients cross; None: as they are.
        transport: How packets cross.
        exchange: How large packets are, how long to wait, and what happens to NaN.
    """

    mode: Mode
    staleness: int | None
    push_every: int | Literal["auto"]
    scale_by_staleness: bool
    optimizer_state: OptimizerState
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
        check("optimizer_state", self.optimizer_state, choice(*get_args(OptimizerState)))
        check("wire", self.wire, choice(None, *WIRES))

    def _check_numbers(self) -> None:
        steps, layers = whole(0, of=" of steps"), whole(1, of=" of layers")
        check("staleness", self.staleness, either(steps, NONE))
        check("push_every", self.push_every, either(layers, one_of("auto")))
        check("scale_by_staleness", self.scale_by_staleness, flag())
        check("exchange", self.exchange, instance_of(Exchange))
        usual = Exchange()
        names = ("chunk_bytes", "timeout_seconds", "nonfinite", "keep_local")
        if self.exchange != replace(
            usual, **{name: getattr(self.exchange, name) for name in names}
        ):
            raise ConfigError(
                f"a ParameterServer adds on the host in rank order, sends every layer by itself "
                f"and ends with a lost rank, so that of exchange only {', '.join(names)} may be "
                f"given, not {self.exchange!r}"
            )

    @property
    def whole(self) -> bool:
        """Whether every rank updates all rows."""
        return self.mode == "replicated"

    def contributors(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks whose gradients an owner of rows takes in."""
        return tuple(range(ranks)) if self.mode == "sharded" else (rank,)

    @property
    def per_rank(self) -> bool:
        """Whether gradients of several ranks are taken in, each with a state of its own."""
        alone = self.mode == "sharded" and not self.together
        return alone and self.optimizer_state == "per_rank"

    @property
    def answered(self) -> bool:
        """Whether a rank waits for what owners make of its own gradients, not for other ranks."""
        return self.mode == "sharded" and self.staleness is None

    @property
    def together(self) -> bool:
        """Whether an owner waits for all gradients of a step, and takes their mean."""
        return self.staleness == 0


def owners_of(
    nbytes: Sequence[int], rows: Sequence[int], ranks: int, *, whole: bool
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that update each layer, in order.

    A layer has no more owners than make shares of `FLOOR_BYTES`, so that it can leave by itself
    however many ranks there are; large layers choose first, and those with least to do own.

    Args:
        nbytes: Of each layer.
        rows: Of each layer's longest tensor.
        ranks: World size.
        whole: Every rank updates all rows.
    """
    if whole:
        return (tuple(range(ranks)),) * len(nbytes)
    loads = [0] * ranks
    chosen: dict[int, tuple[int, ...]] = {}
    for layer in sorted(range(len(nbytes)), key=lambda layer: -nbytes[layer]):
        count = max(1, min(ranks, nbytes[layer] // FLOOR_BYTES, rows[layer]))
        owners = tuple(sorted(sorted(range(ranks), key=loads.__getitem__)[:count]))
        for owner in owners:
            loads[owner] += -(-nbytes[layer] // count)
        chosen[layer] = owners
    return tuple(chosen[layer] for layer in range(len(nbytes)))


def rows_of(rows: int, owners: Sequence[int], *, whole: bool) -> dict[int, Span]:
    """Return which rows of a tensor each owner of its layer updates."""
    spans = (Span(0, rows),) * len(owners) if whole else split(rows, len(owners))
    return dict(zip(owners, spans, strict=True))


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


@dataclass(frozen=True, slots=True)
class Moment:
    """When a layer is finished.

    Args:
        layers: Finished since gradients left, this one too.
        quiet_seconds: Since a message below the floor left.
        remaining_seconds: Until backward ends, as in the last step; 0 in the first.
    """

    layers: int
    quiet_seconds: float = 0.0
    remaining_seconds: float = 0.0


def leaving(pace: Pace, moment: Moment, nbytes: Mapping[int, int]) -> list[int]:
    """Return the owners for whom gradients leave now.

    What is below the floor leaves where backward goes on for long enough that it is hidden, and
    not so often that its messages keep the host busy.

    Args:
        pace: After how many layers.
        moment: When this is.
        nbytes: That wait for each owner.
    """
    if moment.layers < pace.layers:
        return []
    small = [owner for owner, waiting in nbytes.items() if waiting < FLOOR_BYTES]
    room = min(moment.quiet_seconds, moment.remaining_seconds)
    if pace.fixed or len(small) * MESSAGE_SECONDS <= room:
        return list(nbytes)
    return [owner for owner in nbytes if owner not in small]


# --- what is logged -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A rank took up a layer's rows before it computed with them."""

    step: int
    layer: int
    versions: tuple[int, ...]  # of each owner of the layer


@dataclass(frozen=True, slots=True)
class Send:
    """A rank handed over gradients of finished layers to one owner."""

    step: int
    owner: int
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
