"""Steps of the inner optimizer: by its wrapper, by a GradScaler, and torch's hidden ones.

After inf or NaN a scaler does not call ``step``, so ranks would count differently. It always calls
an optimizer with ``_step_supports_amp_scaling``, and sets ``grad_scale`` and ``found_inf`` on it:
every attempt then counts, on every rank.
"""

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from daso.plan.step_restoration import rate_of
from daso.torch_private import (
    disable_dynamo,
    has_step_hooks,
    own_pre_step_hooks,
    post_step_hooks,
    pre_step_hooks,
)
from daso.train.model.one_copy import Hook, nothing

logger = logging.getLogger("daso")
NATIVE = "_step_supports_amp_scaling"  # torch's name for an optimizer that unscales by itself


@dataclass(frozen=True, slots=True)
class Scaling:
    """Scale and inf flag that a GradScaler sets on the optimizer that it steps."""

    found_inf: torch.Tensor  # 0-dim, above 0 if so
    grad_scale: torch.Tensor | None = None  # 0-dim; None: gradients are unscaled already

    @classmethod
    def of(cls, stepped: torch.optim.Optimizer) -> "Scaling | None":
        """Return the settings of a scaler; None if no scaler takes this step."""
        # Not getattr: daso.DASO delegates missing attributes to its inner optimizer.
        found_inf = stepped.__dict__.get("found_inf")
        return None if found_inf is None else cls(found_inf, stepped.__dict__.get("grad_scale"))

    def unscale(self, inner: torch.optim.Optimizer) -> bool:
        """Divide gradients by the scale, as the scaler would; return whether they are finite."""
        if self.grad_scale is not None:
            inverse = self.grad_scale.double().reciprocal().float()
            grads = [p.grad for g in inner.param_groups for p in g["params"] if p.grad is not None]
            for grad in grads:
                grad.mul_(inverse.to(grad.device))
        return not bool(self.found_inf)


def is_probe(inner: torch.optim.Optimizer) -> bool:
    """Return whether this is the step with which torch.distributed.checkpoint creates state.

    It steps an optimizer without state once, with lr 0 and zero gradients.
    """
    if inner.state:
        return False
    groups = inner.param_groups
    if any(group.get("lr") is None or float(group["lr"]) != 0 for group in groups):
        return False
    grads = [p.grad for group in groups for p in group["params"] if p.requires_grad]
    return all(grad is not None and not bool(grad.any()) for grad in grads)


_stepping: set[int] = set()  # ids of the optimizers that daso steps now


@contextmanager
def stepping(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Mark steps of a wrapped optimizer inside the context as its wrapper's."""
    _stepping.add(id(inner))
    try:
        yield
    finally:
        _stepping.discard(id(inner))


class InnerSteps:
    """Warns once if a wrapped optimizer is stepped directly, which skips exchanges.

    Args:
        inner: The user's optimizer.
        warns: Returns whether this rank logs the warning; held by a weak reference.
    """

    def __init__(self, inner: torch.optim.Optimizer, warns: Callable[[], bool]) -> None:
        self._warns: weakref.WeakMethod[Any] | None = weakref.WeakMethod(warns)
        self._warned = warns()  # used once the wrapper was dropped
        self._handle = inner.register_step_post_hook(self) if has_step_hooks(inner) else None

    @disable_dynamo
    def __call__(self, inner: torch.optim.Optimizer, *_: object) -> None:
        """Warn if the step was not the wrapper's."""
        if id(inner) in _stepping or self._warns is None:  # before rates, which may be on a device
            return
        warns = self._warns()
        # torch.distributed.checkpoint steps with a learning rate of 0 to make state.
        probes = all(rate_of(group, 1.0) == 0 for group in inner.param_groups)
        if probes or not (self._warned if warns is None else warns()):
            return
        self._warns = None
        logger.warning(
            "the optimizer that daso.DASO returned must be stepped, but %sthe %s inside it was: "
            "nothing is exchanged by that; call step() of what daso.DASO returned",
            "it was dropped, and " if warns is None else "",
            type(inner).__name__,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)  # a copy of the inner optimizer has no wrapper

    def close(self) -> None:
        """Remove the hook; idempotent."""
        if self._handle is not None:
            self._handle.remove()


def has_hooks(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks other than daso's."""
    post = post_step_hooks(inner).values()
    return bool(pre_step_hooks(inner)) or any(not isinstance(hook, InnerSteps) for hook in post)


def run_pre_step_hooks(
    stepped: torch.optim.Optimizer, closure: Callable[[], Any] | None
) -> tuple[Any, Any]:
    """Run the hooks before an optimizer's step; return the step's arguments."""
    args: Any = (stepped,) if closure is None else (stepped, closure)
    kwargs: Any = {}
    for hook in own_pre_step_hooks(stepped).values():
        changed = hook(stepped, args, kwargs)
        if changed is not None:
            args, kwargs = changed
    return args, kwargs
