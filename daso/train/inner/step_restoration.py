"""Lets an inner optimizer that normalizes step as much longer as the mean over nodes is too short.

Which gain that is, `daso.plan.step_restoration` works out from what nodes agreed on.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from daso.plan.header import Tally
from daso.plan.options import Settings
from daso.plan.step_restoration import required_gain
from daso.train.inner.optimizer_probe import OptimizerTraits, probe_optimizer

__all__ = ["StepRestoration", "make_step_restoration"]

logger = logging.getLogger("daso")
SCALED = ("lr", "weight_decay")  # settings of a group that change while it steps


class StepRestoration:
    """Multiplies learning rates by a gain while the inner optimizer steps, and only then.

    Learning rate schedulers and users see their own rates. Weight decay that takes lr *
    weight_decay of a weight is no shorter in a mean, and stays what it is.

    Args:
        inner: The user's optimizer.
        traits: Of its groups.
    """

    def __init__(self, inner: torch.optim.Optimizer, traits: Sequence[OptimizerTraits]) -> None:
        self._inner, self.traits = inner, traits
        self._before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        weights = [
            sum(param.numel() for param in group["params"]) * trait.normalizes
            for group, trait in zip(inner.param_groups, traits, strict=True)
        ]
        self.momentum = _mean([trait.momentum for trait in traits], weights)
        self.memory = _mean([trait.memory for trait in traits], weights)

    def required_gain(self, tally: Tally, *, nodes: int, batches: int) -> float:
        """Return the gain that an exchange would have needed; 0: it was not measured."""
        return required_gain(
            tally.distance, tally.moved, nodes=nodes, batches=batches, momentum=self.momentum
        )

    def begin(self, gain: float) -> None:
        """Multiply learning rates."""
        self.end()
        if gain == 1.0:
            return
        for group, trait in zip(self._inner.param_groups, self.traits, strict=True):
            if not trait.normalizes or group.get("lr") is None:
                continue
            self._before.append((group, {key: group[key] for key in SCALED if key in group}))
            group["lr"] = group["lr"] * gain
            if trait.decays_by_lr:
                group["weight_decay"] = group["weight_decay"] / gain

    def end(self) -> None:
        """Put back what was there; idempotent."""
        for group, settings in self._before:
            group.update(settings)
        self._before = []

    @contextmanager
    def scaled(self, gain: float) -> Iterator[None]:
        """Let steps inside be longer by a factor."""
        try:
            self.begin(gain)
            yield
        finally:
            self.end()


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the weighted mean."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / max(1, sum(weights))


def make_step_restoration(
    inner: torch.optim.Optimizer, settings: Settings, *, says: bool
) -> StepRestoration | None:
    """Return what restores the steps of an optimizer; None where nothing is to be restored."""
    if not settings.may_restore_steps:
        return None
    traits = probe_optimizer(inner)
    if traits is None and settings.exchange.step_restoration == "on":
        traits = [OptimizerTraits(normalizes=True) for _ in inner.param_groups]
    if traits is None:
        if says:
            logger.warning(
                "whether %s divides by the size of its gradients, as Adam does, could not be told, "
                "and steps are not restored; pass exchange=daso.Exchange(step_restoration='on') if "
                "it does, or 'off'",
                type(inner).__name__,
            )
        return None
    return StepRestoration(inner, traits) if any(one.normalizes for one in traits) else None
