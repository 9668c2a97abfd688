"""Training methods for the same model on several ranks, each behind the same `step`."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import daso
from daso.cli.bench.models import Batch, Case, loss_of
from daso.cli.bench.names import COMPUTE, DDP, OURS
from daso.comm.topology import Topology
from daso.errors import ConfigError

# Batches between averages of PostLocalSGD: as in torch's documentation, and less frequent.
PERIOD, LONG_PERIODS = 4, (16, 64)
DILOCO_PERIOD = 32
POWER_SGD = "DDP, gloo, PowerSGD"
WHOLE_MIB = 1 << 12  # more than any of these models has of gradients


class Contender(Protocol):
    """Training method that the bench compares."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def begin_round(self) -> None:
        """Prepare for a round. Collective over the world in the sense of the method."""
        ...

    def step(self, batch: Batch) -> None:
        """Train on a batch. Collective over the world in the sense of the method."""
        ...

    def may_end_round(self) -> bool:
        """Return whether a round may end here: as many exchanges are finished as at its start."""
        ...

    def drain(self) -> None:
        """Wait for exchanges in flight without merging them. Not collective."""
        ...

    def finish(self) -> None:
        """Give all ranks the same model. Collective over the world; blocking."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Return the method's own figures."""
        ...

    def close(self) -> None:
        """Release all resources. Collective over the world."""
        ...


@dataclass
class Plain:
    """A model and an optimizer that the bench only steps: alone, or through DDP's hooks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    averaged_every: int = 1  # batches between averages; a round holds whole periods
    steps: int = 0

    def begin_round(self) -> None:
        """Do nothing."""

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        loss_of(self.model, *batch).backward()
        self.optimizer.step()
        self.steps += 1

    def may_end_round(self) -> bool:
        """Return whether a round may end here."""
        return self.steps % self.averaged_every == 0

    def drain(self) -> None:
        """Do nothing: steps leave no exchange in flight."""

    def finish(self) -> None:
        """Take the mean of parameters, and world rank 0's buffers, as users of DDP save."""
        if self.averaged_every > 1:
            for param in self.model.parameters():
                dist.all_reduce(param.data, dist.ReduceOp.SUM)
                param.data /= dist.get_world_size()
        for buffer in self.model.buffers():
            dist.broadcast(buffer, 0)

    def report(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class Daso(Plain):
    """`daso.DASO` with some keywords."""

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, topology: Topology, **keywords: Any
    ) -> None:
        self.wrapped = daso.DASO(inner, module=model, topology=topology, **keywords)
        super().__init__(model, self.wrapped)

    def may_end_round(self) -> bool:
        """Return whether the last step merged an exchange, so that rounds hold whole exchanges.

        Never true if the same step starts the next exchange: its remainder arrives between rounds.
        """
        self.wrapped.flush()  # steps that layers take one by one belong to this round
        report = self.wrapped.report()
        synchronous = report["skip_history"][-1][1:] == (1, 0)
        if synchronous or report["world"] == 1 or report["nodes"] == 1:
            return True
        merged = [event["received"] for event in report["events"] if "received" in event]
        return bool(merged) and merged[-1] == report["batches"] and not report["in_flight"]

    def drain(self) -> None:
        """Wait for the exchange in flight; its result is merged when it is due."""
        self.wrapped.state_dict()  # waits for it, and changes nothing

    def finish(self) -> None:
        """Average parameters and buffers."""
        self.wrapped.synchronize()

    def report(self) -> Mapping[str, Any]:
        """Return counts of exchanges, and exposed seconds."""
        report: Mapping[str, Any] = self.wrapped.report()
        keys = (
            "exchanges",
            "exposed_seconds",
            "global_bytes_sent",
            "skip_history",
            "small_history",
            "small_exchanges",
            "measurements",
            "wire",
        )
        own = [event["own_seconds"] for event in report["events"] if "own_seconds" in event]
        packing = {"own_seconds": statistics.median(own)} if own else {}
        return {key: report[key] for key in keys} | packing

    def close(self) -> None:
        """Stop communicating."""
        self.wrapped.close()


Make = Callable[[Case, Topology], Contender]


