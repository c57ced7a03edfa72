/* The collectives. Each walks its tensors in chunks that fit the slots; see the note on steps in core.h.
 *
 * Where a chunk passes through two or three stages, one loop runs all of them at once on successive chunks, so that
 * every rank always has work between two meetings, and chunks are still in the cache when the next stage reads them.
 */
#include "steps.h"

#include <string.h>

/* Below this many bytes every rank folds the whole tensor itself: one meeting instead of two. */
#define TSH_SINGLE_BYTES (64 * 1024)
/* A fold into the caller's tensor is copied to the result slot in pieces that are still in the first cache. */
#define TSH_PIECE_BYTES (8 * 1024)

/* An empty tensor has no address, and memcpy takes none, not even for nothing; a tensor onto itself is left alone. */
static void copy(char *to, const char *from, size_t bytes) {
    if (bytes > 0 && to != from) {
        memcpy(to, from, bytes);
    }
}

/* The part of `length` units that `rank` folds; whole cache lines, so that two ranks never write the same one. */
static tsh_span part_of(const tsh_group *group, size_t length, size_t element_bytes, int rank) {
    size_t line = TSH_LINE / element_bytes;
    size_t lines = (length + line - 1) / line;
    size_t start = smaller(lines * (size_t)rank / (size_t)group->num_ranks * line, length);
    size_t end = smaller(lines * ((size_t)rank + 1) / (size_t)group->num_ranks * line, length);
    return (tsh_span){start, end - start};
}

static size_t num_chunks(size_t total, size_t chunk) { return (total + chunk - 1) / chunk; }

static char *result_slot(const tsh_group *group, uint64_t step) { return slot_of(group, group->num_ranks, step); }

/* The largest chunk, in units of `unit` bytes, of which `shares` fit a slot; on line boundaries where it can be. */
static size_t units_per_slot(const tsh_group *group, size_t shares, size_t unit) {
    size_t bytes = group->slot_bytes / shares;
    bytes = bytes > TSH_LINE ? bytes / TSH_LINE * TSH_LINE : bytes;
    return bytes / unit;
}

static tsh_signature signature(tsh_operation operation, int dtype, int reduction, int root, size_t amount) {
    uint64_t kind = (uint64_t)operation | (uint64_t)(uint8_t)dtype << 8 | (uint64_t)(uint8_t)reduction << 16 |
                    (uint64_t)(root + 1) << 32;
    return (tsh_signature){kind, amount, 0};
}

/* After the first meeting: the highest number of a common buffer that a rank was called with, or 0 if none was. */
static uint64_t highest_in_common(tsh_group *group, tsh_common_use use) {
    uint64_t highest = 0;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        uint64_t number = tsh_signature_of(group, rank)->common;
        highest = number > highest ? number : highest;
    }
    tsh_common_catch_up(group, use, highest);
    return highest;
}

/* After the first meeting: whether every rank was called with the common buffer of this number. */
static bool all_in_common(tsh_group *group, tsh_common_use use, uint64_t number) {
    bool is_all = highest_in_common(group, use) == number;
    for (int rank = 0; rank < group->num_ranks && is_all; rank++) {
        is_all = tsh_signature_of(group, rank)->common == number;
    }
    return is_all;
}

int tsh_barrier(tsh_group *group) { return tsh_meet_as(group, signature(TSH_BARRIER, 0, 0, -1, 0)); }

/* The meeting at the end of a turn: none after the last; in the first, signatures are shown, unless they were. */
static int meet_in_turn(tsh_group *group, size_t turn, size_t last, const tsh_signature *mine) {
    if (turn == 0) {
        return mine != NULL ? tsh_meet_as(group, *mine) : tsh_meet(group);
    }
    return turn < last ? tsh_meet(group) : TSH_OK;
}

static void fold_inputs(const tsh_group *group, const tsh_fold *fold, char *out, const char **in, size_t numel) {
    if (group->num_ranks == 1) {
        copy(out, in[0], numel * fold->element_bytes);
    } else {
        fold->kernel(out, (const void *const *)in, group->num_ranks, numel, fold->divisor);
    }
}

/* Small: everyone copies in, meets once, and folds everything. */
static int all_reduce_whole(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold, tsh_signature mine) {
    uint64_t step = group->step + 1;
    copy(slot_of(group, group->rank, step), buffer, numel * fold->element_bytes);
    int status = tsh_meet_as(group, mine);
    if (status != TSH_OK) {
        return status;
    }
    const char *in[TSH_MAX_RANKS];
    for (int rank = 0; rank < group->num_ranks; rank++) {
        in[rank] = slot_of(group, rank, step);
    }
    in[group->rank] = buffer;
    fold_inputs(group, fold, buffer, in, numel);
    return TSH_OK;
}

