"""Probes how an optimizer uses gradients, by steps of a copy on a few numbers."""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from daso.torch_private import all_hooks

SHAPE = (4, 4)  # of the parameters of a copy; some optimizers accept only matrices
GRADIENT_SCALE = 8.0  # factor on gradients, and on the steps of a linear optimizer
STEPS = 10  # RAdam begins as plain momentum
LR, WEIGHT_DECAY = 0.5, 0.25


@dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """Traits of an optimizer's step on a parameter group."""

    normalizes: bool = False  # its step does not grow with gradients
    decays_by_lr: bool = False  # decoupled weight decay: takes lr * weight_decay of a weight
    momentum: float = 0.0  # decay of its running mean of gradients, from step to step
    memory: float = 0.0  # decay of its running mean of squares, which it divides by


def probe_optimizer(inner: torch.optim.Optimizer) -> list[OptimizerTraits] | None:
    """Return the traits of each parameter group; None if the probe fails."""
    if optimizers := getattr(inner, "optimizers", None):
        probed = [probe_optimizer(optimizer) for optimizer in optimizers]
        return None if None in probed else [trait for traits in probed for trait in traits or ()]
    if getattr(inner, "is_linear", False):
        return [OptimizerTraits() for _ in inner.param_groups]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            return _probe(inner)
        except Exception:  # an optimizer may need a closure, a size, a device, ...
            return None


def _probe(inner: torch.optim.Optimizer) -> list[OptimizerTraits]:
    generator = torch.Generator("cpu").manual_seed(0)
    gradient = torch.randn(SHAPE, generator=generator, device="cpu")
    zero = torch.zeros(SHAPE, device="cpu")
    plain, scaled = _Copy(inner, weight_decay=0.0), _Copy(inner, weight_decay=0.0)
    for _ in range(STEPS):
        steps, scaled_steps = plain.step(gradient), scaled.step(gradient * GRADIENT_SCALE)
    before = plain.states()
    plain.step(zero)
    states = list(zip(before, plain.states(), strict=True))
    decays = _Copy(inner, weight_decay=WEIGHT_DECAY).step(zero)
    return [
        OptimizerTraits(
            normalizes=0 < float(far.norm()) < math.sqrt(GRADIENT_SCALE) * float(near.norm()),
            decays_by_lr="weight_decay" in group
            and torch.allclose(decay, torch.full_like(decay, -LR * WEIGHT_DECAY), rtol=1e-3),
            momentum=min(_decays(*changed, signed=True), default=0.0),
            memory=max(_decays(*changed, signed=False), default=0.0),
        )
        for group, near, far, changed, decay in zip(
            inner.param_groups, steps, scaled_steps, states, decays, strict=True
        )
    ]


class _Copy:
    """Copy of an optimizer, with one small test parameter in each group.

    Args:
        inner: The optimizer.
        weight_decay: Weight decay of groups that have one.
    """

    def __init__(self, inner: torch.optim.Optimizer, weight_decay: float) -> None:
        if any(isinstance(value, torch.nn.Module) for value in vars(inner).values()):
            raise TypeError("a model is not copied for a look at its optimizer")
        self.params = [
            torch.nn.Parameter(torch.ones(SHAPE, device="cpu")) for _ in inner.param_groups
        ]
        groups: list[dict[str, Any]] = []
        memo: dict[int, Any] = {}
        for param, group in zip(self.params, inner.param_groups, strict=True):
            groups.append({**group, "params": [param], **_on_host(group, weight_decay)})
            # Other references to the user's parameters become references to the copy's.
            memo |= {id(theirs): param for theirs in group["params"]}
        memo |= {id(inner.param_groups): groups, id(inner.state): defaultdict(dict)}
        memo |= {id(hooks): OrderedDict() for hooks in all_hooks(inner)}
        # Not copy.deepcopy(inner): torch copies groups, state and defaults only.
        self.optimizer = type(inner).__new__(type(inner))
        memo[id(inner)] = self.optimizer
        vars(self.optimizer).update(copy.deepcopy(vars(inner), memo))
        if type(inner) is torch.optim.Adagrad:
            # Adagrad creates its state in the constructor, in some versions of torch only there.
            start = inner.defaults["initial_accumulator_value"]
            fresh = torch.optim.Adagrad(groups, initial_accumulator_value=start)
            self.optimizer.state.update(fresh.state)

    def step(self, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Take a step with this gradient for every parameter; return the change of each."""
        before = [param.detach().clone() for param in self.params]
        for param in self.params:
            param.grad = gradient.clone()
        type(self.optimizer).step(self.optimizer)  # not a scheduler's wrapper of step
        return [param.detach() - old for param, old in zip(self.params, before, strict=True)]

    def states(self) -> list[dict[str, torch.Tensor]]:
        """Return copies of the state tensors of each parameter that have its shape."""
        return [
            {
                key: value.detach().clone()
                for key, value in self.optimizer.state.get(param, {}).items()
                if isinstance(value, torch.Tensor)
                and value.shape == param.shape
                and value.is_floating_point()
            }
            for param in self.params
        ]


def _on_host(group: Mapping[str, Any], weight_decay: float) -> dict[str, Any]:
    """Return settings with which a group can step a few numbers on the host."""
    settings = {"lr": LR, "weight_decay": weight_decay, "capturable": False, "fused": None}
    return {key: value for key, value in settings.items() if key in group}


def _decays(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor], *, signed: bool
) -> list[float]:
    """Return the decays of running means: of signed states, or of non-negative ones."""
    keys = [key for key in before if key in after and bool((before[key] < 0).any()) == signed]
    decays = [_decay(before[key], after[key]) for key in keys]
    return [decay for decay in decays if decay is not None]


def _decay(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return the decay of a running mean after an input of 0; None if it is no such mean."""
    nonzero = before != 0
    ratios = after[nonzero] / before[nonzero]
    decay = round(float(ratios.double().mean()), 5)
    even = torch.allclose(ratios, torch.full_like(ratios, decay), rtol=1e-3)
    return decay if even and 0 < decay < 1 else None
