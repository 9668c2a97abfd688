"""Gradients that cross between nodes in fewer bits; what a wire rounds away goes into the next.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019, arXiv 1901.09847 (error feedback).
"""

from collections.abc import Callable, Sequence

import torch

from daso.comm.allreduce import DeterministicAllReduce, OnDevice
from daso.comm.compression import PIECE, Codec, Fields, codec_named, encode_gradients, pieces
from daso.comm.device.staging import Arrived, DeviceStaging
from daso.comm.engine import Work
from daso.comm.reduction import Chunks, SendBuffer, Spans, cut
from daso.plan.layout import Span, message_chunks
from daso.train.deltas.shard import DEVICE_PIECE, LEAST, message_numel

__all__ = ["CompressedSum", "GradientCompressor", "compressed_chunks"]

Ordered = Callable[[Codec, dict[int, torch.Tensor], OnDevice | None], DeterministicAllReduce]
Key = tuple[torch.dtype, int]  # of the gradients in a row, and where a part of it starts


class CompressedSum:
    """A node's sum of a part of the gradients, which an exchange reads and replaces by the mean.

    Args:
        total: The sum (numel), fp32 or fp64.
        start: Where it starts in its row.
        residual: What was rounded away of it before (numel), on the same device; changed.
        flags: Places in it of numbers that must cross as they are (flags,), int64, there too.
        outbox: Memory for what crosses, kept by the caller; None: of its own, on the host.
        piece: Numbers that are encoded at a time, a multiple of `daso.comm.compression.PIECE`.
    """

    def __init__(
        self,
        total: torch.Tensor,
        start: int,
        residual: torch.Tensor,
        flags: torch.Tensor,
        outbox: SendBuffer | None = None,
        piece: int = PIECE,
    ) -> None:
        self.total, self.start, self.dtype = total, start, total.dtype
        self._residual, self._flags, self._piece = residual, flags, piece
        self.exact = total[flags]
        self._outbox = outbox or SendBuffer()
        self._leaving = self._outbox  # on the host

    def encode(self, codec: Codec, spans: Spans) -> None:
        """Write what will cross, and keep what that rounds away.

        Args:
            codec: What crosses.
            spans: Of the row, each of which gets a payload.
        """
        # Beside them gradients would round to nothing.
        self.total.index_fill_(0, self._flags, 0)
        payloads = self._outbox.open(codec, spans)
        for (start, stop), payload in zip(spans, payloads, strict=True):
            for a, b in pieces(stop - start, self._piece):
                piece = slice(start - self.start + a, start - self.start + b)
                fields = codec.fields(payload, stop - start, a, b)
                encode_gradients(codec, self.total[piece], self._residual[piece], fields)

    def leave(self, copies: DeviceStaging, memory: torch.Tensor) -> Work[None]:
        """Copy what was encoded, and numbers that cross as they are, to the host.

        Args:
            copies: Between the device and the host.
            memory: For the former (bytes).
        """
        encoded, self._leaving = self._outbox, SendBuffer()
        self._leaving.open(encoded.codec, [span for span, _ in encoded.items()], memory)
        exact = copies.memory(self.exact.nbytes).view(self.dtype)
        with copies.beside():
            arrived = copies.out(encoded.memory, self._leaving.memory)
            exact_arrived = copies.out(self.exact, exact)
        yield arrived
        yield exact_arrived
        self.exact = exact

    @property
    def nbytes(self) -> int:
        """Bytes that cross."""
        return self._outbox.memory.numel()

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return what was encoded of spans."""
        return self._outbox.payloads(spans)

    def outgoing(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return what was encoded of spans, on the host."""
        return self._leaving.payloads(spans)

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:  # noqa: ARG002
        """Write the mean in place."""
        self.total[start - self.start : stop - self.start].copy_(mean)

    def deliver_exact(self) -> None:
        """Write the numbers that crossed as they are."""
        exact = self.exact.to(self.total.device, non_blocking=True)
        self.total.index_copy_(0, self._flags, exact)


def compressed_chunks(
    codec: Codec, chunk_bytes: int, start: int, numel: int, nodes: int, *, least: int = 1
) -> Chunks:
    """Return the chunks in which a part of a row crosses.

    Args:
        codec: What crosses.
        chunk_bytes: Of a message.
        start: Where the part starts in its row.
        numel: Numbers of the part.
        nodes: That take part.
        least: Numbers of a message at the least.
    """
    chunks = message_chunks(message_numel(codec, chunk_bytes, least), numel, nodes)
    return [[Span(a + start, b + start) for a, b in parts] for parts in chunks]


