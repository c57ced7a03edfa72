/* Folding one element from every rank into one, for each dtype and reduction.
 *
 * Inputs are folded in the order of ranks on every rank, so that all get the same bits. Half-precision types are
 * folded in single precision and rounded once. Loops are plain, for the compiler to vectorise; an output may be one
 * of the inputs, for element i depends on elements i alone.
 */
#include "core.h"

#include <string.h>

#if defined(__clang__)
#define TSH_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define TSH_INDEPENDENT _Pragma("GCC ivdep")
#endif

/* The numbers of dtypes and reductions are those of `reduction.py`. */
enum { F32, F64, F16, BF16, I8, U8, I16, I32, I64, U16, U32, U64, NUM_DTYPES };
enum { SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, NUM_REDUCTIONS };

typedef uint16_t half_bits;
typedef uint16_t bfloat_bits;

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float load_bfloat(bfloat_bits bits) { return float_of((uint32_t)bits << 16); }

static inline bfloat_bits store_bfloat(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u); /* to nearest, ties to even */
    uint32_t quiet = bits | 0x400000u;                       /* rounding must not turn a NaN into infinity */
    return (bfloat_bits)((((bits & 0x7fffffffu) > 0x7f800000u) ? quiet : rounded) >> 16);
}

#if defined(__aarch64__) && !defined(TSH_HALF_BY_BITS)
static inline float load_half(half_bits bits) {
    __fp16 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline half_bits store_half(float value) {
    __fp16 narrow = (__fp16)value;
    half_bits bits;
    memcpy(&bits, &narrow, sizeof bits);
    return bits;
}
#else
static inline float load_half(half_bits half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t body = (uint32_t)(half & 0x7fffu) << 13;
    /* Scaling by 2**112 moves the exponent over and makes subnormals normal; infinity and NaN need the full exponent. */
    uint32_t scaled = bits_of(float_of(body) * 0x1p112f);
    uint32_t special = body >= 0x0f800000u ? 0x7f800000u : 0u;
    return float_of(sign | scaled | special);
}

static inline half_bits store_half(float value) {
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    /* Adding 0.5 leaves a subnormal half in the lowest bits, rounded to even by the addition itself. */
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (half_bits)(sign | (magnitude >= 0x47800000u ? special : finite));
}
#endif

#define SAME(x) (x)
#define FOLD_SUM(a, b) ((a) + (b))
#define FOLD_PRODUCT(a, b) ((a) * (b))
#define FOLD_MIN(a, b) (((a) < (b)) | ((a) != (a)) ? (a) : (b)) /* a NaN stays, as in torch.minimum */
#define FOLD_MAX(a, b) (((a) > (b)) | ((a) != (a)) ? (a) : (b))
#define FOLD_LOWER(a, b) ((a) < (b) ? (a) : (b))
#define FOLD_HIGHER(a, b) ((a) > (b) ? (a) : (b))
#define FOLD_BAND(a, b) ((a) & (b))
#define FOLD_BOR(a, b) ((a) | (b))
#define FOLD_BXOR(a, b) ((a) ^ (b))
#define AS_IS(x) (x)
#define DIVIDED(x) ((x) / divide_by)
#define SCALED(x) ((x) * scale_by)

#define TSH_BLOCK 512 /* accumulators of a block stay in the first cache */

/* One pass over elements: each begins with START, takes in the arrays named next, and ends with END. STORED is the
 * storage type, WIDE the type of accumulation. */
#define TSH_TAKE(WIDE, LOAD, FOLD, FROM)                                                                               \
    {                                                                                                                  \
        WIDE next = (WIDE)LOAD((FROM)[i]);                                                                             \
        folded = (WIDE)FOLD(folded, next);                                                                             \
    }
#define TSH_PASS(LENGTH, WIDE, START, END, ...)                                                                        \
    TSH_INDEPENDENT                                                                                                    \
    for (size_t i = 0; i < (LENGTH); i++) {                                                                            \
        WIDE folded = (WIDE)(START);                                                                                   \
        __VA_ARGS__                                                                                                    \
        END;                                                                                                           \
    }

/* Up to four inputs are folded in one pass, further ones two at a time: a pass for every input would spend its time on
 * storing and loading what is folded so far (measured with four: 1.9 instead of 4.3 GB/s). */
#define TSH_LOOPS(STORED, WIDE, LOAD, STORE, FOLD, FINISH)                                                             \
    STORED *result = out;                                                                                              \
    const STORED *const *inputs = (const STORED *const *)in;                                                           \
    const STORED *a = inputs[0], *b = inputs[1], *c = b, *d = b;                                                       \
    if (num_inputs == 2) {                                                                                             \
        TSH_PASS(numel, WIDE, LOAD(a[i]), result[i] = STORE((WIDE)FINISH(folded)), TSH_TAKE(WIDE, LOAD, FOLD, b))      \
        return;                                                                                                        \
    }                                                                                                                  \
    c = inputs[2];                                                                                                     \
    if (num_inputs == 3) {                                                                                             \
        TSH_PASS(numel, WIDE, LOAD(a[i]), result[i] = STORE((WIDE)FINISH(folded)), TSH_TAKE(WIDE, LOAD, FOLD, b)       \
                 TSH_TAKE(WIDE, LOAD, FOLD, c))                                                                        \
        return;                                                                                                        \
    }                                                                                                                  \
    d = inputs[3];                                                                                                     \
    if (num_inputs == 4) {                                                                                             \
        TSH_PASS(numel, WIDE, LOAD(a[i]), result[i] = STORE((WIDE)FINISH(folded)), TSH_TAKE(WIDE, LOAD, FOLD, b)       \
                 TSH_TAKE(WIDE, LOAD, FOLD, c) TSH_TAKE(WIDE, LOAD, FOLD, d))                                          \
        return;                                                                                                        \
    }                                                                                                                  \
    WIDE sums[TSH_BLOCK];                                                                                              \
    for (size_t start = 0; start < numel; start += TSH_BLOCK) {                                                        \
        size_t length = numel - start < TSH_BLOCK ? numel - start : TSH_BLOCK;                                         \
        a = inputs[0] + start, b = inputs[1] + start, c = inputs[2] + start, d = inputs[3] + start;                    \
        TSH_PASS(length, WIDE, LOAD(a[i]), sums[i] = folded, TSH_TAKE(WIDE, LOAD, FOLD, b)                             \
                 TSH_TAKE(WIDE, LOAD, FOLD, c) TSH_TAKE(WIDE, LOAD, FOLD, d))                                          \
        int source = 4;                                                                                                \
        for (; source + 2 <= num_inputs; source += 2) {                                                                \
            a = inputs[source] + start, b = inputs[source + 1] + start;                                                \
            TSH_PASS(length, WIDE, sums[i], sums[i] = folded, TSH_TAKE(WIDE, LOAD, FOLD, a)                            \
                     TSH_TAKE(WIDE, LOAD, FOLD, b))                                                                    \
        }                                                                                                              \
        if (source < num_inputs) {                                                                                     \
            a = inputs[source] + start;                                                                                \
            TSH_PASS(length, WIDE, sums[i], sums[i] = folded, TSH_TAKE(WIDE, LOAD, FOLD, a))                           \
        }                                                                                                              \
        TSH_PASS(length, WIDE, sums[i], result[start + i] = STORE((WIDE)FINISH(folded)), )                             \
    }

#define TSH_KERNEL(NAME, STORED, WIDE, LOAD, STORE, FOLD)                                                              \
    static void NAME(void *out, const void *const *in, int num_inputs, size_t numel, double divisor) {                 \
        (void)divisor;                                                                                                 \
        TSH_LOOPS(STORED, WIDE, LOAD, STORE, FOLD, AS_IS)                                                              \
    }

/* Division where it must be exact; by a power of two the product with the reciprocal is the same and quicker. */
#define TSH_MEAN(NAME, STORED, WIDE, LOAD, STORE)                                                                      \
    static void NAME##_exact(void *out, const void *const *in, int num_inputs, size_t numel, WIDE divide_by) {         \
        TSH_LOOPS(STORED, WIDE, LOAD, STORE, FOLD_SUM, DIVIDED)                                                        \
    }                                                                                                                  \
    static void NAME##_scaled(void *out, const void *const *in, int num_inputs, size_t numel, WIDE scale_by) {         \
        TSH_LOOPS(STORED, WIDE, LOAD, STORE, FOLD_SUM, SCALED)                                                         \
    }                                                                                                                  \
    static void NAME(void *out, const void *const *in, int num_inputs, size_t numel, double divisor) {                 \
        uint64_t whole = (uint64_t)divisor;                                                                            \
        if ((whole & (whole - 1)) == 0) {                                                                              \
            NAME##_scaled(out, in, num_inputs, numel, (WIDE)(1.0 / divisor));                                          \
        } else {                                                                                                       \
            NAME##_exact(out, in, num_inputs, numel, (WIDE)divisor);                                                   \
        }                                                                                                              \
    }

