/* Floats in fewer bits, every bit of them kept, for links that are slower than this loop.
 *
 * Values that belong together have few exponents: of normally distributed ones, seven in a row cover 97 in a hundred.
 * So a float becomes 24 bits of sign and mantissa, as they are, and 3 bits for the exponent: its distance from a base
 * that its block has chosen, or 7 for one that is elsewhere and follows as a byte. That is 27.2 bits of 32 for normally
 * distributed values. A block that would not get smaller is copied, and so is what is left after the last whole block.
 *
 * Loops are plain and have fixed lengths, for the compiler to vectorise; only the bytes that follow are taken one by one.
 */
#include "core.h"

#include <string.h>

#define BLOCK 4096 /* floats; all parts of a block stay in the first cache */
#define ELSEWHERE 7
#define EIGHTH (BLOCK / 8)
#define SAMPLED 8 /* one exponent in so many chooses the base */

/* What stands before each block, and is followed by low[BLOCK], high[BLOCK], codes and the exponents elsewhere, filled
 * up to a multiple of eight bytes; or by the floats themselves. */
typedef struct {
    uint32_t base;
    uint32_t num_elsewhere; /* COPIED: the floats themselves follow */
} tsh_block_head;

#define COPIED UINT32_MAX
#define LOW_BYTES (2 * BLOCK)
#define HIGH_BYTES BLOCK
#define CODES_BYTES (3 * EIGHTH)
#define MOST_ELSEWHERE (4 * BLOCK - LOW_BYTES - HIGH_BYTES - CODES_BYTES - 8)

static size_t filled_up(size_t bytes) { return (bytes + 7) / 8 * 8; }

size_t tsh_packed_room(size_t numel) {
    return sizeof(uint64_t) + (numel / BLOCK + 1) * sizeof(tsh_block_head) + 4 * numel;
}

/* The first of the seven exponents in a row that cover most of a sample. */
static uint32_t choose_base(const uint32_t *bits) {
    uint16_t counts[256 + ELSEWHERE] = {0};
    for (size_t i = 0; i < BLOCK; i += SAMPLED) {
        counts[bits[i] >> 23 & 255]++;
    }
    uint32_t base = 0, covered = 0, most = 0;
    for (uint32_t last = 0; last < 256; last++) {
        covered += counts[last] - (last >= ELSEWHERE ? counts[last - ELSEWHERE] : 0u);
        if (covered > most) {
            most = covered;
            base = last >= ELSEWHERE - 1 ? last - (ELSEWHERE - 1) : 0;
        }
    }
    return base;
}

/* Eight codes of three bits in three bytes; the eight lie an eighth of a block apart, so that bytes are lanes. */
static void store_codes(const uint8_t *restrict codes, uint8_t *restrict out) {
    for (size_t i = 0; i < EIGHTH; i++) {
        const uint8_t *c = codes + i;
        uint8_t third = c[2 * EIGHTH], sixth = c[5 * EIGHTH];
        out[i] = (uint8_t)(c[0] | c[EIGHTH] << 3 | third << 6);
        out[i + EIGHTH] = (uint8_t)(third >> 2 | c[3 * EIGHTH] << 1 | c[4 * EIGHTH] << 4 | sixth << 7);
        out[i + 2 * EIGHTH] = (uint8_t)(sixth >> 1 | c[6 * EIGHTH] << 2 | c[7 * EIGHTH] << 5);
    }
}

static void load_codes(const uint8_t *restrict in, uint8_t *restrict codes) {
    for (size_t i = 0; i < EIGHTH; i++) {
        uint8_t first = in[i], second = in[i + EIGHTH], third = in[i + 2 * EIGHTH];
        codes[i] = first & 7;
        codes[i + EIGHTH] = first >> 3 & 7;
        codes[i + 2 * EIGHTH] = (uint8_t)(first >> 6 | (second & 1) << 2);
        codes[i + 3 * EIGHTH] = second >> 1 & 7;
        codes[i + 4 * EIGHTH] = second >> 4 & 7;
        codes[i + 5 * EIGHTH] = (uint8_t)(second >> 7 | (third & 3) << 1);
        codes[i + 6 * EIGHTH] = third >> 2 & 7;
        codes[i + 7 * EIGHTH] = third >> 5;
    }
}

/* Whether one of eight codes is ELSEWHERE, which has all three bits. */
static bool has_elsewhere(const uint8_t *codes) {
    uint64_t eight;
    memcpy(&eight, codes, sizeof eight);
    return (eight & eight >> 1 & eight >> 2 & 0x0101010101010101u) != 0;
}

static size_t copy(const uint32_t *bits, size_t numel, char *out) {
    tsh_block_head head = {.num_elsewhere = COPIED};
    memcpy(out, &head, sizeof head);
    if (numel != 0) { /* then there may be no address either, and memcpy wants one */
        memcpy(out + sizeof head, bits, 4 * numel);
    }
    return sizeof head + 4 * numel;
}

