// The launches of the kernels of an optimizer step, for a compiler that knows nothing of CUDA's language.
#pragma once

#include <cuda_runtime_api.h>

#include "step_kernel_args.h"

namespace amp_wrapper::cuda {

cudaError_t launch_prologue(const PrologueWork& work, cudaStream_t stream);
cudaError_t launch_adam(const Work<kAdamLists>& work, const float* decision, bool amsgrad, cudaStream_t stream);
cudaError_t launch_sgd(const Work<kSgdLists>& work, const float* decision, bool momentums, cudaStream_t stream);

}  // namespace amp_wrapper::cuda
