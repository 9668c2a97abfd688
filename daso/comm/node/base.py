"""Interfaces of the transports that average gradients and share parameters inside a node.

`NodeBucket` averages gradients, `NodeShare` shares one part per rank with the whole node. Their
methods do not block unless their names start with ``wait``: backward continues between them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from daso.comm.device.staging import Arrived, DeviceStaging

Span = tuple[int, int]


class NodeBucket(Protocol):
    """A flat buffer of gradients that the node averages in place."""

    flat: torch.Tensor  # this rank's buffer (numel)
    device_ready: Arrived | None  # of a sum kept on the device: returns whether it is ready

    def mark_ready(
        self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False
    ) -> None:
        """Mark this rank's buffer as filled; local rank i will reduce part i. Does not block.

        Args:
            parts: One span per local rank.
            onward: The sum of this rank's part is exchanged between nodes before it is published.
            stay: Keep that sum on the device instead of copying it to the host.
        """
        ...

    def wait_filled(self) -> None:
        """Block until every rank of the node has started. Collective over the node."""
        ...

    def reduce(self) -> torch.Tensor | None:
        """Return the sum of this rank's part over the node, or None before all ranks have started.

        Parts are added in rank order. Does not block.
        """
        ...

    def publish(self, divisor: int) -> None:
        """Divide the sum from `reduce` and send it to the whole node. Does not block.

        All ranks of a node must start buckets in one order, and publish them in one order.
        """
        ...

    def filled(self) -> bool:
        """Return whether every rank of the node has started. Does not block."""
        ...

    def published(self) -> bool:
        """Return whether ``flat`` holds all published parts. Does not block."""
        ...

    def missing(self) -> str:
        """Name the ranks of the node that have not started; an empty string if all have."""
        ...

    def wait(self) -> None:
        """Block until ``flat`` holds all published parts. Collective over the node."""
        ...


class NodeRow(Protocol):
    """Gradient memory that is divided into buckets."""

    flat: torch.Tensor  # this rank's memory (numel)

    def cut(self, spans: Sequence[Span]) -> Sequence[NodeBucket]:
        """Return one bucket for each span; buckets of an earlier call are invalid.

        Does not communicate, but all ranks of the node must pass the same spans, between rounds.
        """
        ...


class NodeShare(Protocol):
    """A flat buffer shared by a node: local rank i writes part i, every rank reads all parts."""

    own: torch.Tensor  # this rank's part; empty if it has none
    parts: list[torch.Tensor]  # every part in order; valid from `wait` to `release`

    def publish(self) -> None:
        """Mark this rank's part as written. Does not block."""
        ...

    def wait(self) -> None:
        """Block until every part is published. Collective over the node."""
        ...

    def release(self) -> None:
        """Mark all parts as read by this rank. Does not block."""
        ...

    def wait_released(self) -> None:
        """Block until all ranks have read, so that ``own`` may be written again."""
        ...


class NodeTransport(Protocol):
    """The ranks of one node and the memory that they share."""

    name: str  # for reports
    reduces_on_device: bool  # sums are made, and may stay, on the device

    @property
    def copies(self) -> DeviceStaging | None:
        """Device/host staging of payloads between nodes; None on CPUs."""
        ...

    def row(self, numel: int, dtype: torch.dtype, most: int) -> NodeRow:
        """Allocate memory for up to ``most`` buckets. Collective over the node; blocking."""
        ...

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NodeShare:
        """Allocate a buffer shared in ``spans``. Collective over the node; blocking."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Seconds the training thread waited for copies and for other ranks of the node."""
        ...

    @property
    def idle_seconds(self) -> float:
        """Seconds of `waited_seconds` in which this rank's device, or CPU, was idle."""
        ...

    def free(self) -> None:
        """Free the memory. Collective over the node; blocking; idempotent."""
        ...

    def abandon(self) -> None:
        """Cancel pending operations that may wait for lost ranks; for the end of the process."""
        ...