/* Fold this rank's part of a chunk into the result slot, and into the caller's tensor if `keep`. */
static void fold_part(tsh_group *group, char *chunk, tsh_span part, uint64_t step, const tsh_fold *fold, bool keep) {
    const char *in[TSH_MAX_RANKS];
    char *result = result_slot(group, step);
    size_t size = fold->element_bytes, piece = TSH_PIECE_BYTES / size;
    for (size_t done = 0; done < part.length; done += piece) {
        size_t at = (part.start + done) * size, numel = smaller(piece, part.length - done);
        for (int rank = 0; rank < group->num_ranks; rank++) {
            in[rank] = slot_of(group, rank, step) + at;
        }
        in[group->rank] = chunk + at;
        if (keep) {
            fold_inputs(group, fold, chunk + at, in, numel);
            copy(result + at, chunk + at, numel * size);
        } else {
            fold_inputs(group, fold, result + at, in, numel);
        }
    }
}

/* Copy the parts of other ranks between a chunk and a slot. */
static void copy_others(char *to, const char *from, tsh_span mine, size_t length, size_t size) {
    size_t end = mine.start + mine.length;
    copy(to, from, mine.start * size);
    copy(to + end * size, from + end * size, (length - end) * size);
}

/* After the first meeting: whether some rank, or every rank, was called with tensors that all ranks see. */
static bool some_shared(const tsh_group *group) {
    bool is_some = false;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        is_some = is_some || tsh_signature_of(group, rank)->common != 0;
    }
    return is_some;
}

static bool all_shared(const tsh_group *group, uint64_t number) {
    bool is_all = true;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        is_all = is_all && tsh_signature_of(group, rank)->common == number;
    }
    return is_all;
}

/* Every chunk is copied in, folded part by part by the ranks, and copied out: to all ranks, or to `root` alone.
 * In turn t chunk t is copied in, chunk t - 1 folded and chunk t - 2 copied out. With `shown` NULL: signatures were
 * compared already. */
static int reduce_chunks(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold, int root,
                         const tsh_signature *shown) {
    size_t size = fold->element_bytes, chunk = units_per_slot(group, 1, size), num = num_chunks(numel, chunk);
    uint64_t step = group->step + 1;
    bool everyone = root < 0, takes = everyone || root == group->rank;
    for (size_t turn = 0; turn < num + 2; turn++) {
        if (turn < num) {
            tsh_span at = chunk_of(numel, chunk, turn);
            tsh_span part = part_of(group, at.length, size, group->rank);
            copy_others(slot_of(group, group->rank, step + turn), buffer + at.start * size, part, at.length, size);
        }
        if (turn >= 1 && turn - 1 < num) {
            tsh_span at = chunk_of(numel, chunk, turn - 1);
            tsh_span part = part_of(group, at.length, size, group->rank);
            fold_part(group, buffer + at.start * size, part, step + turn - 1, fold, takes);
        }
        if (turn >= 2 && takes) {
            tsh_span at = chunk_of(numel, chunk, turn - 2);
            tsh_span part = part_of(group, at.length, size, group->rank);
            copy_others(buffer + at.start * size, result_slot(group, step + turn - 2), part, at.length, size);
        }
        int status = meet_in_turn(group, turn, num + 1, shown);
        if (status != TSH_OK) {
            return status;
        }
        if (turn == 0 && shown != NULL && some_shared(group)) {
            return reduce_chunks(group, buffer, numel, fold, root, NULL); /* as those begin who are */
        }
    }
    return TSH_OK;
}

/* Every rank's tensor is where all of them see it: each folds its part out of all of them, and into all of them. */
static int reduce_in_place(tsh_group *group, char *const *buffers, size_t numel, const tsh_fold *fold) {
    const char *in[TSH_MAX_RANKS];
    size_t size = fold->element_bytes, piece = TSH_PIECE_BYTES / size;
    tsh_span part = part_of(group, numel, size, group->rank);
    char *own = buffers[group->rank];
    for (size_t done = 0; done < part.length; done += piece) {
        size_t at = (part.start + done) * size, bytes = smaller(piece, part.length - done) * size;
        for (int rank = 0; rank < group->num_ranks; rank++) {
            in[rank] = buffers[rank] + at;
        }
        fold_inputs(group, fold, own + at, in, bytes / size);
        for (int rank = 0; rank < group->num_ranks; rank++) {
            copy(buffers[rank] + at, own + at, bytes);
        }
    }
    return tsh_meet(group);
}

