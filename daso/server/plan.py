"""Decisions of the parameter server: owners of rows, when to push, staleness. Pure.

The mechanism is that of US11630994B2: gradients of a layer leave the node while backward runs for
the layers below, after every n-th layer, and n changes during backward. The bound on staleness is
that of stale-synchronous parallel training (Ho et al., NIPS 2013).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from daso.checks import NONE, check, choice, either, flag, instance_of, one_of, positive, whole
from daso.errors import ConfigError
from daso.plan.layout import Span, split
from daso.plan.options import Exchange, Wire

Mode = Literal["sharded", "local_rows"]
OptimizerState = Literal["per_rank", "shared"]
ByOwner = dict[int, tuple[int, ...]]  # layers, in order

# int2 is for deltas: three levels are too few for a gradient.
WIRES = tuple(wire for wire in get_args(Wire) if wire not in ("auto", "fp32", "int2"))
FLOOR_BYTES = 64 << 10  # smaller messages are sent only if backward hides their cost
MESSAGE_SECONDS = 1e-3  # per smaller message: twenty times the host's work on it
QUIET_LAYERS = 2  # consecutive layers without backlog until n shrinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The keywords of `daso.ParameterServer` as one checked record."""

    mode: Mode
    staleness: int | None
    push_every: int | Literal["auto"]
    scale_by_staleness: bool
    optimizer_state: OptimizerState
    wire: str | None
    clip_value: float | None = None
    clip_norm: float | None = None
    exchange: Exchange

    def __post_init__(self) -> None:
        self._check_names()
        self._check_numbers()
        if self.scale_by_staleness and (self.mode != "sharded" or self.staleness == 0):
            raise ConfigError(
                f"scale_by_staleness needs gradients that can be old: mode='sharded' and a "
                f"staleness other than 0, not mode={self.mode!r} and staleness={self.staleness}",
                code="staleness-scale-without-staleness",
            )
        if self.wire is not None and self.mode != "sharded":
            raise ConfigError(
                f"wire is for gradients, which are sent only with mode='sharded', not with mode="
                f"{self.mode!r}; leave it out",
                code="server-wire-not-sent",
            )
        if self.clip_norm is not None and self.mode != "sharded":
            raise ConfigError(
                f"clip_norm needs mode='sharded', where all rows of a gradient are applied, not "
                f"mode={self.mode!r}; use clip_value",
                code="clip-norm-not-sharded",
            )

    def _check_names(self) -> None:
        check("mode", self.mode, choice(*get_args(Mode)))
        check("optimizer_state", self.optimizer_state, choice(*get_args(OptimizerState)))
        check("wire", self.wire, choice(None, *WIRES))

    def _check_numbers(self) -> None:
        steps, layers = whole(0, of=" of steps"), whole(1, of=" of layers")
        check("staleness", self.staleness, either(steps, NONE))
        check("push_every", self.push_every, either(layers, one_of("auto")))
        check("scale_by_staleness", self.scale_by_staleness, flag())
        check("clip_value", self.clip_value, either(positive(), NONE))
        check("clip_norm", self.clip_norm, either(positive(), NONE))
        check("exchange", self.exchange, instance_of(Exchange))
        usual = Exchange()
        names = ("chunk_bytes", "timeout_seconds", "nonfinite", "keep_local")
        if self.exchange != replace(
            usual, **{name: getattr(self.exchange, name) for name in names}
        ):
            raise ConfigError(
                f"a ParameterServer adds on the host in rank order, sends layers separately and "
                f"ends with a lost rank, so that of exchange only {', '.join(names)} may be "
                f"given, not {self.exchange!r}",
                code="server-exchange-option",
            )

    def difference(self, first: str) -> ConfigError | None:
        """Return the error for a rank whose keywords differ from rank 0's, or None."""
        if repr(self) == first:
            return None
        return ConfigError(
            f"every rank must be given the same options, but there are {self!r} here and {first} "
            f"on rank 0; pass the same keywords everywhere",
            code="options-differ-between-ranks",
        )

    def contributors(self, rank: int, ranks: int) -> tuple[int, ...]:
        """Return the ranks whose gradients an owner of rows applies."""
        return tuple(range(ranks)) if self.mode == "sharded" else (rank,)

    @property
    def has_state_per_rank(self) -> bool:
        """Return whether the gradients of each rank have their own optimizer state."""
        is_asynchronous = self.mode == "sharded" and not self.is_synchronous
        return is_asynchronous and self.optimizer_state == "per_rank"

    @property
    def clips_mean_norm(self) -> bool:
        """Return whether the norm that clips is that of the mean gradient, not of each rank's."""
        return self.clip_norm is not None and self.is_synchronous

    @property
    def clips_own_norm(self) -> bool:
        """Return whether the norm that clips is that of each rank's own gradient."""
        return self.clip_norm is not None and not self.is_synchronous

    @property
    def waits_for_replies(self) -> bool:
        """Return whether a rank waits for owners to apply its own gradients."""
        return self.mode == "sharded" and self.staleness is None

    @property
    def is_synchronous(self) -> bool:
        """Return whether owners apply the mean of all ranks' gradients of a step."""
        return self.staleness == 0


