"""Notices uses of an optimizer that train wrongly without an error of torch's."""

import gc
import logging
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm

from daso.plan.step_restoration import rate_of
from daso.train.model.hooks import Hook, nothing
from daso.train.model.params import Named

__all__ = [
    "InnerSteps",
    "checksum",
    "first_nonfinite",
    "gradient_checksum",
    "has_batch_norm",
    "has_hooks",
    "has_step_hooks",
    "stepping",
]

logger = logging.getLogger("daso")

FIRST = 8  # gradients that are looked at: those of the last layers


def has_step_hooks(inner: torch.optim.Optimizer) -> bool:
    """Return whether hooks can be put on a step: not where torch's __init__ was not called."""
    return hasattr(inner, "_optimizer_step_post_hooks")


_stepping: set[int] = set()  # ids of the optimizers that daso steps now


@contextmanager
def stepping(inner: torch.optim.Optimizer) -> Iterator[None]:
    """Let steps of a wrapped optimizer count as its wrapper's."""
    _stepping.add(id(inner))
    try:
        yield
    finally:
        _stepping.discard(id(inner))


class InnerSteps:
    """Says once that a wrapped optimizer was stepped past its wrapper: no rank hears of that.

    Args:
        inner: The user's optimizer.
        warns: Asked whether this rank says it; not kept alive.
    """

    def __init__(self, inner: torch.optim.Optimizer, warns: Callable[[], bool]) -> None:
        self._warns: weakref.WeakMethod[Any] | None = weakref.WeakMethod(warns)
        self._warned = warns()  # and where what daso.DASO returned was dropped at once
        self._handle = inner.register_step_post_hook(self) if has_step_hooks(inner) else None

    @_disable_dynamo
    def __call__(self, inner: torch.optim.Optimizer, *_: object) -> None:
        """Look whose step it was."""
        if id(inner) in _stepping or self._warns is None:  # first: a rate may be on a device
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
        """Take the hook off; idempotent."""
        if self._handle is not None:
            self._handle.remove()


def has_hooks(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has step hooks that are not ours."""
    post = getattr(inner, "_optimizer_step_post_hooks", {}).values()
    pre = getattr(inner, "_optimizer_step_pre_hooks", {})
    return bool(pre) or any(not isinstance(hook, InnerSteps) for hook in post)


def checksum(tensors: Iterable[torch.Tensor]) -> float:
    """Return a number that equal tensors share, bit for bit, and others hardly ever."""
    crc = 0
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().cpu().reshape(-1)
            crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    return float(crc)


def gradient_checksum(named: Named, ready: Iterable[int]) -> float:
    """Return a `checksum` of the first gradients that became ready; 0 where all are zero."""
    grads = [grad for index in ready if (grad := named[index][1].grad) is not None][:FIRST]
    return checksum(grads) if any(bool(grad.any()) for grad in grads) else 0.0


def first_nonfinite(named: Named) -> int:
    """Return the index of the first tensor with NaN or infinity, or -1."""
    for index, (_, tensor) in enumerate(named):
        if not bool(tensor.detach().isfinite().all()):
            return index
    return -1


def has_batch_norm(named: Named) -> bool:
    """Return whether a BatchNorm that keeps statistics has any of these parameters.

    Looks at all objects of the process: tens of milliseconds.
    """
    ours, kinds = {id(tensor) for _, tensor in named}, frozenset(_kinds(_BatchNorm))
    return any(
        one.track_running_stats and any(id(param) in ours for param in one._parameters.values())
        for one in gc.get_objects()
        if type(one) in kinds
    )


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """Yield a class and all that are derived from it."""
    yield kind
    for one in kind.__subclasses__():
        yield from _kinds(one)
