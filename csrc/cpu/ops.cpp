// The ops on a CPU: lists become chunks, and threads share them out.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "../common/step_checks.h"
#include "kernels.h"

namespace amp_wrapper::cpu {
namespace {

// The same choice as torch's, which ATEN_CPU_CAPABILITY in the environment can lower.
const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
#if defined(__x86_64__)
    const std::string capability = at::get_cpu_capability();
    if (capability == "AVX512") return kAvx512;
    if (capability == "AVX2") return kAvx2;
#endif
    return kDefault;
  }();
  return chosen;
}

// Below this many elements for each thread, waking a thread costs more than it brings.
constexpr std::int64_t kGrain = 32768;

// Calls body(tensor, first element, count, chunk) for every chunk.
template <typename F>
void for_chunks(const Launch& launch, F body) {
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    if (begin == end) return;
    int entry = entry_of(launch.starts.data(), static_cast<int>(launch.entries.size()), begin);
    for (std::int64_t chunk = begin; chunk < end; ++chunk) {
      while (launch.starts[entry + 1] <= chunk) ++entry;
      const Entry& piece = launch.entries[entry];
      const std::int64_t offset = (chunk - launch.starts[entry]) * kChunk;
      body(piece.tensor, piece.begin + offset, std::min(kChunk, piece.count - offset), chunk);
    }
  };
  std::int64_t cost = 0;
  for (const Entry& entry : launch.entries) cost += entry.count + kEntryCost;
  const std::int64_t parts = std::min<std::int64_t>(at::get_num_threads(), cost / kGrain);
  if (parts <= 1) {
    run(0, launch.chunks());
    return;
  }
  const std::vector<std::int64_t> bounds = split(launch, parts);
  at::parallel_for(0, parts, 1, [&](std::int64_t begin, std::int64_t end) { run(bounds[begin], bounds[end]); });
}

Launch whole_plan(const std::vector<std::int64_t>& counts) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  std::vector<Launch> launches = plan(counts, kAny, kAny);
  return launches.empty() ? Launch() : std::move(launches.front());
}

void* at_element(const Flat& flat, std::size_t list, std::int64_t tensor, std::int64_t element) {
  return static_cast<char*>(flat.data(list, tensor)) + element * size_of(flat.type(list, tensor));
}

// Targets of this many bytes would push everything else out of the caches, and be gone before anybody reads them.
constexpr std::size_t kStreamBytes = std::size_t{32} << 20;

// Whether a written list goes around the caches. One that is read as well was brought into them anyway.
bool streams(const Flat& flat, std::size_t written) {
  std::size_t bytes = 0;
  for (std::size_t i = 0; i < flat.size(); ++i) {
    bytes += flat.counts()[i] * size_of(flat.type(written, i));
    for (std::size_t list = 0; list < written; ++list) {
      if (flat.data(list, i) == flat.data(written, i) && flat.counts()[i] > 0) return false;
    }
  }
  return bytes >= kStreamBytes;
}

float value_of(const std::optional<at::Tensor>& scalar) {
  return scalar.has_value() ? *static_cast<const float*>(scalar->const_data_ptr()) : 1.0f;
}

void raise_flag(const std::optional<at::Tensor>& flag, bool found) {
  // a maximum, never a sum: the flag stays 0 or 1
  if (!found) return;
  auto* value = static_cast<float*>(flag->mutable_data_ptr());
  *value = std::max(*value, 1.0f);
}

// In pairs of neighbours, those in pairs, and so on; a missing one counts as zero. Overwrites the values.
float tree_sum(float* values, std::int64_t count) {
  if (count == 0) return 0.0f;
  for (; count > 1; count = (count + 1) / 2) {
    for (std::int64_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2) values[count / 2] = values[count - 1];
  }
  return values[0];
}

