/* Codes of 1 to 8 bits, one to a byte in memory, to as many bits on the wire. See bits.py for the layout. */
#include "kernels.h"

size_t tsh_packed_bytes(size_t n, int bits) {
    size_t total = 0;
    for (int width = 8; width > 0; width /= 2) {
        total += bits & width ? (n * (size_t)width + 7) / 8 : 0;
    }
    return total;
}

void tsh_pack(uint8_t *restrict codes, size_t n, int bits, uint8_t *restrict out) {
    memset(codes + n, 0, 8);
    int shift = 0;
    for (int width = 8; width > 0; width /= 2) {
        if (!(bits & width)) {
            continue;
        }
        size_t stride = (n * (size_t)width + 7) / 8;
        uint8_t mask = (uint8_t)((1 << width) - 1);
        for (size_t k = 0; k < stride; k++) {
            out[k] = (uint8_t)(codes[k] >> shift) & mask;
        }
        for (int lane = 1; lane < 8 / width; lane++) {
            const uint8_t *from = codes + (size_t)lane * stride;
            int up = lane * width;
            for (size_t k = 0; k < stride; k++) {
                out[k] |= (uint8_t)(((from[k] >> shift) & mask) << up);
            }
        }
        out += stride;
        shift += width;
    }
}

void tsh_unpack(const uint8_t *restrict packed, size_t n, int bits, uint8_t *restrict codes) {
    int shift = 0;
    for (int width = 8; width > 0; width /= 2) {
        if (!(bits & width)) {
            continue;
        }
        size_t stride = (n * (size_t)width + 7) / 8;
        uint8_t mask = (uint8_t)((1 << width) - 1);
        for (int lane = 0; lane < 8 / width; lane++) {
            uint8_t *to = codes + (size_t)lane * stride;
            int down = lane * width;
            if (shift == 0) {
                for (size_t k = 0; k < stride; k++) {
                    to[k] = (uint8_t)(packed[k] >> down) & mask;
                }
            } else {
                for (size_t k = 0; k < stride; k++) {
                    to[k] |= (uint8_t)(((packed[k] >> down) & mask) << shift);
                }
            }
        }
        packed += stride;
        shift += width;
    }
}
