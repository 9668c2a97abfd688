"""Steps each layer when forward reaches it, once its gradients arrived.

With a step for the whole model, a forward waits until all gradients have crossed, whatever their
order. Here ``step()`` only notes that a step is due, with the learning rates of that moment. Before
a module's forward, the hook waits for the portions of its parameters, and the user's optimizer
steps these parameters alone: its arithmetic is per parameter, so the bits are the same. Parameters
that no forward reached are stepped by `LayerwiseStep.flush`, at the latest when the next backward
begins.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from daso.errors import ConfigError
from daso.train.gradients.partial_step import refuse_counting, step_with, values_of
from daso.train.gradients.reducer import GradientReducer
from daso.train.inner.steps import has_hooks
from daso.train.model.module_params import ModuleParameters
from daso.train.model.one_copy import Hook
from daso.train.model.params import Trained

INSTEAD = "use Gradients(step='model')"


@dataclass(slots=True)
class PendingStep:
    """A step that is due."""

    values: list[dict[str, Any]]  # of each parameter group, as they were at step()
    pending: set[int]  # indices of parameters that are not stepped yet
    had_grad: set[int]  # of those that had a gradient at step()
    zero: bool | None = None  # set_to_none of a later zero_grad; None: it was not called
    dropped: bool = False  # a gradient was not finite
    begun: bool = False  # a forward reached its first layer
    checked: bool = False  # that the program did not write gradients before the first step


class LayerwiseStep:
    """Steps an optimizer layer by layer.

    Args:
        trained: The optimizer and its model; every module gets hooks.
        buckets: Averages the gradients.
        drop: Counts a step whose mean gradient is not finite; may raise, on every rank alike. None:
            gradients are not checked.
        good: Counts a step whose gradients are finite.
    """

    def __init__(
        self,
        trained: Trained,
        buckets: GradientReducer,
        drop: Callable[[str], None] | None = None,
        good: Callable[[], None] | None = None,
    ) -> None:
        assert trained.module is not None, "the setup was checked"
        self._trained, self._buckets, self._drop, self._good = trained, buckets, drop, good
        self._uses = ModuleParameters(trained.module, trained.named)
        self._due: PendingStep | None = None
        # Parameters stepped in the middle of a forward because their gradients had arrived, or when
        # a backward began; until that forward reached their module it used the old values.
        self._stepped_early: set[int] = set()
        with ExitStack() as hooks:
            self._watch(trained.module, hooks)
            self._hooks = hooks.pop_all()

    def _watch(self, model: torch.nn.Module, hooks: ExitStack) -> None:
        """Register the hooks on parameters and modules; the stack takes them off."""
        flush = Hook(self.flush)
        for index, (_, tensor) in enumerate(self._trained.named):
            check = partial(self._check, index)
            hooks.callback(tensor.register_post_accumulate_grad_hook(check).remove)
        for name, module in model.named_modules():
            before = Hook(partial(self._before, name))
            # Before the user's own, which may compute a weight (weight_norm, pruning).
            hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            hooks.callback(module.register_state_dict_pre_hook(flush).remove)
            hooks.callback(module.register_load_state_dict_pre_hook(flush).remove)

    # --- a step ------------------------------------------------------------------------------

    def step(self) -> None:
        """Note that a step is due. Waits only for parameters that no module's forward needs."""
        inner = self._trained.inner
        if has_hooks(inner):
            raise ConfigError(
                f"an optimizer that steps layer by layer must have no hooks on its step, but "
                f"{type(inner).__name__} has; {INSTEAD}",
                code="layerwise-step-with-hooks",
            )
        if not self._buckets.rows.untouched():
            raise ConfigError(
                f"gradients must be left alone between backward and step where no step waits for "
                f"all of them, but they were changed (clipping, scaling?); {INSTEAD}",
                code="gradients-changed-before-step",
            )
        tensors = [tensor for _, tensor in self._trained.named]
        self._due = PendingStep(
            values=values_of(inner.param_groups),
            pending=set(range(len(tensors))),
            had_grad={index for index, tensor in enumerate(tensors) if tensor.grad is not None},
        )
        self._stepped_early.clear()
        self._apply(self._uses.nowhere, alone=True)

    def begin(self) -> None:
        """Finish the last step, since a backward begins or ends."""
        pending = set() if self._due is None else set(self._due.pending)
        self.flush()
        self._stepped_early |= pending

    def _check(self, index: int, _: torch.Tensor) -> None:
        if index in self._stepped_early or (self._due is not None and index in self._due.pending):
            raise ConfigError(
                f"parameters must be used by a module's forward where no step waits for all "
                f"gradients, but {self._trained.named[index][0]} was used before the step with "
                f"its last gradient; call the module, or {INSTEAD}",
                code="parameter-used-before-step",
            )

    def flush(self) -> None:
        """Finish the step that is due. Collective over the world; blocking."""
        if self._due is not None:
            self._apply(tuple(self._due.pending))

    def zero_grad(self, set_to_none: bool) -> bool:
        """Reset gradients, of parameters that are not stepped yet once they are."""
        if self._due is None:
            return False
        self._due.zero = set_to_none
        waiting = {id(self._trained.named[index][1]) for index in self._due.pending}
        for group in self._trained.inner.param_groups:
            for param in group["params"]:
                if id(param) not in waiting:
                    _zero(param, set_to_none)
        return True

    def close(self) -> None:
        """Take the hooks off, and forget a step that is due; idempotent."""
        self._hooks.close()
        self._due = None

    def _before(self, name: str) -> None:
        """Step the parameters that a module's forward needs."""
        params = self._uses.called(name)
        if self._due is not None:
            self._apply(params)
        self._stepped_early.difference_update(params)

    def _apply(self, params: Iterable[int], *, alone: bool = False) -> None:
        """Step parameters that are not stepped yet, once their gradients arrived.

        Others whose gradients arrived are stepped too: one step for many costs less than many.
        """
        due = self._due
        if due is None:
            return
        needed = due.pending.intersection(params)
        if not needed:
            return
        self._check_gradients(due)
        self._buckets.carried.collect(needed)
        chosen = sorted(needed if alone else self._buckets.carried.arrived(due.pending))
        self._buckets.carried.collect(chosen)
        self._buckets.rows.restore_reset_grads(chosen)  # collected for others, and reset since
        if due.begun:
            self._stepped_early.update(chosen)
        due.begun = due.begun or not alone
        due.pending.difference_update(chosen)
        if not due.pending:
            self._due = None
        unsound = self._buckets.rows.nonfinite_of(chosen) if self._drop is not None else []
        try:
            self._step_with(due, [index for index in chosen if index not in unsound])
            if unsound and self._drop is not None and not due.dropped:
                due.dropped = True
                name = self._trained.named[unsound[0]][0]
                self._drop(f"the mean gradient of {name} is not finite; its step is dropped")
        finally:
            self._zero(due, chosen)
        if self._due is None and not due.dropped and self._good is not None:
            self._good()

    def _check_gradients(self, due: PendingStep) -> None:
        """Treat a gradient that ``model.zero_grad()`` removed since step() as a reset of all.

        Parameters that are still to be stepped get their gradient back when it arrives.
        """
        named = self._trained.named
        if due.zero is None and any(named[index][1].grad is None for index in due.had_grad):
            due.zero = True
        if not due.checked and not self._buckets.rows.untouched():
            raise ConfigError(
                "gradients must be reset by optimizer.zero_grad(), or set to None, where no step "
                f"waits for all of them, but they were written to after step(); {INSTEAD}",
                code="gradients-written-after-step",
            )
        due.checked = True

    def _step_with(self, due: PendingStep, chosen: Iterable[int]) -> None:
        inner, params = self._trained.inner, {id(self._trained.named[at][1]) for at in chosen}

        def check() -> None:
            refuse_counting(inner, due.values, INSTEAD)

        step_with(inner, params, due.values, self._trained.device, check)

    def _zero(self, due: PendingStep, chosen: Iterable[int]) -> None:
        if due.zero is not None:
            for index in chosen:
                _zero(self._trained.named[index][1], due.zero)


def _zero(param: torch.Tensor, set_to_none: bool) -> None:
    if param.grad is None:
        return
    if set_to_none:
        param.grad = None
    else:
        with torch.no_grad():
            param.grad.zero_()
