"""Node transport for ranks on devices: gradients are copied to the host, averaged and copied back.

Every rank's gradients are on its device. A full bucket is copied to this rank's segment of the
node's shared memory; when all ranks' copies have arrived, it is averaged in place as on CPUs, and
copied back. No step blocks, so that copies, sums and backward of different buckets overlap (after
US 10949746 B2, IBM). Several ranks may share a device.
"""

from collections.abc import Sequence

import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.node.base import NodeBucket, NodeRow, NodeShare, Span
from daso.comm.node.shm import ShmNode, ShmShare
from daso.comm.reduction import accumulator
from daso.comm.step_timer import StepTimer, wait_until


class HostBucket:
    """A buffer of gradients on a device; see `daso.comm.node.base.NodeBucket`."""

    def __init__(self, node: "HostNode", flat: torch.Tensor, staged: NodeBucket) -> None:
        self.flat = flat
        self._node, self._staged = node, staged
        self._parts: Sequence[Span] = ()
        self._out: Arrived | None = None  # the copy to the host under way; None: finished
        self._back: Arrived | None = None
        self._sum = flat  # this rank's sum if it stays on the device
        self.device_ready: Arrived | None = None

    def mark_ready(
        self,
        parts: Sequence[Span],
        *,
        onward: bool = False,  # noqa: ARG002
        stay: bool = False,
    ) -> None:
        """Start this rank's copy to the host, unless its sum stays on the device."""
        self._parts, self._back, self._out, self.device_ready = parts, None, None, None
        if stay:
            self._sum = self._own.to(accumulator(self.flat.dtype))
            self.device_ready = self._node.copies.completion()
        else:
            self._out = self._node.copies.to_host(self.flat, self._staged.flat)

    @property
    def _own(self) -> torch.Tensor:
        """This rank's part."""
        return self.flat[slice(*self._parts[self._node.rank])]

    def filled(self) -> bool:
        """Return whether every rank's copy is on the host; announces this rank's own copy."""
        if self.device_ready is not None:
            return True
        if self._out is not None and self._out():
            self._staged.mark_ready(self._parts)
            self._out = None  # last: another thread may call `published` for this round
        return self._out is None and self._staged.filled()

    def wait_filled(self) -> None:
        """Block until every rank's copy is on the host."""
        self._node.wait(self.filled)

    def reduce(self) -> torch.Tensor | None:
        """Return the sum of this rank's part over the node, on the host unless it stays."""
        if self.device_ready is not None:
            return self._sum
        return self._staged.reduce() if self.filled() else None

    def publish(self, divisor: int) -> None:
        """Write the divided sum into every rank's buffer on the host, or keep it on the device."""
        if self.device_ready is not None:
            assert divisor == 1, "an exchanged sum is already a mean"
            if self._sum.dtype != self.flat.dtype:
                self._own.copy_(self._sum)
            self._sum = self.flat  # frees the fp32 sum of 16-bit gradients
            return
        self._staged.publish(divisor)

    def published(self) -> bool:
        """Return whether all parts are on the device; starts the copy once the host has them."""
        if self.device_ready is not None:
            return True
        if self._out is not None:
            return False
        if self._back is None and self._staged.published():
            self._back = self._node.copies.to_device(self._staged.flat, self.flat)
        return self._back is not None and self._back()

    def missing(self) -> str:
        """Name the ranks of the node whose copies are not on the host; empty if all are."""
        if self._out is not None:
            return "this rank's copy to the host did not finish"
        return self._staged.missing()

    def wait(self) -> None:
        """Block until all parts are on the device."""
        self._node.wait(self.published)


