"""Kernels for what an exchange does to a row on a CUDA device, each in one pass over memory.

Written in Triton, which every torch with CUDA for Linux brings. Torch's own operations do the same
in several passes; `daso.train.deltas.kernel_choice` chooses. No bit differs but of sums.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from daso.comm.compression import EVEN

__all__ = ["BLOCK", "WIRES", "interpreted", "pack", "take", "version"]

BLOCK = 2048  # numbers of a program
BF16, FP16 = tl.constexpr(1), tl.constexpr(2)  # of wires; any other is written as it is
UNIT = tl.constexpr(EVEN)

# Of each type that fp32 is rounded to: how kernels call it, and as what they write it.
WIRES = {
    torch.float32: (0, torch.float32),
    torch.bfloat16: (1, torch.int16),
    torch.float16: (2, torch.float16),
}
NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def version() -> str:
    """Return Triton's version."""
    return str(triton.__version__)


def interpreted() -> bool:
    """Return whether Triton interprets kernels (TRITON_INTERPRET), on the host."""
    return not isinstance(_pack, triton.runtime.JITFunction)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device whichever the thread has; interpreted, kernels run on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def _widened(row, at, mask, WIRE: tl.constexpr):
    """Read numbers of a wire as fp32."""
    if WIRE == BF16:
        bits = tl.load(row + at, mask=mask, other=0).to(tl.int32) << 16
        values = bits.to(tl.float32, bitcast=True)
    else:
        values = tl.load(row + at, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def _rounded(values, WIRE: tl.constexpr):
    """Return fp32 numbers as a wire has them, to the nearest and ties to even, and as it is read.

    bf16 by its bits: interpreted, Triton cuts them off.
    """
    if WIRE == BF16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(values == values, bits, 0x7FC0)
        sent, carried = bits.to(tl.int16), (bits << 16).to(tl.float32, bitcast=True)
    elif WIRE == FP16:
        sent = tl.minimum(tl.maximum(values, -65504.0), 65504.0).to(tl.float16)
        carried = sent.to(tl.float32)
    else:
        sent, carried = values, values
    return sent, carried


@triton.jit
def _pack(
    jobs, reference, residual, lost, wire, first,
    NUMBER: tl.constexpr, WIRE: tl.constexpr, RESIDUAL: tl.constexpr, LOST: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    job = jobs + 4 * tl.program_id(0)
    address, place, there, count = (
        tl.load(job),
        tl.load(job + 1),
        tl.load(job + 2),
        tl.load(job + 3),
    )
    here = address.to(tl.pointer_type(NUMBER))
    if ALIGNED:
        here, place = tl.multiple_of(here, 16), tl.multiple_of(place, UNIT)
        there, count = tl.multiple_of(there, UNIT), tl.multiple_of(count, UNIT)
    at = tl.arange(0, SIZE)
    mask = at < count
    values = tl.load(here + at, mask=mask, other=0.0).to(tl.float32)
    values -= tl.load(reference + (place + at), mask=mask, other=0.0)
    if RESIDUAL:
        values += tl.load(residual + (place + at), mask=mask, other=0.0)
    sent, carried = _rounded(values, WIRE)
    tl.store(wire + (there + at), sent, mask=mask)
    if LOST:
        tl.store(lost + (place + at), values - carried, mask=mask)
    wrong = mask & ((values != values) | (tl.abs(values) == float("inf")))
    lowest = tl.min(tl.where(wrong, at, SIZE), 0)
    if lowest < SIZE:
        tl.atomic_min(first, place + lowest)


@triton.jit(do_not_specialize=["count"])
def _take(
    mean, sent, reference, residual, shown, sums, count,
    WIRE: tl.constexpr, SHOWN: tl.constexpr, RESIDUAL: tl.constexpr, WHOLE: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    numel = count
    if WHOLE:  # told as a product, it is known to be a multiple
        numel = count * UNIT
    at = program.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    mask = at < numel
    mean_delta = tl.load(mean + at, mask=mask, other=0.0)
    apart = mean_delta - _widened(sent, at, mask, WIRE)
    moved = tl.load(reference + at, mask=mask, other=0.0) + mean_delta
    tl.store(reference + at, moved, mask=mask)
    tl.store(sums + 2 * program, tl.sum(apart * apart, 0))
    tl.store(sums + 2 * program + 1, tl.sum(moved * moved, 0))
    if SHOWN:
        if RESIDUAL:
            apart += tl.load(residual + at, mask=mask, other=0.0)
        tl.store(shown + at, apart, mask=mask)


def pack(
    jobs: torch.Tensor,
    number: torch.dtype,
    wire: torch.Tensor,
    reference: torch.Tensor,
    residual: torch.Tensor | None,
    lost: torch.Tensor | None,
    first: torch.Tensor,
    *,
    aligned: bool,
) -> None:
    """Launch: write numbers - reference + residual as a wire has them."""
    kind, written = WIRES[wire.dtype]
    with _on(reference.device):
        _pack[(len(jobs),)](
            jobs,
            reference,
            reference if residual is None else residual,
            reference if lost is None else lost,
            wire.view(written),
            first,
            NUMBER=NUMBERS[number],
            WIRE=kind,
            RESIDUAL=residual is not None,
            LOST=lost is not None,
            ALIGNED=aligned,
            SIZE=BLOCK,
            enable_fp_fusion=False,
        )


def take(
    mean: torch.Tensor,
    sent: torch.Tensor,
    reference: torch.Tensor,
    residual: torch.Tensor | None,
    shown: torch.Tensor | None,
) -> torch.Tensor:
    """Launch: reference <- reference + mean, and shown <- mean - sent + residual."""
    kind, written = WIRES[sent.dtype]
    numel = mean.numel()
    whole, programs = numel % EVEN == 0, -(-numel // BLOCK)
    sums = torch.empty(programs, 2, dtype=torch.float32, device=mean.device)
    with _on(mean.device):
        _take[(programs,)](
            mean,
            sent.view(written),
            reference,
            reference if residual is None else residual,
            reference if shown is None else shown,
            sums,
            numel // EVEN if whole else numel,
            WIRE=kind,
            SHOWN=shown is not None,
            RESIDUAL=residual is not None,
            WHOLE=whole,
            SIZE=BLOCK,
            enable_fp_fusion=False,
        )
    return sums.sum(0)
