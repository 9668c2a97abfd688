"""Gradients of a captured step, given to parameters while its backward pass goes on.

A captured step calls the hooks that ``register_post_accumulate_grad_hook`` of parameters was given,
each as soon as its gradient is there, in the order in which autograd would. A hook may offer the
memory in which it wants the gradient: it then has a method ``memory()``, which returns a tensor
laid out as the parameter, or None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from daso.memory.captured.guards import gradient_hooks

__all__ = ["Gradients", "in_backward"]


class Gradients:
    """Adds gradients to those of parameters, and calls the parameters' hooks.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params

    def hooked(self) -> bool:
        """Return whether a parameter has a hook."""
        return any(map(gradient_hooks, self._params))

    def memory(self, index: int) -> torch.Tensor | None:
        """Return what is to become ``.grad`` as it is; None where it is added or copied."""
        param = self._params[index]
        copied = param.grad is not None or _offered(param) is not None
        return None if copied else torch.empty_like(param)

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        """Take a gradient that is there."""
        param = self._params[index]
        if param.grad is not None:
            param.grad.add_(gradient)
        elif (memory := _offered(param)) is not None:
            param.grad = memory.copy_(gradient).detach()
        else:
            param.grad = gradient if own else torch.empty_like(param).copy_(gradient)
        for hook in gradient_hooks(param):
            hook(param)


def _offered(param: torch.Tensor) -> torch.Tensor | None:
    """Return memory in which one of a parameter's hooks wants the gradient."""
    offers = (getattr(hook, "memory", None) for hook in gradient_hooks(param))
    return next((found for offer in offers if offer and (found := offer()) is not None), None)


def in_backward(call: Callable[[], None]) -> None:
    """Call a function inside a backward of autograd's, as hooks expect that ask for its end."""
    start = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        end = _Backward.apply(start, call)  # type: ignore[no-untyped-call]
    end.backward()


class _Backward(torch.autograd.Function):
    """Calls a function when autograd comes to it."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return start.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        ctx.call()
        return None, None
