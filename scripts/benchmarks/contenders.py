"""Contenders of the project's own benchmarks: orders of gradients, sums in a node, servers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import daso
from daso.cli.bench.baselines import CONTENDERS, Contender, Make, Plain, start, wrapped_by
from daso.cli.bench.models import Batch, Case, loss_of
from daso.cli.bench.names import DDP, OURS
from daso.comm.mpi import load
from daso.comm.topology import Topology

__all__ = [
    "ALLREDUCE",
    "BUCKETS",
    "FIFO",
    "HOST",
    "INSIDE",
    "ORDERS",
    "PRIORITIZED",
    "PRIORITY",
    "SERVERS",
    "UNBOUNDED",
]

UNBOUNDED = "unbounded"


def _ordered(portions: Any, mebibytes: float | None, *, whole: bool) -> Make:
    gradients = daso.Gradients(
        reducer="prioritized",
        priority=portions,
        step="model" if whole else "layerwise",
        bucket_bytes="auto" if mebibytes is None else int(mebibytes * (1 << 20)),
    )
    return wrapped_by(gradients=gradients)


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
    BUCKETS: wrapped_by(policy=daso.Fixed(1, 0)),
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
    return wrapped_by(policy=daso.Fixed(1, 0), gradients=gradients)


# Of gradients inside one node: who adds them, and when.
ALLREDUCE, HOST = "MPI Allreduce after it", "host"
INSIDE: Mapping[str, Make] = {
    ALLREDUCE: _flat,
    HOST: _hosted("model"),
    "host, chunk updates": _hosted("layerwise"),
    "buckets": wrapped_by(policy=daso.Fixed(1, 0)),
    DDP: CONTENDERS[DDP],
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
}
