// The ops of an optimizer step, for whatever device computes: everything is checked, then decided, then updated.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "step_arguments.h"

namespace amp_wrapper {

// `Device` has its `kType`, and `decide`, `adam` and `sgd`, which compute.
template <typename Device>
void fused_adam(TensorList grads, TensorList params, TensorList exp_avgs, TensorList exp_avg_sqs, TensorList max_exp_avg_sqs,
                TensorList steps, TensorList partners, const at::Tensor& decision, const at::Tensor& hyper,
                const at::Tensor& groups, at::TensorList rates, at::IntArrayRef rated, OptionalTensor found_inf,
                OptionalTensor learned, OptionalTensor norm, OptionalTensor scale, OptionalTensor growth_tracker,
                OptionalTensor hysteresis_tracker, OptionalTensor counts, at::ArrayRef<double> rule,
                std::optional<double> max_norm, std::optional<double> clip_value) {
  const DecisionArguments arguments{steps,     decision, hyper,    groups,    rates,          rated,
                                    found_inf, learned,  norm,     scale,     growth_tracker, hysteresis_tracker,
                                    counts,    rule,     max_norm, clip_value};
  const at::Tensor rows = at::empty({static_cast<std::int64_t>(params.size()), kRow}, decision.options());
  const Prologue prologue = check_prologue(arguments, Kind::kAdam, rows, Device::kType);
  const Update update = check_update({{"grads", grads},
                                      {"params", params, true},
                                      {"exp_avgs", exp_avgs, true},
                                      {"exp_avg_sqs", exp_avg_sqs, true},
                                      {"max_exp_avg_sqs", max_exp_avg_sqs, true, /*optional=*/true},
                                      {"partners", partners, true, true, /*shorts=*/true, kAdamParameter}},
                                     rows, decision);
  Device::decide(prologue, decision.device());
  Device::adam(update, !max_exp_avg_sqs.empty(), decision.device());
}

template <typename Device>
void fused_sgd(TensorList grads, TensorList params, TensorList momentum_buffers, TensorList partners,
               const at::Tensor& decision, const at::Tensor& hyper, const at::Tensor& groups, at::TensorList rates,
               at::IntArrayRef rated, OptionalTensor found_inf, OptionalTensor learned, OptionalTensor norm,
               OptionalTensor scale, OptionalTensor growth_tracker, OptionalTensor hysteresis_tracker, OptionalTensor counts,
               at::ArrayRef<double> rule, std::optional<double> max_norm, std::optional<double> clip_value) {
  const DecisionArguments arguments{at::TensorList(), decision, hyper,    groups,    rates,          rated,
                                    found_inf,        learned,  norm,     scale,     growth_tracker, hysteresis_tracker,
                                    counts,           rule,     max_norm, clip_value};
  const at::Tensor rows = at::empty({static_cast<std::int64_t>(params.size()), kRow}, decision.options());
  const Prologue prologue = check_prologue(arguments, Kind::kSgd, rows, Device::kType);
  const Update update = check_update({{"grads", grads},
                                      {"params", params, true},
                                      {"momentum_buffers", momentum_buffers, true, /*optional=*/true},
                                      {"partners", partners, true, true, /*shorts=*/true, kSgdParameter}},
                                     rows, decision);
  Device::decide(prologue, decision.device());
  Device::sgd(update, !momentum_buffers.empty(), decision.device());
}

template <typename Device>
void register_steps(torch::Library& library) {
  library.impl("fused_adam", fused_adam<Device>);
  library.impl("fused_sgd", fused_sgd<Device>);
}

}  // namespace amp_wrapper
