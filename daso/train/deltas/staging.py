"""Where what crosses between nodes lies: with the part itself, or, of a part on a device, the host.

All are a `daso.comm.reduction.ReduceBuffer` between `collect` and `finish`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from daso.comm.allreduce.ordered import OnDevice
from daso.comm.compression import Codec, Fields
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import Work
from daso.comm.reduction import ReduceBuffer, SendBuffer, Spans
from daso.train.deltas.shard import DeltaShard, Gather

__all__ = ["DeviceShard", "HostShard", "PinnedShard", "ShardTransport", "shard_transport"]


class ShardTransport(ReduceBuffer, Protocol):
    """A part on its way between nodes."""

    def encode(self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool) -> None:
        """Encode what an exchange will carry; see `DeltaShard.encode`. Does not block."""
        ...

    def seal(self) -> None:
        """Say that the part is left alone until the exchange is merged. Does not block."""
        ...

    def collect(self) -> Work[int | None]:
        """Return the first element that is not finite, if any, once what crosses is there."""
        ...

    def finish(self) -> Work[tuple[float, float, float]]:
        """Move the part by what was delivered; return what `DeltaShard.measured` says of it."""
        ...


def shard_transport(
    part: DeltaShard, where: OnDevice | None, kept: Mapping[int, torch.Tensor]
) -> ShardTransport:
    """Return the way of a part between nodes."""
    if where is None:
        return HostShard(part)
    return (PinnedShard if where.staged else DeviceShard)(part, where.copies, kept)


class HostShard:
    """A part on the CPU, which is encoded and moved where it lies."""

    def __init__(self, part: DeltaShard) -> None:
        self.part, self.dtype = part, part.dtype
        self.payloads, self.deliver = part.payloads, part.deliver
        self.progress = part.progress
        self._nonfinite: int | None = None

    def encode(self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool) -> None:
        """Encode what an exchange will carry."""
        self.part.encode(codec, spans, gather, keeps=keeps)
        self._nonfinite = self.part.first_nonfinite(self.part.checks().tolist())

    def begin(
        self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool
    ) -> Callable[[], None]:
        """Return what encodes it while it crosses; see `DeltaShard.begin`."""
        self._nonfinite = None
        return self.part.begin(codec, spans, gather, keeps=keeps)

    def seal(self) -> None:
        """Do nothing: what was called is over."""

    def collect(self) -> Work[int | None]:
        """Return the first element that is not finite, if any."""
        yield from ()
        return self._nonfinite

    def finish(self) -> Work[tuple[float, float, float]]:
        """End the exchange."""
        yield from ()
        return self.part.measured(self.part.finish().tolist())


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

    def encode(self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool) -> None:
        """Encode what an exchange will carry; start a copy of what tells whether it is finite."""
        self._training = self._copies.here()
        self.part.encode(codec, spans, gather, keeps=keeps)
        self._checks, arrived = self._out(self.part.checks())
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

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans."""
        return self.part.payloads(codec, spans)

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:
        """Move the part by the mean delta of elements ``start`` to ``stop``."""
        self.part.deliver(start, stop, mean, sent)

    def finish(self) -> Work[tuple[float, float, float]]:
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

    def encode(self, codec: Codec, spans: Spans, gather: Gather, *, keeps: bool) -> None:
        """Encode what an exchange will carry, and start copies of it to the host."""
        super().encode(codec, spans, gather, keeps=keeps)
        sent = self.part.outbox.memory
        if self._payloads.numel() < sent.numel():
            self._payloads = self._copies.memory(sent.numel())
        self._outbox.open(codec, spans, self._payloads)
        self._before.append(self._copies.out(sent, self._outbox.memory))

    def outgoing(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return what was encoded of spans, on the host."""
        return self._outbox.payloads(spans)
