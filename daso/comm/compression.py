"""What crosses between nodes: codecs between flat rows of numbers and flat rows of bytes.

What a codec rounds away is never lost: it stays in the parameters or in a residual, and is part of
the next row (error feedback; Seide et al. 2014, Karimireddy et al. 2019).
"""

from collections.abc import Iterator
from typing import Protocol

import torch

__all__ = [
    "EVEN",
    "PIECE",
    "Blockwise",
    "Cast",
    "Codec",
    "Fields",
    "TopK",
    "codec_named",
    "dense_codec",
    "divide_",
    "encode_gradients",
    "pieces",
]

Fields = tuple[torch.Tensor, ...]  # views of a payload; what is in each, the codec knows

PIECE = 1 << 16  # numbers: a multiple of every codec's block; six rows of them are 1.5 MiB of fp32
EVEN = 8  # numbers: where they begin at multiples, a thread of a device moves 16 bytes at once
WORD = 4  # bytes: payloads are whole words, so that parts of a chunk start aligned


class Codec(Protocol):
    """Turns numbers into bytes for the wire and back, piece by piece.

    A piece that fits into a core's cache goes through many passes at the price of one.
    """

    exact: bool  # decode(encode(x)) == x: no residual is needed
    sparse: bool  # most numbers are not sent
    sums: bool  # between levels of a plan sums cross, not running means

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        ...

    def fields(self, payload: torch.Tensor, numel: int, start: int, stop: int) -> Fields:
        """Return where numbers ``start`` to ``stop`` lie in ``payload`` (nbytes(numel), uint8).

        ``start`` is a multiple of `PIECE`, and ``stop`` too or all ``numel``.
        """
        ...

    def encode(self, values: torch.Tensor, fields: Fields) -> None:
        """Write ``values`` (stop - start) into their fields."""
        ...

    def decode(self, fields: Fields, out: torch.Tensor) -> None:
        """Write the numbers in fields into ``out`` (stop - start)."""
        ...


def divide_(values: torch.Tensor, by: int) -> torch.Tensor:
    """Divide by a number in place, with the bits of a CPU.

    A CUDA device multiplies by the number's reciprocal, but not by one of a tensor there.
    """
    return values.div_(values.new_full((), by) if values.is_cuda else by)


def pieces(numel: int, most: int = PIECE) -> Iterator[tuple[int, int]]:
    """Cut a row into spans that go through many passes one after the other."""
    return ((at, min(at + most, numel)) for at in range(0, numel, most))


class Cast:
    """Sends numbers rounded to a floating type.

    Args:
        dtype: The type on the wire.
        source: The type of the rows; the codec is exact when nothing is rounded.
        dense: It takes turns with a sparse codec, which leaves errors of means to it.
    """

    def __init__(
        self, dtype: torch.dtype, source: torch.dtype = torch.float32, *, dense: bool = False
    ) -> None:
        self.dtype = dtype
        self.exact, self.sparse = torch.promote_types(dtype, source) == dtype, False
        self.sums = self.exact and not dense

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        return _words(numel * self.dtype.itemsize)

    def fields(self, payload: torch.Tensor, numel: int, start: int, stop: int) -> Fields:
        """Return the numbers' view."""
        return (payload[: numel * self.dtype.itemsize].view(self.dtype)[start:stop],)

    def encode(self, values: torch.Tensor, fields: Fields) -> None:
        """Round ``values``."""
        if self.dtype == torch.float16:  # what is beyond its range stays in the residual
            values = values.clamp(-65504.0, 65504.0)
        fields[0].copy_(values)

    def decode(self, fields: Fields, out: torch.Tensor) -> None:
        """Widen what was rounded."""
        out.copy_(fields[0])


