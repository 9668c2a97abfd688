"""Stage a shard's payload where MPI can read it: in place, or in pinned host memory.

All are a `daso.comm.reduction.ReduceBuffer` between `collect` and `conclude`.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from daso.comm.allreduce.ordered import OnDevice
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import Work
from daso.comm.reduction import ReduceBuffer, SendBuffer, Spans
from daso.kernels.codecs import Codec
from daso.kernels.rows import FlatTensors, Mean
from daso.train.deltas.shard import DeltaShard

__all__ = ["DeviceShard", "PinnedShard", "ShardTransport", "shard_transport"]


class ShardTransport(ReduceBuffer, Protocol):
    """A part on its way between nodes."""

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode what an exchange will carry; see `DeltaShard.encode`. Does not block."""
        ...

    def collect(self) -> Work[int | None]:
        """Return the first element that is not finite, if any, once what crosses is there."""
        ...

    def conclude(self) -> Work[tuple[float, float, float]]:
        """Move the part by what was delivered; return what `DeltaShard.measured` says of it."""
        ...


def shard_transport(
    part: DeltaShard, where: OnDevice | None, kept: Mapping[int, torch.Tensor]
) -> ShardTransport:
    """Return the way of a part between nodes."""
    if where is None:
        return part
    return (PinnedShard if where.staged else DeviceShard)(part, where.copies, kept)


class DeviceShard:
    """A part on a device, which MPI reads there and which is moved beside the training stream.

    Only what is read of an exchange comes to the host. Means are delivered by launches that run
    `DeviceStaging.beside` training; the exchange sees to it that nothing crosses before it is made.

    Args:
        part: On the device.
        copies: Between it and the host.
        kept: What else exchanges keep there.
    """

    def __init__(
        self, part: DeltaShard, copies: DeviceStaging, kept: Mapping[int, torch.Tensor]
    ) -> None:
        self.part, self.dtype, self._copies, self._kept = part, part.dtype, copies, kept
        self._checks = copies.memory(0)
        self._training: object = None  # what the training thread launches on
        self._before: list[Arrived] = []  # what must be over before anything crosses

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode what an exchange will carry; start a copy of what tells whether it is finite."""
        self._training = self._copies.here()
        self.part.encode(codec, spans, values, keeps=keeps)
        self._checks, arrived = self._out(self.part.checks)
        self._before = [arrived]

    def _out(self, row: torch.Tensor) -> tuple[torch.Tensor, Arrived]:
        """Start a copy to new memory on the host; return that, and what tells when it is there."""
        there = self._copies.memory(row.nbytes).view(row.dtype)
        return there, self._copies.out(row, there)

    def seal(self) -> None:
        """Let nothing cross before what was launched since is over."""
        self._before.append(self._copies.mark())

    def collect(self) -> Work[int | None]:
        """Return the first element that is not finite, if any, once what crosses is made."""
        self._copies.attach()  # the engine's thread, which calls MPI
        yield from self._before
        return self.part.first_nonfinite(self._checks.tolist())

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans."""
        return self.part.payloads(spans)

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:
        """Move the part by the mean delta of elements ``start`` to ``stop``."""
        self.part.deliver(start, stop, mean, sent)

    def conclude(self) -> Work[tuple[float, float, float]]:
        """End the exchange."""
        part, copies = self.part, self._copies
        with copies.beside():
            measured = part.finish()
            copies.lend([*part.rows(), *self._kept.values()], self._training)  # some were made here
            found, arrived = self._out(measured)
        yield arrived
        return part.measured(found.tolist())


class PinnedShard(DeviceShard):
    """A part on a device, of which what crosses is copied to pinned memory of the host.

    Nothing waits for the device but the engine's thread, and that by asking: payloads and checks
    are copied out when the training thread has launched what encodes them.
    """

    def __init__(
        self, part: DeltaShard, copies: DeviceStaging, kept: Mapping[int, torch.Tensor]
    ) -> None:
        super().__init__(part, copies, kept)
        self._outbox = SendBuffer()  # on the host
        self._payloads = copies.memory(0)

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode what an exchange will carry, and start copies of it to the host."""
        super().encode(codec, spans, values, keeps=keeps)
        sent = self.part.outbox.memory
        if self._payloads.numel() < sent.numel():
            self._payloads = self._copies.memory(sent.numel())
        self._outbox.open(codec, spans, self._payloads)
        self._before.append(self._copies.out(sent, self._outbox.memory))

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans, on the host."""
        return self._outbox.payloads(spans)