def owners_of(
    nbytes: Sequence[int], rows: Sequence[int], ranks: int
) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that update each layer, in order; rows are its longest tensor's."""
    # Shares of a layer have at least FLOOR_BYTES, so that it can be pushed alone for any number of
    # ranks; large layers are assigned first, to the least loaded ranks.
    loads = [0] * ranks
    chosen: dict[int, tuple[int, ...]] = {}
    for layer in sorted(range(len(nbytes)), key=lambda layer: -nbytes[layer]):
        count = max(1, min(ranks, nbytes[layer] // FLOOR_BYTES, rows[layer]))
        owners = tuple(sorted(sorted(range(ranks), key=loads.__getitem__)[:count]))
        for owner in owners:
            loads[owner] += -(-nbytes[layer] // count)
        chosen[layer] = owners
    return tuple(chosen[layer] for layer in range(len(nbytes)))


def rows_of(rows: int, owners: Sequence[int]) -> dict[int, Span]:
    """Return the rows of a tensor that each owner of its layer updates."""
    return dict(zip(owners, split(rows, len(owners)), strict=True))


def is_fresh(clock: float, step: int, staleness: int | None) -> bool:
    """Return whether rows may be read for a step."""
    return staleness is None or clock >= step - staleness


def age(version: int, read: int, ranks: int) -> float:
    """Return a gradient's age, in steps of all ranks."""
    return (version - read) / ranks


# --- when to push gradients -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """Number of finished layers after which gradients are pushed."""

    layers: int  # that number (n)
    most: int  # layers of the model
    fixed: bool  # whether n is constant
    quiet: int = 0  # consecutive layers without a backlog


def first_pace(every: int | Literal["auto"], layers: int) -> Pace:
    """Return the pace of the first step of a model with `layers` layers."""
    if every == "auto":
        return Pace(1, layers, fixed=False)
    return Pace(min(every, layers), layers, fixed=True)


def next_pace(pace: Pace, *, backlog_bytes: int, layer_bytes: int) -> Pace:
    """Return the pace after a layer: slower if more than one layer waits, faster if none does."""
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
    """State of backward at the end of a layer."""

    layers: int  # finished since the last push, including this one
    quiet_seconds: float = 0.0  # since the last message below the floor
    remaining_seconds: float = 0.0  # until backward ends, by the last step; 0 in the first


def leaving(pace: Pace, moment: Moment, nbytes: Mapping[int, int]) -> list[int]:
    """Return the owners to push gradients to now, from the bytes waiting for each owner."""
    # Messages below the floor are sent if the rest of backward hides them, and not so often that
    # they keep the host busy.
    if moment.layers < pace.layers:
        return []
    small = [owner for owner, waiting in nbytes.items() if waiting < FLOOR_BYTES]
    room = min(moment.quiet_seconds, moment.remaining_seconds)
    if pace.fixed or len(small) * MESSAGE_SECONDS <= room:
        return list(nbytes)
    return [owner for owner in nbytes if owner not in small]


class PushScheduler:
    """Groups finished layers into pushes, per owner."""

    def __init__(
        self,
        owners: Sequence[Sequence[int]],  # by layer: the ranks that receive its gradients
        nbytes: Callable[[int, int], int],  # (owner, layer): bytes of the owner's rows
        pace: Pace,
    ) -> None:
        self.pace = pace
        self._owners, self._nbytes = owners, nbytes
        self._largest_share = [
            max((nbytes(owner, layer) for owner in ranks), default=0)
            for layer, ranks in enumerate(owners)
        ]
        self._remaining: Mapping[
            int, float
        ] = {}  # seconds of backward after a layer, in the last step
        self._small_left_at = -math.inf  # time of the last message below the floor
        self._finished_at: dict[int, float] = {}  # by layer of this step, in order
        self._waiting: dict[int, list[int]] = {}  # by owner: layers to push
        self._layers = 0  # finished since the last push

    @property
    def has_finished_layers(self) -> bool:
        """Return whether a layer of this step is finished."""
        return bool(self._finished_at)

    def finish(self, layer: int, *, backlog_bytes: int, now: float) -> ByOwner:
        """Record that a layer is finished; return the layers to push now, by owner."""
        self._finished_at[layer] = now
        self._layers += 1
        for owner in self._owners[layer]:
            self._waiting.setdefault(owner, []).append(layer)
        share = self._largest_share[layer]
        self.pace = next_pace(self.pace, backlog_bytes=backlog_bytes, layer_bytes=share)
        quiet, remaining = now - self._small_left_at, self._remaining.get(layer, 0.0)
        nbytes = {owner: self._bytes_to(owner) for owner in self._waiting}
        chosen = leaving(self.pace, Moment(self._layers, quiet, remaining), nbytes)
        if any(nbytes[owner] < FLOOR_BYTES for owner in chosen):
            self._small_left_at = now
        return self._leave(chosen)

    def _bytes_to(self, owner: int) -> int:
        return sum(self._nbytes(owner, layer) for layer in self._waiting[owner])

    def _leave(self, owners: Sequence[int]) -> ByOwner:
        if owners:
            self._layers = 0
        return {owner: tuple(sorted(self._waiting.pop(owner))) for owner in owners}

    def end(self) -> ByOwner:
        """End a step; return all layers not pushed yet, including those without a gradient."""
        for layer, owners in enumerate(self._owners):
            if layer not in self._finished_at:
                for owner in owners:
                    self._waiting.setdefault(owner, []).append(layer)
        ended = max(self._finished_at.values(), default=0.0)
        self._remaining = {layer: ended - at for layer, at in self._finished_at.items()}
        rest = self._leave(sorted(self._waiting))
        self._finished_at, self._layers = {}, 0
        return rest


# --- events of logs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """A rank loaded a layer's rows before it computed with them."""

    step: int
    layer: int
    versions: tuple[int, ...]  # by owner of the layer


@dataclass(frozen=True, slots=True)
class Send:
    """A rank pushed gradients of finished layers to one owner."""

    step: int
    owner: int
    layers: tuple[int, ...]
    every: int  # n at that time
    values: tuple[Mapping[str, Any], ...]  # of each parameter group, including learning rates


@dataclass(frozen=True, slots=True)
class Apply:
    """An owner created a new version of its rows of a layer."""

    layer: int
    version: int
    of: tuple[tuple[int, int], ...]  # rank and step of each gradient, in the order of addition
    digest: str  # of the rows afterwards
    clip: float  # factor of the gradients, from the last step's norm


@dataclass(frozen=True, slots=True)
class Log:
    """Events of one rank in order; with all ranks' logs, one process can replay the training."""

    rank: int
    plan: Plan
    meetings: tuple[int, ...]  # steps at each synchronization
    events: tuple[Read | Send | Apply, ...]
