/* The shared-memory core: what a segment looks like, and what its parts call of each other.
 *
 * A segment is one file in memory, mapped by every rank of a group:
 *
 *     preamble   128 bytes, written by Python: magic and token, compared by every rank that maps it
 *     shared     counters on which all ranks meet, and the record of the first failure
 *     ranks      one `rank_line` per rank: how far it is, what it was called with, whether it left
 *     counts     two pairs of tables num_ranks x num_ranks, for all_to_all: bytes sent, bytes expected
 *     channels   num_ranks x num_ranks ring positions, for point-to-point
 *     slots      two per rank, then two for results: the data of collectives
 *     rings      num_ranks x num_ranks, for point-to-point; given memory at the first message of a pair
 *     common     slots for tensors that lie in the segment; given memory when they are asked for
 *
 * Note on steps. Every collective is a sequence of steps; a step ends when all ranks have met. What a rank writes
 * before meeting number s goes to the slots of parity s & 1 and is read by others after meeting s and before meeting
 * s + 1. The same slots are written again only after meeting s + 1, so nobody writes what another still reads, and no
 * second meeting is needed. The count of steps runs on from one collective to the next: the rule holds across them.
 *
 * Note on memory order. Data is published by the increment of `arrivals` (release) and read after a load of it that
 * saw all increments (acquire); in channels by `head` and `tail`. Sleeping uses two more words: a sleeper announces
 * itself (`sleepers`), reads `bell`, looks once more and sleeps only while `bell` is unchanged; who completes a step
 * looks for sleepers afterwards. Both sides use sequentially consistent operations, so one of them sees the other.
 */
#ifndef TORSH_SHM_CORE_H
#define TORSH_SHM_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef TSH_VERSION
#error "build with build.py: it passes a number that stands for these sources"
#endif
#define TSH_PREAMBLE_BYTES 128
#define TSH_LINE 128 /* two cache lines: adjacent ones are fetched together on some machines */
#define TSH_PAGE 4096
#define TSH_TEXT_BYTES 512
#define TSH_MAX_RANKS 4096
#define TSH_COMMON_SLOTS 4                       /* buffers of a use that may live at a time */
#define TSH_COMMON_BYTES ((size_t)256 << 20)     /* the largest of them, all ranks together; address space at first */
#define TSH_NANOSECONDS 1000000000LL
#define TSH_SLICE_NS (TSH_NANOSECONDS / 10) /* how often a sleeper looks whether its peers live */

typedef enum {
    TSH_OK = 0,
    TSH_TIMEOUT = 1,     /* the deadline passed; missing ranks have not arrived */
    TSH_DEAD = 2,        /* the process of a missing rank ended */
    TSH_LEFT = 3,        /* a missing rank closed the group */
    TSH_POISONED = 4,    /* another call of the group failed first, here or on another rank */
    TSH_MISMATCH = 5,    /* ranks called different operations, or with different sizes */
    TSH_INTERRUPTED = 6, /* a signal handler raised */
    TSH_NO_MEMORY = 7,   /* the segment or the heap cannot grow */
    TSH_OVERFLOW = 8,    /* too many bytes of overtaken messages */
    TSH_ABORTED = 9,     /* somebody asked for it */
} tsh_status;

typedef enum {
    TSH_BARRIER = 1,
    TSH_ALL_REDUCE,
    TSH_REDUCE,
    TSH_BROADCAST,
    TSH_ALL_GATHER,
    TSH_GATHER,
    TSH_SCATTER,
    TSH_REDUCE_SCATTER,
    TSH_ALL_TO_ALL,
} tsh_operation;

/* What a rank was called with; compared across ranks at the first meeting of every collective. */
typedef struct {
    uint64_t kind; /* operation | dtype << 8 | reduction << 16 | (root + 1) << 32 */
    uint64_t amount; /* bytes, by the operation's own measure */
    uint64_t common; /* the number of the common or shared buffer it was called with, or 0; ranks may differ in this */
} tsh_signature;

