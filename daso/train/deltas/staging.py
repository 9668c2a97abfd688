"""Shards on a device: MPI reads their payloads there, or in pinned host memory."""

from collections.abc import Mapping, Sequence

import torch

from daso.comm.allreduce.ordered import DeviceContext
from daso.comm.device.staging import Arrived
from daso.comm.engine import Work
from daso.comm.reduction import SendBuffer, Spans
from daso.kernels.codecs import Codec
from daso.kernels.rows import FlatTensors
from daso.train.deltas.shard import Checks, DeltaShard, MergeOptions


def make_shard(
    published: torch.Tensor,
    options: MergeOptions,
    where: DeviceContext | None,
    rounded: Mapping[int, torch.Tensor],
) -> DeltaShard:
    """Return a shard whose payload MPI can read in place.

    Args:
        published: Memory that the whole node reads (numel), fp32 or fp64.
        options: Options of the merge.
        where: The device; None: the host.
        rounded: Rounding errors of means, on the device.
    """
    if where is None:
        return DeltaShard(published, options)
    return (PinnedShard if where.staged else DeviceShard)(published, options, where, rounded)


class DeviceShard(DeltaShard):
    """A shard in device memory, which MPI reads directly, on a stream of its exchanges.

    Only numbers that the host reads are copied to the host. Means are delivered by launches on a
    side stream; the exchange makes sure that no payload is sent before it is made.

    Args:
        published: Memory that the whole node reads (numel), fp32 or fp64.
        options: Options of the merge.
        where: The device.
        rounded: Rounding errors of means, on the device.
    """

    def __init__(
        self,
        published: torch.Tensor,
        options: MergeOptions,
        where: DeviceContext,
        rounded: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__(published, options)
        self._copies, self._rounded = where.copies, rounded
        self._on_host = self._copies.host_memory(0)  # checks of the last exchange
        self._training: object = None  # stream on which the training thread launches
        self._before: list[Arrived] = []  # launches that must be over before a payload is sent

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode the payload of an exchange; start a copy of its checks."""
        self._training = self._copies.current_stream()
        super().encode(codec, spans, values, keeps=keeps)
        self._on_host, arrived = self._out(self._checks)
        self._before = [arrived]

    def _out(self, row: torch.Tensor) -> tuple[torch.Tensor, Arrived]:
        """Start a copy to new host memory; return the memory, and a check of its arrival."""
        memory = self._copies.host_memory(row.nbytes).view(row.dtype)
        return memory, self._copies.to_host(row, memory)

    def seal(self) -> None:
        """Let no payload be sent before the launches until now are over."""
        self._before.append(self._copies.completion())

    def collect(self) -> Work[Checks]:
        """Return the checks of what is sent, once the payload is made."""
        self._copies.bind_thread()  # the engine's thread, which calls MPI
        yield from self._before
        return Checks(*self._on_host.tolist())

    def conclude(self) -> Work[tuple[float, float, float]]:
        """End the exchange."""
        copies = self._copies
        with copies.side_stream():
            measured = self.finish()
            # Some of them were made on this stream.
            copies.record_stream([*self.rows(), *self._rounded.values()], self._training)
            sums, arrived = self._out(measured)
        yield arrived
        return self.measured(sums.tolist())


class PinnedShard(DeviceShard):
    """A shard in device memory whose payloads are copied to pinned host memory.

    Only the engine's thread waits for the device, by polling: the training thread launches the
    encoding and then the copies of payloads and checks.
    """

    def __init__(
        self,
        published: torch.Tensor,
        options: MergeOptions,
        where: DeviceContext,
        rounded: Mapping[int, torch.Tensor],
    ) -> None:
        super().__init__(published, options, where, rounded)
        self._leaving = SendBuffer()  # on the host
        self._pinned = self._copies.host_memory(0)

    def encode(self, codec: Codec, spans: Spans, values: FlatTensors, *, keeps: bool) -> None:
        """Encode the payload of an exchange, and start copies of it to the host."""
        super().encode(codec, spans, values, keeps=keeps)
        sent = self.outbox.memory
        if self._pinned.numel() < sent.numel():
            self._pinned = self._copies.host_memory(sent.numel())
        self._leaving.open(codec, spans, self._pinned)
        self._before.append(self._copies.to_host(sent, self._leaving.memory))

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the payloads of spans, on the host."""
        return self._leaving.payloads(spans)
