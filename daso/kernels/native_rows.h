/* Functions of native.c for rows of type ROW. WORD, SIGNED: integers of the same width. */

#define WIDE (sizeof(ROW) == 8)
#define ROW_INF (WIDE ? (WORD)0x7FF0000000000000ull : (WORD)0x7F800000u)
#define ROW_ABS (WIDE ? (WORD)0x7FFFFFFFFFFFFFFFull : (WORD)0x7FFFFFFFu)

typedef ROW NAME(any) __attribute__((aligned(1), may_alias));
#define ANY NAME(any)

static inline WORD NAME(word)(ROW x) { WORD u; memcpy(&u, &x, sizeof u); return u; }
static inline ROW NAME(number)(WORD u) { ROW x; memcpy(&x, &u, sizeof x); return x; }

/* Round to the nearest integer, half to even; |x| is far below 2**22. */
static inline int32_t NAME(nearest)(ROW x)
{
#define MAGIC ((ROW)(WIDE ? 6755399441055744.0 : 12582912.0))
    return (int32_t)(NAME(word)(x + MAGIC) - NAME(word)(MAGIC));
#undef MAGIC
}

/* --- tensors of any type ---------------------------------------------------------------------- */

static void NAME(load)(int kind, const char *from, int64_t n, ANY *restrict to)
{
    if (kind == OF_FP32) {
        const f32 *x = (const f32 *)from;
        for (int64_t i = 0; i < n; i++) to[i] = (ROW)x[i];
    } else if (kind == OF_FP64) {
        const f64 *x = (const f64 *)from;
        for (int64_t i = 0; i < n; i++) to[i] = (ROW)x[i];
    } else if (kind == OF_BF16) {
        const u16 *x = (const u16 *)from;
        for (int64_t i = 0; i < n; i++) to[i] = (ROW)from_bf16(x[i]);
    } else if (!WIDE) {
        from_fp16s((const u16 *)from, n, (f32 *)to);
    } else {
        const u16 *x = (const u16 *)from;
        for (int64_t i = 0; i < n; i++) to[i] = (ROW)from_fp16(x[i]);
    }
}

static void NAME(store)(int kind, const ROW *restrict from, int64_t n, char *to)
{
    if (kind == OF_FP32) {
        f32 *x = (f32 *)to;
        for (int64_t i = 0; i < n; i++) x[i] = (float)from[i];
    } else if (kind == OF_FP64) {
        f64 *x = (f64 *)to;
        for (int64_t i = 0; i < n; i++) x[i] = (double)from[i];
    } else if (kind == OF_BF16) {
        u16 *x = (u16 *)to;
        for (int64_t i = 0; i < n; i++) x[i] = to_bf16((float)from[i]);
    } else if (!WIDE) {
        to_fp16s((const float *)from, n, (u16 *)to);
    } else {
        u16 *x = (u16 *)to;
        for (int64_t i = 0; i < n; i++) x[i] = to_fp16((float)from[i]);
    }
}

#define SIZE_OF(kind) ((kind) == OF_FP64 ? 8 : (kind) == OF_FP32 ? 4 : 2)

/* --- payloads --------------------------------------------------------------------------------- */

/* Bytes of n numbers that start a block: whole blocks, or the end of a payload. */
static int64_t NAME(nbytes)(int wire, int64_t n)
{
    int64_t rest;
    switch (wire) {
    case FP64: return 8 * n;
    case FP32: return 4 * n;
    case BF16: case FP16: return 2 * n;
    case INT8: rest = n % BLOCK8; return n / BLOCK8 * BYTES8 + (rest ? 4 + rest : 0);
    case INT4: case INT2: rest = n % PACKED;
        return n / PACKED * BYTES(BITS(wire)) + (rest ? 2 + least(rest, WIDTH(BITS(wire))) : 0);
    default: rest = n % TOPK_BLOCK;
        return 4 * (n / TOPK_BLOCK * (TOPK_BLOCK / TOPK_PART) + (rest + TOPK_PART - 1) / TOPK_PART);
    }
}

