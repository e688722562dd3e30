// The ops of an optimizer step on a CPU.

#include <torch/library.h>

#include <algorithm>

#include "../common/step_arguments.h"
#include "host.h"

namespace amp_wrapper::cpu {
namespace {

void step_prologue(const at::Tensor& decision, const at::Tensor& rows, at::TensorList steps, const at::Tensor& hyper,
                   const at::Tensor& groups, std::int64_t kind, at::TensorList rates, at::IntArrayRef rated,
                   OptionalTensor found_inf, OptionalTensor learned, OptionalTensor norm, OptionalTensor scale,
                   OptionalTensor growth_tracker, OptionalTensor hysteresis_tracker, OptionalTensor counts,
                   at::ArrayRef<double> rule, std::optional<double> max_norm, std::optional<double> clip_value) {
  const Prologue prologue = check_prologue({decision, rows, steps, hyper, groups, kind, rates, rated, found_inf, learned, norm,
                                            scale, growth_tracker, hysteresis_tracker, counts, rule, max_norm, clip_value},
                                           c10::kCPU);
  const bool taken = !prologue.decide.skips();
  // the parameter before, and its count: where both agree, powers are not taken again
  const Parameter* last = nullptr;
  float before = 0.0f;
  float* row = prologue.rows;
  for (const Parameter& parameter : prologue.parameters) {
    if (last != nullptr && parameter.hyper == last->hyper && bits_of(*parameter.step) == bits_of(before)) {
      std::copy(row - kRow, row, row);
      *parameter.step = *last->step;
    } else {
      before = *parameter.step;
      fill_row(prologue.kind, parameter.hyper, parameter.rate, parameter.step, taken, row);
    }
    last = &parameter;
    row += kRow;
  }
  prologue.decide(prologue.decision);
}

// Every chunk of every parameter, where the decision is to take the step.
template <int kLists, typename F>
void update_chunks(const Update& update, F kernel) {
  if (update.lists.size() == 0 || update.decision[kSkip] != 0.0f) return;
  for_chunks(update.lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t) {
    Operand operands[kLists];
    for (int list = 0; list < kLists; ++list) operands[list] = update.lists.operand(list, tensor, first);
    kernel(operands, count, update.rows + tensor * kRow, update.decision);
  });
}

void fused_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList max_exp_avg_sqs, at::TensorList partners, const at::Tensor& rows, const at::Tensor& decision) {
  update_chunks<kAdamLists>(
      check_adam(c10::kCPU, grads, params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, partners, rows, decision), kernels().adam);
}

void fused_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentum_buffers, at::TensorList partners,
               const at::Tensor& rows, const at::Tensor& decision) {
  update_chunks<kSgdLists>(check_sgd(c10::kCPU, grads, params, momentum_buffers, partners, rows, decision), kernels().sgd);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) {
  library.impl("step_prologue", step_prologue);
  library.impl("fused_adam", fused_adam);
  library.impl("fused_sgd", fused_sgd);
}

}  // namespace amp_wrapper::cpu
