"""Lightning with DASO instead of DDP: a strategy, and its cluster environment."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy

from daso.comm.topology import Topology, default
from daso.errors import ConfigError
from daso.train.attach import Attached, attach


class DasoEnvironment(ClusterEnvironment):
    """Lightning's cluster environment of ranks that an MPI launcher started.

    Args:
        topology: Topology of the ranks.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology

    @property
    def creates_processes_externally(self) -> bool:
        """Return True: the launcher has started all ranks."""
        return True

    @property
    def main_address(self) -> str:
        """Return the host of world rank 0; unused, because ranks are connected already."""
        return self._topology.liveness.hosts[0]

    @property
    def main_port(self) -> int:
        """Return no port, because ranks are connected already."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: only a `DasoStrategy` selects this environment."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks of the world."""
        return self._topology.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher defines it."""

    def global_rank(self) -> int:
        """Return the world rank."""
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher defines it."""

    def local_rank(self) -> int:
        """Return the rank inside the node."""
        return self._topology.local_rank

    def node_rank(self) -> int:
        """Return the index of the node."""
        return self._topology.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise `ConfigError` if a Trainer was created for other ranks."""
        world = self._topology
        if (num_devices, num_nodes) != (world.local_size, world.nodes):
            raise ConfigError(
                f"Trainer must be given the ranks that were started, devices={world.local_size}, "
                f"num_nodes={world.nodes}, not devices={num_devices}, num_nodes={num_nodes}; pass "
                f"devices=world.local_size, num_nodes=world.nodes",
                code="trainer-of-other-ranks",
            )


class DasoStrategy(DDPStrategy):
    """Lightning strategy that attaches DASO to the module's optimizers instead of DDP.

    Call `daso.integrations.start` first, then ``Trainer(strategy=DasoStrategy(),
    devices=world.local_size, num_nodes=world.nodes)``. Samplers are sharded over all ranks, rank 0
    logs and saves; ranks synchronize before they validate or save.

    Args:
        daso: Keywords of `daso.attach`: policy, wire, exchange, ...
        **kwargs: As for Lightning's ``DDPStrategy``.
    """

    strategy_name = "daso"

    def __init__(self, daso: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._topology = default()
        super().__init__(cluster_environment=DasoEnvironment(self._topology), **kwargs)
        self._keywords = daso or {}
        self.handles: list[Attached] = []

    @property
    def root_device(self) -> torch.device:
        """Return this rank's device: ranks of a host use its devices in turn."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self._topology.host_rank % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the keywords of samplers over all ranks."""
        return {"num_replicas": self._topology.world_size, "rank": self._topology.rank}

    def configure_ddp(self) -> None:
        """Leave the module unwrapped: DASO averages by hooks on optimizers."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the module's optimizers, and attach DASO. Collective over the world; blocking."""
        super().setup_optimizers(trainer)
        self.close()
        self.handles = [
            attach(optimizer, module=self.model, topology=self._topology, **self._keywords)
            for optimizer in self.optimizers
        ]
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(callback, _Synchronize) for callback in callbacks):
            callbacks.append(_Synchronize(self))

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the closure, then step, as loops without Lightning do; LBFGS calls it itself.

        Collective over the world in the sense of the schedule.
        """
        plugin: Any = self.precision_plugin
        is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim")
        if (
            not is_torch_optimizer
            or isinstance(optimizer, torch.optim.LBFGS)
            or _steps_itself(plugin)
        ):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank without reductions."""
        with ExitStack() as stack:
            for handle in self.handles:
                stack.enter_context(handle.no_sync())
            yield

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Give all ranks the same parameters, as `daso.DASO.synchronize` does.

        Collective over the world; blocking.
        """
        for handle in self.handles:
            handle.synchronize(optimizer_state=optimizer_state)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's synchronized state.

        Collective over the world; blocking.
        """
        self.synchronize(optimizer_state=True)
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def close(self) -> None:
        """Synchronize, and stop exchanging. Collective over the world; blocking; idempotent."""
        handles, self.handles = self.handles, []
        for handle in handles:
            handle.synchronize(optimizer_state=True)
            handle.close()


def _steps_itself(plugin: Any) -> bool:
    """Return whether a precision plugin orders closure and step differently."""
    return type(plugin).optimizer_step is not Precision.optimizer_step


class _Synchronize(Callback):
    """Synchronizes ranks before validation, and at the end."""

    def __init__(self, strategy: DasoStrategy) -> None:
        self._strategy = strategy

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Synchronize."""
        self._strategy.synchronize()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Synchronize and close, before the module is moved to the CPU."""
        self._strategy.close()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Close after a fit without training."""
        self._strategy.close()
