"""Gradients that cross between nodes in fewer bits; what a wire rounds away goes into the next.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019, arXiv 1901.09847 (error feedback).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from daso.comm.allreduce.direct import DeterministicAllReduce
from daso.comm.allreduce.ordered import OnDevice
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import Work
from daso.comm.reduction import CPU, Chunks, SendBuffer, Spans
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec, codec_named, exact_codec
from daso.kernels.rows import EncodeRows, FlatTensors, Mean
from daso.plan.allreduce_plan import AllReducePlan
from daso.plan.layout import Span
from daso.train.deltas.shard import message_numel

__all__ = ["Averaged", "CompressedSum", "GradientCompressor", "compressed_chunks"]

Ordered = Callable[
    [Codec, dict[int, torch.Tensor], OnDevice | None, AllReducePlan], DeterministicAllReduce
]
Key = tuple[torch.dtype, int]  # of the gradients in a row, and where a part of it starts


@dataclass(frozen=True, slots=True)
class Averaged:
    """What the mean of a part of the gradients took."""

    nbytes: int  # sent by this rank
    made_seconds: float = 0.0  # of the engine's, until a device had made what crosses


class CompressedSum:
    """A node's sum of a part of the gradients, which an exchange reads and replaces by the mean.

    Args:
        total: The sum (numel), fp32 or fp64.
        start: Where it starts in its row.
        residual: What was rounded away of it before (numel), on the same device; changed. None:
            what crosses is exact.
        flags: Places in it of numbers that must cross as they are (flags,), int64, there too.
        outbox: Memory for what crosses, kept by the caller; None: of its own, on the host.
    """

    def __init__(
        self,
        total: torch.Tensor,
        start: int,
        residual: torch.Tensor | None,
        flags: torch.Tensor,
        outbox: SendBuffer | None = None,
    ) -> None:
        self.total, self.start, self.dtype = total, start, total.dtype
        self._residual, self._flags = residual, flags
        self._kernels = kernels_for(total.device)
        self.exact = total[flags]
        self._outbox = outbox or SendBuffer()
        self._leaving = self._outbox  # on the host

    def encode(self, codec: Codec, spans: Spans) -> None:
        """Write what will cross, and keep what that rounds away."""
        if self._residual is None:  # each piece is read before its mean is written
            self._outbox.open(codec, spans, self.total.view(torch.uint8))
            return
        # Beside them gradients would round to nothing.
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
        """Copy what MPI reads to the host, and wait until it is made."""
        exact = copies.memory(self.exact.nbytes).view(self.dtype)
        with copies.beside():
            arrived = [copies.out(self.exact, exact), copies.mark()]
            if memory is not None:
                encoded, self._leaving = self._outbox, SendBuffer()
                self._leaving.open(encoded.codec, [span for span, _ in encoded.items()], memory)
                arrived.append(copies.out(encoded.memory, self._leaving.memory))
        yield from arrived
        self.exact = exact

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return self._outbox.memory.numel()

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans."""
        return self._outbox.payloads(spans)

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return what was encoded of spans, on the host."""
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


def compressed_chunks(
    codec: Codec, chunk_bytes: int, start: int, numel: int, plan: AllReducePlan, *, least: int = 1
) -> Chunks:
    """Return the chunks in which a part of a row crosses."""
    chunks = plan.chunks(numel, message_numel(codec, chunk_bytes, least))
    return [[Span(a + start, b + start) for a, b in parts] for parts in chunks]


class GradientCompressor:
    """Averages gradients between nodes, on a narrow wire with error feedback or as they are.

    Args:
        wire: "bf16", "int8" or "int4".
        plan: Says how nodes take means of so many bytes on the wire.
        chunk_bytes: Of a message.
        ordered: Makes what takes means of sums over nodes, of a codec, what is rounded away, the
            device of sums, and a plan.
        mean: Replaces a small sum over a node by the mean over the world, exactly; work for the
            engine.
        least: Numbers of a message at the least; the same on all nodes, also where sums are taken
            to the host.
        where: The device on which sums are left; None: they are on the host.
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
        where: OnDevice | None,
    ) -> None:
        self.wire, self._plan, self._chunk_bytes = wire, plan, chunk_bytes
        self._ordered, self._mean = ordered, mean
        self._least, self._where = least, where
        self._device = CPU if where is None else where.device
        self._outbox = SendBuffer(self._device)
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")  # for what leaves a device
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
        made: Arrived | None = None,
        *,
        exact: bool = False,
    ) -> Work[Averaged]:
        """Replace sums over nodes by the mean over the world, but for flags: see `mean_of_flags`.

        Collective over the lane; non-blocking, as work for the engine.
        """
        if made is None:
            assert self._where is None, "sums are left on the device"
            source, means, chunks = self._encode(total, key, flags, exact=exact)
            nbytes = yield from means.run(source, chunks)
            self._keep_flags(source)
            return Averaged(nbytes)
        begun = time.perf_counter()
        assert self._where is not None, "sums are left on a device"
        copies = self._where.copies
        copies.attach()
        yield made
        with copies.beside():
            source, means, chunks = self._encode(total, key, flags, exact=exact)
        if self._where.staged and self._room.numel() < source.nbytes:
            self._room = copies.memory(source.nbytes)
        yield from source.leave(copies, self._room if self._where.staged else None)
        made_seconds = time.perf_counter() - begun
        nbytes = yield from means.run(source, chunks)
        with copies.beside():
            over = copies.mark()
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
        with copies.beside():
            _deliver(sources, means)
            over = copies.mark()
        yield over
        return nbytes

    def _keep_flags(self, source: CompressedSum) -> None:
        """Keep a sum whose flags are not averaged yet."""
        if source.exact.numel():
            self._flagged.append(source)

    def _encode(
        self, total: torch.Tensor, key: Key, flags: Sequence[int], *, exact: bool
    ) -> tuple[CompressedSum, DeterministicAllReduce, Chunks]:
        """Encode a sum; return it, what takes its mean, and the chunks in which it crosses."""
        codec = self._codec(total.dtype, exact=exact)
        plan = self._plan(codec.nbytes(total.numel()))
        means = self._exchange(codec, key[0], plan, exact=exact)
        places = self._no_flags if exact else self._flags(key, flags)
        if not exact and key not in self._residuals:
            self._residuals[key] = torch.zeros_like(total)
        residual = None if exact else self._residuals[key]
        # One after the other: the engine ends a mean before it begins the next.
        source = CompressedSum(total, key[1], residual, places, self._outbox)
        chunks = compressed_chunks(
            codec, self._chunk_bytes, key[1], total.numel(), plan, least=self._least
        )
        source.encode(codec, [span for parts in chunks for span in parts])
        return source, means, chunks

    def _flags(self, key: Key, flags: Sequence[int]) -> torch.Tensor:
        """Return places of flags where sums lie."""
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
        """Return what takes means of the parts of a row."""
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
        """Forget what was rounded away: it is not finite, or belongs to other parts or phases."""
        self._flagged.clear()
        self._residuals.clear()
        self._places.clear()
        self._means.clear()  # which may be by another plan
        for rounded in self._rounded.values():
            rounded.clear()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what this rank needs to go on to the same bits; between two rounds."""
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
