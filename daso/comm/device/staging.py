"""What a rank that computes on a device needs of it, to meet others on the host."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from daso.comm.step_timer import Timestamp

__all__ = ["Arrived", "DeviceStaging"]

Arrived = Callable[[], bool]


class DeviceStaging(Protocol):
    """Copies between a device and its host, beside everything else. Nothing here blocks.

    What is launched on a device is carried out later; an `Arrived` tells when.
    """

    def out(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host, after what this thread launched so far.

        Args:
            source: On the device (numel); must not be changed before the copy has arrived.
            target: On the host (numel).
        """
        ...

    def back(self, source: torch.Tensor, target: torch.Tensor, *, in_turn: bool = False) -> Arrived:
        """Start a copy to the device.

        Args:
            source: On the host (numel); must not be changed before the copy has arrived.
            target: On the device (numel).
            in_turn: After what this thread launched so far, which may still read ``target``.
        """
        ...

    def beside(self) -> AbstractContextManager[None]:
        """Let what this thread launches meanwhile run beside what other threads launch."""
        ...

    def attach(self) -> None:
        """Let the calling thread be one of the device's from now on, for libraries that ask."""
        ...

    def here(self) -> object:
        """Return what the calling thread launches on."""
        ...

    def lend(self, tensors: Iterable[torch.Tensor], to: object) -> None:
        """Let others use tensors that were made `beside`.

        Their memory is not given away before what is launched there until then is over.
        """
        ...

    def mark(self) -> Arrived:
        """Return what tells when all that this thread launched so far, there, is over."""
        ...

    def stamp(self) -> Timestamp:
        """Launch a stamp of the time there; see `daso.comm.step_timer`."""
        ...

    def memory(self, nbytes: int) -> torch.Tensor:
        """Return host memory (nbytes, uint8) that copies need not stage once more."""
        ...

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Let copies to and from rows on the host go as fast as from `memory`."""
        ...

    def unpin(self) -> None:
        """Take back every `pin`, before the rows' memory is given back; idempotent."""
        ...
