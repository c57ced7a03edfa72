/* The Python face of the core: one type, `Group`, on the stable ABI of Python 3.11.
 *
 * Arguments are addresses and counts; `native.py` checks tensors and keeps them alive. Blocking calls release the GIL
 * and return a status, 0 for success: who raises, and with which words, is decided in Python.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "core.h"

#include <string.h>
#include <unistd.h>

#define MAX_RECEIPTS 64

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    tsh_group group;
    bool is_open;
} GroupObject;

static tsh_group *group_of(PyObject *self) { return &((GroupObject *)self)->group; }

static bool has_signal(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    bool is_raised = PyErr_CheckSignals() != 0;
    PyGILState_Release(state);
    return is_raised;
}

static bool takes(const char *name, Py_ssize_t given, Py_ssize_t needed) {
    if (given != needed) {
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, needed, given);
    }
    return given == needed;
}

static long long integer(PyObject *value) { return PyLong_AsLongLong(value); }
static char *address(PyObject *value) { return (char *)PyLong_AsVoidPtr(value); }

/* A tuple of `count` addresses or sizes into an array; None leaves it empty. */
static bool addresses(PyObject *tuple, int count, char **into) {
    for (int i = 0; i < count && tuple != Py_None; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (item == NULL) {
            return false;
        }
        into[i] = address(item);
    }
    return !PyErr_Occurred();
}

static bool sizes(PyObject *tuple, int count, size_t *into) {
    for (int i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (item == NULL) {
            return false;
        }
        into[i] = PyLong_AsSize_t(item);
    }
    return !PyErr_Occurred();
}

/* The last two arguments of every collective: how long to wait, and whether in the background. */
static bool prepare(tsh_group *group, PyObject *const *last_two) {
    group->timeout_ns = integer(last_two[0]);
    group->is_background = integer(last_two[1]) != 0;
    group->deadline_ns = 0;
    group->subject = -1;
    return !PyErr_Occurred();
}

static bool choose_fold(const tsh_group *group, PyObject *dtype, PyObject *reduction, tsh_fold *fold) {
    fold->dtype = (int)integer(dtype);
    fold->reduction = (int)integer(reduction);
    fold->kernel = tsh_find_kernel(fold->dtype, fold->reduction);
    fold->element_bytes = tsh_element_bytes(fold->dtype);
    fold->divisor = group->num_ranks;
    if (fold->kernel == NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "no kernel for dtype %d and reduction %d", fold->dtype, fold->reduction);
    }
    return fold->kernel != NULL && !PyErr_Occurred();
}

/* A signal handler that raised while the call waited has left its exception; it goes to the caller. */
static PyObject *status_or_raise(int status) {
    return PyErr_Occurred() ? NULL : PyLong_FromLong(status);
}

#define RUN(CALL)                                                                                                      \
    int status;                                                                                                        \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    status = CALL;                                                                                                     \
    Py_END_ALLOW_THREADS;                                                                                              \
    return status_or_raise(status)

static PyObject *group_barrier(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    if (!takes("barrier", num_args, 2) || !prepare(group, args)) {
        return NULL;
    }
    RUN(tsh_barrier(group));
}

static PyObject *group_all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    tsh_fold fold;
    if (!takes("all_reduce", num_args, 6) || !choose_fold(group, args[2], args[3], &fold) ||
        !prepare(group, args + 4)) {
        return NULL;
    }
    char *buffer = address(args[0]);
    size_t numel = PyLong_AsSize_t(args[1]);
    RUN(tsh_all_reduce(group, buffer, numel, &fold));
}

static PyObject *group_all_reduce_shared(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    tsh_fold fold;
    char *buffers[TSH_MAX_RANKS];
    if (!takes("all_reduce_shared", num_args, 7) || !addresses(args[0], group->num_ranks, buffers) ||
        !choose_fold(group, args[3], args[4], &fold) || !prepare(group, args + 5)) {
        return NULL;
    }
    uint64_t number = (uint64_t)PyLong_AsSize_t(args[1]);
    size_t numel = PyLong_AsSize_t(args[2]);
    RUN(tsh_all_reduce_shared(group, buffers, number, numel, &fold));
}