static size_t pack_block(const uint32_t *restrict bits, char *restrict out) {
    uint8_t exponents[BLOCK], codes[BLOCK], elsewhere[BLOCK + 1];
    tsh_block_head head = {.base = choose_base(bits)};
    uint8_t base = (uint8_t)head.base;
    for (size_t i = 0; i < BLOCK; i++) {
        uint8_t exponent = (uint8_t)(bits[i] >> 23), distance = (uint8_t)(exponent - base);
        exponents[i] = exponent;
        codes[i] = distance < ELSEWHERE ? distance : ELSEWHERE;
    }
    for (size_t i = 0; i < BLOCK; i += 8) {
        size_t end = has_elsewhere(codes + i) ? i + 8 : i;
        for (size_t k = i; k < end; k++) {
            elsewhere[head.num_elsewhere] = exponents[k];
            head.num_elsewhere += codes[k] == ELSEWHERE;
        }
    }
    if (head.num_elsewhere > MOST_ELSEWHERE) {
        return copy(bits, BLOCK, out);
    }
    memcpy(out, &head, sizeof head);
    uint16_t *restrict low = (uint16_t *)(out + sizeof head);
    uint8_t *restrict high = (uint8_t *)low + LOW_BYTES;
    for (size_t i = 0; i < BLOCK; i++) {
        low[i] = (uint16_t)bits[i];
        high[i] = (uint8_t)((bits[i] >> 16 & 0x7f) | (bits[i] >> 24 & 0x80));
    }
    store_codes(codes, high + HIGH_BYTES);
    uint8_t *rest = high + HIGH_BYTES + CODES_BYTES;
    memset(elsewhere + head.num_elsewhere, 0, filled_up(head.num_elsewhere) - head.num_elsewhere);
    memcpy(rest, elsewhere, filled_up(head.num_elsewhere));
    return (size_t)((char *)rest - out) + filled_up(head.num_elsewhere);
}

static size_t unpack_block(const char *restrict in, tsh_block_head head, uint32_t *restrict bits) {
    const uint16_t *restrict low = (const uint16_t *)(in + sizeof head);
    const uint8_t *restrict high = (const uint8_t *)low + LOW_BYTES;
    const uint8_t *elsewhere = high + HIGH_BYTES + CODES_BYTES;
    uint8_t codes[BLOCK], exponents[BLOCK], rest[BLOCK + 1] = {0};
    load_codes(high + HIGH_BYTES, codes);
    memcpy(rest, elsewhere, head.num_elsewhere);
    for (size_t i = 0; i < BLOCK; i++) {
        exponents[i] = (uint8_t)(codes[i] + head.base);
    }
    for (size_t i = 0, taken = 0; i < BLOCK; i += 8) {
        size_t end = has_elsewhere(codes + i) ? i + 8 : i;
        for (size_t k = i; k < end; k++) {
            exponents[k] = codes[k] == ELSEWHERE ? rest[taken] : exponents[k];
            taken += codes[k] == ELSEWHERE;
        }
    }
    for (size_t i = 0; i < BLOCK; i++) {
        uint32_t top = high[i];
        bits[i] = low[i] | (top & 0x7f) << 16 | (top & 0x80) << 24 | (uint32_t)exponents[i] << 23;
    }
    return sizeof head + LOW_BYTES + HIGH_BYTES + CODES_BYTES + filled_up(head.num_elsewhere);
}

/* A message begins with how many floats it has. */
size_t tsh_pack(const char *floats, size_t numel, char *out) {
    const uint32_t *bits = (const uint32_t *)floats;
    uint64_t count = numel;
    char *end = out + sizeof count;
    memcpy(out, &count, sizeof count);
    for (; numel >= BLOCK; numel -= BLOCK, bits += BLOCK) {
        end += pack_block(bits, end);
    }
    return (size_t)(end - out) + copy(bits, numel, end);
}

bool tsh_unpack(const char *in, size_t numel, char *floats) {
    uint32_t *bits = (uint32_t *)floats;
    uint64_t told;
    memcpy(&told, in, sizeof told);
    if (told != numel) {
        return false;
    }
    in += sizeof told;
    for (size_t count = BLOCK; count == BLOCK; bits += count, numel -= count) {
        tsh_block_head head;
        memcpy(&head, in, sizeof head);
        count = numel < BLOCK ? numel : BLOCK;
        if (head.num_elsewhere == COPIED) {
            memcpy(bits, in + sizeof head, 4 * count);
            in += sizeof head + 4 * count;
        } else if (count == BLOCK && head.num_elsewhere <= MOST_ELSEWHERE) {
            in += unpack_block(in, head, bits);
        } else {
            return false;
        }
    }
    return true;
}