def start(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, the same on every rank, and its optimizer."""
    torch.manual_seed(0)
    model = case.build()
    return model, case.optimizer(list(model.parameters()))


def _compute(case: Case, _: Topology) -> Contender:
    return Plain(*start(case))


def _ddp(hook: Callable[..., Any] | None = None) -> Make:
    def make(case: Case, _: Topology) -> Contender:
        model, optimizer = start(case)
        parallel = DistributedDataParallel(model)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        return Plain(parallel, optimizer)

    return make


def _power_sgd(case: Case, _: Topology) -> Contender:
    model, optimizer = start(case)
    # One bucket: over gloo, callbacks of several buckets start collectives in any order.
    parallel = DistributedDataParallel(model, bucket_cap_mb=WHOLE_MIB)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook)
    return Plain(parallel, optimizer)


def _ddp_hook(wire: str) -> Make:
    def make(case: Case, _: Topology) -> Contender:
        model, optimizer = start(case)
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(daso.ddp_hook_state(wire=wire), daso.ddp_hook)
        return Plain(parallel, optimizer)

    return make


def _post_local_sgd(period: int) -> Make:
    def make(case: Case, _: Topology) -> Contender:
        # Its import warns about modules that torch imports in turn.
        from torch.distributed.optim import PostLocalSGDOptimizer

        model, optimizer = start(case)
        parallel = DistributedDataParallel(model)
        alone, _ = dist.new_subgroups(1)  # a node of one rank has no average inside
        state = PostLocalSGDState(
            None, alone, start_localSGD_iter=0, post_local_gradient_allreduce=False
        )
        parallel.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period=period, warmup_steps=0)
        return Plain(parallel, PostLocalSGDOptimizer(optimizer, averager), averaged_every=period)

    return make


def wrapped_by(**keywords: Any) -> Make:
    """Return a factory of `daso.DASO` contenders with these keywords."""

    def make(case: Case, topology: Topology) -> Contender:
        return Daso(*start(case), topology, **keywords)

    return make


def _nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105)."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


CONTENDERS: Mapping[str, Make] = {
    COMPUTE: _compute,
    OURS: wrapped_by(),
    "DASO Auto, bf16": wrapped_by(wire="bf16"),
    "DASO Auto, int4": wrapped_by(wire="int4"),
    "DASO Fixed(4, 1), bf16": wrapped_by(policy=daso.Fixed(4, 1), wire="bf16"),
    "DASO Plateau, bf16": wrapped_by(  # as published; an epoch is longer than the bench
        policy=daso.Plateau(epochs=1, warmup=0, cooldown=0), wire="bf16", merge="daso"
    ),
    "DASO synchronous": wrapped_by(policy=daso.Fixed(1, 0)),
    **{
        f"DASO synchronous, {wire}": wrapped_by(
            policy=daso.Fixed(1, 0), gradients=daso.Gradients(wire=wire)
        )
        for wire in ("int8", "int4")
    },
    DDP: _ddp(),
    "DDP, gloo, fp16": _ddp(default_hooks.fp16_compress_hook),
    POWER_SGD: _power_sgd,
    "DDP, gloo, daso int4": _ddp_hook("int4"),
    **{f"PostLocalSGD, every {n}": _post_local_sgd(n) for n in (PERIOD, *LONG_PERIODS)},
    f"DiLoCo, every {DILOCO_PERIOD}": wrapped_by(
        policy=daso.Fixed(DILOCO_PERIOD, 1), wire="bf16", outer=_nesterov
    ),
}


def can_run(name: str) -> bool:
    """Return whether a contender runs here."""
    # PowerSGD's hook synchronizes with the machine's GPU even for models on the CPU.
    return name != POWER_SGD or not torch.cuda.is_available()


def check_can_run(names: Iterable[str]) -> None:
    """Refuse contenders that do not run here."""
    for name in names:
        if not can_run(name):
            raise ConfigError(
                f"{name!r} must run on a machine without a GPU (this bench trains on CPUs), but "
                f"torch sees one; leave it out, or set CUDA_VISIBLE_DEVICES to nothing",
                code="baseline-needs-no-gpu",
            )
