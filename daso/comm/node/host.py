"""Ranks that compute on devices average on the host: rows go there, are added, and come back.

Every rank's row lies on its device. A bucket that is full is copied to the part of the node's
shared memory that is this rank's; when all ranks' copies are there, it is averaged in place as on
CPUs, and copied back. No step blocks, so that copies, sums and backward of different buckets
overlap (after US 10949746 B2, IBM). Several ranks may share a device.
"""

from collections.abc import Sequence

import torch

from daso import trace
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.dtypes import accumulator
from daso.comm.node.base import NodeBucket, NodeRow, NodeShare, Span, wait_until
from daso.comm.node.shm import ShmNode, ShmShare
from daso.comm.step_timer import StepTimer

__all__ = ["HostBucket", "HostNode", "HostRow", "HostShare"]


class HostBucket:
    """A row of gradients on a device; see `daso.comm.node.base.NodeBucket`."""

    def __init__(self, node: "HostNode", flat: torch.Tensor, staged: NodeBucket) -> None:
        self.flat = flat
        self._node, self._staged = node, staged
        self._parts: Sequence[Span] = ()
        self._out: Arrived | None = None  # on its way to the host; None: it is there
        self._back: Arrived | None = None
        self._sum = flat  # where that is left on the device
        self.left: Arrived | None = None

    def start(self, parts: Sequence[Span], *, onward: bool = False, stay: bool = False) -> None:  # noqa: ARG002
        """Start this rank's copy to the host, unless its row stays."""
        self._parts, self._back, self._out, self.left = parts, None, None, None
        if stay:
            self._sum = self._own.to(accumulator(self.flat.dtype))
            self.left = self._node.copies.mark()
        else:
            self._out = self._node.copies.out(self.flat, self._staged.flat)

    @property
    def _own(self) -> torch.Tensor:
        """The part that this rank adds."""
        return self.flat[slice(*self._parts[self._node.rank])]

    def filled(self) -> bool:
        """Return whether every rank's copy is on the host; tells the others of this one's."""
        if self.left is not None:
            return True
        if self._out is not None and self._out():
            self._staged.start(self._parts)
            self._out = None  # last: another thread may ask whether this round was delivered
        return self._out is None and self._staged.filled()

    def wait_filled(self) -> None:
        """Block until every rank's copy is on the host."""
        self._node.wait(self.filled)

    def add(self) -> torch.Tensor | None:
        """Return the sum of this rank's part of all rows, on the host unless it was left."""
        if self.left is not None:
            return self._sum
        return self._staged.add() if self.filled() else None

    def deliver(self, divisor: int) -> None:
        """Write the part, divided, into every row on the host, or into the only one."""
        if self.left is not None:
            assert divisor == 1, "what goes onward comes back a mean"
            if self._sum.dtype != self.flat.dtype:
                self._own.copy_(self._sum)
            self._sum = self.flat  # of 16-bit gradients it was memory of its own
            return
        self._staged.deliver(divisor)

    def delivered(self) -> bool:
        """Return whether all parts are on the device; starts the copy when the host has them."""
        if self.left is not None:
            return True
        if self._out is not None:
            return False
        if self._back is None and self._staged.delivered():
            self._back = self._node.copies.back(self._staged.flat, self.flat)
        return self._back is not None and self._back()

    def missing(self) -> str:
        """Say which ranks of the node have no copy on the host; empty where all have."""
        if self._out is not None:
            return "a copy of this rank did not come to the host"
        return self._staged.missing()

    def wait(self) -> None:
        """Block until all parts are on the device."""
        self._node.wait(self.delivered)


class HostRow:
    """Memory for gradients on a device and on the host; see `daso.comm.node.base.NodeRow`."""

    def __init__(self, node: "HostNode", flat: torch.Tensor, staged: NodeRow) -> None:
        self.flat = flat
        self._node, self._staged = node, staged

    def cut(self, spans: Sequence[Span]) -> list[HostBucket]:
        """Return one bucket for each span of the row."""
        # .data: what comes back shall not look as if somebody had changed a gradient.
        return [
            HostBucket(self._node, self.flat[slice(*span)].data, bucket)
            for span, bucket in zip(spans, self._staged.cut(spans), strict=True)
        ]


