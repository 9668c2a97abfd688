"""What can be seen of a callable without calling it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["draws", "takes"]

BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def takes(call: Callable[..., Any]) -> tuple[int, int]:
    """Return how many arguments a callable takes by place, at least and at most."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # of some that are written in C
        return 0, sys.maxsize
    placed = [one for one in parameters if one.kind in BY_PLACE]
    least = sum(one.default is inspect.Parameter.empty for one in placed)
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return least, sys.maxsize
    return least, len(placed)


def draws(module: nn.Module) -> bool:
    """Return whether a module has dropout in it: it draws random numbers while it trains."""
    return any(
        isinstance(one, nn.modules.dropout._DropoutNd | nn.RReLU)
        or (isinstance(one, nn.RNNBase | nn.MultiheadAttention) and one.dropout > 0)
        for one in module.modules()
    )
