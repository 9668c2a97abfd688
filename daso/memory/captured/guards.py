"""Guards of a captured step: checks at every call that its capture is still valid."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from daso.torch_private import (
    BUFFERS,
    MODULE_HOOKS,
    MODULES,
    PARAMETERS,
    any_global_module_hook,
    module_hooks,
    own_buffers,
    own_modules,
    own_parameters,
    tensor_hooks,
)

CHECKED_SEPARATELY = {PARAMETERS, BUFFERS, MODULES, *MODULE_HOOKS}  # attributes of modules
_Own = Callable[[torch.nn.Module], dict[str, Any]]


class ModelWithLoss(torch.nn.Module):
    """A model and its loss as one module, so that a step covers the attributes of both."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: torch.Tensor, backward: Callable[[torch.Tensor], Any]) -> Any:
        """Return the result of ``backward`` for the loss of inputs and, last, targets."""
        return backward(self.loss_fn(self.model(*batch[:-1]), batch[-1]))


class _Slot(NamedTuple):
    """A named place for a tensor in a module."""

    name: str
    store: dict[str, torch.Tensor | None]
    key: str


class ModuleTensors:
    """Reads a module's current parameters and buffers, by name.

    Args:
        whole: The module.
    """

    def __init__(self, whole: torch.nn.Module) -> None:
        self._slots: list[_Slot] = []  # of parameters, then of buffers
        self._ties: list[tuple[_Slot, int]] = []  # further names of those
        self._empty: list[_Slot] = []  # names without a tensor
        self.nparams = self._find(whole, own_parameters, {})
        self._find(whole, own_buffers, {})
        self.names = [slot.name for slot in self._slots]

    def _find(self, whole: torch.nn.Module, own: _Own, known: dict[int, int]) -> int:
        for path, module in whole.named_modules():
            store = own(module)
            for key, tensor in store.items():
                slot = _Slot(f"{path}.{key}", store, key)
                if tensor is None:
                    self._empty.append(slot)
                elif id(tensor) in known:
                    self._ties.append((slot, known[id(tensor)]))
                else:
                    known[id(tensor)] = len(self._slots)
                    self._slots.append(slot)
        return len(known)

    def read(self) -> list[torch.Tensor | None]:
        """Return the parameters, then the buffers, each once."""
        return [slot.store.get(slot.key) for slot in self._slots]

    def changed_tie(self, values: Sequence[torch.Tensor | None]) -> str:
        """Return a name that no longer refers to the same tensor; empty if none."""
        for slot, index in self._ties:
            if slot.store.get(slot.key) is not values[index]:
                return slot.name
        for slot in self._empty:
            if slot.store.get(slot.key) is not None:
                return slot.name
        distinct = len({id(value) for value in values[: len(self._slots)]})
        return "" if distinct == len(self._slots) else "parameters"


