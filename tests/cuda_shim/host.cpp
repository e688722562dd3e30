// The host code of the CUDA ops on a CPU: csrc/cuda/ops.cpp as it is, kernels.cu with its launches turned into calls of
// shim::launch (launches.inl, which the test writes), and stand-ins for the headers of CUDA in include/.
//
// The ops are registered for the CPU, in a process where nothing else is.

#include <ATen/Functions.h>
#include <torch/library.h>

#include "../../csrc/common/lists.h"
#include "shim.h"

#include "../../csrc/cuda/launches.inl"

// behind torch's headers, which have these words too
#define kCUDA kCPU
#define CUDA CPU
#include "../../csrc/cuda/ops.cpp"
