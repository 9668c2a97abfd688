"""What crosses between nodes: codecs between flat rows of numbers and flat rows of bytes."""

from typing import Protocol

import torch

__all__ = ["Cast", "Codec", "codec_named"]


class Codec(Protocol):
    """Turns numbers into bytes for the wire and back."""

    exact: bool  # decode(encode(x)) == x: no residual is needed

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        ...

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write ``values`` (numel) into ``payload`` (nbytes(numel), uint8)."""
        ...

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers in ``payload`` (nbytes(numel), uint8) into ``out`` (numel)."""
        ...


class Cast:
    """Sends numbers rounded to a floating type.

    Args:
        dtype: The type on the wire.
        source: The type of the rows; the codec is exact when nothing is rounded.
    """

    def __init__(self, dtype: torch.dtype, source: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.exact = torch.promote_types(dtype, source) == dtype

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Round ``values`` into ``payload``."""
        payload.view(self.dtype).copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Widen ``payload`` into ``out``."""
        out.copy_(payload.view(self.dtype))


WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def codec_named(wire: str, source: torch.dtype = torch.float32) -> Codec:
    """Return the codec of a wire.

    Args:
        wire: ``"fp32"`` or ``"bf16"``.
        source: Type of the rows that will be sent.

    Returns:
        The codec.
    """
    return Cast(WIRES[wire], source)
