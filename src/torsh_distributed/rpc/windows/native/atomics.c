/* Operations on memory that several processes have mapped: copies, atomic numbers, and a lock that survives its holder.
 *
 * Addresses are checked in Python. Every atomic operation is sequentially consistent, so a number that one process adds
 * to after a put is seen by others only with the bytes of that put. On the stable ABI of Python 3.11.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef enum { INT32, INT64, FLOAT32, FLOAT64, NUM_KINDS } number_kind;

static const size_t kind_bytes[NUM_KINDS] = {4, 8, 4, 8};

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "a lock would be of one process alone");
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the lock has 64 bytes of the preamble");

static double add_float64(void *place, double value) {
    _Atomic uint64_t *bits = place;
    uint64_t seen = atomic_load(bits), wanted;
    double before, after;
    do {
        memcpy(&before, &seen, sizeof before);
        after = before + value;
        memcpy(&wanted, &after, sizeof wanted);
    } while (!atomic_compare_exchange_weak(bits, &seen, wanted));
    return before;
}

static float add_float32(void *place, float value) {
    _Atomic uint32_t *bits = place;
    uint32_t seen = atomic_load(bits), wanted;
    float before, after;
    do {
        memcpy(&before, &seen, sizeof before);
        after = before + value;
        memcpy(&wanted, &after, sizeof wanted);
    } while (!atomic_compare_exchange_weak(bits, &seen, wanted));
    return before;
}

static bool read_kind(PyObject *value, number_kind *kind) {
    long number = PyLong_AsLong(value);
    if (number < 0 || number >= NUM_KINDS) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "an unknown kind of number");
        }
        return false;
    }
    *kind = (number_kind)number;
    return true;
}

static bool takes(Py_ssize_t given, Py_ssize_t needed) {
    if (given != needed) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed, got %zd", needed, given);
    }
    return given == needed;
}

static PyObject *fetch_add(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    number_kind kind;
    if (!takes(count, 3) || !read_kind(args[1], &kind)) {
        return NULL;
    }
    void *place = PyLong_AsVoidPtr(args[0]);
    if (kind == INT32 || kind == INT64) {
        long long value = PyLong_AsLongLong(args[2]);
        if (PyErr_Occurred()) {
            return NULL;
        }
        return PyLong_FromLongLong(kind == INT64 ? atomic_fetch_add((_Atomic int64_t *)place, (int64_t)value)
                                                 : atomic_fetch_add((_Atomic int32_t *)place, (int32_t)value));
    }
    double value = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyFloat_FromDouble(kind == FLOAT64 ? add_float64(place, value) : (double)add_float32(place, (float)value));
}

static PyObject *compare_swap(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    number_kind kind;
    if (!takes(count, 4) || !read_kind(args[1], &kind)) {
        return NULL;
    }
    void *place = PyLong_AsVoidPtr(args[0]);
    long long expected = PyLong_AsLongLong(args[2]), wanted = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (kind == INT64) {
        int64_t seen = (int64_t)expected;
        atomic_compare_exchange_strong((_Atomic int64_t *)place, &seen, (int64_t)wanted);
        return PyLong_FromLongLong(seen);
    }
    int32_t seen = (int32_t)expected;
    atomic_compare_exchange_strong((_Atomic int32_t *)place, &seen, (int32_t)wanted);
    return PyLong_FromLong(seen);
}

static void add_all(char *to, const char *from, size_t num_elements, number_kind kind) {
    for (size_t i = 0; i < num_elements; i++) {
        void *place = to + i * kind_bytes[kind];
        const void *value = from + i * kind_bytes[kind];
        switch (kind) {
        case INT32:
            atomic_fetch_add((_Atomic int32_t *)place, *(const int32_t *)value);
            break;
        case INT64:
            atomic_fetch_add((_Atomic int64_t *)place, *(const int64_t *)value);
            break;
        case FLOAT32:
            add_float32(place, *(const float *)value);
            break;
        default:
            add_float64(place, *(const double *)value);
        }
    }
}

static PyObject *accumulate(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    number_kind kind;
    if (!takes(count, 4) || !read_kind(args[3], &kind)) {
        return NULL;
    }
    void *to = PyLong_AsVoidPtr(args[0]), *from = PyLong_AsVoidPtr(args[1]);
    size_t num_elements = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    add_all(to, from, num_elements, kind);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *copy(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!takes(count, 3)) {
        return NULL;
    }
    void *to = PyLong_AsVoidPtr(args[0]), *from = PyLong_AsVoidPtr(args[1]);
    size_t num_bytes = PyLong_AsSize_t(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    atomic_thread_fence(memory_order_seq_cst);
    memcpy(to, from, num_bytes);
    atomic_thread_fence(memory_order_seq_cst);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *fence(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

static PyObject *lock_make(PyObject *module, PyObject *address) {
    (void)module;
    pthread_mutex_t *mutex = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) {
        return NULL;
    }
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setpshared(&kind, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_ERRORCHECK);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    int problem = pthread_mutex_init(mutex, &kind);
    pthread_mutexattr_destroy(&kind);
    return PyLong_FromLong(problem);
}

static PyObject *lock_take(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (!takes(count, 2)) {
        return NULL;
    }
    pthread_mutex_t *mutex = PyLong_AsVoidPtr(args[0]);
    double timeout_s = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    double whole = (double)(long long)timeout_s;
    until.tv_sec += (time_t)whole;
    until.tv_nsec += (long)((timeout_s - whole) * 1e9);
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000L;
    }
    int problem;
    Py_BEGIN_ALLOW_THREADS;
    problem = pthread_mutex_timedlock(mutex, &until);
    if (problem == EOWNERDEAD) {
        /* Its holder was killed: the lock is ours, and what it protects may be half written. */
        pthread_mutex_consistent(mutex);
    }
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(problem);
}

static PyObject *lock_release(PyObject *module, PyObject *address) {
    (void)module;
    pthread_mutex_t *mutex = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLong(pthread_mutex_unlock(mutex));
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef module_methods[] = {
    {"fetch_add", FAST(fetch_add), METH_FASTCALL, "(address, kind, value) -> the number before"},
    {"compare_swap", FAST(compare_swap), METH_FASTCALL, "(address, kind, expected, wanted) -> the number before"},
    {"accumulate", FAST(accumulate), METH_FASTCALL, "(to, from, num_elements, kind): each element is added atomically"},
    {"copy", FAST(copy), METH_FASTCALL, "(to, from, num_bytes), with a fence on either side"},
    {"fence", fence, METH_NOARGS, "()"},
    {"lock_make", lock_make, METH_O, "(address) -> 0 or an error number"},
    {"lock_take", FAST(lock_take), METH_FASTCALL, "(address, timeout_s) -> 0 or an error number; EOWNERDEAD has it too"},
    {"lock_release", lock_release, METH_O, "(address) -> 0 or an error number"},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", TSH_VERSION); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill_module},
    {0, NULL},
};

static struct PyModuleDef atomics_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_atomics",
    .m_doc = "Atomic operations on memory of several processes.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__atomics(void) { return PyModuleDef_Init(&atomics_module); }
