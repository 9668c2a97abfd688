"""What `daso train` can be told: frozen dataclasses, filled from TOML and ``--key=value``.

The fields below are the whole list: keys, types, defaults, checks and the help text all come from
them.
"""

import difflib
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from daso.checks import Rule, check, number, whole
from daso.errors import ConfigError
from daso.plan.merge import MergeName
from daso.plan.options import Exchange, Gradients, Settings, Wire
from daso.plan.policy import Auto, Fixed, Plateau, Qsr
from daso.plan.schedule import Policy

__all__ = ["Config", "describe", "read_config", "takes_value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which data, and how much of it at a time."""

    name: Literal["auto", "fashion", "digits", "text", "synthetic"] = "auto"
    folder: str = ""  # where to look; empty: DASO_DATA, then the usual place
    batch_size: int = 32  # samples per rank and step
    context: int = 64  # bytes per window of text


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The inner optimizer."""

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check("optimizer.lr", self.lr, number(0, MOST_RATE))
        check("optimizer.momentum", self.momentum, BELOW_ONE)
        check("optimizer.weight_decay", self.weight_decay, number(0, MOST_RATE))


MOST_RATE = 1e4  # of a learning rate; more is a slip of the hand
BELOW_ONE = Rule("a number in [0, 1)", lambda one: number(0, 1).holds(one) and one < 1)
USED_BY = {
    "auto": ("warmup", "drift", "budget"),
    "fixed": ("skip", "wait", "warmup"),
    "plateau": ("skip", "warmup", "cooldown"),
    "qsr": ("skip", "wait", "alpha"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """When nodes exchange."""

    policy: Literal["auto", "fixed", "plateau", "qsr"] = "auto"
    skip: int = 4  # batches between exchanges; plateau: the largest, qsr: the smallest
    wait: int = 1  # batches an exchange may take (fixed, qsr)
    warmup: int = 0  # synchronous batches (auto, fixed) or epochs (plateau) at the start
    cooldown: int = 0  # synchronous epochs at the end (plateau)
    alpha: float = 0.1  # learning rate at which the quadratic rule gives 1 batch (qsr)
    drift: float = 0.0  # relative distance between nodes to aim at; 0: by the optimizer (auto)
    budget: float = Auto().budget  # part of a step's time that exchanges may take (auto)

    def __post_init__(self) -> None:
        for one in fields(self):
            used = [policy for policy, names in USED_BY.items() if one.name in names]
            given = getattr(self, one.name) != one.default
            if one.name != "policy" and given and self.policy not in used:
                raise ConfigError(
                    f"schedule.{one.name} is of {' and '.join(used)}, but schedule.policy is "
                    f"{self.policy}; set --schedule.policy={used[0]}, or leave it out"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How nodes exchange."""

    wire: Wire = "auto"
    merge: str = "auto"  # auto | daso | delta | eager | the weight of local parameters
    outer: Literal["none", "nesterov"] = "none"  # nesterov: DiLoCo
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1  # parts of the model that take turns
    reduce: Literal["auto", "iallreduce", "ordered"] = "auto"
    chunk_bytes: int = Exchange().chunk_bytes
    bucket_bytes: int = 1 << 20  # of gradients; 0: searched while training
    gradients: Literal["buckets", "priority", "host"] = "buckets"  # in which order, and where added
    update: Literal["auto", "whole", "chunk"] = "auto"  # chunk: layer by layer
    nonfinite: Literal["drop", "raise"] = "drop"
    stall_seconds: float = 300.0
    step_restoration: Literal["auto", "on", "off"] = "auto"  # longer steps of Adam and its kin
    memory: Literal["host", "device"] = "host"  # device: a GPU's own, with an MPI that is able to

    def __post_init__(self) -> None:
        check("exchange.outer_lr", self.outer_lr, number(0, MOST_RATE))
        check("exchange.outer_momentum", self.outer_momentum, BELOW_ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save the run."""

    every: int = 0  # steps from one checkpoint to the next, and one at the end; 0: none
    keep: int = 3  # older ones are removed

    def __post_init__(self) -> None:
        check("checkpoint.every", self.every, whole(0))
        check("checkpoint.keep", self.keep, whole(1))


MOST_COUNT = 2**40
SEED = Rule(  # what torch takes
    "a whole number of at most 64 bits", lambda one: type(one) is int and -(2**63) <= one < 2**64
)
LONGEST_NAME = 200  # characters; file systems take 255 bytes
NAME = Rule(
    f"the name of a folder: at most {LONGEST_NAME} printable characters without /, and not . or ..",
    lambda one: (
        one.isprintable()
        and "/" not in one
        and one not in ("", ".", "..")
        and len(one.encode()) <= LONGEST_NAME
    ),
)
PATH = Rule("the path of a folder, printable", lambda one: bool(one) and one.isprintable())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One training run."""

    name: str = "train"  # the run folder is runs/NAME
    runs: str = "runs"  # where run folders are made
    epochs: int = 3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: a GPU where ranks see one
    tensorboard: bool = False  # write TensorBoard files too
    trace: bool = False  # record what every rank does, for `daso trace`
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        check("epochs", self.epochs, whole(1, MOST_COUNT))
        check("seed", self.seed, SEED)
        check("data.batch_size", self.data.batch_size, whole(1, MOST_COUNT))
        check("data.context", self.data.context, whole(1, MOST_COUNT))
        # Else a run would write outside of `runs`.
        check("name", self.name, NAME, "; choose another --name=NAME")
        check("runs", self.runs, PATH, "; choose another --runs=FOLDER")
        self.settings()
        self.policy()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.runs) / self.name

    def settings(self) -> Settings:
        """Return the optimizer's settings."""
        exchange = self.exchange
        return Settings(
            wire=exchange.wire,
            merge=_merge(exchange.merge),
            outer=exchange.outer != "none",
            exchange=Exchange(
                reduce=exchange.reduce,
                chunk_bytes=exchange.chunk_bytes,
                nonfinite=exchange.nonfinite,
                stall_seconds=exchange.stall_seconds,
                fragments=exchange.fragments,
                memory=exchange.memory,
                step_restoration=exchange.step_restoration,
            ),
            gradients=Gradients(
                order=exchange.gradients,
                update=exchange.update,
                bucket_bytes=exchange.bucket_bytes or "search",
            ),
        )

    def policy(self) -> Policy:
        """Return the schedule's policy."""
        schedule = self.schedule
        if schedule.policy == "auto":
            return Auto(schedule.drift or None, warmup=schedule.warmup, budget=schedule.budget)
        if schedule.policy == "fixed":
            return Fixed(schedule.skip, schedule.wait, schedule.warmup)
        if schedule.policy == "qsr":
            return Qsr(schedule.alpha, schedule.skip, schedule.wait)
        return Plateau(
            self.epochs,
            warmup=schedule.warmup,
            cooldown=schedule.cooldown,
            max_skip=schedule.skip,
        )


def _merge(text: str) -> MergeName | float:
    """Return a merge's name, or the number that the text is; the settings check both."""
    try:
        return float(text)
    except ValueError:
        return cast(MergeName, text)


def read_config(path: Path | None, words: Sequence[str]) -> Config:
    """Read a TOML file and ``--key=value`` words, which come after it and win.

    Args:
        path: The file; None for the defaults.
        words: Such as ``["--epochs=3", "--optimizer.lr=0.1"]``.

    Returns:
        The configuration.

    Raises:
        ConfigError: A key is not known (with the valid ones), or a value does not fit.
    """
    values: dict[str, object] = {}
    if path is not None:
        values.update(_flatten(_read_toml(path)))
    values.update(_read_word(word) for word in words)
    config: Config = _build(Config, values)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"a file of settings must be readable, but {path}: {error.strerror} (a single setting "
            f"looks like --key=value)"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be text in UTF-8, but: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} must be TOML, but: {error}") from error


