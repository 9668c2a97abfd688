"""Notices that a program loads other parameters in the midst of a training, as for a rollback."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from daso.train.misuse import checksum
from daso.train.model.hooks import Hook
from daso.train.model.params import Trained

__all__ = ["LoadedParameters"]


class LoadedParameters:
    """Compares parameters before and after ``load_state_dict`` of the module, or a part of it.

    Loads before the first step, and behind a state of the optimizer, begin or resume a training and
    do not count. Parameters that are exchanged for a while (an evaluation) and put back do not
    either.

    Args:
        trained: The parameters, and the module.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained, self._armed = trained, False
        self._before: float | None = None  # the checksum before the first load since a step
        modules = [] if trained.module is None else list(trained.module.modules())
        scripted = torch.jit.ScriptModule  # has no such hooks: nothing is noticed there
        self._handles = [
            one.register_load_state_dict_pre_hook(Hook(self._note))
            for one in modules
            if not isinstance(one, scripted)
        ]

    def arm(self, *, armed: bool) -> None:
        """Let loads count from now on, or no more until the next step."""
        self._armed, self._before = armed, None if not armed else self._before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let loads inside not count: parameters are others there, and put back behind it."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed

    def _note(self) -> None:
        if self._armed and self._before is None:
            self._before = self._checksum()

    def changed(self) -> bool:
        """Return whether loads since the last call changed parameters. Does not communicate."""
        before, self._before = self._before, None
        return before is not None and before != self._checksum()

    def _checksum(self) -> float:
        return checksum(tensor for _, tensor in self._trained.local)

    def close(self) -> None:
        """Take the hooks off; idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
