"""Averages buffers and frozen parameters, which no wrapped optimizer trains, over all ranks."""

import logging
import zlib
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from daso.train.misuse import checksum
from daso.train.model.frozen import FrozenParameters
from daso.train.model.params import Named, Trained
from daso.train.model.shards import is_sharded
from daso.train.model.shared import common_tensors
from daso.train.state_sync import mend_buffers

__all__ = ["OtherTensors", "Ranks"]

logger = logging.getLogger("daso")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Collective operations that `OtherTensors` needs.

    Args:
        unlike: Returns every rank's value, or one alone where all are alike. Collective; blocking.
        average: Sets tensors to their means over all ranks. Collective; blocking.
        average_shards: Sets them to their means over the ranks that hold the same parts. Collective
            over the world; blocking.
        shards_differ: Returns whether these ranks have other numbers, on any lane. Collective over
            the world; blocking. None: nothing is sharded, or no other rank holds the same.
        keeps_own: Tells which tensors, by name, stay each rank's own.
        says: This rank warns.
    """

    unlike: Callable[[dict[str, str]], Sequence[dict[str, str]]]
    average: Callable[[list[torch.Tensor]], None]
    average_shards: Callable[[list[torch.Tensor]], None]
    shards_differ: Callable[[float], bool] | None
    keeps_own: Callable[[str], bool]
    says: bool


class Others(NamedTuple):
    """Tensors whose values may differ between ranks."""

    buffers: list[torch.Tensor]
    frozen: list[torch.Tensor]
    shards: list[torch.Tensor]  # this rank's parts of frozen parameters


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
        self._told: set[str] = set()  # names of tensors that a warning was about

    def equalize(self) -> None:
        """Make buffers and frozen parameters equal: means over all ranks.

        Collective over the world; blocking.
        """
        self.average(self.apart())
        self._frozen.note_equal([name for name, _ in self._frozen.named()])
        self._frozen.note_equal([name for name, _ in self._frozen.shards()])

    def apart(self) -> Others:
        """Return tensors whose values may differ between ranks. Collective; blocking."""
        return Others(self._buffers(), self._frozen_apart(), self._shards_apart())

    def average(self, others: Others) -> None:
        """Set tensors to their means, without infinite values of observers on some ranks.

        Collective over the world; blocking.
        """
        masks = checksum(one.isfinite() for one in others.buffers if one.is_floating_point())
        if len(self._ranks.unlike({"masks": f"{masks:.0f}"})) > 1:  # masks of -inf are alike
            mend_buffers(others.buffers, self._ranks.average)
        self._ranks.average([*others.buffers, *others.frozen])
        if others.shards:
            self._ranks.average_shards(others.shards)

    def mend(self) -> None:
        """Give buffers that are not finite here the mean of the ranks where they are.

        Collective over the world; blocking.
        """
        mend_buffers(self._buffers(), self._ranks.average)

    def _buffers(self) -> list[torch.Tensor]:
        named = [
            (name, one)
            for name, one in self._trained.buffers()
            if not is_sharded(one) and not self._ranks.keeps_own(name)
        ]
        return common_tensors(named, self._ranks.unlike, self._told, says=self._ranks.says)

    def _shards_apart(self) -> list[torch.Tensor]:
        """Return this rank's shards of frozen parameters, or none if all nodes agree."""
        keeps_own, differ = self._ranks.keeps_own, self._ranks.shards_differ
        named = [one for one in self._frozen.shards() if not keeps_own(one[0])]
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
        apart = {name for name in digests if len({one.get(name) for one in everyones}) > 1}
        self._frozen.note_equal(digests.keys() - apart)
        named = [(name, tensor) for name, tensor in self._frozen.named() if name in apart]
        self._tell_of_untrained(named)
        return common_tensors(named, self._ranks.unlike, self._told, says=self._ranks.says)

    def _tell_of_untrained(self, named: Named) -> None:
        """Warn once of parameters that differ and that no wrapped optimizer trains."""
        names = [name for name, one in named if one.requires_grad and name not in self._told]
        self._told.update(names)
        if names and self._ranks.says:
            logger.warning(
                "parameters that require gradients must be trained by an optimizer that daso "
                "wraps, but %s is not and differed between ranks%s; all ranks have the mean now: "
                "wrap its optimizer too, or freeze it",
                names[0],
                f" (and {len(names) - 1} more)" if len(names) > 1 else "",
            )
