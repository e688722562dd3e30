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

void multi_tensor_axpby(at::TensorList xs, at::TensorList ys, at::TensorList targets, const std::optional<at::Tensor>& a,
                        const std::optional<at::Tensor>& b, const std::optional<at::Tensor>& found_inf, bool check_x,
                        bool check_y) {
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

void multi_tensor_copy(at::TensorList sources, at::TensorList targets) {
  const Flat flat({{"sources", sources}, {"targets", targets, true, false, &sources}}, c10::kCUDA);
  if (flat.size() == 0) return;
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  launch_all<2>(flat, device, [&](const auto& work, auto) { return launch_copy(work, stream_of(device)); });
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

void multi_tensor_exponents(at::TensorList tensors, const at::Tensor& counts, const at::Tensor& largest) {
  const Flat flat = check_exponents(tensors, counts, largest, c10::kCUDA);
  if (flat.size() == 0) return;
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  auto* rows = static_cast<std::int64_t*>(counts.mutable_data_ptr());
  auto* most = static_cast<float*>(largest.mutable_data_ptr());
  launch_all<3>(
      flat, device,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == 1) return rows + tensor * kExponents;
        if (list == 2) return most + tensor;
        *type = flat.type(0, tensor);
        return at_element(flat, 0, tensor, element);
      },
      [&](const auto& work, auto) { return launch_exponents(work, stream_of(device)); });
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

std::tuple<at::Tensor, at::Tensor> multi_tensor_l2norm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                                                       const std::optional<at::Tensor>& found_inf, bool per_tensor) {
  const Flat flat =
      check_call({{"tensors", tensors}}, c10::kCUDA, {{"inverse_scale", inverse_scale}, {"found_inf", found_inf, true}});
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  auto result = new_norms(tensors, device, per_tensor);
  const at::Tensor chunks = at::empty({all_chunks(flat.counts())}, at::TensorOptions().dtype(at::kFloat).device(device));
  launch_sums(flat, device, static_cast<float*>(chunks.mutable_data_ptr()), flag_of(found_inf));
  auto* each = per_tensor ? static_cast<float*>(std::get<1>(result).mutable_data_ptr()) : nullptr;
  finish_l2norm(flat.counts(), tensors.size(), chunks, inverse_scale, std::get<0>(result), each);
  return result;
}

at::Tensor multi_tensor_scale_l2norm(at::TensorList sources, at::TensorList targets, const std::optional<at::Tensor>& scale,
                                     const std::optional<at::Tensor>& found_inf) {
  const Flat flat = check_call({{"sources", sources}, {"targets", targets, true, false}}, c10::kCUDA,
                               {{"scale", scale}, {"found_inf", found_inf, true}});
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor norm = std::get<0>(new_norms(sources, device, false));
  const at::Tensor chunks = at::empty({all_chunks(flat.counts())}, at::TensorOptions().dtype(at::kFloat).device(device));
  auto* chunk_data = static_cast<float*>(chunks.mutable_data_ptr());
  if (flat.is_direct()) {
    launch_all<2>(flat, device, [&](const auto& work, std::int64_t before) {
      return launch_scale_and_sum(work, value_of(scale), chunk_data + before, flag_of(found_inf), stream_of(device));
    });
  } else {
    // a temporary has its elements in another order than its source, and the sum has that of the source
    const Flat as_they_lie({{"sources", sources}}, c10::kCUDA);
    launch_sums(as_they_lie, device, chunk_data, flag_of(found_inf));
    launch_all<2>(flat, device,
                  [&](const auto& work, auto) { return launch_scale(work, value_of(scale), nullptr, stream_of(device)); });
    flat.finish();
  }
  finish_l2norm(flat.counts(), sources.size(), chunks, scale, norm, nullptr);
  return norm;
}

