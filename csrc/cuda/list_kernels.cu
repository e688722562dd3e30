// Starts the kernels of the ops of lists. Knows nothing of torch, so that nvcc is done soon.

#include <cuda_runtime.h>

#include "launch.h"
#include "list_kernels.cuh"

namespace amp_wrapper::cuda {

cudaError_t launch_scale(const Slots<2>& slots, const Upload& upload, const float* scale, float* found_inf,
                         cudaStream_t stream) {
  return for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    scale_kernel<<<blocks, kThreads, 0, stream>>>(work, scale, found_inf);
    return cudaGetLastError();
  });
}

cudaError_t launch_axpby(const Slots<2>& slots, const Upload& upload, const float* a, const float* b, float* found_inf,
                         cudaStream_t stream) {
  return for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    axpby_kernel<<<blocks, kThreads, 0, stream>>>(work, a, b, found_inf);
    return cudaGetLastError();
  });
}

cudaError_t launch_nonfinite(const Slots<1>& slots, const Upload& upload, float* found_inf, cudaStream_t stream) {
  return for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    nonfinite_kernel<<<blocks, kThreads, 0, stream>>>(work, found_inf);
    return cudaGetLastError();
  });
}

cudaError_t launch_norm(const Slots<1>& slots, const Upload& upload, float* chunks, std::int64_t count,
                        const float* inverse_scale, float* norm, float* found_inf, cudaStream_t stream) {
  const cudaError_t error = for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    sum_of_squares_kernel<<<blocks, kThreads, 0, stream>>>(work, chunks, found_inf);
    return cudaGetLastError();
  });
  if (error != cudaError_t{}) return error;
  norm_kernel<<<1, kThreads, 0, stream>>>(chunks, count, inverse_scale, norm);
  return cudaGetLastError();
}

}  // namespace amp_wrapper::cuda
