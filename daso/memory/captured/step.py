"""A training step of fixed structure, recorded once and then run in one preplanned arena.

Forward and backward pass are traced into one list of operations. One run of it measures the size
and lifetime of each result. From then on all results have places in one arena, and nothing is
allocated if an operation can write to given memory.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from daso.errors import ConfigError
from daso.memory.captured.arena import ArenaRun
from daso.memory.captured.gradients import Gradients, in_backward
from daso.memory.captured.guards import Guard, ModelWithLoss, autocast_kinds
from daso.memory.captured.planner import lower_bound, pack
from daso.memory.captured.recorded import UnfitError
from daso.memory.captured.tracing import capture, without_autocast

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Values = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class CapturedReport:
    """Memory and operations of a captured step.

    Args:
        way: Heuristic that planned the arena; empty if the step could not be captured.
        arena: Bytes of the arena, without gradients that become ``.grad`` directly.
        bound: Lower bound of any arena, in bytes.
        one_by_one: Bytes of all results without sharing of memory.
        ops: Number of operations in a step, without views.
        direct: Number of those that write to the arena without allocating.
        in_place: Number of those that change an existing tensor.
        allocating: Number of those that allocate their results, by name.
        allocated: Peak bytes of these allocated results, in addition to the arena.
        ordinary: Peak bytes of all results in an ordinary step, without workspaces.
        fallbacks: Number of calls that ran as ordinary steps.
    """

    way: str = ""
    arena: int = 0
    bound: int = 0
    one_by_one: int = 0
    ops: int = 0
    direct: int = 0
    in_place: int = 0
    allocating: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    ordinary: int = 0
    fallbacks: int = 0


class CapturedStep:
    """A training step of fixed structure that runs in one preplanned arena.

    Loss, gradients, buffers and random numbers equal those of the ordinary step, bit for bit: the
    two are compared when the step is captured. Backward accumulates each gradient as soon as it is
    complete, and then calls the parameter's ``register_post_accumulate_grad_hook`` hooks, like
    autograd: `daso.DASO` and `daso.attach` average meanwhile. A call that differs from the capture
    (other shapes, ``model.eval()``, autocast, ...) runs as an ordinary step, and so do all calls if
    the model cannot be captured; either causes one warning. Values that Python computes from
    anything but the model's own attributes are fixed at capture, including the contents of lists
    and dictionaries in these attributes.

    Args:
        model: Called with the inputs. Capturing does not change it.
        loss_fn: Called with the model's output and the targets; returns one number.
        inputs: A tensor, or a tuple of tensors, with the shapes of all steps.
        targets: A tensor with the shape of all steps.
        way: Heuristic that plans memory: ``"best"`` or one of
            `daso.memory.captured.planner.WAYS`.

    Raises:
        ConfigError: An argument has a wrong type, no parameter is trained, or a module or a
            parameter has hooks that the captured step would not call.

    Sources: US10782897B2, claim 1; Sekiyama et al., arXiv 1804.10001.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Loss,
        inputs: torch.Tensor | tuple[torch.Tensor, ...],
        targets: torch.Tensor,
        *,
        way: str = "best",
    ) -> None:
        batch = _batch_of(inputs, targets)
        _check(model, loss_fn, batch)
        pack([], way)
        self._whole = ModelWithLoss(model, loss_fn)
        with torch.enable_grad():
            self._guard = Guard(self._whole, batch)
        if name := self._guard.hook_owner(self._guard.values(batch)):
            raise ConfigError(
                f"a captured step must have no hooks except on accumulated gradients, since it "
                f"calls no modules and its gradients do not pass through autograd, but {name} has "
                f"one: remove it, or do not capture; daso itself sets none with "
                f"Gradients(step='model')",
                code="captured-step-with-hooks",
            )
        self._casts = bool(autocast_kinds(targets.device))
        self._fallbacks, self._warned = 0, False
        self._run: ArenaRun | None = None
        try:
            self._run = capture(self._whole, self._guard.tensors, batch, way)
        except UnfitError as error:
            warnings.warn(
                f"a step can be captured only if torch can trace it and it runs the same "
                f"operations every time, but {error}: all calls run as ordinary steps. Change "
                f"this, or do not capture",
                stacklevel=2,
            )

    def __call__(
        self, inputs: torch.Tensor | tuple[torch.Tensor, ...], targets: torch.Tensor
    ) -> torch.Tensor:
        """Run forward and backward pass; gradients accumulate in the parameters' ``.grad``.

        Args:
            inputs: As when the step was captured.
            targets: As when the step was captured.

        Returns:
            The loss, detached.

        Raises:
            ConfigError: Inputs or targets are not tensors.
        """
        batch = _batch_of(inputs, targets)
        values: list[Any] = self._guard.values(batch)
        if self._run is None or (violation := self._guard.violation(values)):
            if self._run is not None:
                self._warn(violation)
            return self._run_ordinary(batch)
        casts = without_autocast(targets.device) if self._casts else nullcontext()
        with torch.no_grad(), casts:
            loss = self._run.forward(values).clone()
            gradients = Gradients(values[: self._guard.tensors.nparams])
            backward = partial(self._run.backward, gradients)
            if gradients.hooked():
                in_backward(backward)
            else:
                backward()
        self._run.forget(range(len(values) - len(batch), len(values)))
        return loss

    def report(self) -> CapturedReport:
        """Return memory and operations of the step, and the number of calls without the arena."""
        if self._run is None:
            return CapturedReport(fallbacks=self._fallbacks)
        plan, recording = self._run.plan, self._run.recording
        return CapturedReport(
            way=plan.way,
            arena=plan.nbytes,
            bound=plan.bound,
            one_by_one=sum(block.nbytes for block in recording.blocks),
            ops=len(recording.steps),
            direct=sum(recording.counted("out").values()),
            in_place=sum(recording.counted("in place").values()),
            allocating=recording.counted("allocates"),
            allocated=lower_bound([recording.blocks[home] for home in recording.loose]),
            ordinary=lower_bound(recording.blocks),
            fallbacks=self._fallbacks,
        )

    def _warn(self, violation: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{violation}: this call runs as an ordinary step, and so will others that differ "
                f"from the capture. Make another CapturedStep for them",
                stacklevel=3,
            )

    def _run_ordinary(self, batch: Values) -> torch.Tensor:
        self._fallbacks += 1
        loss = self._whole.loss_fn(self._whole.model(*batch[:-1]), batch[-1])
        loss.backward()
        return loss.detach()


def _batch_of(inputs: Any, targets: Any) -> tuple[torch.Tensor, ...]:
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    for name, value in (*(("inputs", value) for value in values), ("targets", targets)):
        if not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"{name} must be a tensor{' or a tuple of tensors' * (name == 'inputs')}, not "
                f"{type(value).__name__}; convert it",
                code="captured-input-not-tensor",
            )
    return (*values, targets)


def _check(model: Any, loss_fn: Any, batch: Values) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(
            f"model must be a torch.nn.Module, not {type(model).__name__}; wrap it",
            code="captured-model-not-module",
        )
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn must be callable with outputs and targets, not {loss_fn!r}; pass a function",
            code="loss-not-callable",
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "a parameter of the model must require a gradient, but none does; unfreeze one",
            code="captured-model-is-frozen",
        )
    for tensor in batch:
        if tensor.requires_grad:
            raise ConfigError(
                "inputs and targets must not require gradients, which a captured step computes "
                "only for parameters, but one does; detach it",
                code="captured-input-needs-gradient",
            )
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model must not be a DistributedDataParallel, whose averaging is done by "
                "hooks inside autograd, which a captured step does not call; pass its module",
                code="captured-model-is-ddp",
            )
