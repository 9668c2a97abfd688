"""Buffers of an all-reduce, their MPI views, and the weighted mean.

`in_process` runs the arithmetic of `deterministic_allreduce` for buffers in one process.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from daso.comm.mpi import load
from daso.kernels.choice import Kernels, kernels_for
from daso.kernels.codecs import Codec
from daso.kernels.rows import Mean

if TYPE_CHECKING:
    from mpi4py import MPI

CPU = torch.device("cpu")

LEVEL = 1 << 48  # more than any numel: offsets the keys of parts of different levels

# For each chunk, one span (start, stop) per payload; the spans of a chunk are contiguous.
Chunks = Sequence[Sequence[tuple[int, int]]]
Spans = Sequence[tuple[int, int]]

# Types that MPI may add. On 16-bit data, MPI.SUM raises with MPICH, and is wrong without an error
# with Open MPI (4.1 and 5.0, bfloat16).
MPI_NAMES = {torch.float32: "FLOAT", torch.float64: "DOUBLE", torch.int64: "INT64_T"}

# Types by their codes in messages that describe their contents.
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums and references of ``dtype`` are kept: fp64 or fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_buffer(flat: torch.Tensor) -> "tuple[Any, MPI.Datatype]":
    """Return ``flat`` as a buffer for an MPI reduction."""
    return flat.numpy(), getattr(load(), MPI_NAMES[flat.dtype])


def byte_buffer(flat: torch.Tensor) -> Any:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy."""
    return flat.view(torch.uint8).numpy() if flat.numel() else flat.new_empty(0).numpy()


def device_buffer(flat: torch.Tensor) -> Any:
    """Return the memory of a contiguous CUDA tensor, for a CUDA-aware MPI."""
    return load().memory.fromaddress(flat.data_ptr(), flat.nbytes)


class ReduceBuffer(Protocol):
    """A buffer that an exchange reads from and delivers to."""

    dtype: torch.dtype  # of its elements

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the encoded payload (bytes) of each span, valid until it is delivered."""
        ...

    def outgoing(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the payloads in host memory; buffers on a device override this."""
        return self.payloads(spans)

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:
        """Accept the mean of elements ``start`` to ``stop``; ``sent`` is this rank's payload."""
        ...


class Row(ReduceBuffer):
    """A plain buffer that is sent without encoding and replaced by the mean.

    Args:
        flat: The buffer (numel), on the CPU.
        kernels: CPU kernels, if the caller has them.
    """

    def __init__(self, flat: torch.Tensor, kernels: Kernels | None = None) -> None:
        self.flat, self.dtype = flat, flat.dtype
        self._kernels = kernels or kernels_for(flat.device)

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return each span's raw bytes."""
        return [self.flat[start:stop].view(torch.uint8) for start, stop in spans]

    def deliver(self, start: int, stop: int, mean: Mean, sent: torch.Tensor) -> None:  # noqa: ARG002
        """Write the mean in place."""
        assert mean.codec.exact, "a plain buffer cannot keep rounding errors"
        self._kernels.reduce(mean, stop - start, row=self.flat[start:stop])


class SendBuffer:
    """Memory for the payloads of a buffer: one for each span.

    Args:
        device: Of the buffer.
    """

    codec: Codec

    def __init__(self, device: torch.device = CPU) -> None:
        self._own = torch.empty(0, dtype=torch.uint8, device=device)
        self.memory = self._own  # all payloads, in order (bytes)
        self._payloads: dict[tuple[int, int], torch.Tensor] = {}

    def open(self, codec: Codec, spans: Spans, memory: torch.Tensor | None = None) -> None:
        """Allocate the payloads of spans; earlier payloads become invalid."""
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        if memory is None:
            if self._own.numel() < sum(sizes):
                self._own = self._own.new_empty(sum(sizes))
            memory = self._own
        self.memory = memory[: sum(sizes)]
        payloads = torch.split(self.memory, sizes)
        self._payloads = {
            (start, stop): payload for (start, stop), payload in zip(spans, payloads, strict=True)
        }
        self.codec = codec

    def release(self) -> None:
        """Release the memory until `open`."""
        self.memory = self._own = self._own.new_empty(0)
        self._payloads = {}

    def payloads(self, spans: Spans) -> Sequence[torch.Tensor]:
        """Return the payloads of spans that were passed to `open`."""
        return [self._payloads[start, stop] for start, stop in spans]

    def items(self) -> Iterable[tuple[tuple[int, int], torch.Tensor]]:
        """Return all spans and their payloads, in order."""
        return self._payloads.items()


