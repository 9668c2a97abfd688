"""Scales the learning rate of an inner optimizer by the restoration gain while it steps.

`daso.plan.step_restoration` computes the gain from measurements that all nodes agreed on.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from daso.plan import options
from daso.plan.exchange import Tally
from daso.plan.step_restoration import required_gain
from daso.torch_private import has_step_hooks, post_step_hooks, version_of
from daso.train.inner.optimizer_probe import OptimizerTraits, probe_optimizer
from daso.train.model.one_copy import Hook, nothing

logger = logging.getLogger("daso")
SCALED = ("lr", "weight_decay")  # settings of a group that are scaled during a step


Settings = dict[str, Any]  # of a parameter group


class StepEndHook:
    """Calls a function with the parameter groups of the optimizer that has stepped."""

    def __init__(self, call: Callable[[Sequence[Settings]], None]) -> None:
        self._call = call

    def __call__(self, inner: torch.optim.Optimizer, *_: object) -> None:
        """Call the function."""
        self._call(inner.param_groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)  # a copy of the optimizer has no session


def first_post_hook(
    inner: torch.optim.Optimizer, call: Callable[[Sequence[Settings]], None]
) -> RemovableHandle:
    """Call a function with the parameter groups after each step, ahead of other step hooks."""
    handle: RemovableHandle = inner.register_step_post_hook(StepEndHook(call))
    hooks: Any = post_step_hooks(inner)  # an ordered dictionary
    hooks.move_to_end(handle.id, last=False)
    return handle


class StepRestoration:
    """Multiplies learning rates by a gain during the inner optimizer's step only.

    Learning rate schedulers and users see their own rates, in step hooks too. A rate that the
    optimizer changes during its step stays changed. Decoupled weight decay (lr * weight_decay of a
    weight) is not shortened by a mean, and is not scaled.

    Args:
        inner: The user's optimizer.
        traits: Traits of its groups.
    """

    def __init__(self, inner: torch.optim.Optimizer, traits: Sequence[OptimizerTraits]) -> None:
        self._inner, self.traits = inner, traits
        self._scaled: list[tuple[Settings, dict[str, Setting]]] = []  # groups of this step
        weights = [
            sum(param.numel() for param in group["params"]) * trait.normalizes
            for group, trait in zip(inner.param_groups, traits, strict=True)
        ]
        self.momentum = _mean([trait.momentum for trait in traits], weights)
        self.memory = _mean([trait.memory for trait in traits], weights)

    def required_gain(self, tally: Tally, *, nodes: int, batches: int) -> float:
        """Return the gain that an exchange would have needed; 0 if it was not measured."""
        return required_gain(
            tally.distance, tally.moved, nodes=nodes, batches=batches, momentum=self.momentum
        )

    def begin(self, gain: float) -> None:
        """Multiply the learning rates by the gain."""
        self.end()
        if gain == 1.0:
            return
        for group, trait in zip(self._inner.param_groups, self.traits, strict=True):
            if not trait.normalizes or group.get("lr") is None:
                continue
            before = {key: group[key] for key in SCALED if key in group}
            group["lr"] = group["lr"] * gain
            if trait.decays_by_lr:
                group["weight_decay"] = group["weight_decay"] / gain
            settings = {key: Setting.of(value, group[key]) for key, value in before.items()}
            self._scaled.append((group, settings))

    def end(self, groups: Sequence[Settings] | None = None) -> None:
        """Restore the settings of these groups, or of all; idempotent."""
        waiting = []
        for group, settings in self._scaled:
            if groups is None or any(group is other for other in groups):
                group.update(
                    {key: setting.unscaled(group[key]) for key, setting in settings.items()}
                )
            else:
                waiting.append((group, settings))
        self._scaled = waiting

    @contextmanager
    def scaled_without_hooks(self, gain: float) -> Iterator[None]:
        """Scale the learning rates inside the context."""
        self.begin(gain)
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def scaled(self, gain: float) -> Iterator[None]:
        """Scale the learning rates inside the context, until the inner optimizer has stepped."""
        if gain == 1.0:
            yield
            return
        parts = getattr(self._inner, "optimizers", [self._inner])
        hooks = [first_post_hook(part, self.end) for part in parts if has_step_hooks(part)]
        try:
            self.begin(gain)
            yield
        finally:
            self.end()
            for hook in hooks:
                hook.remove()


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of a parameter group that is scaled during a step."""

    before: Any  # the user's value: a number or a tensor
    scaled: Any

    @classmethod
    def of(cls, before: Any, scaled: Any) -> "Setting":
        """Record both values; copy a scaled tensor."""
        tensor = isinstance(scaled, torch.Tensor)
        return cls(before, (scaled, version_of(scaled), scaled.clone()) if tensor else scaled)

    def unscaled(self, now: Any) -> Any:
        """Return the user's setting with the change by the step; without a device sync."""
        if not isinstance(self.scaled, tuple):
            same = not self.scaled or bool(now == self.scaled)
            return self.before if same else now * (self.before / self.scaled)
        tensor, version, scaled = self.scaled
        if now is tensor and version_of(now) == version:
            return self.before
        return self.before.copy_(now * (self.before / scaled))


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the weighted mean."""
    total = sum(value * weight for value, weight in zip(values, weights, strict=True))
    return total / max(1, sum(weights))


@dataclass(frozen=True, slots=True)
class Restorations:
    """Restorations of one inner optimizer; at most one of them exists."""

    always: StepRestoration | None = None  # for an optimizer that normalizes
    clipped: StepRestoration | None = None  # for a linear one with clipped gradients

    @property
    def existing(self) -> StepRestoration | None:
        """The existing restoration, if any."""
        return self.always or self.clipped

    @property
    def momentums(self) -> tuple[float | None, float | None]:
        """Momentum of each restoration; None if it does not exist."""
        always, clipped = self.always, self.clipped
        return (
            None if always is None else always.momentum,
            None if clipped is None else clipped.momentum,
        )

    @property
    def traits(self) -> list[list[OptimizerTraits]]:
        """Traits of each restoration, to compare between ranks."""
        return [
            [] if restoration is None else list(restoration.traits)
            for restoration in (self.always, self.clipped)
        ]


def make_restorations(
    inner: torch.optim.Optimizer, settings: options.Settings, *, warns: bool
) -> Restorations:
    """Create the restorations that an optimizer needs, by a probe of its traits."""
    if not settings.may_restore_steps:
        return Restorations()
    traits = probe_optimizer(inner)
    if traits is None and settings.exchange.step_restoration == "on":
        traits = [OptimizerTraits(normalizes=True) for _ in inner.param_groups]
    if traits is None:
        if warns:
            logger.warning(
                "it is unknown whether %s divides by the size of its gradients, as Adam does, so "
                "steps are not restored; pass exchange=daso.Exchange(step_restoration='on') if "
                "it does, or 'off'",
                type(inner).__name__,
            )
        return Restorations()
    if any(trait.normalizes for trait in traits):
        return Restorations(always=StepRestoration(inner, traits))
    return Restorations(clipped=_of_clipped_steps(inner))


def _of_clipped_steps(inner: torch.optim.Optimizer) -> StepRestoration | None:
    momentums = [float(group.get("momentum") or 0.0) for group in inner.param_groups]
    # Weight decay is added to the gradient after clipping: a mean does not shorten it.
    traits = [
        OptimizerTraits(normalizes=True, decays_by_lr="weight_decay" in group, momentum=momentum)
        for group, momentum in zip(inner.param_groups, momentums, strict=True)
    ]
    return StepRestoration(inner, traits) if max(momentums) < 1 else None
