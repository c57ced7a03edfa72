/* Point-to-point messages: a ring of bytes for every ordered pair of ranks, tags, any-source, progress.
 *
 * A message is a header and its bytes, streamed through the ring of its pair; a message longer than the ring flows as
 * the receiver makes room. Receives are matched in the order they were posted, messages of a pair in the order they
 * were sent. A message stays in the ring until somebody wants one of its sender; only if the one wanted comes later
 * in the ring (another tag) are those before it taken aside onto the heap, and there is a limit to that.
 *
 * Calls lock the mail; sleeping happens outside the lock, on the bell of this rank, which peers ring when they have
 * written to it or made room for it.
 */
#define _GNU_SOURCE
#include "mail.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#define TSH_OVERTAKEN_LIMIT_BYTES ((size_t)1 << 30)

void tsh_enqueue(mail_queue *queue, mail_order *order) {
    order->next = NULL;
    if (queue->last != NULL) {
        queue->last->next = order;
    } else {
        queue->first = order;
    }
    queue->last = order;
}

/* Unlink `order`, whose predecessor in the queue is `before` (NULL for the first). */
void tsh_unlink(mail_queue *queue, mail_order *before, mail_order *order) {
    if (before != NULL) {
        before->next = order->next;
    } else {
        queue->first = order->next;
    }
    if (queue->last == order) {
        queue->last = before;
    }
}

void tsh_finish(struct tsh_mail *mail, mail_order *order, tsh_status status, int peer, uint64_t bytes) {
    order->receipt = (tsh_receipt){order->id, status, peer, bytes};
    tsh_enqueue(&mail->done, order);
    mail->num_pending--;
}

static tsh_channel *channel(const tsh_group *group, int from, int to) {
    return &group->channels[(size_t)from * (size_t)group->num_ranks + (size_t)to];
}

static char *ring_of(const tsh_group *group, int from, int to) {
    return group->rings + ((size_t)from * (size_t)group->num_ranks + (size_t)to) * group->ring_bytes;
}

static void ring_write(const tsh_group *group, char *ring, uint64_t position, const char *from, size_t bytes) {
    size_t at = position % group->ring_bytes, until_end = group->ring_bytes - at;
    size_t first = bytes < until_end ? bytes : until_end;
    memcpy(ring + at, from, first);
    memcpy(ring, from + first, bytes - first);
}

static void ring_read(const tsh_group *group, const char *ring, uint64_t position, char *to, size_t bytes) {
    size_t at = position % group->ring_bytes, until_end = group->ring_bytes - at;
    size_t first = bytes < until_end ? bytes : until_end;
    memcpy(to, ring + at, first);
    memcpy(to + first, ring, bytes - first);
}

static void ring_bell(tsh_group *group, int rank) {
    tsh_rank_line *line = &group->ranks[rank];
    if (atomic_load(&line->sleepers) != 0) {
        atomic_fetch_add(&line->bell, 1);
        tsh_futex_wake(&line->bell);
    }
}

/* The ring of a pair gets memory when its first message is sent: most pairs never talk. */
static int back_ring(tsh_group *group, tsh_channel *way, int to) {
    if (atomic_load(&way->is_backed)) {
        return TSH_OK;
    }
    off_t start = ring_of(group, group->rank, to) - group->base;
    if (posix_fallocate(group->fd, start, (off_t)group->ring_bytes) != 0) {
        return TSH_NO_MEMORY;
    }
    atomic_store(&way->is_backed, 1);
    return TSH_OK;
}

/* Write as much as there is room for to the ring towards `peer`. */
int tsh_push(struct tsh_mail *mail, int peer) {
    tsh_group *group = mail->group;
    mail_queue *queue = &mail->sends[peer];
    tsh_channel *way = channel(group, group->rank, peer);
    char *ring = ring_of(group, group->rank, peer);
    if (queue->first != NULL && back_ring(group, way, peer) != TSH_OK) {
        return TSH_NO_MEMORY;
    }
    while (queue->first != NULL) {
        mail_order *order = queue->first;
        uint64_t head = atomic_load(&way->head);
        size_t room = group->ring_bytes - (size_t)(head - atomic_load(&way->tail));
        if (!order->is_announced) {
            if (room < sizeof(mail_header)) {
                return TSH_OK;
            }
            mail_header header = {order->bytes, order->tag};
            ring_write(group, ring, head, (const char *)&header, sizeof header);
            order->is_announced = true;
            head += sizeof header;
            room -= sizeof header;
        }
        size_t rest = order->bytes - order->moved, piece = group->ring_bytes / 4;
        piece = piece < room ? piece : room;
        piece = piece < rest ? piece : rest;
        if (piece > 0) {
            ring_write(group, ring, head, order->data + order->moved, piece);
            order->moved += piece;
        }
        atomic_store(&way->head, head + piece);
        ring_bell(group, peer);
        if (order->moved == order->bytes) {
            tsh_unlink(queue, NULL, order);
            tsh_finish(mail, order, TSH_OK, peer, order->bytes);
        } else if (piece == 0) {
            return TSH_OK;
        }
    }
    return TSH_OK;
}

static bool wants(const mail_order *order, int source) {
    return order->peer == source || order->peer == TSH_ANY_SOURCE;
}

/* Unlink and return the first receive for this message, or NULL; `is_wanted` says whether any awaits its sender. */
static mail_order *match(struct tsh_mail *mail, int source, int tag, bool *is_wanted) {
    mail_order *before = NULL;
    *is_wanted = false;
    for (mail_order *order = mail->posted.first; order != NULL; before = order, order = order->next) {
        if (wants(order, source)) {
            *is_wanted = true;
            if (order->tag == tag) {
                tsh_unlink(&mail->posted, before, order);
                return order;
            }
        }
    }
    return NULL;
}

