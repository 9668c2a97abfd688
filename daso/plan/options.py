"""The option records of the optimizer: frozen, checked when made."""

from dataclasses import dataclass
from typing import Literal, get_args

from daso.errors import ConfigError
from daso.plan.merge import MERGES

__all__ = ["Exchange", "Gradients", "Settings", "Wire"]

Reduce = Literal["auto", "iallreduce", "ordered"]
Wire = Literal["fp32", "bf16", "fp16", "int8", "int4"]
NonFinite = Literal["drop", "raise"]

MiB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """How nodes exchange.

    Args:
        reduce: ``"ordered"`` adds in node order, in two phases, bit for bit reproducible;
            ``"iallreduce"`` leaves the order to MPI, for the fp32 wire alone; ``"auto"`` takes
            iallreduce where the wire is fp32 and ordered elsewhere.
        chunk_bytes: Size of the pieces an exchange is cut into, in bytes of the wire.
        nonfinite: What happens when a node's delta holds NaN or infinity. ``"drop"``: all ranks
            drop that exchange, say so, and the node starts again from the reference; the third
            drop without two good exchanges in a row between raises. ``"raise"``: all ranks raise
            at once.
        stall_seconds: How long a rank waits for another before it raises and names who is late.
    """

    reduce: Reduce = "auto"
    chunk_bytes: int = 4 * MiB
    nonfinite: NonFinite = "drop"
    stall_seconds: float = 300.0

    def __post_init__(self) -> None:
        _check_choice("Exchange.reduce", self.reduce, get_args(Reduce))
        _check_choice("Exchange.nonfinite", self.nonfinite, get_args(NonFinite))
        _check_bytes("Exchange.chunk_bytes", self.chunk_bytes)
        _check_positive("Exchange.stall_seconds", self.stall_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """How gradients are averaged inside a node.

    Args:
        bucket_bytes: Size from which a bucket of gradients counts as full and is averaged while
            backward goes on, in bytes.
    """

    bucket_bytes: int = 1 * MiB

    def __post_init__(self) -> None:
        _check_bytes("Gradients.bucket_bytes", self.bucket_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to exchange: the optimizer's keywords as one record.

    Args:
        wire: What crosses between nodes for deltas: ``"fp32"``, ``"bf16"``, ``"fp16"``,
            or ``"int8"`` and ``"int4"`` with a scale per 128 numbers.
        merge: How a mean that is some batches old is taken in; see `daso.plan.merge`.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.
    """

    wire: str
    merge: str
    exchange: Exchange
    gradients: Gradients

    def __post_init__(self) -> None:
        _check_choice("wire", self.wire, get_args(Wire))
        _check_choice("merge", self.merge, MERGES)
        if self.exchange.reduce == "iallreduce" and self.wire != "fp32":
            raise ConfigError(
                f"Exchange.reduce='iallreduce' needs wire='fp32' (MPI adds 16-bit numbers wrongly "
                f"or not at all), not {self.wire!r}; use reduce='auto'"
            )

    @property
    def delta_reduce(self) -> Reduce:
        """How deltas are added between nodes, decided."""
        if self.exchange.reduce != "auto":
            return self.exchange.reduce
        return "iallreduce" if self.wire == "fp32" else "ordered"

    @property
    def gradient_reduce(self) -> Reduce:
        """How gradients, which cross in full precision, are added between nodes, decided."""
        return "ordered" if self.exchange.reduce == "ordered" else "iallreduce"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_bytes(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of bytes of at least 1, not {value!r}")


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} must be a positive number, not {value!r}")
