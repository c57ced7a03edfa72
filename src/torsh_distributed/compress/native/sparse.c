/* Which elements a sparse message holds, and how their places are written: see selection.py and gaps.py. */
#include "kernels.h"

#define GROUP 16 /* elements looked at together: at 1 % most groups have nothing in them */

static inline uint32_t magnitude_of(float value) { return bits_of(value) & 0x7fffffffu; }

typedef int32_t lanes __attribute__((vector_size(16))); /* compilers do not find the vectors in this loop by themselves */

static inline int group_reaches(const float *x, int32_t least) {
    const lanes all = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff}, limit = {least, least, least, least};
    lanes reached = {0}, values;
    for (size_t j = 0; j < GROUP; j += 4) {
        memcpy(&values, x + j, sizeof values);
        reached |= (values & all) >= limit;
    }
    uint64_t halves[2];
    memcpy(halves, &reached, sizeof halves);
    return (halves[0] | halves[1]) != 0;
}

/* Magnitudes compare as their bits do. */
size_t tsh_at_least(const float *restrict x, size_t n, float threshold, int64_t *restrict out) {
    const int32_t least = (int32_t)magnitude_of(threshold);
    size_t count = 0, i = 0;
    for (; i + GROUP <= n; i += GROUP) {
        if (group_reaches(x + i, least)) {
            for (size_t j = 0; j < GROUP; j++) {
                out[count] = (int64_t)(i + j); /* overwritten by the next one unless it is kept */
                count += (int32_t)magnitude_of(x[i + j]) >= least;
            }
        }
    }
    for (; i < n; i++) {
        if ((int32_t)magnitude_of(x[i]) >= least) {
            out[count++] = (int64_t)i;
        }
    }
    return count;
}

/* Adds each value, times 1 or -1, at its place; places count from `offset`, and lie in `out`. */
void tsh_add_at(float *restrict out, const int64_t *restrict indices, const float *restrict values, size_t count,
                int64_t offset, float sign) {
    for (size_t i = 0; i < count; i++) {
        out[indices[i] - offset] += sign * values[i];
    }
}

/* One digit of the k-th largest magnitude among those that agree with `found` above the digit; k counts on from there. */
static uint32_t next_digit(const uint32_t *magnitudes, size_t count, uint32_t found, int shift, int width, size_t *k) {
    size_t histogram[2048] = {0};
    const uint32_t mask = (1u << width) - 1;
    for (size_t i = 0; i < count; i++) {
        histogram[magnitudes[i] >> shift & mask] += (uint64_t)magnitudes[i] >> (shift + width) == found;
    }
    uint32_t digit = mask;
    while (histogram[digit] < *k) {
        *k -= histogram[digit--];
    }
    return found << width | digit;
}

/* Keeps, of `count` increasing indices, those of the k largest magnitudes, of equal ones the first; 0 < k <= count.
 * `magnitudes` is room for `count` numbers. */
void tsh_keep_largest(const float *restrict x, int64_t *restrict indices, size_t count, size_t k,
                      uint32_t *restrict magnitudes) {
    for (size_t i = 0; i < count; i++) {
        magnitudes[i] = magnitude_of(x[indices[i]]);
    }
    size_t num_ties = k; /* in the end: how many of exactly the k-th magnitude are kept */
    uint32_t kth = next_digit(magnitudes, count, 0, 20, 11, &num_ties);
    kth = next_digit(magnitudes, count, kth, 10, 10, &num_ties);
    kth = next_digit(magnitudes, count, kth, 0, 10, &num_ties);
    size_t kept = 0;
    for (size_t i = 0; i < count && kept < k; i++) {
        size_t is_tie = magnitudes[i] == kth && num_ties > 0;
        num_ties -= is_tie;
        indices[kept] = indices[i];
        kept += is_tie | (magnitudes[i] > kth);
    }
}

/* `low` takes the lowest bits of each index, `unary` a bit at the rest of it plus its number (`low_bits` < 0: a bit at
 * each index). Both are zero before. */
void tsh_indices_encode(const int64_t *restrict indices, size_t count, int low_bits, uint8_t *restrict low,
                        uint8_t *restrict unary) {
    if (low_bits < 0) {
        for (size_t i = 0; i < count; i++) {
            unary[indices[i] >> 3] |= (uint8_t)(1u << (indices[i] & 7));
        }
        return;
    }
    const uint64_t mask = (1ull << low_bits) - 1;
    uint64_t pending = 0;
    int num_pending = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t index = (uint64_t)indices[i], place = (index >> low_bits) + i;
        unary[place >> 3] |= (uint8_t)(1u << (place & 7));
        pending |= (index & mask) << num_pending;
        for (num_pending += low_bits; num_pending >= 8; num_pending -= 8) {
            *low++ = (uint8_t)pending;
            pending >>= 8;
        }
    }
    if (num_pending > 0) {
        *low = (uint8_t)pending;
    }
}

/* Returns 0, 1 where there are not `count` bits in `unary`, or 2 where indices are out of order or not below `n`. */
int tsh_indices_decode(const uint8_t *low, const uint8_t *unary, size_t num_unary_bits, size_t count, int low_bits,
                       int64_t n, int64_t *out) {
    const int shift = low_bits < 0 ? 0 : low_bits;
    const uint64_t mask = (1ull << shift) - 1;
    uint64_t pending = 0;
    int num_pending = 0, is_bad = 0;
    size_t found = 0;
    int64_t last = -1;
    for (size_t start = 0; start < num_unary_bits; start += 64) {
        uint64_t word = 0;
        size_t left = num_unary_bits - start;
        memcpy(&word, unary + start / 8, left >= 64 ? 8 : (left + 7) / 8);
        if (left < 64) {
            word &= (1ull << left) - 1;
        }
        for (; word != 0; word &= word - 1) {
            if (found == count) {
                return 1;
            }
            for (; num_pending < shift; num_pending += 8) {
                pending |= (uint64_t)*low++ << num_pending;
            }
            int64_t place = (int64_t)start + __builtin_ctzll(word);
            int64_t high = low_bits < 0 ? place : place - (int64_t)found;
            int64_t index = (int64_t)((uint64_t)high << shift | (pending & mask));
            pending >>= shift;
            num_pending -= shift;
            is_bad |= (index <= last) | (index >= n);
            last = index;
            out[found++] = index;
        }
    }
    return found != count ? 1 : is_bad ? 2 : 0;
}
