"""What crosses between nodes: codecs between flat rows of numbers and flat rows of bytes.

A codec that rounds is always used with a residual: what the wire loses is kept and added to the
next row (error feedback; Seide et al. 2014, Karimireddy et al. 2019).
"""

from collections.abc import Iterator
from typing import Protocol

import torch

__all__ = ["Blockwise", "Cast", "Codec", "TopK", "codec_named", "dense_codec"]

WORD = 4  # bytes: payloads are whole words, so that parts of a chunk start aligned


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
        return _words(numel * self.dtype.itemsize)

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Round ``values`` into ``payload``."""
        if self.dtype == torch.float16:  # what is beyond its range stays in the residual
            values = values.clamp(-65504.0, 65504.0)
        payload[: values.numel() * self.dtype.itemsize].view(self.dtype).copy_(values)

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Widen ``payload`` into ``out``."""
        out.copy_(payload[: out.numel() * self.dtype.itemsize].view(self.dtype))


class Blockwise:
    """Sends small whole numbers, and for each block of them one fp32 scale.

    In a block with largest magnitude m, x becomes round(x / s) with s = m / (2**(bits-1) - 1)
    (Dettmers et al. 2022, arXiv 2110.02861, with a linear grid).

    Args:
        bits: 8 or 4 for each number.
        block: Numbers that share a scale.
    """

    exact = False

    def __init__(self, bits: int, block: int = 128) -> None:
        self.bits, self.block = bits, block
        self.largest = 2 ** (bits - 1) - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        return WORD * self._blocks(numel) + _words(-(-numel * self.bits // 8))

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write scales, then numbers."""
        blocks = self._blocks(values.numel())
        grid = values.new_zeros(blocks, self.block)
        grid.view(-1)[: values.numel()] = values
        scales = grid.abs().amax(1, keepdim=True).div_(self.largest)
        payload[: WORD * blocks].view(torch.float32).copy_(scales.view(-1))
        # A block of zeros has scale 0; any divisor gives zeros then.
        small = grid.div_(scales.clamp(min=torch.finfo(scales.dtype).tiny)).round_()
        codes = small.view(-1)[: values.numel()].to(torch.int8)
        self._pack(codes, payload[WORD * blocks :])

    def _pack(self, codes: torch.Tensor, room: torch.Tensor) -> None:
        if self.bits == 8:
            room[: codes.numel()].view(torch.int8).copy_(codes)
            return
        nibbles = (codes + 8).to(torch.uint8)  # 1 to 15
        low, high = nibbles[0::2], nibbles[1::2]
        packed = room[: low.numel()].copy_(low)
        packed[: high.numel()] |= high << 4

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply numbers by their block's scale."""
        numel, blocks = out.numel(), self._blocks(out.numel())
        scales = payload[: WORD * blocks].view(torch.float32)
        grid = out.new_zeros(blocks, self.block)
        self._unpack(payload[WORD * blocks :], grid.view(-1)[:numel])
        out.copy_(grid.mul_(scales.to(out.dtype).unsqueeze(1)).view(-1)[:numel])

    def _unpack(self, room: torch.Tensor, out: torch.Tensor) -> None:
        if self.bits == 8:
            out.copy_(room[: out.numel()].view(torch.int8))
            return
        low, high = out[0::2], out[1::2]
        low.copy_(room[: low.numel()] & 15).sub_(8)
        high.copy_(room[: high.numel()] >> 4).sub_(8)


class TopK:
    """Sends the largest numbers of each block, rounded to bf16, with their places.

    Top-k with error feedback, by blocks as in DeMo (Peng et al. 2024, arXiv 2411.19870) and
    SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706); a place takes 16 bits.

    Args:
        block: Numbers of a block, at most 2**15.
        part: One of so many is sent; a last, shorter block sends its share, rounded up.
    """

    exact = False

    def __init__(self, block: int = 4096, part: int = 64) -> None:
        self.block, self.part = block, part

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        return WORD * sum(blocks * keep for blocks, _, keep in self._cuts(numel))

    def _cuts(self, numel: int) -> list[tuple[int, int, int]]:
        """Return (blocks, numbers of each, numbers sent of each) of full blocks and the rest."""
        full, rest = divmod(numel, self.block)
        cuts = [(full, self.block, -(-self.block // self.part)), (1, rest, -(-rest // self.part))]
        return [cut for cut in cuts if cut[0] and cut[1]]

    def _views(
        self, row: torch.Tensor, payload: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pair blocks (blocks, numbers) with their places and values (blocks, sent)."""
        at = byte = 0
        for blocks, size, keep in self._cuts(row.numel()):
            count = blocks * keep
            places = payload[byte : byte + 2 * count].view(torch.int16)
            values = payload[byte + 2 * count : byte + 4 * count].view(torch.bfloat16)
            grid = row[at : at + blocks * size].view(blocks, size)
            yield grid, places.view(blocks, keep), values.view(blocks, keep)
            at, byte = at + blocks * size, byte + 4 * count

    def encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write places and values of the largest numbers."""
        for grid, places, sent in self._views(values, payload):
            # The order of equal numbers is not told; it makes no difference to the sum.
            largest = grid.abs().topk(places.shape[1], dim=1, sorted=False).indices
            places.copy_(largest)
            sent.copy_(grid.gather(1, largest))

    def decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Write the numbers that were sent, and zeros elsewhere."""
        out.zero_()
        for grid, places, sent in self._views(out, payload):
            grid.scatter_(1, places.long(), sent.to(out.dtype))


def _words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD


def codec_named(wire: str, source: torch.dtype = torch.float32) -> Codec:
    """Return the codec of a wire.

    Args:
        wire: ``fp32``, ``bf16``, ``fp16``, ``int8``, ``int4`` or ``topk``.
        source: Type of the rows that will be sent.

    Returns:
        The codec.
    """
    made: dict[str, Codec] = {
        "fp32": Cast(torch.float32, source),
        "bf16": Cast(torch.bfloat16, source),
        "fp16": Cast(torch.float16, source),
        "int8": Blockwise(8),
        "int4": Blockwise(4),
        "topk": TopK(),
    }
    return made[wire]


def dense_codec(wire: str, source: torch.dtype = torch.float32) -> Codec:
    """Return the codec for exchanges after which all nodes are to agree.

    What a sparse wire holds back must not stay behind there; other wires hold back a rounding.

    Args:
        wire: As for `codec_named`.
        source: Type of the rows that will be sent.
    """
    return codec_named("fp32" if wire == "topk" else wire, source)
