/* What works on the exponent: powers of two, and codebooks fitted to a histogram with bins of equal ratio. */
#include "kernels.h"

#define MANTISSA 0x7fffffu

void tsh_natural_encode(const float *x, size_t n, size_t block, uint32_t key, uint32_t offset, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block;
    uint8_t *codes = out + num_blocks;
    uint8_t exponents[TSH_MAX_BLOCK], signs[TSH_MAX_BLOCK];
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        const float *from = x + start;
        uint32_t draw = first_draw(key, offset + (uint32_t)start);
        int is_finite = bits_of(largest_magnitude(from, length)) < TSH_INFINITY;
        for (size_t i = 0; i < length; i++, draw += TSH_GOLDEN) {
            uint32_t bits = bits_of(from[i]);
            /* The carry out of the mantissa comes with the probability that the next power of two is due. */
            uint32_t carried = (bits & 0x7fffffffu) + (mixed(draw) & MANTISSA);
            uint32_t exponent = carried >> 23;
            exponents[i] = (uint8_t)(exponent > 254 ? 254 : exponent);
            signs[i] = (uint8_t)(bits >> 31 << 7);
        }
        uint8_t reference = 0;
        for (size_t i = 0; i < length; i++) {
            reference = exponents[i] > reference ? exponents[i] : reference;
        }
        /* Exponents from reference - 126 on have codes 1 to 127; what is smaller, and zero, has code 0. */
        uint8_t below = reference > 127 ? (uint8_t)(reference - 127) : 0;
        uint8_t up = (uint8_t)(127 - (reference - below));
        for (size_t i = 0; i < length; i++) {
            uint8_t is_kept = exponents[i] > below;
            uint8_t code = (uint8_t)(exponents[i] - below + up);
            codes[start + i] = (uint8_t)(signs[i] | (is_kept ? code : 0));
        }
        out[b] = is_finite ? reference : 255; /* which no decoder takes */
    }
}

int tsh_natural_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds) {
    size_t num_blocks = (n + block - 1) / block;
    const uint8_t *codes = payload + num_blocks;
    int is_damaged = 0;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t end = n - start < block ? n : start + block;
        int32_t reference = payload[b];
        is_damaged |= reference > 254;
        for (size_t i = start; i < end; i++) {
            int32_t code = codes[i] & 127;
            int32_t exponent = code + reference - 127;
            exponent = code == 0 || exponent < 0 ? 0 : exponent;
            uint32_t bits = (uint32_t)exponent << 23 | (uint32_t)(codes[i] >> 7) << 31;
            TSH_EMIT(i, float_of(bits) * weight);
        }
    }
    return is_damaged;
}

/* The bin of a float: its exponent and four bits of its mantissa, counted down from the largest, 511, to 1; all
 * smaller ones share bin 0. Negative ones have the same bins from 512 on. See `Histogram` in kernels.py. */
static inline uint32_t bin_of(uint32_t bits, int32_t base) {
    int32_t rank = (int32_t)((bits & 0x7fffffffu) >> 19);
    int32_t bin = rank - base;
    bin = bin < 0 || rank < 16 ? 0 : bin; /* below 16: exponent 0, subnormal */
    return (uint32_t)bin + (bits >> 31 << 9);
}

static void find_bins(const float *x, size_t n, int32_t base, uint16_t *restrict bins) {
    for (size_t i = 0; i < n; i++) {
        bins[i] = (uint16_t)bin_of(bits_of(x[i]), base);
    }
}

#define STRETCH 65535 /* so many mantissas of 24 bits add up to less than 2**40 */

/* Count and sum share a word, count above bit 40: one addition in place of two. Two tables in turns: the same bin
 * twice in a row would wait for its own last addition. */
static void count_stretch(const float *x, size_t n, int32_t base, int64_t *counts, int64_t *sums) {
    uint64_t tables[2][1024] = {{0}};
    uint16_t bins[TSH_MAX_BLOCK];
    for (size_t start = 0; start < n; start += TSH_MAX_BLOCK) {
        size_t length = n - start < TSH_MAX_BLOCK ? n - start : TSH_MAX_BLOCK;
        find_bins(x + start, length, base, bins);
        for (size_t i = 0; i < length; i++) {
            uint64_t mantissa = (bits_of(x[start + i]) & MANTISSA) | (MANTISSA + 1);
            tables[i & 1][bins[i]] += (uint64_t)1 << 40 | mantissa;
        }
    }
    for (size_t bin = 0; bin < 1024; bin++) {
        uint64_t both = tables[0][bin] + tables[1][bin];
        counts[bin] += (int64_t)(both >> 40);
        sums[bin] += (int64_t)(both & (((uint64_t)1 << 40) - 1));
    }
}

int tsh_histogram(const float *x, size_t n, int64_t *counts, int64_t *sums) {
    int32_t largest = (int32_t)(bits_of(largest_magnitude(x, n)) >> 19);
    memset(counts, 0, 1024 * sizeof *counts);
    memset(sums, 0, 1024 * sizeof *sums);
    for (size_t start = 0; start < n; start += STRETCH) {
        count_stretch(x + start, n - start < STRETCH ? n - start : STRETCH, largest - 511, counts, sums);
    }
    return largest;
}

void tsh_codebook_encode(const float *x, size_t n, size_t block, int largest, const uint8_t *entries, int bits,
                         uint8_t *out) {
    uint8_t codes[TSH_MAX_BLOCK + 8];
    uint16_t bins[TSH_MAX_BLOCK];
    for (size_t start = 0; start < n; start += block) {
        size_t length = n - start < block ? n - start : block;
        find_bins(x + start, length, largest - 511, bins);
        for (size_t i = 0; i < length; i++) {
            codes[i] = entries[bins[i]];
        }
        tsh_pack(codes, length, bits, out);
        out += tsh_packed_bytes(length, bits);
    }
}

int tsh_codebook_decode(const uint8_t *payload, size_t n, size_t block, const float *codebook, int num_entries,
                        float *out, float weight, int adds) {
    uint8_t codes[TSH_MAX_BLOCK + 8];
    float values[256] = {0};
    int bits = 1, is_damaged = 0;
    while (1 << bits < num_entries) {
        bits++;
    }
    for (int i = 0; i < num_entries; i++) {
        values[i] = codebook[i] * weight;
        is_damaged |= (bits_of(codebook[i]) & 0x7fffffffu) >= TSH_INFINITY;
    }
    while (n > 0) {
        size_t length = n < block ? n : block;
        uint8_t highest = 0;
        tsh_unpack(payload, length, bits, codes);
        for (size_t i = 0; i < length; i++) {
            highest = codes[i] > highest ? codes[i] : highest;
        }
        is_damaged |= highest >= num_entries;
        for (size_t i = 0; i < length; i++) {
            TSH_EMIT(i, values[codes[i]]);
        }
        payload += tsh_packed_bytes(length, bits);
        out += length;
        n -= length;
    }
    return is_damaged;
}
