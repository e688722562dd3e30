// All ops as a library for a CPU: those of csrc/cpu in the namespace amp_wrapper, and those of csrc/cuda in amp_shim. Of
// csrc/cuda the host code is as it is, the launches of the kernels are turned into calls of shim::launch (launches.inl, which
// the test writes), and the headers of CUDA are those in include/.

#include <ATen/Functions.h>
#include <torch/library.h>

// at once, since torch's headers take most of the time
#include "../../csrc/common/lists.cpp"
#include "../../csrc/common/step_arguments.cpp"
#include "../../csrc/cpu/list_ops_cpu.cpp"
#include "../../csrc/cpu/step_ops_cpu.cpp"
#include "../../csrc/library.cpp"
#include "shim.h"

#include "../../csrc/cuda/launches.inl"

TORCH_LIBRARY(amp_shim, library) {
  for (const char* schema : {kScale, kAxpby, kIsNonfinite, kL2norm, kAdam, kSgd}) library.def(schema);
}

// behind torch's headers, which have these words too
#define kCUDA kCPU
#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(name_space, key, library) _TORCH_LIBRARY_IMPL(amp_shim, CPU, library, C10_UID)
// pinned memory needs a device
#define pinned_memory(is_pinned) pinned_memory(shim::pinned(is_pinned))
#include "../../csrc/cuda/list_ops_cuda.cpp"
#include "../../csrc/cuda/step_ops_cuda.cpp"

// For Python's ctypes.
extern "C" {
void set_capture(int captures) { shim::captures = captures != 0; }
// Launches since it was asked last.
int count_launches() { return std::exchange(shim::launches, 0); }
// Tables since it was asked last.
int count_tables() { return std::exchange(shim::tables, 0); }
}
