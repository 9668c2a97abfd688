"""Delivery of a captured step's gradients to parameters and hooks, during its backward pass.

A captured step calls the hooks that were registered with ``register_post_accumulate_grad_hook``,
each as soon as its gradient is complete, in autograd's order. A hook may provide the memory of the
gradient by a method ``memory()`` that returns a tensor laid out as the parameter, or None.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from daso.torch_private import gradient_hooks


class Gradients:
    """Accumulates gradients into ``.grad`` of parameters, and calls the parameters' hooks.

    Args:
        params: The parameters.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params

    def hooked(self) -> bool:
        """Return whether a parameter has a hook."""
        return any(map(gradient_hooks, self._params))

    def memory(self, index: int) -> torch.Tensor | None:
        """Return memory that becomes ``.grad``; None if the gradient is added or copied."""
        param = self._params[index]
        copied = param.grad is not None or _offered(param) is not None
        return None if copied else torch.empty_like(param)

    def take(self, index: int, gradient: torch.Tensor, *, own: bool) -> None:
        """Accumulate a complete gradient, and call the hooks of its parameter."""
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
    """Return the memory that a hook of a parameter provides for the gradient, if any."""
    offers = (getattr(hook, "memory", None) for hook in gradient_hooks(param))
    return next((memory for offer in offers if offer and (memory := offer()) is not None), None)


def in_backward(call: Callable[[], None]) -> None:
    """Call a function inside a backward of autograd, for hooks that queue callbacks for its end."""
    start = torch.zeros((), device="cpu", requires_grad=True)
    with torch.enable_grad():
        end = _Backward.apply(start, call)  # type: ignore[no-untyped-call]
    end.backward()


class _Backward(torch.autograd.Function):
    """Calls a function in autograd's backward."""

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return start.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[None, None]:
        ctx.call()
        return None, None
