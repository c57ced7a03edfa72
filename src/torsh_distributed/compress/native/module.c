/* The kernels as a Python module: addresses and counts in; the caller keeps the memory alive. */
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

typedef unsigned long long address; /* what "K" reads */

#define FLOATS(ADDRESS) ((float *)(uintptr_t)(ADDRESS))
#define BYTES(ADDRESS) ((uint8_t *)(uintptr_t)(ADDRESS))
#define INDICES(ADDRESS) ((int64_t *)(uintptr_t)(ADDRESS))

/* Parse, run without the interpreter's lock, return None or what the kernel returned. */
#define TSH_RUN(CALL, RESULT)                                                                                          \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    CALL;                                                                                                              \
    Py_END_ALLOW_THREADS;                                                                                              \
    return RESULT

static PyObject *checksum(PyObject *module, PyObject *args) {
    (void)module;
    address from;
    Py_ssize_t num_bytes;
    uint32_t sum = 0;
    if (!PyArg_ParseTuple(args, "Kn", &from, &num_bytes)) {
        return NULL;
    }
    TSH_RUN(sum = tsh_checksum(BYTES(from), (size_t)num_bytes), PyLong_FromUnsignedLong(sum));
}

#ifdef TSH_HAS_HALF
static PyObject *half_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n;
    float divisor;
    if (!PyArg_ParseTuple(args, "KnfK", &x, &n, &divisor, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_half_encode(FLOATS(x), (size_t)n, divisor, (__fp16 *)(uintptr_t)out), Py_NewRef(Py_None));
}

static PyObject *half_decode(PyObject *module, PyObject *args) {
    (void)module;
    address payload, out;
    Py_ssize_t n;
    float weight;
    if (!PyArg_ParseTuple(args, "KnKf", &payload, &n, &out, &weight)) {
        return NULL;
    }
    TSH_RUN(tsh_half_decode((const __fp16 *)(uintptr_t)payload, (size_t)n, FLOATS(out), weight), Py_NewRef(Py_None));
}
#endif

static PyObject *int8_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n, block;
    if (!PyArg_ParseTuple(args, "KnnK", &x, &n, &block, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_int8_encode(FLOATS(x), (size_t)n, (size_t)block, BYTES(out)), Py_NewRef(Py_None));
}

static PyObject *nbit_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n, block;
    int bits;
    unsigned int key, offset;
    if (!PyArg_ParseTuple(args, "KnniIIK", &x, &n, &block, &bits, &key, &offset, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_nbit_encode(FLOATS(x), (size_t)n, (size_t)block, bits, key, offset, BYTES(out)), Py_NewRef(Py_None));
}

static PyObject *sign_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n, block;
    if (!PyArg_ParseTuple(args, "KnnK", &x, &n, &block, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_sign_encode(FLOATS(x), (size_t)n, (size_t)block, BYTES(out)), Py_NewRef(Py_None));
}

static PyObject *ternary_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n, block;
    float threshold;
    if (!PyArg_ParseTuple(args, "KnnfK", &x, &n, &block, &threshold, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_ternary_encode(FLOATS(x), (size_t)n, (size_t)block, threshold, BYTES(out)), Py_NewRef(Py_None));
}

typedef void (*drawing_encoder)(const float *, size_t, size_t, uint32_t, uint32_t, uint8_t *);

static PyObject *run_drawing(PyObject *args, drawing_encoder encode) {
    address x, out;
    Py_ssize_t n, block;
    unsigned int key, offset;
    if (!PyArg_ParseTuple(args, "KnnIIK", &x, &n, &block, &key, &offset, &out)) {
        return NULL;
    }
    TSH_RUN(encode(FLOATS(x), (size_t)n, (size_t)block, key, offset, BYTES(out)), Py_NewRef(Py_None));
}

static PyObject *ternary_draw(PyObject *module, PyObject *args) {
    (void)module;
    return run_drawing(args, tsh_ternary_draw);
}

static PyObject *natural_encode(PyObject *module, PyObject *args) {
    (void)module;
    return run_drawing(args, tsh_natural_encode);
}

typedef int (*decoder)(const uint8_t *, size_t, size_t, float *, float, int);

