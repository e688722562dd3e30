// The Python face of the ops: the dispatcher's ops, called without the cost of torch.ops. That one copies every tensor of a
// list twice, with a reference count each; here they are borrowed from a tuple that is held until the call is over.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/library.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

// The types of arguments, as the kernels have them.
using Tensor = const at::Tensor&;
using Tensors = at::TensorList;
using Optional = const std::optional<at::Tensor>&;
using Number = std::optional<double>;
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

template <typename T>
T number_of(PyObject* object) {
  T value;
  if constexpr (std::is_same_v<T, bool>) {
    const int truth = PyObject_IsTrue(object);
    value = truth != 0;
    if (truth >= 0) return value;
  } else if constexpr (std::is_same_v<T, double>) {
    value = PyFloat_AsDouble(object);
  } else {
    value = PyLong_AsLongLong(object);
  }
  if (PyErr_Occurred()) throw python_error();
  return value;
}

// Numbers of any sequence. Converting one may run code of Python, which may change a list: a tuple stays as it is.
template <typename T>
std::vector<T> numbers_of(PyObject* sequence) {
  const THPObjectPtr held(PySequence_Tuple(sequence));
  if (held.get() == nullptr) throw python_error();
  std::vector<T> numbers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(held.get()); ++i) {
    numbers.push_back(number_of<T>(PyTuple_GET_ITEM(held.get(), i)));
  }
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

  operator at::TensorList() const { return tensors_; }

 private:
  void release() {
    for (at::Tensor& tensor : tensors_) Traits::destroyBorrow(tensor);
    tensors_.clear();
    Py_CLEAR(held_);
  }

  PyObject* held_;
  std::vector<at::Tensor> tensors_;
};

// An argument of Python as what can be handed to an op that takes a T.
template <typename T>
auto converted(const char* name, PyObject* object) {
  if constexpr (std::is_same_v<T, Tensors>) {
    return Borrowed(name, object);
  } else if constexpr (std::is_same_v<T, Tensor>) {
    return at::Tensor(tensor_of(name, object));
  } else if constexpr (std::is_same_v<T, Optional>) {
    return object == Py_None ? std::nullopt : std::optional<at::Tensor>(tensor_of(name, object));
  } else if constexpr (std::is_same_v<T, Number>) {
    return object == Py_None ? std::nullopt : Number(number_of<double>(object));
  } else if constexpr (std::is_same_v<T, at::IntArrayRef>) {
    return numbers_of<std::int64_t>(object);
  } else if constexpr (std::is_same_v<T, at::ArrayRef<double>>) {
    return numbers_of<double>(object);
  } else {
    return number_of<T>(object);
  }
}

// All arguments of a call, converted one after the other: bases are made in their order.
template <std::size_t, typename T>
struct Held {
  Held(const char* name, PyObject* object) : value(converted<T>(name, object)) {}
  decltype(converted<T>(nullptr, nullptr)) value;
};

template <typename Indices, typename... A>
struct AllHeld;

template <std::size_t... I, typename... A>
struct AllHeld<std::index_sequence<I...>, A...> : Held<I, A>... {
  AllHeld(const std::vector<std::string>& names, PyObject* const* objects) : Held<I, A>(names[I].c_str(), objects[I])... {}
};

// The device of a call is that of its first tensor.
template <typename T>
std::optional<c10::Device> device_of(const T& first) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return first.device();
  } else {
    const at::TensorList tensors = first;
    return tensors.empty() ? std::nullopt : std::optional(tensors[0].device());
  }
}

PyObject* wrapped(at::Tensor&& result) { return THPVariable_Wrap(std::move(result)); }
PyObject* wrapped(std::tuple<at::Tensor, at::Tensor>&& result) {
  PyObject* first = wrapped(std::move(std::get<0>(result)));
  PyObject* second = wrapped(std::move(std::get<1>(result)));
  return Py_BuildValue("(NN)", first, second);
}

// What of an op does not depend on its signature: names and defaults of its arguments, and which devices have a kernel.
class Face {
 public:
  Face(const char* name, std::size_t required)
      : handle(c10::Dispatcher::singleton().findSchemaOrThrow((std::string("amp_wrapper::") + name).c_str(), "")),
        name_(name),
        cpu_(handle.hasKernelForDispatchKey(c10::DispatchKey::CPU)),
        cuda_(handle.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    for (const c10::Argument& argument : handle.schema().arguments()) {
      const bool is_flag = argument.type()->kind() == c10::TypeKind::BoolType;
      const bool is_list = argument.type()->kind() == c10::TypeKind::ListType;
      PyObject* missing = is_list ? PyTuple_New(0) : Py_None;
      if (is_flag) missing = argument.default_value()->toBool() ? Py_True : Py_False;
      defaults_.push_back(names.size() < required ? nullptr : missing);
      names.push_back(argument.name());
    }
  }

