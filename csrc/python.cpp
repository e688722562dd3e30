// The Python face of the ops: the dispatcher's ops, called without the cost of torch.ops. That one copies every tensor of a
// list twice, with a reference count each; here they are borrowed from a tuple that is held until the call is over.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

using Optional = std::optional<at::Tensor>;
using Traits = c10::MaybeOwnedTraits<at::Tensor>;

// As Python's type(x).__name__; what C calls the name has the module before it where the type was written in C.
const char* type_of(PyObject* object) {
  const char* name = Py_TYPE(object)->tp_name;
  const char* dot = std::strrchr(name, '.');
  return dot == nullptr ? name : dot + 1;
}

const at::Tensor& tensor_of(const char* name, PyObject* object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), name, " must be a tensor, not ", type_of(object), ".");
  return THPVariable_Unpack(object);
}

Optional optional_of(const char* name, PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return tensor_of(name, object);
}

double double_of(PyObject* object) {
  const double value = PyFloat_AsDouble(object);
  if (value == -1.0 && PyErr_Occurred()) throw python_error();
  return value;
}

std::optional<double> optional_double_of(PyObject* object) {
  if (object == Py_None) return std::nullopt;
  return double_of(object);
}

std::int64_t integer_of(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw python_error();
  return value;
}

bool bool_of(PyObject* object) {
  const int value = PyObject_IsTrue(object);
  if (value < 0) throw python_error();
  return value != 0;
}

// Numbers of any sequence. Converting one may run code of Python, which may change a list: a tuple stays as it is.
template <typename T>
std::vector<T> numbers_of(PyObject* sequence, T (*convert)(PyObject*)) {
  const THPObjectPtr held(PySequence_Tuple(sequence));
  if (held.get() == nullptr) throw python_error();
  std::vector<T> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held.get()); ++i) numbers.push_back(convert(PyTuple_GET_ITEM(held.get(), i)));
  return numbers;
}