class GradientCompressor:
    """Takes means of gradients between nodes on a narrow wire, and keeps what it rounds away.

    Args:
        wire: "bf16", "int8" or "int4".
        nodes: How many take part.
        chunk_bytes: Of a message.
        ordered: Makes what takes means of sums over nodes, of a codec, what owners round away, and
            the device of sums.
        mean: Replaces a small sum over a node by the mean over the world, exactly; work for the
            engine.
        device: Where sums lie.
        copies: Between a device that has gradients and the host; None: the host has them.
        staged: MPI does not take the memory of that device.
    """

    def __init__(
        self,
        wire: str,
        *,
        nodes: int,
        chunk_bytes: int,
        ordered: Ordered,
        mean: Callable[[torch.Tensor], Work[int]],
        device: torch.device,
        copies: DeviceStaging | None,
        staged: bool,
    ) -> None:
        self.wire, self._nodes, self._chunk_bytes = wire, nodes, chunk_bytes
        self._ordered, self._mean = ordered, mean
        self._device, self._copies, self._staged = device, copies, staged
        # All nodes cut alike, also those whose ranks share a device and add on the host.
        self._least = 1 if copies is None else LEAST
        self._outbox = SendBuffer(device)
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")  # for what leaves a device
        self._places: dict[Key, torch.Tensor] = {}
        self._residuals: dict[Key, torch.Tensor] = {}
        self._rounded: dict[torch.dtype, dict[int, torch.Tensor]] = {}  # by owners of parts
        self._means: dict[torch.dtype, DeterministicAllReduce] = {}

    def mean(
        self, total: torch.Tensor, key: Key, flags: Sequence[int], made: Arrived | None = None
    ) -> Work[int]:
        """Replace sums over nodes by the mean over the world.

        Args:
            total: This lane's part (numel), fp32 or fp64: the sum over this node.
            key: Of the part; the same on all nodes.
            flags: Places in it of numbers that cross as they are.
            made: Tells when the sum is made, where it was left on a device; None: on the host.

        Returns:
            Bytes sent by this rank.

        Collective over the lane; non-blocking, as work for the engine.
        """
        if made is None:
            source, chunks = self._encode(total, key, flags, PIECE)
            nbytes = yield from self._exchange(source, key[0], None).run(source, chunks)
            nbytes += yield from self._mean_of_exact(source)
            source.deliver_exact()
            return nbytes
        copies = self._copies
        assert copies is not None, "sums are left on a device"
        copies.attach()
        yield made
        with copies.beside():
            source, chunks = self._encode(total, key, flags, DEVICE_PIECE)
        yield from source.leave(copies, self._leaving(source))
        where = OnDevice(self._device, copies, DEVICE_PIECE, self._staged)
        nbytes = yield from self._exchange(source, key[0], where).run(source, chunks)
        nbytes += yield from self._mean_of_exact(source)
        with copies.beside():
            source.deliver_exact()
            over = copies.mark()
        yield over
        return nbytes

    def _encode(
        self, total: torch.Tensor, key: Key, flags: Sequence[int], piece: int
    ) -> tuple[CompressedSum, Chunks]:
        """Encode a sum; return it, and the chunks in which it crosses."""
        codec, device = codec_named(self.wire, total.dtype), self._device
        if key not in self._residuals:
            self._residuals[key] = torch.zeros_like(total)
        if key not in self._places or self._places[key].numel() != len(flags):
            places = torch.tensor(
                flags, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda"
            )
            self._places[key] = places.to(device, non_blocking=True)
        # One after the other: the engine ends a mean before it begins the next.
        source = CompressedSum(
            total, key[1], self._residuals[key], self._places[key], self._outbox, piece
        )
        chunks = compressed_chunks(
            *(codec, self._chunk_bytes, key[1], total.numel(), self._nodes), least=self._least
        )
        source.encode(codec, [span for parts in cut(chunks, self._nodes) for span in parts])
        return source, chunks

    def _leaving(self, source: CompressedSum) -> torch.Tensor:
        """Return memory on the host for what was encoded."""
        assert self._copies is not None, "it is on a device"
        if self._room.numel() < source.nbytes:
            self._room = self._copies.memory(source.nbytes)
        return self._room

    def _exchange(
        self, source: CompressedSum, row: torch.dtype, where: OnDevice | None
    ) -> DeterministicAllReduce:
        """Return what takes means of the parts of a row."""
        if row not in self._means:
            rounded = self._rounded.setdefault(row, {})
            self._means[row] = self._ordered(codec_named(self.wire, source.dtype), rounded, where)
        return self._means[row]

    def _mean_of_exact(self, source: CompressedSum) -> Work[int]:
        """Replace numbers that cross as they are; return the bytes sent."""
        return (yield from self._mean(source.exact)) if source.exact.numel() else 0

    def forget(self) -> None:
        """Forget what was rounded away: it is not finite, or belongs to other parts or phases."""
        self._residuals.clear()
        self._places.clear()
        for rounded in self._rounded.values():
            rounded.clear()

    # --- checkpoint --------------------------------------------------------------------------

    def state(self) -> dict[str, list[tuple[torch.dtype, int, torch.Tensor]]]:
        """Return what this rank needs to go on to the same bits; between two rounds."""
        return {
            "residuals": [(*key, row.clone()) for key, row in self._residuals.items()],
            "rounded": [
                (dtype, start, row.clone())
                for dtype, rows in self._rounded.items()
                for start, row in rows.items()
            ],
        }

    def load(self, state: dict[str, list[tuple[torch.dtype, int, torch.Tensor]]]) -> None:
        """Take over what `state` returned."""
        self.forget()
        for dtype, start, row in state["residuals"]:
            self._residuals[dtype, start] = row.to(self._device, copy=True)
        for dtype, start, row in state["rounded"]:
            self._rounded.setdefault(dtype, {})[start] = row.to(self._device, copy=True)
