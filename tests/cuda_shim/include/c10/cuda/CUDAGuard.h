#pragma once

#include <c10/core/Device.h>

namespace shim {
// Devices that are guarded now: every launch wants one.
inline int guards = 0;
}  // namespace shim

namespace c10::cuda {

struct CUDAGuard {
  explicit CUDAGuard(c10::Device) { ++shim::guards; }
  ~CUDAGuard() { --shim::guards; }
};

}  // namespace c10::cuda
