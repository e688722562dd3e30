// What a launch is handed by value. Read by nvcc and by g++.
#pragma once

#include <cstdint>

namespace amp_wrapper::cuda {

// CUDA 13 passes 32,764 bytes everywhere; 4,096 are left to older toolkits.
#if defined(CUDART_VERSION) && CUDART_VERSION < 13000
constexpr int kArgumentBytes = 4096;
#else
constexpr int kArgumentBytes = 32764;
#endif
// for the other arguments of a kernel, and alignment
constexpr int kReserved = 128;

// A launch of planner.h for tensors in kLists lists.
template <int kLists>
struct Work {
  static constexpr int kMost = (kArgumentBytes - kReserved) / (kLists * (8 + 1) + 8 + 4);

  void* data[kLists][kMost];
  std::int64_t counts[kMost];
  std::int32_t starts[kMost + 1];
  std::int32_t entries;
  std::uint8_t types[kLists][kMost];
};

// The chunks of each of some tensors that stand one after the other.
struct Segments {
  static constexpr int kMost = (kArgumentBytes - kReserved) / 4 - 2;

  std::int32_t starts[kMost + 1];
  std::int32_t count;
};

}  // namespace amp_wrapper::cuda
