/* Meeting: how ranks wait for each other, sleep, notice the dead, give up, and tell the rest. */
#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Measured with four ranks on two cores: 9 us a meeting where a waiter offers its core, 23 us where it sleeps. */
#define TSH_OFFER_NS 50000     /* how long a rank without a core of its own looks before it sleeps */
#define TSH_KEEP_NS 4000      /* how long one with a core looks before it offers it */
#define TSH_STRANGER_NS 200000 /* a core given back later than this was taken by something else */
#define TSH_SHY_NS 20000000    /* how long after that no core is offered */

int64_t tsh_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * TSH_NANOSECONDS + now.tv_nsec;
}

void tsh_relax(void) {
#if defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#elif defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Sleep while *word == value; returns 0 when woken or changed, else ETIMEDOUT or EINTR. */
int tsh_futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_ns) {
    struct timespec timeout = {timeout_ns / TSH_NANOSECONDS, timeout_ns % TSH_NANOSECONDS};
    if (syscall(SYS_futex, word, FUTEX_WAIT, value, &timeout, NULL, 0) == 0 || errno == EAGAIN) {
        return 0;
    }
    return errno;
}

void tsh_futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* A rank holds a lock on its byte of the segment; the kernel drops it when the process ends, however it ends,
 * zombies included. Locks of one's own process never show, hence the look at the pid. */
bool tsh_is_alive(const tsh_group *group, int rank) {
    const tsh_rank_line *line = &group->ranks[rank];
    if (!atomic_load(&line->is_joined) || line->pid == (int32_t)getpid()) {
        return true;
    }
    struct flock probe = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(group->fd, F_GETLK, &probe) != 0 || probe.l_type != F_UNLCK;
}

bool tsh_is_poisoned(const tsh_group *group) { return atomic_load(&group->shared->poison.is_set) != 0; }

static void ring_everyone(tsh_group *group) {
    atomic_fetch_add(&group->shared->bell, 1);
    tsh_futex_wake(&group->shared->bell);
    for (int rank = 0; rank < group->num_ranks; rank++) {
        atomic_fetch_add(&group->ranks[rank].bell, 1);
        tsh_futex_wake(&group->ranks[rank].bell);
    }
}

/* Record the first failure and wake every sleeper of every rank: nobody waits for what cannot come. */
void tsh_poison_group(tsh_group *group, tsh_status status, int subject, const char *text) {
    tsh_poison *poison = &group->shared->poison;
    uint32_t unclaimed = 0;
    if (atomic_compare_exchange_strong(&poison->claimed, &unclaimed, 1)) {
        poison->status = status;
        poison->origin = group->rank;
        poison->subject = subject;
        strncpy(poison->text, text, TSH_TEXT_BYTES - 1);
        poison->text[TSH_TEXT_BYTES - 1] = 0;
        atomic_store(&poison->is_set, 1);
    }
    ring_everyone(group);
}

void tsh_leave(tsh_group *group) {
    atomic_store(&group->ranks[group->rank].is_left, 1);
    ring_everyone(group);
}

static bool all_arrived(const tsh_group *group) {
    return atomic_load_explicit(&group->shared->arrivals, memory_order_acquire) >=
           group->step * (uint64_t)group->num_ranks;
}

static bool is_missing(const tsh_group *group, int rank) {
    return atomic_load(&group->ranks[rank].arrived) < group->step;
}

static int give_up(tsh_group *group, tsh_status status, int subject) {
    group->subject = subject;
    tsh_poison_group(group, status, subject, "");
    return status;
}

/* Why the meeting cannot take place, or TSH_OK if it still may. */
static int obstacle(tsh_group *group, bool look_for_dead) {
    if (tsh_is_poisoned(group)) {
        return TSH_POISONED;
    }
    for (int rank = 0; rank < group->num_ranks; rank++) {
        if (!is_missing(group, rank)) {
            continue;
        }
        bool is_left = atomic_load(&group->ranks[rank].is_left) != 0;
        if (is_left || (look_for_dead && !tsh_is_alive(group, rank))) {
            /* It may have arrived and gone between the two looks. */
            if (is_missing(group, rank)) {
                return give_up(group, is_left ? TSH_LEFT : TSH_DEAD, rank);
            }
        }
    }
    if (look_for_dead && group->has_signal()) {
        return give_up(group, TSH_INTERRUPTED, group->rank);
    }
    if (tsh_now_ns() >= group->deadline_ns) {
        return give_up(group, TSH_TIMEOUT, -1);
    }
    return TSH_OK;
}

