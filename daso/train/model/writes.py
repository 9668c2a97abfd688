"""Notices that a program writes parameters between steps: a rollback, a reset layer, pruning."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daso.train.model.hooks import Hook
from daso.train.model.params import Trained, writes_of

__all__ = ["ParameterWrites"]

SAMPLED = 16  # numbers of each parameter that are compared
PATTERN_STEPS = 100  # writes that come again within so many steps are part of every step


class ParameterWrites:
    """Compares parameters at the end of a step with those at the beginning of the next.

    Some numbers of each parameter are compared; on a device only where torch counted a write, since
    a comparison blocks. So parameters that are put back are unchanged. A projection behind every
    step (weight clipping, masks) is no new start, unless the module loads a state.

    Args:
        trained: The parameters, and the module.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self._places: list[int] = []  # addresses of the the parameters
        self._samples: list[torch.Tensor] = []  # views
        self._mark: tuple[list[tuple[int, int]], torch.Tensor] | None = None
        self._loaded, self._notices_loads = False, False
        self._step, self._written = 0, -PATTERN_STEPS  # of the last write
        scripted = torch.jit.ScriptModule  # has no such hooks
        modules = [] if trained.module is None else list(trained.module.modules())
        self._handles = [
            one.register_load_state_dict_pre_hook(Hook(self._note_load))
            for one in modules
            if not isinstance(one, scripted)
        ]

    def mark(self, *, by_layers: bool = False) -> None:
        """Remember the parameters as they are: what is written from now on is the program's.

        Args:
            by_layers: Backward writes parameters too, so that only loads count.
        """
        tensors = [tensor for _, tensor in self._trained.local]
        places = [tensor.data_ptr() for tensor in tensors]
        if places != self._places:
            self._places, self._samples = places, [_sample_of(tensor) for tensor in tensors]
        self._loaded, self._notices_loads = False, True
        self._mark = None
        if not by_layers:
            self._mark = [writes_of(tensor) for tensor in tensors], self._sample()

    def forget(self) -> None:
        """Let what is written until the next mark count as no write."""
        self._mark, self._notices_loads = None, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let writes inside not count: parameters are others there, and put back behind it."""
        mark, noticed = self._mark, self._notices_loads
        self.forget()
        try:
            yield
        finally:
            if noticed:
                self.mark(by_layers=mark is None)

    def changed(self, *, goes_on: bool = False) -> bool:
        """Return whether the program wrote to parameters since the mark, once.

        Args:
            goes_on: No step follows: writes from now on count too.

        Does not communicate; blocks for a device where torch counted writes.
        """
        mark, noticed = self._mark, self._notices_loads
        found = noticed and self._is_new_start()
        self.forget()
        if goes_on and noticed:
            self.mark(by_layers=mark is None)
        return found

    def _is_new_start(self) -> bool:
        self._step += 1
        if self._mark is None or not self._differ(*self._mark):
            return False
        last, self._written = self._written, self._step
        return self._loaded or self._step - last >= PATTERN_STEPS

    def _differ(self, writes: list[tuple[int, int]], before: torch.Tensor) -> bool:
        now = [writes_of(tensor) for _, tensor in self._trained.local]
        if [place for place, _ in now] != self._places:
            return self._loaded  # a new layout is followed by itself
        if now == writes and before.device.type != "cpu":
            return False
        # By bits: NaN is equal to itself.
        return not torch.equal(before.view(torch.uint8), self._sample().view(torch.uint8))

    def _sample(self) -> torch.Tensor:
        return torch.cat(self._samples)

    def _note_load(self) -> None:
        if self._notices_loads:
            if self._mark is None:
                self.mark()
            self._loaded = True

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
