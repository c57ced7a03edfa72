/* What the two halves of point-to-point share: mail.c moves messages, orders.c takes orders and waits. */
#ifndef TORSH_SHM_MAIL_H
#define TORSH_SHM_MAIL_H

#include "core.h"

#include <pthread.h>

typedef struct {
    uint64_t bytes;
    int64_t tag;
} mail_header;

/* A send or receive that was asked for. */
typedef struct mail_order {
    struct mail_order *next;
    uint64_t id;
    char *data;
    size_t bytes;
    size_t moved;
    int peer;
    int tag;
    bool is_announced; /* a send whose header is in the ring */
    int64_t deadline_ns;
    tsh_receipt receipt;
} mail_order;

/* A message on its way out of the ring: to the receive that wants it, to the heap, or nowhere if sizes differ. */
typedef struct mail_message {
    struct mail_message *next;
    mail_order *wanted_by;
    char *heap;
    size_t bytes;
    size_t moved;
    int tag;
} mail_message;

typedef struct {
    mail_order *first, *last;
} mail_queue;

typedef struct {
    mail_message *current;
    mail_message *overtaken; /* complete ones, oldest first */
} mail_inbox;

struct tsh_mail {
    tsh_group *group;
    pthread_mutex_t lock;
    mail_queue *sends; /* by destination */
    mail_queue posted; /* receives without a message yet */
    mail_queue done;
    mail_inbox *inboxes; /* by source */
    size_t overtaken_bytes;
    size_t num_pending;
};

/* mail.c */
void tsh_enqueue(mail_queue *queue, mail_order *order);
void tsh_unlink(mail_queue *queue, mail_order *before, mail_order *order);
void tsh_finish(struct tsh_mail *mail, mail_order *order, tsh_status status, int peer, uint64_t bytes);
int tsh_push(struct tsh_mail *mail, int peer);
int tsh_pull(struct tsh_mail *mail, int source);
int tsh_push_and_pull(struct tsh_mail *mail);
bool tsh_claim(struct tsh_mail *mail, mail_order *order, int source);

#endif
