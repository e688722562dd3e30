// Starts the kernels. Knows nothing of torch, so that nvcc is done soon.

#include <cuda_runtime.h>

#include "elementwise_kernels.cuh"
#include "exponents_kernel.cuh"
#include "launch.h"
#include "norm_kernels.cuh"

namespace amp_wrapper::cuda {
namespace {

template <int kLists>
unsigned blocks_of(const Work<kLists>& work) {
  return static_cast<unsigned>(work.chunks);
}

}  // namespace

cudaError_t launch_scale(const Work<2>& work, const float* scale, float* found_inf, cudaStream_t stream) {
  scale_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work, scale, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_copy(const Work<2>& work, cudaStream_t stream) {
  copy_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t launch_axpby(const Work<3>& work, const float* a, const float* b, float* found_inf, int checked,
                         cudaStream_t stream) {
  axpby_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work, a, b, found_inf, checked);
  return cudaGetLastError();
}

cudaError_t launch_refresh(const Work<3>& work, cudaStream_t stream) {
  refresh_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t launch_exponents(const Work<3>& work, cudaStream_t stream) {
  exponents_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t launch_sum_of_squares(const Work<1>& work, float* chunks, float* found_inf, cudaStream_t stream) {
  sum_of_squares_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work, chunks, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_scale_and_sum(const Work<2>& work, const float* scale, float* chunks, float* found_inf,
                                 cudaStream_t stream) {
  scale_and_sum_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work, scale, chunks, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_largest(const Work<1>& work, std::int32_t* chunks, float* found_inf, cudaStream_t stream) {
  largest_kernel<<<blocks_of(work), kThreads, 0, stream>>>(work, chunks, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_join_sums(const Segments& segments, float* chunks, float* tensors, cudaStream_t stream) {
  join_tensors_kernel<Sum><<<static_cast<unsigned>(segments.count), kThreads, 0, stream>>>(segments, chunks, tensors);
  return cudaGetLastError();
}

cudaError_t launch_join_largest(const Segments& segments, std::int32_t* chunks, std::int32_t* tensors, cudaStream_t stream) {
  join_tensors_kernel<Largest><<<static_cast<unsigned>(segments.count), kThreads, 0, stream>>>(segments, chunks, tensors);
  return cudaGetLastError();
}

cudaError_t launch_l2norm(float* tensors, std::int64_t count, const float* inverse_scale, float* total, float* each,
                          cudaStream_t stream) {
  join_norms_kernel<Sum><<<1, kThreads, 0, stream>>>(tensors, count, inverse_scale, total, each, nullptr);
  return cudaGetLastError();
}

cudaError_t launch_maxnorm(std::int32_t* tensors, std::int64_t count, const float* inverse_scale, float* total, float* each,
                           float* found_inf, cudaStream_t stream) {
  join_norms_kernel<Largest><<<1, kThreads, 0, stream>>>(tensors, count, inverse_scale, total, each, found_inf);
  return cudaGetLastError();
}

cudaError_t launch_update_scale(const ScaleUpdate& rule, float* scale, std::int32_t* growth_tracker,
                                std::int32_t* hysteresis_tracker, const float* found_inf, cudaStream_t stream) {
  update_scale_kernel<<<1, 1, 0, stream>>>(rule, scale, growth_tracker, hysteresis_tracker, found_inf);
  return cudaGetLastError();
}

}  // namespace amp_wrapper::cuda
