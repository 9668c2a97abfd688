"""Device functions of the Triton kernels: tiles of rows, of tensors and of payloads.

A program processes one tile: 1024 numbers as (blocks, numbers per block), whole blocks on every
wire. Formats are numbered as in `daso.kernels.rows.KINDS`, then int8, and the formats whose codes
share bytes, int4 and int2. ``WHOLE``: the tile is full, without masks. Products and sums must not
be contracted: every kernel is launched with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

FORMATS = {"fp32": 0, "bf16": 2, "fp16": 3, "int8": 4, "int4": 5, "int2": 6}
FP32, BF16, FP16, INT8, INT4, INT2 = (tl.constexpr(code) for code in FORMATS.values())
TILE = tl.constexpr(1024)  # `daso.kernels.torch_kernels.SUM_TILE`
MAGNITUDE, INFINITY, NAN = (tl.constexpr(bits) for bits in (0x7FFFFFFF, 0x7F800000, 0x7FC00000))
NAN_BF16, NAN_FP16 = tl.constexpr(0x7FC0), tl.constexpr(0x7E00)
TINY = tl.constexpr(1.1754943508222875e-38)  # `daso.kernels.torch_codecs.TINY`
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)  # `daso.kernels.torch_codecs.LARGEST`
ROUNDS = tl.constexpr(12582912.0)  # added and subtracted, it rounds to integers, half to even


@triton.jit
def places(FORMAT: tl.constexpr):
    """Return the indices of a tile's numbers (blocks, numbers per block)."""
    BLOCK: tl.constexpr = 32 if FORMAT > INT8 else 128
    return tl.arange(0, TILE // BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def read(row, at, mask, WHOLE: tl.constexpr):
    """Load elements of a row; masked elements are 0."""
    return tl.load(row + at) if WHOLE else tl.load(row + at, mask=mask, other=0)


@triton.jit
def pointer(address, ALIGNED: tl.constexpr):
    """Return a pointer to the bytes at an address; ``ALIGNED``: a multiple of 16."""
    memory = address.to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        memory = tl.multiple_of(memory, 16)
    return memory


@triton.jit
def write(row, at, values, mask, WHOLE: tl.constexpr):
    """Store elements of a row."""
    if WHOLE:
        tl.store(row + at, values)
    else:
        tl.store(row + at, values, mask=mask)


@triton.jit
def magnitude(values):
    """Return the bits of |x|, which have the order of the numbers, with infinity and NaN last."""
    return values.to(tl.int32, bitcast=True) & MAGNITUDE


# --- 16-bit numbers ------------------------------------------------------------------------------


@triton.jit
def widened(bits, FORMAT: tl.constexpr):
    """Return 16-bit numbers, given by their bits, as fp32."""
    if FORMAT == BF16:
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def narrowed(values, FORMAT: tl.constexpr):
    """Return the bits of fp32 numbers, rounded half to even; every NaN has the same bits.

    bf16 is rounded explicitly, because the interpreter truncates.
    """
    if FORMAT == BF16:
        bits = values.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(magnitude(values) > INFINITY, NAN_BF16, bits).to(tl.int16)
    else:
        bits = values.to(tl.float16).to(tl.int16, bitcast=True)
        bits = tl.where(magnitude(values) > INFINITY, NAN_FP16, bits).to(tl.int16)
    return bits


@triton.jit
def read_format(tensor, code, at, mask, WHOLE: tl.constexpr):
    """Load elements of a tensor as fp32; ``code``: its format, a number or a constant."""
    if code == FP32:
        values = read(tensor.to(tl.pointer_type(tl.float32)), at, mask, WHOLE)
    elif code == BF16:
        values = widened(read(tensor.to(tl.pointer_type(tl.int16)), at, mask, WHOLE), BF16)
    else:
        values = widened(read(tensor.to(tl.pointer_type(tl.int16)), at, mask, WHOLE), FP16)
    return values


@triton.jit
def write_format(tensor, code, at, values, mask, WHOLE: tl.constexpr):
    """Store fp32 numbers in a tensor, rounded to its format."""
    if code == FP32:
        write(tensor.to(tl.pointer_type(tl.float32)), at, values, mask, WHOLE)
    elif code == BF16:
        bits = narrowed(values, BF16)
        write(tensor.to(tl.pointer_type(tl.int16)), at, bits, mask, WHOLE)
    else:
        bits = narrowed(values, FP16)
        write(tensor.to(tl.pointer_type(tl.int16)), at, bits, mask, WHOLE)


# --- tensors that form a row ---------------------------------------------------------------------
# Their table: addresses, ends in the row (int64 each), formats (int32).


@triton.jit
def passed(ends, number, place):
    """Return the number of ends, of ``number`` sorted ends, up to and including a place."""
    low, high = number * 0, number
    while low < high:
        middle = (low + high) // 2
        if tl.load(ends + middle) <= place:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def start_of(ends, index):
    """Return the start of the part at an index: the end of the previous part."""
    return tl.load(ends + index - 1, mask=index > 0, other=0)


@triton.jit
def format_of(tensors, number, index):
    """Return the format of a tensor."""
    return tl.load((tensors + 2 * number).to(tl.pointer_type(tl.int32)) + index)


@triton.jit
def locate(tensors, number, place, count):
    """Find a tile in its tensors.

    Returns:
        The first tensor of the tile, and the address of the tile's first number in it; whether the
        tile is full, all in this tensor, and aligned to 16 bytes.
    """
    ends = tensors + number
    index = passed(ends, number, place)
    size = tl.where(format_of(tensors, number, index) == FP32, 4, 2)
    address = tl.load(tensors + index) + (place - start_of(ends, index)) * size
    direct = (count == TILE) & (tl.load(ends + index) - place >= TILE) & (address % 16 == 0)
    return index, address, direct


@triton.jit
def collect(tensors, number, index, place, at, count):
    """Return a tile of fp32 numbers from several tensors; ``index``: of the first tensor."""
    ends = tensors + number
    values = tl.zeros_like(at).to(tl.float32)
    first = start_of(ends, index)
    while first < place + count:
        end = tl.load(ends + index)
        within = at + (place - first)
        mask = (at < count) & (within >= 0) & (within < end - first)
        code = format_of(tensors, number, index)
        part = read_format(pointer(tl.load(tensors + index), False), code, within, mask, False)
        values = tl.where(mask, part, values)
        first, index = end, index + 1
    return values


# --- payloads ------------------------------------------------------------------------------------


@triton.jit
def offset(count, FORMAT: tl.constexpr):
    """Return the bytes of ``count`` numbers, as `Codec.offset`."""
    if FORMAT >= INT8:
        BLOCK: tl.constexpr = 32 if FORMAT > INT8 else 128
        HEADER: tl.constexpr = 2 if FORMAT > INT8 else 4
        WIDTH: tl.constexpr = 128 if FORMAT == INT8 else 16 if FORMAT == INT4 else 8
        rest = count % BLOCK
        nbytes = count // BLOCK * (HEADER + WIDTH)
        nbytes += tl.where(rest > 0, HEADER + tl.minimum(rest, WIDTH), 0)
    else:
        nbytes = count * (4 if FORMAT == FP32 else 2)
    return nbytes


@triton.jit
def _encode_blocks(values, payload, at, count, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    BLOCK: tl.constexpr = 32 if FORMAT > INT8 else 128
    HEADER: tl.constexpr = 2 if FORMAT > INT8 else 4
    BITS: tl.constexpr = 8 if FORMAT == INT8 else 4 if FORMAT == INT4 else 2
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    NBYTES: tl.constexpr = HEADER + WIDTH
    STEPS: tl.constexpr = 127.0 if FORMAT == INT8 else 7.0 if FORMAT == INT4 else 1.0
    largest = tl.max(magnitude(values), 1)
    finite = largest < INFINITY
    scales = tl.math.div_rn(largest.to(tl.float32, bitcast=True), STEPS)
    if FORMAT > INT8:  # the largest fp32 numbers exceed bf16, and would become infinite
        scales = widened(narrowed(tl.minimum(scales, LARGEST_BF16), BF16), BF16)
    # A block of zeros has scale 0; any divisor gives zeros then.
    inverses = tl.math.div_rn(1.0, tl.maximum(scales, TINY))
    scales = tl.where(finite, scales.to(tl.int32, bitcast=True), NAN)
    block = tl.arange(0, TILE // BLOCK)
    for byte in tl.static_range(HEADER):
        bits = (scales >> 8 * (4 - HEADER + byte)) & 255
        write(payload + byte, block * NBYTES, bits.to(tl.uint8), block * BLOCK < count, WHOLE)
    small = tl.where(finite[:, None], values * inverses[:, None], 0.0)
    codes = ((small + ROUNDS) - ROUNDS).to(tl.int32)
    if FORMAT > INT8:
        PARTS: tl.constexpr = 8 // BITS
        byte = tl.arange(0, WIDTH)[None, :]
        parts = tl.reshape(codes + (1 << BITS - 1), (TILE // BLOCK, PARTS, WIDTH))
        shared = tl.sum(parts << BITS * tl.arange(0, PARTS)[None, :, None], 1).to(tl.uint8)
        target = block[:, None] * NBYTES + HEADER + byte
        write(payload, target, shared, block[:, None] * BLOCK + byte < count, WHOLE)
    else:
        target = at + HEADER * (1 + at // BLOCK)
        write(payload, target, codes.to(tl.uint8), at < count, WHOLE)
    return codes.to(tl.float32) * scales.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def encode_tile(values, payload, at, count, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Write a tile to its bytes of a payload; return the decoded numbers.

    Also writes the zeros that fill the payload's last word. Numbers beyond ``count`` must be 0.
    """
    if FORMAT >= INT8:
        carried = _encode_blocks(values, payload, at, count, FORMAT, WHOLE)
    elif FORMAT == FP32:
        write(payload.to(tl.pointer_type(tl.float32)), at, values, at < count, WHOLE)
        carried = values
    else:
        bounded = values
        if FORMAT == FP16:  # the excess over its range stays in the residual
            bounded = tl.where(magnitude(values) > INFINITY, values, tl.minimum(values, 65504.0))
            bounded = tl.where(bounded < -65504.0, -65504.0, bounded)
        bits = narrowed(bounded, FORMAT)
        write(payload.to(tl.pointer_type(tl.int16)), at, bits, at < count, WHOLE)
        carried = widened(bits, FORMAT)
    if not WHOLE:
        used, byte = offset(count, FORMAT), tl.arange(0, 4)
        zeros = tl.zeros((4,), tl.uint8)
        tl.store(payload + used + byte, zeros, mask=byte < (4 - used % 4) % 4)
    return carried


@triton.jit
def _decode_blocks(payload, at, count, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    BLOCK: tl.constexpr = 32 if FORMAT > INT8 else 128
    HEADER: tl.constexpr = 2 if FORMAT > INT8 else 4
    BITS: tl.constexpr = 8 if FORMAT == INT8 else 4 if FORMAT == INT4 else 2
    WIDTH: tl.constexpr = BLOCK * BITS // 8
    NBYTES: tl.constexpr = HEADER + WIDTH
    block = tl.arange(0, TILE // BLOCK)
    scales = block * 0
    for byte in tl.static_range(HEADER):
        bits = read(payload + byte, block * NBYTES, block * BLOCK < count, WHOLE)
        scales |= bits.to(tl.int32) << 8 * (4 - HEADER + byte)
    if FORMAT > INT8:
        number = tl.arange(0, BLOCK)[None, :]
        source = block[:, None] * NBYTES + HEADER + number % WIDTH
        shared = read(payload, source, at < count, WHOLE).to(tl.int32)
        codes = (shared >> number // WIDTH * BITS & (1 << BITS) - 1) - (1 << BITS - 1)
    else:
        source = at + HEADER * (1 + at // BLOCK)
        codes = read(payload, source, at < count, WHOLE).to(tl.int8, bitcast=True)
    values = codes.to(tl.float32) * scales.to(tl.float32, bitcast=True)[:, None]
    return tl.where(at < count, values, 0.0)


@triton.jit
def decode_tile(payload, at, count, FORMAT: tl.constexpr, WHOLE: tl.constexpr):
    """Read a tile from its bytes of a payload; numbers beyond ``count`` are 0."""
    if FORMAT >= INT8:
        values = _decode_blocks(payload, at, count, FORMAT, WHOLE)
    else:
        values = read_format(payload, FORMAT, at, at < count, WHOLE)
    return values


@triton.jit
def encode_with_errors(
    values, errors, payload, at, count, FORMAT: tl.constexpr, GRADIENTS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode values + errors; return the errors of this payload.

    With ``GRADIENTS``, a zero is not sent and keeps its error; errors that are not finite are
    dropped.
    """
    if GRADIENTS:
        idle = values == 0
        values = tl.where(idle, 0.0, values + errors)
        lost = values - encode_tile(values, payload, at, count, FORMAT, WHOLE)
        lost = tl.where(magnitude(lost) < INFINITY, lost, 0.0)
        lost += tl.where(idle, errors, 0.0)
    else:
        values += errors
        lost = values - encode_tile(values, payload, at, count, FORMAT, WHOLE)
    return lost


@triton.jit
def _term(
    versions, number, index, byte, at, count,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    payload = pointer(tl.load(versions + index), ALIGNED) + byte
    values = decode_tile(payload, at, count, FORMAT, WHOLE)
    return values * tl.load(versions + number + index).to(tl.float32)


@triton.jit
def mean_tile(
    versions, number, total, byte, at, count,
    FORMAT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Return the weighted mean of a tile of ``number`` payloads, added in their order.

    ``versions``: their addresses, then their weights; ``byte``: offset of the tile in each.
    """
    mean = _term(versions, number, 0, byte, at, count, FORMAT, ALIGNED, WHOLE)
    for index in range(1, number):
        mean += _term(versions, number, index, byte, at, count, FORMAT, ALIGNED, WHOLE)
    return tl.math.div_rn(mean, total)


@triton.jit
def squares(values):
    """Return the sum of the squares of a tile, folded in halves, which fixes the order."""
    folded = tl.reshape(values * values, (2, 2, 2, 2, 2, 2, 2, 2, 2, 2))
    for _ in tl.static_range(10):
        folded = tl.sum(folded, 0)
    return folded
