// The launches of the kernels, for a compiler that knows nothing of CUDA's language. They return the first error.
#pragma once

#include "../common/functors.h"
#include "../common/step_lists.h"
#include "kernel_args.h"

namespace amp_wrapper::cuda {

template <int kLists>
using Slots = std::vector<TensorSlot<kLists>>;

cudaError_t launch_scale(const Slots<2>& slots, const Upload& upload, const float* scale, float* found_inf,
                         cudaStream_t stream);
cudaError_t launch_axpby(const Slots<2>& slots, const Upload& upload, const float* a, const float* b, float* found_inf,
                         cudaStream_t stream);
cudaError_t launch_nonfinite(const Slots<1>& slots, const Upload& upload, float* found_inf, cudaStream_t stream);
// `chunks` has room for a number of each chunk
cudaError_t launch_norm(const Slots<1>& slots, const Upload& upload, float* chunks, std::int64_t count,
                        const float* inverse_scale, float* norm, float* found_inf, cudaStream_t stream);

cudaError_t launch_prologue(const std::vector<ParameterSlot>& slots, const Upload& upload, const Decide& decide, Kind kind,
                            float* rows, float* decision, cudaStream_t stream);
cudaError_t launch_adam(const Slots<kAdamLists>& slots, const Upload& upload, bool amsgrad, const float* rows,
                        const float* decision, cudaStream_t stream);
cudaError_t launch_sgd(const Slots<kSgdLists>& slots, const Upload& upload, bool momentums, const float* rows,
                       const float* decision, cudaStream_t stream);

}  // namespace amp_wrapper::cuda
