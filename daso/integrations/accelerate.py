"""Accelerate with DASO instead of DDP: data loaders, `gather` and checkpoints of all ranks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer

from daso.comm.topology import default
from daso.errors import ConfigError
from daso.train.attach import Attached, attach


class DasoAccelerator(Accelerator):  # type: ignore[misc]  # it has no types
    """An `accelerate.Accelerator` whose `prepare` attaches DASO to optimizers instead of DDP.

    Call `daso.integrations.start` first. Data loaders are sharded over all ranks, `gather` and
    `gather_for_metrics` cover all of them, and rank 0 saves. `save_state` synchronizes ranks before
    it saves, so that one copy is valid for all; call `synchronize` before you evaluate, or save
    yourself.

    Args:
        *args: As for `accelerate.Accelerator`.
        daso: Keywords of `daso.attach`: policy, wire, exchange, ...
        **kwargs: As for `accelerate.Accelerator`.
    """

    def __init__(self, *args: Any, daso: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_daso(daso or {})

    def use_daso(self, keywords: dict[str, Any]) -> None:
        """Reset to no optimizers; also converts an accelerator created by a framework."""
        self._keywords = keywords
        self.handles: dict[int, Attached] = {}  # by the id of the optimizer
        self._placed: list[torch.nn.Module] = []

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, and attach DASO to optimizers.

        Collective over the world; blocking.
        """
        prepared = super().prepare(*args, device_placement=device_placement)
        # Only of this call: loaders for evaluation may be prepared after training.
        for component in prepared if isinstance(prepared, tuple) else (prepared,):
            if (
                isinstance(component, AcceleratedOptimizer)
                and id(component.optimizer) not in self.handles
            ):
                self._attach(component.optimizer)
        return prepared

    def _attach(self, inner: torch.optim.Optimizer) -> None:
        size = default().world_size
        if self.num_processes != size:
            raise ConfigError(
                f"Accelerate must see all {size} ranks, but it sees {self.num_processes}; call "
                f"daso.integrations.start() before TrainingArguments or the accelerator is made, "
                f"on CPUs with cpu=True, and say so there too (use_cpu=True, cpu=True)",
                code="accelerate-sees-other-ranks",
            )
        self.handles[id(inner)] = attach(inner, module=self._model_of(inner), **self._keywords)

    def _model_of(self, inner: torch.optim.Optimizer) -> torch.nn.Module:
        trained = {id(param) for group in inner.param_groups for param in group["params"]}
        for model in reversed(self._placed):
            if any(id(param) in trained for param in model.parameters()):
                return model
        raise ConfigError(
            f"a model must be prepared with its optimizer, or before it, but none has the "
            f"parameters of {type(inner).__name__}; call accelerator.prepare(model, optimizer)",
            code="optimizer-without-model",
        )

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,  # noqa: ARG002
    ) -> torch.nn.Module:
        """Place a model without wrapping it: DASO averages between ranks, not DDP."""
        placed: torch.nn.Module = super().prepare_model(
            model, device_placement=device_placement, evaluation_mode=True
        )
        self._placed = [*(known for known in self._placed if known is not placed), placed]
        return placed

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Accumulate gradients on this rank without reductions."""
        with ExitStack() as stack:
            stack.enter_context(super().no_sync(model))
            for handle in self.handles.values():
                stack.enter_context(handle.no_sync())
            yield

    def synchronize(self, *, optimizer_state: bool = False) -> None:
        """Give all ranks the same parameters, as `daso.DASO.synchronize` does.

        Collective over the world; blocking.
        """
        for handle in self.handles.values():
            handle.synchronize(optimizer_state=optimizer_state)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Synchronize ranks, and save as Accelerate does. Collective; blocking."""
        self.synchronize(optimizer_state=True)
        return super().save_state(*args, **kwargs)

    def close(self) -> None:
        """Synchronize, and stop exchanging. Collective over the world; blocking; idempotent."""
        handles, self.handles = self.handles, {}
        for handle in handles.values():
            handle.synchronize(optimizer_state=True)  # it may be attached again
            handle.close()

    def free_memory(self, *objects: Any) -> Any:
        """Close DASO, and release prepared models. Collective over the world; blocking."""
        self.close()
        self._placed = []
        return super().free_memory(*objects)