  // Where the arguments stand in the order of the schema; what was left out has its default.
  void arrange(PyObject* const* args, Py_ssize_t positional, PyObject* keywords, PyObject** objects) const {
    const std::size_t given = static_cast<std::size_t>(positional);
    TORCH_CHECK_TYPE(given <= names.size(), name_, "() takes ", names.size(), " positional arguments, ", given, " were given.");
    std::copy(args, args + given, objects);
    std::fill(objects + given, objects + names.size(), nullptr);
    for (Py_ssize_t i = 0; keywords != nullptr && i < PyTuple_GET_SIZE(keywords); ++i) {
      const char* keyword = PyUnicode_AsUTF8(PyTuple_GET_ITEM(keywords, i));
      const std::size_t at = std::find(names.begin(), names.end(), keyword) - names.begin();
      TORCH_CHECK_TYPE(at < names.size(), name_, "() got an unexpected keyword argument '", keyword, "'");
      TORCH_CHECK_TYPE(objects[at] == nullptr, name_, "() got multiple values for argument '", keyword, "'");
      objects[at] = args[given + i];
    }
    for (std::size_t i = given; i < names.size(); ++i) {
      if (objects[i] == nullptr) objects[i] = defaults_[i];
      TORCH_CHECK_TYPE(objects[i] != nullptr, name_, "() missing a required argument: '", names[i], "'");
    }
  }

  // Without a kernel the dispatcher would call the reference, which has to count versions.
  void expect_kernel(std::optional<c10::Device> device) const {
    const bool serves = device.has_value() && ((device->is_cpu() && cpu_) || (device->is_cuda() && cuda_));
    TORCH_CHECK_NOT_IMPLEMENTED(serves, name_, " has no compiled kernel for this call.");
  }

  const c10::OperatorHandle handle;
  std::vector<std::string> names;

 private:
  const char* name_;
  bool cpu_;
  bool cuda_;
  // never freed; null for what has to be given
  std::vector<PyObject*> defaults_;
};

template <typename Signature>
class Op;

template <typename R, typename... A>
class Op<R(A...)> : Face {
 public:
  Op(const char* name, std::size_t required) : Face(name, required), typed_(handle.typed<R(A...)>()) {}

  PyObject* operator()(PyObject* const* args, Py_ssize_t count, PyObject* keywords) const {
    std::array<PyObject*, sizeof...(A)> objects;
    arrange(args, count, keywords, objects.data());
    return call(std::index_sequence_for<A...>(), objects.data());
  }

 private:
  template <std::size_t... I>
  PyObject* call(std::index_sequence<I...> indices, PyObject* const* objects) const {
    const AllHeld<decltype(indices), A...> all(names, objects);
    expect_kernel(device_of(static_cast<const Held<0, std::tuple_element_t<0, std::tuple<A...>>>&>(all).value));
    const auto run = [&] {
      // ops are not differentiable, and say so by not being asked. Kernels count versions themselves, which the reference does
      // not: it is not called through here
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      // other threads of Python run meanwhile; nobody waits for work on a few numbers
      constexpr bool kHasLists = (std::is_same_v<A, Tensors> || ...);
      [[maybe_unused]] const std::conditional_t<kHasLists, pybind11::gil_scoped_release, int> no_gil{};
      return typed_.call(static_cast<const Held<I, A>&>(all).value...);
    };
    if constexpr (std::is_void_v<R>) {
      run();
      Py_RETURN_NONE;
    } else {
      return wrapped(run());
    }
  }

  c10::TypedOperatorHandle<R(A...)> typed_;
};

