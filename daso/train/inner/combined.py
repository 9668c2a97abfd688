"""Several optimizers over one model, stepped as one: Muon for matrices, AdamW for the rest."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from daso.errors import CheckpointError, ConfigError
from daso.torch_private import (
    has_step_hooks,
    load_state_hooks,
    set_state_hooks,
    set_step_hooks,
    state_hooks,
)
from daso.train.inner.steps import stepping


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps several optimizers in order; groups and states remain in each of them.

    Args:
        optimizers: The optimizers, over disjoint parameters.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Optimizer.__init__ is not called: it would create separate groups and state.
        self.optimizers = list(optimizers)
        self.state = _States(self.optimizers)  # type: ignore[assignment]  # it is used as one
        set_step_hooks(self)
        set_state_hooks(self)
        self._refuse_shared()

    def _refuse_shared(self) -> None:
        earlier_ids: set[int] = set()
        for number, optimizer in enumerate(self.optimizers):
            own_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
            if earlier_ids & own_ids:
                raise ConfigError(
                    f"a parameter must belong to one optimizer, but optimizer {number} "
                    f"({type(optimizer).__name__}) has some of those before it; give each its own",
                    code="parameter-of-two-optimizers",
                )
            earlier_ids |= own_ids

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        CombinedOptimizer.__init__(self, state["optimizers"])

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # never set
        """The groups of all optimizers, the same objects."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The first optimizer's defaults."""
        return self.optimizers[0].defaults

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a hook after each step of each optimizer."""
        return _Handles(
            [
                optimizer.register_step_post_hook(hook)
                for optimizer in self.optimizers
                if has_step_hooks(optimizer)
            ]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer, in order."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            with stepping(optimizer):
                optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Raise: the optimizer to which the parameters belong is unknown."""
        raise ConfigError(
            "parameters must be added to one of several optimizers, but not to all; call "
            "optimizer.inner.optimizers[NUMBER].add_param_group(...), which is noticed at the next "
            "step",
            code="parameters-added-to-one",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers as a single state_dict with consecutive indices."""
        before_state, after_state = state_hooks(self)
        for hook in before_state.values():
            hook(self)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for optimizer in self.optimizers:
            part, before = optimizer.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {before + index: value for index, value in part["state"].items()}
            groups += [
                {**group, "params": [before + index for index in group["params"]]}
                for group in part["param_groups"]
            ]
        combined: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in after_state.values():
            changed = after(self, combined)
            combined = combined if changed is None else changed
        return combined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, for the same group sizes."""
        before_load, after_load = load_state_hooks(self)
        for before in before_load.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = list(state_dict["param_groups"])
        sizes = [[len(group["params"]) for group in some] for some in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"a state of several optimizers must have groups of {sizes[1]} parameters, as they "
                f"have, but it has {sizes[0]}; load it into the same optimizers",
                code="combined-state-differs",
            )
        for optimizer in self.optimizers:
            count = len(optimizer.param_groups)
            own_groups, groups = groups[:count], groups[count:]
            # By the parameters' order: torch's own loaders pass names instead of numbers.
            keys = [key for group in own_groups for key in group["params"]]
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            optimizer.load_state_dict({"state": state, "param_groups": own_groups})
        for after in after_load.values():
            after(self)


class _Handles(RemovableHandle):
    """Several hook handles that are removed together."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _States(MutableMapping[torch.Tensor, Any]):
    """Mapping from a parameter to its state in the optimizer that trains it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, param: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for optimizer in self._optimizers:
            if any(
                param is own_param
                for group in optimizer.param_groups
                for own_param in group["params"]
            ):
                return optimizer.state
        raise KeyError(param)

    def __contains__(self, param: object) -> bool:
        return any(param in optimizer.state for optimizer in self._optimizers)

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._of(param)[param]

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state without creating it."""
        return next(
            (state[param] for optimizer in self._optimizers if param in (state := optimizer.state)),
            default,
        )

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        self._of(param)[param] = value

    def __delitem__(self, param: torch.Tensor) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for optimizer in self._optimizers for param in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