/* Take the next message out of the ring's hands: returns its record, or NULL if it stays or is not there. */
static mail_message *open_message(struct tsh_mail *mail, int source, const mail_header *header, int *status) {
    bool is_wanted;
    mail_order *order = match(mail, source, (int)header->tag, &is_wanted);
    if (order == NULL && !is_wanted) {
        return NULL;
    }
    mail_message *message = calloc(1, sizeof *message);
    if (message == NULL) {
        *status = TSH_NO_MEMORY;
        return NULL;
    }
    message->bytes = header->bytes;
    message->tag = (int)header->tag;
    if (order != NULL && order->bytes == header->bytes) {
        message->wanted_by = order;
    } else if (order != NULL) {
        tsh_finish(mail, order, TSH_MISMATCH, source, header->bytes);
    } else {
        if (mail->overtaken_bytes + message->bytes > TSH_OVERTAKEN_LIMIT_BYTES) {
            *status = TSH_OVERFLOW;
        } else if ((message->heap = malloc(message->bytes + 1)) == NULL) {
            *status = TSH_NO_MEMORY;
        }
        if (*status != TSH_OK) {
            free(message);
            return NULL;
        }
        mail->overtaken_bytes += message->bytes;
    }
    return message;
}

/* The heap's copy of an overtaken message goes to the receive that now wants it. */
static void deliver(struct tsh_mail *mail, mail_message *message, mail_order *order, int source) {
    if (order->bytes == message->bytes) {
        if (message->bytes > 0) {
            memcpy(order->data, message->heap, message->bytes);
        }
        tsh_finish(mail, order, TSH_OK, source, message->bytes);
    } else {
        tsh_finish(mail, order, TSH_MISMATCH, source, message->bytes);
    }
    mail->overtaken_bytes -= message->bytes;
    free(message->heap);
    free(message);
}

static void close_message(struct tsh_mail *mail, int source) {
    mail_inbox *inbox = &mail->inboxes[source];
    mail_message *message = inbox->current;
    inbox->current = NULL;
    if (message->heap != NULL && message->wanted_by != NULL) {
        deliver(mail, message, message->wanted_by, source);
    } else if (message->heap != NULL) {
        mail_message **end = &inbox->overtaken;
        while (*end != NULL) {
            end = &(*end)->next;
        }
        *end = message;
    } else {
        if (message->wanted_by != NULL) {
            tsh_finish(mail, message->wanted_by, TSH_OK, source, message->bytes);
        }
        free(message);
    }
}

/* Read what has come from `source`, as far as somebody wants it. */
int tsh_pull(struct tsh_mail *mail, int source) {
    tsh_group *group = mail->group;
    tsh_channel *way = channel(group, source, group->rank);
    const char *ring = ring_of(group, source, group->rank);
    mail_inbox *inbox = &mail->inboxes[source];
    for (;;) {
        uint64_t tail = atomic_load(&way->tail);
        size_t there = (size_t)(atomic_load(&way->head) - tail);
        if (inbox->current == NULL) {
            int status = TSH_OK;
            mail_header header;
            if (there < sizeof header) {
                return TSH_OK;
            }
            ring_read(group, ring, tail, (char *)&header, sizeof header);
            inbox->current = open_message(mail, source, &header, &status);
            if (inbox->current == NULL) {
                return status;
            }
            tail += sizeof header;
            there -= sizeof header;
        }
        mail_message *message = inbox->current;
        size_t rest = message->bytes - message->moved, piece = group->ring_bytes / 4;
        piece = piece < there ? piece : there;
        piece = piece < rest ? piece : rest;
        char *to = message->heap != NULL ? message->heap : message->wanted_by ? message->wanted_by->data : NULL;
        if (piece > 0 && to != NULL) {
            ring_read(group, ring, tail, to + message->moved, piece);
        }
        message->moved += piece;
        atomic_store(&way->tail, tail + piece);
        ring_bell(group, source);
        if (message->moved == message->bytes) {
            close_message(mail, source);
        } else if (piece == 0) {
            return TSH_OK;
        }
    }
}

static bool awaits(const struct tsh_mail *mail, int source) {
    if (mail->inboxes[source].current != NULL) {
        return true;
    }
    for (const mail_order *order = mail->posted.first; order != NULL; order = order->next) {
        if (wants(order, source)) {
            return true;
        }
    }
    return false;
}

int tsh_push_and_pull(struct tsh_mail *mail) {
    int status = TSH_OK;
    for (int peer = 0; peer < mail->group->num_ranks && status == TSH_OK; peer++) {
        status = tsh_push(mail, peer);
        if (status == TSH_OK && awaits(mail, peer)) {
            status = tsh_pull(mail, peer);
        }
    }
    return status;
}

/* Serve a new receive from what was taken aside before it was posted, or is being taken aside now. */
bool tsh_claim(struct tsh_mail *mail, mail_order *order, int source) {
    mail_inbox *inbox = &mail->inboxes[source];
    for (mail_message **at = &inbox->overtaken; *at != NULL; at = &(*at)->next) {
        mail_message *message = *at;
        if (message->tag == order->tag) {
            *at = message->next;
            deliver(mail, message, order, source);
            return true;
        }
    }
    mail_message *current = inbox->current;
    if (current != NULL && current->heap != NULL && current->wanted_by == NULL && current->tag == order->tag) {
        current->wanted_by = order;
        return true;
    }
    return false;
}
