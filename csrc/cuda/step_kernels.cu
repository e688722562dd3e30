// Starts the kernels of an optimizer step. Knows nothing of torch, so that nvcc is done soon.

#include <cuda_runtime.h>

#include "step_kernels.cuh"
#include "step_launch.h"

namespace amp_wrapper::cuda {

cudaError_t launch_prologue(const PrologueWork& work, cudaStream_t stream) {
  // one block at least: it decides, whether or not there are parameters
  const int blocks = work.parameters == 0 ? 1 : (work.parameters + kPrologueThreads - 1) / kPrologueThreads;
  prologue_kernel<<<static_cast<unsigned>(blocks), kPrologueThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t launch_adam(const Work<kAdamLists>& work, const float* decision, bool amsgrad, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(work.chunks);
  if (amsgrad) {
    adam_kernel<true><<<blocks, kThreads, 0, stream>>>(work, decision);
  } else {
    adam_kernel<false><<<blocks, kThreads, 0, stream>>>(work, decision);
  }
  return cudaGetLastError();
}

cudaError_t launch_sgd(const Work<kSgdLists>& work, const float* decision, bool momentums, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(work.chunks);
  if (momentums) {
    sgd_kernel<true><<<blocks, kThreads, 0, stream>>>(work, decision);
  } else {
    sgd_kernel<false><<<blocks, kThreads, 0, stream>>>(work, decision);
  }
  return cudaGetLastError();
}

}  // namespace amp_wrapper::cuda
