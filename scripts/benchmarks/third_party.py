"""Rivals that daso does not depend on, for where they are installed: Horovod and torchft.

torchft's servers write some lines for every exchange to stderr, unless ``RUST_LOG=error`` is set.
"""

import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from daso.cli.bench.baselines import (
    CONTENDERS,
    PERIOD,
    Contender,
    Make,
    Plain,
    can_run,
    check_can_run,
    start,
)
from daso.cli.bench.models import Case
from daso.comm.control import barrier, broadcast
from daso.comm.topology import Topology
from daso.errors import ConfigError

__all__ = ["EVERYBODY", "RIVALS", "Rival", "installed", "must_be_installed"]

OUTER_EVERY, OUTER_WAIT = 16, 4  # batches
PATIENCE = timedelta(minutes=5)  # a torchft rank waits while others are compared


@dataclass(frozen=True, slots=True)
class Rival:
    """A contender that needs a package."""

    make: Make
    package: str
    remedy: str


class Horovod(Plain):
    """Horovod's optimizer, over MPI."""

    def __init__(self, case: Case, compression: str) -> None:
        import horovod.torch as hvd

        self._hvd, self._compression = hvd, getattr(hvd.Compression, compression)
        hvd.init()
        model, inner = start(case)
        wrapped = hvd.DistributedOptimizer(
            inner,
            named_parameters=model.named_parameters(),
            compression=self._compression,
        )
        super().__init__(model, wrapped)
        hvd.shutdown()

    def begin_round(self) -> None:
        """Start Horovod's thread, which asks all ranks for work every millisecond.

        What it learns of tensors at their first average would be on a round's clock otherwise.
        """
        self._hvd.init()
        grads = [
            (name, self._compression.compress(torch.zeros_like(param))[0])
            for name, param in self.model.named_parameters()
        ]
        for handle in [self._hvd.allreduce_async_(grad, name=name) for name, grad in grads]:
            self._hvd.synchronize(handle)

    def drain(self) -> None:
        """End it: it would take a quarter of a core from the other contenders."""
        self._hvd.shutdown()


class Torchft(Plain):
    """torchft, every rank a replica group, with a lighthouse on world rank 0."""

    def __init__(
        self,
        case: Case,
        topology: Topology,
        wrap: Callable[[Any, nn.Module, torch.optim.Optimizer], Any],
        every: int,
    ) -> None:
        from torchft.coordination import LighthouseServer
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        rank_info = topology.rank_info
        model, inner = start(case)
        super().__init__(model, inner, averaged_every=every)
        self._topology, self._lighthouse = topology, None
        if rank_info.rank == 0:
            self._lighthouse = LighthouseServer(bind="[::]:0", min_replicas=rank_info.world_size)
        address = broadcast(topology, self._lighthouse and self._lighthouse.address())
        mine = socket.gethostbyname(socket.gethostname())
        self._store = dist.TCPStore(  # type: ignore[attr-defined]  # torch forgets to export it
            mine, 0, is_master=True, wait_for_workers=False
        )
        self._manager = Manager(
            ProcessGroupGloo(timeout=PATIENCE),
            None,
            None,
            rank_info.world_size,
            use_async_quorum=False,
            **{name: PATIENCE for name in ("timeout", "quorum_timeout", "connect_timeout")},
            rank=0,
            world_size=1,
            store_addr=mine,
            store_port=self._store.port,
            lighthouse_addr=address,
            replica_id=f"rank_{rank_info.rank}",
            init_sync=False,
        )
        self._hooks = ExitStack()
        self._hooks.enter_context(wrap(self._manager, model, inner))

    def report(self) -> Mapping[str, Any]:
        """Return how many exchanges all ranks took part in."""
        return {"exchanges": self._manager.current_step()}

    def close(self) -> None:
        """Take the hooks away and end the servers. Collective over the world; blocking."""
        self._hooks.close()
        barrier(self._topology)
        self._manager.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


def _horovod(compression: str) -> Make:
    return lambda case, _: Horovod(case, compression)


def _local_sgd(case: Case, topology: Topology) -> Contender:
    from torchft.local_sgd import LocalSGD

    return Torchft(case, topology, lambda *parts: LocalSGD(*parts, sync_every=PERIOD), PERIOD)


def _diloco(case: Case, topology: Topology) -> Contender:
    from torchft.local_sgd import DiLoCo

    def wrap(manager: Any, model: nn.Module, inner: torch.optim.Optimizer) -> Any:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(
            manager,
            [model],
            inner,
            outer,
            OUTER_EVERY,
            pin_memory=False,
            use_bucketization=True,
            fragment_sync_delay=OUTER_WAIT,
        )

    return Torchft(case, topology, wrap, OUTER_EVERY)


BUILD_HOROVOD = (
    "unpack its source, set CMAKE_CXX_STANDARD to 20 in CMakeLists.txt and "
    "horovod/torch/CMakeLists.txt, then there: HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_MPI=1 "
    "HOROVOD_WITHOUT_GLOO=1 pip install --no-build-isolation ."
)
RIVALS: Mapping[str, Rival] = {
    "Horovod": Rival(_horovod("none"), "horovod", BUILD_HOROVOD),
    "Horovod, fp16": Rival(_horovod("fp16"), "horovod", BUILD_HOROVOD),
    f"torchft LocalSGD, every {PERIOD}": Rival(_local_sgd, "torchft", "pip install torchft"),
    f"torchft DiLoCo, every {OUTER_EVERY}": Rival(_diloco, "torchft", "pip install torchft"),
}
EVERYBODY: Mapping[str, Make] = {
    **CONTENDERS,
    **{name: rival.make for name, rival in RIVALS.items()},
}


def installed(name: str) -> bool:
    """Return whether a contender has what it needs."""
    return can_run(name) and (name not in RIVALS or find_spec(RIVALS[name].package) is not None)


def must_be_installed(names: Iterable[str]) -> None:
    """Refuse contenders that cannot run."""
    check_can_run(names)
    for name in names:
        if not installed(name):
            rival = RIVALS[name]
            raise ConfigError(
                f"{rival.package} must be installed for --only {name!r}, but is not: {rival.remedy}"
            )
