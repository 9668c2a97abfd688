"""Ways to train the same model on several ranks, each behind the same `step`."""

import statistics
from collections.abc import Callable, Mapping
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
from daso.cli.bench.names import COMPUTE, DDP, OURS, UNBOUNDED
from daso.comm.mpi import load
from daso.comm.topology import Topology

__all__ = [
    "ALLREDUCE",
    "BUCKETS",
    "CONTENDERS",
    "FIFO",
    "HOST",
    "INSIDE",
    "ORDERS",
    "PERIOD",
    "POWER_SGD",
    "PRIORITIZED",
    "PRIORITY",
    "SERVERS",
    "Contender",
    "Daso",
    "Make",
    "Plain",
    "start",
]

# Batches between averages of PostLocalSGD: as in torch's documentation, and less frequent.
PERIOD, LONG_PERIODS = 4, (16, 64)
DILOCO_PERIOD = 32
POWER_SGD = "DDP, gloo, PowerSGD"
WHOLE_MIB = 1 << 12  # more than any of these models has of gradients


class Contender(Protocol):
    """One way to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def wake(self) -> None:
        """Get ready for a round. Collective over the world in the sense of the method."""
        ...

    def step(self, batch: Batch) -> None:
        """Train on a batch. Collective over the world in the sense of the method."""
        ...

    def settled(self) -> bool:
        """Return whether as much is done as when a round began, so that it may end here."""
        ...

    def rest(self) -> None:
        """Let what is on its way arrive, without merging it. Does not communicate itself."""
        ...

    def finish(self) -> None:
        """Let all ranks hold the same model. Collective over the world; blocking."""
        ...

    def report(self) -> Mapping[str, Any]:
        """Return what else there is to say."""
        ...

    def close(self) -> None:
        """Give everything back. Collective over the world."""
        ...


@dataclass
class Plain:
    """A model and an optimizer that need no word from us: alone, or through DDP's hooks."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    averaged_every: int = 1  # batches from one average to the next; a round holds whole ones
    steps: int = 0

    def wake(self) -> None:
        """Nothing sleeps between rounds."""

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self.optimizer.zero_grad()
        loss_of(self.model, *batch).backward()
        self.optimizer.step()
        self.steps += 1

    def settled(self) -> bool:
        """Return whether a round may end here."""
        return self.steps % self.averaged_every == 0

    def rest(self) -> None:
        """Nothing is on its way between steps."""

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
        """Nothing is held."""


class Daso(Plain):
    """`daso.DASO` with some keywords."""

    def __init__(
        self, model: nn.Module, inner: torch.optim.Optimizer, topology: Topology, **keywords: Any
    ) -> None:
        self.wrapped = daso.DASO(inner, module=model, topology=topology, **keywords)
        super().__init__(model, self.wrapped)

    def settled(self) -> bool:
        """Return whether the last step merged an exchange, so that rounds hold whole ones.

        Never where the same step sends the next one: what is left of it arrives between rounds.
        """
        self.wrapped.flush()  # of steps that layers take one by one, which belong to this round
        found = self.wrapped.report()
        synchronous = found["skip_history"][-1][1:] == (1, 0)
        if synchronous or found["world"] == 1 or found["nodes"] == 1:
            return True
        merged = [one["received"] for one in found["events"] if "received" in one]
        return bool(merged) and merged[-1] == found["batches"] and not found["in_flight"]

    def rest(self) -> None:
        """Let the exchange finish; its result stays until it is due."""
        self.wrapped.state_dict()  # waits for it, and changes nothing

    def finish(self) -> None:
        """Average parameters and buffers."""
        self.wrapped.synchronize()

    def report(self) -> Mapping[str, Any]:
        """Return counts of exchanges, and what is exposed."""
        found: Mapping[str, Any] = self.wrapped.report()
        kept = (
            "exchanges",
            "exposed_seconds",
            "global_bytes_sent",
            "skip_history",
            "small_history",
            "small_exchanges",
            "measurements",
            "wire",
        )
        own = [one["own_seconds"] for one in found["events"] if "own_seconds" in one]
        packing = {"own_seconds": statistics.median(own)} if own else {}
        return {key: found[key] for key in kept} | packing

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
    # In one bucket: over gloo callbacks of several begin their collectives in any order.
    parallel = DistributedDataParallel(model, bucket_cap_mb=WHOLE_MIB)
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook)
    return Plain(parallel, optimizer)


def _post_local_sgd(period: int) -> Make:
    def make(case: Case, _: Topology) -> Contender:
        # It warns of what torch imports there.
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


def _daso(**keywords: Any) -> Make:
    def make(case: Case, topology: Topology) -> Contender:
        return Daso(*start(case), topology, **keywords)

    return make


def _nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the outer optimizer of DiLoCo (Douillard et al. 2023, arXiv 2311.08105)."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