class HostShare:
    """A `NodeShare` whose parts lie on the devices of a node, and cross over the host."""

    def __init__(self, node: "HostNode", parts: Sequence[torch.Tensor], staged: ShmShare) -> None:
        self.parts = list(parts)
        self.mine = self.parts[node.rank] if node.rank < len(parts) else self.parts[0][:0]
        self._node, self._staged = node, staged
        self._out: Arrived | None = None  # on its way to the host

    def publish(self) -> None:
        """Say that ``mine`` is written, or will be by what is launched: starts its copy."""
        self._out = self._node.copies.out(self.mine, self._staged.mine)

    def wait(self) -> None:
        """Block until every part is here."""
        node, staged = self._node, self._staged
        if self._out is not None:
            node.wait(self._out)
            self._out = None
            staged.publish()
        with node.watch.waiting(trace.WAIT_INTRA_NODE):
            staged.wait()
        others = [at for at in range(len(self.parts)) if at != node.rank]
        # In turn: an earlier merge that was launched may still read what is written here.
        coming = [node.copies.back(staged.parts[at], self.parts[at], in_turn=True) for at in others]
        for arrived in coming:
            node.wait(arrived)

    def release(self) -> None:
        """Say that this rank has read all parts."""
        self._staged.release()

    def wait_released(self) -> None:
        """Block until all ranks have read."""
        with self._node.watch.waiting(trace.WAIT_INTRA_NODE):
            self._staged.wait_released()


class OwnShare:
    """A `NodeShare` of the whole row, on the device of the only rank of a node."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = list(parts)
        self.mine = self.parts[0]

    def publish(self) -> None:
        """Do nothing: nobody else reads."""

    def wait(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""

    def wait_released(self) -> None:
        """Do nothing."""


class HostNode:
    """The ranks of a node that compute on devices; see `daso.comm.node.base.NodeTransport`.

    Args:
        host: Their shared memory.
        device: Where this rank computes.
        copies: How rows go to the host and back.
    """

    def __init__(self, host: ShmNode, device: torch.device, copies: DeviceStaging) -> None:
        self.copies = copies
        self.name = f"sums on the host, from {device}"
        self.rank = host.rank
        self.watch = StepTimer(copies.stamp)
        self._host, self._device = host, device
        self.sums_stay = len(host.world_ranks) == 1
        host.recorded_as = None  # the watch records how long the device stands still

    @property
    def waited_seconds(self) -> float:
        """Seconds the training thread waited for copies, and for others of the node."""
        return self._host.waited_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds of these in which the device had nothing to do."""
        return self.watch.idle_seconds(trace.WAIT_INTRA_NODE)

    def row(self, numel: int, dtype: torch.dtype, most: int) -> HostRow:
        """Make a row for gradients."""
        flat = torch.zeros(numel, dtype=dtype, device=self._device)
        staged = self._host.row(numel, dtype, most)
        self.copies.pin([staged.flat])
        return HostRow(self, flat, staged)

    def share(self, spans: Sequence[Span], dtype: torch.dtype) -> NodeShare:
        """Make a shared row; every device holds all of it."""
        sizes = [stop - start for start, stop in spans]
        parts = [torch.zeros(size, dtype=dtype, device=self._device) for size in sizes]
        if len(self._host.world_ranks) == 1:
            return OwnShare(parts)
        staged = self._host.share(spans, dtype)
        self.copies.pin(staged.parts)
        return HostShare(self, parts, staged)

    def wait(self, arrived: Arrived) -> None:
        """Block until something has arrived here."""
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
        """Give the memory back; tensors made from it must not be used afterwards."""
        self.copies.unpin()
        self._host.free()

    def abandon(self) -> None:
        """Do nothing: copies end by themselves."""
