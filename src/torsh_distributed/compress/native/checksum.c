/* The checksum of a payload: see noise.py. */
#include "kernels.h"

uint32_t tsh_checksum(const uint8_t *from, size_t num_bytes) {
    size_t num_words = num_bytes / 4;
    uint32_t sum = 0, word;
    for (size_t i = 0; i < num_words; i++) {
        memcpy(&word, from + 4 * i, 4);
        sum += noise(word, (uint32_t)i);
    }
    if (num_bytes % 4) {
        word = 0;
        memcpy(&word, from + 4 * num_words, num_bytes % 4);
        sum += noise(word, (uint32_t)num_words);
    }
    return sum;
}
