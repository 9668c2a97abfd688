"""Properties of a callable, known without a call of it."""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from daso.errors import FlowError
from daso.torch_private import Dropout

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def argument_counts(call: Callable[..., Any]) -> tuple[int, int]:
    """Return the minimum and maximum number of positional arguments of a callable."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some callables written in C
        return 0, sys.maxsize
    placed = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    least = sum(parameter.default is inspect.Parameter.empty for parameter in placed)
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return least, sys.maxsize
    return least, len(placed)


def check_width(name: str, call: Any, width: int, before: int) -> None:
    """Refuse messages of a number of tensors that a node's callable does not take."""
    least, most = argument_counts(call)
    if not least - before <= width <= most - before:
        range_text = (
            f"{least - before}" if least == most else f"{least - before} to {most - before}"
        )
        item = "the item and " if before else ""
        raise FlowError(
            f"node {name!r} must be given as many tensors as it takes, {item}{range_text}, but "
            f"messages come there with {width}",
            code="tensors-do-not-fit",
        )


def draws(module: nn.Module) -> bool:
    """Return whether a module draws random numbers in training, as dropout does."""
    return any(
        isinstance(inner, Dropout | nn.RReLU)
        or (isinstance(inner, nn.RNNBase | nn.MultiheadAttention) and inner.dropout > 0)
        for inner in module.modules()
    )