def _flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        path = prefix + key
        if isinstance(value, Mapping) and (value or path in SECTIONS):
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _read_word(word: str) -> tuple[str, object]:
    kinds = {key: annotation for key, annotation, _ in _keys(Config)}
    name = word.removeprefix("--").replace("-", "_")
    if word.startswith("--") and "=" not in word and kinds.get(name, bool) is bool:
        return name, "true"  # a switch; or unknown, which is told with what it may be meant for
    if not word.startswith("--") or "=" not in word:
        raise ConfigError(f"settings must look like --key=value, not {word!r}; {_valid()}")
    key, _, value = word.removeprefix("--").partition("=")
    return key.replace("-", "_"), value


def takes_value(word: str) -> bool:
    """Return whether a setting's value is the next word: not ``--key=value``, and no switch."""
    kinds = {key: annotation for key, annotation, _ in _keys(Config)}
    key = word.removeprefix("--").replace("-", "_")
    return word.startswith("--") and "=" not in word and kinds.get(key) is not bool


SECTIONS = tuple(one.name for one in fields(Config) if is_dataclass(one.default_factory))


def _valid() -> str:
    return "valid keys: " + ", ".join(key for key, _, _ in _keys(Config))


def _keys(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """List (key, type, default) of all fields, sections included."""
    hints, defaults = get_type_hints(kind), kind()
    for one in fields(kind):
        if is_dataclass(hints[one.name]):
            yield from _keys(hints[one.name], f"{prefix}{one.name}.")
        else:
            yield prefix + one.name, hints[one.name], getattr(defaults, one.name)


def _build(kind: type[Any], values: Mapping[str, object]) -> Any:
    known = {key: annotation for key, annotation, _ in _keys(Config)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"unknown key {key!r}; {hint}{_valid()}")
    return _fill(kind, "", {k: _convert(k, v, known[k]) for k, v in values.items()})


def _fill(kind: type[Any], prefix: str, values: Mapping[str, object]) -> Any:
    hints = get_type_hints(kind)
    given = {}
    for one in fields(kind):
        key = prefix + one.name
        if is_dataclass(hints[one.name]):
            given[one.name] = _fill(hints[one.name], f"{key}.", values)
        elif key in values:
            given[one.name] = values[key]
    return kind(**given)


def _convert(key: str, value: object, annotation: Any) -> object:
    """Turn text or a TOML value into a field's type."""
    if get_origin(annotation) is Literal:
        if value not in get_args(annotation):
            choices = ", ".join(map(str, get_args(annotation)))
            raise ConfigError(f"{key} must be one of {choices}, not {value!r}")
        return value
    assert get_origin(annotation) not in (Union, types.UnionType), "plain types only"
    if annotation is bool:
        return _convert_bool(key, value)
    fits = isinstance(value, str | KINDS[annotation]) and not isinstance(value, bool)
    try:
        if fits:
            return annotation(value)
    except ValueError:
        pass
    raise ConfigError(f"{key} must be {NAMES[annotation]}, not {value!r}")


NAMES = {int: "a whole number", float: "a number", str: "text"}
KINDS = {int: int, float: int | float, str: str}  # what TOML may give for a field


def _convert_bool(key: str, value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{key} must be true or false, not {value!r}")
    return words[str(value).lower()]


def describe() -> str:
    """Return one line per key: name, default, kind."""
    rows = []
    for key, annotation, default in _keys(Config):
        choices = " | ".join(map(str, get_args(annotation))) or annotation.__name__
        rows.append((f"  --{key}={default}", choices))
    width = max(len(left) for left, _ in rows)
    return "\n".join(f"{left:<{width}}  {right}" for left, right in rows)
