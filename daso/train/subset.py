"""Steps of an optimizer with some of its parameters, and with values of another moment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["step_with", "values_of"]

Values = Sequence[Mapping[str, Any]]


def values_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups' values without their parameters; a scheduler may write to tensors."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in groups
    ]


def step_with(
    inner: torch.optim.Optimizer,
    params: set[int],
    values: Values,
    device: torch.device,
    check: Callable[[], None] | None = None,
) -> None:
    """Step with some parameters alone; arithmetic is per parameter, so the bits are the same.

    Args:
        inner: The optimizer.
        params: ``id`` of each parameter to step with.
        values: Of each group, for this step.
        device: Where the parameters are.
        check: Called after the step, with the groups as the step left them; may raise.
    """
    before = [dict(group) for group in inner.param_groups]
    try:
        for group, mine in zip(inner.param_groups, values, strict=True):
            group.update(mine)
            group["params"] = [p for p in group["params"] if id(p) in params]
        # In an evaluation, state that is made now would be of no use in training.
        with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
            inner.step()
        if check is not None:
            check()
    finally:
        for group, old in zip(inner.param_groups, before, strict=True):
            group.clear()
            group.update(old)
