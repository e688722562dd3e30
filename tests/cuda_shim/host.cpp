// The host code of the CUDA ops on a CPU: csrc/cuda/ops.cpp and step_ops.cpp as they are, kernels.cu and step_kernels.cu with
// their launches turned into calls of shim::launch (launches.inl, which the test writes), and stand-ins for the headers of CUDA
// in include/.
//
// The ops are registered for the CPU, in a process where nothing else is.

#include <ATen/Functions.h>
#include <torch/library.h>

// at once, since torch's headers take most of the time
#include "../../csrc/common/lists.cpp"
#include "../../csrc/common/step_checks.cpp"
#include "shim.h"

#include "../../csrc/cuda/launches.inl"

// behind torch's headers, which have these words too
#define kCUDA kCPU
#define CUDA CPU
// pinned memory needs a device
#define pinned_memory(is_pinned) pinned_memory(shim::pinned(is_pinned))
#include "../../csrc/cuda/ops.cpp"
#include "../../csrc/cuda/step_ops.cpp"

// For Python's ctypes.
extern "C" {
void set_capture(int captures) { shim::captures = captures != 0; }
// Launches since it was asked last.
int count_launches() { return std::exchange(shim::launches, 0); }
// Tables since it was asked last.
int count_tables() { return std::exchange(shim::tables, 0); }
}
