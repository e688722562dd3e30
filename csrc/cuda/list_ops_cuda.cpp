// The ops of the lists on a GPU; those of an optimizer step are in step_ops_cuda.cpp.

#include <torch/library.h>

#include "host.h"

namespace amp_wrapper::cuda {
namespace {

void multi_tensor_scale(TensorList sources, TensorList targets, OptionalTensor scale, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCUDA, sources, {&scale, &found_inf});
  const float* factor = check_scalar("scale", scale, device);
  float* flag = check_scalar("found_inf", found_inf, device);
  const Lists lists(device, {{"sources", sources}, {"targets", targets, true}}, found_inf);
  const c10::cuda::CUDAGuard guard(device);
  Tables tables(device);
  C10_CUDA_CHECK(launch_scale(slots_of<2>(lists), tables.upload(), factor, flag, stream_of(device)));
}

void multi_tensor_axpby(TensorList xs, TensorList ys, OptionalTensor a, OptionalTensor b, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCUDA, xs, {&a, &b, &found_inf});
  const float* factor_a = check_scalar("a", a, device);
  const float* factor_b = check_scalar("b", b, device);
  float* flag = check_scalar("found_inf", found_inf, device);
  const Lists lists(device, {{"xs", xs}, {"ys", ys, true}}, found_inf);
  const c10::cuda::CUDAGuard guard(device);
  Tables tables(device);
  C10_CUDA_CHECK(launch_axpby(slots_of<2>(lists), tables.upload(), factor_a, factor_b, flag, stream_of(device)));
}

void multi_tensor_isnonfinite(TensorList tensors, const at::Tensor& found_inf) {
  const c10::Device device = found_inf.device();
  auto* flag = static_cast<float*>(check_scalar("found_inf", found_inf, device));
  const Lists lists(device, {{"tensors", tensors}}, found_inf);
  const c10::cuda::CUDAGuard guard(device);
  Tables tables(device);
  C10_CUDA_CHECK(launch_nonfinite(slots_of<1>(lists), tables.upload(), flag, stream_of(device)));
}

at::Tensor multi_tensor_l2norm(TensorList tensors, OptionalTensor inverse_scale, OptionalTensor found_inf) {
  const c10::Device device = device_of(c10::kCUDA, tensors, {&inverse_scale, &found_inf});
  const float* factor = check_scalar("inverse_scale", inverse_scale, device);
  float* flag = check_scalar("found_inf", found_inf, device);
  const Lists lists(device, {{"tensors", tensors}}, found_inf);
  const c10::cuda::CUDAGuard guard(device);
  const auto options = at::device(device).dtype(at::kFloat);
  const std::int64_t count = Plan(lists.counts()).chunks();
  const at::Tensor chunks = at::empty({count}, options);
  at::Tensor norm = at::empty({}, options);
  Tables tables(device);
  C10_CUDA_CHECK(launch_norm(slots_of<1>(lists), tables.upload(), static_cast<float*>(chunks.mutable_data_ptr()), count, factor,
                             static_cast<float*>(norm.mutable_data_ptr()), flag, stream_of(device)));
  return norm;
}

}  // namespace

TORCH_LIBRARY_IMPL(amp_wrapper, CUDA, library) {
  library.impl("multi_tensor_scale", multi_tensor_scale);
  library.impl("multi_tensor_axpby", multi_tensor_axpby);
  library.impl("multi_tensor_isnonfinite", multi_tensor_isnonfinite);
  library.impl("multi_tensor_l2norm", multi_tensor_l2norm);
}

}  // namespace amp_wrapper::cuda
