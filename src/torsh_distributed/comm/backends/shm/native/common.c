/* Tensors that lie in the segment itself: what one rank writes there the others read where it is, without a copy between.
 *
 * There are two rings of slots: of buffers that all ranks have together, and of those that each has apart, for the others
 * to read from or to write into. Every rank asks for buffers in the same order, so the n-th buffer of a ring is in the same
 * slot everywhere. A slot belongs to one number at a time: where a rank still has an earlier one there, or counts
 * differently, as after an error that only it caught, the asker gets nothing, and the call goes the usual way: whether all
 * ranks have their buffer in place is told at the call's first meeting.
 */
#include "core.h"

#include <fcntl.h>

static char *place_in(const tsh_group *group, tsh_common_use use, size_t slot) {
    return group->common + ((size_t)use * TSH_COMMON_SLOTS + slot) * TSH_COMMON_BYTES;
}

static _Atomic uint64_t *live_of(const tsh_group *group, int rank, tsh_common_use use, size_t slot) {
    return &group->ranks[rank].common_live[use][slot];
}

/* Show that the slot is taken, then look whether somebody has it for another number: of two who come at once at least
 * one sees the other. */
static bool claim(tsh_group *group, tsh_common_use use, size_t slot, uint64_t number) {
    _Atomic uint64_t *mine = live_of(group, group->rank, use, slot);
    if (atomic_load(mine) != 0) {
        return false;
    }
    atomic_store(mine, number);
    for (int rank = 0; rank < group->num_ranks; rank++) {
        uint64_t theirs = atomic_load(live_of(group, rank, use, slot));
        if (theirs != 0 && theirs != number) {
            atomic_store(mine, 0);
            return false;
        }
    }
    return true;
}

/* What a rank may have of a slot. */
static size_t region_bytes(const tsh_group *group, tsh_common_use use) {
    size_t regions = use == TSH_APART ? (size_t)group->num_ranks : 1;
    return TSH_COMMON_BYTES / regions / TSH_LINE * TSH_LINE;
}

/* Where the buffer of a rank begins: one place for all, or one for each. */
char *tsh_common_start(const tsh_group *group, tsh_common_use use, uint64_t number, int rank) {
    char *slot = place_in(group, use, number % TSH_COMMON_SLOTS);
    return use == TSH_APART ? slot + (size_t)rank * region_bytes(group, use) : slot;
}

/* Memory for a buffer of this rank, before anybody writes there: a page that cannot be had would kill the writer. */
static bool back(tsh_group *group, tsh_common_use use, uint64_t number, size_t bytes) {
    size_t *backed = &group->commons[use].backed[number % TSH_COMMON_SLOTS];
    if (bytes > *backed) {
        off_t start = (off_t)(tsh_common_start(group, use, number, group->rank) - group->base);
        if (posix_fallocate(group->fd, start, (off_t)bytes) != 0) {
            return false;
        }
        *backed = bytes;
    }
    return true;
}

/* A buffer of `bytes`; its address, or NULL. `number` is what to give back. Together: one buffer for all ranks, the same
 * bytes for everybody. Apart: one for each, which may be as long as it wants. */
char *tsh_common_take(tsh_group *group, tsh_common_use use, size_t bytes, uint64_t *number) {
    tsh_common *common = &group->commons[use];
    uint64_t highest = atomic_load(&common->highest);
    common->count = (highest > common->count ? highest : common->count) + 1;
    *number = common->count;
    bool fits = bytes > 0 && bytes <= region_bytes(group, use) && back(group, use, *number, bytes);
    if (!fits || !claim(group, use, *number % TSH_COMMON_SLOTS, *number)) {
        return NULL;
    }
    return tsh_common_start(group, use, *number, group->rank);
}

/* Somebody came to a meeting with this number: it is used up, and a rank that is behind goes on after it. */
void tsh_common_catch_up(tsh_group *group, tsh_common_use use, uint64_t number) {
    _Atomic uint64_t *highest = &group->commons[use].highest;
    if (number > atomic_load(highest)) {
        atomic_store(highest, number);
    }
}

void tsh_common_release(tsh_group *group, tsh_common_use use, uint64_t number) {
    atomic_store(live_of(group, group->rank, use, number % TSH_COMMON_SLOTS), 0);
}

/* The number of the buffer that lies at this address, or 0 if it is not one of these. */
uint64_t tsh_common_number(const tsh_group *group, tsh_common_use use, const char *address) {
    const char *first = place_in(group, use, 0);
    if (address < first || address >= first + TSH_COMMON_SLOTS * TSH_COMMON_BYTES) {
        return 0;
    }
    return atomic_load(live_of(group, group->rank, use, (size_t)(address - first) / TSH_COMMON_BYTES));
}