void multi_tensor_scale(at::TensorList sources, at::TensorList targets, const std::optional<at::Tensor>& scale,
                        const std::optional<at::Tensor>& found_inf) {
  const c10::Device device = device_of(sources, found_inf, scale);
  check_scalar("scale", scale, device);
  check_flag("found_inf", found_inf, device);
  const Flat flat({{"sources", sources}, {"targets", targets, true, false}}, c10::kCPU,
                  {{"scale", scale}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
  bump_version(found_inf);
  const float factor = value_of(scale);
  std::atomic<bool> found{false};
  const auto kernel = kernels().scale;
  const bool around = streams(flat, 1);
  for_chunks(whole_plan(flat.counts()), [&](auto tensor, auto element, auto count, auto) {
    if (kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), flat.type(1, tensor),
               at_element(flat, 1, tensor, element), count, factor, found_inf.has_value(), around)) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  flat.finish();
  if (found_inf.has_value()) raise_flag(found_inf, found);
}

void multi_tensor_axpby(at::TensorList xs, at::TensorList ys, at::TensorList targets, const std::optional<at::Tensor>& a,
                        const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& found_inf, bool check_x,
                        bool check_y) {
  const c10::Device device = device_of(xs, found_inf, a);
  check_scalar("a", a, device);
  check_scalar("b", b, device);
  check_flag("found_inf", found_inf, device);
  const Flat flat({{"xs", xs}, {"ys", ys}, {"targets", targets, true, false}}, c10::kCPU,
                  {{"a", a}, {"b", b}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
  bump_version(found_inf);
  const Axpby function{value_of(a), value_of(b)};
  const int checked = (check_x ? 1 : 0) | (check_y ? 2 : 0);
  const bool checks = found_inf.has_value() && checked != 0;
  std::atomic<bool> found{false};
  const auto kernel = kernels().axpby;
  const bool around = streams(flat, 2);
  for_chunks(whole_plan(flat.counts()), [&](auto tensor, auto element, auto count, auto) {
    const int bad = kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), flat.type(1, tensor),
                           at_element(flat, 1, tensor, element), flat.type(2, tensor), at_element(flat, 2, tensor, element),
                           count, function, checks, around);
    if (bad & checked) found.store(true, std::memory_order_relaxed);
  });
  flat.finish();
  if (found_inf.has_value()) raise_flag(found_inf, found);
}

void multi_tensor_copy(at::TensorList sources, at::TensorList targets) {
  const Flat flat({{"sources", sources}, {"targets", targets, true, false, &sources}}, c10::kCPU);
  const auto kernel = kernels().copy;
  const bool around = streams(flat, 1);
  for_chunks(whole_plan(flat.counts()), [&](auto tensor, auto element, auto count, auto) {
    kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), flat.type(1, tensor),
           at_element(flat, 1, tensor, element), count, around);
  });
  flat.finish();
}

void multi_tensor_isnonfinite(at::TensorList tensors, const at::Tensor& found_inf) {
  check_flag("found_inf", found_inf, device_of(tensors, found_inf));
  const std::optional<at::Tensor> flag = found_inf;
  const Flat flat({{"tensors", tensors}}, c10::kCPU, {{"found_inf", flag, true}});
  if (flat.size() == 0) return;
  bump_version(found_inf);
  std::atomic<bool> found{false};
  const auto kernel = kernels().largest;
  for_chunks(whole_plan(flat.counts()), [&](auto tensor, auto element, auto count, auto) {
    if (kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), count) >= kExponent) {
      found.store(true, std::memory_order_relaxed);
    }
  });
  raise_flag(found_inf, found);
}

// The sum of squares of every chunk of the first list.
void sum_chunks(const Flat& flat, const Launch& launch, float* chunks, std::atomic<bool>* found) {
  const auto kernel = kernels().sum_of_squares;
  for_chunks(launch, [&](auto tensor, auto element, auto count, auto chunk) {
    bool bad = false;
    chunks[chunk] = kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), count, &bad);
    if (bad) found->store(true, std::memory_order_relaxed);
  });
}

// The sum of every tensor from those of its chunks, which it overwrites.
std::vector<float> sums_of(const Launch& launch, std::vector<float>& chunks, std::size_t tensors) {
  std::vector<float> sums(tensors, 0.0f);
  for (std::size_t i = 0; i < launch.entries.size(); ++i) {
    const std::int64_t begin = launch.starts[i];
    sums[launch.entries[i].tensor] = tree_sum(chunks.data() + begin, launch.starts[i + 1] - begin);
  }
  return sums;
}

