/* The checksum of a payload: see noise.py. */
#include "kernels.h"

uint32_t tsh_checksum(const uint8_t *from, size_t num_bytes) {
    size_t num_words = num_bytes / 4;
    uint32_t sum = 0, index = 0, word;
    for (size_t i = 0; i < num_words; i++, index += TSH_GOLDEN) {
        memcpy(&word, from + 4 * i, 4);
        sum += mixed(index + word);
    }
    if (num_bytes % 4) {
        word = 0;
        memcpy(&word, from + 4 * num_words, num_bytes % 4);
        sum += mixed(index + word);
    }
    return sum;
}
