"""Notices that a program writes parameters between steps: a rollback, a reset layer, pruning."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from daso.train.model.hooks import Hook
from daso.train.model.params import Trained, writes_of

__all__ = ["ParameterWrites"]

SAMPLED = 16  # numbers of each parameter that are compared
# Writes that come again within so many steps are part of training; after new starts by such writes,
# within more.
PATTERN_STEPS, MOST_PATTERN_STEPS = 100, 400

Change = Literal["", "loaded", "written"]


@dataclass
class History:
    """When the program wrote."""

    steps: int = 0  # looks so far
    written: int = -PATTERN_STEPS  # the last one that saw other parameters
    counted: int = -PATTERN_STEPS  # the last one before which torch counted a write
    window: int = PATTERN_STEPS


class ParameterWrites:
    """Compares parameters at the end of a step with those at the beginning of the next.

    Some numbers of each parameter are compared; on a device only where torch counted a write, since
    a comparison blocks. So parameters that are put back are unchanged. Writes that come again
    within 100 steps (weight clipping, masks) are part of training, unless the module loads a state;
    after each new start by other writes, within twice as many, 400 at most.

    Args:
        trained: The parameters, and the module.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
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
        """Remember the parameters as they are: what is written from now on is the program's.

        Args:
            by_layers: Others write parameters too (backward, modes): only loads count.
        """
        self._loaded, self._load_differs, self._notices = False, False, True
        self._by_layers = by_layers
        self._mark = None if by_layers else self._snapshot()

    def _snapshot(self) -> tuple[list[tuple[int, int]], torch.Tensor]:
        tensors = [tensor for _, tensor in self._trained.local]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._samples = places, [_sample_of(tensor) for tensor in tensors]
        return [writes_of(tensor) for tensor in tensors], self._sample()

    def forget(self) -> None:
        """Let what is written until the next mark count as no write."""
        self._mark, self._notices = None, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let writes inside not count: parameters are others there, and put back behind it."""
        noticed = self._notices
        self.forget()
        try:
            yield
        finally:
            if noticed:
                self.mark(by_layers=self._by_layers)

    def changed(self, *, goes_on: bool = False) -> Change:
        """Return whether the program wrote other parameters since the mark, and how; once.

        Args:
            goes_on: No step follows: writes from now on count too.

        Does not communicate; blocks for a device where torch counted writes.
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
        writes, before = self._mark
        now = [writes_of(tensor) for _, tensor in self._trained.local]
        if [place for place, _ in now] != self._places:
            return "loaded" if self._loaded else ""  # a new layout is followed by itself
        if self._by_layers:
            return "loaded" if self._load_differs else ""
        counted = now != writes
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
        # By bits: NaN is equal to itself.
        return not torch.equal(before.view(torch.uint8), self._sample().view(torch.uint8))

    def widen(self) -> None:
        """Take writes for part of training that come again as late as the last did, about."""
        self._history.window = min(2 * self._history.window, MOST_PATTERN_STEPS)

    @property
    def history(self) -> dict[str, int]:
        """When the program wrote, for who goes on: a resumed run, a session that is set up anew."""
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
        """Take the hooks off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._samples, self._places = [], [], []


def _sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some numbers of a dense tensor, in one line of the cache."""
    count = min(SAMPLED, tensor.numel())
    start = tensor.storage_offset() + (tensor.numel() - count) // 2
    return tensor.detach().as_strided((count,), (1,), start)
