"""Detects parameters that a program changes between steps: rollbacks, layer resets, pruning."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from daso.train.model.hooks import Hook
from daso.train.model.params import Trained, writes_of

__all__ = ["ParameterWrites"]

SAMPLED = 16  # numbers of each parameter that are compared
# Changes that recur within this many steps are part of training. The window doubles with each
# restart that such a change causes, up to the maximum.
PATTERN_STEPS, MOST_PATTERN_STEPS = 100, 400

Change = Literal["", "loaded", "written"]


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
        plain = [one for one in modules if not isinstance(one, scripted)]
        self._handles = [
            *(one.register_load_state_dict_pre_hook(Hook(self._note_load)) for one in plain),
            *(one.register_load_state_dict_post_hook(Hook(self._note_loaded)) for one in plain),
        ]

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
        """Return how the program changed parameters since the mark, and stop watching.

        Args:
            goes_on: Keep watching: no step follows.

        Does not communicate; blocks on a device if torch counted writes.
        """
        noticed = self._notices
        found = self._look() if noticed else ""
        self.forget()
        if goes_on and noticed:
            self.mark(by_layers=self._by_layers)
        return found

    def _look(self) -> Change:
        history = self._history
        history.steps += 1
        if self._mark is None:
            return ""
        counts, before = self._mark
        counted = self._counts() != counts
        if self._by_layers:
            return "loaded" if self._load_differs else ""
        again = counted and history.counted == history.steps - 1  # a projection behind every step
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
        for handle in self._handles:
            handle.remove()
        self._handles, self._tensors, self._samples, self._places = [], [], [], []


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of adjacent numbers of a dense tensor: at most two cache lines."""
    count = min(SAMPLED, tensor.numel())
    start = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.detach().as_strided((count,), (1,), start)