class BufferPool:
    """Buffers reused by all exchanges, because allocating memory takes longer than the sum.

    Args:
        window: Maximum number of chunks in flight.
        device: Of the buffers.
        memory: Allocates a number of bytes; None: torch does.
    """

    def __init__(
        self,
        window: int = 1,
        device: torch.device = CPU,
        memory: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.window, self.device, self._memory = window, device, memory
        self._rows: dict[tuple[str, int], torch.Tensor] = {}

    def row(self, name: str, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of chunk ``index``."""
        key = (f"{name} {dtype}", index % self.window)
        if key not in self._rows or self._rows[key].numel() < numel:
            self._rows[key] = self._make(numel, dtype)
        return self._rows[key][:numel]

    def _make(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._memory is not None:
            return self._memory(numel * dtype.itemsize).view(dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)


class Terms(NamedTuple):
    """Weights and divisor of a sum of payloads that are partial sums.

    Args:
        weights: Weight of each payload.
        total: Divisor of the sum.
        level: Level on which the sum is rounded, from 1; 0: the sum is the mean.
    """

    weights: Sequence[int]
    total: int
    level: int = 0


class WeightedMean:
    """Adds all ranks' payloads of a part, and rounds the mean for the wire.

    Args:
        codec: Layout of payloads.
        weights: Weight of each rank's buffer, in rank order.
        total: Divisor of the sum.
        rounded: Rounding errors of the parts that this rank reduces, by start of the part.
        device: On which sums are computed.
        of_gradients: Rounding errors may wait, as in `daso.kernels.torch_kernels.encode`.
    """

    def __init__(
        self,
        codec: Codec,
        weights: Sequence[int],
        total: int,
        rounded: dict[int, torch.Tensor],
        device: torch.device = CPU,
        *,
        of_gradients: bool = False,
    ) -> None:
        self.codec, self.weights, self.total = codec, tuple(weights), total
        self.rounded, self.device = rounded, device
        self._of_gradients, self.kernels = of_gradients, kernels_for(device)

    def mean(self, versions: Sequence[torch.Tensor], terms: Terms | None = None) -> Mean:
        """Return the unevaluated mean of all ranks' payloads of a span."""
        if terms is None:
            return Mean(self.codec, versions, self.weights, self.total)
        return Mean(self.codec, versions, terms.weights, terms.total)

    def add(
        self,
        versions: Sequence[torch.Tensor],
        payload: torch.Tensor,
        span: tuple[int, int],
        *,
        within: tuple[int, int] | None = None,
        terms: Terms | None = None,
    ) -> None:
        """Write the encoded weighted mean of a part, added in rank order.

        The rounding error is added to the next mean. Payloads are those of the part, or of a larger
        part (``within``) in which it starts at a multiple of every codec's block.
        """
        start, numel = span[0], span[1] - span[0]
        if not numel:
            return
        mean = self.mean(versions, terms)
        if within is not None:
            mean = mean.part(start - within[0], span[1] - within[0])
        key = start + (terms.level if terms else 0) * LEVEL
        self.kernels.reduce(
            mean,
            numel,
            payload=payload,
            carry=self._carry(key, numel),
            gradients=self._of_gradients,
        )

    def _carry(self, key: int, numel: int) -> torch.Tensor | None:
        """Return the rounding errors of earlier means of a part; zeros if the part has changed.

        An exact codec does not round, but sends what a sparse codec has held back.
        """
        rounded = self.rounded.get(key)
        if not self.codec.exact and (rounded is None or len(rounded) != numel):
            rounded = torch.zeros(numel, dtype=self.codec.row, device=self.device)
            self.rounded[key] = rounded
        return rounded


def in_process(sources: Sequence[ReduceBuffer], adder: WeightedMean, chunks: Chunks) -> int:
    """Run `deterministic_allreduce` for buffers in this process; return the bytes sent."""
    nbytes, peers, codec = 0, len(sources), adder.codec
    for spans in chunks:
        sizes = [codec.nbytes(stop - start) for start, stop in spans]
        payloads = [source.payloads(spans) for source in sources]
        if peers == 2:
            versions = [row[0].clone() for row in payloads]  # delivery overwrites the buffers
            for source, own in zip(sources, versions, strict=True):
                source.deliver(*spans[0], adder.mean(versions), own)
            nbytes += 2 * sum(sizes)
            continue
        means = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for owner, span in enumerate(spans):
            adder.add([row[owner] for row in payloads], means[owner], span)
        for source, sent in zip(sources, payloads, strict=True):
            deliver(codec, means, source, spans, sent)
        nbytes += 2 * (peers - 1) * sum(sizes)
    return nbytes


def whole(parts: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the span of a chunk."""
    return parts[0][0], parts[-1][1]


def deliver(
    codec: Codec,
    means: Sequence[torch.Tensor],
    source: ReduceBuffer,
    spans: Spans,
    sent: Sequence[torch.Tensor],
) -> None:
    """Deliver the mean of a chunk to a buffer."""
    for (start, stop), mean, own in zip(spans, means, sent, strict=True):
        source.deliver(start, stop, Mean(codec, [mean]), own)
