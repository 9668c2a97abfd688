"""Steps of an optimizer with some of its parameters, and with values of another moment."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from daso.errors import ConfigError
from daso.train.inner.steps import stepping

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


def same_values(groups: Sequence[Mapping[str, Any]], values: Values) -> bool:
    """Return whether groups still have the values that `values_of` returned."""
    return _first_change(groups, values) is None


def refuse_counting(inner: torch.optim.Optimizer, values: Values, instead: str) -> None:
    """Refuse an optimizer that counts in its groups: partial steps would lose the count."""
    key = _first_change(inner.param_groups, values)
    if key is not None:
        raise ConfigError(
            f"an optimizer that steps layer by layer must leave its groups as they are, but "
            f"{type(inner).__name__} counts in {key!r}; {instead}",
            code="optimizer-counts-in-groups",
        )


def _first_change(groups: Sequence[Mapping[str, Any]], values: Values) -> str | None:
    for group, saved in zip(groups, values, strict=True):
        if changed := saved.keys() ^ (group.keys() - {"params"}):
            return min(changed)
        for key, value in saved.items():
            if not _same(group[key], value):
                return key
    return None


def _same(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor):
        return torch.equal(now, before)
    return now is before or bool(now == before)


def step_with(
    inner: torch.optim.Optimizer,
    params: set[int],
    values: Values,
    device: torch.device,
    check: Callable[[], None] | None = None,
) -> None:
    """Step with some parameters alone; arithmetic is per parameter, so the bits are the same."""
    before = [dict(group) for group in inner.param_groups]
    try:
        for group, saved in zip(inner.param_groups, values, strict=True):
            group.update(saved)
            group["params"] = [p for p in group["params"] if id(p) in params]
        # State made under inference_mode could not be used in training.
        off = torch.autocast(device.type, enabled=False)
        with torch.inference_mode(False), off, stepping(inner):
            inner.step()
        if check is not None:
            check()
    finally:
        for group, old in zip(inner.param_groups, before, strict=True):
            group.clear()
            group.update(old)
