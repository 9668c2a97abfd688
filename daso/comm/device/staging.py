"""Interface of the copies between a device and its host."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from daso.comm.step_timer import Timestamp

Arrived = Callable[[], bool]


class DeviceStaging(Protocol):
    """Copies between a device and its host that overlap with kernels. No method blocks.

    A device runs launched operations later; an `Arrived` returns whether they have finished.
    """

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Arrived:
        """Start a copy to the host, after the kernels that this thread launched so far.

        Args:
            source: On the device (numel); must not be changed before the copy has arrived.
            target: On the host (numel).
        """
        ...

    def to_device(
        self, source: torch.Tensor, target: torch.Tensor, *, in_order: bool = False
    ) -> Arrived:
        """Start a copy to the device.

        Args:
            source: On the host (numel); must not be changed before the copy has arrived.
            target: On the device (numel).
            in_order: After the kernels that this thread launched so far, which may still read
                ``target``.
        """
        ...

    def side_stream(self) -> AbstractContextManager[None]:
        """Launch this thread's kernels on a separate stream while the context is open."""
        ...

    def bind_thread(self) -> None:
        """Make the device the current one of the calling thread, for libraries that need it."""
        ...

    def current_stream(self) -> object:
        """Return the calling thread's stream."""
        ...

    def record_stream(self, tensors: Iterable[torch.Tensor], stream: object) -> None:
        """Let kernels of another stream use tensors that were made in `side_stream`.

        Their memory is not reused before these kernels have finished.
        """
        ...

    def completion(self) -> Arrived:
        """Return a function that tests whether this thread's earlier kernels have finished."""
        ...

    def timestamp(self) -> Timestamp:
        """Record a timestamp on this thread's stream; see `daso.comm.step_timer`."""
        ...

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory (nbytes, uint8)."""
        ...

    def pin(self, rows: Sequence[torch.Tensor]) -> None:
        """Pin host buffers, so that their copies are as fast as those of `host_memory`."""
        ...

    def unpin(self) -> None:
        """Unpin all host buffers, before their memory is freed; idempotent."""
        ...
