"""One iteration, watched: what a model saves for backward, and what that costs to make."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from daso.errors import ConfigError
from daso.memory.activation_trace import Iteration, Pack, is_heavy
from daso.memory.observe import Observer, bytes_of, has_storage, tensors_in
from daso.memory.tiers import Tier

__all__ = ["Loss", "View", "default_loss", "profile", "unchanged"]

Loss = Callable[[Any], torch.Tensor]


class View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Return a tensor's."""
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that lies so in the storage of another one."""
        found = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return found.set_(tensor.untyped_storage(), self.offset, self.size, self.stride)


class _Saved(NamedTuple):
    """What autograd keeps while an iteration is watched."""

    number: int  # among what was saved
    view: View
    at: int  # in the second memory
    nbytes: int


class _Watch:
    """Watches one iteration, whose saved storages lie in the second memory meanwhile.

    So it is seen when the model itself does not hold them any more, and what does not fit plainly
    can be watched.

    Args:
        model: The model.
        tier: A second memory.
        least: Storages of fewer bytes stay.
        inside: Names of modules that are units.
    """

    def __init__(
        self, model: torch.nn.Module, tier: Tier, least: int, inside: Sequence[str]
    ) -> None:
        self.model, self.tier, self.least, self.inside = model, tier, least, inside
        self.device = next(model.parameters()).device
        self.observer = Observer(self.before)
        self.packs: list[Pack] = []
        self.bounds, self.moments = [0], dict[int, int]()
        self.there: dict[int, int] = {}  # where storages lie in the second memory
        self.forward = True
        self.seen: Iteration | None = None
        self.unit = 0  # whose backward it is

    def before(self, number: int, func: Any) -> None:
        """Begin a unit with an operation that costs much."""
        if self.forward and not self.inside and number and is_heavy(func):
            self.bound(number)

    def bound(self, number: int) -> None:
        """Begin a unit."""
        if self.forward and number > self.bounds[-1]:
            self.bounds.append(number)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take what is saved."""
        if not self._may_go(tensor):
            self.packs.append(Pack(-1, self.observer.next))  # stays as it is
            with _disable_current_modes():
                return tensor.detach()  # itself would hold its own history
        with _disable_current_modes():
            number = self.observer.number(tensor)
            last = self.observer.next - 1
            op = self.observer.ops[last] if last >= 0 else None
            by_last = op is not None and number in (*op.makes, *op.writes)
            order = len(self.packs)
            self.packs.append(Pack(number, last if by_last else last + 1, by_last))
            seen = self.observer.memory.seen[number]
            if seen.born < 0 or seen.nbytes < self.least:
                return tensor.detach()
            if number not in self.there:
                self.there[number] = self.tier.lease(seen.nbytes)
                self.tier.out(bytes_of(tensor.detach()), self.there[number]).wait()
            return _Saved(order, View.of(tensor), self.there[number], seen.nbytes)

    def _may_go(self, tensor: torch.Tensor) -> bool:
        odd = not has_storage(tensor) or tensor.is_conj() or tensor.is_neg()
        return not odd and tensor.device == self.device

    def unpack(self, saved: Any) -> torch.Tensor:
        """Give it back."""
        if not isinstance(saved, _Saved):
            found: torch.Tensor = saved
            return found
        with _disable_current_modes():
            pack = self.packs[saved.number]
            if self.seen is not None:
                unit = self.seen.unit(pack.op)
                for number in range(self.unit - 1, unit - 1, -1):
                    self.moments[number] = self.observer.next
                self.unit = min(self.unit, unit)
            row = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device)
            self.tier.back(row, saved.at).wait()
            return saved.view.on(row)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss) -> Iteration:
        """Go through one iteration."""
        params = [param for param in self.model.parameters() if param.requires_grad]
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        with self.observer, _units_of(self.model, self.inside, self):
            with hooks:
                output = self.model(*args, **kwargs)
            self.forward = False
            forward, value = self.observer.next, loss(output)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise ConfigError(f"loss must give one number, not {type(value).__name__}")
            self.unit = len(self.bounds)
            self.seen = Iteration(
                self.observer,
                self.packs,
                forward,
                self.observer.next,
                self.moments,
                self.bounds,
                bool(self.inside),
                set(),
            )
            grads = torch.autograd.grad(value, params, allow_unused=True)
        for grad in grads:
            if has_storage(grad):
                self.seen.grads.add(self.observer.number(grad))
        for number, at in self.there.items():
            self.tier.release(at, self.observer.memory.seen[number].nbytes)
        del output
        return self.seen


@contextmanager
def _units_of(model: torch.nn.Module, inside: Sequence[str], watch: _Watch) -> Iterator[None]:
    """Begin and end a unit with each module that is one."""
    modules = dict(model.named_modules())
    hooks: list[Any] = []
    try:
        for name in inside:
            if name not in modules:
                raise ConfigError(
                    f"units must be names of the model's modules, and {name!r} is not; "
                    "model.named_modules() lists them"
                )
            hooks.append(
                modules[name].register_forward_pre_hook(
                    lambda *_: watch.bound(watch.observer.next), prepend=True
                )
            )
            hooks.append(
                modules[name].register_forward_hook(lambda *_: watch.bound(watch.observer.next))
            )
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def unchanged(model: torch.nn.Module, batch: object = ()) -> Iterator[None]:
    """Leave a model's buffers, a batch and torch's random number generators as they were."""
    given = [(one, one._version, one.detach().clone()) for one in tensors_in(batch)]
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer  # forward may have put another one there
                buffer.copy_(before)
            for tensor, version, before in given:
                if tensor._version != version:  # forward works on it in place
                    tensor.copy_(before)


def profile(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Loss,
    tier: Tier,
    *,
    least: int,
    inside: Sequence[str] = (),
) -> Iteration:
    """Go through an iteration twice, and return what was seen the second time.

    The model, its gradients and random numbers are afterwards what they were.
    """
    with torch.enable_grad(), unchanged(model, (args, kwargs)):
        first = _Watch(model, tier, least, inside).run(args, kwargs, loss)
    with torch.enable_grad(), unchanged(model, (args, kwargs)):
        second = _Watch(model, tier, least, inside).run(args, kwargs, loss)
    # Of backward the order may be another one: autocast keeps its casts.
    forwards = [[op.func for op in one.ops[: one.loss]] for one in (first, second)]
    if forwards[0] != forwards[1]:
        raise ConfigError(
            "memory can be planned of a model that does the same in every step, but this one did "
            "something else the second time, with the same batch and the same random numbers"
        )
    if first.observer.casts:  # which autocast may have kept for the second
        second.observer.casts = first.observer.casts
    return second


def default_loss(output: Any) -> torch.Tensor:
    """Return the sum of all that a model gives and that has a gradient."""
    some = [one for one in tensors_in(output) if one.requires_grad]
    if not some:
        raise ConfigError("the model gives nothing that has a gradient; set loss=")
    return torch.stack([one.sum().float() for one in some]).sum()