#define TSH_FLOATING(TYPE, STORED, WIDE, LOAD, STORE)                                                                  \
    TSH_KERNEL(sum_##TYPE, STORED, WIDE, LOAD, STORE, FOLD_SUM)                                                        \
    TSH_MEAN(mean_##TYPE, STORED, WIDE, LOAD, STORE)                                                                   \
    TSH_KERNEL(product_##TYPE, STORED, WIDE, LOAD, STORE, FOLD_PRODUCT)                                                \
    TSH_KERNEL(min_##TYPE, STORED, WIDE, LOAD, STORE, FOLD_MIN)                                                        \
    TSH_KERNEL(max_##TYPE, STORED, WIDE, LOAD, STORE, FOLD_MAX)

/* Sums and products wrap, so their bits do not depend on the sign; only the order of values does. */
#define TSH_INTEGER(BITS)                                                                                              \
    TSH_KERNEL(sum_##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_SUM)                                       \
    TSH_KERNEL(product_##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_PRODUCT)                               \
    TSH_KERNEL(band_##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_BAND)                                     \
    TSH_KERNEL(bor_##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_BOR)                                       \
    TSH_KERNEL(bxor_##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_BXOR)                                     \
    TSH_KERNEL(min_i##BITS, int##BITS##_t, int##BITS##_t, SAME, SAME, FOLD_LOWER)                                      \
    TSH_KERNEL(max_i##BITS, int##BITS##_t, int##BITS##_t, SAME, SAME, FOLD_HIGHER)                                     \
    TSH_KERNEL(min_u##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_LOWER)                                    \
    TSH_KERNEL(max_u##BITS, uint##BITS##_t, uint##BITS##_t, SAME, SAME, FOLD_HIGHER)

TSH_FLOATING(f32, float, float, SAME, SAME)
TSH_FLOATING(f64, double, double, SAME, SAME)
TSH_FLOATING(f16, half_bits, float, load_half, store_half)
TSH_FLOATING(bf16, bfloat_bits, float, load_bfloat, store_bfloat)
TSH_INTEGER(8)
TSH_INTEGER(16)
TSH_INTEGER(32)
TSH_INTEGER(64)

#define FLOATING_ROW(TYPE)                                                                                             \
    { sum_##TYPE, mean_##TYPE, product_##TYPE, min_##TYPE, max_##TYPE, NULL, NULL, NULL }
#define INTEGER_ROW(SIGN, BITS)                                                                                        \
    {                                                                                                                  \
        sum_##BITS, NULL, product_##BITS, min_##SIGN##BITS, max_##SIGN##BITS, band_##BITS, bor_##BITS, bxor_##BITS     \
    }

static const tsh_kernel kernels[NUM_DTYPES][NUM_REDUCTIONS] = {
    [F32] = FLOATING_ROW(f32), [F64] = FLOATING_ROW(f64), [F16] = FLOATING_ROW(f16), [BF16] = FLOATING_ROW(bf16),
    [I8] = INTEGER_ROW(i, 8),  [U8] = INTEGER_ROW(u, 8),   [I16] = INTEGER_ROW(i, 16), [I32] = INTEGER_ROW(i, 32),
    [I64] = INTEGER_ROW(i, 64), [U16] = INTEGER_ROW(u, 16), [U32] = INTEGER_ROW(u, 32), [U64] = INTEGER_ROW(u, 64),
};

static const size_t element_bytes[NUM_DTYPES] = {
    [F32] = 4, [F64] = 8, [F16] = 2, [BF16] = 2, [I8] = 1,  [U8] = 1,
    [I16] = 2, [I32] = 4, [I64] = 8, [U16] = 2,  [U32] = 4, [U64] = 8,
};

tsh_kernel tsh_find_kernel(int dtype, int reduction) {
    bool is_known = dtype >= 0 && dtype < NUM_DTYPES && reduction >= 0 && reduction < NUM_REDUCTIONS;
    return is_known ? kernels[dtype][reduction] : NULL;
}

size_t tsh_element_bytes(int dtype) { return dtype >= 0 && dtype < NUM_DTYPES ? element_bytes[dtype] : 0; }
