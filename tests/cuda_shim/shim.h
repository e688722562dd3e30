// CUDA's words on a CPU: one thread of the operating system for each thread of a block, one block after the other, in an order
// by chance.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#define __global__ inline
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)
// blocks run one after the other, so one place is enough
#define __shared__ static

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace shim {

constexpr int kThreads = 256;

struct Index {
  unsigned x = 0;
};

// Barriers of a block, of its warps, and of their halves.
struct Block {
  std::barrier<> all{kThreads};
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<std::unique_ptr<std::barrier<>>> halves;
  // what a thread shows to the others
  std::uint64_t shown[kThreads] = {};
  int votes[kThreads] = {};

  Block() {
    for (int i = 0; i < kThreads / 32; ++i) warps.push_back(std::make_unique<std::barrier<>>(32));
    for (int i = 0; i < kThreads / 16; ++i) halves.push_back(std::make_unique<std::barrier<>>(16));
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

inline void __syncwarp(unsigned mask) {
  if (mask == 0xffffffffu) {
    shim::block().warps[threadIdx.x / 32]->arrive_and_wait();
  } else {
    shim::block().halves[threadIdx.x / 16]->arrive_and_wait();
  }
}

inline int __syncthreads_or(int vote) {
  shim::block().votes[threadIdx.x] = vote;
  __syncthreads();
  int result = 0;
  for (const int one : shim::block().votes) result |= one;
  __syncthreads();
  return result;
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
  shim::block().votes[threadIdx.x] = vote;
  __syncwarp(mask);
  unsigned result = 0;
  for (unsigned i = 0; i < 32; ++i) result |= (shim::block().votes[threadIdx.x / 32 * 32 + i] ? 1u : 0u) << i;
  __syncwarp(mask);
  return result;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int apart) {
  static_assert(sizeof(T) <= 8);
  std::memcpy(&shim::block().shown[threadIdx.x], &value, sizeof(T));
  __syncwarp(mask);
  T other;
  std::memcpy(&other, &shim::block().shown[threadIdx.x ^ static_cast<unsigned>(apart)], sizeof(T));
  __syncwarp(mask);
  return other;
}

template <typename T>
inline T __ldcs(const T* place) {
  return *place;
}

inline int atomicMax(int* place, int value) {
  std::atomic_ref<int> shared(*place);
  int old = shared.load();
  while (old < value && !shared.compare_exchange_weak(old, value)) {
  }
  return old;
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
  static std::mt19937 chance;
  ++launches;
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), chance);
  std::vector<std::thread> team;
  for (int i = 0; i < threads; ++i) {
    team.emplace_back([&, i] {
      threadIdx.x = static_cast<unsigned>(i);
      for (const unsigned b : order) {
        blockIdx.x = b;
        kernel();
        if (threads == kThreads) __syncthreads();
      }
    });
  }
  for (std::thread& thread : team) thread.join();
}

}  // namespace shim