/* `buffers` are the tensors of all ranks, as this rank sees them; `number` is the same on all ranks for those. */
int tsh_all_reduce_shared(tsh_group *group, char *const *buffers, uint64_t number, size_t numel, const tsh_fold *fold) {
    char *own = buffers[group->rank];
    size_t bytes = numel * fold->element_bytes;
    tsh_signature mine = signature(TSH_ALL_REDUCE, fold->dtype, fold->reduction, -1, bytes);
    if (bytes <= smaller(TSH_SINGLE_BYTES, group->slot_bytes)) {
        return all_reduce_whole(group, own, numel, fold, mine);
    }
    mine.common = number;
    int status = tsh_meet_as(group, mine);
    if (status != TSH_OK) {
        return status;
    }
    return all_shared(group, number) ? reduce_in_place(group, buffers, numel, fold)
                                     : reduce_chunks(group, own, numel, fold, -1, NULL);
}

int tsh_all_reduce(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold) {
    size_t bytes = numel * fold->element_bytes;
    tsh_signature mine = signature(TSH_ALL_REDUCE, fold->dtype, fold->reduction, -1, bytes);
    if (bytes <= smaller(TSH_SINGLE_BYTES, group->slot_bytes)) {
        return all_reduce_whole(group, buffer, numel, fold, mine);
    }
    return reduce_chunks(group, buffer, numel, fold, -1, &mine);
}

int tsh_reduce(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold, int root) {
    tsh_signature mine = signature(TSH_REDUCE, fold->dtype, fold->reduction, root, numel * fold->element_bytes);
    return numel == 0 ? tsh_meet_as(group, mine) : reduce_chunks(group, buffer, numel, fold, root, &mine);
}

static size_t longest_of(const tsh_group *group, const size_t *lengths, size_t *total) {
    size_t longest = 0;
    *total = 0;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        *total += lengths[rank];
        longest = lengths[rank] > longest ? lengths[rank] : longest;
    }
    return longest;
}

/* The number of the common buffer that these parts, one after the other and of equal length, fill; else 0. */
static uint64_t common_of(const tsh_group *group, tsh_common_use use, char *const *parts, size_t bytes,
                          const char *start) {
    uint64_t number = tsh_common_number(group, use, parts[0]);
    for (int rank = 0; rank < group->num_ranks && number != 0; rank++) {
        number = parts[rank] == parts[0] + (size_t)rank * bytes ? number : 0;
    }
    return number != 0 && parts[0] == start ? number : 0;
}

/* Everybody's parts lie in the segment: fold them from there. Nobody writes there again before all ranks let go. */
static void fold_common(tsh_group *group, char *out, uint64_t number, size_t numel, const tsh_fold *fold) {
    const char *from[TSH_MAX_RANKS];
    size_t bytes = numel * fold->element_bytes;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        from[rank] = tsh_common_start(group, TSH_APART, number, rank) + (size_t)group->rank * bytes;
    }
    fold_inputs(group, fold, out, from, numel);
}

/* With `shown` NULL: signatures were compared already. */
static int reduce_scatter_chunks(tsh_group *group, char *out, char *const *in, const size_t *numels, size_t longest,
                                 const tsh_fold *fold, const tsh_signature *shown) {
    size_t size = fold->element_bytes;
    size_t chunk = units_per_slot(group, num_shares(group), size), num = num_chunks(longest, chunk);
    uint64_t step = group->step + 1;
    for (size_t turn = 0; turn <= num; turn++) {
        for (int rank = 0; turn < num && rank < group->num_ranks; rank++) {
            tsh_span at = chunk_of(numels[rank], chunk, turn);
            if (rank != group->rank) {
                copy(slot_of(group, group->rank, step + turn) + share_of(group->rank, rank) * chunk * size,
                       in[rank] + at.start * size, at.length * size);
            }
        }
        if (turn >= 1) {
            const char *from[TSH_MAX_RANKS];
            tsh_span at = chunk_of(numels[group->rank], chunk, turn - 1);
            for (int rank = 0; rank < group->num_ranks; rank++) {
                from[rank] = slot_of(group, rank, step + turn - 1);
                from[rank] += rank == group->rank ? 0 : share_of(rank, group->rank) * chunk * size;
            }
            from[group->rank] = in[group->rank] + at.start * size;
            fold_inputs(group, fold, out + at.start * size, from, at.length);
        }
        int status = meet_in_turn(group, turn, num, shown);
        if (status != TSH_OK) {
            return status;
        }
        if (turn == 0 && shown != NULL && highest_in_common(group, TSH_APART) != 0) {
            return reduce_scatter_chunks(group, out, in, numels, longest, fold, NULL); /* as those begin who have one */
        }
    }
    return TSH_OK;
}

