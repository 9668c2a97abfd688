"""Detects changes that a program makes between steps, of parameters and of gradients.

`ParameterChanges` compares layouts and the set of trained parameters at every step.
`ParameterWrites` compares samples of parameter values: rollbacks, layer resets, pruning.
`GradientScaleMeter` compares gradients with those of the backward. An optimizer that is linear in
its gradients (SGD) needs no gain unless gradients are clipped on each node: every node's step then
has the same length whatever its noise, and the mean of the steps is too short, as with optimizers
that normalize, by the factor of the clipping at most.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from daso.torch_private import version_of
from daso.train.model.one_copy import Hook
from daso.train.model.params import Named, Trained, layout_of

SAMPLED = 16  # numbers of each parameter that are compared
# Changes that recur within this many steps are part of training. Each restart that such a change
# causes doubles the window, up to the maximum.
PATTERN_STEPS, MOST_PATTERN_STEPS = 100, 400
LEAST_NUMEL = 64  # of the gradient that is compared
SAME = 1e-4  # relative; a constant factor is a unit (accumulation, a scaler), not clipping

Change = Literal["", "loaded", "written"]


def writes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and write count of a tensor, which change with each counted write."""
    return tensor.data_ptr(), version_of(tensor)


class ParameterChanges:
    """Changes of parameters since the creation of this object.

    Args:
        trained: The optimizer and what it trains.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._trainable = _trainable(trained.inner)
        self._digest = layout_of(trained.named).digest
        self._tensors = [tensor for _, tensor in trained.local]
        self._addresses = self._where()

    def look(self) -> tuple[bool, bool]:
        """Return whether parameters were added, frozen or unfrozen, and whether layouts changed."""
        return self._trainable != _trainable(self._trained.inner), self.layout_changed()

    def layout_changed(self) -> bool:
        """Return whether parameters got another shape, type or order in memory."""
        addresses = self._where()  # at every step: cheaper than layouts
        if addresses == self._addresses:
            return False
        if layout_of(self._trained.named).digest != self._digest:
            return True
        self._addresses = addresses
        return False

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors]


def _trainable(inner: torch.optim.Optimizer) -> list[list[int]]:
    """Return the ids of the parameters that an optimizer trains, by group."""
    return [
        [id(param) for param in group["params"] if param.requires_grad]
        for group in inner.param_groups
    ]


@dataclass
class History:
    """Steps before which the program wrote parameters."""

    steps: int = 0  # comparisons so far
    written: int = -PATTERN_STEPS  # last comparison with different parameters
    counted: int = -PATTERN_STEPS  # last comparison before which torch counted a write
    window: int = PATTERN_STEPS


class ParameterWrites:
    """Compares parameters at the end of a step with those at the start of the next step.

    The comparison covers 16 numbers of each parameter. On a device it runs only if torch counted a
    write, because it blocks. Parameters that are put back compare as unchanged. Changes that recur
    within 100 to 400 steps (weight clipping, masks) are part of training, unless the module loads a
    state.

    Args:
        trained: The parameters, and the module.
    """

    def __init__(self, trained: Trained) -> None:
        self._tensors = [tensor for _, tensor in trained.local]
        self._places: list[int] = []  # addresses of the parameters
        self._samples: list[torch.Tensor] = []  # views
        self._mark: tuple[list[tuple[int, int]], torch.Tensor] | None = None
        self._loaded, self._load_differs = False, False  # since the mark
        self._notices, self._by_layers = False, False
        self._history = History()
        scripted = torch.jit.ScriptModule  # has no such hooks
        modules = [] if trained.module is None else list(trained.module.modules())
        plain = [module for module in modules if not isinstance(module, scripted)]
        begins, ends = Hook(self._note_load), Hook(self._note_loaded)
        with ExitStack() as hooks:
            for module in plain:
                hooks.callback(module.register_load_state_dict_pre_hook(begins).remove)
                hooks.callback(module.register_load_state_dict_post_hook(ends).remove)
            self._hooks = hooks.pop_all()

    def mark(self, *, by_layers: bool = False) -> None:
        """Start watching for changes by the program.

        Args:
            by_layers: Backward or modes of the optimizer write parameters: only loads count.
        """
        self._loaded, self._load_differs, self._notices = False, False, True
        self._by_layers = by_layers
        self._mark = None if by_layers else self._snapshot()

    def _snapshot(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        return self._counts(), self._sample()

    def _counts(self) -> list[tuple[int, int]]:
        """Return addresses and write counts; sample parameters that moved in their new memory."""
        counts = [writes_of(tensor) for tensor in self._tensors]
        places = [place for place, _ in counts]
        if places != self._places:
            self._places, self._samples = places, [_sample_of(tensor) for tensor in self._tensors]
        return counts

    def forget(self) -> None:
        """Stop watching until the next mark."""
        self._mark, self._notices = None, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore changes inside the context, which ends with the parameters put back."""
        noticed = self._notices
        self.forget()
        try:
            yield
        finally:
            if noticed:
                self.mark(by_layers=self._by_layers)

    def changed(self, *, goes_on: bool = False) -> Change:
        """Return the kind of change by the program since the mark, and stop watching.

        Args:
            goes_on: Keep watching, as no step follows.

        Does not communicate; blocks on a device if torch counted writes.
        """
        noticed = self._notices
        change = self._look() if noticed else ""
        self.forget()
        if goes_on and noticed:
            self.mark(by_layers=self._by_layers)
        return change

    def _look(self) -> Change:
        history = self._history
        history.steps += 1
        if self._mark is None:
            return ""
        counts, before = self._mark
        counted = self._counts() != counts
        if self._by_layers:
            return "loaded" if self._load_differs else ""
        again = counted and history.counted == history.steps - 1  # a projection after every step
        if counted:
            history.counted = history.steps
        if not counted and before.device.type != "cpu":
            return ""
        differ = self._differs(before)
        if self._loaded:
            return "loaded" if differ else ""
        last = history.written
        if differ or again:
            history.written = history.steps
        return "written" if differ and history.steps - last >= history.window else ""

    def _differs(self, before: torch.Tensor) -> bool:
        # Bitwise, so that NaN equals itself.
        return not torch.equal(before.view(torch.uint8), self._sample().view(torch.uint8))

    def widen(self) -> None:
        """Double the window after a restart."""
        self._history.window = min(2 * self._history.window, MOST_PATTERN_STEPS)

    @property
    def history(self) -> dict[str, int]:
        """The history as plain values, for a resumed run or a session that is set up again."""
        return asdict(self._history)

    @history.setter
    def history(self, history: Mapping[str, int]) -> None:
        self._history = History(**history)

    def _sample(self) -> torch.Tensor:
        return torch.cat(self._samples)

    def _note_load(self) -> None:
        if self._notices:
            self._mark = self._mark or self._snapshot()
            self._loaded = True

    def _note_loaded(self) -> None:
        if self._notices and self._by_layers and self._mark is not None:
            self._load_differs = self._differs(self._mark[1])

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        self._hooks.close()
        self._tensors, self._samples, self._places = [], [], []


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a few adjacent numbers of a dense tensor: at most two cache lines."""
    count = min(SAMPLED, tensor.numel())
    start = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.detach().as_strided((count,), (1,), start)


def has_modes(inner: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer switches parameters between training and evaluation."""
    parts = getattr(inner, "optimizers", [inner])
    return any(
        all(callable(getattr(part, name, None)) for name in ("train", "eval")) for part in parts
    )


