// The ops of an optimizer step on a GPU: one launch each, whatever the number of parameters.

#include <torch/library.h>

#include "../common/step_arguments.h"
#include "host.h"

namespace amp_wrapper::cuda {
namespace {

void step_prologue(const at::Tensor& decision, const at::Tensor& rows, at::TensorList steps, const at::Tensor& hyper,
                   const at::Tensor& groups, std::int64_t kind, at::TensorList rates, at::IntArrayRef rated,
                   OptionalTensor found_inf, OptionalTensor learned, OptionalTensor norm, OptionalTensor scale,
                   OptionalTensor growth_tracker, OptionalTensor hysteresis_tracker, OptionalTensor counts,
                   at::ArrayRef<double> rule, std::optional<double> max_norm, std::optional<double> clip_value) {
  const Prologue prologue = check_prologue({decision, rows, steps, hyper, groups, kind, rates, rated, found_inf, learned, norm,
                                            scale, growth_tracker, hysteresis_tracker, counts, rule, max_norm, clip_value},
                                           c10::kCUDA);
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  std::vector<ParameterSlot> slots;
  slots.reserve(prologue.parameters.size());
  for (const Parameter& parameter : prologue.parameters) {
    auto& slot = slots.emplace_back(ParameterSlot{{}, parameter.rate, parameter.step});
    std::copy_n(parameter.hyper, kHyper, slot.hyper);
  }
  Tables tables(device);
  C10_CUDA_CHECK(launch_prologue(slots, tables.upload(), prologue.decide, prologue.kind, prologue.rows, prologue.decision,
                                 stream_of(device)));
}

void fused_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList max_exp_avg_sqs, at::TensorList partners, const at::Tensor& rows, const at::Tensor& decision) {
  const Update update = check_adam(c10::kCUDA, grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, partners, rows, decision);
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  Tables tables(device);
  C10_CUDA_CHECK(launch_adam(slots_of<kAdamLists>(update.lists), tables.upload(), !max_exp_avg_sqs.empty(), update.rows,
                             update.decision, stream_of(device)));
}

void fused_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentum_buffers, at::TensorList partners,
               const at::Tensor& rows, const at::Tensor& decision) {
  const Update update = check_sgd(c10::kCUDA, grads, params, momentum_buffers, partners, rows, decision);
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  Tables tables(device);
  C10_CUDA_CHECK(launch_sgd(slots_of<kSgdLists>(update.lists), tables.upload(), !momentum_buffers.empty(), update.rows,
                            update.decision, stream_of(device)));
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) {
  library.impl("step_prologue", step_prologue);
  library.impl("fused_adam", fused_adam);
  library.impl("fused_sgd", fused_sgd);
}

}  // namespace amp_wrapper::cuda