static PyObject *group_reduce(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    tsh_fold fold;
    if (!takes("reduce", num_args, 7) || !choose_fold(group, args[2], args[3], &fold) || !prepare(group, args + 5)) {
        return NULL;
    }
    char *buffer = address(args[0]);
    size_t numel = PyLong_AsSize_t(args[1]);
    int root = (int)integer(args[4]);
    RUN(tsh_reduce(group, buffer, numel, &fold, root));
}

static PyObject *group_reduce_scatter(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    tsh_fold fold;
    char *in[TSH_MAX_RANKS];
    size_t numels[TSH_MAX_RANKS];
    if (!takes("reduce_scatter", num_args, 7) || !choose_fold(group, args[3], args[4], &fold) ||
        !addresses(args[1], group->num_ranks, in) || !sizes(args[2], group->num_ranks, numels) ||
        !prepare(group, args + 5)) {
        return NULL;
    }
    char *out = address(args[0]);
    RUN(tsh_reduce_scatter(group, out, in, numels, &fold));
}

static PyObject *group_broadcast(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    if (!takes("broadcast", num_args, 6) || !prepare(group, args + 4)) {
        return NULL;
    }
    char *buffer = address(args[0]);
    size_t bytes = PyLong_AsSize_t(args[1]);
    int dtype = (int)integer(args[2]), root = (int)integer(args[3]);
    RUN(tsh_broadcast(group, buffer, bytes, dtype, root));
}

static PyObject *group_all_gather(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    char *out[TSH_MAX_RANKS];
    size_t bytes[TSH_MAX_RANKS];
    if (!takes("all_gather", num_args, 6) || !addresses(args[0], group->num_ranks, out) ||
        !sizes(args[1], group->num_ranks, bytes) || !prepare(group, args + 4)) {
        return NULL;
    }
    const char *in = address(args[2]);
    int dtype = (int)integer(args[3]);
    RUN(tsh_all_gather(group, out, bytes, in, dtype));
}