/* Compute the scales of blocks, and their reciprocals, from the bits of the largest magnitudes. */
static void NAME(scale)(const WORD *restrict largest, int blocks, int steps, int is_bf16,
                        float *restrict scales, ROW *restrict inverses, int32_t *restrict masks)
{
    /* The largest fp32 numbers are beyond bf16: as a scale they would become infinite. */
    const float most = is_bf16 ? LARGEST_BF16 : LARGEST_FP32;
    for (int b = 0; b < blocks; b++) {
        ROW exact = NAME(number)(largest[b]) / (ROW)steps;
        float s = (float)exact;
        s = exact > most ? most : s;
        s = is_bf16 ? from_bf16(to_bf16(s)) : s;
        int finite = largest[b] < ROW_INF;
        ROW divisor = s < SMALLEST ? (ROW)SMALLEST : (ROW)s;
        inverses[b] = finite ? 1 / divisor : 0;
        scales[b] = finite ? s : float_of(NAN32);
        masks[b] = finite ? -1 : 0;
    }
}

static inline ROW NAME(bounded)(ROW x, int steps)
{
    if (WIDE) { x = x > steps ? (ROW)steps : x; x = x < -steps ? (ROW)-steps : x; }
    return x;
}

static void NAME(encode_int8)(const ROW *restrict v, int64_t n, uint8_t *restrict out)
{
    enum { BLOCKS = TILE / BLOCK8 };
    WORD largest[BLOCKS]; float scales[BLOCKS]; ROW inverses[BLOCKS]; int32_t masks[BLOCKS];
    const int blocks = (int)(n / BLOCK8);
    for (int b = 0; b < blocks; b++) {
        SIGNED m = 0;
        for (int i = 0; i < BLOCK8; i++) {
            SIGNED a = (SIGNED)(NAME(word)(v[b * BLOCK8 + i]) & ROW_ABS);
            m = a > m ? a : m;
        }
        largest[b] = (WORD)m;
    }
    NAME(scale)(largest, blocks, 127, 0, scales, inverses, masks);
    for (int b = 0; b < blocks; b++) {
        const ROW *restrict x = v + b * BLOCK8;
        const ROW inverse = inverses[b];
        const int32_t mask = masks[b];
        uint8_t *restrict to = out + b * BYTES8;
        memcpy(to, scales + b, 4);
        for (int i = 0; i < BLOCK8; i++)
            to[4 + i] = (uint8_t)(NAME(nearest)(NAME(bounded)(x[i] * inverse, 127)) & mask);
    }
}

EXPANDED void NAME(encode_packed)(const ROW *restrict v, int64_t n, uint8_t *restrict out,
                                  const int bits)
{
    enum { BLOCKS = TILE / PACKED };
    WORD largest[BLOCKS]; float scales[BLOCKS]; ROW inverses[BLOCKS]; int32_t masks[BLOCKS];
    uint8_t codes[TILE];
    const int blocks = (int)(n / PACKED);
    for (int b = 0; b < blocks; b++) {
        SIGNED m = 0;
        for (int i = 0; i < PACKED; i++) {
            SIGNED a = (SIGNED)(NAME(word)(v[b * PACKED + i]) & ROW_ABS);
            m = a > m ? a : m;
        }
        largest[b] = (WORD)m;
    }
    NAME(scale)(largest, blocks, STEPS(bits), 1, scales, inverses, masks);
    for (int b = 0; b < blocks; b++) {
        const ROW *restrict x = v + b * PACKED;
        uint8_t *restrict to = codes + b * PACKED;
        const ROW inverse = inverses[b];
        const int32_t mask = masks[b];
        for (int i = 0; i < PACKED; i++) {
            const ROW small = NAME(bounded)(x[i] * inverse, STEPS(bits));
            to[i] = (uint8_t)((NAME(nearest)(small) & mask) + BIAS(bits));
        }
    }
    for (int b = 0; b < blocks; b++) {
        const uint8_t *restrict from = codes + b * PACKED;
        uint8_t *restrict to = out + b * BYTES(bits);
        uint16_t h = (uint16_t)(bits_of(scales[b]) >> 16);
        memcpy(to, &h, 2);
        for (int i = 0; i < WIDTH(bits); i += 8) {
            uint64_t shared = 0, part;
            for (int k = 0; k < 8 / bits; k++) {
                memcpy(&part, from + i + k * WIDTH(bits), 8);
                shared |= part << (k * bits);   /* no byte's bits reach the next byte */
            }
            memcpy(to + 2 + i, &shared, 8);
        }
    }
}

