"""What an optimizer does with gradients, found by letting a copy of it step a few numbers."""

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

__all__ = ["OptimizerKind", "kinds_of"]

SHAPE = (4, 4)  # of what a copy steps; some optimizers take matrices alone
TIMES = (
    8.0  # larger gradients: a linear optimizer steps as much farther, one that normalises does not
)
STEPS = 10  # RAdam begins as plain momentum
RATE, DECAY = 0.5, 0.25  # learning rate, weight decay
HOOKS = ("pre_hooks", "post_hooks")


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """How an optimizer steps the parameters of a group."""

    normalizes: bool = False  # its step does not grow with gradients
    decays_by_rate: bool = False  # weight decay takes lr * weight_decay of a weight, decoupled
    momentum: float = 0.0  # what is kept of the momentum from step to step
    # State of a parameter's shape that is a running mean, and what is kept of it from step to step.
    moments: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


def kinds_of(inner: torch.optim.Optimizer) -> list[OptimizerKind] | None:
    """Return the kind of each parameter group; None where it cannot be told.

    Args:
        inner: The user's optimizer; neither it nor torch's random state is changed.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            return [_kind(inner, number) for number in range(len(inner.param_groups))]
        except Exception:  # a closure is needed, a size, a device: whatever an optimizer may want
            return None


class _Copy:
    """A copy of an optimizer, with one parameter of our own in each group.

    Args:
        inner: The optimizer.
        number: The group that is looked at.
        weight_decay: For that group, where it has one.
    """

    def __init__(self, inner: torch.optim.Optimizer, number: int, weight_decay: float) -> None:
        ours = [torch.nn.Parameter(torch.ones(SHAPE, device="cpu")) for _ in inner.param_groups]
        groups: list[dict[str, Any]] = []
        memo: dict[int, Any] = {}
        for one, group in zip(ours, inner.param_groups, strict=True):
            groups.append({**group, "params": [one], **_plain(group, weight_decay)})
            # Whatever else holds a parameter of the user's, a copy of it holds ours.
            memo.update({id(param): one for param in group["params"]})
        memo |= {id(inner.param_groups): groups, id(inner.state): defaultdict(dict)}
        for name in vars(inner):
            if name.endswith(HOOKS):
                memo[id(getattr(inner, name))] = OrderedDict()
        self.optimizer = _copied(inner, memo)
        self.param = ours[number]

    def step(self, grad: torch.Tensor) -> torch.Tensor:
        """Take a step; return how the parameter changed."""
        before = self.param.detach().clone()
        self.param.grad = grad.clone()
        type(self.optimizer).step(self.optimizer)  # not what a scheduler put in its place
        return self.param.detach() - before

    def state(self) -> dict[str, torch.Tensor]:
        """Return copies of the state that has the parameter's shape."""
        return {
            key: value.detach().clone()
            for key, value in self.optimizer.state.get(self.param, {}).items()
            if isinstance(value, torch.Tensor)
            and value.shape == self.param.shape
            and value.is_floating_point()
        }


def _copied(inner: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a deep copy, of all attributes: torch's own has groups, state and defaults alone."""
    if any(isinstance(value, torch.nn.Module) for value in vars(inner).values()):
        raise TypeError("a model is not copied for a look at its optimizer")
    made = type(inner).__new__(type(inner))
    memo[id(inner)] = made
    vars(made).update(copy.deepcopy(vars(inner), memo))
    return made


def _plain(group: Mapping[str, Any], weight_decay: float) -> dict[str, Any]:
    """Return settings of a group for a few numbers on the host."""
    plain = {"lr": RATE, "weight_decay": weight_decay, "capturable": False, "fused": None}
    return {key: value for key, value in plain.items() if key in group}


def _kind(inner: torch.optim.Optimizer, number: int) -> OptimizerKind:
    grad = torch.randn(SHAPE, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    small, large = (_Copy(inner, number, weight_decay=0.0) for _ in range(2))
    far = farther = 0.0
    for _ in range(STEPS):
        far = float(small.step(grad).norm())
        farther = float(large.step(grad * TIMES).norm())
    before = small.state()
    small.step(torch.zeros(SHAPE, device="cpu"))
    after = small.state()
    moments = {}
    for key, value in before.items():
        with suppress(KeyError):
            if kept := _kept(value, after[key]):
                moments[key] = kept
    signed = [kept for key, kept in moments.items() if bool((before[key] < 0).any())]
    return OptimizerKind(
        normalizes=0 < farther < math.sqrt(TIMES) * far,
        decays_by_rate=_decays_by_rate(inner, number),
        momentum=min(signed, default=0.0),
        moments=MappingProxyType(moments),
    )


def _kept(before: torch.Tensor, after: torch.Tensor) -> float | None:
    """Return what was kept of a running mean whose next number was 0; None: it is none."""
    some = before != 0
    ratios = after[some] / before[some]
    if not ratios.numel():
        return None
    kept = round(float(ratios.double().mean()), 5)
    even = torch.allclose(ratios, torch.full_like(ratios, kept), rtol=1e-3)
    return kept if even and 0 < kept < 1 else None


def _decays_by_rate(inner: torch.optim.Optimizer, number: int) -> bool:
    if "weight_decay" not in inner.param_groups[number]:
        return False
    change = _Copy(inner, number, weight_decay=DECAY).step(torch.zeros(SHAPE, device="cpu"))
    return torch.allclose(change, torch.full_like(change, -RATE * DECAY), rtol=1e-3)