static PyObject *group_gather(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    char *out[TSH_MAX_RANKS];
    if (!takes("gather", num_args, 7) || !addresses(args[0], group->num_ranks, out) || !prepare(group, args + 5)) {
        return NULL;
    }
    const char *in = address(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    int dtype = (int)integer(args[3]), root = (int)integer(args[4]);
    RUN(tsh_gather(group, out, in, bytes, dtype, root));
}

static PyObject *group_scatter(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    char *in[TSH_MAX_RANKS];
    if (!takes("scatter", num_args, 7) || !addresses(args[1], group->num_ranks, in) || !prepare(group, args + 5)) {
        return NULL;
    }
    char *out = address(args[0]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    int dtype = (int)integer(args[3]), root = (int)integer(args[4]);
    RUN(tsh_scatter(group, out, in, bytes, dtype, root));
}

static PyObject *group_all_to_all(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    char *out[TSH_MAX_RANKS], *in[TSH_MAX_RANKS];
    size_t out_bytes[TSH_MAX_RANKS], in_bytes[TSH_MAX_RANKS];
    int num_ranks = group->num_ranks;
    if (!takes("all_to_all", num_args, 7) || !addresses(args[0], num_ranks, out) ||
        !sizes(args[1], num_ranks, out_bytes) || !addresses(args[2], num_ranks, in) ||
        !sizes(args[3], num_ranks, in_bytes) || !prepare(group, args + 5)) {
        return NULL;
    }
    int dtype = (int)integer(args[4]);
    RUN(tsh_all_to_all(group, out, out_bytes, in, in_bytes, dtype));
}

/* Addresses that are 0 stand for none. */
static PyObject *group_exchange_rows(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    size_t in_counts[TSH_MAX_RANKS], out_counts[TSH_MAX_RANKS];
    if (!takes("exchange_rows", num_args, 13) || !sizes(args[8], group->num_ranks, in_counts) ||
        !sizes(args[9], group->num_ranks, out_counts) || !prepare(group, args + 11)) {
        return NULL;
    }
    tsh_rows rows = {.out = address(args[0]),
                     .num_out_rows = PyLong_AsSize_t(args[1]),
                     .in = address(args[2]),
                     .row_bytes = PyLong_AsSize_t(args[3]),
                     .sent = (const int64_t *)address(args[4]),
                     .is_sum = integer(args[5]) != 0,
                     .received = (const int64_t *)address(args[6]),
                     .weights = (const float *)address(args[7])};
    int dtype = (int)integer(args[10]);
    if (!PyErr_Occurred() && (rows.row_bytes == 0 || rows.row_bytes > tsh_max_row_bytes(group))) {
        PyErr_Format(PyExc_ValueError, "a row of %zu bytes does not fit a slot", rows.row_bytes);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    RUN(tsh_exchange_rows(group, &rows, in_counts, out_counts, dtype));
}

static PyObject *group_max_row_bytes(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromSize_t(tsh_max_row_bytes(group_of(self)));
}

/* A tensor's memory in the segment. It is given back when nothing refers to it any more. */
typedef struct {
    PyObject_HEAD
    PyObject *owner; /* the group, whose mapping it lies in */
    char *memory;
    size_t bytes;
    tsh_common_use use;
    uint64_t number;
} CommonObject;

static PyObject *common_type; /* set when the module is filled */

static int common_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    CommonObject *common = (CommonObject *)self;
    return PyBuffer_FillInfo(view, self, common->memory, (Py_ssize_t)common->bytes, 0, flags);
}

static void common_dealloc(PyObject *self) {
    CommonObject *common = (CommonObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (common->owner != NULL) {
        tsh_common_release(group_of(common->owner), common->use, common->number);
        Py_DECREF(common->owner);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyType_Slot common_slots[] = {
    {Py_tp_doc, "Memory of one tensor in a segment, as a writable buffer."},
    {Py_tp_dealloc, common_dealloc},
    {Py_bf_getbuffer, common_getbuffer},
    {0, NULL},
};

static PyType_Spec common_spec = {
    .name = "torsh_distributed.comm.backends.shm._core.Common",
    .basicsize = sizeof(CommonObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = common_slots,
};

/* common(use, bytes) -> a buffer, or None if there is no room now. */
static PyObject *group_common(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    if (!takes("common", num_args, 2)) {
        return NULL;
    }
    tsh_common_use use = (tsh_common_use)integer(args[0]);
    size_t bytes = PyLong_AsSize_t(args[1]);
    if (!PyErr_Occurred() && use >= TSH_COMMON_USES) {
        PyErr_SetString(PyExc_ValueError, "no such use of common buffers");
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)common_type, Py_tp_alloc);
    CommonObject *common = PyErr_Occurred() ? NULL : (CommonObject *)allocate((PyTypeObject *)common_type, 0);
    if (common == NULL) {
        return NULL;
    }
    common->memory = tsh_common_take(group_of(self), use, bytes, &common->number);
    if (common->memory == NULL) {
        Py_DECREF((PyObject *)common);
        Py_RETURN_NONE;
    }
    common->bytes = bytes;
    common->use = use;
    common->owner = Py_NewRef(self);
    return (PyObject *)common;
}

static PyObject *receipt_tuple(const tsh_receipt *receipt) {
    return Py_BuildValue("(KiiK)", (unsigned long long)receipt->id, receipt->status, receipt->peer,
                         (unsigned long long)receipt->bytes);
}

/* send and receive: (id, address, bytes, peer, tag, timeout_ns) -> receipt, None if pending, or -status. */
static PyObject *place_order(PyObject *self, PyObject *const *args, Py_ssize_t num_args, bool is_send) {
    tsh_group *group = group_of(self);
    if (!takes(is_send ? "send" : "receive", num_args, 6)) {
        return NULL;
    }
    uint64_t id = PyLong_AsUnsignedLongLong(args[0]);
    char *data = address(args[1]);
    size_t bytes = PyLong_AsSize_t(args[2]);
    int peer = (int)integer(args[3]), tag = (int)integer(args[4]), outcome;
    int64_t timeout_ns = integer(args[5]);
    tsh_receipt done;
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    outcome = is_send ? tsh_mail_send(group->mail, id, data, bytes, peer, tag, timeout_ns, &done)
                      : tsh_mail_receive(group->mail, id, data, bytes, peer, tag, timeout_ns, &done);
    Py_END_ALLOW_THREADS;
    if (outcome == 0) {
        Py_RETURN_NONE;
    }
    return outcome > 0 ? receipt_tuple(&done) : PyLong_FromLong(outcome);
}

static PyObject *group_send(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return place_order(self, args, num_args, true);
}

static PyObject *group_receive(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    return place_order(self, args, num_args, false);
}

/* progress(is_background, patience_ns) -> a list of receipts, or -status. */
static PyObject *group_progress(PyObject *self, PyObject *const *args, Py_ssize_t num_args) {
    tsh_group *group = group_of(self);
    if (!takes("progress", num_args, 2)) {
        return NULL;
    }
    bool is_background = integer(args[0]) != 0;
    int64_t patience_ns = integer(args[1]);
    tsh_receipt done[MAX_RECEIPTS];
    int outcome;
    Py_BEGIN_ALLOW_THREADS;
    outcome = tsh_mail_progress(group->mail, is_background, patience_ns, done, MAX_RECEIPTS);
    Py_END_ALLOW_THREADS;
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (outcome < 0) {
        return PyLong_FromLong(outcome);
    }
    PyObject *list = PyList_New(outcome);
    for (int i = 0; i < outcome && list != NULL; i++) {
        PyObject *tuple = receipt_tuple(&done[i]);
        if (tuple == NULL || PyList_SetItem(list, i, tuple) != 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static PyObject *group_join(PyObject *self, PyObject *unused) {
    (void)unused;
    tsh_group *group = group_of(self);
    group->ranks[group->rank].pid = (int32_t)getpid();
    atomic_store(&group->ranks[group->rank].is_joined, 1);
    Py_RETURN_NONE;
}

static PyObject *group_leave(PyObject *self, PyObject *unused) {
    (void)unused;
    tsh_leave(group_of(self));
    Py_RETURN_NONE;
}

static PyObject *group_poison(PyObject *self, PyObject *args) {
    int status, subject;
    const char *text;
    if (!PyArg_ParseTuple(args, "iis", &status, &subject, &text)) {
        return NULL;
    }
    tsh_poison_group(group_of(self), (tsh_status)status, subject, text);
    Py_RETURN_NONE;
}

/* The first failure of the group, seen by any rank: (status, origin, subject, text), or None. */
static PyObject *group_failure(PyObject *self, PyObject *unused) {
    (void)unused;
    const tsh_group *group = group_of(self);
    const tsh_poison *poison = &group->shared->poison;
    if (!tsh_is_poisoned(group)) {
        Py_RETURN_NONE;
    }
    PyObject *text = PyUnicode_DecodeUTF8(poison->text, (Py_ssize_t)strnlen(poison->text, TSH_TEXT_BYTES), "replace");
    return text ? Py_BuildValue("(iiiN)", (int)poison->status, poison->origin, poison->subject, text) : NULL;
}

static PyObject *group_subject(PyObject *self, PyObject *unused) {
    (void)unused;
    return PyLong_FromLong(group_of(self)->subject);
}

/* What a rank showed at the first meeting of the current collective: (operation, dtype, reduction, root, bytes). */
static PyObject *group_signature(PyObject *self, PyObject *rank) {
    const tsh_group *group = group_of(self);
    long index = PyLong_AsLong(rank);
    if (index < 0 || index >= group->num_ranks) {
        return PyErr_Format(PyExc_IndexError, "rank %ld of %d", index, group->num_ranks);
    }
    tsh_signature shown = *tsh_signature_of(group, (int)index);
    return Py_BuildValue("(iiiiK)", (int)(shown.kind & 255), (int)(shown.kind >> 8 & 255), (int)(shown.kind >> 16 & 255),
                         (int)(shown.kind >> 32) - 1, (unsigned long long)shown.amount);
}

/* The ranks that have not come to the meeting this rank waits for. */
static PyObject *group_missing(PyObject *self, PyObject *unused) {
    (void)unused;
    const tsh_group *group = group_of(self);
    PyObject *list = PyList_New(0);
    for (int rank = 0; rank < group->num_ranks && list != NULL; rank++) {
        if (atomic_load(&group->ranks[rank].arrived) < group->step) {
            PyObject *number = PyLong_FromLong(rank);
            if (number == NULL || PyList_Append(list, number) != 0) {
                Py_CLEAR(list);
            }
            Py_XDECREF(number);
        }
    }
    return list;
}

/* Whether the last collective failed before its first meeting was complete: then no rank has written any result. */
static PyObject *group_is_unbegun(PyObject *self, PyObject *unused) {
    (void)unused;
    const tsh_group *group = group_of(self);
    return PyBool_FromLong(group->step <= group->shown_step);
}

static PyObject *group_is_alive(PyObject *self, PyObject *rank) {
    return PyBool_FromLong(tsh_is_alive(group_of(self), (int)PyLong_AsLong(rank)));
}

static int group_init(PyObject *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"segment", "fd", "rank", "num_ranks", "slot_bytes", "ring_bytes", "spin_ns", NULL};
    GroupObject *object = (GroupObject *)self;
    tsh_group *group = &object->group;
    PyObject *segment;
    Py_ssize_t slot_bytes, ring_bytes;
    long long spin_ns;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OiiinnL", names, &segment, &group->fd, &group->rank,
                                     &group->num_ranks, &slot_bytes, &ring_bytes, &spin_ns)) {
        return -1;
    }
    if (object->is_open || PyObject_GetBuffer(segment, &object->view, PyBUF_WRITABLE) != 0) {
        return -1;
    }
    object->is_open = true;
    group->slot_bytes = (size_t)slot_bytes;
    group->ring_bytes = (size_t)ring_bytes;
    group->spin_ns = spin_ns;
    group->subject = -1;
    group->has_signal = has_signal;
    bool fits = group->num_ranks > 0 && group->num_ranks <= TSH_MAX_RANKS &&
                (size_t)object->view.len >= tsh_segment_bytes(group->num_ranks, group->slot_bytes, group->ring_bytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the segment does not hold this many ranks and slots");
        return -1;
    }
    tsh_attach(group, object->view.buf);
    group->mail = tsh_mail_new(group);
    return group->mail != NULL ? 0 : (PyErr_NoMemory(), -1);
}

static void group_dealloc(PyObject *self) {
    GroupObject *object = (GroupObject *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (object->group.mail != NULL) {
        tsh_mail_free(object->group.mail);
    }
    if (object->is_open) {
        PyBuffer_Release(&object->view);
    }
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

#define FAST(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))group_##NAME, METH_FASTCALL, DOC}

static PyMethodDef group_methods[] = {
    FAST(barrier, "barrier(timeout_ns, is_background) -> status"),
    FAST(all_reduce, "all_reduce(address, numel, dtype, reduction, timeout_ns, is_background) -> status"),
    FAST(all_reduce_shared, "all_reduce_shared(addresses, number, numel, dtype, reduction, timeout_ns, is_background) "
                            "-> status"),
    FAST(reduce, "reduce(address, numel, dtype, reduction, root, timeout_ns, is_background) -> status"),
    FAST(reduce_scatter, "reduce_scatter(out, ins, numels, dtype, reduction, timeout_ns, is_background) -> status"),
    FAST(broadcast, "broadcast(address, bytes, dtype, root, timeout_ns, is_background) -> status"),
    FAST(all_gather, "all_gather(outs, bytes, address, dtype, timeout_ns, is_background) -> status"),
    FAST(gather, "gather(outs, address, bytes, dtype, root, timeout_ns, is_background) -> status"),
    FAST(scatter, "scatter(address, ins, bytes, dtype, root, timeout_ns, is_background) -> status"),
    FAST(all_to_all, "all_to_all(outs, out_bytes, ins, in_bytes, dtype, timeout_ns, is_background) -> status"),
    FAST(exchange_rows, "exchange_rows(out, num_out_rows, source, row_bytes, sent, is_sum, received, weights, "
                        "in_counts, out_counts, dtype, timeout_ns, is_background) -> status"),
    FAST(common, "common(use, bytes) -> a buffer in the segment, or None if there is no room now"),
    FAST(send, "send(id, address, bytes, peer, tag, timeout_ns) -> receipt, None or -status"),
    FAST(receive, "receive(id, address, bytes, peer, tag, timeout_ns) -> receipt, None or -status"),
    FAST(progress, "progress(is_background, patience_ns) -> receipts or -status"),
    {"max_row_bytes", group_max_row_bytes, METH_NOARGS, "The longest row that exchange_rows takes."},
    {"join", group_join, METH_NOARGS, "Show the others that this rank is here."},
    {"leave", group_leave, METH_NOARGS, "Show the others that this rank will not come again."},
    {"poison", group_poison, METH_VARARGS, "poison(status, subject, text): release everybody; the first one counts."},
    {"failure", group_failure, METH_NOARGS, "The first failure: (status, origin, subject, text), or None."},
    {"subject", group_subject, METH_NOARGS, "The rank that the last failure here speaks of, or -1."},
    {"signature", group_signature, METH_O, "signature(rank) -> (operation, dtype, reduction, root, bytes)"},
    {"missing", group_missing, METH_NOARGS, "The ranks that have not come to the current meeting."},
    {"is_unbegun", group_is_unbegun, METH_NOARGS, "Whether the last collective failed before anything was written."},
    {"is_alive", group_is_alive, METH_O, "is_alive(rank): whether the rank's process runs."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_doc, "One rank's view of a shared-memory segment."},
    {Py_tp_init, group_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_methods, group_methods},
    {0, NULL},
};

static PyType_Spec group_spec = {
    .name = "torsh_distributed.comm.backends.shm._core.Group",
    .basicsize = sizeof(GroupObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = group_slots,
};

/* segment_bytes(num_ranks, slot_bytes, ring_bytes) -> (whole, backed from the start) */
static PyObject *segment_bytes(PyObject *module, PyObject *args) {
    (void)module;
    int num_ranks;
    Py_ssize_t slot_bytes, ring_bytes;
    if (!PyArg_ParseTuple(args, "inn", &num_ranks, &slot_bytes, &ring_bytes)) {
        return NULL;
    }
    return Py_BuildValue("(nn)", (Py_ssize_t)tsh_segment_bytes(num_ranks, (size_t)slot_bytes, (size_t)ring_bytes),
                         (Py_ssize_t)tsh_backed_bytes(num_ranks, (size_t)slot_bytes));
}

static PyObject *packed_room(PyObject *module, PyObject *numel) {
    (void)module;
    size_t count = PyLong_AsSize_t(numel);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(tsh_packed_room(count));
}

static PyObject *pack(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (!takes("pack", num_args, 3)) {
        return NULL;
    }
    const char *floats = address(args[0]);
    size_t numel = PyLong_AsSize_t(args[1]), bytes;
    char *out = address(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    bytes = tsh_pack(floats, numel, out);
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(bytes);
}

static PyObject *unpack(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (!takes("unpack", num_args, 3)) {
        return NULL;
    }
    const char *message = address(args[0]);
    size_t numel = PyLong_AsSize_t(args[1]);
    char *floats = address(args[2]);
    bool is_whole;
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    is_whole = tsh_unpack(message, numel, floats);
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(is_whole);
}

#define PLAIN(NAME, DOC) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, DOC}

static PyMethodDef module_methods[] = {
    {"segment_bytes", segment_bytes, METH_VARARGS, "(num_ranks, slot_bytes, ring_bytes) -> (whole, backed) bytes"},
    {"packed_room", packed_room, METH_O, "packed_room(numel) -> the most bytes that so many floats take when packed"},
    PLAIN(pack, "pack(floats, numel, message) -> bytes of the message"),
    PLAIN(unpack, "unpack(message, numel, floats) -> whether it was a message of so many floats"),
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) {
    PyObject *type = PyType_FromSpec(&group_spec);
    if (type == NULL || PyModule_AddObjectRef(module, "Group", type) != 0) {
        Py_XDECREF(type);
        return -1;
    }
    Py_DECREF(type);
    common_type = PyType_FromSpec(&common_spec);
    if (common_type == NULL) {
        return -1;
    }
    bool is_filled = PyModule_AddIntConstant(module, "VERSION", TSH_VERSION) == 0 &&
                     PyModule_AddIntConstant(module, "MAX_RANKS", TSH_MAX_RANKS) == 0;
    return is_filled ? 0 : -1;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill_module},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_core",
    .m_doc = "The compiled core of the shm backend.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
