"""Gradients that cross between nodes in fewer bits; what a wire rounds away goes into the next.

Seide et al. 2014 (1-bit SGD), Karimireddy et al. 2019, arXiv 1901.09847 (error feedback).
"""

from collections.abc import Callable, Sequence

import torch

from daso.comm.allreduce import DeterministicAllReduce
from daso.comm.compression import Codec, Fields, codec_named, encode_gradients, pieces
from daso.comm.engine import Work
from daso.comm.reduction import Chunks, SendBuffer, Spans, cut
from daso.plan.layout import Span, message_chunks
from daso.train.deltas.shard import message_numel

__all__ = ["CompressedSum", "GradientCompressor", "compressed_chunks"]

Key = tuple[torch.dtype, int]  # of the gradients in a row, and where a part of it starts


class CompressedSum:
    """A node's sum of a part of the gradients, which an exchange reads and replaces by the mean.

    Args:
        total: The sum (numel), fp32 or fp64, on the host.
        start: Where it starts in its row.
        residual: What was rounded away of it before (numel); changed.
        flags: Places in it of numbers that must cross as they are (flags,), int64.
        outbox: Memory for what crosses, kept by the caller; None: of its own.
    """

    def __init__(
        self,
        total: torch.Tensor,
        start: int,
        residual: torch.Tensor,
        flags: torch.Tensor,
        outbox: SendBuffer | None = None,
    ) -> None:
        self.total, self.start, self.dtype = total, start, total.dtype
        self._residual, self._flags = residual, flags
        self.exact = total[flags]
        self._outbox = outbox or SendBuffer()

    def encode(self, codec: Codec, spans: Spans) -> None:
        """Write what will cross, and keep what that rounds away.

        Args:
            codec: What crosses.
            spans: Of the row, each of which gets a payload.
        """
        self.total[self._flags] = 0  # beside them gradients would round to nothing
        payloads = self._outbox.open(codec, spans)
        for (start, stop), payload in zip(spans, payloads, strict=True):
            for a, b in pieces(stop - start):
                piece = slice(start - self.start + a, start - self.start + b)
                fields = codec.fields(payload, stop - start, a, b)
                encode_gradients(codec, self.total[piece], self._residual[piece], fields)

    def payloads(self, codec: Codec, spans: Spans) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Return what was encoded of spans."""
        return self._outbox.payloads(spans)

    def deliver(self, start: int, stop: int, mean: torch.Tensor, sent: Fields) -> None:  # noqa: ARG002
        """Write the mean in place."""
        self.total[start - self.start : stop - self.start].copy_(mean)

    def deliver_exact(self) -> None:
        """Write the numbers that crossed as they are."""
        self.total[self._flags] = self.exact


def compressed_chunks(codec: Codec, chunk_bytes: int, start: int, numel: int, nodes: int) -> Chunks:
    """Return the chunks in which a part of a row crosses.

    Args:
        codec: What crosses.
        chunk_bytes: Of a message.
        start: Where the part starts in its row.
        numel: Numbers of the part.
        nodes: That take part.
    """
    chunks = message_chunks(message_numel(codec, chunk_bytes), numel, nodes)
    return [[Span(a + start, b + start) for a, b in parts] for parts in chunks]


class GradientCompressor:
    """Takes means of gradients between nodes on a narrow wire, and keeps what it rounds away.

    Args:
        wire: "bf16", "int8" or "int4".
        nodes: How many take part.
        chunk_bytes: Of a message.
        ordered: Makes what takes means of sums over nodes, of a codec and what owners round away.
        mean: Replaces a small sum over a node by the mean over the world, exactly; work for the
            engine.
    """

    def __init__(
        self,
        wire: str,
        *,
        nodes: int,
        chunk_bytes: int,
        ordered: Callable[[Codec, dict[int, torch.Tensor]], DeterministicAllReduce],
        mean: Callable[[torch.Tensor], Work[int]],
    ) -> None:
        self.wire, self._nodes, self._chunk_bytes = wire, nodes, chunk_bytes
        self._ordered, self._mean = ordered, mean
        self._outbox, self._places = SendBuffer(), dict[Key, torch.Tensor]()
        self._residuals: dict[Key, torch.Tensor] = {}
        self._rounded: dict[torch.dtype, dict[int, torch.Tensor]] = {}  # by owners of parts
        self._means: dict[torch.dtype, DeterministicAllReduce] = {}

    def mean(self, total: torch.Tensor, key: Key, flags: Sequence[int]) -> Work[int]:
        """Replace sums over nodes by the mean over the world.

        Args:
            total: This lane's part (numel), fp32 or fp64: the sum over this node.
            key: Of the part; the same on all nodes.
            flags: Places in it of numbers that cross as they are.

        Returns:
            Bytes sent by this rank.

        Collective over the lane; non-blocking, as work for the engine.
        """
        (row, start), codec = key, codec_named(self.wire, total.dtype)
        if row not in self._means:
            self._means[row] = self._ordered(codec, self._rounded.setdefault(row, {}))
        places = self._places.get(key)
        if places is None or places.numel() != len(flags):
            places = torch.tensor(flags, dtype=torch.int64, device="cpu")
            self._places[key] = places
        # One after the other: the engine ends a mean before it begins the next.
        source = CompressedSum(total, start, self._residual(total, key), places, self._outbox)
        chunks = compressed_chunks(codec, self._chunk_bytes, start, total.numel(), self._nodes)
        source.encode(codec, [span for parts in cut(chunks, self._nodes) for span in parts])
        nbytes = yield from self._means[row].run(source, chunks)
        if flags:
            nbytes += yield from self._mean(source.exact)
        source.deliver_exact()
        return nbytes

    def _residual(self, total: torch.Tensor, key: Key) -> torch.Tensor:
        if key not in self._residuals:
            self._residuals[key] = torch.zeros_like(total)
        return self._residuals[key]

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
            self._residuals[dtype, start] = row.clone()
        for dtype, start, row in state["rounded"]:
            self._rounded.setdefault(dtype, {})[start] = row.clone()