std::tuple<at::Tensor, at::Tensor> multi_tensor_l2norm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                                                       const std::optional<at::Tensor>& found_inf, bool per_tensor) {
  const c10::Device device = device_of(tensors, found_inf, inverse_scale);
  check_scalar("inverse_scale", inverse_scale, device);
  check_flag("found_inf", found_inf, device);
  const Flat flat({{"tensors", tensors}}, c10::kCPU, {{"found_inf", found_inf, true}});
  bump_version(found_inf);
  const Launch launch = whole_plan(flat.counts());
  std::vector<float> chunks(launch.chunks());
  std::atomic<bool> found{false};
  sum_chunks(flat, launch, chunks.data(), &found);
  std::vector<float> sums = sums_of(launch, chunks, tensors.size());
  auto result = new_norms(tensors, device, per_tensor);
  const float factor = value_of(inverse_scale);
  if (per_tensor) {
    auto* norms = static_cast<float*>(std::get<1>(result).mutable_data_ptr());
    for (std::size_t i = 0; i < sums.size(); ++i) norms[i] = std::sqrt(sums[i]) * factor;
  }
  *static_cast<float*>(std::get<0>(result).mutable_data_ptr()) =
      std::sqrt(tree_sum(sums.data(), static_cast<std::int64_t>(sums.size()))) * factor;
  if (found_inf.has_value()) raise_flag(found_inf, found);
  return result;
}

std::tuple<at::Tensor, at::Tensor> multi_tensor_maxnorm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                                                        const std::optional<at::Tensor>& found_inf, bool per_tensor) {
  const c10::Device device = device_of(tensors, found_inf, inverse_scale);
  check_scalar("inverse_scale", inverse_scale, device);
  check_flag("found_inf", found_inf, device);
  const Flat flat({{"tensors", tensors}}, c10::kCPU, {{"found_inf", found_inf, true}});
  bump_version(found_inf);
  const Launch launch = whole_plan(flat.counts());
  std::vector<std::int32_t> chunks(launch.chunks());
  const auto kernel = kernels().largest;
  for_chunks(launch, [&](auto tensor, auto element, auto count, auto chunk) {
    chunks[chunk] = kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), count);
  });
  std::vector<std::int32_t> most(tensors.size(), 0);
  std::int32_t all = 0;
  for (std::size_t i = 0; i < launch.entries.size(); ++i) {
    const auto begin = chunks.begin() + launch.starts[i];
    const std::int32_t value = *std::max_element(begin, chunks.begin() + launch.starts[i + 1]);
    most[launch.entries[i].tensor] = value;
    all = std::max(all, value);
  }
  auto result = new_norms(tensors, device, per_tensor);
  const float factor = value_of(inverse_scale);
  if (per_tensor) {
    auto* norms = static_cast<float*>(std::get<1>(result).mutable_data_ptr());
    for (std::size_t i = 0; i < most.size(); ++i) norms[i] = float_of(most[i]) * factor;
  }
  *static_cast<float*>(std::get<0>(result).mutable_data_ptr()) = float_of(all) * factor;
  if (found_inf.has_value()) raise_flag(found_inf, all >= kExponent);
  return result;
}