// `required`: how many arguments have to be given, the first ones.
#define AMP_OP(name, required, ...)                                                        \
  PyObject* name(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject* keywords) { \
    HANDLE_TH_ERRORS                                                                       \
    static const Op<__VA_ARGS__> op(#name, required);                                      \
    return op(args, count, keywords);                                                      \
    END_HANDLE_TH_ERRORS                                                                   \
  }

AMP_OP(multi_tensor_scale, 2, void(Tensors, Tensors, Optional, Optional))
AMP_OP(multi_tensor_axpby, 3, void(Tensors, Tensors, Tensors, Optional, Optional, Optional, bool, bool))
AMP_OP(multi_tensor_copy, 2, void(Tensors, Tensors))
AMP_OP(multi_tensor_isnonfinite, 2, void(Tensors, Tensor))
AMP_OP(multi_tensor_exponents, 3, void(Tensors, Tensor, Tensor))
AMP_OP(multi_tensor_l2norm, 1, std::tuple<at::Tensor, at::Tensor>(Tensors, Optional, Optional, bool))
AMP_OP(multi_tensor_maxnorm, 1, std::tuple<at::Tensor, at::Tensor>(Tensors, Optional, Optional, bool))
AMP_OP(multi_tensor_scale_l2norm, 2, at::Tensor(Tensors, Tensors, Optional, Optional))
AMP_OP(multi_tensor_refresh, 2, at::Tensor(Tensors, Tensors))
AMP_OP(update_scale, 8, void(Tensor, Tensor, Tensor, Tensor, double, double, std::int64_t, std::int64_t, Number, Number))
AMP_OP(step_prologue, 6,
       void(Tensor, Tensor, Tensors, Tensor, Tensor, std::int64_t, Tensors, at::IntArrayRef, Optional, Optional, Optional,
            Optional, Optional, Optional, Optional, at::ArrayRef<double>, Number, Number))
AMP_OP(fused_adam, 8, void(Tensors, Tensors, Tensors, Tensors, Tensors, Tensors, Tensor, Tensor))
AMP_OP(fused_sgd, 6, void(Tensors, Tensors, Tensors, Tensors, Tensor, Tensor))

// -- amp_wrapper/ops/attributes.py, where these are described

class Items {
 public:
  explicit Items(PyObject* sequence) : held_(PySequence_Fast(sequence, "a sequence is expected.")) {
    if (held_.get() == nullptr) throw python_error();
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(held_.get()); }
  PyObject** data() const { return PySequence_Fast_ITEMS(held_.get()); }

 private:
  THPObjectPtr held_;
};

PyObject* same(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "same() takes 2 positional arguments, ", count, " were given.");
  const Items one(args[0]);
  const Items other(args[1]);
  return PyBool_FromLong(one.size() == other.size() && std::equal(one.data(), one.data() + one.size(), other.data()));
  END_HANDLE_TH_ERRORS
}

PyObject* holds(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "holds() takes 3 positional arguments, ", count, " were given.");
  const Items states(args[0]);
  const Items values(args[2]);
  bool holds = states.size() == values.size();
  for (Py_ssize_t i = 0; holds && i < states.size(); ++i) {
    TORCH_CHECK_TYPE(PyDict_Check(states.data()[i]), "states[", i, "] must be a dict, not ", type_of(states.data()[i]), ".");
    holds = PyDict_GetItemWithError(states.data()[i], args[1]) == values.data()[i];
    if (PyErr_Occurred()) throw python_error();
  }
  return PyBool_FromLong(holds);
  END_HANDLE_TH_ERRORS
}

PyObject* fingerprint(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 1, "fingerprint() takes 1 positional argument, ", count, " were given.");
  const Items tensors(args[0]);
  std::vector<std::int64_t> numbers;
  numbers.reserve(4 * tensors.size());
  for (Py_ssize_t i = 0; i < tensors.size(); ++i) {
    if (tensors.data()[i] == Py_None) {
      numbers.push_back(-1);
      continue;
    }
    const at::Tensor& tensor = tensor_of("a tensor or None", tensors.data()[i]);
    const bool is_plain = !tensor.unsafeGetTensorImpl()->is_python_dispatch() && !tensor.is_nested();
    TORCH_CHECK_NOT_IMPLEMENTED(is_plain, "The shape of this tensor is told in Python.");
    const c10::Device device = tensor.device();
    // one byte each
    numbers.push_back(static_cast<std::int64_t>(tensor.scalar_type()) | static_cast<std::int64_t>(tensor.layout()) << 8 |
                      static_cast<std::int64_t>(device.type()) << 16 | static_cast<std::int64_t>(device.index() & 0xff) << 24 |
                      tensor.dim() << 32);
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()),
                                   static_cast<Py_ssize_t>(numbers.size() * sizeof(std::int64_t)));
  END_HANDLE_TH_ERRORS
}

// Subclasses of tensors may have attributes of their own, which Python finds.
bool is_plain(PyObject* item) { return THPVariable_CheckExact(item); }

THPObjectPtr attribute(PyObject* item, const char* name) {
  THPObjectPtr value(PyObject_GetAttrString(item, name));
  if (value.get() == nullptr) throw python_error();
  return value;
}

// Eight bytes for each item of a sequence, -1 for None.
template <typename F>
PyObject* number_of_each(PyObject* sequence, F number) {
  const Items items(sequence);
  std::vector<std::int64_t> numbers;
  numbers.reserve(items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    numbers.push_back(items.data()[i] == Py_None ? -1 : number(items.data()[i]));
  }
  return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(numbers.data()),
                                   static_cast<Py_ssize_t>(numbers.size() * sizeof(std::int64_t)));
}

