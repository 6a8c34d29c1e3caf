/* SPDX-License-Identifier: Apache-2.0
 *
 * What the host does for every tensor at every step, without Python's overhead: read
 * gradients, recognize tensors, launch kernels. `__init__.py` builds and loads it and
 * says what the functions are for.
 *
 * Tensors are read through DLPack's exchange API, which is stable C: torch's own headers
 * are C++ and differ between versions.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/dlpack.h>
#include <stdint.h>
#include <string.h>

/* Describes a tensor without owning it; on failure a Python exception is set. */
static int (*describe)(void *tensor, DLTensor *description);

static PyObject *grad_name;

static PyObject *connect(PyObject *self, PyObject *capsule) {
  (void)self;
  DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL) return NULL;
  if (api->header.version.major != DLPACK_MAJOR_VERSION) {
    PyErr_Format(PyExc_ImportError, "DLPack's major version is %u, expected %u",
                 api->header.version.major, DLPACK_MAJOR_VERSION);
    return NULL;
  }
  describe = api->dltensor_from_py_object_no_sync;
  Py_RETURN_NONE;
}

static int require_sequence(PyObject *value) {
  if (PyList_Check(value) || PyTuple_Check(value)) return 1;
  PyErr_Format(PyExc_TypeError, "expected a list or a tuple, got %.100s",
               Py_TYPE(value)->tp_name);
  return 0;
}

/* -- gradients ----------------------------------------------------------------------- */

static PyObject *read_grads(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  if (nargs != 2 || !require_sequence(args[0])) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected two arguments");
    return NULL;
  }
  PyObject *params = args[0];
  int keeps_none = PyObject_IsTrue(args[1]);
  if (keeps_none < 0) return NULL;
  PyObject *grads = PyList_New(0);
  if (grads == NULL) return NULL;
  /* The length each time: an attribute may be code, and that may change the list. */
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); i++) {
    PyObject *param = PySequence_Fast_GET_ITEM(params, i);
    Py_INCREF(param);
    PyObject *grad = PyObject_GetAttr(param, grad_name);
    Py_DECREF(param);
    int failed = grad == NULL;
    if (!failed && (keeps_none || grad != Py_None)) failed = PyList_Append(grads, grad);
    Py_XDECREF(grad);
    if (failed) {
      Py_DECREF(grads);
      return NULL;
    }
  }
  return grads;
}

/* -- records ------------------------------------------------------------------------- */

/* A record has, for each tensor, these numbers and then its sizes and strides. */
enum { TYPE, DATA, DEVICE, DTYPE, DIMENSIONS, HEADER };

static void write_header(int64_t *numbers, PyObject *tensor, const DLTensor *is) {
  numbers[TYPE] = (int64_t)(intptr_t)Py_TYPE(tensor);
  numbers[DATA] = (int64_t)(intptr_t)is->data + (int64_t)is->byte_offset;
  numbers[DEVICE] = ((int64_t)is->device.device_type << 32) | (uint32_t)is->device.device_id;
  numbers[DTYPE] = ((int64_t)is->dtype.code << 32) | (is->dtype.bits << 16) | is->dtype.lanes;
  numbers[DIMENSIONS] = is->ndim;
}

static PyObject *record(PyObject *self, PyObject *tensors) {
  (void)self;
  if (!require_sequence(tensors)) return NULL;
  Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors), size = 0;
  DLTensor is;
  for (Py_ssize_t i = 0; i < count; i++) {
    if (describe(PySequence_Fast_GET_ITEM(tensors, i), &is)) return NULL;
    size += HEADER + 2 * is.ndim;
  }
  PyObject *bytes = PyBytes_FromStringAndSize(NULL, size * (Py_ssize_t)sizeof(int64_t));
  if (bytes == NULL) return NULL;
  int64_t *numbers = (int64_t *)PyBytes_AS_STRING(bytes);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *tensor = PySequence_Fast_GET_ITEM(tensors, i);
    if (describe(tensor, &is)) {
      Py_DECREF(bytes);
      return NULL;
    }
    write_header(numbers, tensor, &is);
    size_t length = (size_t)is.ndim * sizeof(int64_t);
    memcpy(numbers + HEADER, is.shape, length);
    memcpy(numbers + HEADER + is.ndim, is.strides, length);
    numbers += HEADER + 2 * is.ndim;
  }
  return bytes;
}

enum { SAME, MOVED, CHANGED };

