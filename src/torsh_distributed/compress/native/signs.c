/* Signs and trits of a block, with one magnitude for all of it. */
#include "kernels.h"

static size_t power_of_two_above(size_t n) {
    size_t power = 1;
    while (power < n) {
        power *= 2;
    }
    return power;
}

/* The mean of `count` magnitudes that lie in `magnitudes`, which is filled up with zeros to `room`, a power of two.
 * Each was divided by `room` before, so that the sum of the largest floats is a float. */
static float mean_of(float *magnitudes, size_t room, size_t count) {
    float mean = sum_by_halves(magnitudes, room) * ((float)room / (float)count);
    return mean < TSH_TINY ? 0.0f : mean;
}

void tsh_sign_encode(const float *x, size_t n, size_t block, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block, room = power_of_two_above(block);
    uint8_t *packed = out + 4 * num_blocks;
    uint8_t codes[TSH_MAX_BLOCK + 8];
    float magnitudes[TSH_MAX_BLOCK];
    float share = 1.0f / (float)room;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        const float *from = x + start;
        for (size_t i = 0; i < length; i++) {
            uint32_t bits = bits_of(from[i]);
            codes[i] = (uint8_t)(bits >> 31);
            magnitudes[i] = float_of(bits & 0x7fffffffu) * share;
        }
        memset(magnitudes + length, 0, (room - length) * sizeof *magnitudes);
        store_float(out + 4 * b, mean_of(magnitudes, room, length));
        tsh_pack(codes, length, 1, packed);
        packed += tsh_packed_bytes(length, 1);
    }
}

int tsh_sign_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds) {
    size_t num_blocks = (n + block - 1) / block;
    const uint8_t *packed = payload + 4 * num_blocks;
    uint8_t codes[TSH_MAX_BLOCK + 8];
    int is_damaged = 0;
    for (size_t b = 0; b < num_blocks; b++) {
        size_t length = n < block ? n : block;
        float scale = load_float(payload + 4 * b);
        is_damaged |= !is_scale(scale);
        uint32_t bits = bits_of(scale * weight);
        tsh_unpack(packed, length, 1, codes);
        for (size_t i = 0; i < length; i++) {
            TSH_EMIT(i, float_of(bits ^ (uint32_t)codes[i] << 31));
        }
        packed += tsh_packed_bytes(length, 1);
        out += length;
        n -= length;
    }
    return is_damaged;
}

/* 0 for zero, 1 for plus, 2 for minus. */
static inline uint8_t trit_of(uint32_t is_kept, uint32_t is_negative) {
    return (uint8_t)(is_kept + (is_kept & is_negative));
}

/* Five trits to a byte: byte k holds those of elements k, k + stride, …, least significant first. */
static void pack_trits(uint8_t *restrict trits, size_t n, uint8_t *restrict out) {
    size_t stride = (n + 4) / 5;
    memset(trits + n, 0, 8);
    for (size_t k = 0; k < stride; k++) {
        uint8_t low = (uint8_t)(trits[k] + 3 * trits[k + stride] + 9 * trits[k + 2 * stride]);
        out[k] = (uint8_t)(low + 27 * trits[k + 3 * stride] + 81 * trits[k + 4 * stride]);
    }
}

static int unpack_trits(const uint8_t *restrict packed, size_t n, uint8_t *restrict trits) {
    size_t stride = (n + 4) / 5;
    uint8_t highest = 0;
    for (size_t k = 0; k < stride; k++) {
        highest = packed[k] > highest ? packed[k] : highest;
        uint16_t rest = packed[k], third;
        third = (uint16_t)(rest * 171u) >> 9; /* rest / 3, for rest up to 242 */
        trits[k] = (uint8_t)(rest - 3 * third);
        rest = third, third = (uint16_t)(rest * 171u) >> 9;
        trits[k + stride] = (uint8_t)(rest - 3 * third);
        rest = third, third = (uint16_t)(rest * 171u) >> 9;
        trits[k + 2 * stride] = (uint8_t)(rest - 3 * third);
        rest = third, third = (uint16_t)(rest * 171u) >> 9;
        trits[k + 3 * stride] = (uint8_t)(rest - 3 * third);
        trits[k + 4 * stride] = (uint8_t)third;
    }
    return highest > 242;
}

void tsh_ternary_encode(const float *x, size_t n, size_t block, float threshold, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block, room = power_of_two_above(block);
    uint8_t *packed = out + 4 * num_blocks;
    uint8_t trits[TSH_MAX_BLOCK + 8];
    float magnitudes[TSH_MAX_BLOCK];
    float share = 1.0f / (float)room;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        const float *from = x + start;
        float largest = largest_magnitude(from, length);
        float least = threshold * largest;
        if (largest < TSH_TINY) {
            least = 1.0f; /* nothing is as large */
        } else if (least < TSH_TINY) {
            least = TSH_TINY;
        }
        uint32_t num_kept = 0;
        for (size_t i = 0; i < length; i++) {
            uint32_t bits = bits_of(from[i]);
            float magnitude = float_of(bits & 0x7fffffffu);
            uint32_t is_kept = magnitude >= least;
            trits[i] = trit_of(is_kept, bits >> 31);
            magnitudes[i] = float_of(bits_of(magnitude * share) & (0u - is_kept));
            num_kept += is_kept;
        }
        memset(magnitudes + length, 0, (room - length) * sizeof *magnitudes);
        float scale = num_kept ? mean_of(magnitudes, room, num_kept) : 0.0f;
        store_float(out + 4 * b, is_scale(largest) ? scale : largest); /* not finite: no decoder takes it */
        pack_trits(trits, length, packed);
        packed += (length + 4) / 5;
    }
}

void tsh_ternary_draw(const float *x, size_t n, size_t block, uint32_t key, uint32_t offset, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block;
    uint8_t *packed = out + 4 * num_blocks;
    uint8_t trits[TSH_MAX_BLOCK + 8];
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        const float *from = x + start;
        float largest = largest_magnitude(from, length);
        int is_zero = largest < TSH_TINY;
        float inverse = is_zero ? 0.0f : 1.0f / largest;
        uint32_t draw = first_draw(key, offset + (uint32_t)start);
        for (size_t i = 0; i < length; i++, draw += TSH_GOLDEN) {
            uint32_t bits = bits_of(from[i]);
            float chance = float_of(bits & 0x7fffffffu) * inverse;
            uint32_t is_kept = chance > uniform(draw);
            trits[i] = trit_of(is_kept, bits >> 31);
        }
        store_float(out + 4 * b, is_zero ? 0.0f : largest);
        pack_trits(trits, length, packed);
        packed += (length + 4) / 5;
    }
}

int tsh_ternary_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds) {
    size_t num_blocks = (n + block - 1) / block;
    const uint8_t *packed = payload + 4 * num_blocks;
    uint8_t trits[TSH_MAX_BLOCK + 8];
    int is_damaged = 0;
    for (size_t b = 0; b < num_blocks; b++) {
        size_t length = n < block ? n : block;
        float scale = load_float(payload + 4 * b);
        is_damaged |= unpack_trits(packed, length, trits) || !is_scale(scale);
        scale *= weight;
        for (size_t i = 0; i < length; i++) {
            TSH_EMIT(i, (float)((trits[i] & 1) - (trits[i] >> 1)) * scale);
        }
        packed += (length + 4) / 5;
        out += length;
        n -= length;
    }
    return is_damaged;
}