class HostRow:
    """Gradient memory on a device and on the host; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, node: "HostNode", flat: torch.Tensor, staged: NodeRow) -> None:
        self.flat = flat
        self._node, self._staged = node, staged

    def cut(self, spans: Sequence[Span]) -> list[HostBucket]:
        """Return one bucket for each span."""
        # .data: writing the mean must not change the gradients' version counters.
        return [
            HostBucket(self._node, self.flat[slice(*span)].data, bucket)
            for span, bucket in zip(spans, self._staged.cut(spans), strict=True)
        ]


class HostShare:
    """A `NodeShare` with all parts on every device of a node, copied through the host."""

    def __init__(self, node: "HostNode", parts: Sequence[torch.Tensor], staged: ShmShare) -> None:
        self.parts = list(parts)
        self.own = self.parts[node.rank] if node.rank < len(parts) else self.parts[0][:0]
        self._node, self._staged = node, staged
        self._out: Arrived | None = None  # the copy to the host under way

    def publish(self) -> None:
        """Start the copy of this rank's part to the host, after the kernels launched so far."""
        self._out = self._node.copies.to_host(self.own, self._staged.own)

    def wait(self) -> None:
        """Block until every part is on this rank's device."""
        node, staged = self._node, self._staged
        if self._out is not None:
            node.wait(self._out)
            self._out = None
            staged.publish()
        with node.watch.waiting(trace.WAIT_INTRA_NODE):
            staged.wait()
        others = [rank for rank in range(len(self.parts)) if rank != node.rank]
        # In order: a merge launched earlier may still read the memory that is written here.
        copies = [
            node.copies.to_device(staged.parts[rank], self.parts[rank], in_order=True)
            for rank in others
        ]
        for arrived in copies:
            node.wait(arrived)

    def release(self) -> None:
        """Mark all parts as read by this rank."""
        self._staged.release()

    def wait_released(self) -> None:
        """Block until all ranks have read."""
        with self._node.watch.waiting(trace.WAIT_INTRA_NODE):
            self._staged.wait_released()


class OwnShare:
    """A `NodeShare` of a node with one rank: its device holds the only part."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = list(parts)
        self.own = self.parts[0]

    def publish(self) -> None:
        """Do nothing: the node has no other reader."""

    def wait(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def wait_released(self) -> None:
        """Do nothing."""


class HostNode:
    """A node whose ranks average on the host; see `daso.comm.node.base.NodeTransport`.

    Args:
        host: The node's shared memory.
        device: This rank's device.
        copies: Copies between the device and the host.
    """

    def __init__(self, host: ShmNode, device: torch.device, copies: DeviceStaging) -> None:
        self.copies = copies
        self.name = f"sums on the host, from {device}"
        self.rank = host.rank
        self.watch = StepTimer(copies.timestamp)
        self._host, self._device = host, device
        self.reduces_on_device = len(host.world_ranks) == 1
        host.recorded_as = None  # the watch records these waits, with the device's idle time

    @property
    def waited_seconds(self) -> float:
        """Seconds the training thread waited for copies and for other ranks of the node."""
        return self._host.waited_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds of `waited_seconds` in which the device was idle."""
        return self.watch.idle_seconds(trace.WAIT_INTRA_NODE)

    def row(self, numel: int, dtype: torch.dtype, most: int) -> HostRow:
        """Allocate gradient memory."""
        flat = torch.zeros(numel, dtype=dtype, device=self._device)
        staged = self._host.row(numel, dtype, most)
        self.copies.pin([staged.flat])
        return HostRow(self, flat, staged)

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NodeShare:
        """Allocate a shared buffer; every device holds all of it."""
        sizes = [stop - start for start, stop in spans]
        parts = [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        if len(self._host.world_ranks) == 1:
            return OwnShare(parts)
        staged = self._host.share(spans, dtype)
        self.copies.pin(staged.parts)
        return HostShare(self, parts, staged)

    def wait(self, arrived: Arrived) -> None:
        """Block until ``arrived()`` returns True."""
        if arrived():
            return
        host = self._host
        with self.watch.waiting(trace.WAIT_INTRA_NODE):
            host.waited_seconds += wait_until(
                arrived,
                lambda: "a copy, or another rank of the node, is late",
                host.timeout_seconds,
                host.late,
            )

    def free(self) -> None:
        """Free the memory; tensors made from it must not be used afterwards."""
        self.copies.unpin()
        self._host.free()

    def abandon(self) -> None:
        """Do nothing: copies end by themselves."""