static void NAME(decode_int8)(const uint8_t *restrict in, int64_t blocks, ROW *restrict out)
{
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *restrict from = in + b * BYTES8;
        float s; memcpy(&s, from, 4);
        const ROW scale = (ROW)s;
        for (int i = 0; i < BLOCK8; i++)
            out[b * BLOCK8 + i] = (ROW)(int32_t)(int8_t)from[4 + i] * scale;
    }
}

EXPANDED void NAME(decode_packed)(const uint8_t *restrict in, int64_t blocks, ROW *restrict out,
                                  const int bits)
{
    uint8_t codes[TILE];
    ROW scales[TILE / PACKED];
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *restrict from = in + b * BYTES(bits);
        uint8_t *restrict to = codes + b * PACKED;
        uint16_t h; memcpy(&h, from, 2);
        scales[b] = (ROW)from_bf16(h);
        for (int i = 0; i < WIDTH(bits); i += 8) {
            uint64_t shared, part;
            memcpy(&shared, from + 2 + i, 8);
            for (int k = 0; k < 8 / bits; k++) {
                part = shared >> (k * bits) & EACH((1 << bits) - 1);
                memcpy(to + i + k * WIDTH(bits), &part, 8);
            }
        }
    }
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < PACKED; i++)
            out[b * PACKED + i] = (ROW)(int8_t)(codes[b * PACKED + i] - BIAS(bits)) * scales[b];
}

static void NAME(encode_blocks)(int wire, const ROW *restrict v, int64_t n, uint8_t *restrict out)
{
    if (wire == INT8) NAME(encode_int8)(v, n, out);
    else if (wire == INT4) NAME(encode_packed)(v, n, out, 4);
    else NAME(encode_packed)(v, n, out, 2);
}

static void NAME(decode_blocks)(int wire, const uint8_t *restrict in, int64_t blocks,
                                ROW *restrict out)
{
    if (wire == INT8) NAME(decode_int8)(in, blocks, out);
    else if (wire == INT4) NAME(decode_packed)(in, blocks, out, 4);
    else NAME(decode_packed)(in, blocks, out, 2);
}

/* Encode the largest magnitudes of a block, in the order of their places; ties: first wins. */
static void NAME(encode_topk)(const ROW *restrict v, int64_t n, uint8_t *restrict out)
{
    WORD keys[TOPK_BLOCK];
    const int64_t keep = (n + TOPK_PART - 1) / TOPK_PART;
    for (int64_t i = 0; i < n; i++) {
        WORD a = NAME(word)(v[i]) & ROW_ABS;
        keys[i] = a > ROW_INF ? ROW_INF + 1 : a;   /* NaN sorts as the largest */
    }
    WORD threshold = 0;   /* largest key that at least `keep` numbers reach */
    for (WORD bit = WIDE ? (WORD)1 << (8 * sizeof(WORD) - 2) : (WORD)1 << 30; bit; bit >>= 1) {
        const WORD tried = threshold | bit;
        SIGNED count = 0;
        for (int64_t i = 0; i < n; i++)   /* the sign bit: faster than comparing */
            count += (SIGNED)((tried - 1 - keys[i]) >> (8 * sizeof(WORD) - 1));
        if (count >= keep) threshold = tried;
    }
    int64_t above = 0;
    for (int64_t i = 0; i < n; i++) above += keys[i] > threshold;
    int64_t equal = keep - above, at = 0;
    u16 *places = (u16 *)out, *values = (u16 *)(out + 2 * keep);
    for (int64_t i = 0; i < n && at < keep; i++) {
        if (keys[i] < threshold) continue;
        if (keys[i] == threshold && equal-- <= 0) continue;
        places[at] = (uint16_t)i;
        values[at++] = to_bf16((float)v[i]);
    }
}