static PyObject *run_decoder(PyObject *args, decoder decode) {
    address payload, out;
    Py_ssize_t n, block;
    float weight;
    int adds, is_damaged = 0;
    if (!PyArg_ParseTuple(args, "KnnKfp", &payload, &n, &block, &out, &weight, &adds)) {
        return NULL;
    }
    TSH_RUN(is_damaged = decode(BYTES(payload), (size_t)n, (size_t)block, FLOATS(out), weight, adds),
            PyBool_FromLong(!is_damaged));
}

static PyObject *int8_decode(PyObject *module, PyObject *args) {
    (void)module;
    return run_decoder(args, tsh_int8_decode);
}

static PyObject *sign_decode(PyObject *module, PyObject *args) {
    (void)module;
    return run_decoder(args, tsh_sign_decode);
}

static PyObject *ternary_decode(PyObject *module, PyObject *args) {
    (void)module;
    return run_decoder(args, tsh_ternary_decode);
}

static PyObject *natural_decode(PyObject *module, PyObject *args) {
    (void)module;
    return run_decoder(args, tsh_natural_decode);
}

static PyObject *nbit_decode(PyObject *module, PyObject *args) {
    (void)module;
    address payload, out;
    Py_ssize_t n, block;
    float weight;
    int bits, adds, is_damaged = 0;
    if (!PyArg_ParseTuple(args, "KnniKfp", &payload, &n, &block, &bits, &out, &weight, &adds)) {
        return NULL;
    }
    TSH_RUN(is_damaged = tsh_nbit_decode(BYTES(payload), (size_t)n, (size_t)block, bits, FLOATS(out), weight, adds),
            PyBool_FromLong(!is_damaged));
}

static PyObject *histogram(PyObject *module, PyObject *args) {
    (void)module;
    address x, counts, sums;
    Py_ssize_t n;
    int largest = 0;
    if (!PyArg_ParseTuple(args, "KnKK", &x, &n, &counts, &sums)) {
        return NULL;
    }
    TSH_RUN(largest = tsh_histogram(FLOATS(x), (size_t)n, (int64_t *)(uintptr_t)counts, (int64_t *)(uintptr_t)sums),
            PyLong_FromLong(largest));
}

static PyObject *codebook_encode(PyObject *module, PyObject *args) {
    (void)module;
    address x, entries, out;
    Py_ssize_t n, block;
    int largest, bits;
    if (!PyArg_ParseTuple(args, "KnniKiK", &x, &n, &block, &largest, &entries, &bits, &out)) {
        return NULL;
    }
    TSH_RUN(tsh_codebook_encode(FLOATS(x), (size_t)n, (size_t)block, largest, BYTES(entries), bits, BYTES(out)),
            Py_NewRef(Py_None));
}

static PyObject *codebook_decode(PyObject *module, PyObject *args) {
    (void)module;
    address payload, codebook, out;
    Py_ssize_t n, block;
    float weight;
    int num_entries, adds, is_damaged = 0;
    if (!PyArg_ParseTuple(args, "KnnKiKfp", &payload, &n, &block, &codebook, &num_entries, &out, &weight, &adds)) {
        return NULL;
    }
    TSH_RUN(is_damaged = tsh_codebook_decode(BYTES(payload), (size_t)n, (size_t)block, FLOATS(codebook), num_entries,
                                             FLOATS(out), weight, adds),
            PyBool_FromLong(!is_damaged));
}

static PyObject *at_least(PyObject *module, PyObject *args) {
    (void)module;
    address x, out;
    Py_ssize_t n;
    float threshold;
    size_t count = 0;
    if (!PyArg_ParseTuple(args, "KnfK", &x, &n, &threshold, &out)) {
        return NULL;
    }
    TSH_RUN(count = tsh_at_least(FLOATS(x), (size_t)n, threshold, INDICES(out)), PyLong_FromSize_t(count));
}

static PyObject *add_at(PyObject *module, PyObject *args) {
    (void)module;
    address out, indices, values;
    Py_ssize_t count;
    long long offset;
    float sign;
    if (!PyArg_ParseTuple(args, "KKKnLf", &out, &indices, &values, &count, &offset, &sign)) {
        return NULL;
    }
    TSH_RUN(tsh_add_at(FLOATS(out), INDICES(indices), FLOATS(values), (size_t)count, offset, sign), Py_NewRef(Py_None));
}

