/* Where the parts of a segment lie. Every rank computes the same from three numbers. */
#include "core.h"

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

typedef struct {
    size_t shared, ranks, counts, channels, slots, rings, common, end;
} tsh_offsets;

static tsh_offsets offsets(int num_ranks, size_t slot_bytes, size_t ring_bytes) {
    size_t n = (size_t)num_ranks;
    tsh_offsets at;
    at.shared = TSH_PREAMBLE_BYTES;
    at.ranks = at.shared + sizeof(tsh_shared);
    at.counts = at.ranks + n * sizeof(tsh_rank_line);
    at.channels = round_up(at.counts + 4 * n * n * sizeof(uint64_t), TSH_LINE);
    at.slots = round_up(at.channels + n * n * sizeof(tsh_channel), TSH_PAGE);
    at.rings = at.slots + (2 * n + 2) * slot_bytes;
    at.common = round_up(at.rings + n * n * ring_bytes, TSH_PAGE);
    at.end = at.common + TSH_COMMON_USES * TSH_COMMON_SLOTS * TSH_COMMON_BYTES;
    return at;
}

size_t tsh_segment_bytes(int num_ranks, size_t slot_bytes, size_t ring_bytes) {
    return offsets(num_ranks, slot_bytes, ring_bytes).end;
}

/* The part that must have memory from the start; rings and common buffers get theirs when first used. */
size_t tsh_backed_bytes(int num_ranks, size_t slot_bytes) { return offsets(num_ranks, slot_bytes, 0).rings; }

void tsh_attach(tsh_group *group, char *base) {
    tsh_offsets at = offsets(group->num_ranks, group->slot_bytes, group->ring_bytes);
    group->base = base;
    group->shared = (tsh_shared *)(base + at.shared);
    group->ranks = (tsh_rank_line *)(base + at.ranks);
    group->counts = (uint64_t *)(base + at.counts);
    group->channels = (tsh_channel *)(base + at.channels);
    group->slots = base + at.slots;
    group->rings = base + at.rings;
    group->common = base + at.common;
}