class Blockwise:
    """Sends small whole numbers, and for each block of them one scale.

    In a block with largest magnitude m, x becomes round(x / s) with s = m / (2**(bits-1) - 1)
    (Dettmers et al. 2022, arXiv 2110.02861, with a linear grid).

    Args:
        bits: 8 or 4 for each number.
        block: Numbers that share a scale.
        scale: The type of a scale on the wire.
    """

    exact = sparse = sums = False

    def __init__(self, bits: int, block: int = 128, scale: torch.dtype = torch.float32) -> None:
        self.bits, self.block, self.scale = bits, block, scale
        self.largest = 2 ** (bits - 1) - 1

    def nbytes(self, numel: int) -> int:
        """Return the bytes that ``numel`` numbers take on the wire."""
        return self._head(numel) + _words(-(-numel * self.bits // 8))

    def _head(self, numel: int) -> int:
        """Return the bytes that scales take."""
        return _words(self._blocks(numel) * self.scale.itemsize)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def fields(self, payload: torch.Tensor, numel: int, start: int, stop: int) -> Fields:
        """Return scales, then codes."""
        head = self._head(numel)
        scales = payload[:head].view(self.scale)[start // self.block : self._blocks(stop)]
        codes = payload[head:][start * self.bits // 8 : -(-stop * self.bits // 8)]
        return scales, codes

    def encode(self, values: torch.Tensor, fields: Fields) -> None:
        """Write scales, then numbers."""
        grid = self._grid(values)
        scales = divide_(grid.abs().amax(1), self.largest)  # 15 times as fast as a norm
        fields[0].copy_(scales)
        if self.scale != scales.dtype:  # whoever reads has it as it is on the wire
            scales.copy_(fields[0])
        # A block of zeros has scale 0; any divisor gives zeros then.
        scales = scales.clamp_(min=torch.finfo(scales.dtype).tiny).unsqueeze(1)
        small = torch.div(grid, scales).round_().view(-1)[: values.numel()]
        self._pack(small, fields[1])

    def _grid(self, values: torch.Tensor) -> torch.Tensor:
        """Return numbers as blocks; zeros fill the last one."""
        blocks = self._blocks(values.numel())
        if blocks * self.block == values.numel():
            return values.view(blocks, self.block)
        grid = values.new_zeros(blocks, self.block)
        grid.view(-1)[: values.numel()] = values
        return grid

    def _pack(self, small: torch.Tensor, room: torch.Tensor) -> None:
        if self.bits == 8:
            room.view(torch.int8).copy_(small)
            return
        small.add_(8)  # 1 to 15
        low, high = small[0::2], small[1::2]
        pairs = torch.add(low[: high.numel()], high, alpha=16)
        room[: high.numel()].copy_(pairs)
        room[high.numel() :].copy_(low[high.numel() :])

    def decode(self, fields: Fields, out: torch.Tensor) -> None:
        """Multiply numbers by their block's scale."""
        scales, codes = fields
        self._unpack(codes, out)
        whole = out.numel() // self.block
        at = whole * self.block
        out[:at].view(whole, self.block).mul_(scales[:whole].unsqueeze(1))
        if at < out.numel():
            out[at:].mul_(scales[whole])

    def _unpack(self, room: torch.Tensor, out: torch.Tensor) -> None:
        if self.bits == 8:
            out.copy_(room.view(torch.int8))
            return
        low, high = out[0::2], out[1::2]
        low.copy_(room & 15)
        high.copy_(room[: high.numel()] >> 4)
        out.sub_(8)


class TopK:
    """Sends the largest numbers of each block, rounded to bf16, with their places.

    Top-k with error feedback, by blocks as in DeMo (Peng et al. 2024, arXiv 2411.19870) and
    SparseLoCo (Sarfi et al. 2025, arXiv 2508.15706); a place takes 16 bits.

    Args:
        block: Numbers of a block, at most 2**15.
        part: One of so many is sent; a last, shorter block sends its share, rounded up.
    """

    exact, sparse, sums = False, True, False

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

    def fields(self, payload: torch.Tensor, numel: int, start: int, stop: int) -> Fields:
        """Return places and values of full blocks, then those of a shorter last one."""
        found, at, byte = [], 0, 0
        for blocks, size, keep in self._cuts(numel):
            rows = slice(max(0, start - at) // size, min(blocks, -(-max(0, stop - at) // size)))
            count = blocks * keep
            for dtype in (torch.int16, torch.bfloat16):
                row = payload[byte : byte + 2 * count].view(dtype)
                found.append(row.view(blocks, keep)[rows])
                byte += 2 * count
            at += blocks * size
        return tuple(found)

    def _views(
        self, row: torch.Tensor, fields: Fields
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Pair blocks (blocks, numbers) with their places and values (blocks, sent)."""
        at = 0
        pairs = [(p, v) for p, v in zip(fields[::2], fields[1::2], strict=True) if p.numel()]
        for (blocks, size, _), (places, values) in zip(self._cuts(row.numel()), pairs, strict=True):
            yield row[at : at + blocks * size].view(blocks, size), places, values
            at += blocks * size

    def encode(self, values: torch.Tensor, fields: Fields) -> None:
        """Write places and values of the largest numbers."""
        for grid, places, sent in self._views(values, fields):
            # The order of equal numbers is not told; it makes no difference to the sum.
            largest = grid.abs().topk(places.shape[1], dim=1, sorted=False).indices
            places.copy_(largest)
            sent.copy_(grid.gather(1, largest))

    def decode(self, fields: Fields, out: torch.Tensor) -> None:
        """Write the numbers that were sent, and zeros elsewhere."""
        out.zero_()
        for grid, places, sent in self._views(out, fields):
            grid.scatter_(1, places.long(), sent.to(out.dtype))


def _words(nbytes: int) -> int:
    return -(-nbytes // WORD) * WORD


def encode_gradients(codec: Codec, fresh: torch.Tensor, kept: torch.Tensor, fields: Fields) -> None:
    """Encode gradients with what was rounded away of earlier ones; keep what is rounded away now.

    A gradient of zero may be of a parameter that no rank used, whose mean nobody takes: what is
    kept of it waits. What is not finite is not kept.
    """
    idle = fresh == 0
    waiting = torch.where(idle, kept, 0)
    values = torch.add(fresh, kept).masked_fill_(idle, 0)
    codec.encode(values, fields)
    codec.decode(fields, kept)
    torch.sub(values, kept, out=kept)
    if kept.is_cuda or not bool(kept.sum().isfinite()):  # asking a device would wait for it
        kept.nan_to_num_(0.0, 0.0, 0.0)
    kept += waiting


def codec_named(wire: str, source: torch.dtype = torch.float32) -> Codec:
    """Return the codec of a wire."""
    made: dict[str, Codec] = {
        "fp32": Cast(torch.float32, source),
        "bf16": Cast(torch.bfloat16, source),
        "fp16": Cast(torch.float16, source),
        "int8": Blockwise(8),
        # Small blocks: what is small beside its block's largest waits in the residual, and Adam
        # divides by the bursts in which it comes (docs/accuracy.md).
        "int4": Blockwise(4, 32, torch.bfloat16),
        "topk": TopK(),
    }
    return made[wire]


def dense_codec(wire: str, source: torch.dtype = torch.float32) -> Codec:
    """Return the codec for exchanges after which all nodes are to agree.

    What a sparse wire holds back must not stay behind there; other wires hold back a rounding.
    """
    return Cast(torch.float32, source, dense=True) if wire == "topk" else codec_named(wire, source)
