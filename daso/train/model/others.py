"""Averages buffers and frozen parameters, which no wrapped optimizer trains, over all ranks.

A teacher that follows its student, or weights into which adapters are merged, diverge between
ranks. A digest of 1,024 numbers of each tensor detects that; after a counted write, of all numbers.
"""

import logging
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from daso.train.misuse import checksum
from daso.train.model.changes import writes_of
from daso.train.model.params import Named, Trained, common_tensors, is_unfit
from daso.train.model.shards import is_sharded, local_part
from daso.train.model.state_sync import repair_buffers

logger = logging.getLogger("daso")
SAMPLE = 1024  # numbers of each parameter that are always compared


@dataclass(frozen=True, slots=True)
class Ranks:
    """Collective operations for tensors that no optimizer trains: buffers, frozen parameters.

    Args:
        unlike: Returns every rank's value, or a single one if all are equal. Collective; blocking.
        average: Sets tensors to their means over all ranks. Collective; blocking.
        average_shards: Sets shards to their means over the replica group. Collective over the
            world; blocking.
        shards_differ: Returns whether a number differs within the replica group, on any lane.
            Collective over the world; blocking. None: no shards, or no other rank with the same.
        keeps_own: Returns whether a tensor, by name, stays local to each rank.
        warns: Whether this rank logs warnings.
    """

    unlike: Callable[[dict[str, str]], Sequence[dict[str, str]]]
    average: Callable[[list[torch.Tensor]], None]
    average_shards: Callable[[list[torch.Tensor]], None]
    shards_differ: Callable[[float], bool] | None
    keeps_own: Callable[[str], bool]
    warns: bool


class Others(NamedTuple):
    """Tensors whose values may differ between ranks."""

    buffers: list[torch.Tensor]
    frozen: list[torch.Tensor]
    shards: list[torch.Tensor]  # this rank's parts of frozen parameters


class FrozenParameters:
    """Digests of frozen parameters, which are equal on all ranks unless a program changes them.

    Args:
        trained: The optimizer's parameters, and the module.
        elsewhere: Returns the ids of parameters that other wrapped optimizers train.
    """

    def __init__(self, trained: Trained, elsewhere: Callable[[], Container[int]]) -> None:
        self._trained, self._elsewhere = trained, elsewhere
        everything = (*self.named(), *self.shards())
        self._writes = {name: writes_of(tensor) for name, tensor in everything}

    def named(self) -> Named:
        """Return the names and parameters that are not sharded."""
        return [(name, param) for name, param in self._all() if not is_sharded(param)]

    def shards(self) -> Named:
        """Return the names of sharded parameters, and this rank's shards."""
        return [(name, local_part(param)) for name, param in self._all() if is_sharded(param)]

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
        digests = {}
        for name, tensor in named:
            flat = tensor.detach().reshape(-1)
            whole = self._writes.get(name) != writes_of(tensor)
            part = flat if whole else flat[:: max(1, flat.numel() // SAMPLE)]
            digests[name] = f"{checksum([part]):.0f}" + (" of all" if whole else "")
        return digests

    def note_equal(self, names: Container[str]) -> None:
        """Record that these parameters are equal on all ranks."""
        everything = (*self.named(), *self.shards())
        self._writes |= {name: writes_of(param) for name, param in everything if name in names}


class OtherTensors:
    """Buffers and frozen parameters of a module.

    Args:
        trained: The optimizer's parameters, and the module.
        elsewhere: Returns the ids of parameters that other wrapped optimizers train.
        ranks: Collective operations.
    """

    def __init__(
        self, trained: Trained, elsewhere: Callable[[], Container[int]], ranks: Ranks
    ) -> None:
        self._trained, self._ranks = trained, ranks
        self._frozen = FrozenParameters(trained, elsewhere)
        self._warned: set[str] = set()  # names of tensors with a logged warning

    def equalize(self) -> None:
        """Set buffers and frozen parameters to their means over all ranks.

        Collective over the world; blocking.
        """
        self.average(self.apart())
        self._frozen.note_equal([name for name, _ in self._frozen.named()])
        self._frozen.note_equal([name for name, _ in self._frozen.shards()])

    def apart(self) -> Others:
        """Return tensors whose values may differ between ranks. Collective; blocking."""
        return Others(self._buffers(), self._frozen_apart(), self._shards_apart())

    def average(self, others: Others) -> None:
        """Set tensors to their means; repair buffers that are infinite on some ranks only.

        Collective over the world; blocking.
        """
        masks = checksum(
            buffer.isfinite() for buffer in others.buffers if buffer.is_floating_point()
        )
        if len(self._ranks.unlike({"masks": f"{masks:.0f}"})) > 1:  # masks of -inf are alike
            repair_buffers(others.buffers, self._ranks.average)
        self._ranks.average([*others.buffers, *others.frozen])
        if others.shards:
            self._ranks.average_shards(others.shards)

    def mend(self) -> None:
        """Replace non-finite values of buffers by the mean of the ranks with finite values.

        Collective over the world; blocking.
        """
        repair_buffers(self._buffers(), self._ranks.average)

    def _buffers(self) -> list[torch.Tensor]:
        named = [
            (name, buffer)
            for name, buffer in self._trained.buffers()
            if not is_sharded(buffer) and not self._ranks.keeps_own(name)
        ]
        return common_tensors(named, self._ranks.unlike, self._warned, warns=self._ranks.warns)

    def _shards_apart(self) -> list[torch.Tensor]:
        """Return this rank's shards of frozen parameters, or none if all nodes agree."""
        keeps_own, differ = self._ranks.keeps_own, self._ranks.shards_differ
        named = [(name, shard) for name, shard in self._frozen.shards() if not keeps_own(name)]
        if differ is None or not named:
            return []
        digest = zlib.crc32(repr(self._frozen.digests(named)).encode())
        return [tensor for _, tensor in named] if differ(float(digest)) else []

    def _frozen_apart(self) -> list[torch.Tensor]:
        digests = {
            name: digest
            for name, digest in self._frozen.digests(self._frozen.named()).items()
            if not self._ranks.keeps_own(name)
        }
        everyones = self._ranks.unlike(digests)
        apart = {
            name
            for name in digests
            if len({digests_of_rank.get(name) for digests_of_rank in everyones}) > 1
        }
        self._frozen.note_equal(digests.keys() - apart)
        named = [(name, tensor) for name, tensor in self._frozen.named() if name in apart]
        self._warn_of_untrained(named)
        return common_tensors(named, self._ranks.unlike, self._warned, warns=self._ranks.warns)

    def _warn_of_untrained(self, named: Named) -> None:
        """Warn once about parameters that differ and that no wrapped optimizer trains."""
        names = [name for name, param in named if param.requires_grad and name not in self._warned]
        self._warned.update(names)
        if names and self._ranks.warns:
            logger.warning(
                "parameters that require gradients must be trained by an optimizer that daso "
                "wraps, but %s is not and differed between ranks%s; all ranks have the mean now: "
                "wrap its optimizer too, or freeze it",
                names[0],
                f" (and {len(names) - 1} more)" if len(names) > 1 else "",
            )
