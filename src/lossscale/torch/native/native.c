/* SPDX-License-Identifier: Apache-2.0
 *
 * What is done for every tensor at every step, without Python's overhead: read
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

static PyObject *grad_name, *is_neg_name;

/* torch's attribute `grad`, and the types whose `grad` it is, unless other code has given
 * them another one. */
static PyGetSetDescrObject *grad_descriptor;
static PyObject *plain_types;

static PyObject *connect(PyObject *self, PyObject *args) {
  (void)self;
  PyObject *capsule, *descriptor, *types;
  if (!PyArg_ParseTuple(args, "OO!O!", &capsule, &PyGetSetDescr_Type, &descriptor,
                        &PyTuple_Type, &types))
    return NULL;
  DLPackExchangeAPI *api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL) return NULL;
  if (api->header.version.major != DLPACK_MAJOR_VERSION) {
    PyErr_Format(PyExc_ImportError, "DLPack's major version is %u, expected %u",
                 api->header.version.major, DLPACK_MAJOR_VERSION);
    return NULL;
  }
  describe = api->dltensor_from_py_object_no_sync;
  grad_descriptor = (PyGetSetDescrObject *)Py_NewRef(descriptor);
  plain_types = Py_NewRef(types);
  Py_RETURN_NONE;
}

/* Whether `grad` of the plain types is torch's still; -1 with a Python exception. */
static int has_torchs_grad(void) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(plain_types); i++) {
    PyObject *found = PyObject_GetAttr(PyTuple_GET_ITEM(plain_types, i), grad_name);
    if (found == NULL) return -1;
    Py_DECREF(found);
    if (found != (PyObject *)grad_descriptor) return 0;
  }
  return 1;
}

/* Return `param.grad`, a new reference; for plain types without looking `grad` up. */
static PyObject *read_grad(PyObject *param, int is_torchs) {
  for (Py_ssize_t i = 0; is_torchs && i < PyTuple_GET_SIZE(plain_types); i++)
    if ((PyObject *)Py_TYPE(param) == PyTuple_GET_ITEM(plain_types, i))
      return grad_descriptor->d_getset->get(param, grad_descriptor->d_getset->closure);
  return PyObject_GetAttr(param, grad_name);
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
  int keeps_none = PyObject_IsTrue(args[1]), is_torchs = has_torchs_grad();
  if (keeps_none < 0 || is_torchs < 0) return NULL;
  PyObject *grads = PyList_New(0);
  if (grads == NULL) return NULL;
  /* The length is read each time: `grad` of a subclass may be Python code, which may
   * change the list. */
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(params); i++) {
    PyObject *param = PySequence_Fast_GET_ITEM(params, i);
    Py_INCREF(param);
    PyObject *grad = read_grad(param, is_torchs);
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

/* A record has, for each tensor, these numbers and then its sizes and strides. For `None`
 * all of them but the type are 0. */
enum { TYPE, DATA, DEVICE, DTYPE, DIMENSIONS, HEADER };

/* Describe a tensor or `None`; 0 with a Python exception on failure. */
static int read_header(PyObject *tensor, DLTensor *is, int64_t *numbers) {
  memset(numbers, 0, HEADER * sizeof *numbers);
  numbers[TYPE] = (int64_t)(intptr_t)Py_TYPE(tensor);
  is->ndim = 0;
  if (tensor == Py_None) return 1;
  if (describe(tensor, is)) return 0;
  numbers[DATA] = (int64_t)(intptr_t)is->data + (int64_t)is->byte_offset;
  numbers[DEVICE] = ((int64_t)is->device.device_type << 32) | (uint32_t)is->device.device_id;
  numbers[DTYPE] = ((int64_t)is->dtype.code << 32) | (is->dtype.bits << 16) | is->dtype.lanes;
  numbers[DIMENSIONS] = is->ndim;
  return 1;
}

/* Append the part of one tensor to a record; 0 with a Python exception on failure. */
static int append(PyObject *parts, PyObject *tensor) {
  int64_t header[HEADER];
  DLTensor is;
  if (!read_header(tensor, &is, header)) return 0;
  size_t length = (size_t)is.ndim * sizeof(int64_t);
  PyObject *part = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(sizeof header + 2 * length));
  if (part == NULL) return 0;
  char *bytes = PyBytes_AS_STRING(part);
  memcpy(bytes, header, sizeof header);
  if (length) {
    memcpy(bytes + sizeof header, is.shape, length);
    memcpy(bytes + sizeof header + length, is.strides, length);
  }
  int failed = PyList_Append(parts, part);
  Py_DECREF(part);
  return !failed;
}