class Borrowed {
 public:
  Borrowed(const char* name, PyObject* sequence) : held_(PySequence_Tuple(sequence)) {
    if (held_ == nullptr) throw python_error();
    const Py_ssize_t size = PyTuple_GET_SIZE(held_);
    tensors_.reserve(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyTuple_GET_ITEM(held_, i);
      if (!THPVariable_Check(item)) {
        // before the tuple goes: it may be all that holds the item, and the item all that holds its type
        const std::string type = type_of(item);
        release();
        TORCH_CHECK_TYPE(false, name, "[", i, "] must be a tensor, not ", type, ".");
      }
      tensors_.push_back(Traits::createBorrow(THPVariable_Unpack(item)));
    }
  }
  ~Borrowed() { release(); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  at::TensorList list() const { return tensors_; }

 private:
  void release() {
    for (at::Tensor& tensor : tensors_) Traits::destroyBorrow(tensor);
    tensors_.clear();
    Py_CLEAR(held_);
  }

  PyObject* held_;
  std::vector<at::Tensor> tensors_;
};

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Ops are not differentiable, and say so by not being asked; other threads of Python run meanwhile. Kernels count versions
// themselves, which the reference does not: it is not called through here.
struct Call {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  pybind11::gil_scoped_release no_gil;
};

void expect(Py_ssize_t given, Py_ssize_t wanted) {
  TORCH_CHECK_TYPE(given == wanted, "takes ", wanted, " positional arguments, ", given, " were given.");
}

PyObject* pair_of(std::tuple<at::Tensor, at::Tensor>&& result) {
  PyObject* first = THPVariable_Wrap(std::move(std::get<0>(result)));
  PyObject* second = THPVariable_Wrap(std::move(std::get<1>(result)));
  return Py_BuildValue("(NN)", first, second);
}

PyObject* multi_tensor_scale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op =
      find<void(at::TensorList, at::TensorList, const Optional&, const Optional&)>("amp_wrapper::multi_tensor_scale");
  expect(count, 4);
  const Borrowed sources("sources", args[0]);
  const Borrowed targets("targets", args[1]);
  const Optional scale = optional_of("scale", args[2]);
  const Optional found_inf = optional_of("found_inf", args[3]);
  {
    const Call call;
    op.call(sources.list(), targets.list(), scale, found_inf);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_axpby(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op =
      find<void(at::TensorList, at::TensorList, at::TensorList, const Optional&, const Optional&, const Optional&, bool, bool)>(
          "amp_wrapper::multi_tensor_axpby");
  expect(count, 8);
  const Borrowed xs("xs", args[0]);
  const Borrowed ys("ys", args[1]);
  const Borrowed targets("targets", args[2]);
  const Optional a = optional_of("a", args[3]);
  const Optional b = optional_of("b", args[4]);
  const Optional found_inf = optional_of("found_inf", args[5]);
  const bool check_x = bool_of(args[6]);
  const bool check_y = bool_of(args[7]);
  {
    const Call call;
    op.call(xs.list(), ys.list(), targets.list(), a, b, found_inf, check_x, check_y);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_copy(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<void(at::TensorList, at::TensorList)>("amp_wrapper::multi_tensor_copy");
  expect(count, 2);
  const Borrowed sources("sources", args[0]);
  const Borrowed targets("targets", args[1]);
  {
    const Call call;
    op.call(sources.list(), targets.list());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_isnonfinite(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<void(at::TensorList, const at::Tensor&)>("amp_wrapper::multi_tensor_isnonfinite");
  expect(count, 2);
  const Borrowed tensors("tensors", args[0]);
  const at::Tensor found_inf = tensor_of("found_inf", args[1]);
  {
    const Call call;
    op.call(tensors.list(), found_inf);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

using Norm = std::tuple<at::Tensor, at::Tensor>(at::TensorList, const Optional&, const Optional&, bool);

PyObject* norm(const c10::TypedOperatorHandle<Norm>& op, PyObject* const* args, Py_ssize_t count) {
  expect(count, 4);
  const Borrowed tensors("tensors", args[0]);
  const Optional inverse_scale = optional_of("inverse_scale", args[1]);
  const Optional found_inf = optional_of("found_inf", args[2]);
  const bool per_tensor = bool_of(args[3]);
  std::tuple<at::Tensor, at::Tensor> result;
  {
    const Call call;
    result = op.call(tensors.list(), inverse_scale, found_inf, per_tensor);
  }
  return pair_of(std::move(result));
}

PyObject* multi_tensor_l2norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<Norm>("amp_wrapper::multi_tensor_l2norm");
  return norm(op, args, count);
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_maxnorm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<Norm>("amp_wrapper::multi_tensor_maxnorm");
  return norm(op, args, count);
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_scale_l2norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<at::Tensor(at::TensorList, at::TensorList, const Optional&, const Optional&)>(
      "amp_wrapper::multi_tensor_scale_l2norm");
  expect(count, 4);
  const Borrowed sources("sources", args[0]);
  const Borrowed targets("targets", args[1]);
  const Optional scale = optional_of("scale", args[2]);
  const Optional found_inf = optional_of("found_inf", args[3]);
  at::Tensor result;
  {
    const Call call;
    result = op.call(sources.list(), targets.list(), scale, found_inf);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

PyObject* multi_tensor_refresh(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<at::Tensor(at::TensorList, at::TensorList)>("amp_wrapper::multi_tensor_refresh");
  expect(count, 2);
  const Borrowed weights("weights", args[0]);
  const Borrowed masters("masters", args[1]);
  at::Tensor result;
  {
    const Call call;
    result = op.call(weights.list(), masters.list());
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

PyObject* update_scale(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op =
      find<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, double, std::int64_t,
                std::int64_t, std::optional<double>, std::optional<double>)>("amp_wrapper::update_scale");
  expect(count, 10);
  const at::Tensor& scale = tensor_of("scale", args[0]);
  const at::Tensor& growth_tracker = tensor_of("growth_tracker", args[1]);
  const at::Tensor& hysteresis_tracker = tensor_of("hysteresis_tracker", args[2]);
  const at::Tensor& found_inf = tensor_of("found_inf", args[3]);
  // the caller holds the arguments, and nobody waits for work of this size
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.call(scale, growth_tracker, hysteresis_tracker, found_inf, double_of(args[4]), double_of(args[5]), integer_of(args[6]),
          integer_of(args[7]), optional_double_of(args[8]), optional_double_of(args[9]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* step_prologue(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<void(
      const at::Tensor&, const at::Tensor&, at::TensorList, const at::Tensor&, const at::Tensor&, std::int64_t, at::TensorList,
      at::IntArrayRef, const Optional&, const Optional&, const Optional&, const Optional&, const Optional&, const Optional&,
      const Optional&, at::ArrayRef<double>, std::optional<double>, std::optional<double>)>("amp_wrapper::step_prologue");
  expect(count, 18);
  const at::Tensor decision = tensor_of("decision", args[0]);
  const at::Tensor rows = tensor_of("rows", args[1]);
  const Borrowed steps("steps", args[2]);
  const at::Tensor hyper = tensor_of("hyper", args[3]);
  const at::Tensor groups = tensor_of("groups", args[4]);
  const std::int64_t kind = integer_of(args[5]);
  const Borrowed rates("rates", args[6]);
  const auto rated = numbers_of<std::int64_t>(args[7], integer_of);
  const Optional found_inf = optional_of("found_inf", args[8]);
  const Optional learned = optional_of("learned", args[9]);
  const Optional norm = optional_of("norm", args[10]);
  const Optional scale = optional_of("scale", args[11]);
  const Optional growth_tracker = optional_of("growth_tracker", args[12]);
  const Optional hysteresis_tracker = optional_of("hysteresis_tracker", args[13]);
  const Optional counts = optional_of("counts", args[14]);
  const auto rule = numbers_of<double>(args[15], double_of);
  const std::optional<double> max_norm = optional_double_of(args[16]);
  const std::optional<double> clip_value = optional_double_of(args[17]);
  {
    const Call call;
    op.call(decision, rows, steps.list(), hyper, groups, kind, rates.list(), rated, found_inf, learned, norm, scale,
            growth_tracker, hysteresis_tracker, counts, rule, max_norm, clip_value);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* fused_adam(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op = find<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                                   at::TensorList, const at::Tensor&, const at::Tensor&)>("amp_wrapper::fused_adam");
  expect(count, 8);
  const Borrowed grads("grads", args[0]);
  const Borrowed params("params", args[1]);
  const Borrowed exp_avgs("exp_avgs", args[2]);
  const Borrowed exp_avg_sqs("exp_avg_sqs", args[3]);
  const Borrowed max_exp_avg_sqs("max_exp_avg_sqs", args[4]);
  const Borrowed partners("partners", args[5]);
  const at::Tensor rows = tensor_of("rows", args[6]);
  const at::Tensor decision = tensor_of("decision", args[7]);
  {
    const Call call;
    op.call(grads.list(), params.list(), exp_avgs.list(), exp_avg_sqs.list(), max_exp_avg_sqs.list(), partners.list(), rows,
            decision);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* fused_sgd(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const auto op =
      find<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, const at::Tensor&, const at::Tensor&)>(
          "amp_wrapper::fused_sgd");
  expect(count, 6);
  const Borrowed grads("grads", args[0]);
  const Borrowed params("params", args[1]);
  const Borrowed momentum_buffers("momentum_buffers", args[2]);
  const Borrowed partners("partners", args[3]);
  const at::Tensor rows = tensor_of("rows", args[4]);
  const at::Tensor decision = tensor_of("decision", args[5]);
  {
    const Call call;
    op.call(grads.list(), params.list(), momentum_buffers.list(), partners.list(), rows, decision);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"multi_tensor_scale", fast<multi_tensor_scale>(), METH_FASTCALL, nullptr},
    {"multi_tensor_axpby", fast<multi_tensor_axpby>(), METH_FASTCALL, nullptr},
    {"multi_tensor_copy", fast<multi_tensor_copy>(), METH_FASTCALL, nullptr},
    {"multi_tensor_isnonfinite", fast<multi_tensor_isnonfinite>(), METH_FASTCALL, nullptr},
    {"multi_tensor_l2norm", fast<multi_tensor_l2norm>(), METH_FASTCALL, nullptr},
    {"multi_tensor_maxnorm", fast<multi_tensor_maxnorm>(), METH_FASTCALL, nullptr},
    {"multi_tensor_scale_l2norm", fast<multi_tensor_scale_l2norm>(), METH_FASTCALL, nullptr},
    {"multi_tensor_refresh", fast<multi_tensor_refresh>(), METH_FASTCALL, nullptr},
    {"update_scale", fast<update_scale>(), METH_FASTCALL, nullptr},
    {"step_prologue", fast<step_prologue>(), METH_FASTCALL, nullptr},
    {"fused_adam", fast<fused_adam>(), METH_FASTCALL, nullptr},
    {"fused_sgd", fast<fused_sgd>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
