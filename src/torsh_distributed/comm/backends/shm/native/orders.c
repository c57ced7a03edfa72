/* Point-to-point from the caller's side: taking orders, waiting for them, and giving up. */
#define _GNU_SOURCE
#include "mail.h"

#include <sched.h>
#include <stdlib.h>

#define TSH_MAIL_YIELDS 16
#define TSH_MAIL_YIELD_NS 100000

static int fail(struct tsh_mail *mail, tsh_status status, int subject) {
    tsh_poison_group(mail->group, status, subject, "");
    return status;
}

/* Whether some order can no longer be served by `peer` being gone. */
static bool depends_on(const struct tsh_mail *mail, int peer, bool is_dead) {
    if (mail->sends[peer].first != NULL || mail->inboxes[peer].current != NULL) {
        return true;
    }
    for (const mail_order *order = mail->posted.first; order != NULL; order = order->next) {
        /* A rank that left in peace may not have been the one to send; a dead one ends the group in any case. */
        if (order->peer == peer || (is_dead && order->peer == TSH_ANY_SOURCE)) {
            return true;
        }
    }
    return false;
}

/* Why waiting is in vain, or TSH_OK. Called after everything that came was read. */
static int mail_obstacle(struct tsh_mail *mail, bool look_for_dead) {
    tsh_group *group = mail->group;
    if (tsh_is_poisoned(group)) {
        return TSH_POISONED;
    }
    if (atomic_load(&group->ranks[group->rank].is_left)) {
        return TSH_LEFT;
    }
    for (int peer = 0; peer < group->num_ranks; peer++) {
        bool is_left = atomic_load(&group->ranks[peer].is_left) != 0;
        bool is_dead = !is_left && look_for_dead && depends_on(mail, peer, true) && !tsh_is_alive(group, peer);
        if ((is_left || is_dead) && depends_on(mail, peer, is_dead)) {
            /* Its last words may have come after the rings were read. */
            int status = tsh_push_and_pull(mail);
            if (status != TSH_OK || mail->done.first != NULL) {
                return status;
            }
            return fail(mail, is_left ? TSH_LEFT : TSH_DEAD, peer);
        }
    }
    return look_for_dead && group->has_signal() ? fail(mail, TSH_INTERRUPTED, group->rank) : TSH_OK;
}

static int expire(struct tsh_mail *mail, mail_queue *queue, int64_t now_ns) {
    for (mail_order *order = queue->first, *before = NULL; order != NULL; before = order, order = order->next) {
        if (now_ns >= order->deadline_ns) {
            tsh_unlink(queue, before, order);
            tsh_finish(mail, order, TSH_TIMEOUT, order->peer, 0);
            return fail(mail, TSH_TIMEOUT, order->peer);
        }
    }
    return TSH_OK;
}

/* Orders whose deadline has passed; the first one ends the group, for its message may be half-way through the ring. */
static int expire_all(struct tsh_mail *mail) {
    int64_t now_ns = tsh_now_ns();
    int status = expire(mail, &mail->posted, now_ns);
    for (int peer = 0; peer < mail->group->num_ranks && status == TSH_OK; peer++) {
        status = expire(mail, &mail->sends[peer], now_ns);
        mail_message *message = mail->inboxes[peer].current;
        if (status == TSH_OK && message && message->wanted_by && now_ns >= message->wanted_by->deadline_ns) {
            tsh_finish(mail, message->wanted_by, TSH_TIMEOUT, peer, 0);
            message->wanted_by = NULL;
            status = fail(mail, TSH_TIMEOUT, peer);
        }
    }
    return status;
}

static int hand_over(struct tsh_mail *mail, tsh_receipt *done, int capacity) {
    int count = 0;
    while (mail->done.first != NULL && count < capacity) {
        mail_order *order = mail->done.first;
        done[count++] = order->receipt;
        tsh_unlink(&mail->done, NULL, order);
        free(order);
    }
    return count;
}