class Guard:
    """The conditions under which a captured step may run: tensors, modules, hooks and modes.

    Args:
        whole: Model and loss.
        batch: Inputs and targets.
    """

    def __init__(self, whole: ModelWithLoss, batch: Sequence[torch.Tensor]) -> None:
        self.tensors = ModuleTensors(whole)
        inputs = [f"input {index}" for index in range(len(batch) - 1)]
        self._names = [*map(_short, self.tensors.names), *inputs, "targets"]
        self._signatures = [_signature(value) for value in self.values(batch)]
        self._modules = [_ModuleState.of(name, module) for name, module in whole.named_modules()]
        self._hooks = [
            (f"module {_short(name) or type(module).__name__}", hooks)
            for name, module in whole.named_modules()
            for hooks in module_hooks(module)
        ]
        self._modes = _modes(batch[-1].device)

    def values(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the current parameters and buffers, then inputs and targets."""
        return [*self.tensors.read(), *batch]

    def hook_owner(self, values: Sequence[torch.Tensor | None]) -> str:
        """Return the first module or parameter with a hook; empty if none."""
        if any_global_module_hook():
            return "every module (a global hook)"
        params = zip(self._names, values[: self.tensors.nparams], strict=False)
        owners = chain(
            (owner for owner, hooks in self._hooks if hooks),
            (
                f"parameter {name}"
                for name, param in params
                if param is not None and tensor_hooks(param)
            ),
        )
        return next(owners, "")

    def violation(self, values: Sequence[torch.Tensor | None]) -> str:
        """Return the first violated condition as rule and value; empty if all hold."""
        signatures = [_signature(value) for value in values]
        if signatures != self._signatures:
            return self._describe_tensor(signatures)
        for module in self._modules:
            if not module.is_unchanged():
                return (
                    f"{module.changed_attribute()} of {_short(module.name) or 'the loss'} must be "
                    f"as it was when the step was captured, but has changed"
                )
        if name := self.tensors.changed_tie(values):
            return f"{_short(name)} must share its tensors as when the step was captured"
        if name := self.hook_owner(values):
            return f"a captured step must have no hooks, but {name} has one"
        modes = _modes(values[-1].device) if values[-1] is not None else ()
        if modes != self._modes:
            return f"autocast and torch's other modes must be {self._modes}, not {modes}"
        return ""

    def _describe_tensor(self, signatures: Sequence[Any]) -> str:
        if len(signatures) != len(self._signatures):
            count, known = len(signatures), len(self._signatures)
            return f"the number of inputs must be as when captured, not {count - known:+d}"
        for name, signature, known in zip(self._names, signatures, self._signatures, strict=True):
            if signature != known:
                return f"{name} must be {_describe(known)}, not {_describe(signature)}"
        raise AssertionError("signatures differ, but none does")


class _ModuleState(NamedTuple):
    """Attributes of a module at the time of the capture."""

    name: str
    module: dict[str, Any]  # its current attributes
    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    children: dict[str, torch.nn.Module | None]
    params: frozenset[str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module) -> "_ModuleState":
        held = {key: value for key, value in vars(module).items() if key not in CHECKED_SEPARATELY}
        tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
        plain = {key: value for key, value in held.items() if key not in tensors}
        params, buffers = frozenset(own_parameters(module)), frozenset(own_buffers(module))
        return cls(name, vars(module), plain, tensors, {**own_modules(module)}, params, buffers)

    def is_unchanged(self) -> bool:
        now = self.module
        try:
            same = self.plain.items() <= now.items()
        except Exception:  # not comparable: counts as changed
            return False
        return (
            same
            and all(now.get(key) is tensor for key, tensor in self.tensors.items())
            and now[MODULES] == self.children
            and now[PARAMETERS].keys() == self.params
            and now[BUFFERS].keys() == self.buffers
        )

    def changed_attribute(self) -> str:
        """Return the name of a changed attribute, as far as it can be identified."""
        for key, value in self.plain.items():
            now = self.module.get(key)
            if now is not value and (type(now) is not type(value) or repr(now) != repr(value)):
                return key
        return "a tensor or module"


def autocast_kinds(device: torch.device) -> list[str]:
    """Return the device types of a step for which autocast is enabled."""
    return [kind for kind in sorted({"cpu", device.type}) if torch.is_autocast_enabled(kind)]


def _modes(device: torch.device) -> tuple[Any, ...]:
    """Return torch's modes that affect operations: autocast, default dtype, determinism, grad."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_kinds(device)]
    return (
        *casts,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        f"grad {torch.is_grad_enabled()}",
    )


def _signature(tensor: torch.Tensor | None) -> Any:
    if tensor is None or tensor.layout != torch.strided:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad


def _describe(signature: Any) -> str:
    if signature is None:
        return "none, or not dense"
    dtype, shape, stride, device, needs = signature
    grad = "needing" if needs else "without"
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}, {grad} a gradient"


def _short(name: str) -> str:
    return name.removeprefix("model.")
