/* What collectives walk in: spans of a tensor, the slots of a step, and the two halves of a copy. */
#ifndef TORSH_SHM_STEPS_H
#define TORSH_SHM_STEPS_H

#include "core.h"

typedef struct {
    size_t start, length;
} tsh_span;

static inline size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

/* Chunk number `index` of `total` units, at most `chunk` each; empty beyond the end. */
static inline tsh_span chunk_of(size_t total, size_t chunk, size_t index) {
    size_t start = smaller(index * chunk, total);
    return (tsh_span){start, smaller(chunk, total - start)};
}

/* The slot a rank writes before meeting number `step`. */
static inline char *slot_of(const tsh_group *group, int rank, uint64_t step) {
    return group->slots + (2 * (size_t)rank + (step & 1)) * group->slot_bytes;
}

/* A copy in chunks: `put` writes chunk `index` into slots before a meeting, `take` reads it after. */
typedef struct tsh_move tsh_move;
struct tsh_move {
    void (*put)(tsh_group *group, const tsh_move *move, size_t index, uint64_t step);
    void (*take)(tsh_group *group, const tsh_move *move, size_t index, uint64_t step);
    char *const *out;
    const size_t *out_bytes;
    char *const *in;
    const size_t *in_bytes;
    size_t chunk;
    int root;
    const void *more; /* what `put` and `take` of some need beyond this */
};

/* collectives.c: from each to each, `in_bytes` and `out_bytes` by rank. */
int tsh_exchange(tsh_group *group, const tsh_move *move, int dtype, size_t amount);

#endif
