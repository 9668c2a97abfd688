"""Payloads written and read by torch operations, with the layout of `daso.kernels.codecs`."""

from collections.abc import Iterator

import torch

from daso.kernels.codecs import BLOCKS, TOPK_BLOCK, TOPK_PART, Blocks, Codec
from daso.kernels.rows import divide_

TINY = torch.finfo(torch.float32).tiny
LARGEST = {kind: torch.finfo(kind).max for kind in (torch.float32, torch.bfloat16)}


def encode_row(codec: Codec, values: torch.Tensor, payload: torch.Tensor) -> None:
    """Write a row (numel) as bytes (codec.offset(numel),)."""
    if blocks := BLOCKS.get(codec.wire):
        _encode_blocks(values, payload, blocks)
    elif codec.wire == "topk":
        _encode_topk(values, payload)
    else:
        if codec.wire == "fp16":  # the excess over its range stays in the residual
            values = values.clamp(-65504.0, 65504.0)
        room = payload.view(_dtype(codec))
        room.copy_(values)
        if room.dtype in (torch.bfloat16, torch.float16):
            room.masked_fill_(room.isnan(), float("nan"))  # the same NaN on every device


def decode_row(codec: Codec, payload: torch.Tensor, out: torch.Tensor) -> None:
    """Read a row (numel) from bytes (codec.offset(numel),)."""
    if blocks := BLOCKS.get(codec.wire):
        _decode_blocks(payload, out, blocks)
    elif codec.wire == "topk":
        _decode_topk(payload, out)
    else:
        out.copy_(payload.view(_dtype(codec)))


def _dtype(codec: Codec) -> torch.dtype:
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    return names.get(codec.wire, torch.float32)


def _encode_blocks(values: torch.Tensor, payload: torch.Tensor, blocks: Blocks) -> None:
    numel, steps, kind, nbytes = blocks.numel, blocks.steps, blocks.scale, blocks.nbytes
    whole = values.numel() // numel
    if rest := values.numel() - whole * numel:
        last = values.new_zeros(numel)
        last[:rest] = values[whole * numel :]
        room = payload.new_empty(nbytes)
        _encode_blocks(last, room, blocks)
        payload[whole * nbytes :] = room[: payload.numel() - whole * nbytes]
    grid = values[: whole * numel].view(whole, numel)
    rows = payload[: whole * nbytes].view(whole, nbytes)
    largest = grid.abs().amax(1)
    # The largest fp32 numbers exceed bf16: as a scale they would become infinite.
    scales = divide_(largest.clone(), steps).clamp_(max=LARGEST[kind]).to(torch.float32).to(kind)
    finite = largest.isfinite()
    # A block of zeros has scale 0; any divisor gives zeros then.
    divisors = scales.to(values.dtype).clamp(min=TINY)
    inverses = torch.where(finite, divisors.reciprocal(), 0.0)
    scales = torch.where(finite, scales, float("nan"))
    small = torch.mul(grid, inverses.unsqueeze(1))
    if small.dtype == torch.float64:
        small.clamp_(-steps, steps)
    # inf * 0; of a block that is not finite, only the scale is sent
    small.round_().nan_to_num_(0.0)
    rows[:, : kind.itemsize] = scales.unsqueeze(1).view(torch.uint8)
    codes = rows[:, kind.itemsize :]
    if blocks.bits == 8:
        codes.view(torch.int8).copy_(small)
        return
    first, *others = small.add_(blocks.bias).split(blocks.width, 1)
    for index, part in enumerate(others, 1):
        first = torch.add(first, part, alpha=2 ** (index * blocks.bits))
    codes.copy_(first)


def _decode_blocks(payload: torch.Tensor, out: torch.Tensor, blocks: Blocks) -> None:
    numel, kind, nbytes = blocks.numel, blocks.scale, blocks.nbytes
    whole = out.numel() // numel
    if rest := out.numel() - whole * numel:
        room, last = payload.new_zeros(nbytes), out.new_empty(numel)
        room[: payload.numel() - whole * nbytes] = payload[whole * nbytes :]
        _decode_blocks(room, last, blocks)
        out[whole * numel :] = last[:rest]
    grid = out[: whole * numel].view(whole, numel)
    rows = payload[: whole * nbytes].view(whole, nbytes)
    scales = rows[:, : kind.itemsize].contiguous().view(kind)
    codes = rows[:, kind.itemsize :]
    if blocks.bits == 8:
        grid.copy_(codes.view(torch.int8))
    else:
        for index, part in enumerate(grid.split(blocks.width, 1)):
            part.copy_(codes >> index * blocks.bits & (2**blocks.bits - 1))
        grid.sub_(blocks.bias)
    grid.mul_(scales.to(out.dtype))


PLACE_BITS = (1 << 16) - 1  # places are unsigned, and torch computes with signed ones


def _topk_cuts(numel: int) -> list[tuple[int, int, int]]:
    """Return (blocks, numbers per block, numbers sent per block) of full blocks and the rest."""
    full, rest = divmod(numel, TOPK_BLOCK)
    cuts = [(full, TOPK_BLOCK), (1, rest)]
    return [(blocks, size, -(-size // TOPK_PART)) for blocks, size in cuts if blocks and size]


def _topk_views(
    row: torch.Tensor, payload: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield blocks (blocks, numbers) with their indices and values (blocks, sent)."""
    at = byte = 0
    for blocks, size, keep in _topk_cuts(row.numel()):
        fields = payload[byte : byte + 4 * blocks * keep].view(torch.int16).view(blocks, 2 * keep)
        values = fields[:, keep:].view(torch.bfloat16)
        yield row[at : at + blocks * size].view(blocks, size), fields[:, :keep], values
        at, byte = at + blocks * size, byte + 4 * blocks * keep


def _encode_topk(values: torch.Tensor, payload: torch.Tensor) -> None:
    for grid, places, sent in _topk_views(values, payload):
        # The first of equal numbers is taken; NaN is the largest.
        order = grid.abs().sort(dim=1, descending=True, stable=True).indices
        largest = order[:, : places.shape[1]].sort(dim=1).values
        places.copy_(largest)
        sent.copy_(grid.gather(1, largest))
        sent.masked_fill_(sent.isnan(), float("nan"))


def _decode_topk(payload: torch.Tensor, out: torch.Tensor) -> None:
    for grid, places, sent in _topk_views(out, payload):
        blocks, size = grid.shape
        # Places outside a block, of a damaged payload, go to a column that is cut off.
        columns = (places.long() & PLACE_BITS).clamp_(max=size)
        rows = grid.new_zeros(blocks, size + 1).scatter_(1, columns, sent.to(out.dtype))
        grid.copy_(rows[:, :size])
