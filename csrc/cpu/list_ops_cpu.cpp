// The ops of the lists on a CPU; those of an optimizer step are in step_ops.cpp.

#include <ATen/Functions.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "host.h"

namespace amp_wrapper::cpu {
namespace {

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
  const Flat flat = check_call({{"sources", sources}, {"targets", targets, true, false}}, c10::kCPU,
                               {{"scale", scale}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
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

void multi_tensor_axpby(at::TensorList xs, at::TensorList ys, const std::optional<at::Tensor>& a,
                        const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& found_inf) {
  const at::TensorList targets = ys;
  const bool check_x = true;
  const bool check_y = false;
  const Flat flat = check_call({{"xs", xs}, {"ys", ys}, {"targets", targets, true, false}}, c10::kCPU,
                               {{"a", a}, {"b", b}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
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

void multi_tensor_isnonfinite(at::TensorList tensors, const at::Tensor& found_inf) {
  const std::optional<at::Tensor> flag = found_inf;
  const Flat flat = check_call({{"tensors", tensors}}, c10::kCPU, {{"found_inf", flag, true}});
  if (flat.size() == 0) return;
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

at::Tensor multi_tensor_l2norm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                               const std::optional<at::Tensor>& found_inf) {
  const bool per_tensor = false;
  const Flat flat =
      check_call({{"tensors", tensors}}, c10::kCPU, {{"inverse_scale", inverse_scale}, {"found_inf", found_inf, true}});
  const Launch launch = whole_plan(flat.counts());
  std::vector<float> chunks(launch.chunks());
  std::atomic<bool> found{false};
  sum_chunks(flat, launch, chunks.data(), &found);
  std::vector<float> sums = sums_of(launch, chunks, tensors.size());
  auto result = new_norms(tensors, flat.device(), per_tensor);
  const float factor = value_of(inverse_scale);
  if (per_tensor) {
    auto* norms = static_cast<float*>(std::get<1>(result).mutable_data_ptr());
    for (std::size_t i = 0; i < sums.size(); ++i) norms[i] = std::sqrt(sums[i]) * factor;
  }
  *static_cast<float*>(std::get<0>(result).mutable_data_ptr()) =
      std::sqrt(tree_sum(sums.data(), static_cast<std::int64_t>(sums.size()))) * factor;
  if (found_inf.has_value()) raise_flag(found_inf, found);
  return std::get<0>(result);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) {
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
}

}  // namespace amp_wrapper::cpu
