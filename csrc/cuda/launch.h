// The launches of the kernels, for a compiler that knows nothing of CUDA's language.
#pragma once

#include <cuda_runtime_api.h>

#include "../common/functors.h"
#include "kernel_args.h"

namespace amp_wrapper::cuda {

cudaError_t launch_scale(const Work<2>& work, const float* scale, float* found_inf, cudaStream_t stream);
cudaError_t launch_copy(const Work<2>& work, cudaStream_t stream);
cudaError_t launch_axpby(const Work<3>& work, const float* a, const float* b, float* found_inf, int checked,
                         cudaStream_t stream);
cudaError_t launch_refresh(const Work<3>& work, cudaStream_t stream);
cudaError_t launch_exponents(const Work<3>& work, cudaStream_t stream);
cudaError_t launch_sum_of_squares(const Work<1>& work, float* chunks, float* found_inf, cudaStream_t stream);
cudaError_t launch_scale_and_sum(const Work<2>& work, const float* scale, float* chunks, float* found_inf, cudaStream_t stream);
cudaError_t launch_largest(const Work<1>& work, std::int32_t* chunks, float* found_inf, cudaStream_t stream);
cudaError_t launch_join_sums(const Segments& segments, float* chunks, float* tensors, cudaStream_t stream);
cudaError_t launch_join_largest(const Segments& segments, std::int32_t* chunks, std::int32_t* tensors, cudaStream_t stream);
cudaError_t launch_l2norm(float* tensors, std::int64_t count, const float* inverse_scale, float* total, float* each,
                          cudaStream_t stream);
cudaError_t launch_maxnorm(std::int32_t* tensors, std::int64_t count, const float* inverse_scale, float* total, float* each,
                           float* found_inf, cudaStream_t stream);
cudaError_t launch_update_scale(const ScaleUpdate& rule, float* scale, std::int32_t* growth_tracker,
                                std::int32_t* hysteresis_tracker, const float* found_inf, cudaStream_t stream);

}  // namespace amp_wrapper::cuda
