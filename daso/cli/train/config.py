"""Settings of `daso train`: frozen records, among them the public `Exchange` and `Gradients`.

`daso.cli.train.keys` derives keys, types, defaults, checks and the help text from their fields.
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from daso.checks import Rule, check, number, whole
from daso.errors import ConfigError
from daso.paths import path_of
from daso.plan.auto import Auto
from daso.plan.options import Exchange, Gradients, MergeName, Settings, Wire
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Data set and batch size.

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


MOST_RATE = 1e4  # maximum learning rate; more is a typing error
BELOW_ONE = Rule("a number in [0, 1)", lambda value: number(0, 1).holds(value) and value < 1)
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
        for setting in fields(self):
            used = [policy for policy, names in USED_BY.items() if setting.name in names]
            is_set = getattr(self, setting.name) != setting.default
            if setting.name != "policy" and is_set and self.policy not in used:
                raise ConfigError(
                    f"schedule.{setting.name} is of {' and '.join(used)}, but schedule.policy is "
                    f"{self.policy}; set --schedule.policy={used[0]}, or leave it out",
                    code="setting-of-other-policy",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When to save the run.

    Args:
        every: Steps from one checkpoint to the next, and one at the end; 0: none.
        keep: Checkpoints that are kept; older ones are removed.
        background: Whether training continues while a thread writes; needs memory for a copy of
            the checkpoint.
    """

    every: int = 0
    keep: int = 3
    background: bool = False

    def __post_init__(self) -> None:
        check("checkpoint.every", self.every, whole(0))
        check("checkpoint.keep", self.keep, whole(1))


MOST_COUNT = 2**40
SEED = Rule(
    "a whole number, 0 or more, of at most 64 bits",
    lambda value: type(value) is int and 0 <= value < 2**64,
)
LONGEST_NAME = 200  # characters; file systems allow 255 bytes
NAME = Rule(
    f"the name of a folder: at most {LONGEST_NAME} printable characters without /, and not . or ..",
    lambda name: (
        name.isprintable()
        and "/" not in name
        and name not in ("", ".", "..")
        and len(name.encode()) <= LONGEST_NAME
    ),
)
PATH = Rule("the path of a folder, printable", lambda path: bool(path) and path.isprintable())


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one training run.

    Args:
        name: The run folder is runs/NAME.
        runs: Where run folders are made.
        epochs: Passes over the data.
        seed: Of parameters, and of the order of samples.
        device: What computes; auto: a GPU where ranks see one.
        tensorboard: Write TensorBoard files too.
        trace: Record what every rank does, for `daso trace`.
        wire: Encoding of deltas between nodes.
        merge: How a node merges a mean: auto, daso, delta, eager, or the weight of local
            parameters.
        outer: Optimizer of the reference; nesterov: DiLoCo.
        outer_lr: The outer optimizer's learning rate.
        outer_momentum: The outer optimizer's momentum.
        data: Which data.
        optimizer: The inner optimizer.
        schedule: When nodes exchange.
        exchange: How nodes exchange.
        gradients: How gradients are averaged.
        checkpoint: When the run is saved.
    """

    name: str = "train"
    runs: str = "runs"
    epochs: int = 3
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    tensorboard: bool = False
    trace: bool = False
    wire: Wire = "auto"
    merge: float | MergeName = "auto"
    outer: Literal["none", "nesterov"] = "none"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    exchange: Exchange = field(default_factory=Exchange)
    gradients: Gradients = field(default_factory=Gradients)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        check("epochs", self.epochs, whole(1, MOST_COUNT))
        check("seed", self.seed, SEED)
        check("outer_lr", self.outer_lr, number(0, MOST_RATE))
        check("outer_momentum", self.outer_momentum, BELOW_ONE)
        check("data.batch_size", self.data.batch_size, whole(1, MOST_COUNT))
        check("data.context", self.data.context, whole(1, MOST_COUNT))
        # Otherwise a run could write outside `runs`.
        check("name", self.name, NAME, "; choose another --name=NAME")
        check("runs", self.runs, PATH, "; choose another --runs=FOLDER")
        if self.exchange.elastic and (self.trace or self.checkpoint.background):
            raise ConfigError(
                "a run must keep all of its ranks to be recorded, or saved in the background, but "
                "exchange.elastic lets it lose some; leave --trace and "
                "--checkpoint.background, or --exchange.elastic, out",
                code="elastic-run-cannot-record",
            )
        self.settings()
        self.policy()

    @property
    def folder(self) -> Path:
        """The run folder."""
        return path_of(self.runs) / self.name

    def settings(self) -> Settings:
        """Return the optimizer's settings."""
        return Settings(
            wire=self.wire,
            merge=self.merge,
            outer=self.outer != "none",
            exchange=self.exchange,
            gradients=self.gradients,
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
