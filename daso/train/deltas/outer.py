"""Outer optimizer of the reference: its gradient is the negated mean delta of all nodes.

SGD with lr=1 and no momentum is plain averaging. With Nesterov momentum it is DiLoCo (Douillard et
al. 2023, arXiv 2311.08105); with heavy-ball momentum SlowMo (Wang et al. 2020, arXiv 1910.00643)
and block momentum (BMUF, Chen and Huo 2016).
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from daso.checks import format_value
from daso.errors import ConfigError, summarize

MakeOuter = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def build_optimizer(name: str, make: Callable[[Any], Any], params: Any) -> torch.optim.Optimizer:
    """Return the optimizer that a user's function makes from parameters; check it."""
    try:
        optimizer = make(params)
    except Exception as error:
        raise ConfigError(
            f"{name} must make an optimizer from a list of parameters, but {summarize(error)}; "
            f"pass a function such as lambda p: torch.optim.SGD(p, lr=0.7)",
            code="outer-factory-failed",
        ) from error
    if not all(hasattr(optimizer, attribute) for attribute in ("param_groups", "state", "step")):
        raise ConfigError(
            f"{name} must make an optimizer from a list of parameters, but it made "
            f"{format_value(optimizer)}; pass a function such as lambda p: torch.optim.SGD(p, 0.7)",
            code="outer-not-an-optimizer",
        )
    return optimizer  # type: ignore[no-any-return]


class Outer:
    """Moves a reference by a torch optimizer.

    Args:
        make: Makes the optimizer for a list of parameters; here it is one flat row (numel), so
            optimizers that look at shapes do not fit.
        reference: The row it moves, in place.
    """

    def __init__(self, make: MakeOuter, reference: torch.Tensor) -> None:
        self.param = torch.nn.Parameter(reference)  # the same memory
        self.grad = torch.zeros_like(reference)  # the mean delta, negated
        self.optimizer = build_optimizer("outer", make, [self.param])

    def step(self) -> None:
        """Take one step with ``grad``."""
        self.param.grad = self.grad
        self.optimizer.step()

    def trial(self, mean: torch.Tensor) -> torch.Tensor:
        """Return the reference after a step with this mean delta (numel); nothing changes."""
        before = self.param.detach().clone()
        state = copy.deepcopy(self.optimizer.state_dict())
        self.param.grad = mean.neg()
        self.optimizer.step()
        moved = self.param.detach().clone()
        with torch.no_grad():
            self.param.copy_(before)
        self.optimizer.load_state_dict(state)
        return moved

    def tensors(self) -> list[torch.Tensor]:
        """Return the gradient and the tensors of the optimizer's state."""
        values = [value for state in self.optimizer.state.values() for value in state.values()]
        return [self.grad, *(value for value in values if torch.is_tensor(value))]

    def state(self) -> dict[str, Any]:
        """Return a copy of the optimizer's state_dict."""
        return copy.deepcopy(self.optimizer.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` returned."""
        self.optimizer.load_state_dict(copy.deepcopy(state))
