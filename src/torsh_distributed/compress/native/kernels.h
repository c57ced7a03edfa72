/* The codecs' kernels: one pass over memory each, block by block, and the small parts they share.
 *
 * They give the bytes that `torch_kernels.py` gives: same operations in single precision, same order of sums, same
 * noise. Loops are plain, for the compiler to vectorise. A decoder returns 0, or 1 for a payload that no encoder
 * makes; `weight` scales what it decodes, and with `adds` it adds to `out` instead of overwriting it.
 */
#ifndef TSH_KERNELS_H
#define TSH_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef TSH_VERSION
#error "TSH_VERSION comes from native.py"
#endif

#define TSH_TINY 0x1p-120f       /* a block whose scale is below is sent as zeros: its inverse would overflow */
#define TSH_MAX_BLOCK 2048       /* for all codecs but int8, which needs no scratch */
#define TSH_INFINITY 0x7f800000u /* as bits; what is above is not a number */

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

static inline float load_float(const uint8_t *from) {
    float value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store_float(uint8_t *to, float value) { memcpy(to, &value, sizeof value); }

static inline int is_scale(float scale) { return bits_of(scale) < TSH_INFINITY; } /* finite, not negative */

/* See noise.py. */
static inline uint32_t mixed(uint32_t h) {
    h = (h ^ h >> 16) * 0x21f0aaadu;
    h = (h ^ h >> 15) * 0x735a2d97u;
    return h ^ h >> 15;
}

#define TSH_GOLDEN 0x9e3779b9u

/* noise(key, index) of noise.py is mixed(first_draw(key, index)); of the next index, mixed(that + TSH_GOLDEN). Loops
 * keep the sum: a multiplication less, and no index to convert. */
static inline uint32_t first_draw(uint32_t key, uint32_t index) { return index * TSH_GOLDEN + key; }

static inline float uniform(uint32_t draw) {
    return (float)(int32_t)(mixed(draw) >> 8) * 0x1p-24f; /* signed: quicker to convert, and it fits */
}

static inline float largest_magnitude(const float *x, size_t n) {
    int32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t magnitude = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of((uint32_t)largest);
}

/* Adds up `n` (a power of two) numbers by halves, the order that every device can keep. Overwrites them. */
static inline float sum_by_halves(float *restrict x, size_t n) {
    for (size_t half = n / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; i++) {
            x[i] = x[i] + x[i + half];
        }
    }
    return x[0];
}

#define TSH_EMIT(INDEX, VALUE) (out[INDEX] = adds ? out[INDEX] + (VALUE) : (VALUE))

/* pack.c: see bits.py for the layout. `codes` has room for 8 more than `n`; those are overwritten by zeros. */
size_t tsh_packed_bytes(size_t n, int bits);
void tsh_pack(uint8_t *restrict codes, size_t n, int bits, uint8_t *restrict out);
void tsh_unpack(const uint8_t *restrict packed, size_t n, int bits, uint8_t *restrict codes);

/* checksum.c */
uint32_t tsh_checksum(const uint8_t *from, size_t num_bytes);

/* half.c */
#ifdef __aarch64__
#define TSH_HAS_HALF
void tsh_half_encode(const float *x, size_t n, float divisor, __fp16 *out);
void tsh_half_decode(const __fp16 *payload, size_t n, float *out, float weight);
#endif

/* uniform.c */
void tsh_int8_encode(const float *x, size_t n, size_t block, uint8_t *out);
int tsh_int8_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds);
void tsh_nbit_encode(const float *x, size_t n, size_t block, int bits, uint32_t key, uint32_t offset, uint8_t *out);
int tsh_nbit_decode(const uint8_t *payload, size_t n, size_t block, int bits, float *out, float weight, int adds);

/* signs.c */
void tsh_sign_encode(const float *x, size_t n, size_t block, uint8_t *out);
int tsh_sign_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds);
void tsh_ternary_encode(const float *x, size_t n, size_t block, float threshold, uint8_t *out);
void tsh_ternary_draw(const float *x, size_t n, size_t block, uint32_t key, uint32_t offset, uint8_t *out);
int tsh_ternary_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds);

/* logarithmic.c */
void tsh_natural_encode(const float *x, size_t n, size_t block, uint32_t key, uint32_t offset, uint8_t *out);
int tsh_natural_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds);
int tsh_histogram(const float *x, size_t n, int64_t *counts, int64_t *sums);
void tsh_codebook_encode(const float *x, size_t n, size_t block, int largest, const uint8_t *entries, int bits,
                         uint8_t *out);
int tsh_codebook_decode(const uint8_t *payload, size_t n, size_t block, const float *codebook, int num_entries,
                        float *out, float weight, int adds);

/* sparse.c */
size_t tsh_at_least(const float *x, size_t n, float threshold, int64_t *out);
void tsh_add_at(float *out, const int64_t *indices, const float *values, size_t count, int64_t offset, float sign);
void tsh_keep_largest(const float *x, int64_t *indices, size_t count, size_t k, uint32_t *magnitudes);
void tsh_indices_encode(const int64_t *indices, size_t count, int low_bits, uint8_t *low, uint8_t *unary);
int tsh_indices_decode(const uint8_t *low, const uint8_t *unary, size_t num_unary_bits, size_t count, int low_bits,
                       int64_t n, int64_t *out);

#endif
