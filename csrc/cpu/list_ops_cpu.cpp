// The ops of the lists on a CPU; those of an optimizer step are in step_ops_cpu.cpp.

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>

#include "host.h"

namespace amp_wrapper::cpu {
namespace {

float value_of(const float* scalar) { return scalar == nullptr ? 1.0f : *scalar; }

// A flag of an op, which threads may raise at once.
class Flag {
 public:
  explicit Flag(float* place) : place_(place) {}
  ~Flag() {
    // a maximum, never a sum: the flag stays 0 or 1
    if (place_ != nullptr && raised_) *place_ = std::max(*place_, 1.0f);
  }
  void raise_where(bool bad) {
    if (bad) raised_.store(true, std::memory_order_relaxed);
  }

 private:
  float* place_;
  std::atomic<bool> raised_{false};
};

// In pairs of neighbours, those in pairs, and so on; a missing one counts as zero.
float tree_sum(std::vector<float> values) {
  std::size_t count = values.size();
  if (count == 0) return 0.0f;
  for (; count > 1; count = (count + 1) / 2) {
    for (std::size_t i = 0; i < count / 2; ++i) values[i] = values[2 * i] + values[2 * i + 1];
    if (count % 2) values[count / 2] = values[count - 1];
  }
  return values[0];
}

// Whether targets would push everything else out of the caches, and be gone before anybody reads them. What is read as well
// was brought into the caches anyway.
bool streams(const Lists& lists) {
  constexpr std::int64_t kElements = std::int64_t{8} << 20;
  std::int64_t elements = 0;
  for (std::size_t i = 0; i < lists.size(); ++i) {
    if (lists.operand(0, i).data != lists.operand(1, i).data) elements += lists.counts()[i];
  }
  return elements >= kElements;
}

void multi_tensor_scale(TensorList sources, TensorList targets, OptionalTensor scale, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCPU, sources, {&scale, &found_inf});
  const float factor = value_of(check_scalar("scale", scale, device));
  Flag flag(check_scalar("found_inf", found_inf, device));
  const Lists lists(device, {{"sources", sources}, {"targets", targets, true}}, found_inf);
  const bool around = streams(lists);
  for_chunks(lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t) {
    flag.raise_where(kernels().scale(lists.operand(0, tensor, first), lists.operand(1, tensor, first), count, factor, around));
  });
}

void multi_tensor_axpby(TensorList xs, TensorList ys, OptionalTensor a, OptionalTensor b, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCPU, xs, {&a, &b, &found_inf});
  const Axpby function{value_of(check_scalar("a", a, device)), value_of(check_scalar("b", b, device))};
  Flag flag(check_scalar("found_inf", found_inf, device));
  const Lists lists(device, {{"xs", xs}, {"ys", ys, true}}, found_inf);
  for_chunks(lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t) {
    flag.raise_where(kernels().axpby(lists.operand(0, tensor, first), lists.operand(1, tensor, first), count, function));
  });
}

void multi_tensor_isnonfinite(TensorList tensors, const at::Tensor& found_inf) {
  const c10::Device device = found_inf.device();
  Flag flag(static_cast<float*>(check_scalar("found_inf", found_inf, device)));
  const Lists lists(device, {{"tensors", tensors}}, found_inf);
  for_chunks(lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t) {
    flag.raise_where(kernels().has_nonfinite(lists.operand(0, tensor, first), count));
  });
}

at::Tensor multi_tensor_l2norm(TensorList tensors, OptionalTensor inverse_scale, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCPU, tensors, {&inverse_scale, &found_inf});
  const float factor = value_of(check_scalar("inverse_scale", inverse_scale, device));
  Flag flag(check_scalar("found_inf", found_inf, device));
  const Lists lists(device, {{"tensors", tensors}}, found_inf);
  std::vector<float> sums(static_cast<std::size_t>(Plan(lists.counts()).chunks()));
  for_chunks(lists.counts(), [&](std::size_t tensor, std::int64_t first, std::int64_t count, std::int64_t chunk) {
    bool bad = false;
    sums[chunk] = kernels().sum_of_squares(lists.operand(0, tensor, first), count, &bad);
    flag.raise_where(bad);
  });
  at::Tensor norm = at::empty({}, at::device(device).dtype(at::kFloat));
  *static_cast<float*>(norm.mutable_data_ptr()) = std::sqrt(tree_sum(std::move(sums))) * factor;
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CPU, library) {
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
}

}  // namespace amp_wrapper::cpu
