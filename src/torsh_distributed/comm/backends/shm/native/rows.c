/* An all_to_all of rows in an order of one's own: gathered as they are sent, added up as they come.
 *
 * Why: rows that are first sorted, then sent, then received, then added up pass through memory twice as often as they
 * must. Here the sorting is the copy into the slot, and the adding up is the copy out of it.
 */
#include "steps.h"

#include <stdlib.h>
#include <string.h>

#define TSH_CACHE_LINE 64
#define TSH_ROWS_AHEAD 2 /* how far ahead rows are fetched that lie anywhere */

typedef struct {
    const tsh_rows *rows;
    size_t first_sent[TSH_MAX_RANKS];     /* where the rows for each rank begin, in their order */
    size_t first_received[TSH_MAX_RANKS]; /* where those of each rank begin */
    unsigned char *is_touched; /* by row of `out`: whether something was added to it */
} tsh_exchange_state;

static const tsh_exchange_state *state_of(const tsh_move *move) { return move->more; }

/* Row number `row` of what goes to `rank`. */
static const char *row_for(const tsh_exchange_state *state, int rank, size_t row) {
    size_t place = state->first_sent[rank] + row;
    place = state->rows->sent == NULL ? place : (size_t)state->rows->sent[place];
    return state->rows->in + place * state->rows->row_bytes;
}

static const char *later_row(const tsh_exchange_state *state, int rank, size_t row, size_t end) {
    return row_for(state, rank, row + TSH_ROWS_AHEAD < end ? row + TSH_ROWS_AHEAD : row);
}

/* Copy a row while a later one is fetched: rows lie anywhere, and the hardware's own prefetch starts from scratch at each. */
static void copy_row(char *restrict to, const char *restrict from, const char *later, size_t row_bytes) {
    size_t at = 0;
    for (; at + TSH_CACHE_LINE <= row_bytes; at += TSH_CACHE_LINE) {
        __builtin_prefetch(later + at);
        memcpy(to + at, from + at, TSH_CACHE_LINE);
    }
    memcpy(to + at, from + at, row_bytes - at);
}

/* The rows for `rank` from number `row` on, one after the other. */
static void gather_rows(const tsh_exchange_state *state, int rank, size_t row, size_t num_rows, char *to) {
    size_t row_bytes = state->rows->row_bytes, end = row + num_rows;
    for (; row < end; row++, to += row_bytes) {
        copy_row(to, row_for(state, rank, row), later_row(state, rank, row, end), row_bytes);
    }
}

static void put_rows(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    const tsh_exchange_state *state = state_of(move);
    size_t row_bytes = state->rows->row_bytes;
    for (int rank = 0; rank < group->num_ranks; rank++) {
        if (rank == group->rank) {
            continue;
        }
        tsh_span at = chunk_of(move->in_bytes[rank], move->chunk, index);
        char *to = slot_of(group, group->rank, step) + share_of(group->rank, rank) * move->chunk;
        gather_rows(state, rank, at.start / row_bytes, at.length / row_bytes, to);
    }
}

static void write_rows(const tsh_move *move, int rank, char *to) {
    const tsh_exchange_state *state = state_of(move);
    gather_rows(state, rank, 0, move->in_bytes[rank] / state->rows->row_bytes, to);
}

static void add_row(float *restrict to, const float *restrict from, size_t numel, float weight, bool is_first) {
    if (is_first) {
        for (size_t i = 0; i < numel; i++) {
            to[i] = weight * from[i];
        }
    } else {
        for (size_t i = 0; i < numel; i++) {
            to[i] += weight * from[i];
        }
    }
}

/* Add row number `row` of what comes from `rank` to where it belongs. */
static void sum_row(const tsh_exchange_state *state, int rank, size_t row, const char *from) {
    const tsh_rows *rows = state->rows;
    size_t place = state->first_received[rank] + row, target = (size_t)rows->received[place];
    float weight = rows->weights == NULL ? 1.0f : rows->weights[place];
    add_row((float *)(rows->out + target * rows->row_bytes), (const float *)from, rows->row_bytes / sizeof(float),
            weight, !state->is_touched[target]);
    state->is_touched[target] = 1;
}

