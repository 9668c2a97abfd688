"""Gradients as they cross to the owners of rows: encoded, and what a code loses is sent later."""

from collections.abc import Mapping, Sequence

import torch

from daso.comm.dtypes import accumulator
from daso.kernels.choice import kernels_for
from daso.kernels.codecs import Codec, codec_named
from daso.kernels.rows import EncodeRows, FlatTensors, Mean
from daso.plan.layout import Span, aligned
from daso.server.partition import Partition

__all__ = ["PushCompressor"]


class PushCompressor:
    """Encodes the gradients that a rank pushes, and decodes those that it receives.

    Args:
        shares: Of the model.
        wire: As for `daso.DASO`, but not "auto"; None: gradients cross as they are.
    """

    def __init__(self, shares: Partition, wire: str | None) -> None:
        self._shares, self._wire = shares, wire
        self._kernels = kernels_for(torch.device("cpu"))
        self._residuals: dict[tuple[int, int], torch.Tensor] = {}  # by owner and parameter

    def encode(
        self, owner: int, layers: Sequence[int], has: Sequence[bool], row: torch.Tensor
    ) -> torch.Tensor:
        """Return what crosses of gradients; keeps what it loses, for the next ones."""
        if self._wire is None:
            return row
        tensors = list(self._shares.unpack(owner, layers, row))
        spans = self._spans(tensors)
        payload = torch.zeros(spans[-1].stop if spans else 0, dtype=torch.uint8, device="cpu")
        for (index, tensor), span, there in zip(tensors, spans, has, strict=True):
            if there and tensor.numel():
                self._encode((owner, index), tensor.reshape(-1), payload[slice(*span)])
        return payload

    def _encode(self, key: tuple[int, int], values: torch.Tensor, payload: torch.Tensor) -> None:
        codec, before = self._codec(values), self._residuals.get(key)
        kept = before
        if kept is None:
            kept = torch.empty(values.numel(), dtype=codec.row, device="cpu")
        self._kernels.encode(
            codec,
            FlatTensors([values]),
            [(0, values.numel())],
            payload,
            EncodeRows(residual=before, rounding=kept),
        )
        self._residuals[key] = kept

    def residuals(self) -> dict[tuple[int, int], torch.Tensor]:
        """Return a copy of what the wire has lost so far, by owner and parameter."""
        return {key: lost.clone() for key, lost in self._residuals.items()}

    def load_residuals(self, residuals: Mapping[tuple[int, int], torch.Tensor]) -> None:
        """Go on with what the wire had lost; nothing where there is none now."""
        self._residuals = {
            key: lost.clone() for key, lost in residuals.items() if self._wire is not None
        }

    def decode(self, owner: int, layers: Sequence[int], payload: torch.Tensor) -> torch.Tensor:
        """Return gradients as `Partition.pack` made them, but for what was lost."""
        if self._wire is None:
            return payload
        row = torch.zeros(
            self._shares.packed_nbytes(owner, layers), dtype=torch.uint8, device="cpu"
        )
        tensors = list(self._shares.unpack(owner, layers, row))
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
        """Return where each parameter's code lies in a payload."""
        return aligned([self._codec(tensor).nbytes(tensor.numel()) for _, tensor in tensors])
