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

/* A slot with a share for every other rank: how many there are, and where that of `to` lies in the slot of `from`. */
static inline size_t num_shares(const tsh_group *group) {
    return group->num_ranks > 1 ? (size_t)group->num_ranks - 1 : 1;
}

static inline size_t share_of(int from, int to) { return (size_t)(to < from ? to : to - 1); }

/* A copy in chunks: `put` writes chunk `index` into slots before a meeting, `take` reads it after. */
typedef struct tsh_move tsh_move;
struct tsh_move {
    void (*put)(tsh_group *group, const tsh_move *move, size_t index, uint64_t step);
    void (*take)(tsh_group *group, const tsh_move *move, size_t index, uint64_t step);
    /* Where common buffers are used: all that goes to a rank, written into its output; or NULL, and `direct` is told where
     * what comes from each rank lies, for `take` to read from. */
    void (*write)(const tsh_move *move, int rank, char *to);
    const char **direct;
    char *const *out;
    const size_t *out_bytes;
    char *const *in;
    const size_t *in_bytes;
    size_t chunk;
    int root;
    const void *more; /* what `put` and `take` of some need beyond this */
};

/* collectives.c: from each to each, `in_bytes` and `out_bytes` by rank. */
int tsh_exchange(tsh_group *group, const tsh_move *move, int dtype, size_t amount, uint64_t common);

#endif
