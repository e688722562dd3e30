#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

namespace shim {
inline int a_stream = 0;
}  // namespace shim

namespace c10::cuda {

struct CUDAStream {
  cudaStream_t stream() const { return &shim::a_stream; }
};

inline CUDAStream getCurrentCUDAStream(c10::DeviceIndex) { return {}; }

}  // namespace c10::cuda
