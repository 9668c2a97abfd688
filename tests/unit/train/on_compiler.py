"""Kernels as devices get them; none need be there; tests/unit/train/test_fused.py starts it."""

import itertools
import re

import pytest
import torch
import triton
from daso.comm.compression import codec_named
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daso.comm.device import triton_kernels as kernels

WIRES = ("fp32", "bf16", "fp16")
SHORT = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int16: "*i16"}


def ptx_of(function, capability, pointers, constants):
    """Compile a kernel for a device that need not be there; return its assembly."""
    names = function.arg_names
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "*fp32") for name in names
    }
    even = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name] not in ("constexpr", "i32")  # a number is not specialised
    }
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=even,
    )
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert made.asm["cubin"]
    return made.asm["ptx"]


def wide_of(ptx, what):
    """Return how many of a kernel's accesses to memory move so many bytes: {16: 4, 4: 1}."""
    found = {}
    for several, bits in re.findall(rf"{what}\.global(?:\.[a-z_0-9:]+?)*?(\.v[24])?\.b(\d+)", ptx):
        nbytes = int(several[2:] or 1) * int(bits) // 8
        found[nbytes] = found.get(nbytes, 0) + 1
    return found


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("wire", WIRES)
def test_packing_compiles_and_moves_16_bytes_at_a_time(wire, capability):
    kind, written = kernels.WIRES[codec_named(wire).dtype]
    short = SHORT[written]
    for aligned, residual, lost in itertools.product((True, False), repeat=3):
        constants = {
            "NUMBER": kernels.NUMBERS[torch.float32],
            "WIRE": kind,
            "RESIDUAL": residual,
            "LOST": lost,
            "ALIGNED": aligned,
            "SIZE": kernels.BLOCK,
        }
        pointers = {"jobs": "*i64", "first": "*i64", "wire": short}
        ptx = ptx_of(kernels._pack, capability, pointers, constants)
        if aligned:
            threads = 128
            each = kernels.BLOCK // threads
            assert wide_of(ptx, "ld")[16] == (2 + residual) * each // 4
            assert set(wide_of(ptx, "st")) <= {16, 8}
        assert "fma" not in ptx, "a product and a sum are rounded apart, as torch's are"


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("wire", WIRES)
def test_taking_in_compiles_and_moves_16_bytes_at_a_time(wire, capability):
    kind, written = kernels.WIRES[codec_named(wire).dtype]
    short = SHORT[written]
    for shown, residual in itertools.product((True, False), repeat=2):
        constants = {
            "WIRE": kind,
            "SHOWN": shown,
            "RESIDUAL": residual,
            "WHOLE": True,
            "SIZE": kernels.BLOCK,
        }
        ptx = ptx_of(kernels._take, capability, {"sent": short, "count": "i32"}, constants)
        each = kernels.BLOCK // 128 // 4
        short_ones = each if codec_named(wire).dtype == torch.float32 else each // 2
        assert wide_of(ptx, "ld")[16] == (2 + (shown and residual)) * each + short_ones
        assert "fma" not in ptx, "a product and a sum are rounded apart, as torch's are"
        assert wide_of(ptx, "st")[16] == (1 + shown) * each
