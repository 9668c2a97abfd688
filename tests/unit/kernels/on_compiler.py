"""Triton kernels as GPUs get them; no GPU is needed; test_triton.py starts it."""

import itertools
import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from daso.kernels import triton_programs as programs
from daso.kernels.triton_codecs import FORMATS, TILE

TYPES = {
    **dict.fromkeys(("tensors", "spans", "versions", "rows", "first"), "*i64"),
    **dict.fromkeys(("tensor_count", "span_count", "number", "to_number"), "i32"),
    **dict.fromkeys(("total", "divisor", "less", "pull"), "fp32"),
    **dict.fromkeys(("payload", "sent"), "*u8"),
    "numel": "i64",
}
EACH = TILE.value // 128 // 4  # accesses of 16 bytes by a thread, for a tile of fp32
# The same of a payload; codes of int8, int4 and int2 are bytes.
PAYLOAD = {"fp32": EACH, "bf16": EACH // 2, "fp16": EACH // 2, "int8": 0, "int4": 0, "int2": 0}


def on_gpus(names, cases):
    """Return a marker: every case for compute capability 9.0, and the last for 8.0 too."""
    cases = [one if isinstance(one, tuple) else (one,) for one in cases]
    every = [(90, *case) for case in cases]
    return pytest.mark.parametrize(["capability", *names], [*every, (80, *cases[-1])])


def compiled(function, capability, constants, **types):
    """Compile a kernel for a GPU that need not be there; return its assembly."""
    names, types = function.arg_names, {**TYPES, **types}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(names)
        if signature[name].startswith("*")
    }
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    target = GPUTarget("cuda", capability, 32)
    kernel = triton.compile(source, target=target, options={"enable_fp_fusion": False})
    assert kernel.asm["cubin"]
    ptx = kernel.asm["ptx"]
    assert "fma" not in ptx, "products and sums must be rounded apart"
    assert ".ftz" not in ptx, "denormal numbers must be kept"
    assert not re.search(r"div\.(full|approx)|rcp", ptx), "quotients must be rounded correctly"
    return ptx


def wide(ptx, access):
    """Return how many loads or stores of 16 bytes a kernel has."""
    return len(re.findall(rf"{access}\.global[a-z0-9.:_]*\.v4\.b32", ptx))


@on_gpus(["wire", "gradients"], itertools.product(FORMATS, [True, False]))
def test_encode(capability, wire, gradients):
    constants = {"FORMAT": FORMATS[wire], "GRADIENTS": gradients, "ALIGNED": True}
    if gradients:
        constants |= dict.fromkeys(("reference", "rounding", "first", "distances"))
    ptx = compiled(programs.encode_row, capability, constants)
    assert ("atom" in ptx) == (not gradients)
    # The rows, and tensors of fp32 or 16 bits.
    assert wide(ptx, "ld") >= (1 if gradients else 2) * EACH + EACH + EACH // 2
    assert wide(ptx, "st") >= EACH


@on_gpus([], [()])
def test_encode_spans_that_begin_anywhere(capability):
    constants = {"FORMAT": FORMATS["int4"], "GRADIENTS": False, "ALIGNED": False}
    ptx = compiled(programs.encode_row, capability, constants)
    assert wide(ptx, "st") == 0


@on_gpus(["wire"], FORMATS)
def test_reduce(capability, wire):
    constants = {"FORMAT": FORMATS[wire], "GRADIENTS": True, "ALIGNED": True}
    ptx = compiled(programs.reduce_row, capability, constants)
    # The carry, the first payload, and those after it.
    assert wide(ptx, "ld") == EACH + 2 * PAYLOAD[wire]
    assert wide(ptx, "st") == 2 * EACH + PAYLOAD[wire]
    assert "div.rn" in ptx


@on_gpus(
    ["wire", "absent", "reads", "writes"],
    [
        *((wire, ("negated",), 2, 4) for wire in FORMATS),
        ("bf16", ("shown", "rounding", "others"), 0, 1),
        ("bf16", ("residual", "rounding"), 1, 3),
        ("int4", ("negated", "rounding"), 2, 3),
    ],
)
def test_accept(capability, wire, absent, reads, writes):
    constants = {"FORMAT": FORMATS[wire], "ALIGNED": True, **dict.fromkeys(absent)}
    ptx = compiled(programs.accept_row, capability, constants)
    assert wide(ptx, "ld") == reads * EACH + 3 * PAYLOAD[wire]
    assert wide(ptx, "st") == writes * EACH
    assert "div.rn" in ptx


@on_gpus(["code"], [0, 2, 3])
def test_mean_of_rows(capability, code):
    constants = {"FORMAT": code, "WRITTEN": code, "ALIGNED": True}
    ptx = compiled(programs.mean_of_rows, capability, constants, total="*fp32")
    accesses = EACH if code == 0 else EACH // 2
    assert wide(ptx, "ld") == 2 * accesses
    assert wide(ptx, "st") == EACH + accesses


@on_gpus(["how"], [programs.COPY, programs.ADD, programs.PULL])
def test_merge(capability, how):
    ptx = compiled(programs.merge_row, capability, {"HOW": how.value}, row="*fp32")
    # The row, and tensors of fp32 or 16 bits.
    assert wide(ptx, "ld") >= EACH + (0 if how is programs.COPY else EACH + EACH // 2)
    assert wide(ptx, "st") >= EACH + EACH // 2