static void NAME(decode_topk)(const uint8_t *restrict in, int64_t n, ROW *restrict out)
{
    const int64_t keep = (n + TOPK_PART - 1) / TOPK_PART;
    const u16 *places = (const u16 *)in, *values = (const u16 *)(in + 2 * keep);
    memset(out, 0, (size_t)n * sizeof(ROW));
    for (int64_t i = 0; i < keep; i++)
        if (places[i] < n) out[places[i]] = (ROW)from_bf16(values[i]);
}

/* Encode a tile. */
static void NAME(encode_tile)(int wire, const ROW *restrict v, int64_t n, uint8_t *out)
{
    int64_t rest;
    switch (wire) {
    case FP32: NAME(store)(OF_FP32, v, n, (char *)out); break;
    case FP64: NAME(store)(OF_FP64, v, n, (char *)out); break;
    case BF16: NAME(store)(OF_BF16, v, n, (char *)out); break;
    case FP16: {
        ROW bounded[TILE];   /* the residual keeps what exceeds the range */
        for (int64_t i = 0; i < n; i++) {
            ROW a = v[i] > (ROW)65504 ? (ROW)65504 : v[i];
            bounded[i] = a < (ROW)-65504 ? (ROW)-65504 : a;
        }
        NAME(store)(OF_FP16, bounded, n, (char *)out);
        break;
    }
    case INT8: case INT4: case INT2: {
        const int block = wire == INT8 ? BLOCK8 : PACKED;
        rest = n % block;
        NAME(encode_blocks)(wire, v, n - rest, out);
        if (rest) {
            ROW last[BLOCK8] = {0};
            uint8_t bytes[BYTES8];
            memcpy(last, v + n - rest, (size_t)rest * sizeof(ROW));
            NAME(encode_blocks)(wire, last, block, bytes);
            memcpy(out + NAME(nbytes)(wire, n - rest), bytes, (size_t)NAME(nbytes)(wire, rest));
        }
        break;
    }
    default: NAME(encode_topk)(v, n, out);
    }
}

/* Decode a tile. */
static void NAME(decode_tile)(int wire, const uint8_t *in, int64_t n, ROW *restrict out)
{
    int64_t rest;
    switch (wire) {
    case FP32: NAME(load)(OF_FP32, (const char *)in, n, (ANY *)out); break;
    case FP64: NAME(load)(OF_FP64, (const char *)in, n, (ANY *)out); break;
    case BF16: NAME(load)(OF_BF16, (const char *)in, n, (ANY *)out); break;
    case FP16: NAME(load)(OF_FP16, (const char *)in, n, (ANY *)out); break;
    case INT8: case INT4: case INT2: {
        const int block = wire == INT8 ? BLOCK8 : PACKED;
        rest = n % block;
        NAME(decode_blocks)(wire, in, n / block, out);
        if (rest) {
            ROW last[BLOCK8];
            uint8_t bytes[BYTES8] = {0};
            memcpy(bytes, in + NAME(nbytes)(wire, n - rest), (size_t)NAME(nbytes)(wire, rest));
            NAME(decode_blocks)(wire, bytes, 1, last);
            memcpy(out + n - rest, last, (size_t)rest * sizeof(ROW));
        }
        break;
    }
    default: NAME(decode_topk)(in, n, out);
    }
}

/* --- sums ------------------------------------------------------------------------------------- */

/* Add the squares of numbers to a sum: each tile is folded in halves, of which 16 columns stay
   apart until the last four. FOLD(k, d): the sum of every d-th row of 16 numbers from row k on, in
   the order of folding, so that sums stay in registers. */
typedef ROW NAME(columns) __attribute__((vector_size(16 * sizeof(ROW))));

static inline NAME(columns) NAME(square)(const ANY *x)
{
    NAME(columns) row;
    memcpy(&row, x, sizeof row);
    return row * row;
}

