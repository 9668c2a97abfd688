"""Compressed gradient averaging between nodes, with error feedback.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019, arXiv 1901.09847 (error feedback).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from daso.comm.allreduce.direct import DeterministicAllReduce
from daso.comm.allreduce.ordered import DeviceContext
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import Work
from daso.comm.reduction import CPU, Chunks, ReduceBuffer, SendBuffer, Spans
from daso.kernels.choice import Kernels, kernels_for
from daso.kernels.codecs import Codec, codec_named, exact_codec
from daso.kernels.rows import EncodeRows, FlatTensors, Mean
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.layout import Span
from daso.train.deltas.shard import message_numel

Ordered = Callable[
    [Codec, dict[int, torch.Tensor], DeviceContext | None, AllReducePlan], DeterministicAllReduce
]
Key = tuple[torch.dtype, int]  # of the gradients in a row, and where a part of it starts


@dataclass(frozen=True, slots=True)
class Averaged:
    """Cost of the mean of a part of the gradients."""

    nbytes: int  # sent by this rank
    made_seconds: float = 0.0  # of the engine's, until a device had made the payload


class CompressedSum(ReduceBuffer):
    """Sum of a part of the gradients over a node, which an all-reduce replaces by the mean.

    Args:
        total: The sum (numel), fp32 or fp64.
        start: Its start in its row.
        residual: Rounding error of earlier rounds (numel), on the same device; changed. None: the
            payload is exact.
        flags: Offsets of the flags, which are sent exactly (flags,), int64, on the same device.
        outbox: Memory of the payload, owned by the caller; None: new memory on the host.
        kernels: Kernels of the device; None: chosen by the device.
    """

    def __init__(
        self,
        total: torch.Tensor,
        start: int,
        residual: torch.Tensor | None,
        flags: torch.Tensor,
        outbox: SendBuffer | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.total, self.start, self.dtype = total, start, total.dtype
        self._residual, self._flags = residual, flags
        self._kernels = kernels or kernels_for(total.device)
        self.exact = total[flags]
        self._outbox = outbox or SendBuffer()
        self._leaving = self._outbox  # on the host

    def encode(self, codec: Codec, spans: Spans) -> None:
        """Encode the payload, and keep its rounding error as the residual."""
        if self._residual is None:  # each piece is read before its mean is written
            self._outbox.open(codec, spans, self.total.view(torch.uint8))
            return
        # Flags are so large that gradients of the same block would round to zero.
        self.total.index_fill_(0, self._flags, 0)
        self._outbox.open(codec, spans)
        self._kernels.encode(
            codec,
            FlatTensors([self.total]),
            [(start - self.start, stop - self.start) for start, stop in spans],
            self._outbox.memory,
            EncodeRows(residual=self._residual, gradients=True),
        )

    def leave(self, copies: DeviceStaging, memory: torch.Tensor | None) -> Work[None]:
        """Copy the payload to the host, and wait for the copies."""
        exact = copies.host_memory(self.exact.nbytes).view(self.dtype)
        with copies.side_stream():
            arrived = [copies.to_host(self.exact, exact), copies.completion()]
            if memory is not None:
                encoded, self._leaving = self._outbox, SendBuffer()
                self._leaving.open(encoded.codec, [span for span, _ in encoded.items()], memory)
                arrived.append(copies.to_host(encoded.memory, self._leaving.memory))
        yield from arrived
        self.exact = exact

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return self._outbox.memory.numel()

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the encoded payloads of spans."""
        return self._outbox.payloads(spans)

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the encoded payloads of spans, on the host."""
        return self._leaving.payloads(spans)

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:  # noqa: ARG002
        """Write the mean in place."""
        row = self.total[start - self.start : stop - self.start]
        self._kernels.reduce(mean, stop - start, row=row)

    def deliver_exact(self, means: torch.Tensor) -> None:
        """Write the means of the numbers that are sent as they are."""
        exact = means.to(self.total.device, non_blocking=True)
        self.total.index_copy_(0, self._flags, exact)


def _deliver(sources: Sequence[CompressedSum], means: Sequence[torch.Tensor]) -> None:
    """Write the means of flags where they belong."""
    for source, mean in zip(sources, means, strict=True):
        source.deliver_exact(mean)


@lru_cache(maxsize=4096)  # asked of every bucket at every step
def compressed_chunks(
    codec: Codec, chunk_bytes: int, start: int, numel: int, plan: AllReducePlan, *, least: int = 1
) -> Chunks:
    """Return the chunks of a part of a row, each a message."""
    chunks = plan.chunks(numel, message_numel(codec, chunk_bytes, least))
    return tuple(tuple(Span(a + start, b + start) for a, b in parts) for parts in chunks)


class GradientCompressor:
    """Averages gradients between nodes, on a narrow wire with error feedback or as they are.

    Args:
        wire: "bf16", "int8" or "int4".
        plan: Returns the all-reduce plan for a number of bytes on the wire.
        chunk_bytes: Bytes of a message.
        ordered: Makes an all-reduce from a codec, the rounding errors of means, the device of
            sums, and a plan.
        mean: Replaces a small sum over a node by the mean over the world, exactly; work for the
            engine.
        least: Minimum numbers of a message; the same on all nodes, also if sums are copied to the
            host.
        where: Device that holds the sums; None: the host does.
    """

    def __init__(
        self,
        wire: str,
        *,
        plan: Callable[[int], AllReducePlan],
        chunk_bytes: int,
        ordered: Ordered,
        mean: Callable[[torch.Tensor], Work[int]],
        least: int,
        where: DeviceContext | None,
    ) -> None:
        self.wire, self._plan, self._chunk_bytes = wire, plan, chunk_bytes
        self._ordered, self._mean = ordered, mean
        self._least, self._where = least, where
        self._device = CPU if where is None else where.device
        self._kernels = kernels_for(self._device)
        self._outbox = SendBuffer(self._device)
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")  # for payloads of a device
        self._no_flags = torch.empty(0, dtype=torch.int64, device=self._device)
        self._places: dict[Key, torch.Tensor] = {}
        self._residuals: dict[Key, torch.Tensor] = {}
        self._rounded: dict[torch.dtype, dict[int, torch.Tensor]] = {}  # by owners of parts
        self._means: dict[tuple[torch.dtype, bool, AllReducePlan], DeterministicAllReduce] = {}
        self._flagged: list[CompressedSum] = []  # sums whose flags are not averaged yet

    def mean(
        self,
        total: torch.Tensor,
        key: Key,
        flags: Sequence[int],
        ready: Arrived | None = None,
        *,
        exact: bool = False,
    ) -> Work[Averaged]:
        """Replace sums over nodes by the mean over the world, but for flags: see `mean_of_flags`.

        Collective over the lane; non-blocking, as work for the engine.
        """
        if ready is None:
            assert self._where is None, "sums are left on the device"
            source, means, chunks = self._encode(total, key, flags, exact=exact)
            nbytes = yield from means.run(source, chunks)
            self._keep_flags(source)
            return Averaged(nbytes)
        begun = time.perf_counter()
        assert self._where is not None, "sums are left on a device"
        copies = self._where.copies
        copies.bind_thread()
        yield ready
        with copies.side_stream():
            source, means, chunks = self._encode(total, key, flags, exact=exact)
        if self._where.staged and self._room.numel() < source.nbytes:
            self._room = copies.host_memory(source.nbytes)
        yield from source.leave(copies, self._room if self._where.staged else None)
        made_seconds = time.perf_counter() - begun
        nbytes = yield from means.run(source, chunks)
        with copies.side_stream():
            over = copies.completion()
        yield over
        self._keep_flags(source)
        return Averaged(nbytes, made_seconds)

    def mean_of_flags(self) -> Work[Averaged]:
        """Replace the flags of all sums since the last call by their means, in full precision.

        Collective over the lane; non-blocking, as work for the engine, behind these sums.
        """
        sources, self._flagged = self._flagged, []
        nbytes = 0
        for dtype in dict.fromkeys(source.dtype for source in sources):
            members = [source for source in sources if source.dtype == dtype]
            nbytes += yield from self._mean_of_type(members)
        return Averaged(nbytes)

    def _mean_of_type(self, sources: Sequence[CompressedSum]) -> Work[int]:
        """Replace the flags of sums of one type by their means; return the bytes sent."""
        flags = torch.cat([source.exact for source in sources])
        nbytes = yield from self._mean(flags)
        means = flags.split([source.exact.numel() for source in sources])
        if self._where is None:
            _deliver(sources, means)
            return nbytes
        copies = self._where.copies
        with copies.side_stream():
            _deliver(sources, means)
            over = copies.completion()
        yield over
        return nbytes

    def _keep_flags(self, source: CompressedSum) -> None:
        """Keep a sum whose flags are not averaged yet."""
        if source.exact.numel():
            self._flagged.append(source)

    def _encode(
        self, total: torch.Tensor, key: Key, flags: Sequence[int], *, exact: bool
    ) -> tuple[CompressedSum, DeterministicAllReduce, Chunks]:
        """Encode a sum; return it with its all-reduce and its chunks."""
        codec = self._codec(total.dtype, exact=exact)
        plan = self._plan(codec.nbytes(total.numel()))
        means = self._exchange(codec, key[0], plan, exact=exact)
        places = self._no_flags if exact else self._flags(key, flags)
        if not exact and key not in self._residuals:
            self._residuals[key] = torch.zeros_like(total)
        residual = None if exact else self._residuals[key]
        # One after the other: the engine ends a mean before it begins the next.
        source = CompressedSum(total, key[1], residual, places, self._outbox, self._kernels)
        chunks = compressed_chunks(
            codec, self._chunk_bytes, key[1], total.numel(), plan, least=self._least
        )
        source.encode(codec, [span for parts in chunks for span in parts])
        return source, means, chunks

    def _flags(self, key: Key, flags: Sequence[int]) -> torch.Tensor:
        """Return the offsets of flags, on the device of the sums."""
        if key not in self._places or self._places[key].numel() != len(flags):
            places = torch.tensor(
                flags, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda"
            )
            self._places[key] = places.to(self._device, non_blocking=True)
        return self._places[key]

    def _codec(self, dtype: torch.dtype, *, exact: bool) -> Codec:
        return exact_codec(dtype) if exact else codec_named(self.wire, dtype)

    def _exchange(
        self, codec: Codec, row: torch.dtype, plan: AllReducePlan, *, exact: bool
    ) -> DeterministicAllReduce:
        """Return the all-reduce for the parts of a row."""
        key = row, exact, plan
        if key not in self._means:
            rounded = {} if exact else self._rounded.setdefault(row, {})
            self._means[key] = self._ordered(codec, rounded, self._where, plan)
        return self._means[key]

    def change(self, wire: str) -> None:
        """Use another wire from the next round on, and keep the residuals."""
        if wire != self.wire:
            self.wire = wire
            self._means.clear()
            for rounded in self._rounded.values():  # parts may be cut differently
                rounded.clear()

    def forget(self) -> None:
        """Forget the residuals: they are not finite, or belong to other parts or phases."""
        self._flagged.clear()
        self._residuals.clear()
        self._places.clear()
        self._means.clear()  # which may be by another plan
        for rounded in self._rounded.values():
            rounded.clear()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state that a resumed run needs for the same bits; between two rounds."""
        return {
            "wire": self.wire,
            "residuals": [(*key, row.to("cpu", copy=True)) for key, row in self._residuals.items()],
            "rounded": [
                (dtype, start, row.to("cpu", copy=True))
                for dtype, rows in self._rounded.items()
                for start, row in rows.items()
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self.forget()
        self.wire = state["wire"]
        for dtype, start, row in state["residuals"]:
            self._residuals[dtype, start] = row.to(self._device, copy=True)
        for dtype, start, row in state["rounded"]:
            self._rounded.setdefault(dtype, {})[start] = row.to(self._device, copy=True)