struct tsh_mail *tsh_mail_new(tsh_group *group) {
    struct tsh_mail *mail = calloc(1, sizeof *mail);
    if (mail != NULL) {
        mail->group = group;
        mail->sends = calloc((size_t)group->num_ranks, sizeof *mail->sends);
        mail->inboxes = calloc((size_t)group->num_ranks, sizeof *mail->inboxes);
        pthread_mutex_init(&mail->lock, NULL);
        if (mail->sends == NULL || mail->inboxes == NULL) {
            tsh_mail_free(mail);
            mail = NULL;
        }
    }
    return mail;
}

static void free_orders(mail_queue *queue) {
    while (queue->first != NULL) {
        mail_order *order = queue->first;
        tsh_unlink(queue, NULL, order);
        free(order);
    }
}

void tsh_mail_free(struct tsh_mail *mail) {
    for (int peer = 0; peer < mail->group->num_ranks && mail->sends && mail->inboxes; peer++) {
        mail_inbox *inbox = &mail->inboxes[peer];
        free_orders(&mail->sends[peer]);
        if (inbox->current != NULL) {
            inbox->current->next = inbox->overtaken;
            inbox->overtaken = inbox->current;
            free(inbox->current->wanted_by);
        }
        while (inbox->overtaken != NULL) {
            mail_message *message = inbox->overtaken;
            inbox->overtaken = message->next;
            free(message->heap);
            free(message);
        }
    }
    free_orders(&mail->posted);
    free_orders(&mail->done);
    pthread_mutex_destroy(&mail->lock);
    free(mail->sends);
    free(mail->inboxes);
    free(mail);
}

static mail_order *new_order(struct tsh_mail *mail, uint64_t id, char *data, size_t bytes, int peer, int tag,
                             int64_t timeout_ns) {
    mail_order *order = calloc(1, sizeof *order);
    if (order != NULL) {
        *order = (mail_order){.id = id, .data = data, .bytes = bytes, .peer = peer, .tag = tag,
                              .deadline_ns = tsh_now_ns() + timeout_ns};
        mail->num_pending++;
    }
    return order;
}

/* End of taking an order: 1 with its receipt if it could be served at once, 0 if it is pending, or -status. */
static int acknowledge(struct tsh_mail *mail, int status, uint64_t id, tsh_receipt *done) {
    bool is_done = false;
    for (mail_order *order = mail->done.first, *before = NULL; order != NULL; before = order, order = order->next) {
        if (order->id == id) {
            *done = order->receipt;
            is_done = true;
            tsh_unlink(&mail->done, before, order);
            free(order);
            break;
        }
    }
    bool has_others = mail->done.first != NULL;
    pthread_mutex_unlock(&mail->lock);
    if (has_others) {
        /* Earlier orders were served on the way: whoever waits for them may be asleep. */
        tsh_rank_line *line = &mail->group->ranks[mail->group->rank];
        atomic_fetch_add(&line->bell, 1);
        tsh_futex_wake(&line->bell);
    }
    return is_done ? 1 : -status;
}

int tsh_mail_send(struct tsh_mail *mail, uint64_t id, const char *data, size_t bytes, int peer, int tag,
                  int64_t timeout_ns, tsh_receipt *done) {
    pthread_mutex_lock(&mail->lock);
    mail_order *order = new_order(mail, id, (char *)data, bytes, peer, tag, timeout_ns);
    int status = order == NULL ? TSH_NO_MEMORY : tsh_is_poisoned(mail->group) ? TSH_POISONED : TSH_OK;
    if (order != NULL) {
        tsh_enqueue(&mail->sends[peer], order);
        status = status == TSH_OK ? tsh_push(mail, peer) : status;
    }
    return acknowledge(mail, status, id, done);
}

