// The ops: their schemas, and what they give where only shapes are asked for. Kernels for the CPU and for CUDA register in
// cpu/ and cuda/. What each op computes is described in amp_wrapper/ops.

#include <ATen/core/IListRef.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

// functions that every version of Python has, found when the library is loaded
extern "C" {
__attribute__((weak)) int Py_IsInitialized();
__attribute__((weak)) int PyGILState_Ensure();
__attribute__((weak)) void PyGILState_Release(int state);
}

namespace {

constexpr const char* kScale =
    "multi_tensor_scale(Tensor[] sources, Tensor(a!)[] targets, Tensor? scale=None, Tensor(b!)? found_inf=None) -> ()";
constexpr const char* kAxpby =
    "multi_tensor_axpby(Tensor[] xs, Tensor(a!)[] ys, Tensor? a=None, Tensor? b=None, Tensor(b!)? found_inf=None) -> ()";
constexpr const char* kIsNonfinite = "multi_tensor_isnonfinite(Tensor[] tensors, Tensor(a!) found_inf) -> ()";
constexpr const char* kL2norm =
    "multi_tensor_l2norm(Tensor[] tensors, Tensor? inverse_scale=None, Tensor(a!)? found_inf=None) -> Tensor";
// what decides on a step, behind the lists of both optimizers
#define AMP_DECISION                                                                                        \
  "Tensor(f!) decision, Tensor hyper, Tensor groups, Tensor[] rates, int[] rated, Tensor? found_inf=None, " \
  "Tensor? learned=None, Tensor? norm=None, Tensor(g!)? scale=None, Tensor(h!)? growth_tracker=None, "      \
  "Tensor(i!)? hysteresis_tracker=None, Tensor(j!)? counts=None, float[] rule=[], float? max_norm=None, "   \
  "float? clip_value=None) -> ()"
constexpr const char* kAdam =
    "fused_adam(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] max_exp_avg_sqs, Tensor(k!)[] steps, Tensor(e!)[] partners, " AMP_DECISION;
constexpr const char* kSgd =
    "fused_sgd(Tensor[] grads, Tensor(a!)[] params, Tensor(b!)[] momentum_buffers, Tensor(c!)[] partners, " AMP_DECISION;
#undef AMP_DECISION

constexpr const char* kNames[] = {"multi_tensor_scale",  "multi_tensor_axpby", "multi_tensor_isnonfinite",
                                  "multi_tensor_l2norm", "fused_adam",         "fused_sgd"};

// Frees the lists of an op. It runs without Python's lock, and torch would take it anew for each tensor that nobody but Python
// holds from then on; here it is taken once for all of them.
void free_together(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  std::vector<c10::IValue> lists;
  for (const c10::IValue& argument : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (argument.isTensorList()) lists.push_back(argument);
  }
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  const bool has_python = PyGILState_Ensure != nullptr && Py_IsInitialized();
  const int state = has_python ? PyGILState_Ensure() : 0;
  lists.clear();
  if (has_python) PyGILState_Release(state);
}

// Any op, for tensors without memory: it writes nothing, and a norm has a shape.
void run_without_memory(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (const c10::IValue& argument : torch::jit::pop(*stack, op.schema().arguments().size())) {
    for (const at::Tensor& tensor : argument.isTensorList() ? argument.toTensorVector() : std::vector<at::Tensor>()) {
      TORCH_CHECK_VALUE(tensor.is_meta(), "A list has tensors on meta and on ", tensor.device(), ": all lie on one device.");
    }
  }
  if (!op.schema().returns().empty()) torch::jit::push(*stack, at::empty({}, at::device(at::kMeta).dtype(at::kFloat)));
}

}  // namespace

TORCH_LIBRARY(amp_wrapper, library) {
  for (const char* schema : {kScale, kAxpby, kIsNonfinite, kL2norm, kAdam, kSgd}) {
    library.def(schema, {at::Tag::pt2_compliant_tag});
  }
}

TORCH_LIBRARY_IMPL(amp_wrapper, Meta, library) {
  for (const char* name : kNames) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_without_memory>());
}

// The ops are not differentiable: what torch asks first records nothing.
TORCH_LIBRARY_IMPL(amp_wrapper, Autograd, library) {
  for (const char* name : kNames) library.impl(name, torch::CppFunction::makeFromBoxedFunction<&free_together>());
}