static PyObject *compare(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  if (nargs != 2 || !require_sequence(args[0]) || !PyBytes_Check(args[1])) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected tensors and bytes");
    return NULL;
  }
  PyObject *tensors = args[0];
  const int64_t *numbers = (const int64_t *)PyBytes_AS_STRING(args[1]);
  const int64_t *end = numbers + PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(int64_t);
  int64_t header[HEADER];
  int moved = 0;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); i++) {
    PyObject *tensor = PySequence_Fast_GET_ITEM(tensors, i);
    DLTensor is;
    /* The type first: what is no tensor must not be described. */
    if (numbers == end || numbers[TYPE] != (int64_t)(intptr_t)Py_TYPE(tensor))
      return PyLong_FromLong(CHANGED);
    if (describe(tensor, &is)) {
      PyErr_Clear();
      return PyLong_FromLong(CHANGED);
    }
    write_header(header, tensor, &is);
    moved |= header[DATA] != numbers[DATA];
    header[DATA] = numbers[DATA];
    size_t length = (size_t)is.ndim * sizeof(int64_t);
    if (memcmp(header, numbers, sizeof header) ||
        memcmp(is.shape, numbers + HEADER, length) ||
        memcmp(is.strides, numbers + HEADER + is.ndim, length))
      return PyLong_FromLong(CHANGED);
    numbers += HEADER + 2 * is.ndim;
  }
  if (numbers != end) return PyLong_FromLong(CHANGED);
  return PyLong_FromLong(moved ? MOVED : SAME);
}

/* -- launches ------------------------------------------------------------------------ */

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y,
                            unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared, void *stream,
                            void **arguments, void **extra);

enum { MOST_ARGUMENTS = 48, SCRATCH = 2 };

/* Write an argument as the driver reads it; 0 with a Python exception on failure. */
static int pack(PyObject *argument, char code, char *slot) {
  if (code == 'f' || code == 'd') {
    double number = PyFloat_AsDouble(argument);
    if (number == -1.0 && PyErr_Occurred()) return 0;
    float rounded = (float)number;
    if (code == 'f')
      memcpy(slot, &rounded, sizeof rounded);
    else
      memcpy(slot, &number, sizeof number);
    return 1;
  }
  if (code == 'P' && !PyLong_Check(argument)) {
    DLTensor is;
    if (describe(argument, &is)) return 0;
    char *data = (char *)is.data + is.byte_offset;
    memcpy(slot, &data, sizeof data);
    return 1;
  }
  if (code == 'P') {
    uint64_t address = PyLong_AsUnsignedLongLong(argument);
    if (address == (uint64_t)-1 && PyErr_Occurred()) return 0;
    memcpy(slot, &address, sizeof address);
    return 1;
  }
  int64_t number = PyLong_AsLongLong(argument);
  if (number == -1 && PyErr_Occurred()) return 0;
  if (code == 'i' && (number < INT32_MIN || number > INT32_MAX)) {
    PyErr_Format(PyExc_OverflowError, "%lld does not fit in 32 bits", (long long)number);
    return 0;
  }
  memcpy(slot, &number, sizeof number); /* int32: the first half, on what GPUs run with */
  return 1;
}

static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  if (nargs != 8 || !PyBytes_Check(args[6]) || !PyTuple_Check(args[7])) {
    PyErr_SetString(PyExc_TypeError, "expected six numbers, bytes and a tuple");
    return NULL;
  }
  uint64_t numbers[6];
  for (int i = 0; i < 6; i++) {
    numbers[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (numbers[i] == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  }
  const char *codes = PyBytes_AS_STRING(args[6]);
  Py_ssize_t count = PyBytes_GET_SIZE(args[6]), used = 0;
  if (count != PyTuple_GET_SIZE(args[7]) || count > MOST_ARGUMENTS) {
    PyErr_Format(PyExc_TypeError, "%zd types for %zd arguments, at most %d", count,
                 PyTuple_GET_SIZE(args[7]), MOST_ARGUMENTS);
    return NULL;
  }
  char slots[MOST_ARGUMENTS + SCRATCH][8];
  void *pointers[MOST_ARGUMENTS + SCRATCH];
  for (Py_ssize_t i = 0; i < count; i++) {
    if (codes[i] == 'x') continue;
    if (!pack(PyTuple_GET_ITEM(args[7], i), codes[i], slots[used])) return NULL;
    pointers[used] = slots[used];
    used++;
  }
  for (int i = 0; i < SCRATCH; i++, used++) {
    memset(slots[used], 0, sizeof slots[used]);
    pointers[used] = slots[used];
  }
  int status;
  Py_BEGIN_ALLOW_THREADS
  status = ((LaunchKernel)(intptr_t)numbers[0])(
      (void *)(intptr_t)numbers[1], (unsigned)numbers[2], 1, 1, (unsigned)numbers[3], 1,
      1, (unsigned)numbers[4], (void *)(intptr_t)numbers[5], pointers, NULL);
  Py_END_ALLOW_THREADS
  return PyLong_FromLong(status);
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_O, NULL},
    {"read_grads", (PyCFunction)(void (*)(void))read_grads, METH_FASTCALL, NULL},
    {"record", record, METH_O, NULL},
    {"compare", (PyCFunction)(void (*)(void))compare, METH_FASTCALL, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lossscale_host", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_lossscale_host(void) {
  grad_name = PyUnicode_InternFromString("grad");
  return grad_name == NULL ? NULL : PyModule_Create(&definition);
}
