"""Hooks on modules that a copy of the module does not have."""

from collections.abc import Callable
from typing import Any

from torch._compile import _disable_dynamo

__all__ = ["Hook", "nothing"]


class Hook:
    """Calls a function of this training, and nothing in a copy of the module."""

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
