// The ops of the lists on a GPU; those of an optimizer step are in step_ops.cpp.

#include <torch/library.h>

#include "host.h"
#include "launch.h"

namespace amp_wrapper::cuda {
namespace {

const float* value_of(const std::optional<at::Tensor>& scalar) {
  return scalar.has_value() ? static_cast<const float*>(scalar->const_data_ptr()) : nullptr;
}

float* flag_of(const std::optional<at::Tensor>& flag) {
  return flag.has_value() ? static_cast<float*>(flag->mutable_data_ptr()) : nullptr;
}

void multi_tensor_scale(at::TensorList sources, at::TensorList targets, const std::optional<at::Tensor>& scale,
                        const std::optional<at::Tensor>& found_inf) {
  const Flat flat = check_call({{"sources", sources}, {"targets", targets, true, false}}, c10::kCUDA,
                               {{"scale", scale}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  launch_all<2>(flat, device, [&](const auto& work, auto) {
    return launch_scale(work, value_of(scale), flag_of(found_inf), stream_of(device));
  });
  flat.finish();
}

void multi_tensor_axpby(at::TensorList xs, at::TensorList ys, const std::optional<at::Tensor>& a,
                        const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& found_inf) {
  const at::TensorList targets = ys;
  const bool check_x = true;
  const bool check_y = false;
  const Flat flat = check_call({{"xs", xs}, {"ys", ys}, {"targets", targets, true, false}}, c10::kCUDA,
                               {{"a", a}, {"b", b}, {"found_inf", found_inf, true}});
  if (flat.size() == 0) return;
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  const int checked = (check_x ? 1 : 0) | (check_y ? 2 : 0);
  launch_all<3>(flat, device, [&](const auto& work, auto) {
    return launch_axpby(work, value_of(a), value_of(b), flag_of(found_inf), checked, stream_of(device));
  });
  flat.finish();
}

void multi_tensor_isnonfinite(at::TensorList tensors, const at::Tensor& found_inf) {
  const std::optional<at::Tensor> flag = found_inf;
  const Flat flat = check_call({{"tensors", tensors}}, c10::kCUDA, {{"found_inf", flag, true}});
  if (flat.size() == 0) return;
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  launch_all<1>(flat, device,
                [&](const auto& work, auto) { return launch_largest(work, nullptr, flag_of(found_inf), stream_of(device)); });
}

// The sums of squares of the chunks of a list become its norm, and those of the tensors where `each` has room for them.
void finish_l2norm(const std::vector<std::int64_t>& counts, std::size_t size, const at::Tensor& chunks,
                   const std::optional<at::Tensor>& factor, const at::Tensor& total, float* each) {
  const c10::Device device = total.device();
  const cudaStream_t stream = stream_of(device);
  const at::Tensor sums = at::empty({static_cast<std::int64_t>(size)}, chunks.options());
  auto* chunk_data = static_cast<float*>(chunks.mutable_data_ptr());
  auto* sum_data = static_cast<float*>(sums.mutable_data_ptr());
  Tables tables(device);
  for_segments(
      counts,
      [&](const Segments& segments, std::int64_t base, std::int64_t first) {
        C10_CUDA_CHECK(launch_join_sums(segments, chunk_data + base, sum_data + first, stream));
      },
      tables.upload());
  C10_CUDA_CHECK(
      launch_l2norm(sum_data, sums.numel(), value_of(factor), static_cast<float*>(total.mutable_data_ptr()), each, stream));
}

void launch_sums(const Flat& flat, c10::Device device, float* chunks, float* found_inf) {
  launch_all<1>(flat, device, [&](const auto& work, std::int64_t before) {
    return launch_sum_of_squares(work, chunks + before, found_inf, stream_of(device));
  });
}

at::Tensor multi_tensor_l2norm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                               const std::optional<at::Tensor>& found_inf) {
  const bool per_tensor = false;
  const Flat flat =
      check_call({{"tensors", tensors}}, c10::kCUDA, {{"inverse_scale", inverse_scale}, {"found_inf", found_inf, true}});
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  auto result = new_norms(tensors, device, per_tensor);
  const at::Tensor chunks = at::empty({all_chunks(flat.counts())}, at::TensorOptions().dtype(at::kFloat).device(device));
  launch_sums(flat, device, static_cast<float*>(chunks.mutable_data_ptr()), flag_of(found_inf));
  auto* each = per_tensor ? static_cast<float*>(std::get<1>(result).mutable_data_ptr()) : nullptr;
  finish_l2norm(flat.counts(), tensors.size(), chunks, inverse_scale, std::get<0>(result), each);
  return std::get<0>(result);
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) {
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
}

}  // namespace amp_wrapper::cuda
