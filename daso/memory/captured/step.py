"""A training step of fixed structure, recorded once and then run in memory planned in advance.

Forward and backward pass are traced into one list of operations. One run of it tells how much
memory each result needs, and for how long; from then on all of them lie in one arena, and nothing
is allocated where an operation can write to memory that it is given.
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
from daso.memory.captured.guards import Guard, Tensors, Whole, autocast_kinds, first_hook
from daso.memory.captured.planner import lower_bound, pack
from daso.memory.captured.recorded import UnfitError
from daso.memory.captured.tracing import capture, without_autocast

__all__ = ["CapturedReport", "CapturedStep"]

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
Values = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class CapturedReport:
    """What a captured step needs.

    Args:
        way: Who planned the arena; empty if the step could not be captured.
        arena: Bytes of the arena. Gradients that become ``.grad`` as they are lie outside it.
        bound: Bytes that no arena can do without.
        one_by_one: Bytes of all buffers, if each had its own memory.
        ops: Operations of a step, views not counted.
        direct: Of these, the ones that write to the arena themselves: allocate no result.
        in_place: The ones that change what is there already.
        allocating: The ones that cannot, and allocate their result: how many, by name.
        allocated: Bytes of such results that are needed at once, at most; beside the arena.
        fallbacks: Calls that ran as ordinary steps.
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
    fallbacks: int = 0


class CapturedStep:
    """A training step of fixed structure, run in one planned piece of memory.

    Loss, gradients, buffers and random numbers are those of the ordinary step, to the bit: the two
    are compared when the step is captured. Each gradient is given to its parameter while backward
    goes on, and the parameter's ``register_post_accumulate_grad_hook`` hooks are called then, as by
    autograd: `daso.DASO` and `daso.attach` average meanwhile. A call for which it was not captured
    (other shapes, ``model.eval()``, autocast, ...) runs as an ordinary step, and so do all calls if
    the model cannot be captured; either is warned of once. What Python computes from anything but
    the model's own attributes is that of the capture, and so are lists and dictionaries in these.

    Args:
        model: Called with the inputs. Capturing leaves it as it is.
        loss_fn: Called with what the model returns and the targets; returns one number.
        inputs: A tensor, or a tuple of tensors, of the shapes that steps will have.
        targets: Likewise.
        way: How memory is planned: ``"best"`` or one of `daso.memory.captured.planner.WAYS`.

    Raises:
        ConfigError: An argument is not of this kind, nothing is to be trained, or a module or a
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
        given = _given(inputs, targets)
        _check(model, loss_fn, given)
        pack([], way)
        self._whole = Whole(model, loss_fn)
        if name := first_hook(self._whole):
            raise ConfigError(
                f"a captured step must have no hooks but those on accumulated gradients, since it "
                f"calls no modules and its gradients do not pass through autograd, but {name} has "
                f"one: remove it, or do not capture; daso's own are not there with "
                f"Gradients(step='model')"
            )
        self._tensors = Tensors(self._whole)
        with torch.enable_grad():
            self._guard = Guard(self._whole, self._tensors, given)
        self._casts = bool(autocast_kinds(targets.device))
        self._fallbacks = self._told = 0
        self._run: ArenaRun | None = None
        try:
            self._run = capture(self._whole, self._tensors, given, way)
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
        """Run forward and backward pass; gradients are added to those of the parameters.

        Args:
            inputs: As when the step was captured.
            targets: Likewise.

        Returns:
            The loss, detached.

        Raises:
            ConfigError: Inputs or targets are not tensors.
        """
        given = _given(inputs, targets)
        values: list[Any] = [*self._tensors.read(), *given]
        if self._run is None or (odd := self._guard.broken(values)):
            if self._run is not None:
                self._warn(odd)
            return self._ordinary(given)
        casts = without_autocast(targets.device) if self._casts else nullcontext()
        with torch.no_grad(), casts:
            loss = self._run.forward(values).clone()
            gradients = Gradients(values[: self._tensors.nparams])
            backward = partial(self._run.backward, gradients)
            if gradients.hooked():
                in_backward(backward)
            else:
                backward()
        self._run.forget(range(len(values) - len(given), len(values)))
        return loss

    def report(self) -> CapturedReport:
        """Return what the step needs, and how many calls ran without the arena."""
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
            fallbacks=self._fallbacks,
        )

    def _warn(self, odd: str) -> None:
        if not self._told:
            self._told = 1
            warnings.warn(
                f"{odd}: this call runs as an ordinary step, and so will others that differ from "
                f"the capture. Make another CapturedStep for them",
                stacklevel=3,
            )

    def _ordinary(self, given: Values) -> torch.Tensor:
        self._fallbacks += 1
        loss = self._whole.loss_fn(self._whole.model(*given[:-1]), given[-1])
        loss.backward()
        return loss.detach()


def _given(inputs: Any, targets: Any) -> tuple[torch.Tensor, ...]:
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    for name, one in (*(("inputs", one) for one in given), ("targets", targets)):
        if not isinstance(one, torch.Tensor):
            raise ConfigError(
                f"{name} must be a tensor{' or a tuple of tensors' * (name == 'inputs')}, not "
                f"{type(one).__name__}: convert it"
            )
    return (*given, targets)


def _check(model: Any, loss_fn: Any, given: Values) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}: wrap it")
    if not callable(loss_fn):
        raise ConfigError(
            f"loss_fn must be callable with outputs and targets, not {loss_fn!r}: pass a function"
        )
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(
            "a parameter of the model must need a gradient, but none does: unfreeze one"
        )
    for one in given:
        if one.requires_grad:
            raise ConfigError(
                "inputs and targets must not need gradients, which a captured step returns for "
                "parameters only, but one does: detach it"
            )
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise ConfigError(
                "the model must not be a DistributedDataParallel, whose averaging is done by "
                "hooks inside autograd, which a captured step does not call: pass its module"
            )
