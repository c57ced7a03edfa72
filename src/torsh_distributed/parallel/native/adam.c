/* Adam and AdamW on parameters in host memory: one pass over value, gradient and state, on as many threads as asked for.
 *
 * Per element one square root and one division, both exact; torch's fused kernel divides twice, and on cores whose
 * divider is slow that is what its time goes to (Neoverse-N1: 1.4 against 2.0 ns an element). Loops are plain, for the
 * compiler to vectorise.
 */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TSH_MAX_THREADS 64
#define TSH_MAX_COPIES 1024
#define TSH_BLOCK 2048 /* elements, which are copied while they are in the nearest cache */
/* On x86 the kernel is compiled for wide vectors too, and the loader takes what the machine has. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define TSH_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TSH_WIDE
#endif

/* A product and a sum, rounded once where that is one instruction. */
#if defined(__aarch64__)
#define MADD(A, B, C) fmaf(A, B, C)
#else
#define MADD(A, B, C) ((A) * (B) + (C))
#endif

/* A parameter with its gradient and state. */
typedef struct {
    float *value, *mean, *square;
    const float *grad;
    size_t numel;
    float step_size;  /* learning rate over the first bias correction */
    float root_scale; /* one over the root of the second */
} tsh_piece;

typedef struct {
    const tsh_piece *pieces;
    size_t num_pieces;
    float beta2, eps;
    float take1, take2; /* one minus each beta, which single precision would blur */
    float added;  /* times the value, onto the gradient: Adam's decay */
    float kept;   /* what a value is multiplied with first: AdamW's decay */
    float sign;   /* of the gradient: -1 to go uphill */
    const ptrdiff_t *distances; /* in bytes, from each value to where it is written too */
    size_t num_distances;
} tsh_update;

typedef struct {
    const tsh_update *update;
    size_t start, stop; /* elements of all pieces, one after the other */
} tsh_share;

/* Elements from `start` to `stop`, written to `also` too where it `copies`: a store that costs nothing while the root and
 * the division of the next elements are under way. */
static inline __attribute__((always_inline)) void update_elements(const tsh_update *how, const tsh_piece *piece, size_t start,
                                                                  size_t stop, float *restrict also, bool decays,
                                                                  bool copies) {
    float *restrict value = piece->value, *restrict mean = piece->mean, *restrict square = piece->square;
    const float *restrict grad = piece->grad;
    const float beta2 = how->beta2, take1 = how->take1, take2 = how->take2, eps = how->eps;
    const float added = how->added, kept = how->kept, sign = how->sign;
    const float step_size = piece->step_size, root_scale = piece->root_scale;
    for (size_t i = start; i < stop; i++) {
        float g = decays ? MADD(added, value[i], sign * grad[i]) : grad[i];
        float m = MADD(take1, g - mean[i], mean[i]);
        float s = MADD(take2, g * g, beta2 * square[i]);
        float v = MADD(-step_size, m / MADD(sqrtf(s), root_scale, eps), decays ? kept * value[i] : value[i]);
        mean[i] = m;
        square[i] = s;
        value[i] = v;
        if (copies) {
            also[i] = v;
        }
    }
}

typedef void (*tsh_updater)(const tsh_update *how, const tsh_piece *piece, size_t start, size_t stop, float *also);

#define UPDATER(NAME, DECAYS, COPIES)                                                                                  \
    TSH_WIDE static void NAME(const tsh_update *how, const tsh_piece *piece, size_t start, size_t stop, float *also) { \
        update_elements(how, piece, start, stop, also, DECAYS, COPIES);                                                \
    }
/* Downhill and without decay is what most ask for: three operations less an element. */
UPDATER(update_plain, false, false)
UPDATER(update_plain_and_copy, false, true)
UPDATER(update_decaying, true, false)
UPDATER(update_decaying_and_copy, true, true)

static float *moved(float *value, ptrdiff_t distance) { return (float *)((char *)value + distance); }

static void update(const tsh_update *how, const tsh_piece *piece, size_t start, size_t stop) {
    bool is_plain = how->added == 0.0f && how->kept == 1.0f && how->sign == 1.0f;
    if (how->num_distances == 0) {
        (is_plain ? update_plain : update_decaying)(how, piece, start, stop, NULL);
        return;
    }
    tsh_updater updater = is_plain ? update_plain_and_copy : update_decaying_and_copy;
    float *also = moved(piece->value, how->distances[0]);
    for (size_t end; start < stop; start = end) {
        end = stop - start > TSH_BLOCK ? start + TSH_BLOCK : stop;
        updater(how, piece, start, end, also);
        for (size_t index = 1; index < how->num_distances; index++) {
            memcpy(moved(piece->value, how->distances[index]) + start, piece->value + start, (end - start) * sizeof(float));
        }
    }
}

static void *run_share(void *given) {
    const tsh_share *share = given;
    const tsh_update *how = share->update;
    size_t first = 0;
    for (size_t index = 0; index < how->num_pieces && first < share->stop; index++) {
        const tsh_piece *piece = &how->pieces[index];
        size_t last = first + piece->numel;
        if (last > share->start) {
            size_t start = share->start > first ? share->start - first : 0;
            size_t stop = (share->stop < last ? share->stop : last) - first;
            update(how, piece, start, stop);
        }
        first = last;
    }
    return NULL;
}

