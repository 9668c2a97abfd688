"""Emulation of another machine by slowing down parts of this one. Pure except for files.

The duration of any schedule of tasks is homogeneous in the durations of the tasks: if all take rho
times as long, so does the whole. So a target whose parts are up to rho times as fast as this
machine's is emulated by slowing every part here down to 1 / rho of the target's rate, and dividing
the measured times by rho. For computing that is k times as fast over the same link, the link is
slowed down k times: T(C / k, L) = T(C, k L) / k.

Source: US 2020/0065214 A1 (several parts and their ratio), US 10453167 B1 (one link).
"""

import itertools
import math
import statistics
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from daso.checks import NONE, check, either, instance_of, number, positive, validated_record
from daso.errors import ConfigError

BLOCKS = 12  # of consecutive steps; their means are about independent
LEAST_STEPS = 2 * BLOCKS  # of an estimate
QUANTILE = 2.201  # 0.975 of Student's t with 11 degrees of freedom
NOTHING = 1.005  # factors below it are ignored
LABELS = {
    "compute": "computing",
    "link_bytes_per_second": "the link",
    "memory_bytes_per_second": "memory",
    "copy_bytes_per_second": "copies between host and device",
    "disk_write_bytes_per_second": "writes to the disk",
    "disk_read_bytes_per_second": "reads from the disk",
}
RATES = tuple(LABELS)[1:]  # of parts that a machine may lack
ALWAYS = (
    "emulated, not measured on the target: caches and cores are those of this machine; Python's "
    "time between operations and that of the communication thread do not shrink",
    "a link carries one message at a time; switches are never full",
    "the rest of computing is stretched at the end of each step: code of a forward or backward "
    "that is not a torch operation on the CPU has less time here to overlap with transfers",
)


@validated_record
@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of a machine's nodes; `measure_machine` measures this machine's.

    Args:
        compute: Speed at which a node computes this model, in the same unit for both machines:
            samples or steps per second, FLOP/s.
        link_bytes_per_second: Rate of a node's link in each direction; None: ignored, as below.
        latency_seconds: Latency from one node to another.
        memory_bytes_per_second: Rate of a rank's reads and writes.
        copy_bytes_per_second: Rate between host and device in each direction.
        disk_write_bytes_per_second: Rate of synced writes.
        disk_read_bytes_per_second: Rate of uncached reads.
    """

    compute: float
    link_bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    memory_bytes_per_second: float | None = None
    copy_bytes_per_second: float | None = None
    disk_write_bytes_per_second: float | None = None
    disk_read_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check("compute", self.compute, positive(1e30))
        for name in RATES:
            check(name, getattr(self, name), either(positive(1e18), NONE))
        check("latency_seconds", self.latency_seconds, number(0, 1e12))


@validated_record
@dataclass(frozen=True, slots=True)
class ThrottlePlan:
    """Factors that slow the current machine down to emulate another, for rates given of both.

    Args:
        current: The machine that runs the program.
        target: The machine to emulate.

    Raises:
        ConfigError: The target has no latency, which slowing down cannot emulate.
    """

    current: Machine
    target: Machine

    def __post_init__(self) -> None:
        check("current", self.current, instance_of(Machine))
        check("target", self.target, instance_of(Machine))
        has_latency = self.current.latency_seconds > 0 and "link_bytes_per_second" in self.counted
        if has_latency and self.target.latency_seconds == 0:
            raise ConfigError(
                f"latency_seconds of the target must be above 0 where the current machine's is "
                f"{self.current.latency_seconds:g}, not 0; leave both out, or give both",
                code="target-latency-missing",
            )

    @property
    def counted(self) -> tuple[str, ...]:
        """Return the names of rates given for both machines; the others are not throttled."""
        both = self.current, self.target
        return tuple(name for name in RATES if None not in [getattr(m, name) for m in both])

    @property
    def ratio(self) -> float:
        """Return the factor of all durations relative to the target: its largest speedup of a part.

        At least 1: parts without rates have the same speed on both.
        """
        current, target = self.current, self.target
        names = ("compute", *self.counted)
        ratios: list[float] = [getattr(target, name) / getattr(current, name) for name in names]
        if self.has_link and current.latency_seconds > 0:
            ratios.append(current.latency_seconds / target.latency_seconds)
        return max(1.0, *ratios)

    @property
    def has_link(self) -> bool:
        """Return whether the link between nodes is given for both machines."""
        return "link_bytes_per_second" in self.counted

    @property
    def compute_factor(self) -> float:
        """Return the slowdown of computing; at least 1."""
        return self.factor("compute")

    @property
    def link_bytes_per_second(self) -> float | None:
        """Return the throttled rate of the link, at most its own; None: not throttled."""
        return self.rate("link_bytes_per_second")

    @property
    def latency_seconds(self) -> float:
        """Return the throttled latency of a message, at least its own."""
        return self.target.latency_seconds * self.ratio

    def rate(self, name: str) -> float | None:
        """Return the throttled value of a rate, at most its own; None: not throttled."""
        target: float = getattr(self.target, name)
        return target / self.ratio if name in ("compute", *self.counted) else None

    def factor(self, name: str) -> float:
        """Return the slowdown of the part with this rate; at least 1."""
        rate = self.rate(name)
        current: float = getattr(self.current, name)
        return 1.0 if rate is None else max(1.0, current / rate)

    @property
    def slowed(self) -> tuple[str, ...]:
        """Return the names of the rates that are throttled below this machine's."""
        names = [name for name in LABELS if self.factor(name) >= NOTHING]
        is_late = self.latency_seconds > NOTHING * self.current.latency_seconds
        if self.has_link and is_late and "link_bytes_per_second" not in names:
            names.append("link_bytes_per_second")
        return tuple(names)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions of an estimate."""
        if not self.slowed:
            return (f"nothing is slowed down: {why_nothing(self)}",)
        words = []
        if self.compute_factor >= NOTHING:
            words.append(f"computing is stretched {self.compute_factor:.3g} times by sleeping")
        if self.link_bytes_per_second is not None:
            words.append(
                f"the link is held to {self.link_bytes_per_second / 1e6:.4g} MB/s and "
                f"{1e6 * self.latency_seconds:.4g} us"
            )
        for name in self.slowed:
            if name in RATES[1:]:
                words.append(f"{LABELS[name]} to {(self.rate(name) or 0) / 1e6:.4g} MB/s")
        uncounted = [LABELS[name] for name in RATES if name not in self.counted]
        faster = f"{self.ratio:.3g} times as fast" if self.ratio >= NOTHING else "as fast"
        return (
            f"everything takes {self.ratio:.3g} times as long as on the target: {', '.join(words)}",
            *(
                [f"assumed to be {faster} on the target as well: {', '.join(uncounted)}"]
                if uncounted
                else ()
            ),
            *ALWAYS,
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated duration of a step on the target.

    Args:
        seconds: The mean.
        low: Lower bound of the mean's 95 % confidence interval, in seconds.
        high: Upper bound, in seconds.
        assumptions: Assumptions of the estimate.
    """

    seconds: float
    low: float
    high: float
    assumptions: tuple[str, ...]

    def __str__(self) -> str:
        listed = "\n".join(f"- {line}" for line in self.assumptions)
        return (
            f"emulated: {1e3 * self.seconds:.3f} ms a step (the mean lies between "
            f"{1e3 * self.low:.3f} and {1e3 * self.high:.3f}, 95 of 100 times)\n{listed}"
        )


