"""Digests of the parameters that the wrapped optimizer does not train.

A teacher that follows its student, or weights into which adapters are merged, become different on
ranks. A digest of 1,024 numbers of each finds that, or of all numbers where torch counted a write.
"""

from collections.abc import Callable, Container

import torch

from daso.train.misuse import checksum
from daso.train.model.params import Named, Trained, writes_of
from daso.train.model.shards import is_sharded, local_part
from daso.train.model.shared import is_unfit

__all__ = ["FrozenParameters"]

SAMPLE = 1024  # numbers of each parameter that are always looked at


class FrozenParameters:
    """Digests of the parameters that are equal on all ranks unless a program changes them.

    Args:
        trained: The optimizer's parameters, and the module.
        elsewhere: Returns the ids of parameters that other wrapped optimizers train.
    """

    def __init__(self, trained: Trained, elsewhere: Callable[[], Container[int]]) -> None:
        self._trained, self._elsewhere = trained, elsewhere
        everything = (*self.named(), *self.shards())
        self._writes = {name: writes_of(tensor) for name, tensor in everything}

    def named(self) -> Named:
        """Return names and parameters that every rank has whole."""
        return [one for one in self._all() if not is_sharded(one[1])]

    def shards(self) -> Named:
        """Return names and this rank's parts of those that ranks of a node share."""
        return [(name, local_part(one)) for name, one in self._all() if is_sharded(one)]

    def _all(self) -> Named:
        module = self._trained.module
        others = [] if module is None else self._trained.others()
        elsewhere = self._elsewhere()
        return [
            (name, tensor)
            for name, tensor in others
            if isinstance(tensor, torch.nn.Parameter)
            and id(tensor) not in elsewhere
            and not is_unfit(tensor)
        ]

    def digests(self, named: Named) -> dict[str, str]:
        """Return a digest of each parameter by name."""
        found = {}
        for name, tensor in named:
            flat = tensor.detach().reshape(-1)
            whole = self._writes.get(name) != writes_of(tensor)
            part = flat if whole else flat[:: max(1, flat.numel() // SAMPLE)]
            found[name] = f"{checksum([part]):.0f}" + (" of all" if whole else "")
        return found

    def note_equal(self, names: Container[str]) -> None:
        """Note that all ranks hold the same values of these."""
        everything = (*self.named(), *self.shards())
        self._writes |= {name: writes_of(one) for name, one in everything if name in names}
