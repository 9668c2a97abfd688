"""Compression of gradients sent to the owners of rows, with error feedback."""

from collections.abc import Mapping, Sequence

import torch

from daso.comm.reduction import accumulator
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.rows import EncodeRows, FlatTensors, Mean
from daso.plan.layout import Span, aligned
from daso.server.partition import Partition


class PushCompressor:
    """Encodes the gradients that a rank pushes, and decodes those that it receives."""

    def __init__(self, partition: Partition, wire: str | None) -> None:  # None: uncompressed
        self._partition, self._wire = partition, wire
        self._kernels = kernels_for(torch.device("cpu"))
        self._residuals: dict[tuple[int, int], torch.Tensor] = {}  # by owner and parameter

    def encode(
        self, owner: int, layers: Sequence[int], has: Sequence[bool], row: torch.Tensor
    ) -> torch.Tensor:
        """Return the payload of gradients; its rounding error is added to the next gradients."""
        if self._wire is None:
            return row
        tensors = list(self._partition.unpack(owner, layers, row))
        spans = self._spans(tensors)
        payload = torch.zeros(spans[-1].stop if spans else 0, dtype=torch.uint8, device="cpu")
        for (index, tensor), span, has_grad in zip(tensors, spans, has, strict=True):
            if has_grad and tensor.numel():
                self._encode((owner, index), tensor.reshape(-1), payload[slice(*span)])
        return payload

    def _encode(self, key: tuple[int, int], values: torch.Tensor, payload: torch.Tensor) -> None:
        codec, before = self._codec(values), self._residuals.get(key)
        rounding = before
        if rounding is None:
            rounding = torch.empty(values.numel(), dtype=codec.row, device="cpu")
        self._kernels.encode(
            codec,
            FlatTensors([values]),
            [(0, values.numel())],
            payload,
            EncodeRows(residual=before, rounding=rounding),
        )
        self._residuals[key] = rounding

    def residuals(self) -> dict[tuple[int, int], torch.Tensor]:
        """Return a copy of the rounding errors so far, by owner and parameter."""
        return {key: lost.clone() for key, lost in self._residuals.items()}

    def load_residuals(self, residuals: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Replace the rounding errors; by none without compression."""
        self._residuals = {
            key: lost.clone() for key, lost in residuals.items() if self._wire is not None
        }

    def decode(self, owner: int, layers: Sequence[int], payload: torch.Tensor) -> torch.Tensor:
        """Return decoded gradients in the layout of `Partition.pack`."""
        if self._wire is None:
            return payload
        row = torch.zeros(
            self._partition.packed_nbytes(owner, layers), dtype=torch.uint8, device="cpu"
        )
        tensors = list(self._partition.unpack(owner, layers, row))
        for (_, tensor), span in zip(tensors, self._spans(tensors), strict=True):
            numel, codec = tensor.numel(), self._codec(tensor)
            wide = torch.empty(numel, dtype=codec.row, device="cpu")
            self._kernels.reduce(Mean(codec, [payload[slice(*span)]]), numel, row=wide)
            tensor.copy_(wide.view(tensor.shape))
        return row

    def _codec(self, tensor: torch.Tensor) -> Codec:
        assert self._wire is not None
        return codec_named(self._wire, accumulator(tensor.dtype))

    def _spans(self, tensors: Sequence[tuple[int, torch.Tensor]]) -> tuple[Span, ...]:
        """Return the position of each parameter's code in a payload."""
        return aligned([self._codec(tensor).nbytes(tensor.numel()) for _, tensor in tensors])
