// CUDA's words on a CPU: one thread of the operating system for each thread of a block, one block after the other.
#pragma once

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#define __global__ inline
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
// blocks run one after the other, so one place is enough
#define __shared__ static

namespace shim {

constexpr int kThreads = 256;

struct Index {
  unsigned x = 0;
};

struct Block {
  std::barrier<> all{kThreads};
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  // what a thread shows to the others
  std::uint64_t shown[kThreads] = {};
  int votes[kThreads] = {};

  Block() {
    for (int i = 0; i < kThreads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
  }
};

inline Block& block() {
  static Block one;
  return one;
}

}  // namespace shim

inline thread_local shim::Index threadIdx;
inline thread_local shim::Index blockIdx;

inline void __syncthreads() { shim::block().all.arrive_and_wait(); }

inline int __syncthreads_or(int vote) {
  shim::block().votes[threadIdx.x] = vote;
  __syncthreads();
  int result = 0;
  for (const int one : shim::block().votes) result |= one;
  __syncthreads();
  return result;
}

template <typename T>
inline T __shfl_xor_sync(unsigned, T value, int apart) {
  static_assert(sizeof(T) <= 8);
  std::barrier<>& warp = *shim::block().warps[threadIdx.x / 32];
  std::memcpy(&shim::block().shown[threadIdx.x], &value, sizeof(T));
  warp.arrive_and_wait();
  T other;
  std::memcpy(&other, &shim::block().shown[threadIdx.x ^ static_cast<unsigned>(apart)], sizeof(T));
  warp.arrive_and_wait();
  return other;
}

inline int atomicMax(int* place, int value) {
  std::atomic_ref<int> shared(*place);
  int old = shared.load();
  while (old < value && !shared.compare_exchange_weak(old, value)) {
  }
  return old;
}

template <typename T>
inline T atomicAdd(T* place, T value) {
  return std::atomic_ref<T>(*place).fetch_add(value, std::memory_order_relaxed);
}

namespace shim {

inline int launches = 0;
inline int tables = 0;

// Stands in the place of a wish for pinned memory, which tables alone have.
inline bool pinned(bool wanted) {
  tables += wanted ? 1 : 0;
  return false;
}

// A launch: `kernel` is called by every thread of every block.
template <typename F>
void launch(unsigned blocks, int threads, F kernel) {
  ++launches;
  std::vector<std::thread> team;
  for (int i = 0; i < threads; ++i) {
    team.emplace_back([=] {
      threadIdx.x = static_cast<unsigned>(i);
      for (unsigned b = 0; b < blocks; ++b) {
        blockIdx.x = b;
        kernel();
        if (threads == kThreads) __syncthreads();
      }
    });
  }
  for (std::thread& thread : team) thread.join();
}

}  // namespace shim