/* Whose a common buffer is: all ranks have it together, as what is gathered, or each has one, as what is scattered. */
typedef enum {
    TSH_TOGETHER,
    TSH_APART,
    TSH_COMMON_USES,
} tsh_common_use;

/* One rank's common buffers of a use, by slot. */
typedef struct {
    uint64_t count;                  /* how many were asked for */
    _Atomic uint64_t highest;        /* the last that any rank came to a meeting with */
    size_t backed[TSH_COMMON_SLOTS]; /* bytes known to have memory */
} tsh_common;

/* The first failure, kept for all: who saw it, whom it concerns, and words for people. */
typedef struct {
    _Atomic uint32_t claimed;
    _Atomic uint32_t is_set;
    uint32_t status;
    int32_t origin;
    int32_t subject;
    char text[TSH_TEXT_BYTES];
} tsh_poison;

typedef struct {
    _Alignas(TSH_LINE) _Atomic uint64_t arrivals;
    _Alignas(TSH_LINE) _Atomic uint32_t bell;
    _Atomic uint32_t sleepers;
    _Alignas(TSH_LINE) tsh_poison poison;
} tsh_shared;

typedef struct {
    _Alignas(TSH_LINE) _Atomic uint64_t arrived; /* the number of the last meeting this rank came to */
    tsh_signature signature[2];
    _Atomic uint32_t is_joined;
    _Atomic uint32_t is_left;
    int32_t pid;
    _Alignas(TSH_LINE) _Atomic uint32_t bell; /* rung for point-to-point: data came, or room was made */
    _Atomic uint32_t sleepers;
    _Atomic uint64_t common_live[TSH_COMMON_USES][TSH_COMMON_SLOTS]; /* the one it has there now, or 0 */
} tsh_rank_line;

typedef struct {
    _Alignas(TSH_LINE) _Atomic uint64_t head; /* bytes written so far, by the sender */
    _Atomic uint32_t is_backed;               /* whether the ring has memory */
    _Alignas(TSH_LINE) _Atomic uint64_t tail; /* bytes read so far, by the receiver */
} tsh_channel;

struct tsh_mail;

/* One rank's view of a segment. Collectives are called by one thread at a time; mail has its own lock. */
typedef struct {
    char *base;
    tsh_shared *shared;
    tsh_rank_line *ranks;
    uint64_t *counts;
    tsh_channel *channels;
    char *slots;
    char *rings;
    char *common;
    tsh_common commons[TSH_COMMON_USES];
    int fd;
    int rank;
    int num_ranks;
    size_t slot_bytes;
    size_t ring_bytes;
    int64_t spin_ns; /* of a caller that waits itself; 0 where ranks outnumber cores */
    int64_t offer_from_ns; /* before this time the core is not offered to others */
    uint64_t step;
    uint64_t shown_step; /* of the first meeting of the last collective: before it nothing is written */
    uint64_t sequence;
    int64_t timeout_ns;
    int64_t deadline_ns; /* of the current call; 0 until it first has to wait */
    bool is_background;
    int subject; /* the rank the last failure speaks of, or -1 */
    bool (*has_signal)(void);
    struct tsh_mail *mail;
} tsh_group;

/* layout.c */
size_t tsh_segment_bytes(int num_ranks, size_t slot_bytes, size_t ring_bytes);
size_t tsh_backed_bytes(int num_ranks, size_t slot_bytes);
void tsh_attach(tsh_group *group, char *base);

/* wait.c */
int64_t tsh_now_ns(void);
void tsh_relax(void);
int tsh_futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_ns);
void tsh_futex_wake(_Atomic uint32_t *word);
bool tsh_is_alive(const tsh_group *group, int rank);
bool tsh_is_poisoned(const tsh_group *group);
void tsh_poison_group(tsh_group *group, tsh_status status, int subject, const char *text);
void tsh_leave(tsh_group *group);
int tsh_meet(tsh_group *group);
int tsh_meet_as(tsh_group *group, tsh_signature mine);
tsh_signature *tsh_signature_of(const tsh_group *group, int rank);

