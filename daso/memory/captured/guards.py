"""What a captured step relies on: held, at every call, against what is there then."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module

__all__ = ["Guard", "Tensors", "Whole", "autocast_kinds", "first_hook", "gradient_hooks"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
APART = {"_parameters", "_buffers", "_modules", *HOOKS}  # are looked at in their own ways


class Whole(torch.nn.Module):
    """A model and its loss as one module: what either of them has belongs to the step."""

    def __init__(self, model: torch.nn.Module, loss_fn: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *given: torch.Tensor, backward: Callable[[torch.Tensor], Any]) -> Any:
        """Return what a backward pass returns for the loss of inputs and, last, of targets."""
        return backward(self.loss_fn(self.model(*given[:-1]), given[-1]))


class _Slot(NamedTuple):
    """Where a module keeps a tensor."""

    name: str
    store: dict[str, torch.Tensor | None]
    key: str


class Tensors:
    """A module's parameters and buffers, read afresh by name.

    Args:
        whole: The module.
    """

    def __init__(self, whole: torch.nn.Module) -> None:
        self._slots: list[_Slot] = []  # of parameters, then of buffers
        self._ties: list[tuple[_Slot, int]] = []  # other names of those
        self._empty: list[_Slot] = []  # have no tensor
        self.nparams = self._find(whole, "_parameters", {})
        self._find(whole, "_buffers", {})
        self.names = [slot.name for slot in self._slots]

    def _find(self, whole: torch.nn.Module, kind: str, known: dict[int, int]) -> int:
        for path, module in whole.named_modules():
            store = getattr(module, kind)
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
        """Return parameters, then buffers, each of which once."""
        return [slot.store.get(slot.key) for slot in self._slots]

    def untied(self, values: Sequence[torch.Tensor | None]) -> str:
        """Return a name that is not that of the tensor that it was; nothing if there is none."""
        for slot, index in self._ties:
            if slot.store.get(slot.key) is not values[index]:
                return slot.name
        for slot in self._empty:
            if slot.store.get(slot.key) is not None:
                return slot.name
        distinct = len({id(one) for one in values[: len(self._slots)]})
        return "" if distinct == len(self._slots) else "parameters"


class Guard:
    """What a step was captured for.

    Args:
        whole: Model and loss.
        tensors: Those of it.
        given: Inputs and targets.
    """

    def __init__(self, whole: Whole, tensors: Tensors, given: Sequence[torch.Tensor]) -> None:
        values = [*tensors.read(), *given]
        inputs = [f"input {index}" for index in range(len(given) - 1)]
        self._tensors = tensors
        self._names = [*map(_short, tensors.names), *inputs, "targets"]
        self._signatures = [_signature(value) for value in values]
        self._modules = [_Seen.of(name, module) for name, module in whole.named_modules()]
        self._hooks = [getattr(module, kind) for module in whole.modules() for kind in HOOKS]
        self._modes = _modes(given[-1].device)

    def broken(self, values: Sequence[torch.Tensor | None]) -> str:
        """Return what is not as it was: rule and value; nothing if all is."""
        signatures = [_signature(value) for value in values]
        if signatures != self._signatures:
            return self._odd_tensor(signatures)
        for module in self._modules:
            if not module.holds():
                return (
                    f"{module.odd()} of {_short(module.name) or 'the loss'} must be as it was when "
                    f"the step was captured, but has changed"
                )
        if name := self._tensors.untied(values):
            return f"{_short(name)} must share its tensors as when the step was captured"
        if self._hooked(values):
            return "hooks must not be there in a captured step, but have been added"
        modes = _modes(values[-1].device) if values[-1] is not None else ()
        if modes != self._modes:
            return f"autocast and torch's other modes must be {self._modes}, not {modes}"
        return ""

    def _hooked(self, values: Sequence[torch.Tensor | None]) -> bool:
        if any(self._hooks) or _hooks_all_modules():
            return True
        return any(map(_has_hook, values[: self._tensors.nparams]))

    def _odd_tensor(self, signatures: Sequence[Any]) -> str:
        if len(signatures) != len(self._signatures):
            count, known = len(signatures), len(self._signatures)
            return f"there must be as many inputs as when captured, not {count - known:+d}"
        for name, one, known in zip(self._names, signatures, self._signatures, strict=True):
            if one != known:
                return f"{name} must be {_told(known)}, not {_told(one)}"
        raise AssertionError("signatures differ, but none does")


class _Seen(NamedTuple):
    """A module's attributes when the step was captured."""

    name: str
    module: dict[str, Any]  # as it is now
    plain: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    children: dict[str, torch.nn.Module | None]
    params: frozenset[str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, name: str, module: torch.nn.Module) -> "_Seen":
        held = {key: value for key, value in vars(module).items() if key not in APART}
        tensors = {key: one for key, one in held.items() if isinstance(one, torch.Tensor)}
        plain = {key: one for key, one in held.items() if key not in tensors}
        params, buffers = frozenset(module._parameters), frozenset(module._buffers)
        return cls(name, vars(module), plain, tensors, {**module._modules}, params, buffers)

    def holds(self) -> bool:
        now = self.module
        try:
            same = self.plain.items() <= now.items()
        except Exception:  # a value that cannot be compared: it is another one, then
            return False
        return (
            same
            and all(now.get(key) is one for key, one in self.tensors.items())
            and now["_modules"] == self.children
            and now["_parameters"].keys() == self.params
            and now["_buffers"].keys() == self.buffers
        )

    def odd(self) -> str:
        """Return which attribute has changed, of those that can be told."""
        for key, one in self.plain.items():
            now = self.module.get(key)
            if now is not one and (type(now) is not type(one) or repr(now) != repr(one)):
                return key
        return "a tensor or module"


def _hooks_all_modules() -> bool:
    return any(getattr(torch_module, f"_global{kind}") for kind in HOOKS)


def first_hook(whole: Whole) -> str:
    """Return what of a step has a hook; nothing if nothing has."""
    if _hooks_all_modules():
        return "every module (a global hook)"
    for name, module in whole.named_modules():
        if any(getattr(module, kind) for kind in HOOKS):
            return f"module {_short(name) or type(module).__name__}"
    for name, param in whole.named_parameters():
        if _has_hook(param):
            return f"parameter {_short(name)}"
    return ""


def autocast_kinds(device: torch.device) -> list[str]:
    """Return the kinds of device that autocast is on for now, of those that a step may use."""
    return [kind for kind in sorted({"cpu", device.type}) if torch.is_autocast_enabled(kind)]


def _modes(device: torch.device) -> tuple[Any, ...]:
    """Return what changes what torch's operations do."""
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_kinds(device)]
    return (
        *casts,
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        f"grad {torch.is_grad_enabled()}",
    )


def _has_hook(param: torch.Tensor | None) -> bool:
    return param is not None and bool(param._backward_hooks)


def gradient_hooks(param: torch.Tensor) -> Sequence[Callable[[torch.Tensor], object]]:
    """Return what a parameter's ``register_post_accumulate_grad_hook`` was given."""
    hooks = param._post_accumulate_grad_hooks
    return [*hooks.values()] if hooks else []


def _signature(one: torch.Tensor | None) -> Any:
    if one is None or one.layout != torch.strided:
        return None
    return one.dtype, one.shape, one.stride(), one.device, one.requires_grad


def _told(signature: Any) -> str:
    if signature is None:
        return "none, or not dense"
    dtype, shape, stride, device, needs = signature
    grad = "needing" if needs else "without"
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}, {grad} a gradient"


def _short(name: str) -> str:
    return name.removeprefix("model.")