/* `in` has one part per rank, of numels[rank] elements; `out` becomes the fold of everybody's part for this rank. */
int tsh_reduce_scatter(tsh_group *group, char *out, char *const *in, const size_t *numels, const tsh_fold *fold) {
    size_t total, longest = longest_of(group, numels, &total), bytes = total * fold->element_bytes;
    tsh_signature mine = signature(TSH_REDUCE_SCATTER, fold->dtype, fold->reduction, -1, bytes);
    uint64_t number = tsh_common_number(group, TSH_APART, in[0]);
    if (number != 0 && longest * (size_t)group->num_ranks == total) {
        const char *start = tsh_common_start(group, TSH_APART, number, group->rank);
        mine.common = common_of(group, TSH_APART, in, longest * fold->element_bytes, start);
    }
    if (mine.common == 0) {
        return reduce_scatter_chunks(group, out, in, numels, longest, fold, &mine);
    }
    int status = tsh_meet_as(group, mine);
    if (status != TSH_OK) {
        return status;
    }
    if (!all_in_common(group, TSH_APART, mine.common)) {
        return reduce_scatter_chunks(group, out, in, numels, longest, fold, NULL);
    }
    fold_common(group, out, mine.common, longest, fold);
    return TSH_OK;
}

/* The loop of all that only copies: put chunk t, meet, take chunk t while putting chunk t + 1. */
static int move_chunks(tsh_group *group, const tsh_move *move, size_t num, const tsh_signature *mine) {
    uint64_t step = group->step + 1;
    for (size_t turn = 0; turn <= num; turn++) {
        if (turn < num) {
            move->put(group, move, turn, step + turn);
        }
        if (turn >= 1) {
            move->take(group, move, turn - 1, step + turn - 1);
        }
        int status = meet_in_turn(group, turn, num, mine);
        if (status != TSH_OK) {
            return status;
        }
        if (turn == 0 && mine != NULL && highest_in_common(group, TSH_TOGETHER) != 0) {
            return move_chunks(group, move, num, NULL); /* as those begin who have one */
        }
    }
    return TSH_OK;
}

static void put_own(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    if (group->rank != move->root) {
        tsh_span at = chunk_of(move->in_bytes[0], move->chunk, index);
        copy(slot_of(group, group->rank, step), move->in[0] + at.start, at.length);
    }
}

static void take_all(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    for (int turn = 1; turn <= group->num_ranks && move->out != NULL; turn++) {
        /* Start with the next rank, not all with rank 0: readers spread over the slots. */
        int rank = (group->rank + turn) % group->num_ranks;
        tsh_span at = chunk_of(move->out_bytes[rank], move->chunk, index);
        const char *from = rank == group->rank ? move->in[0] + at.start : slot_of(group, rank, step);
        copy(move->out[rank] + at.start, from, at.length);
    }
}

int tsh_all_gather(tsh_group *group, char *const *out, const size_t *bytes, const char *in, int dtype) {
    size_t total, longest = longest_of(group, bytes, &total);
    char *own = (char *)in;
    tsh_move move = {.put = put_own, .take = take_all, .out = out, .out_bytes = bytes, .in = &own,
                     .in_bytes = &bytes[group->rank], .chunk = group->slot_bytes, .root = -1};
    tsh_signature mine = signature(TSH_ALL_GATHER, dtype, 0, -1, total);
    uint64_t number = tsh_common_number(group, TSH_TOGETHER, out[0]);
    if (number != 0 && in == out[group->rank] && longest * (size_t)group->num_ranks == total) {
        mine.common = common_of(group, TSH_TOGETHER, out, longest, tsh_common_start(group, TSH_TOGETHER, number, group->rank));
    }
    if (mine.common == 0) {
        return move_chunks(group, &move, num_chunks(longest, move.chunk), &mine);
    }
    int status = tsh_meet_as(group, mine);
    if (status != TSH_OK || all_in_common(group, TSH_TOGETHER, mine.common)) {
        return status; /* everybody wrote into the one buffer that all have: it is complete */
    }
    return move_chunks(group, &move, num_chunks(longest, move.chunk), NULL);
}