CONTENDERS: Mapping[str, Make] = {
    COMPUTE: _compute,
    OURS: _daso(),
    "DASO Auto, bf16": _daso(wire="bf16"),
    "DASO Auto, int4": _daso(wire="int4"),
    "DASO Fixed(4, 1), bf16": _daso(policy=daso.Fixed(4, 1), wire="bf16"),
    "DASO synchronous": _daso(policy=daso.Fixed(1, 0)),
    **{
        f"DASO synchronous, {wire}": _daso(
            policy=daso.Fixed(1, 0), gradients=daso.Gradients(wire=wire)
        )
        for wire in ("int8", "int4")
    },
    DDP: _ddp(),
    "DDP, gloo, fp16": _ddp(default_hooks.fp16_compress_hook),
    POWER_SGD: _power_sgd,
    **{f"PostLocalSGD, every {n}": _post_local_sgd(n) for n in (PERIOD, *LONG_PERIODS)},
    f"DiLoCo, every {DILOCO_PERIOD}": _daso(
        policy=daso.Fixed(DILOCO_PERIOD, 1), wire="bf16", outer=_nesterov
    ),
}


def _ordered(portions: Any, mebibytes: float | None, *, whole: bool) -> Make:
    gradients = daso.Gradients(
        reducer="prioritized",
        priority=portions,
        step="model" if whole else "layerwise",
        bucket_bytes="auto" if mebibytes is None else int(mebibytes * (1 << 20)),
    )
    return _daso(gradients=gradients)


# Of synchronous gradients: what goes first, and what a forward waits for.
FIFO, PRIORITY, PRIORITIZED, BUCKETS = "fifo, barrier", "priority", "prioritized", "buckets"
ORDERS: Mapping[str, Make] = {
    FIFO: _ordered("fifo", 1, whole=True),
    "fifo, no barrier": _ordered("fifo", 1, whole=False),
    "priority, barrier": _ordered("layer", 1, whole=True),
    PRIORITY: _ordered("layer", 1, whole=False),
    PRIORITIZED: _ordered("layer", None, whole=False),
    **{
        f"priority, {mebibytes:g} MiB": _ordered("layer", mebibytes, whole=False)
        for mebibytes in (0.25, 0.5, 2, 4, 16)
    },
    BUCKETS: _daso(policy=daso.Fixed(1, 0)),
}


class Flat(Plain):
    """Adds all gradients by one call of MPI's when backward is over."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, topology: Topology
    ) -> None:
        super().__init__(model, optimizer)
        self._topology = topology
        params = list(model.parameters())
        self._flat = torch.zeros(sum(p.numel() for p in params))
        for param, row in zip(params, self._flat.split([p.numel() for p in params]), strict=True):
            param.grad = row.view_as(param)

    def step(self, batch: Batch) -> None:
        """Train on a batch."""
        self._flat.zero_()
        loss_of(self.model, *batch).backward()
        self._topology.world_comm.Allreduce(load().IN_PLACE, self._flat.numpy())
        self._flat /= self._topology.world_size
        self.optimizer.step()
        self.steps += 1


def _flat(case: Case, topology: Topology) -> Contender:
    return Flat(*start(case), topology)


def _hosted(update: Any) -> Make:
    gradients = daso.Gradients(reducer="host", step=update)
    return _daso(policy=daso.Fixed(1, 0), gradients=gradients)


# Of gradients inside one node: who adds them, and when.
ALLREDUCE, HOST = "MPI Allreduce after it", "host"
INSIDE: Mapping[str, Make] = {
    ALLREDUCE: _flat,
    HOST: _hosted("model"),
    "host, chunk updates": _hosted("layerwise"),
    "buckets": _daso(policy=daso.Fixed(1, 0)),
    DDP: _ddp(),
}


class Eager(Plain):
    """`daso.ParameterServer` with some keywords."""

    def __init__(self, case: Case, topology: Topology, **keywords: Any) -> None:
        model, _ = start(case)
        self.server = daso.ParameterServer(model, case.optimizer, topology=topology, **keywords)
        super().__init__(model, self.server)

    def finish(self) -> None:
        """Take in all gradients, and average buffers."""
        self.server.synchronize()

    def report(self) -> Mapping[str, Any]:
        """Return what was sent, and what is exposed."""
        return self.server.report()

    def close(self) -> None:
        """Stop serving."""
        self.server.close()


def _eager(**keywords: Any) -> Make:
    def make(case: Case, topology: Topology) -> Contender:
        return Eager(case, topology, **keywords)

    return make


# Where one rank may be slower than the others: all in step, or not.
SERVERS: Mapping[str, Make] = {
    DDP: CONTENDERS[DDP],
    "DASO synchronous": CONTENDERS["DASO synchronous"],
    OURS: CONTENDERS[OURS],
    "eager, in step, n=1": _eager(push_every=1),
    "eager, in step": _eager(),
    "eager, 1 step apart": _eager(staleness=1),
    "eager, 4 steps apart": _eager(staleness=4),
    f"eager, {UNBOUNDED}": _eager(staleness=None),
    f"eager, {UNBOUNDED}, shared state": _eager(staleness=None, optimizer_state="shared"),
    "eager, blocks, unbounded": _eager(mode="local_rows", staleness=None),
    "eager, replicas, unbounded": _eager(mode="replicated", staleness=None),
}
