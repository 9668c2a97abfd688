"""Lets an inner optimizer that normalizes step as much longer as the mean over nodes is too short.

Which gain that is, `daso.plan.restoration` works out from what nodes agreed on.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from daso.plan.options import Settings
from daso.train.optimizer_kind import OptimizerKind, kinds_of

__all__ = ["Restoration", "restoration_of"]

logger = logging.getLogger("daso")
SETTINGS = ("lr", "weight_decay")  # of a group, that change while it steps


class Restoration:
    """Multiplies learning rates by a gain while the inner optimizer steps, and only then.

    Learning rate schedulers and users see their own rates. Weight decay that takes lr *
    weight_decay of a weight is no shorter in a mean, and stays what it is.

    Args:
        inner: The user's optimizer.
        kinds: Of its groups.
    """

    def __init__(self, inner: torch.optim.Optimizer, kinds: Sequence[OptimizerKind]) -> None:
        self._inner, self._kinds = inner, kinds
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @property
    def momentum(self) -> float:
        """What is kept of the momentum from step to step; the mean over parameters."""
        sizes = [sum(p.numel() for p in group["params"]) for group in self._inner.param_groups]
        pairs = [(s, k.momentum) for s, k in zip(sizes, self._kinds, strict=True) if k.normalizes]
        kept = sum(size * momentum for size, momentum in pairs)
        return float(kept / max(1, sum(size for size, _ in pairs)))

    def begin(self, gain: float) -> None:
        """Multiply learning rates."""
        self.end()
        if gain == 1.0:
            return
        for group, kind in zip(self._inner.param_groups, self._kinds, strict=True):
            if not kind.normalizes or "lr" not in group:
                continue
            self._before.append((group, {key: group[key] for key in SETTINGS if key in group}))
            group["lr"] = group["lr"] * gain
            if kind.decays_by_rate:
                group["weight_decay"] = group["weight_decay"] / gain

    def end(self) -> None:
        """Put back what was there; idempotent."""
        for group, settings in self._before:
            group.update(settings)
        self._before = []

    @contextmanager
    def longer(self, gain: float) -> Iterator[None]:
        """Let steps inside be longer by a factor."""
        self.begin(gain)
        try:
            yield
        finally:
            self.end()


def restoration_of(
    inner: torch.optim.Optimizer, settings: Settings, *, says: bool
) -> Restoration | None:
    """Return what restores the steps of an optimizer; None where nothing is to be restored.

    Args:
        inner: The user's optimizer.
        settings: How nodes exchange.
        says: Whether this rank says that its kind cannot be told.
    """
    if not settings.may_restore:
        return None
    kinds = kinds_of(inner)
    if kinds is None and settings.exchange.restoration == "on":
        kinds = [OptimizerKind(normalizes=True) for _ in inner.param_groups]
    if kinds is None:
        if says:
            logger.warning(
                "whether %s divides by the size of its gradients, as Adam does, could not be told, "
                "and steps are not restored; pass exchange=daso.Exchange(restoration='on') if it "
                "does, or 'off'",
                type(inner).__name__,
            )
        return None
    return Restoration(inner, kinds) if any(kind.normalizes for kind in kinds) else None
