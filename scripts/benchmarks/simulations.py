"""One training on simulated nodes: settings, models and data of `scripts/bench accuracy`."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from daso.cli.bench.models import loss_of, score
from daso.data import ShardedSampler, find_fashion, load_digits, load_fashion, load_text
from daso.environment import data_folder
from daso.examples.cnn import CNN
from daso.examples.transformer import ByteTransformer
from daso.plan.auto import Auto
from daso.plan.options import BITS, Exchange, Gradients, MergeName, Restore, Settings, Wire
from daso.plan.policies import Fixed, Plateau, Qsr
from daso.plan.schedule import Policy
from daso.train.deltas.outer import MakeOuter
from daso.train.simulated.nodes import SimulatedNodes, Times

__all__ = [
    "AUTO",
    "CORES",
    "DRIFT",
    "QUICK",
    "SETTINGS",
    "SLOW",
    "SYNCHRONOUS",
    "Result",
    "Setting",
    "Trial",
    "run",
    "trials",
]

EXCHANGE = 0.5  # batches that an exchange takes: it is hidden, and merged one batch late
OWN = 0.002  # batches that it takes of the training thread: beside a GPU, next to nothing
SLOW_EXCHANGE = 1.69  # batches of int4: a link that is 12 times slower than bf16 in half a batch
CORES_EXCHANGE, CORES_OWN = 0.46, 0.32  # as `bench train` has them: 1 Gbit/s, without a free core
HIDDEN = 0.5  # batches of averaging gradients that backward hides
TEXT_BYTES = 1_100_000  # of Python's library
SYNCHRONOUS, AUTO = "synchronous, fp32", "Auto, int4"
DRIFT = "Auto as rare as drift allows, not restored, int4"
SLOW = "Auto, link 12 times slower"
CORES = "Auto, exchanges need training's cores"
DILOCO = "Fixed(32, 1), outer Nesterov, int4"
Pairs = tuple[torch.Tensor, torch.Tensor]


def nesterov(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Make an outer optimizer: DiLoCo's, with less momentum."""
    return torch.optim.SGD(params, lr=0.9, momentum=0.3, nesterov=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    policy: Callable[[int, float], Policy]  # of epochs and peak learning rate
    wire: Wire = "int4"
    merge: MergeName | float = "auto"
    outer: MakeOuter | None = None
    step_restoration: Restore = "auto"
    own: float = OWN  # batches
    exchange: float = EXCHANGE  # batches, of the wire it begins with
    fragments: int = 1

    def settings(self) -> Settings:
        """Return it as the optimizer takes it."""
        return Settings(
            wire=self.wire,
            merge=self.merge,
            exchange=Exchange(step_restoration=self.step_restoration, fragments=self.fragments),
            gradients=Gradients(),
            outer=self.outer is not None,
        )

    def times(self) -> Times:
        """Return what takes how long, in batches."""
        settings = self.settings()
        bits = BITS[settings.hidden_wire] / BITS[settings.wires[0]]
        gradients = self.exchange * bits if settings.may_hide else 0.0
        exposed = max(0.0, gradients - HIDDEN)
        part = self.exchange / self.fragments, self.own / self.fragments
        return Times(1.0, *part, exposed_seconds=exposed)


def fixed(skip: int, wait: int) -> Callable[[int, float], Policy]:
    """Return what makes a fixed policy."""
    return lambda *_: Fixed(skip, wait)


def plateau(epochs: int, _: float) -> Policy:
    """Return the paper's policy with an eighth of the epochs for warm-up and cool-down each."""
    edge = max(1, epochs // 8)
    return Plateau(max(epochs, 2 * edge), warmup=edge, cooldown=edge)


SETTINGS = (
    Setting(SYNCHRONOUS, fixed(1, 0), "fp32"),
    Setting(AUTO, lambda *_: Auto()),
    Setting(SLOW, lambda *_: Auto(), "auto", exchange=SLOW_EXCHANGE),
    Setting(CORES, lambda *_: Auto(), "auto", own=CORES_OWN, exchange=CORES_EXCHANGE),
    # What the default was until 2026-11: an exchange counts as so dear that drift alone decides.
    Setting(DRIFT, lambda *_: Auto(0.025), step_restoration="off", own=1e9),
    Setting("Qsr, int4", lambda _, peak: Qsr(1.5 * peak, skip=2, max_skip=64)),
    Setting("Plateau (DASO paper), bf16", plateau, "bf16", "daso"),
    Setting("Fixed(4, 1), delta, bf16", fixed(4, 1), "bf16", "delta"),
    Setting("Fixed(16, 1), int4", fixed(16, 1)),
    Setting(DILOCO, fixed(32, 1), outer=nesterov),
)
TEXT = (SYNCHRONOUS, AUTO, SLOW, DRIFT, "Fixed(4, 1), delta, bf16", DILOCO)
WIDE = (SYNCHRONOUS, AUTO, SLOW)
SHORT = (SYNCHRONOUS, AUTO, CORES)
LONG = (SYNCHRONOUS, AUTO, DRIFT, "Qsr, int4", "Fixed(16, 1), int4")
QUICK = (SYNCHRONOUS, AUTO, "Plateau (DASO paper), bf16", "Fixed(16, 1), int4")


@dataclass(frozen=True, slots=True)
class Trial:
    """One model on one data set on so many nodes."""

    data: str  # "fashion", "digits" or "text"
    nodes: int
    epochs: int
    samples: int
    batch: int = 16  # samples per node and step
    seeds: int = 3
    # Peak learning rates, of which every setting's best counts; a cosine takes it to zero.
    peaks: tuple[float, ...] = (0.05,)
    adamw: bool = False  # not SGD with momentum
    kind: str = ""  # "short", "long" or "wide"
    width: int = 64  # of the transformer

    @property
    def text(self) -> bool:
        """Whether it is the byte-level transformer."""
        return self.data == "text"

    @property
    def model(self) -> str:
        """What is trained, and by what."""
        by = "AdamW" if self.adamw else "SGD with momentum 0.9"
        if self.text:
            return f"byte-level transformer of width {self.width}, {by}"
        return f"CNN of width 8 with BatchNorm, {by}"

    def build(self, seed: int) -> torch.nn.Module:
        """Make the model."""
        torch.manual_seed(seed)
        if self.text:
            return ByteTransformer(64, self.width)
        return CNN(8 if self.data == "digits" else 28, width=8)

    def inner(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Make the inner optimizer."""
        if self.adamw:
            return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
        return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    @property
    def suffix(self) -> str:
        """What its figures' names end with."""
        if self.text and self.kind:
            return f"text_{self.kind}_{self.nodes}_nodes"
        if self.kind:
            return f"cnn_{self.kind}"
        kind = "text_" if self.text else "cnn_adamw_" if self.adamw else ""
        return f"{kind}{self.nodes}_nodes"

    def __str__(self) -> str:
        more = self.kind or ("AdamW" if self.adamw and not self.text else "")
        return f"{self.data}, {self.nodes} nodes" + (f", {more}" if more else "")


@dataclass(frozen=True, slots=True)
class Result:
    """What one run gave."""

    score: float  # percent of test samples (bytes of text) right
    loss: float  # mean training loss of the last epoch
    nbytes: int  # between nodes, by all of them
    ddp_nbytes: int  # what averaging fp32 gradients at every batch sends
    exchanges: int
    gain: float  # at the end
    steps: int
    seconds: float


@cache
def load(data: str, samples: int) -> tuple[Pairs, Pairs]:
    """Return training and test data as whole tensors."""
    return _whole(_data(data, train=True), samples), _whole(_data(data, train=False), 10_000)


def _data(data: str, *, train: bool) -> Any:
    if data == "text":
        return load_text(None, train=train, context=64, max_bytes=TEXT_BYTES)
    if data == "digits":
        return load_digits(train=train)
    return load_fashion(data_folder(), train=train)


def _whole(data: Any, most: int) -> Pairs:
    rows = [data[index] for index in range(min(most, len(data)))]
    return torch.stack([x for x, _ in rows]), torch.stack([torch.as_tensor(y) for _, y in rows])


def run(trial: Trial, name: str, seed: int, peak: float) -> Result:
    """Train once; in a process of its own."""
    torch.set_num_threads(1)
    start, (train, test) = time.perf_counter(), load(trial.data, trial.samples)
    setting = next(one for one in SETTINGS if one.name == name)
    policy = setting.policy(trial.epochs, peak)
    nodes = SimulatedNodes(
        lambda: trial.build(seed),
        trial.inner,
        trial.nodes,
        policy=policy,
        settings=replace(setting.settings(), selective=getattr(policy, "selective", None)),
        outer=setting.outer,
        times=setting.times(),
    )
    losses = [_epoch(trial, nodes, train, seed, epoch, peak) for epoch in range(trial.epochs)]
    numel = sum(p.numel() for p in nodes.models[0].parameters())
    steps = nodes.state.batch
    return Result(
        score=score(nodes.models[0], *test),
        loss=losses[-1],
        nbytes=nodes.global_bytes_sent,
        ddp_nbytes=steps * 2 * (trial.nodes - 1) * 4 * numel,
        exchanges=len(nodes.events),
        gain=nodes.state.gain,
        steps=steps,
        seconds=time.perf_counter() - start,
    )


def _epoch(
    trial: Trial, nodes: SimulatedNodes, train: Pairs, seed: int, epoch: int, peak: float
) -> float:
    """Train one epoch; return the mean loss."""
    inputs, targets = train
    samplers = [
        ShardedSampler(len(inputs), rank=rank, size=trial.nodes, batch_size=trial.batch, seed=seed)
        for rank in range(trial.nodes)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    total, length = 0.0, len(samplers[0])
    for number, batches in enumerate(zip(*samplers, strict=True)):
        rate = _rate(peak, (epoch * length + number) / (trial.epochs * length))
        for inner in nodes.inners:
            inner.param_groups[0]["lr"] = rate
        total += nodes.step([_loss(inputs[one], targets[one]) for one in batches])
    nodes.end_epoch(total / length)
    nodes.synchronize()
    return total / length


def _rate(peak: float, done: float) -> float:
    """Return the learning rate: 2 % linear warm-up, then a cosine to zero."""
    return peak * min(1.0, done / 0.02 + 0.05) * (1 + math.cos(math.pi * done)) / 2


def _loss(inputs: torch.Tensor, targets: torch.Tensor) -> Callable[[torch.nn.Module], torch.Tensor]:
    return lambda model: loss_of(model, inputs, targets)


def trials(*, quick: bool) -> Iterator[tuple[Trial, tuple[str, ...]]]:
    """List what is run, and with which settings."""
    images = "fashion" if find_fashion(data_folder()) else "digits"
    everything = tuple(one.name for one in SETTINGS if one.name not in (SLOW, CORES))
    if quick:
        yield Trial(images, nodes=16, epochs=6, samples=10_000), QUICK
        return
    yield Trial(images, nodes=16, epochs=20, samples=15_000), everything
    yield Trial(images, nodes=2, epochs=8, samples=6_000), QUICK
    yield Trial(images, 2, 3, 60_000, batch=64, seeds=5, peaks=(0.1,), kind="short"), SHORT
    yield Trial(images, 16, 60, 15_000, seeds=2, kind="long"), LONG
    for nodes in (2, 16):
        peaks = (0.003, 0.006)
        yield Trial(images, nodes, 8, 500 * nodes, peaks=peaks, adamw=True), QUICK[:2]
    for nodes, seeds in ((2, 5), (4, 3), (8, 2), (16, 1)):  # 1,000 steps, as far as the text goes
        trial = Trial("text", nodes, 4, samples=1000 * nodes, batch=4, seeds=seeds)
        yield replace(trial, peaks=(0.003, 0.006), adamw=True), TEXT
    for nodes, seeds in ((2, 2), (4, 2), (8, 1)):  # 1.7 M numbers instead of 0.12 M
        trial = Trial("text", nodes, 4, samples=1000 * nodes, batch=4, seeds=seeds, kind="wide")
        yield replace(trial, peaks=(0.001,), adamw=True, width=256), WIDE
