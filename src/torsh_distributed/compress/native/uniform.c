/* Levels at equal distances: int8 around zero, and 1 to 8 bits between the least and the largest of a block. */
#include "kernels.h"

#define ROUNDER 12582912.0f /* 1.5 * 2**23: adding it rounds to nearest, ties to even, and leaves the integer below */

void tsh_int8_encode(const float *x, size_t n, size_t block, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block;
    int8_t *codes = (int8_t *)out + 4 * num_blocks;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        float largest = largest_magnitude(x + start, length);
        if (largest < TSH_TINY) {
            store_float(out + 4 * b, 0.0f);
            memset(codes + start, 0, length);
            continue;
        }
        store_float(out + 4 * b, largest / 127.0f);
        float inverse = 127.0f / largest;
        for (size_t i = start; i < start + length; i++) {
            codes[i] = (int8_t)bits_of(x[i] * inverse + ROUNDER);
        }
    }
}

int tsh_int8_decode(const uint8_t *payload, size_t n, size_t block, float *out, float weight, int adds) {
    size_t num_blocks = (n + block - 1) / block;
    const int8_t *codes = (const int8_t *)payload + 4 * num_blocks;
    int is_damaged = 0;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t end = n - start < block ? n : start + block;
        float scale = load_float(payload + 4 * b);
        is_damaged |= !is_scale(scale);
        scale *= weight;
        for (size_t i = start; i < end; i++) {
            TSH_EMIT(i, (float)codes[i] * scale);
        }
    }
    return is_damaged;
}

/* Floats as integers of the same order, and back. */
static inline int32_t ordered(float value) {
    int32_t bits = (int32_t)bits_of(value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

static inline float unordered(int32_t order) { return float_of((uint32_t)(order ^ ((order >> 31) & 0x7fffffff))); }

void tsh_nbit_encode(const float *x, size_t n, size_t block, int bits, uint32_t key, uint32_t offset, uint8_t *out) {
    size_t num_blocks = (n + block - 1) / block;
    uint8_t *packed = out + 8 * num_blocks;
    uint8_t codes[TSH_MAX_BLOCK + 8];
    int32_t last = (1 << bits) - 1;
    float levels = (float)last;
    for (size_t b = 0, start = 0; b < num_blocks; b++, start += block) {
        size_t length = n - start < block ? n - start : block;
        const float *from = x + start;
        int32_t lowest = INT32_MAX, highest = INT32_MIN;
        for (size_t i = 0; i < length; i++) {
            int32_t order = ordered(from[i]);
            lowest = order < lowest ? order : lowest;
            highest = order > highest ? order : highest;
        }
        /* Halves first: the distance between the largest floats is not a float. + 0: no negative zero. */
        float high = unordered(highest) * 0.5f, low = unordered(lowest) * 0.5f;
        float middle = (high + low) + 0.0f, reach = high - low;
        int is_flat = reach < TSH_TINY;
        float step = is_flat ? 0.0f : reach / levels;
        float inverse = is_flat ? 0.0f : levels * 0.5f / reach;
        float centre = levels * 0.5f;
        uint32_t draw = first_draw(key, offset + (uint32_t)start);
        for (size_t i = 0; i < length; i++, draw += TSH_GOLDEN) {
            float level = (from[i] - middle) * inverse + centre;
            int32_t code = (int32_t)(level + uniform(draw));
            codes[i] = (uint8_t)(code > last ? last : code);
        }
        store_float(out + 8 * b, middle);
        store_float(out + 8 * b + 4, step);
        tsh_pack(codes, length, bits, packed);
        packed += tsh_packed_bytes(length, bits);
    }
}

int tsh_nbit_decode(const uint8_t *payload, size_t n, size_t block, int bits, float *out, float weight, int adds) {
    size_t num_blocks = (n + block - 1) / block;
    const uint8_t *packed = payload + 8 * num_blocks;
    uint8_t codes[TSH_MAX_BLOCK + 8];
    int32_t last = (1 << bits) - 1;
    int is_damaged = 0;
    for (size_t b = 0; b < num_blocks; b++) {
        size_t length = n < block ? n : block;
        float middle = load_float(payload + 8 * b), step = load_float(payload + 8 * b + 4);
        is_damaged |= !is_scale(step) || (bits_of(middle) & 0x7fffffffu) >= TSH_INFINITY;
        middle *= weight;
        step *= weight;
        tsh_unpack(packed, length, bits, codes);
        for (size_t i = 0; i < length; i++) {
            TSH_EMIT(i, (float)(2 * (int32_t)codes[i] - last) * step + middle);
        }
        packed += tsh_packed_bytes(length, bits);
        out += length;
        n -= length;
    }
    return is_damaged;
}