#define FOLD32(k) (NAME(square)(x + 16 * (k)) + NAME(square)(x + 16 * ((k) + 32)))
#define FOLD16(k) (FOLD32(k) + FOLD32((k) + 16))
#define FOLD8(k) (FOLD16(k) + FOLD16((k) + 8))
#define FOLD4(k) (FOLD8(k) + FOLD8((k) + 4))
#define FOLD2(k) (FOLD4(k) + FOLD4((k) + 2))

static void NAME(add_squares)(const ANY *restrict values, int64_t n, double *sum)
{
    for (int64_t at = 0; at < n; at += TILE) {
        const ANY *x = values + at;
        ANY last[TILE];
        if (n - at < TILE) {
            memset(last, 0, sizeof last);
            memcpy(last, x, (size_t)(n - at) * sizeof(ROW));
            x = last;
        }
        NAME(columns) folded = FOLD2(0) + FOLD2(1);
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) folded[i] += folded[i + width];
        *sum += (double)folded[0];
    }
}

#undef FOLD32
#undef FOLD16
#undef FOLD8
#undef FOLD4
#undef FOLD2

/* v = values - reference + residual, skipping null rows; return whether all are finite. */
static int NAME(combine)(const ANY *restrict values, int64_t n, const ANY *restrict reference,
                         const ANY *restrict residual, ROW *restrict v)
{
    WORD wrong = 0;   /* highest bit: some number is not finite */
#define CHECKED(i, x) { v[i] = x; wrong |= (NAME(word)(v[i]) & ROW_ABS) + (ROW_ABS + 1 - ROW_INF); }
    if (reference && residual)
        for (int64_t i = 0; i < n; i++) CHECKED(i, values[i] - reference[i] + residual[i])
    else if (reference)
        for (int64_t i = 0; i < n; i++) CHECKED(i, values[i] - reference[i])
    else if (residual)
        for (int64_t i = 0; i < n; i++) CHECKED(i, values[i] + residual[i])
    else
        for (int64_t i = 0; i < n; i++) CHECKED(i, values[i])
#undef CHECKED
    return !(wrong & ~ROW_ABS);
}

static void NAME(divide)(ROW *restrict x, int64_t n, double divisor)
{
    const ROW by = (ROW)divisor, inverse = (ROW)exact_inverse(divisor);
    if (inverse != 0) for (int64_t i = 0; i < n; i++) x[i] *= inverse;
    else for (int64_t i = 0; i < n; i++) x[i] /= by;
}

/* Compute the weighted mean of versions of a tile, added in order. */
static void NAME(mean_tile)(int wire, const uint8_t *const *versions, int64_t at,
                            const double *weights, int64_t count, double total, int64_t n,
                            ROW *restrict mean, ROW *restrict room)
{
    const int64_t offset = NAME(nbytes)(wire, at);
    const ROW inverse = (ROW)exact_inverse(total), first = (ROW)weights[0];
    NAME(decode_tile)(wire, versions[0] + offset, n, mean);
    if (first != 1)
        for (int64_t i = 0; i < n; i++) mean[i] *= first;
    for (int64_t k = 1; k < count; k++) {
        /* Multiplying by 1 changes no bits. */
        const ROW weight = (ROW)weights[k], factor = k + 1 == count && inverse != 0 ? inverse : 1;
        NAME(decode_tile)(wire, versions[k] + offset, n, room);
        for (int64_t i = 0; i < n; i++) mean[i] = (mean[i] + room[i] * weight) * factor;
    }
    if (total != 1 && (count == 1 || inverse == 0)) NAME(divide)(mean, n, total);
}

/* Encode v + kept, and store the rounding error in kept. With gradients, a zero sends nothing and
   leaves its kept number unchanged, and errors that are not finite are dropped. */