static PyObject *record(PyObject *self, PyObject *tensors) {
  (void)self;
  if (!require_sequence(tensors)) return NULL;
  PyObject *empty = PyBytes_FromStringAndSize(NULL, 0), *parts = PyList_New(0);
  PyObject *joined = NULL;
  int is_complete = empty != NULL && parts != NULL;
  for (Py_ssize_t i = 0; is_complete && i < PySequence_Fast_GET_SIZE(tensors); i++) {
    PyObject *tensor = Py_NewRef(PySequence_Fast_GET_ITEM(tensors, i));
    is_complete = append(parts, tensor);
    Py_DECREF(tensor);
  }
  if (is_complete) joined = PyObject_CallMethod(empty, "join", "O", parts);
  Py_XDECREF(parts);
  Py_XDECREF(empty);
  return joined;
}

enum { SAME, MOVED, CHANGED };

/* Compare a tensor with its part of a record, and go on to the next part. */
static int compare_one(PyObject *tensor, const int64_t **next, const int64_t *end) {
  const int64_t *numbers = *next;
  int64_t header[HEADER];
  DLTensor is;
  /* The type first: what is no tensor must not be described. */
  if (numbers == end || numbers[TYPE] != (int64_t)(intptr_t)Py_TYPE(tensor)) return CHANGED;
  if (!read_header(tensor, &is, header)) {
    PyErr_Clear();
    return CHANGED;
  }
  int moved = header[DATA] != numbers[DATA];
  header[DATA] = numbers[DATA];
  size_t length = (size_t)is.ndim * sizeof(int64_t);
  if (memcmp(header, numbers, sizeof header)) return CHANGED;
  if (length && (memcmp(is.shape, numbers + HEADER, length) ||
                 memcmp(is.strides, numbers + HEADER + is.ndim, length)))
    return CHANGED;
  *next = numbers + HEADER + 2 * is.ndim;
  /* DLPack does not say whether elements are negated when they are read. Autograd makes
   * such a gradient of one element: the imaginary part of a conjugated number. */
  int64_t elements = tensor == Py_None ? 0 : 1;
  for (int i = 0; i < is.ndim; i++) elements *= is.shape[i];
  if (elements != 1) return moved ? MOVED : SAME;
  PyObject *is_neg = PyObject_CallMethodNoArgs(tensor, is_neg_name);
  if (is_neg == NULL) PyErr_Clear();
  Py_XDECREF(is_neg);
  if (is_neg != Py_False) return CHANGED;
  return moved ? MOVED : SAME;
}

/* Compare tensors, or the gradients of parameters, with a record. */
static PyObject *compare_all(PyObject *const *args, Py_ssize_t nargs, int of_grads) {
  if (nargs != 2 || !require_sequence(args[0]) || !PyBytes_Check(args[1])) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "expected tensors and bytes");
    return NULL;
  }
  PyObject *tensors = args[0];
  const int64_t *next = (const int64_t *)PyBytes_AS_STRING(args[1]);
  const int64_t *end = next + PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(int64_t);
  int result = SAME, is_torchs = has_torchs_grad();
  if (is_torchs < 0) return NULL;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors) && result != CHANGED; i++) {
    PyObject *tensor = PySequence_Fast_GET_ITEM(tensors, i);
    Py_INCREF(tensor);
    if (of_grads) {
      PyObject *grad = read_grad(tensor, is_torchs);
      Py_DECREF(tensor);
      if (grad == NULL) return NULL;
      tensor = grad;
    }
    int change = compare_one(tensor, &next, end);
    Py_DECREF(tensor);
    if (change > result) result = change;
  }
  if (result != CHANGED && next != end) result = CHANGED;
  return PyLong_FromLong(result);
}

static PyObject *compare(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  return compare_all(args, nargs, 0);
}

static PyObject *compare_grads(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
  (void)self;
  return compare_all(args, nargs, 1);
}

/* -- launches ------------------------------------------------------------------------ */

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y,
                            unsigned grid_z, unsigned block_x, unsigned block_y,
                            unsigned block_z, unsigned shared, void *stream,
                            void **arguments, void **extra);

/* After its own arguments a kernel has up to two pointers to memory that Triton allocates;
 * the kernels here need none. */
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
  memcpy(slot, &number, sizeof number); /* hosts of GPUs put the low 32 bits first */
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
    {"connect", connect, METH_VARARGS, NULL},
    {"read_grads", (PyCFunction)(void (*)(void))read_grads, METH_FASTCALL, NULL},
    {"record", record, METH_O, NULL},
    {"compare", (PyCFunction)(void (*)(void))compare, METH_FASTCALL, NULL},
    {"compare_grads", (PyCFunction)(void (*)(void))compare_grads, METH_FASTCALL, NULL},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "lossscale_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_lossscale_native(void) {
  grad_name = PyUnicode_InternFromString("grad");
  is_neg_name = PyUnicode_InternFromString("is_neg");
  if (grad_name == NULL || is_neg_name == NULL) return NULL;
  return PyModule_Create(&definition);
}