class GradientScaleMeter:
    """Compares a small gradient after backward and before the step.

    Args:
        named: Names and parameters.
    """

    def __init__(self, named: Named) -> None:
        numels = {index: tensor.numel() for index, (_, tensor) in enumerate(named)}
        large = [index for index, numel in numels.items() if numel >= LEAST_NUMEL]
        self.index = (
            min(large, key=numels.__getitem__) if large else max(numels, key=numels.__getitem__)
        )
        self._tensor = named[self.index][1]
        self._before: tuple[torch.Tensor, tuple[int, int]] | None = None
        # On the device of the gradient: steps, the sum of their factors, the last factor.
        self._sums = torch.zeros(3, dtype=torch.float64, device=self._tensor.device)
        self.seen = False  # gradients were changed at any time

    def note(self) -> None:
        """Copy the gradient after a backward. Does not block."""
        grad = self._tensor.grad
        self._before = None if grad is None else (grad.detach().clone(), writes_of(grad))

    def measure(self) -> None:
        """Compare the gradient at the start of a step with the copy. Does not block."""
        before, self._before = self._before, None
        grad = self._tensor.grad
        if before is None or grad is None or writes_of(grad) == before[1]:
            return
        self.seen = True
        was = before[0].flatten().double()
        factor = grad.detach().flatten().double() @ was / (was @ was)
        _, _, last = self._sums.unbind()
        linear = ((factor - last).abs() <= SAME * last.abs()) | ~factor.isfinite()
        clipped = torch.where(linear, torch.ones_like(factor), factor.clamp(1e-6, 1.0))
        self._sums[0] += 1
        self._sums[1] += clipped
        self._sums[2] = torch.where(factor.isfinite(), factor, last)

    def forget(self) -> None:
        """Drop the copy of the gradient after its step."""
        self._before = None

    def take(self) -> float:
        """Return the factor by which clipping shortened steps since the last call.

        It is 1 or more, the reciprocal of the mean scale; 0 if gradients were never changed. Blocks
        for a device.
        """
        if not self.seen:
            return 0.0
        steps, total, _ = self._sums.tolist()
        self._sums[:2] = 0
        return steps / total if total > 0 else 1.0

    def state(self) -> list[float]:
        """Return this rank's state for a bit-identical resume."""
        return [float(self.seen), *self._sums.tolist()]

    def load(self, state: list[float]) -> None:
        """Load what `state` returned."""
        self.seen = bool(state[0])
        self._sums.copy_(torch.tensor(state[1:], dtype=torch.float64, device="cpu"))
