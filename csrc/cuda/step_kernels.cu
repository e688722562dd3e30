// Starts the kernels of an optimizer step. Knows nothing of torch, so that nvcc is done soon.

#include <cuda_runtime.h>

#include "launch.h"
#include "step_kernels.cuh"

namespace amp_wrapper::cuda {

cudaError_t launch_prologue(const std::vector<ParameterSlot>& slots, const Upload& upload, const Decide& decide, Kind kind,
                            float* rows, float* decision, cudaStream_t stream) {
  const int parameters = static_cast<int>(slots.size());
  const auto launch = [&](const auto& work, unsigned blocks) {
    prologue_kernel<<<blocks, kPrologueThreads, 0, stream>>>(work, decide, kind, rows, decision, parameters);
    return cudaGetLastError();
  };
  // it decides, whether or not there are parameters
  if (parameters == 0) return launch(Work<ParameterSlot, kFewBytes>{}, 1);
  return for_launches(slots, upload, launch);
}

cudaError_t launch_adam(const Slots<kAdamLists>& slots, const Upload& upload, bool amsgrad, const float* rows,
                        const float* decision, cudaStream_t stream) {
  return for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    if (amsgrad) {
      adam_kernel<true><<<blocks, kThreads, 0, stream>>>(work, rows, decision);
    } else {
      adam_kernel<false><<<blocks, kThreads, 0, stream>>>(work, rows, decision);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_sgd(const Slots<kSgdLists>& slots, const Upload& upload, bool momentums, const float* rows,
                       const float* decision, cudaStream_t stream) {
  return for_launches(slots, upload, [&](const auto& work, unsigned blocks) {
    if (momentums) {
      sgd_kernel<true><<<blocks, kThreads, 0, stream>>>(work, rows, decision);
    } else {
      sgd_kernel<false><<<blocks, kThreads, 0, stream>>>(work, rows, decision);
    }
    return cudaGetLastError();
  });
}

}  // namespace amp_wrapper::cuda