def estimate(plan: ThrottlePlan, seconds: Sequence[float]) -> Estimate:
    """Return the estimated duration of a step on the target, from throttled steps.

    The first quarter, in which a schedule settles, is left out. It uses the mean, not the median:
    most steps wait for nothing, and a slow link only delays the others.

    Args:
        plan: Plan of the throttles.
        seconds: Durations of all steps in order, many times the number between exchanges.

    Raises:
        ConfigError: Fewer than 24 steps, or the plan slows down nothing.
    """
    if not plan.slowed:
        raise ConfigError(
            f"an estimate needs a part that is slowed down, but {why_nothing(plan)}",
            code="nothing-is-slowed",
        )
    if len(seconds) < LEAST_STEPS:
        raise ConfigError(
            f"an estimate needs {LEAST_STEPS} steps at least, not {len(seconds)}; take more",
            code="estimate-needs-steps",
        )
    steps = settled(seconds)
    ends = [len(steps) * block // BLOCKS for block in range(BLOCKS + 1)]
    means = [statistics.fmean(steps[a:b]) for a, b in itertools.pairwise(ends)]
    off = QUANTILE * statistics.stdev(means) / math.sqrt(BLOCKS)
    mean, ratio = statistics.fmean(steps), plan.ratio
    return Estimate(mean / ratio, (mean - off) / ratio, (mean + off) / ratio, plan.assumptions)


def settled(seconds: Sequence[float]) -> Sequence[float]:
    """Return the steps that count: all but the first quarter, in which a schedule settles."""
    return seconds[len(seconds) // 4 :]


def without(plan: ThrottlePlan, names: Collection[str]) -> ThrottlePlan:
    """Return a plan without some rates."""
    rates: dict[str, Any] = dict.fromkeys(names)
    return replace(plan, target=replace(plan.target, **rates))


def why_nothing(plan: ThrottlePlan) -> str:
    """Return the reason why a plan slows down nothing, and the remedy, as the end of a sentence."""
    if plan.ratio < NOTHING:
        return "the target is as fast as this machine; give rates that differ"
    best = ", ".join(LABELS[name] for name in LABELS if plan.rate(name) is not None)
    return (
        f"{best} of the target: {plan.ratio:.3g} times as fast, and no other part is known here or "
        f"can be slowed down; give another of both machines (in a file: measure = true)"
    )


NAMES = tuple(field.name for field in fields(Machine))
EXAMPLE = '[current] measure = true, and [target] compute = "3x"'


@dataclass(frozen=True, slots=True)
class ThrottleFile:
    """The tables of a plan file."""

    measures: bool  # whether the rates that `current` lacks are measured
    current: Mapping[str, float]
    target: Mapping[str, float | str]  # words such as 3x are times the current machine's

    @property
    def unnamed(self) -> frozenset[str]:
        """Return rates that the file does not give for the target, which stay as here."""
        named = {*self.target}
        if "latency_seconds" in named:
            named.add("link_bytes_per_second")
        return frozenset(RATES) - named

    def plan(self, measure: Callable[[], Machine]) -> ThrottlePlan:
        """Return the plan, with rates of the current machine measured if the file requests it."""
        known: dict[str, Any] = dict(self.current)
        if self.measures:
            machine = measure()
            known = {name: getattr(machine, name) for name in NAMES} | known
        target = {name: self._number(name, value, known) for name, value in self.target.items()}
        plan = ThrottlePlan(Machine(**known), Machine(**known | target))
        if plan.ratio >= NOTHING:
            return plan
        # Parts with unchanged rates need no throttle.
        return without(plan, self.unnamed)

    def _number(self, name: str, value: float | str, known: Mapping[str, Any]) -> float:
        """Return a rate of the target: the given value, or a multiple of the current machine's."""
        current = known.get(name)
        if current is None and (name != "latency_seconds" or isinstance(value, str)):
            remedy = (
                "this machine lacks it, as a link with one node or copies without a device; "
                "start more nodes (--ranks-per-node), give it in [current], or leave it out"
                if self.measures
                else "[current] lacks it; give it there, or set measure = true there"
            )
            raise ConfigError(
                f"{name} of the target needs that of this machine, but {remedy}: it is {value!r}",
                code="target-without-current",
            )
        return float(value[:-1]) * float(current or 0) if isinstance(value, str) else value


def read_throttle_file(path: Path) -> ThrottleFile:
    """Read a plan file."""
    try:
        return parse_throttle_file(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"a plan of throttles must be readable text, but {path}: {error}; name a TOML file",
            code="plan-not-readable",
        ) from error


def parse_throttle_file(text: str, where: str) -> ThrottleFile:
    """Parse the text of a plan file."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"a plan of throttles must be TOML, but {where}: {error}; write {EXAMPLE}",
            code="plan-not-toml",
        ) from error
    current, target = (_table(tables, name, where) for name in ("current", "target"))
    if tables:
        raise ConfigError(
            f"a plan of throttles has the tables current and target, but {where} has "
            f"{next(iter(tables))!r}; leave it out",
            code="unknown-plan-table",
        )
    measures = current.pop("measure", False)
    if not isinstance(measures, bool):
        raise ConfigError(
            f"measure in {where} must be true or false, not {measures!r}; mend it",
            code="measure-not-boolean",
        )
    if not measures and "compute" not in current:
        raise ConfigError(
            f"[current] in {where} must set compute, or measure = true, but sets neither; add one",
            code="current-machine-empty",
        )
    for table in (current, target):
        for name, value in table.items():
            _check_entry(name, value, where, relative=table is target)
    return ThrottleFile(measures, current, target)


def _table(tables: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    table = tables.pop(name, None)
    if not isinstance(table, dict):
        raise ConfigError(
            f"a plan of throttles must have a table [{name}], but {where} has none; write "
            f"{EXAMPLE}",
            code="plan-table-missing",
        )
    return table


def _check_entry(name: str, value: object, where: str, *, relative: bool) -> None:
    if name not in NAMES:
        raise ConfigError(
            f"a machine in {where} must be given by {', '.join(NAMES)}, not {name!r}; leave it out",
            code="unknown-machine-key",
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not (relative and isinstance(value, str) and _is_times(value)):
        raise ConfigError(
            f"{name} in {where} must be a number, or of the target times the current one's, as "
            f'"3x", not {value!r}; write it so',
            code="machine-value-invalid",
        )


def _is_times(word: str) -> bool:
    number = word.removesuffix("x")
    try:
        return number != word and float(number) > 0
    except ValueError:
        return False
