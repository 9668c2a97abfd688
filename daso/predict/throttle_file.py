"""Files that say which machine is at hand and which is imitated: TOML. Pure but for reading."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from daso.errors import ConfigError
from daso.predict.throttle_plan import Machine, ThrottlePlan

__all__ = ["ThrottleFile", "parse_throttle_file", "read_throttle_file"]

NAMES = tuple(field.name for field in fields(Machine))
EXAMPLE = '[current] measure = true, and [target] compute = "3x"'


@dataclass(frozen=True, slots=True)
class ThrottleFile:
    """What a file says; numbers, and of the target words such as ``3x``: times the current one's.

    Args:
        measures: Whether what is not given of the current machine is measured.
        current: What is given of it.
        target: What is given of the target.
    """

    measures: bool
    current: Mapping[str, float]
    target: Mapping[str, float | str]

    def plan(self, measure: Callable[[], Machine]) -> ThrottlePlan:
        """Return how to slow down, with what is measured of the current machine if it says so."""
        known: dict[str, Any] = dict(self.current)
        if self.measures:
            machine = measure()
            known = {name: getattr(machine, name) for name in NAMES} | known
        target = {name: self._number(name, value, known) for name, value in self.target.items()}
        # Alike in what the file leaves out: a latency that was measured is the target's too.
        if "latency_seconds" not in target and "link_bytes_per_second" in target:
            target["latency_seconds"] = known.get("latency_seconds", 0.0)
        target.setdefault("compute", known["compute"])
        return ThrottlePlan(Machine(**known), Machine(**target))

    def _number(self, name: str, value: float | str, known: Mapping[str, Any]) -> float:
        """Return a number of the target: as it is given, or so many times the current machine's."""
        current = known.get(name)
        if current is None and self.measures:
            raise ConfigError(
                f"{name} of the target must be left out where there is none to be measured here, "
                f"as a link with one node or copies without a device, but it is {value!r}; start "
                f"more nodes (--ranks-per-node), give it in [current], or leave it out"
            )
        if not isinstance(value, str):
            return value
        if current is None:
            raise ConfigError(
                f"{name} of the target must be a number where the current machine has none, not "
                f"{value!r}; give it in [current], or leave it out"
            )
        return float(value[:-1]) * float(current)


def read_throttle_file(path: Path) -> ThrottleFile:
    """Read a file."""
    try:
        return parse_throttle_file(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a plan of throttles must be readable text, but {path}: {error}; name a TOML file"
        ) from error


def parse_throttle_file(text: str, where: str) -> ThrottleFile:
    """Read the text of a file."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"a plan of throttles must be TOML, but {where}: {error}; write {EXAMPLE}"
        ) from error
    current, target = (_table(tables, name, where) for name in ("current", "target"))
    if tables:
        raise ConfigError(
            f"a plan of throttles has the tables current and target, but {where} has "
            f"{next(iter(tables))!r}; leave it out"
        )
    measures = current.pop("measure", False)
    if not isinstance(measures, bool):
        raise ConfigError(f"measure in {where} must be true or false, not {measures!r}; mend it")
    if not measures and "compute" not in current:
        raise ConfigError(
            f"[current] in {where} must say compute, or measure = true, but it says neither; add "
            f"one"
        )
    for name, value in (*current.items(), *target.items()):
        _check(name, value, where, relative=name in target and value is target[name])
    return ThrottleFile(measures, current, target)


def _table(tables: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    table = tables.pop(name, None)
    if not isinstance(table, dict):
        raise ConfigError(
            f"a plan of throttles must have a table [{name}], but {where} has none; write {EXAMPLE}"
        )
    return table


def _check(name: str, value: object, where: str, *, relative: bool) -> None:
    if name not in NAMES:
        raise ConfigError(
            f"a machine in {where} must be given by {', '.join(NAMES)}, not {name!r}; leave it out"
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (relative and isinstance(value, str) and _is_times(value)):
        or_times = ', or of the target times the current one\'s, as "3x"'
        raise ConfigError(
            f"{name} in {where} must be a number{or_times}, not {value!r}; write it so"
        )


def _is_times(word: str) -> bool:
    number = word.removesuffix("x")
    try:
        return number != word and float(number) > 0
    except ValueError:
        return False
