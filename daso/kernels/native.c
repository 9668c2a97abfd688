/* The arithmetic of an exchange, in one pass over memory; daso/kernels/native.py loads it.

   Every function walks a row tile by tile, and does all that is to be done with a tile while it is
   in a core's cache. Loops are plain C that compilers vectorize. The bits are those of
   daso/kernels/torch_kernels.py at every instruction set: no product and sum may be contracted
   (-ffp-contract=off), numbers are rounded half to even, sums are folded in halves.

   Neither Python nor torch is needed here. A row has fp32 or fp64 numbers; native_rows.h holds what
   is done with either, and is included once for each. */

#if defined(__AVX512F__) && !defined(__clang__) && __GNUC__ >= 8
#pragma GCC target("prefer-vector-width=256")   /* 512-bit loads stall longer on memory */
#endif

#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

#ifndef DASO_SOURCE
#define DASO_SOURCE 0
#endif

/* Payloads and rows may start at any byte. */
typedef uint16_t u16 __attribute__((aligned(1), may_alias));
typedef uint32_t u32 __attribute__((aligned(1), may_alias));
typedef float f32 __attribute__((aligned(1), may_alias));
typedef double f64 __attribute__((aligned(1), may_alias));

enum { FP32, BF16, FP16, INT8, INT4, INT2, TOPK, FP64 }; /* wires */
enum { OF_FP32, OF_FP64, OF_BF16, OF_FP16 };             /* types of tensors */
enum { COPY, ADD, PULL };                                /* merges */

enum {
    TILE = 1024,       /* numbers whose squares are folded into one term */
    PLACES = 1 << 16,  /* words of a fingerprint with different factors */
    PIECE = 512,       /* numbers per pass of functions without such sums: fits the L1 cache */
    BLOCK8 = 128, BYTES8 = 4 + BLOCK8,      /* int8 */
    PACKED = 32,       /* numbers of a block of int4 or int2, whose codes share bytes */
    TOPK_BLOCK = 4096, TOPK_PART = 64, MOST = TOPK_BLOCK
};

static const uint16_t NAN16 = 0x7FC0, NAN_HALF = 0x7E00;
static const uint32_t INF32 = 0x7F800000, NAN32 = 0x7FC00000;
static const float SMALLEST = 1.17549435e-38f;     /* normal fp32 number */
static const float LARGEST_BF16 = 3.38953139e38f, LARGEST_FP32 = 3.40282347e38f;

/* Of blocks whose codes share bytes: bytes of the codes and of a block, largest code, what is added
   to codes, and one of a value in each byte of a word. */
#define WIDTH(bits) (PACKED * (bits) / 8)
#define BYTES(bits) (2 + WIDTH(bits))
#define STEPS(bits) ((1 << ((bits) - 1)) - 1)
#define BIAS(bits) (1 << ((bits) - 1))
#define EACH(byte) (0x0101010101010101ull * (byte))
#define BITS(wire) ((wire) == INT4 ? 4 : 2)

/* A function whose number of bits is a constant wherever it is called. */
#define EXPANDED static inline __attribute__((always_inline))

static inline uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static inline float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static inline uint64_t bits_of_double(double x) { uint64_t u; memcpy(&u, &x, 8); return u; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return 1 / by if multiplying by it gives the bits of a division (a power of two), else 0. */
static inline double exact_inverse(double by)
{
    return by > 0 && by < 4294967296.0 && !(bits_of_double(by) << 12) ? 1 / by : 0;
}

static inline uint16_t to_bf16(float x)
{
    uint32_t u = bits_of(x), r = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    return (u & 0x7FFFFFFF) > INF32 ? NAN16 : (uint16_t)r;
}

static inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

static inline uint16_t to_fp16(float x)
{
    uint32_t u = bits_of(x), a = u & 0x7FFFFFFF, sign = (u >> 16) & 0x8000;
    uint32_t normal = (a - 0x38000000 + 0xFFF + ((a >> 13) & 1)) >> 13;
    uint32_t denormal = bits_of(float_of(a) + 0.5f) - 0x3F000000;
    uint32_t h = a < 0x38800000 ? denormal : a >= 0x477FF000 ? 0x7C00 : normal;
    return a > INF32 ? NAN_HALF : (uint16_t)(h | sign);
}

static inline float from_fp16(uint16_t h)
{
    uint32_t a = (uint32_t)(h & 0x7FFF) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    uint32_t normal = a + 0x38000000, special = a + 0x70000000;
    float denormal = float_of(a + 0x38800000) - float_of(0x38800000);
    uint32_t u = a < 0x00800000 ? bits_of(denormal) : a >= 0x0F800000 ? special : normal;
    return float_of(u | sign);
}

/* Return the index of the tensor that holds number `at`, searching from `segment`. */
static inline int64_t seek(int64_t at, int64_t segment, const int64_t *ends)
{
    while (segment > 0 && ends[segment - 1] > at) segment--;
    while (ends[segment] <= at) segment++;
    return segment;
}

static void to_fp16s(const float *restrict from, int64_t n, u16 *restrict to)
{
    int64_t i = 0;
#ifdef __F16C__
    const __m128i infinity = _mm_set1_epi16(0x7C00), nan = _mm_set1_epi16(NAN_HALF);
    for (; i + 8 <= n; i += 8) {
        __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
        __m128i a = _mm_and_si128(h, _mm_set1_epi16(0x7FFF));
        h = _mm_blendv_epi8(h, nan, _mm_cmpgt_epi16(a, infinity));
        _mm_storeu_si128((__m128i *)(to + i), h);
    }
#endif
    for (; i < n; i++) to[i] = to_fp16(from[i]);
}

static void from_fp16s(const u16 *restrict from, int64_t n, f32 *restrict to)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8) {
        __m128i h = _mm_loadu_si128((const __m128i *)(from + i));
        _mm256_storeu_ps((float *)(to + i), _mm256_cvtph_ps(h));
    }
#endif
    for (; i < n; i++) to[i] = from_fp16(from[i]);
}

/* Return the sum of at most PLACES words from place `at` on, each times an odd factor by its place.
   Such sums are exact in any order. */
static inline uint32_t words_sum(const u32 *words, int64_t count, int64_t at)
{
    const uint32_t place = (uint32_t)at, n = (uint32_t)count;
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) sum += words[i] * (2 * ((place + i) % PLACES) + 1);
    return sum;
}

/* Bytes after the last whole word count as a word whose other bytes are zero. */
uint32_t daso_fingerprint(int64_t nbytes, const uint8_t *bytes)
{
    const int64_t count = nbytes / 4;
    const u32 *words = (const u32 *)bytes;
    uint32_t sum = 0, last = 0;
    for (int64_t at = 0; at < count; at += PLACES)
        sum += words_sum(words + at, least(PLACES, count - at), at);
    memcpy(&last, bytes + 4 * count, (size_t)(nbytes - 4 * count));
    return sum + words_sum(&last, 1, count);
}

#define ROW float
#define WORD uint32_t
#define SIGNED int32_t
#define OF_ROW OF_FP32
#define NAME(x) x##_fp32
#include "native_rows.h"
#undef ROW
#undef WORD
#undef SIGNED
#undef OF_ROW
#undef NAME

#define ROW double
#define WORD uint64_t
#define SIGNED int64_t
#define OF_ROW OF_FP64
#define NAME(x) x##_fp64
#include "native_rows.h"

/* Digest of the compiled sources; native.py refuses a library with another digest. */
uint64_t daso_source(void) { return (uint64_t)DASO_SOURCE; }