// A list with a new reference to what is made of each item of a sequence.
template <typename F>
PyObject* object_of_each(PyObject* sequence, F made) {
  const Items items(sequence);
  THPObjectPtr list(PyList_New(items.size()));
  if (list.get() == nullptr) throw python_error();
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    PyObject* object = made(items.data()[i]);
    if (object == nullptr) throw python_error();
    PyList_SET_ITEM(list.get(), i, object);
  }
  return list.release();
}

#define AMP_WALK(name, arguments)                                                                                        \
  PyObject* name##_of(PyObject* const* args);                                                                            \
  PyObject* name(PyObject*, PyObject* const* args, Py_ssize_t count, PyObject*) {                                        \
    HANDLE_TH_ERRORS                                                                                                     \
    TORCH_CHECK_TYPE(count == arguments, #name "() takes " #arguments " positional arguments, ", count, " were given."); \
    return name##_of(args);                                                                                              \
    END_HANDLE_TH_ERRORS                                                                                                 \
  }                                                                                                                      \
  PyObject* name##_of(PyObject* const* args)

AMP_WALK(versions, 1) {
  return number_of_each(args[0], [](PyObject* item) {
    if (is_plain(item)) return static_cast<std::int64_t>(THPVariable_Unpack(item)._version());
    return number_of<std::int64_t>(attribute(item, "_version").get());
  });
}

AMP_WALK(addresses, 1) {
  return number_of_each(args[0], [](PyObject* item) {
    if (is_plain(item)) return reinterpret_cast<std::int64_t>(THPVariable_Unpack(item).data_ptr());
    THPObjectPtr address(PyObject_CallMethod(item, "data_ptr", nullptr));
    if (address.get() == nullptr) throw python_error();
    return number_of<std::int64_t>(address.get());
  });
}

AMP_WALK(gradients, 1) {
  return object_of_each(args[0], [](PyObject* item) {
    // an undefined tensor becomes None
    return is_plain(item) ? THPVariable_Wrap(THPVariable_Unpack(item).grad()) : attribute(item, "grad").release();
  });
}

AMP_WALK(set_gradients, 2) {
  const Items parameters(args[0]);
  const bool clears = args[1] == Py_None;
  const Items found(clears ? args[0] : args[1]);
  TORCH_CHECK_VALUE(found.size() == parameters.size(), found.size(), " gradients for ", parameters.size(), " tensors.");
  for (Py_ssize_t i = 0; i < parameters.size(); ++i) {
    PyObject* parameter = parameters.data()[i];
    PyObject* gradient = clears ? Py_None : found.data()[i];
    if (!is_plain(parameter) || !(gradient == Py_None || is_plain(gradient))) {
      if (PyObject_SetAttrString(parameter, "grad", gradient) < 0) throw python_error();
    } else {
      THPVariable_Unpack(parameter).mutable_grad() = gradient == Py_None ? at::Tensor() : THPVariable_Unpack(gradient);
    }
  }
  Py_RETURN_NONE;
}

AMP_WALK(any_requires_grad, 1) {
  const Items items(args[0]);
  return PyBool_FromLong(std::any_of(items.data(), items.data() + items.size(), [](PyObject* item) {
    return item != Py_None && tensor_of("each item that is not None", item).requires_grad();
  }));
}

AMP_WALK(float32_like, 1) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return object_of_each(args[0], [](PyObject* item) {
    const at::Tensor& tensor = tensor_of("each item", item);
    return THPVariable_Wrap(at::empty_like(tensor, tensor.options().dtype(at::kFloat).requires_grad(std::nullopt)));
  });
}

#define AMP_METHOD(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL | METH_KEYWORDS, nullptr}

PyMethodDef methods[] = {
    AMP_METHOD(multi_tensor_scale),
    AMP_METHOD(multi_tensor_axpby),
    AMP_METHOD(multi_tensor_copy),
    AMP_METHOD(multi_tensor_isnonfinite),
    AMP_METHOD(multi_tensor_exponents),
    AMP_METHOD(multi_tensor_l2norm),
    AMP_METHOD(multi_tensor_maxnorm),
    AMP_METHOD(multi_tensor_scale_l2norm),
    AMP_METHOD(multi_tensor_refresh),
    AMP_METHOD(update_scale),
    AMP_METHOD(step_prologue),
    AMP_METHOD(fused_adam),
    AMP_METHOD(fused_sgd),
    AMP_METHOD(same),
    AMP_METHOD(holds),
    AMP_METHOD(fingerprint),
    AMP_METHOD(versions),
    AMP_METHOD(addresses),
    AMP_METHOD(gradients),
    AMP_METHOD(any_requires_grad),
    AMP_METHOD(float32_like),
    AMP_METHOD(set_gradients),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
