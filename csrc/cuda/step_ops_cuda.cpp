// The ops of an optimizer step on a GPU: one launch each, whatever the number of parameters.

#include <torch/library.h>

#include "../common/step_checks.h"
#include "host.h"
#include "step_launch.h"

namespace amp_wrapper::cuda {
namespace {

void step_prologue(const at::Tensor& decision, const at::Tensor& rows, at::TensorList steps, const at::Tensor& hyper,
                   const at::Tensor& groups, std::int64_t kind, at::TensorList rates, at::IntArrayRef rated,
                   const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& learned,
                   const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& growth_tracker, const std::optional<at::Tensor>& hysteresis_tracker,
                   const std::optional<at::Tensor>& counts, at::ArrayRef<double> rule, std::optional<double> max_norm,
                   std::optional<double> clip_value) {
  const auto checked = check_prologue({decision, rows, steps, hyper, groups, kind, rates, rated, found_inf, learned, norm,
                                       scale, growth_tracker, hysteresis_tracker, counts, rule, max_norm, clip_value},
                                      c10::kCUDA);
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  // 32 KB: too much for some stacks
  const auto work = std::make_unique<PrologueWork>();
  work->decide = checked.decide;
  work->kind = checked.kind;
  work->decision = checked.decision;
  work->rows = checked.rows;
  Parameters parameters{checked.hyper, checked.rates, {}, checked.groups};
  for (std::size_t i = 0; i < checked.steps.size(); ++i) {
    parameters.steps.push_back(static_cast<float*>(checked.steps.data(0, i)));
  }
  Tables tables(device);
  for_prologues(
      *work, parameters, [&](const PrologueWork& filled) { C10_CUDA_CHECK(launch_prologue(filled, stream_of(device))); },
      tables.upload());
  checked.steps.finish();
}

// Calls launch(work) for the lists of an update, of which some may be missing: `places` are their operands, -1 for none, in the
// order of the kernel, which ends with the partner and the row.
template <int kLists, typename F>
void launch_update(const Update& update, const int (&places)[kLists - 2], c10::Device device, F launch) {
  launch_all<kLists>(
      update.flat, device,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == kLists - 1) return const_cast<float*>(update.rows) + tensor * kRow;
        const bool is_partner = list == kLists - 2;
        const int place = is_partner ? update.partners : places[list];
        if (place < 0 || (is_partner && !update.has_partner(tensor))) return nullptr;
        *type = update.flat.type(place, tensor);
        return at_element(update.flat, place, tensor, element);
      },
      [&](const auto& work, auto) { return launch(work); });
  update.flat.finish();
}

void fused_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList max_exp_avg_sqs, at::TensorList partners, const at::Tensor& rows, const at::Tensor& decision) {
  const Update update = check_update(
      grads, params, {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}, {"max_exp_avg_sqs", max_exp_avg_sqs, true}},
      partners, rows, decision, c10::kCUDA);
  if (update.flat.size() == 0) return;
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  const bool amsgrad = update.states[2] >= 0;
  launch_update<kAdamLists>(update, {0, 1, update.states[0], update.states[1], update.states[2]}, device,
                            [&](const auto& work) { return launch_adam(work, update.decision, amsgrad, stream_of(device)); });
}

void fused_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentum_buffers, at::TensorList partners,
               const at::Tensor& rows, const at::Tensor& decision) {
  const Update update =
      check_update(grads, params, {{"momentum_buffers", momentum_buffers, true}}, partners, rows, decision, c10::kCUDA);
  if (update.flat.size() == 0) return;
  const c10::Device device = decision.device();
  const c10::cuda::CUDAGuard guard(device);
  const bool momentums = update.states[0] >= 0;
  launch_update<kSgdLists>(update, {0, 1, update.states[0]}, device,
                           [&](const auto& work) { return launch_sgd(work, update.decision, momentums, stream_of(device)); });
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) {
  library.impl("step_prologue", step_prologue);
  library.impl("fused_adam", fused_adam);
  library.impl("fused_sgd", fused_sgd);
}

}  // namespace amp_wrapper::cuda