/* `out` has one tensor per rank on the root and is NULL elsewhere. */
int tsh_gather(tsh_group *group, char *const *out, const char *in, size_t bytes, int dtype, int root) {
    size_t sizes[TSH_MAX_RANKS];
    for (int rank = 0; rank < group->num_ranks; rank++) {
        sizes[rank] = bytes;
    }
    char *own = (char *)in;
    tsh_move move = {.put = put_own, .take = take_all, .out = root == group->rank ? out : NULL, .out_bytes = sizes,
                     .in = &own, .in_bytes = sizes, .chunk = group->slot_bytes, .root = root};
    tsh_signature mine = signature(TSH_GATHER, dtype, 0, root, bytes);
    return move_chunks(group, &move, num_chunks(bytes, move.chunk), &mine);
}

static void take_from_root(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    tsh_span at = chunk_of(move->in_bytes[0], move->chunk, index);
    if (group->rank != move->root) {
        copy(move->in[0] + at.start, slot_of(group, move->root, step), at.length);
    }
}

static void put_root(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    if (group->rank == move->root) {
        tsh_span at = chunk_of(move->in_bytes[0], move->chunk, index);
        copy(slot_of(group, group->rank, step), move->in[0] + at.start, at.length);
    }
}

int tsh_broadcast(tsh_group *group, char *buffer, size_t bytes, int dtype, int root) {
    tsh_move move = {.put = put_root, .take = take_from_root, .in = &buffer, .in_bytes = &bytes,
                     .chunk = group->slot_bytes, .root = root};
    tsh_signature mine = signature(TSH_BROADCAST, dtype, 0, root, bytes);
    return move_chunks(group, &move, num_chunks(bytes, move.chunk), &mine);
}

static void put_for_each(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    tsh_span at = chunk_of(move->in_bytes[0], move->chunk, index);
    for (int rank = 0; group->rank == move->root && rank < group->num_ranks; rank++) {
        if (rank != group->rank) {
            copy(slot_of(group, rank, step), move->in[rank] + at.start, at.length);
        }
    }
}

static void take_own(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    tsh_span at = chunk_of(move->in_bytes[0], move->chunk, index);
    const char *from = slot_of(group, group->rank, step);
    if (group->rank == move->root) {
        from = move->in[group->rank] + at.start;
    }
    copy(move->out[0] + at.start, from, at.length);
}

/* `in` has one tensor per rank on the root and is NULL elsewhere. The root writes into the slots of the others. */
int tsh_scatter(tsh_group *group, char *out, char *const *in, size_t bytes, int dtype, int root) {
    tsh_move move = {.put = put_for_each, .take = take_own, .out = &out, .in = in, .in_bytes = &bytes,
                     .chunk = group->slot_bytes, .root = root};
    tsh_signature mine = signature(TSH_SCATTER, dtype, 0, root, bytes);
    return move_chunks(group, &move, num_chunks(bytes, move.chunk), &mine);
}

static void put_shares(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    for (int rank = 0; rank < group->num_ranks; rank++) {
        tsh_span at = chunk_of(move->in_bytes[rank], move->chunk, index);
        if (rank != group->rank) {
            copy(slot_of(group, group->rank, step) + share_of(group->rank, rank) * move->chunk,
                   move->in[rank] + at.start, at.length);
        }
    }
}

static void take_shares(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    for (int turn = 1; turn <= group->num_ranks; turn++) {
        int rank = (group->rank + turn) % group->num_ranks;
        tsh_span at = chunk_of(move->out_bytes[rank], move->chunk, index);
        const char *from = move->in[rank] + at.start;
        if (rank != group->rank) {
            from = slot_of(group, rank, step) + share_of(rank, group->rank) * move->chunk;
        }
        copy(move->out[rank] + at.start, from, at.length);
    }
}

/* Whether what everybody sends is what its receiver expects; says whose is not, where that is this rank. */
static bool is_agreed(tsh_group *group, const uint64_t *sent, const uint64_t *expected, int *status) {
    size_t n = (size_t)group->num_ranks;
    bool agreed = true;
    for (size_t from = 0; from < n; from++) {
        for (size_t to = 0; to < n; to++) {
            bool is_same = sent[from * n + to] == expected[to * n + from];
            agreed = agreed && is_same;
            if (to == (size_t)group->rank && !is_same) {
                group->subject = (int)from;
                tsh_poison_group(group, TSH_MISMATCH, (int)from, "");
                *status = TSH_MISMATCH;
                return false;
            }
        }
    }
    return agreed;
}