static void take_rows(tsh_group *group, const tsh_move *move, size_t index, uint64_t step) {
    const tsh_exchange_state *state = state_of(move);
    const tsh_rows *rows = state->rows;
    size_t row_bytes = rows->row_bytes;
    for (int turn = 1; turn <= group->num_ranks; turn++) {
        int rank = (group->rank + turn) % group->num_ranks;
        bool is_own = rank == group->rank;
        tsh_span at = chunk_of(move->out_bytes[rank], move->chunk, index);
        if (at.length == 0) {
            continue; /* an empty tensor has no address */
        }
        const char *slot = slot_of(group, rank, step) + share_of(rank, group->rank) * move->chunk;
        slot = move->direct[rank] != NULL ? move->direct[rank] + at.start : slot;
        char *out = rows->out + state->first_received[rank] * row_bytes + at.start;
        if (!rows->is_sum && !is_own) {
            memcpy(out, slot, at.length);
            continue;
        }
        size_t row = at.start / row_bytes, end = row + at.length / row_bytes;
        for (; row < end; row++, slot += row_bytes, out += row_bytes) {
            const char *from = is_own ? row_for(state, rank, row) : slot;
            if (rows->is_sum) {
                sum_row(state, rank, row, from);
            } else {
                copy_row(out, from, later_row(state, rank, row, end), row_bytes);
            }
        }
    }
}

size_t tsh_max_row_bytes(const tsh_group *group) { return group->slot_bytes / num_shares(group); }

/* Rows that nothing was added to are zero. */
static void clear_untouched(const tsh_exchange_state *state) {
    for (size_t row = 0; row < state->rows->num_out_rows; row++) {
        if (!state->is_touched[row]) {
            memset(state->rows->out + row * state->rows->row_bytes, 0, state->rows->row_bytes);
        }
    }
}

/* The number of the common buffer that rows are written into, or, where they are added up, read from as they lie. */
static uint64_t common_of_rows(const tsh_group *group, const tsh_rows *rows) {
    const char *place = rows->is_sum ? rows->in : rows->out;
    uint64_t number = rows->is_sum && rows->sent != NULL ? 0 : tsh_common_number(group, TSH_APART, place);
    return number != 0 && place == tsh_common_start(group, TSH_APART, number, group->rank) ? number : 0;
}

int tsh_exchange_rows(tsh_group *group, const tsh_rows *rows, const size_t *in_counts, const size_t *out_counts,
                      int dtype) {
    size_t in_bytes[TSH_MAX_RANKS], out_bytes[TSH_MAX_RANKS], num_sent = 0, num_received = 0;
    tsh_exchange_state *state = calloc(1, sizeof(*state));
    if (state == NULL) {
        return TSH_NO_MEMORY;
    }
    state->rows = rows;
    if (rows->is_sum) {
        state->is_touched = calloc(rows->num_out_rows + 1, 1);
        if (state->is_touched == NULL) {
            free(state);
            return TSH_NO_MEMORY;
        }
    }
    for (int rank = 0; rank < group->num_ranks; rank++) {
        state->first_sent[rank] = num_sent;
        state->first_received[rank] = num_received;
        in_bytes[rank] = in_counts[rank] * rows->row_bytes;
        out_bytes[rank] = out_counts[rank] * rows->row_bytes;
        num_sent += in_counts[rank];
        num_received += out_counts[rank];
    }
    const char *direct[TSH_MAX_RANKS] = {NULL};
    tsh_move move = {.put = put_rows, .take = take_rows, .write = rows->is_sum ? NULL : write_rows, .direct = direct,
                     .out_bytes = out_bytes, .in_bytes = in_bytes,
                     .chunk = tsh_max_row_bytes(group) / rows->row_bytes * rows->row_bytes, .root = -1, .more = state};
    int status = tsh_exchange(group, &move, dtype, rows->row_bytes, common_of_rows(group, rows));
    if (status == TSH_OK && rows->is_sum) {
        clear_untouched(state);
    }
    free(state->is_touched);
    free(state);
    return status;
}