int tsh_mail_receive(struct tsh_mail *mail, uint64_t id, char *data, size_t bytes, int peer, int tag,
                     int64_t timeout_ns, tsh_receipt *done) {
    int first = peer == TSH_ANY_SOURCE ? 0 : peer;
    int last = peer == TSH_ANY_SOURCE ? mail->group->num_ranks - 1 : peer;
    pthread_mutex_lock(&mail->lock);
    mail_order *order = new_order(mail, id, data, bytes, peer, tag, timeout_ns);
    int status = order == NULL ? TSH_NO_MEMORY : tsh_is_poisoned(mail->group) ? TSH_POISONED : TSH_OK;
    bool is_claimed = false;
    for (int source = first; source <= last && status == TSH_OK && !is_claimed; source++) {
        is_claimed = tsh_claim(mail, order, source);
    }
    if (order != NULL && !is_claimed) {
        tsh_enqueue(&mail->posted, order);
    }
    for (int source = first; source <= last && status == TSH_OK; source++) {
        status = tsh_pull(mail, source);
    }
    return acknowledge(mail, status, id, done);
}

/* Leave the quick part of waiting: spin where every rank has a core, else let peers on this core run. */
static bool is_patient(const tsh_group *group, bool is_background, int turn, int64_t waited_ns) {
    if (is_background) {
        return true;
    }
    return waited_ns > (group->spin_ns > 0 ? group->spin_ns : TSH_MAIL_YIELD_NS) ||
           (group->spin_ns == 0 && turn > TSH_MAIL_YIELDS);
}

/* One look at everything: how many orders are done now, or -status. */
static int look_once(struct tsh_mail *mail, bool look_for_dead, tsh_receipt *done, int capacity, bool *is_idle) {
    pthread_mutex_lock(&mail->lock);
    /* Of a poisoned group nothing is touched any more: tensors of failed orders may be gone. */
    int status = tsh_is_poisoned(mail->group) ? TSH_POISONED : tsh_push_and_pull(mail);
    if (status == TSH_OK && mail->done.first == NULL) {
        status = mail_obstacle(mail, look_for_dead);
    }
    if (status == TSH_OK && mail->done.first == NULL) {
        status = expire_all(mail);
    }
    int count = hand_over(mail, done, capacity);
    *is_idle = mail->num_pending == 0;
    pthread_mutex_unlock(&mail->lock);
    return count > 0 ? count : -status;
}

/* Move messages until some order is done; returns how many, 0 if none within `patience_ns` or none is pending, or
 * -status. One thread at a time. */
int tsh_mail_progress(struct tsh_mail *mail, bool is_background, int64_t patience_ns, tsh_receipt *done, int capacity) {
    tsh_group *group = mail->group;
    tsh_rank_line *line = &group->ranks[group->rank];
    int64_t start_ns = tsh_now_ns(), now_ns = start_ns;
    bool look_for_dead = false;
    for (int turn = 0;; turn++) {
        bool sleeps = is_patient(group, is_background, turn, now_ns - start_ns), is_idle;
        if (sleeps) {
            atomic_fetch_add(&line->sleepers, 1);
        }
        uint32_t bell = atomic_load(&line->bell);
        int outcome = look_once(mail, look_for_dead, done, capacity, &is_idle);
        now_ns = tsh_now_ns();
        int64_t rest_ns = start_ns + patience_ns - now_ns;
        bool ends = outcome != 0 || is_idle || rest_ns <= 0;
        if (sleeps && !ends) {
            look_for_dead = tsh_futex_wait(&line->bell, bell, rest_ns < TSH_SLICE_NS ? rest_ns : TSH_SLICE_NS) != 0;
        } else if (!ends && group->spin_ns > 0) {
            tsh_relax();
        } else if (!ends) {
            sched_yield();
        }
        if (sleeps) {
            atomic_fetch_sub(&line->sleepers, 1);
        }
        if (ends) {
            return outcome;
        }
    }
}