static size_t longest_sent(const tsh_group *group, const uint64_t *sent) {
    size_t longest = 0, n = (size_t)group->num_ranks;
    for (size_t pair = 0; pair < n * n; pair++) {
        longest = sent[pair] > longest ? sent[pair] : longest;
    }
    return longest;
}

/* Everybody's output lies in the segment: write into each what goes there, behind what comes from lower ranks. */
static int write_apart(tsh_group *group, const tsh_move *move, uint64_t number, const uint64_t *sent) {
    size_t n = (size_t)group->num_ranks;
    for (int turn = 1; turn <= group->num_ranks; turn++) {
        int to = (group->rank + turn) % group->num_ranks;
        char *place = tsh_common_start(group, TSH_APART, number, to);
        for (size_t from = 0; from < (size_t)group->rank; from++) {
            place += sent[from * n + (size_t)to];
        }
        move->write(move, to, place);
    }
    return tsh_meet(group);
}

/* Everybody's input lies in the segment, by receiver: read from each what comes here, chunk by chunk as from slots, so that
 * sums are added up in the same order. */
static int read_apart(tsh_group *group, const tsh_move *move, uint64_t number, const uint64_t *sent) {
    size_t n = (size_t)group->num_ranks, num = num_chunks(longest_sent(group, sent), move->chunk);
    for (size_t from = 0; from < n; from++) {
        move->direct[from] = tsh_common_start(group, TSH_APART, number, (int)from);
        for (size_t to = 0; to < (size_t)group->rank; to++) {
            move->direct[from] += sent[from * n + to];
        }
    }
    for (size_t index = 0; index < num; index++) {
        move->take(group, move, index, 0);
    }
    return tsh_meet(group);
}

/* Sizes may differ from pair to pair: the first meeting shows them all, which also tells how many chunks there are.
 * The first chunk is put before it, since that needs one's own sizes alone. `amount` must be equal on all ranks. `common`
 * is the number of the common buffer that is written into or read from, or 0. */
int tsh_exchange(tsh_group *group, const tsh_move *move, int dtype, size_t amount, uint64_t common) {
    size_t n = (size_t)group->num_ranks;
    uint64_t *sent = group->counts + ((group->sequence + 1) & 1) * 2 * n * n, *expected = sent + n * n;
    for (size_t rank = 0; rank < n; rank++) {
        sent[(size_t)group->rank * n + rank] = move->in_bytes[rank];
        expected[(size_t)group->rank * n + rank] = move->out_bytes[rank];
    }
    uint64_t step = group->step + 1;
    if (common == 0) {
        move->put(group, move, 0, step);
    }
    tsh_signature mine = signature(TSH_ALL_TO_ALL, dtype, 0, -1, amount);
    mine.common = common;
    int status = tsh_meet_as(group, mine);
    if (status != TSH_OK) {
        return status;
    }
    if (!is_agreed(group, sent, expected, &status)) {
        return status != TSH_OK ? status : tsh_meet(group); /* those concerned do not come: what this one ends with */
    }
    if (highest_in_common(group, TSH_APART) != 0) {
        if (all_in_common(group, TSH_APART, common)) {
            return (move->write != NULL ? write_apart : read_apart)(group, move, common, sent);
        }
        step = group->step + 1; /* again, with those who have one */
        move->put(group, move, 0, step);
        status = tsh_meet(group);
    }
    size_t num = num_chunks(longest_sent(group, sent), move->chunk);
    for (size_t turn = 1; turn <= num && status == TSH_OK; turn++) {
        if (turn < num) {
            move->put(group, move, turn, step + turn);
        }
        move->take(group, move, turn - 1, step + turn - 1);
        status = meet_in_turn(group, turn, num, NULL);
    }
    return status;
}

int tsh_all_to_all(tsh_group *group, char *const *out, const size_t *out_bytes, char *const *in,
                   const size_t *in_bytes, int dtype) {
    tsh_move move = {.put = put_shares, .take = take_shares, .out = out, .out_bytes = out_bytes, .in = in,
                     .in_bytes = in_bytes, .chunk = units_per_slot(group, num_shares(group), 1), .root = -1};
    return tsh_exchange(group, &move, dtype, 0, 0);
}
