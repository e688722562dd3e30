// The ops of an optimizer step on a CPU.

#include <torch/library.h>

#include <algorithm>

#include "../common/step_checks.h"
#include "host.h"

namespace amp_wrapper::cpu {
namespace {

void step_prologue(const at::Tensor& decision, const at::Tensor& rows, at::TensorList steps, const at::Tensor& hyper,
                   const at::Tensor& groups, std::int64_t kind, at::TensorList rates, at::IntArrayRef rated,
                   const std::optional<at::Tensor>& found_inf, const std::optional<at::Tensor>& learned,
                   const std::optional<at::Tensor>& norm, const std::optional<at::Tensor>& scale,
                   const std::optional<at::Tensor>& growth_tracker, const std::optional<at::Tensor>& hysteresis_tracker,
                   const std::optional<at::Tensor>& counts, at::ArrayRef<double> rule, std::optional<double> max_norm,
                   std::optional<double> clip_value) {
  const Prologue prologue = check_prologue({decision, rows, steps, hyper, groups, kind, rates, rated, found_inf, learned, norm,
                                            scale, growth_tracker, hysteresis_tracker, counts, rule, max_norm, clip_value},
                                           c10::kCPU);
  const bool taken = !prologue.decide.skips();
  // as after the last change of group or count: powers are not taken again
  float before = 0.0f;
  for (std::size_t i = 0; i < prologue.steps.size(); ++i) {
    const std::int64_t group = prologue.groups[i];
    auto* steps = static_cast<float*>(prologue.steps.data(0, i));
    float* row = prologue.rows + i * kRow;
    if (i > 0 && group == prologue.groups[i - 1] && bits_of(*steps) == bits_of(before)) {
      std::copy(row - kRow, row, row);
      *steps = *static_cast<const float*>(prologue.steps.data(0, i - 1));
      continue;
    }
    before = *steps;
    fill_row(prologue.kind, prologue.hyper + group * kHyper, prologue.rates[group], steps, taken, row);
  }
  prologue.steps.finish();
  prologue.decide(prologue.decision);
}

// Every chunk of every parameter, where the decision is to take the step.
template <typename F>
void update_chunks(const Update& update, F kernel) {
  const Flat& flat = update.flat;
  if (flat.size() == 0 || !(update.decision[kSkip] == 0.0f)) return;
  for_chunks(whole_plan(flat.counts()), [&](auto tensor, auto element, auto count, auto) {
    Piece piece{flat.type(0, tensor),
                at_element(flat, 0, tensor, element),
                flat.type(1, tensor),
                at_element(flat, 1, tensor, element),
                Type::kFloat,
                nullptr,
                {},
                {},
                count};
    if (update.has_partner(tensor)) {
      piece.partner_type = flat.type(update.partners, tensor);
      piece.partner = at_element(flat, update.partners, tensor, element);
    }
    for (std::size_t k = 0; k < update.states.size(); ++k) {
      const int list = update.states[k];
      if (list < 0) continue;
      piece.state_types[k] = flat.type(list, tensor);
      piece.states[k] = at_element(flat, list, tensor, element);
    }
    kernel(piece, update.rows + tensor * kRow, update.decision);
  });
  flat.finish();
}

void fused_adam(at::TensorList grads, at::TensorList params, at::TensorList exp_avgs, at::TensorList exp_avg_sqs,
                at::TensorList max_exp_avg_sqs, at::TensorList partners, const at::Tensor& rows, const at::Tensor& decision) {
  const Update update = check_update(
      grads, params, {{"exp_avgs", exp_avgs}, {"exp_avg_sqs", exp_avg_sqs}, {"max_exp_avg_sqs", max_exp_avg_sqs, true}},
      partners, rows, decision, c10::kCPU);
  update_chunks(update, kernels().adam);
}

void fused_sgd(at::TensorList grads, at::TensorList params, at::TensorList momentum_buffers, at::TensorList partners,
               const at::Tensor& rows, const at::Tensor& decision) {
  const Update update =
      check_update(grads, params, {{"momentum_buffers", momentum_buffers, true}}, partners, rows, decision, c10::kCPU);
  update_chunks(update, kernels().sgd);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) {
  library.impl("step_prologue", step_prologue);
  library.impl("fused_adam", fused_adam);
  library.impl("fused_sgd", fused_sgd);
}

}  // namespace amp_wrapper::cpu