static int sleep_until_met(tsh_group *group) {
    tsh_shared *shared = group->shared;
    bool look_for_dead = false;
    int status = TSH_OK;
    if (group->deadline_ns == 0) {
        group->deadline_ns = tsh_now_ns() + group->timeout_ns;
    }
    atomic_fetch_add(&shared->sleepers, 1);
    for (;;) {
        uint32_t bell = atomic_load(&shared->bell);
        if (atomic_load(&shared->arrivals) >= group->step * (uint64_t)group->num_ranks) {
            break;
        }
        status = obstacle(group, look_for_dead);
        if (status != TSH_OK) {
            break;
        }
        int64_t left_ns = group->deadline_ns - tsh_now_ns();
        int64_t slice_ns = left_ns < TSH_SLICE_NS ? left_ns : TSH_SLICE_NS;
        look_for_dead = tsh_futex_wait(&shared->bell, bell, slice_ns > 0 ? slice_ns : 1) != 0;
    }
    atomic_fetch_sub(&shared->sleepers, 1);
    return status;
}

/* Look for a while before sleeping; whether all have arrived meanwhile.
 *
 * A rank with a core of its own first keeps it: the one waited for is on another. Then, and where ranks share cores or
 * the caller computes in another thread from the start, it lets go of the core at every look, for the one waited for
 * may need this very core. But a stranger may take it too, and keep it for milliseconds: after that has happened it is
 * not offered again for a while, and the rank sleeps instead, which the scheduler rewards with a prompt waking. */
static bool watch(tsh_group *group) {
    bool has_core = group->spin_ns > 0 && !group->is_background;
    int64_t now_ns = tsh_now_ns();
    int64_t keep_until_ns = has_core ? now_ns + TSH_KEEP_NS : now_ns;
    int64_t end_ns = now_ns + (has_core ? group->spin_ns : TSH_OFFER_NS);
    for (uint32_t turn = 1; !all_arrived(group); turn++) {
        if (now_ns < keep_until_ns) {
            tsh_relax();
            now_ns = turn % 64 == 0 ? tsh_now_ns() : now_ns;
        } else if (now_ns < group->offer_from_ns || now_ns > end_ns) {
            return false;
        } else {
            sched_yield();
            int64_t back_ns = tsh_now_ns();
            if (back_ns - now_ns > TSH_STRANGER_NS && !all_arrived(group)) {
                group->offer_from_ns = back_ns + TSH_SHY_NS;
            }
            now_ns = back_ns;
        }
    }
    return true;
}

/* Arrive, and wait until all ranks have: what they wrote before is visible after. */
int tsh_meet(tsh_group *group) {
    tsh_shared *shared = group->shared;
    group->step++;
    uint64_t target = group->step * (uint64_t)group->num_ranks;
    bool is_last = atomic_fetch_add(&shared->arrivals, 1) + 1 == target;
    /* After the count, never before: a rank killed between the two still shows as missing, not as a riddle. */
    atomic_store_explicit(&group->ranks[group->rank].arrived, group->step, memory_order_release);
    if (is_last) {
        if (atomic_load(&shared->sleepers) != 0) {
            atomic_fetch_add(&shared->bell, 1);
            tsh_futex_wake(&shared->bell);
        }
        return TSH_OK;
    }
    return watch(group) ? TSH_OK : sleep_until_met(group);
}

tsh_signature *tsh_signature_of(const tsh_group *group, int rank) {
    return &group->ranks[rank].signature[group->sequence & 1];
}

/* The first meeting of a collective: every rank shows what it was called with, and all compare. */
int tsh_meet_as(tsh_group *group, tsh_signature mine) {
    group->shown_step = group->step + 1;
    if (tsh_is_poisoned(group)) {
        return TSH_POISONED; /* others may have arrived here before they gave up: the meeting would seem complete */
    }
    group->sequence++;
    *tsh_signature_of(group, group->rank) = mine;
    int status = tsh_meet(group);
    if (status != TSH_OK) {
        return status;
    }
    for (int rank = 0; rank < group->num_ranks; rank++) {
        const tsh_signature *theirs = tsh_signature_of(group, rank);
        if (theirs->kind != mine.kind || theirs->amount != mine.amount) {
            return give_up(group, TSH_MISMATCH, rank);
        }
    }
    return TSH_OK;
}
