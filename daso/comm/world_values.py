"""Collectives for a program's own loop: reduced metrics, a barrier, and printing on one rank."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeVar, get_args

import torch

from daso.checks import format_value
from daso.comm import control
from daso.comm.rank_info import Ranks
from daso.errors import ConfigError

Value = TypeVar("Value", float, torch.Tensor)
Operation = Literal["mean", "sum", "min", "max"]
REDUCE: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.sum(0) / len(rows),
    "sum": lambda rows: rows.sum(0),
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}


class World(Ranks, Protocol):
    """A `Topology`, as far as these functions use it."""

    @property
    def rank(self) -> int:
        """World rank."""
        ...

    @property
    def is_spare(self) -> bool:
        """True while this rank waits to replace a lost one."""
        ...


def _begin(topology: World, operation: str) -> None:
    """Refuse spare ranks, and check that all ranks do the same. Collective; blocking."""
    if topology.is_spare:
        raise ConfigError(
            f"a spare rank must not {operation} before it replaces a lost one; wrap an "
            f"optimizer first, which waits for that",
            code="spare-must-wait",
        )
    control.rendezvous(topology, operation, control.STALL_SECONDS)


def all_reduce(topology: World, value: Value, op: Operation = "mean") -> Value:
    """Return the mean, sum, minimum or maximum of all ranks' values, the same on every rank.

    For metrics: each rank receives all ranks' values, and reduces them in rank order.

    Args:
        topology: The ranks.
        value: A number, computed with in double precision, or a dense tensor of the same shape
            and type on all ranks; it is not changed.
        op: "mean", "sum", "min" or "max".

    Returns:
        A number, or a tensor on the device of this rank's value. The mean of integers is a float.

    Raises:
        ConfigError: A value is neither, or ranks pass different shapes, types or operations.

    Collective over the world; blocking.
    """
    _begin(topology, "reduce a value")
    problem, own = None, value
    if op not in get_args(Operation):
        problem = ConfigError(
            f"op must be one of {', '.join(get_args(Operation))}, not {format_value(op)}",
            code="unknown-reduction",
        )
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu().clone()  # pickling a view would send its whole storage
    elif isinstance(value, bool) or not isinstance(value, int | float):
        problem = ConfigError(
            f"a value must be a number or a tensor, not {format_value(value)}; pass .item()",
            code="value-not-reducible",
        )
        own = 0.0
    entries = control.gather(topology, (problem, op, own))
    control.raise_first([problem for problem, *_ in entries])
    kinds = [f"the {name} of {_kind(entry)}" for _, name, entry in entries]
    if len(set(kinds)) > 1:
        rank = next(rank for rank, kind in enumerate(kinds) if kind != kinds[0])
        raise ConfigError(
            f"all ranks must reduce the same kind of value, but rank 0 asked for {kinds[0]} and "
            f"rank {rank} for {kinds[rank]}; pass the same metric on every rank",
            code="reduced-kinds-differ",
        )
    values: list[Any] = [entry for *_, entry in entries]
    if isinstance(value, torch.Tensor):
        return REDUCE[op](torch.stack(values)).to(value.device)
    number: Value = _reduce_numbers(values, op)
    return number


def _reduce_numbers(numbers: list[Any], op: str) -> Any:
    """Return the reduced number; integers stay exact, except for their mean."""
    if op != "mean" and all(isinstance(number, int) for number in numbers):
        exact: Mapping[str, Callable[[list[int]], int]] = {"sum": sum, "min": min, "max": max}
        return exact[op](numbers)
    return float(REDUCE[op](torch.tensor(numbers, dtype=torch.float64, device="cpu")))


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} {value.dtype}"
    return "a number"


def barrier(topology: World) -> None:
    """Wait for all ranks. Collective over the world; blocking."""
    _begin(topology, "wait for all ranks")


def print_once(topology: World, *values: object, **options: Any) -> None:
    """Print on world rank 0 alone, at once. Does not communicate.

    Args:
        topology: The ranks.
        values: As those of ``print``.
        options: As those of ``print``: ``sep``, ``end``, ``file``.
    """
    if topology.rank == 0 and not topology.is_spare:
        print(*values, **{"flush": True} | options)
