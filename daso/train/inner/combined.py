"""Several optimizers over one model, stepped as one: Muon for matrices, AdamW for the rest."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from daso.errors import CheckpointError, ConfigError
from daso.train.misuse import has_step_hooks, stepping

__all__ = ["CombinedOptimizer"]


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps optimizers one after the other; their groups and states are theirs, side by side.

    Args:
        optimizers: Each of parameters of its own.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Optimizer.__init__ is not called: it would copy groups and state, and let them drift.
        self.optimizers = list(optimizers)
        self.state = _States(self.optimizers)  # type: ignore[assignment]  # it is used as one
        for name in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{name}_hooks", OrderedDict())
        for name in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{name}_hooks", OrderedDict())
        self._refuse_shared()

    def _refuse_shared(self) -> None:
        seen: set[int] = set()
        for number, one in enumerate(self.optimizers):
            mine = {id(param) for group in one.param_groups for param in group["params"]}
            if seen & mine:
                raise ConfigError(
                    f"a parameter must belong to one optimizer, but optimizer {number} "
                    f"({type(one).__name__}) has some of those before it; give each its own"
                )
            seen |= mine

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        CombinedOptimizer.__init__(self, state["optimizers"])

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # never set
        """The groups of all optimizers, the same objects."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The first optimizer's defaults."""
        return self.optimizers[0].defaults

    def register_step_post_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call a hook after each step of each optimizer."""
        return _Handles(
            [one.register_step_post_hook(hook) for one in self.optimizers if has_step_hooks(one)]
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer, in the order in which they were given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            with stepping(one):
                one.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refuse: it is not said to which optimizer parameters belong."""
        raise ConfigError(
            "parameters must be added to one of several optimizers, but not to all; call "
            "optimizer.inner.optimizers[NUMBER].add_param_group(...), which is noticed at the next "
            "step"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all optimizers as that of one: parameters are counted through."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for one in self.optimizers:
            part, before = one.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {before + index: value for index, value in part["state"].items()}
            groups += [
                {**group, "params": [before + index for index in group["params"]]}
                for group in part["param_groups"]
            ]
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned for as many parameters in as many groups."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = list(state_dict["param_groups"])
        sizes = [[len(group["params"]) for group in some] for some in (groups, self.param_groups)]
        if sizes[0] != sizes[1]:
            raise CheckpointError(
                f"a state of several optimizers must have groups of {sizes[1]} parameters, as they "
                f"have, but it has {sizes[0]}; load it into the same optimizers"
            )
        for one in self.optimizers:
            mine, groups = groups[: len(one.param_groups)], groups[len(one.param_groups) :]
            # Parameters are told by their place: torch's own loaders pass names instead of numbers.
            keys = [key for group in mine for key in group["params"]]
            state = {key: value for key, value in state_dict["state"].items() if key in keys}
            one.load_state_dict({"state": state, "param_groups": mine})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


class _Handles(RemovableHandle):
    """Several hooks that go together."""

    def __init__(self, handles: Sequence[RemovableHandle]) -> None:
        self._handles = handles

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class _States(MutableMapping[torch.Tensor, Any]):
    """The state of each parameter, in the optimizer that has it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, param: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        for one in self._optimizers:
            if any(param is mine for group in one.param_groups for mine in group["params"]):
                return one.state
        raise KeyError(param)

    def __contains__(self, param: object) -> bool:
        return any(param in one.state for one in self._optimizers)

    def __getitem__(self, param: torch.Tensor) -> Any:
        return self._of(param)[param]

    def get(self, param: torch.Tensor, default: Any = None) -> Any:
        """Return a parameter's state, and make none."""
        return next((s[param] for o in self._optimizers if param in (s := o.state)), default)

    def __setitem__(self, param: torch.Tensor, value: Any) -> None:
        self._of(param)[param] = value

    def __delitem__(self, param: torch.Tensor) -> None:
        del self._of(param)[param]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for one in self._optimizers for param in one.state)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)