/* Threads live for one update: starting one takes as long as some ten thousand elements. What cannot be started is done
 * here. */
static void run(const tsh_update *update, size_t numel, int num_threads) {
    tsh_share shares[TSH_MAX_THREADS];
    pthread_t threads[TSH_MAX_THREADS];
    bool started[TSH_MAX_THREADS] = {false};
    for (int index = 0; index < num_threads; index++) {
        /* Whole cache lines, where pieces begin on one: no two threads write the same. */
        size_t start = numel * (size_t)index / (size_t)num_threads / 16 * 16;
        size_t stop = index + 1 == num_threads ? numel : numel * ((size_t)index + 1) / (size_t)num_threads / 16 * 16;
        shares[index] = (tsh_share){update, start, stop};
        if (index > 0) {
            started[index] = pthread_create(&threads[index], NULL, run_share, &shares[index]) == 0;
        }
    }
    for (int index = 0; index < num_threads; index++) {
        if (!started[index]) {
            run_share(&shares[index]);
        }
    }
    for (int index = 1; index < num_threads; index++) {
        if (started[index]) {
            pthread_join(threads[index], NULL);
        }
    }
}

/* One entry: addresses of value, gradient, mean and square, the number of elements, and the number of the update. */
static bool read_piece(PyObject *entry, double learning_rate, double beta1, double beta2, tsh_piece *piece) {
    unsigned long long value, grad, mean, square;
    Py_ssize_t numel;
    double step;
    if (!PyArg_ParseTuple(entry, "KKKKnd", &value, &grad, &mean, &square, &numel, &step)) {
        return false;
    }
    *piece = (tsh_piece){
        .value = (float *)(uintptr_t)value,
        .mean = (float *)(uintptr_t)mean,
        .square = (float *)(uintptr_t)square,
        .grad = (const float *)(uintptr_t)grad,
        .numel = (size_t)numel,
        .step_size = (float)(learning_rate / (1.0 - pow(beta1, step))),
        .root_scale = (float)(1.0 / sqrt(1.0 - pow(beta2, step))),
    };
    return true;
}

static bool read_distances(PyObject *list, ptrdiff_t *distances) {
    if (PyList_Size(list) > TSH_MAX_COPIES) {
        PyErr_Format(PyExc_ValueError, "an update is written to at most %d other places", TSH_MAX_COPIES);
        return false;
    }
    for (Py_ssize_t index = 0; index < PyList_Size(list); index++) {
        distances[index] = PyLong_AsSsize_t(PyList_GetItem(list, index));
    }
    return PyErr_Occurred() == NULL;
}

static PyObject *adam(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *entries, *copies;
    double learning_rate, beta1, beta2, eps, decay;
    int is_decoupled, is_maximizing, num_threads;
    if (!PyArg_ParseTuple(args, "O!dddddppiO!", &PyList_Type, &entries, &learning_rate, &beta1, &beta2, &eps, &decay,
                          &is_decoupled, &is_maximizing, &num_threads, &PyList_Type, &copies)) {
        return NULL;
    }
    Py_ssize_t num_pieces = PyList_Size(entries);
    ptrdiff_t distances[TSH_MAX_COPIES];
    if (!read_distances(copies, distances)) {
        return NULL;
    }
    tsh_piece *pieces = PyMem_Malloc((size_t)(num_pieces > 0 ? num_pieces : 1) * sizeof *pieces);
    if (pieces == NULL) {
        return PyErr_NoMemory();
    }
    size_t numel = 0;
    for (Py_ssize_t index = 0; index < num_pieces; index++) {
        if (!read_piece(PyList_GetItem(entries, index), learning_rate, beta1, beta2, &pieces[index])) {
            PyMem_Free(pieces);
            return NULL;
        }
        numel += pieces[index].numel;
    }
    tsh_update update = {
        .pieces = pieces,
        .num_pieces = (size_t)num_pieces,
        .beta2 = (float)beta2,
        .eps = (float)eps,
        .take1 = (float)(1.0 - beta1),
        .take2 = (float)(1.0 - beta2),
        .added = is_decoupled ? 0.0f : (float)decay,
        .kept = is_decoupled ? (float)(1.0 - learning_rate * decay) : 1.0f,
        .sign = is_maximizing ? -1.0f : 1.0f,
        .distances = distances,
        .num_distances = (size_t)PyList_Size(copies),
    };
    num_threads = num_threads < 1 ? 1 : num_threads > TSH_MAX_THREADS ? TSH_MAX_THREADS : num_threads;
    Py_BEGIN_ALLOW_THREADS;
    run(&update, numel, num_threads);
    Py_END_ALLOW_THREADS;
    PyMem_Free(pieces);
    return Py_NewRef(Py_None);
}

static PyMethodDef module_methods[] = {
    {"adam", adam, METH_VARARGS,
     "([(value, grad, mean, square, numel, step)], learning_rate, beta1, beta2, eps, decay, is_decoupled, is_maximizing, "
     "num_threads, distances)"},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", TSH_VERSION); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill_module},
    {0, NULL},
};

static struct PyModuleDef adam_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_adam",
    .m_doc = "The compiled kernel of Adam on host memory.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__adam(void) { return PyModuleDef_Init(&adam_module); }