std::tuple<at::Tensor, at::Tensor> multi_tensor_maxnorm(at::TensorList tensors, const std::optional<at::Tensor>& inverse_scale,
                                                        const std::optional<at::Tensor>& found_inf, bool per_tensor) {
  const Flat flat =
      check_call({{"tensors", tensors}}, c10::kCUDA, {{"inverse_scale", inverse_scale}, {"found_inf", found_inf, true}});
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = stream_of(device);
  auto result = new_norms(tensors, device, per_tensor);
  const auto options = at::TensorOptions().dtype(at::kInt).device(device);
  const at::Tensor chunks = at::empty({all_chunks(flat.counts())}, options);
  const at::Tensor most = at::empty({static_cast<std::int64_t>(tensors.size())}, options);
  auto* chunk_data = static_cast<std::int32_t*>(chunks.mutable_data_ptr());
  auto* most_data = static_cast<std::int32_t*>(most.mutable_data_ptr());
  launch_all<1>(flat, device, [&](const auto& work, std::int64_t before) {
    return launch_largest(work, chunk_data + before, nullptr, stream);
  });
  Tables tables(device);
  for_segments(
      flat.counts(),
      [&](const Segments& segments, std::int64_t base, std::int64_t first) {
        C10_CUDA_CHECK(launch_join_largest(segments, chunk_data + base, most_data + first, stream));
      },
      tables.upload());
  auto* each = per_tensor ? static_cast<float*>(std::get<1>(result).mutable_data_ptr()) : nullptr;
  C10_CUDA_CHECK(launch_maxnorm(most_data, most.numel(), value_of(inverse_scale),
                                static_cast<float*>(std::get<0>(result).mutable_data_ptr()), each, flag_of(found_inf), stream));
  return result;
}

at::Tensor multi_tensor_refresh(at::TensorList weights, at::TensorList masters) {
  check_refresh_types(weights, masters);
  const Flat flat({{"weights", weights}, {"masters", masters, true, true}}, c10::kCUDA);
  const c10::Device device = flat.device();
  const c10::cuda::CUDAGuard guard(device);
  at::Tensor edited =
      at::zeros({static_cast<std::int64_t>(weights.size())}, at::TensorOptions().dtype(at::kBool).device(device));
  if (flat.size() == 0) return edited;
  auto* flags = static_cast<char*>(edited.mutable_data_ptr());
  launch_all<3>(
      flat, device,
      [&](int list, std::int64_t tensor, std::int64_t element, Type* type) -> void* {
        if (list == 2) return flags + tensor;
        *type = flat.type(list, tensor);
        return at_element(flat, list, tensor, element);
      },
      [&](const auto& work, auto) { return launch_refresh(work, stream_of(device)); });
  flat.finish();
  return edited;
}

void update_scale(const at::Tensor& scale, const at::Tensor& growth_tracker, const at::Tensor& hysteresis_tracker,
                  const at::Tensor& found_inf, double growth_factor, double backoff_factor, std::int64_t growth_interval,
                  std::int64_t hysteresis, std::optional<double> min_scale, std::optional<double> max_scale) {
  const ScaleUpdate rule = scale_rule(growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale);
  check_scale_state(scale, growth_tracker, hysteresis_tracker, found_inf);
  const c10::cuda::CUDAGuard guard(scale.device());
  C10_CUDA_CHECK(launch_update_scale(rule, static_cast<float*>(scale.mutable_data_ptr()),
                                     static_cast<std::int32_t*>(growth_tracker.mutable_data_ptr()),
                                     static_cast<std::int32_t*>(hysteresis_tracker.mutable_data_ptr()),
                                     static_cast<const float*>(found_inf.const_data_ptr()), stream_of(scale.device())));
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) {
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_copy", multi_tensor_copy);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_exponents", multi_tensor_exponents);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
  library.impl("multi_tensor_scale_l2norm", multi_tensor_scale_l2norm);
  library.impl("multi_tensor_maxnorm", multi_tensor_maxnorm);
  library.impl("multi_tensor_refresh", multi_tensor_refresh);
  library.impl("update_scale", update_scale);
}

}  // namespace amp_wrapper::cuda