static void NAME(encode_kept)(int wire, ROW *restrict v, int64_t n, ANY *restrict kept,
                              int gradients, uint8_t *payload, ROW *restrict room)
{
    if (gradients)
        for (int64_t i = 0; i < n; i++) {
            const ROW x = v[i], k = kept[i];
            const WORD idle = (WORD)0 - (WORD)(x == 0);
            kept[i] = NAME(number)(NAME(word)(k) & idle);
            v[i] = NAME(number)(NAME(word)(x + k) & ~idle);
        }
    else
        for (int64_t i = 0; i < n; i++) v[i] += kept[i];
    NAME(encode_tile)(wire, v, n, payload);
    NAME(decode_tile)(wire, payload, n, room);
    if (gradients)
        for (int64_t i = 0; i < n; i++) {
            const WORD lost = NAME(word)(v[i] - room[i]);
            const WORD finite = (WORD)0 - (WORD)((lost & ROW_ABS) < ROW_INF);
            kept[i] = NAME(number)(lost & finite) + kept[i];
        }
    else
        for (int64_t i = 0; i < n; i++) kept[i] = v[i] - room[i];
}

/* --- functions of the library ----------------------------------------------------------------- */

/* Numbers per pass. */
#define STEP(wire, most) ((wire) == TOPK ? TOPK_BLOCK : (most))

/* Copy numbers of concatenated tensors; ends: end of each. Return the last segment read. */
static int64_t NAME(collect)(int64_t at, int64_t n, int64_t segment, const char *const *tensors,
                             const int32_t *kinds, const int64_t *ends, ANY *restrict to)
{
    segment = seek(at, segment, ends);
    for (int64_t done = 0; done < n; segment++) {
        const int64_t first = segment ? ends[segment - 1] : 0;
        const int64_t some = least(ends[segment] - at - done, n - done);
        if (some <= 0) continue;
        const char *from = tensors[segment] + (at + done - first) * SIZE_OF(kinds[segment]);
        NAME(load)(kinds[segment], from, some, to + done);
        done += some;
    }
    return segment - 1;
}

/* Return the address of numbers: in a tensor of the row's type, or collected in `room`. */
static const ANY *NAME(find)(int64_t at, int64_t n, int64_t *segment, const char *const *tensors,
                             const int32_t *kinds, const int64_t *ends, ROW *room)
{
    const int64_t k = *segment = seek(at, *segment, ends);
    if (kinds[k] == OF_ROW && at + n <= ends[k])
        return (const ANY *)tensors[k] + (at - (k ? ends[k - 1] : 0));
    *segment = NAME(collect)(at, n, k, tensors, kinds, ends, (ANY *)room);
    return (const ANY *)room;
}

/* Encode spans (start, stop) of a row into consecutive payloads, each padded to whole words.

   values - reference + residual; rounding: what the wire lost. gradients: as encode_kept, with
   residual in the place of both. first: lowered to the first number that is not finite.
   fingerprint: receives the sum of the reference's words; spans must cover it. */
void NAME(daso_encode)(int32_t wire, int64_t count, const int64_t *spans,
                       const char *const *tensors, const int32_t *kinds, const int64_t *ends,
                       const ROW *reference, ROW *residual, ROW *rounding, int32_t gradients,
                       uint8_t *payload, int64_t *first, double *distance, int64_t *fingerprint)
{
    enum { WORDS = sizeof(ROW) / 4 };   /* of a number */
    ROW v[MOST], room[MOST];
    uint32_t sum = 0;
    const int64_t step = STEP(wire, distance ? TILE : PIECE);
    int64_t segment = 0;
    for (int64_t span = 0; span < count; span++) {
        const int64_t start = spans[2 * span], stop = spans[2 * span + 1];
        uint8_t *to = payload;
        for (int64_t at = start; at < stop; at += step) {
            const int64_t n = least(step, stop - at);
            const ANY *x = NAME(find)(at, n, &segment, tensors, kinds, ends, room);
            if (gradients) {
                memcpy(v, x, (size_t)n * sizeof(ROW));
                NAME(encode_kept)(wire, v, n, (ANY *)(residual + at), 1, to, room);
                to += NAME(nbytes)(wire, n);
                continue;
            }
            const int finite = NAME(combine)(
                x, n, reference ? (const ANY *)(reference + at) : 0,
                residual ? (const ANY *)(residual + at) : 0, v);
            if (fingerprint)
                sum += words_sum((const u32 *)(reference + at), n * WORDS, at * WORDS);
            if (first && !finite)
                for (int64_t i = 0; i < n; i++)
                    if ((NAME(word)(v[i]) & ROW_ABS) >= ROW_INF) {
                        *first = least(*first, at + i);
                        break;
                    }
            NAME(encode_tile)(wire, v, n, to);
            if (rounding || distance) {
                ANY *lost = rounding ? (ANY *)(rounding + at) : (ANY *)v;
                NAME(decode_tile)(wire, to, n, room);
                for (int64_t i = 0; i < n; i++) lost[i] = v[i] - room[i];
                if (distance) NAME(add_squares)(lost, n, distance);
            }
            to += NAME(nbytes)(wire, n);
        }
        const int64_t used = NAME(nbytes)(wire, stop - start), whole = (used + 3) / 4 * 4;
        if (stop > start) memset(payload + used, 0, (size_t)(whole - used));
        payload += stop > start ? whole : 0;
    }
    if (fingerprint) *fingerprint = sum;
}