at::Tensor multi_tensor_scale_l2norm(at::TensorList sources, at::TensorList targets, const std::optional<at::Tensor>& scale,
                                     const std::optional<at::Tensor>& found_inf) {
  const c10::Device device = device_of(sources, found_inf, scale);
  check_scalar("scale", scale, device);
  check_flag("found_inf", found_inf, device);
  const Flat flat({{"sources", sources}, {"targets", targets, true, false}}, c10::kCPU,
                  {{"scale", scale}, {"found_inf", found_inf, true}});
  bump_version(found_inf);
  const float factor = value_of(scale);
  std::atomic<bool> found{false};
  const bool around = flat.size() > 0 && streams(flat, 1);
  const Launch launch = whole_plan(flat.counts());
  std::vector<float> chunks(launch.chunks());
  if (flat.is_direct()) {
    const auto kernel = kernels().scale_and_sum;
    for_chunks(launch, [&](auto tensor, auto element, auto count, auto chunk) {
      bool bad = false;
      chunks[chunk] = kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), flat.type(1, tensor),
                             at_element(flat, 1, tensor, element), count, factor, around, &bad);
      if (bad) found.store(true, std::memory_order_relaxed);
    });
  } else {
    // a temporary has its elements in another order than its source, and the sum has that of the source
    sum_chunks(Flat({{"sources", sources}}, c10::kCPU), launch, chunks.data(), &found);
    const auto kernel = kernels().scale;
    for_chunks(launch, [&](auto tensor, auto element, auto count, auto) {
      kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element), flat.type(1, tensor),
             at_element(flat, 1, tensor, element), count, factor, false, around);
    });
    flat.finish();
  }
  std::vector<float> sums = sums_of(launch, chunks, sources.size());
  at::Tensor norm = std::get<0>(new_norms(sources, device, false));
  *static_cast<float*>(norm.mutable_data_ptr()) =
      std::sqrt(tree_sum(sums.data(), static_cast<std::int64_t>(sums.size()))) * factor;
  if (found_inf.has_value()) raise_flag(found_inf, found);
  return norm;
}

at::Tensor multi_tensor_refresh(at::TensorList weights, at::TensorList masters) {
  check_refresh_types(weights, masters);
  const Flat flat({{"weights", weights}, {"masters", masters, true, true}}, c10::kCPU);
  at::Tensor edited =
      at::zeros({static_cast<std::int64_t>(weights.size())}, at::TensorOptions().dtype(at::kBool).device(device_of(weights)));
  // one byte for each chunk, so that no two threads write to one place
  const Launch launch = whole_plan(flat.counts());
  std::vector<char> found(launch.chunks(), 0);
  const auto kernel = kernels().refresh;
  for_chunks(launch, [&](auto tensor, auto element, auto count, auto chunk) {
    found[chunk] = kernel(flat.type(0, tensor), at_element(flat, 0, tensor, element),
                          static_cast<float*>(at_element(flat, 1, tensor, element)), count);
  });
  flat.finish();
  auto* flags = static_cast<bool*>(edited.mutable_data_ptr());
  for (std::size_t i = 0; i < launch.entries.size(); ++i) {
    for (std::int64_t chunk = launch.starts[i]; chunk < launch.starts[i + 1]; ++chunk) {
      flags[launch.entries[i].tensor] |= found[chunk] != 0;
    }
  }
  return edited;
}

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
                  const at::Tensor& found_inf, double growth_factor, double backoff_factor, std::int64_t growth_interval,
                  std::int64_t hysteresis, std::optional<double> min_scale, std::optional<double> max_scale) {
  const ScaleUpdate rule = scale_rule(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale);
  check_scale_state(scale, growth_tracker, hysteresis_tracker, found_inf);
  rule(static_cast<float*>(scale.mutable_data_ptr()), static_cast<std::int32_t*>(growth_tracker.mutable_data_ptr()),
       static_cast<std::int32_t*>(hysteresis_tracker.mutable_data_ptr()),
       *static_cast<const float*>(found_inf.const_data_ptr()));
}

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
  for (std::size_t i = 0; i < prologue.steps.size(); ++i) {
    const std::int64_t group = prologue.groups[i];
    fill_row(prologue.kind, prologue.hyper + group * kHyper, prologue.rates[group],
             static_cast<float*>(prologue.steps.data(0, i)), taken, prologue.rows + i * kRow);
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
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_copy", multi_tensor_copy);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
  library.impl("multi_tensor_maxnorm", multi_tensor_maxnorm);
  library.impl("multi_tensor_scale_l2norm", multi_tensor_scale_l2norm);
  library.impl("multi_tensor_refresh", multi_tensor_refresh);
  library.impl("update_scale", update_scale);
  library.impl("step_prologue", step_prologue);
  library.impl("fused_adam", fused_adam);
  library.impl("fused_sgd", fused_sgd);
}

}  // namespace amp_wrapper::cpu
