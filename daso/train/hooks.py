"""Hooks on modules and parameters that end with the training they are of."""

import weakref
from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo

__all__ = ["GradientHook", "Hook", "nothing"]


class Hook:
    """A hook on a module that a copy of the module does not have: it is this training's."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    @_disable_dynamo
    def __call__(self, *_: Any) -> None:
        """Do what it is for."""
        self._call()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing() -> None:
    """Do nothing."""


class GradientHook:
    """A hook on a parameter's gradient that does not keep its training alive.

    Python's garbage collection does not look through torch's autograd nodes, which hold it.

    Args:
        call: A method; gets the arguments, and the parameter.
        args: First arguments.
    """

    def __init__(self, call: Callable[..., None], *args: Any) -> None:
        self._call, self._args = weakref.WeakMethod(call), args

    @_disable_dynamo
    def __call__(self, param: Any) -> None:
        """Do what it is for, if that training goes on."""
        call = self._call()
        if call is not None:
            call(*self._args, param)