/* Compute the weighted mean of payloads of the same numbers, as a payload, a row, or both.

   carry: what was rounded away of means before, added and kept. */
void NAME(daso_reduce)(int32_t wire, int64_t numel, int64_t count, const uint8_t *const *versions,
                       const double *weights, double total, ROW *carry, int32_t gradients,
                       uint8_t *payload, ROW *row)
{
    ROW mean[MOST], room[MOST];
    const int64_t step = STEP(wire, PIECE);
    for (int64_t at = 0; at < numel; at += step) {
        const int64_t n = least(step, numel - at);
        NAME(mean_tile)(wire, versions, at, weights, count, total, n, mean, room);
        if (row) memcpy(row + at, mean, (size_t)n * sizeof(ROW));
        if (!payload) continue;
        uint8_t *to = payload + NAME(nbytes)(wire, at);
        if (carry) NAME(encode_kept)(wire, mean, n, (ANY *)(carry + at), gradients, to, room);
        else NAME(encode_tile)(wire, mean, n, to);
    }
    if (payload && numel) {
        const int64_t used = NAME(nbytes)(wire, numel);
        memset(payload + used, 0, (size_t)((used + 3) / 4 * 4 - used));
    }
}

/* Apply a mean to the rows of a shard; daso/kernels/rows.py documents the rows.

   sums: distance, norm, moved. */
void NAME(daso_accept)(int32_t wire, int64_t numel, int64_t count, const uint8_t *const *versions,
                       const double *weights, double total, const uint8_t *sent, ROW *reference,
                       ROW *negated, ROW *shown, ROW *residual, const ROW *rounding, ROW *others,
                       double share, double *sums)
{
    ROW mean[MOST], carried[MOST];
    const int64_t step = STEP(wire, TILE);
    /* Two versions have the same sum in either order: the own one comes last, and stays decoded. */
    const int own = count == 2 && (versions[0] == sent || versions[1] == sent);
    const int swapped = own && versions[0] == sent;
    const uint8_t *pair[2] = {versions[count > 1], versions[0]};
    const double both[2] = {weights[count > 1], weights[0]};
    const uint8_t *const *added = swapped ? pair : versions;
    const double *weighed = swapped ? both : weights;
    for (int64_t at = 0; at < numel; at += step) {
        const int64_t n = least(step, numel - at);
        ANY *here = (ANY *)(reference + at);
        NAME(mean_tile)(wire, added, at, weighed, count, total, n, mean, carried);
        if (!own) NAME(decode_tile)(wire, sent + NAME(nbytes)(wire, at), n, carried);
        NAME(add_squares)((const ANY *)mean, n, sums + 2);
        if (others) {
            const ROW less = (ROW)-share;
            ANY *to = (ANY *)(others + at);
            for (int64_t i = 0; i < n; i++) to[i] = carried[i] * less + mean[i];
        }
        if (rounding) memmove(residual + at, rounding + at, (size_t)n * sizeof(ROW));
        if (negated) {
            ANY *to = (ANY *)(negated + at);
            for (int64_t i = 0; i < n; i++) to[i] = -mean[i];
            for (int64_t i = 0; i < n; i++) {
                ROW apart = mean[i] - carried[i];
                carried[i] = -(carried[i] + here[i]);
                mean[i] = apart;
            }
            NAME(add_squares)((const ANY *)mean, n, sums);
        } else {
            for (int64_t i = 0; i < n; i++) {
                ROW apart = mean[i] - carried[i], moved = here[i] + mean[i];
                here[i] = moved;
                mean[i] = moved;
                carried[i] = apart;
            }
            NAME(add_squares)((const ANY *)mean, n, sums + 1);
            NAME(add_squares)((const ANY *)carried, n, sums);
        }
        if (shown) {
            if (residual && !rounding) {
                const ANY *r = (const ANY *)(residual + at);
                for (int64_t i = 0; i < n; i++) carried[i] += r[i];
            }
            memcpy(shown + at, carried, (size_t)n * sizeof(ROW));
        }
    }
}