/* kernels.c */
typedef void (*tsh_kernel)(void *out, const void *const *in, int num_inputs, size_t numel, double divisor);
tsh_kernel tsh_find_kernel(int dtype, int reduction);
size_t tsh_element_bytes(int dtype);

/* collectives.c */
typedef struct {
    int dtype;
    int reduction;
    tsh_kernel kernel;
    size_t element_bytes;
    double divisor;
} tsh_fold;
int tsh_barrier(tsh_group *group);
int tsh_all_reduce(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold);
int tsh_all_reduce_shared(tsh_group *group, char *const *buffers, uint64_t number, size_t numel, const tsh_fold *fold);
int tsh_reduce(tsh_group *group, char *buffer, size_t numel, const tsh_fold *fold, int root);
int tsh_reduce_scatter(tsh_group *group, char *out, char *const *in, const size_t *numels, const tsh_fold *fold);
int tsh_broadcast(tsh_group *group, char *buffer, size_t bytes, int dtype, int root);
int tsh_all_gather(tsh_group *group, char *const *out, const size_t *bytes, const char *in, int dtype);
int tsh_gather(tsh_group *group, char *const *out, const char *in, size_t bytes, int dtype, int root);
int tsh_scatter(tsh_group *group, char *out, char *const *in, size_t bytes, int dtype, int root);
int tsh_all_to_all(tsh_group *group, char *const *out, const size_t *out_bytes, char *const *in,
                   const size_t *in_bytes, int dtype);

/* rows.c */
typedef struct {
    char *out;
    size_t num_out_rows;
    const char *in;
    size_t row_bytes;
    const int64_t *sent;     /* the row of `in` that goes out, for rank after rank; NULL: in order */
    bool is_sum;             /* whether float32 rows that come are added up; else they are stored in order */
    const int64_t *received; /* the row of `out` that each which comes is added to */
    const float *weights;    /* what each row that comes counts for; NULL: 1 */
} tsh_rows;
size_t tsh_max_row_bytes(const tsh_group *group);
int tsh_exchange_rows(tsh_group *group, const tsh_rows *rows, const size_t *in_counts, const size_t *out_counts,
                      int dtype);

/* common.c */
char *tsh_common_take(tsh_group *group, tsh_common_use use, size_t bytes, uint64_t *number);
void tsh_common_catch_up(tsh_group *group, tsh_common_use use, uint64_t number);
void tsh_common_release(tsh_group *group, tsh_common_use use, uint64_t number);
uint64_t tsh_common_number(const tsh_group *group, tsh_common_use use, const char *address);
char *tsh_common_start(const tsh_group *group, tsh_common_use use, uint64_t number, int rank);

/* pack.c: a packed message has at most the room that is told for its number of floats; false: it has
 * another number, or is none. Addresses of messages are multiples of eight. */
size_t tsh_packed_room(size_t numel);
size_t tsh_pack(const char *floats, size_t numel, char *out);
bool tsh_unpack(const char *in, size_t numel, char *floats);

/* mail.c, orders.c */
#define TSH_ANY_SOURCE (-1)
typedef struct {
    uint64_t id;
    int status;
    int peer;
    uint64_t bytes; /* of the message that came, where sizes differ */
} tsh_receipt;
struct tsh_mail *tsh_mail_new(tsh_group *group);
void tsh_mail_free(struct tsh_mail *mail);
int tsh_mail_send(struct tsh_mail *mail, uint64_t id, const char *data, size_t bytes, int peer, int tag,
                  int64_t timeout_ns, tsh_receipt *done);
int tsh_mail_receive(struct tsh_mail *mail, uint64_t id, char *data, size_t bytes, int peer, int tag,
                     int64_t timeout_ns, tsh_receipt *done);
int tsh_mail_progress(struct tsh_mail *mail, bool is_background, int64_t patience_ns, tsh_receipt *done, int capacity);

#endif