static PyObject *keep_largest(PyObject *module, PyObject *args) {
    (void)module;
    address x, indices, magnitudes;
    Py_ssize_t count, k;
    if (!PyArg_ParseTuple(args, "KKnnK", &x, &indices, &count, &k, &magnitudes)) {
        return NULL;
    }
    TSH_RUN(tsh_keep_largest(FLOATS(x), INDICES(indices), (size_t)count, (size_t)k, (uint32_t *)(uintptr_t)magnitudes),
            Py_NewRef(Py_None));
}

static PyObject *indices_encode(PyObject *module, PyObject *args) {
    (void)module;
    address indices, low, unary;
    Py_ssize_t count;
    int low_bits;
    if (!PyArg_ParseTuple(args, "KniKK", &indices, &count, &low_bits, &low, &unary)) {
        return NULL;
    }
    TSH_RUN(tsh_indices_encode(INDICES(indices), (size_t)count, low_bits, BYTES(low), BYTES(unary)),
            Py_NewRef(Py_None));
}

static PyObject *indices_decode(PyObject *module, PyObject *args) {
    (void)module;
    address low, unary, out;
    Py_ssize_t num_unary_bits, count, n;
    int low_bits, problem = 0;
    if (!PyArg_ParseTuple(args, "KKnninK", &low, &unary, &num_unary_bits, &count, &low_bits, &n, &out)) {
        return NULL;
    }
    TSH_RUN(problem = tsh_indices_decode(BYTES(low), BYTES(unary), (size_t)num_unary_bits, (size_t)count, low_bits,
                                         (int64_t)n, INDICES(out)),
            PyLong_FromLong(problem));
}

static PyMethodDef module_methods[] = {
    {"checksum", checksum, METH_VARARGS, "(from, num_bytes) -> 32 bits"},
#ifdef TSH_HAS_HALF
    {"half_encode", half_encode, METH_VARARGS, "(x, n, divisor, out)"},
    {"half_decode", half_decode, METH_VARARGS, "(payload, n, out, weight)"},
#endif
    {"int8_encode", int8_encode, METH_VARARGS, "(x, n, block, out)"},
    {"int8_decode", int8_decode, METH_VARARGS, "(payload, n, block, out, weight, adds) -> is it sound"},
    {"nbit_encode", nbit_encode, METH_VARARGS, "(x, n, block, bits, key, offset, out)"},
    {"nbit_decode", nbit_decode, METH_VARARGS, "(payload, n, block, bits, out, weight, adds) -> is it sound"},
    {"sign_encode", sign_encode, METH_VARARGS, "(x, n, block, out)"},
    {"sign_decode", sign_decode, METH_VARARGS, "(payload, n, block, out, weight, adds) -> is it sound"},
    {"ternary_encode", ternary_encode, METH_VARARGS, "(x, n, block, threshold, out)"},
    {"ternary_draw", ternary_draw, METH_VARARGS, "(x, n, block, key, offset, out)"},
    {"ternary_decode", ternary_decode, METH_VARARGS, "(payload, n, block, out, weight, adds) -> is it sound"},
    {"natural_encode", natural_encode, METH_VARARGS, "(x, n, block, key, offset, out)"},
    {"natural_decode", natural_decode, METH_VARARGS, "(payload, n, block, out, weight, adds) -> is it sound"},
    {"histogram", histogram, METH_VARARGS, "(x, n, counts, sums) -> largest"},
    {"codebook_encode", codebook_encode, METH_VARARGS, "(x, n, block, largest, entries, bits, out)"},
    {"codebook_decode", codebook_decode, METH_VARARGS,
     "(payload, n, block, codebook, num_entries, out, weight, adds) -> is it sound"},
    {"at_least", at_least, METH_VARARGS, "(x, n, threshold, out) -> how many"},
    {"add_at", add_at, METH_VARARGS, "(out, indices, values, count, offset, sign)"},
    {"keep_largest", keep_largest, METH_VARARGS, "(x, indices, count, k, room for magnitudes)"},
    {"indices_encode", indices_encode, METH_VARARGS, "(indices, count, low_bits, low, unary)"},
    {"indices_decode", indices_decode, METH_VARARGS,
     "(low, unary, num_unary_bits, count, low_bits, n, out) -> 0, or what is wrong"},
    {NULL, NULL, 0, NULL},
};

static int fill_module(PyObject *module) { return PyModule_AddIntConstant(module, "VERSION", TSH_VERSION); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill_module},
    {0, NULL},
};

static struct PyModuleDef kernels_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "The compiled kernels of the gradient codecs.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&kernels_module); }