/* Add rows of any type in order and divide; store the result in a row, and in others. */
void NAME(daso_mean_rows)(int32_t kind, int64_t numel, int64_t count, const char *const *rows,
                          double divisor, ROW *total, int32_t written, int64_t to_count,
                          char *const *to)
{
    ROW sum[PIECE], room[PIECE];
    for (int64_t at = 0; at < numel; at += PIECE) {
        const int64_t n = least(PIECE, numel - at);
        NAME(load)(kind, rows[0] + at * SIZE_OF(kind), n, (ANY *)sum);
        for (int64_t k = 1; k < count; k++) {
            const char *from = rows[k] + at * SIZE_OF(kind);
            const ANY *x = (const ANY *)from;
            if (kind != OF_ROW) {
                NAME(load)(kind, from, n, (ANY *)room);
                x = (const ANY *)room;
            }
            for (int64_t i = 0; i < n; i++) sum[i] += x[i];
        }
        if (divisor != 1) NAME(divide)(sum, n, divisor);
        if (total) memcpy(total + at, sum, (size_t)n * sizeof(ROW));
        for (int64_t k = 0; k < to_count; k++)
            NAME(store)(written, sum, n, to[k] + at * SIZE_OF(written));
    }
}

/* Copy numbers of concatenated tensors, from `start` on, into a row. */
void NAME(daso_gather)(int64_t start, int64_t numel, const char *const *tensors,
                       const int32_t *kinds, const int64_t *ends, ROW *row)
{
    int64_t segment = 0;
    for (int64_t at = 0; at < numel; at += MOST)
        segment = NAME(collect)(start + at, least(MOST, numel - at), segment, tensors, kinds, ends,
                                (ANY *)(row + at));
}

/* Merge a row c into concatenated tensors x: c, x + c, or x + pull (c - x). */
void NAME(daso_merge)(int32_t how, double pull, int64_t segments, char *const *tensors,
                      const int32_t *kinds, const int64_t *ends, const ROW *row)
{
    ROW x[TILE];
    const ROW part = (ROW)pull;
    for (int64_t k = 0; k < segments; k++) {
        const int64_t first = k ? ends[k - 1] : 0, size = SIZE_OF(kinds[k]);
        for (int64_t at = first; at < ends[k]; at += TILE) {
            const int64_t n = least(TILE, ends[k] - at);
            char *there = tensors[k] + (at - first) * size;
            const ANY *c = (const ANY *)(row + at);
            if (how == COPY) {
                if (kinds[k] == OF_ROW) {
                    memcpy(there, row + at, (size_t)n * sizeof(ROW));
                    continue;
                }
                for (int64_t i = 0; i < n; i++) x[i] = c[i];
            } else {
                NAME(load)(kinds[k], there, n, (ANY *)x);
                if (how == ADD) for (int64_t i = 0; i < n; i++) x[i] += c[i];
                else for (int64_t i = 0; i < n; i++) x[i] += part * (c[i] - x[i]);
            }
            NAME(store)(kinds[k], x, n, there);
        }
    }
}

#undef ANY
#undef WIDE
#undef ROW_INF
#undef ROW_ABS
#undef SIZE_OF
#undef STEP
