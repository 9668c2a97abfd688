"""What `daso train` can be told: frozen dataclasses, filled from TOML and ``--key=value``.

The fields below are the whole list: keys, types, defaults, checks and the help text all come from
them.
"""

import difflib
import re
import shutil
import textwrap
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from daso.checks import Rule, check, number, whole
from daso.environment import path_of
from daso.errors import ConfigError
from daso.plan.allreduce_plan import Algorithm
from daso.plan.auto import Auto
from daso.plan.merge import MergeName
from daso.plan.options import BucketRule, Exchange, Gradients, GradientWire, Settings, Wire
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import Policy

__all__ = ["Config", "describe", "read_config", "settings", "takes_value"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Which data, and how much of it at a time.

    Args:
        name: Data set; auto: fashion where it is found, else digits.
        folder: Where to look; empty: DASO_DATA, then the usual place.
        batch_size: Samples per rank and step.
        context: Bytes per window of text.
    """

    name: Literal["auto", "fashion", "digits", "text", "synthetic"] = "auto"
    folder: str = ""
    batch_size: int = 32
    context: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The inner optimizer.

    Args:
        name: Inner optimizer.
        lr: Peak learning rate.
        momentum: Momentum (sgd).
        weight_decay: Weight decay.
    """

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
    "auto": ("warmup", "drift", "budget", "selective"),
    "fixed": ("skip", "wait", "warmup"),
    "plateau": ("skip", "warmup", "cooldown"),
    "qsr": ("skip", "wait", "alpha"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """When nodes exchange.

    Args:
        policy: Chooses skip and wait.
        skip: Batches between exchanges; plateau: the largest, qsr: the smallest.
        wait: Batches an exchange may take (fixed, qsr).
        warmup: Synchronous batches (auto, fixed) or epochs (plateau) at the start.
        cooldown: Synchronous epochs at the end (plateau).
        alpha: Learning rate at which the quadratic rule gives 1 batch (qsr).
        drift: Relative distance between nodes to aim at; 0: by the optimizer (auto).
        budget: Part of a step's time that exchanges may take (auto).
        selective: Numbers of a model from which on its small tensors are exchanged more often; 0:
            of none (auto).
    """

    policy: Literal["auto", "fixed", "plateau", "qsr"] = "auto"
    skip: int = 4
    wait: int = 1
    warmup: int = 0
    cooldown: int = 0
    alpha: float = 0.1
    drift: float = 0.0
    budget: float = Auto().budget
    selective: int = Auto().selective or 0

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
    """How nodes exchange.

    Args:
        wire: Type or code of what crosses between nodes.
        merge: How a node takes a mean in: auto, daso, delta, eager, or the weight of local
            parameters.
        outer: Optimizer of the reference; nesterov: DiLoCo.
        outer_lr: The outer optimizer's learning rate.
        outer_momentum: The outer optimizer's momentum.
        fragments: Parts of the model that take turns.
        algorithm: How the mean over nodes is taken; mpi: by MPI, in an order of its own.
        chunk_bytes: Bytes of a message between nodes.
        bucket_bytes: Bytes of a bucket of gradients inside a node; auto: 25 MiB on GPUs and 4 MiB
            elsewhere; search: searched while training.
        reducer: In which order gradients cross, and where they are added.
        gradient_wire: What gradients cross between nodes in, where they are averaged there.
        step: Of the whole model, or layer by layer.
        nonfinite: What NaN and infinity in an exchange do.
        timeout_seconds: How long to wait for ranks that do not come.
        step_restoration: Longer steps of Adam and its kin between exchanges.
        gpu_direct: Let MPI read and write the memory of GPUs, where it is able to.
        elastic: Go on without the node of a rank that is killed; see docs/how-to/elastic.md.
    """

    wire: Wire = "auto"
    merge: float | MergeName = "auto"
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    fragments: int = 1
    algorithm: Algorithm = "auto"
    chunk_bytes: int = Exchange().chunk_bytes
    bucket_bytes: int | BucketRule = "auto"
    reducer: Literal["bucketed", "prioritized", "host"] = "bucketed"
    gradient_wire: GradientWire = "auto"
    step: Literal["auto", "model", "layerwise"] = "auto"
    nonfinite: Literal["drop", "raise"] = "drop"
    timeout_seconds: float = 300.0
    step_restoration: Literal["auto", "on", "off"] = "auto"
    gpu_direct: bool = False
    elastic: bool = False

    def __post_init__(self) -> None:
        check("exchange.outer_lr", self.outer_lr, number(0, MOST_RATE))
        check("exchange.outer_momentum", self.outer_momentum, BELOW_ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save the run.

    Args:
        every: Steps from one checkpoint to the next, and one at the end; 0: none.
        keep: Checkpoints that are kept; older ones are removed.
        background: Whether training goes on while a thread writes; takes memory for a copy of all
            that is saved.
        memory_every: Steps from one copy in the memory of hosts to the next, each node's on its own
            host and on that of the next node; 0: none. A run goes on from what is newer, that or a
            checkpoint.
        memory_folder: Where a host has files in memory; takes up to twice what its own ranks save,
            and twice what those of the node before it do.
    """

    every: int = 0
    keep: int = 3
    background: bool = False
    memory_every: int = 0
    memory_folder: str = "/dev/shm"

    def __post_init__(self) -> None:
        check("checkpoint.every", self.every, whole(0))
        check("checkpoint.keep", self.keep, whole(1))
        check("checkpoint.memory_every", self.memory_every, whole(0))
        check("checkpoint.memory_folder", self.memory_folder, PATH)


MOST_COLUMNS = 100
MOST_COUNT = 2**40
SEED = Rule(
    "a whole number, 0 or more, of at most 64 bits",
    lambda one: type(one) is int and 0 <= one < 2**64,
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
    """One training run.

    Args:
        name: The run folder is runs/NAME.
        runs: Where run folders are made.
        epochs: Passes over the data.
        seed: Of parameters, and of the order of samples.
        device: What computes; auto: a GPU where ranks see one.
        tensorboard: Write TensorBoard files too.
        trace: Record what every rank does, for `daso trace`.
        data: Which data.
        optimizer: The inner optimizer.
        schedule: When nodes exchange.
        exchange: How nodes exchange.
        checkpoint: When the run is saved.
    """

    name: str = "train"
    runs: str = "runs"
    epochs: int = 3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensorboard: bool = False
    trace: bool = False
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
        if self.exchange.elastic and (self.trace or self.checkpoint.background):
            raise ConfigError(
                "a run must keep all of its ranks to be recorded, or saved in the background, but "
                "exchange.elastic lets it go on without some; leave --trace and "
                "--checkpoint.background, or --exchange.elastic, out"
            )
        self.settings()
        self.policy()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return path_of(self.runs) / self.name

    def settings(self) -> Settings:
        """Return the optimizer's settings."""
        exchange = self.exchange
        return Settings(
            wire=exchange.wire,
            merge=exchange.merge,
            outer=exchange.outer != "none",
            exchange=Exchange(
                algorithm=exchange.algorithm,
                chunk_bytes=exchange.chunk_bytes,
                nonfinite=exchange.nonfinite,
                timeout_seconds=exchange.timeout_seconds,
                fragments=exchange.fragments,
                gpu_direct=exchange.gpu_direct,
                step_restoration=exchange.step_restoration,
                elastic=exchange.elastic,
            ),
            gradients=Gradients(
                reducer=exchange.reducer,
                wire=exchange.gradient_wire,
                step=exchange.step,
                bucket_bytes=exchange.bucket_bytes,
            ),
        )

    def policy(self) -> Policy:
        """Return the schedule's policy."""
        schedule = self.schedule
        if schedule.policy == "auto":
            return Auto(
                schedule.drift or None,
                warmup=schedule.warmup,
                budget=schedule.budget,
                selective=schedule.selective or None,
            )
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


def read_config(path: Path | None, words: Sequence[str]) -> Config:
    """Read a TOML file and ``--key=value`` words, which come after it and win."""
    values: dict[str, object] = {}
    if path is not None:
        values.update(_flatten(_read_toml(path)))
    values.update(_read_word(word) for word in words)
    config: Config = _build(Config, values)
    return config


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
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


def _valid(key: str = "") -> str:
    """Return the keys of the section that a key may be of, else those of no section."""
    section = key.partition(".")[0]
    keys = [key for key, _, _ in _keys(Config)]
    near = [one for one in keys if one.startswith(f"{section}.")]
    valid = near or [*(one for one in keys if "." not in one), *(f"{one}.*" for one in SECTIONS)]
    return f"valid keys: {', '.join(valid)}; `daso train --help` says what they mean"


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
            raise ConfigError(f"unknown key {key!r}; {hint}{_valid(key)}")
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
    if get_origin(annotation) in (Union, types.UnionType):
        return _convert_number_or_word(key, value, annotation)
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


def _convert_number_or_word(key: str, value: object, annotation: Any) -> object:
    number, words = get_args(annotation)
    if value in get_args(words):
        return value
    try:
        return _convert(key, value, number)
    except ConfigError:
        choices = " or ".join([NAMES[number], *get_args(words)])
        raise ConfigError(f"{key} must be {choices}, not {value!r}") from None


def _choices(annotation: Any) -> str:
    """Return what a key may be, for a list of keys."""
    if get_origin(annotation) in (Union, types.UnionType):
        return " | ".join(map(_choices, get_args(annotation)))
    return " | ".join(map(str, get_args(annotation))) or str(annotation.__name__)


def _convert_bool(key: str, value: object) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if str(value).lower() not in words:
        raise ConfigError(f"{key} must be true or false, not {value!r}")
    return words[str(value).lower()]


def describe() -> str:
    """Return what each key means, its default and what it may be, as wide as the terminal."""
    columns = min(MOST_COLUMNS, shutil.get_terminal_size().columns)
    rows = [
        (f"  --{key}={default}", f"{meaning}{' ' if meaning else ''}({choices})")
        for key, default, meaning, choices in settings()
    ]
    width = max(len(left) for left, _ in rows) + 2
    wrapped = textwrap.TextWrapper(max(40, columns - width), break_long_words=False)
    return "\n".join(
        f"{left:<{width}}{line}"
        for first, text in rows
        for left, line in zip_longest([first], wrapped.wrap(text), fillvalue="")
    )


def settings() -> Iterator[tuple[str, object, str, str]]:
    """List (key, default, meaning, what it may be) of every setting."""
    meanings = dict(_meanings(Config))
    for key, annotation, default in _keys(Config):
        yield key, default, meanings.get(key, ""), _choices(annotation)


def _meanings(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """List (key, meaning) of all fields, from docstrings; none where Python left them out (-OO)."""
    hints = get_type_hints(kind)
    text = " ".join((kind.__doc__ or "").partition("Args:")[2].split())
    names = "|".join(one.name for one in fields(kind))
    parts = re.split(rf"(?:^|(?<=\. ))({names}): ", text)[1:]
    for name, meaning in zip(parts[::2], parts[1::2], strict=True):
        if is_dataclass(hints[name]):
            yield from _meanings(hints[name], f"{prefix}{name}.")
        else:
            yield prefix + name, meaning.strip().removesuffix(".")
