"""Codecs: the byte layout of a flat row of numbers between nodes.

A payload is a sequence of blocks, each with a fixed number of bytes; the last block may be shorter.
So the payload of a span that starts at a block is a slice of the payload of the whole row. Rounding
errors stay in the parameters or in a residual, and are part of the next row (error feedback;
Seide et al. 2014, Karimireddy et al. 2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """Layout of blocks whose numbers share a scale: the scale, then a code for each number.

    Codes of 8 bits are signed. With fewer bits, byte k holds the codes of numbers k, k + width,
    k + 2 * width and so on, from the lowest bits up, each plus `bias`.
    """

    numel: int  # numbers of a block
    bits: int  # of a code
    scale: torch.dtype

    @property
    def steps(self) -> int:
        """The largest code."""
        return (1 << self.bits - 1) - 1

    @property
    def bias(self) -> int:
        """Added to codes that share a byte."""
        return 1 << self.bits - 1

    @property
    def width(self) -> int:
        """Bytes of a block's codes."""
        return self.numel * self.bits // 8

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.tail_nbytes(self.numel)

    def tail_nbytes(self, rest: int) -> int:
        """Return the bytes of a last block of ``rest`` numbers."""
        return self.scale.itemsize + min(rest, self.width)


# Blocks of int4 and int2 are small: a number that is small relative to its block's largest stays in
# the residual until it is sent in a burst, by which Adam divides (docs/accuracy.md).
BLOCKS = {
    "int8": Blocks(128, 8, torch.float32),
    "int4": Blocks(32, 4, torch.bfloat16),
    "int2": Blocks(32, 2, torch.bfloat16),
}
# Numbers of a block, and the divisor for those that are sent: index (16 bits) and value (bf16).
TOPK_BLOCK, TOPK_PART = 4096, 64
KNOWN_SIZES = 4096  # of payloads; every exchange needs the same ones
WORD_BYTES = 4  # payload sizes are multiples, so that the parts of a chunk are aligned


@dataclass(frozen=True, slots=True, eq=False)  # one instance of each exists
class Codec:
    """Layout of a payload.

    Args:
        wire: Its name: "fp32", "fp64", "bf16", "fp16", "int8", "int4", "int2" or "topk".
        row: Type of the rows: fp32 or fp64.
        block: Numbers of a block.
        block_nbytes: Bytes of a block.
        tail_nbytes: Returns the bytes of a shorter last block, from its count of numbers.
        exact: Decoding returns the encoded row: no residual is needed.
        sparse: Most numbers are not sent.
        sums: The levels of a plan exchange sums instead of running means.
    """

    wire: str
    row: torch.dtype
    block: int
    block_nbytes: int
    tail_nbytes: Callable[[int], int]
    exact: bool = False
    sparse: bool = False
    sums: bool = False

    @lru_cache(maxsize=KNOWN_SIZES)  # noqa: B019 - codecs live as long as the process
    def nbytes(self, numel: int) -> int:
        """Return the bytes of a payload of ``numel`` numbers, a multiple of 4."""
        return -(-self.offset(numel) // WORD_BYTES) * WORD_BYTES

    @lru_cache(maxsize=KNOWN_SIZES)  # noqa: B019 - as above
    def offset(self, numel: int) -> int:
        """Return the bytes of ``numel`` numbers, without padding."""
        blocks, rest = divmod(numel, self.block)
        return blocks * self.block_nbytes + (self.tail_nbytes(rest) if rest else 0)

    def part(self, payload: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the bytes of numbers ``start`` to ``stop`` of a payload.

        Args:
            payload: Payload (nbytes,), uint8.
            start: A multiple of `block`.
            stop: A multiple of `block`, or the length of the row.
        """
        return payload[self.offset(start) : self.offset(stop)]


def _cast(wire: str, dtype: torch.dtype, row: torch.dtype, *, dense: bool = False) -> Codec:
    exact = torch.promote_types(dtype, row) == dtype
    return Codec(wire, row, 1, dtype.itemsize, _no_tail, exact=exact, sums=exact and not dense)


def _no_tail(rest: int) -> int:
    return 0 * rest


def _tail_topk(rest: int) -> int:
    return 4 * -(-rest // TOPK_PART)


@cache
def codec_named(wire: str, row: torch.dtype = torch.float32) -> Codec:
    """Return the codec of a wire for rows of a type, fp32 or fp64.

    In a block of int8, int4 or int2 with largest magnitude m, x becomes round(x / s) with the scale
    s = m / (2**(bits-1) - 1) (Dettmers et al. 2022, arXiv 2110.02861, with a linear grid). topk is
    top-k with error feedback by blocks, as in DeMo (Peng et al. 2024, arXiv 2411.19870).
    """
    dtypes = {
        "fp32": torch.float32,
        "fp64": torch.float64,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
    }
    if wire in dtypes:
        return _cast(wire, dtypes[wire], row)
    if blocks := BLOCKS.get(wire):
        return Codec(wire, row, blocks.numel, blocks.nbytes, blocks.tail_nbytes)
    assert wire == "topk", wire
    nbytes = _tail_topk(TOPK_BLOCK)
    return Codec(wire, row, TOPK_BLOCK, nbytes, _tail_topk, sparse=True)


@cache
def dense_codec(wire: str, row: torch.dtype = torch.float32) -> Codec:
    """Return the codec for exchanges after which all nodes agree.

    A sparse wire would hold back most numbers; other wires only hold back rounding errors.
    """
    if wire == "topk":
        return _cast("fp32", torch.float32, row, dense=True)
    return codec_named(wire, row)


@cache
def exact_codec(row: torch.dtype) -> Codec:
    """Return the codec that sends numbers without rounding."""
    return codec_named("fp64" if row == torch.float64 else "fp32", row)
