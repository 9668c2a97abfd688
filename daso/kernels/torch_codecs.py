"""Payloads written and read by torch operations, with the layout of `daso.kernels.codecs`."""

from collections.abc import Iterator

import torch

from daso.kernels.codecs import BLOCK_INT4, BLOCK_INT8, TOPK_BLOCK, TOPK_PART, Codec
from daso.kernels.rows import divide_

__all__ = ["decode_row", "encode_row"]

TINY = torch.finfo(torch.float32).tiny
LARGEST = {kind: torch.finfo(kind).max for kind in (torch.float32, torch.bfloat16)}
SCALES = {BLOCK_INT8: (127, torch.float32), BLOCK_INT4: (7, torch.bfloat16)}


def encode_row(codec: Codec, values: torch.Tensor, payload: torch.Tensor) -> None:
    """Write a row (numel) as bytes (codec.offset(numel),)."""
    if codec.wire in ("int8", "int4"):
        _encode_blocks(values, payload, codec.block)
    elif codec.wire == "topk":
        _encode_topk(values, payload)
    else:
        if codec.wire == "fp16":  # what is beyond its range stays in the residual
            values = values.clamp(-65504.0, 65504.0)
        room = payload.view(_dtype(codec))
        room.copy_(values)
        if room.dtype in (torch.bfloat16, torch.float16):
            room.masked_fill_(room.isnan(), float("nan"))  # one NaN, whatever converts it


def decode_row(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> None:
    """Read a row (numel) from bytes (codec.offset(numel),)."""
    if codec.wire in ("int8", "int4"):
        _decode_blocks(payload, out, codec.block)
    elif codec.wire == "topk":
        _decode_topk(payload, out)
    else:
        out.copy_(payload.view(_dtype(codec)))


def _dtype(codec: Codec) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return names.get(codec.wire, torch.float32)


def _encode_blocks(values: torch.Tensor, payload: torch.Tensor, block: int) -> None:
    whole, (steps, kind) = values.numel() // block, SCALES[block]
    nbytes = kind.itemsize + (block if block == BLOCK_INT8 else block // 2)
    if rest := values.numel() - whole * block:
        last = values.new_zeros(block)
        last[:rest] = values[whole * block :]
        room = payload.new_empty(nbytes)
        _encode_blocks(last, room, block)
        payload[whole * nbytes :] = room[: payload.numel() - whole * nbytes]
    grid = values[: whole * block].view(whole, block)
    rows = payload[: whole * nbytes].view(whole, nbytes)
    largest = grid.abs().amax(1)
    scales = divide_(largest.clone(), steps)
    if scales.dtype == torch.float64:
        scales.clamp_(max=LARGEST[kind])
    scales = scales.to(torch.float32).to(kind)
    finite = largest.isfinite()
    # A block of zeros has scale 0; any divisor gives zeros then.
    divisors = scales.to(values.dtype).clamp(min=TINY)
    inverses = torch.where(finite, divisors.reciprocal(), 0.0)
    scales = torch.where(finite, scales, float("nan"))
    small = torch.mul(grid, inverses.unsqueeze(1))
    if small.dtype == torch.float64:
        small.clamp_(-steps, steps)
    # inf * 0; of a block that is not finite nothing is sent but its scale
    small.round_().nan_to_num_(0.0)
    rows[:, : kind.itemsize] = scales.unsqueeze(1).view(torch.uint8)
    codes = rows[:, kind.itemsize :]
    if block == BLOCK_INT8:
        codes.view(torch.int8).copy_(small)
    else:
        small.add_(8)  # 1 to 15
        codes.copy_(torch.add(small[:, : block // 2], small[:, block // 2 :], alpha=16))


def _decode_blocks(payload: torch.Tensor, out: torch.Tensor, block: int) -> None:
    whole, (_, kind) = out.numel() // block, SCALES[block]
    nbytes = kind.itemsize + (block if block == BLOCK_INT8 else block // 2)
    if rest := out.numel() - whole * block:
        room, last = payload.new_zeros(nbytes), out.new_empty(block)
        room[: payload.numel() - whole * nbytes] = payload[whole * nbytes :]
        _decode_blocks(room, last, block)
        out[whole * block :] = last[:rest]
    grid = out[: whole * block].view(whole, block)
    rows = payload[: whole * nbytes].view(whole, nbytes)
    scales = rows[:, : kind.itemsize].contiguous().view(kind)
    codes = rows[:, kind.itemsize :]
    if block == BLOCK_INT8:
        grid.copy_(codes.view(torch.int8))
    else:
        grid[:, : block // 2].copy_(codes & 15)
        grid[:, block // 2 :].copy_(codes >> 4)
        grid.sub_(8)
    grid.mul_(scales.to(out.dtype))


def _topk_cuts(numel: int) -> list[tuple[int, int, int]]:
    """Return (blocks, numbers of each, numbers sent of each) of full blocks and the rest."""
    full, rest = divmod(numel, TOPK_BLOCK)
    cuts = [(full, TOPK_BLOCK), (1, rest)]
    return [(blocks, size, -(-size // TOPK_PART)) for blocks, size in cuts if blocks and size]


def _topk_views(
    row: torch.Tensor, payload: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Pair blocks (blocks, numbers) with their places and values (blocks, sent)."""
    at = byte = 0
    for blocks, size, keep in _topk_cuts(row.numel()):
        fields = payload[byte : byte + 4 * blocks * keep].view(torch.int16).view(blocks, 2 * keep)
        values = fields[:, keep:].view(torch.bfloat16)
        yield row[at : at + blocks * size].view(blocks, size), fields[:, :keep], values
        at, byte = at + blocks * size, byte + 4 * blocks * keep


def _encode_topk(values: torch.Tensor, payload: torch.Tensor) -> None:
    for grid, places, sent in _topk_views(values, payload):
        # Of equal numbers the first; NaN is the largest.
        order = grid.abs().sort(dim=1, descending=True, stable=True).indices
        largest = order[:, : places.shape[1]].sort(dim=1).values
        places.copy_(largest)
        sent.copy_(grid.gather(1, largest))
        sent.masked_fill_(sent.isnan(), float("nan"))


def _decode_topk(payload: torch.Tensor, out: torch.Tensor) -> None:
    out.zero_()
    for grid, places, sent in _topk_views(out, payload):
        grid.scatter_(1, places.long(), sent.to(out.dtype))
