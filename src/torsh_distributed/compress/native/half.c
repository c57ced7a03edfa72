/* Casts to and from half precision where the machine has instructions for them and torch does not use them. */
#include "kernels.h"

#ifdef TSH_HAS_HALF
void tsh_half_encode(const float *x, size_t n, float divisor, __fp16 *out) {
    for (size_t i = 0; i < n; i++) {
        out[i] = (__fp16)(x[i] / divisor);
    }
}

void tsh_half_decode(const __fp16 *payload, size_t n, float *out, float weight) {
    for (size_t i = 0; i < n; i++) {
        out[i] = (float)payload[i] * weight;
    }
}
#endif
