// The CUDA kernels of the ops of lists: scale, axpby, the flag, and the norm in the order of planner.h.
#pragma once

#include "device.cuh"

namespace amp_wrapper::cuda {

// Rows that a thread has under way, so that the memory is busy while it waits.
constexpr int kAtOnce = 4;

// Elements that a block moves at once.
constexpr int kStride = kTeams * kLanes;

// target = source * scale, and the flag for sources that are not finite. The scale may be missing, and the flag too.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Work<TensorSlot<2>, kBytes> work, const float* __restrict__ scale, float* found_inf) {
  __shared__ Chunk<2> chunk;
  find_chunk(chunk, work);
  const Scale function{scale == nullptr ? 1.0f : *scale};
  bool bad = false;
#pragma unroll 1
  for (int row = team_of_block() * kLanes; row < chunk.count; row += kAtOnce * kStride) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) raw[u] = load<true>(chunk, 0, row + u * kStride);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      Floats x = unpack(raw[u], chunk.operands[0].type);
#pragma unroll
      for (float& value : x.values) {
        bad = bad || is_nonfinite(value);
        value = function(value);
      }
      store(chunk, 1, row + u * kStride, pack(x, chunk.operands[1].type));
    }
  }
  raise_flag(bad, found_inf);
}

// y = x * a + y * b, and the flag for an x that is not finite.
template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(const __grid_constant__ Work<TensorSlot<2>, kBytes> work, const float* __restrict__ a,
                 const float* __restrict__ b, float* found_inf) {
  // of two lists
  constexpr int kPairs = kAtOnce / 2;
  __shared__ Chunk<2> chunk;
  find_chunk(chunk, work);
  const Axpby function{a == nullptr ? 1.0f : *a, b == nullptr ? 1.0f : *b};
  bool bad = false;
#pragma unroll 1
  for (int row = team_of_block() * kLanes; row < chunk.count; row += kPairs * kStride) {
    Raw raw_x[kPairs];
    Raw raw_y[kPairs];
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      raw_x[u] = load<true>(chunk, 0, row + u * kStride);
      raw_y[u] = load<false>(chunk, 1, row + u * kStride);
    }
#pragma unroll
    for (int u = 0; u < kPairs; ++u) {
      const Floats x = unpack(raw_x[u], chunk.operands[0].type);
      Floats y = unpack(raw_y[u], chunk.operands[1].type);
#pragma unroll
      for (int i = 0; i < kFour; ++i) {
        bad = bad || is_nonfinite(x.values[i]);
        y.values[i] = function(x.values[i], y.values[i]);
      }
      store(chunk, 1, row + u * kStride, pack(y, chunk.operands[1].type));
    }
  }
  raise_flag(bad, found_inf);
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    nonfinite_kernel(const __grid_constant__ Work<TensorSlot<1>, kBytes> work, float* found_inf) {
  __shared__ Chunk<1> chunk;
  find_chunk(chunk, work);
  bool bad = false;
#pragma unroll 1
  for (int row = team_of_block() * kLanes; row < chunk.count; row += kAtOnce * kStride) {
    Raw raw[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) raw[u] = load<false>(chunk, 0, row + u * kStride);
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const Floats x = unpack(raw[u], chunk.operands[0].type);
#pragma unroll
      for (const float value : x.values) bad = bad || is_nonfinite(value);
    }
  }
  raise_flag(bad, found_inf);
}

// The values of threads that are `first`, 2 * `first`, ... apart, up to half a warp, added.
__device__ inline float sum_of_warp(float value, int first) {
#pragma unroll
  for (int apart = first; apart < 32; apart *= 2) value += __shfl_xor_sync(kAll, value, apart);
  return value;
}

// The values of all warps added, in thread 0. Every thread of the block calls it.
__device__ inline float sum_of_block(float value) {
  constexpr int kWarps = kThreads / 32;
  __shared__ float of_warp[kWarps];
  if (thread_of_block() % 32 == 0) of_warp[thread_of_block() / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    float values[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) values[i] = of_warp[i];
#pragma unroll
    for (int apart = 1; apart < kWarps; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kWarps; i += 2 * apart) values[i] += values[i + apart];
    }
    value = values[0];
  }
  // before the next call writes to of_warp
  __syncthreads();
  return value;
}

// The sum of squares of each chunk. A team adds up two of its 32 blocks of 1024 elements.
template <int kBytes>
__global__ void __launch_bounds__(kThreads) sum_of_squares_kernel(const __grid_constant__ Work<TensorSlot<1>, kBytes> work,
                                                                  float* __restrict__ chunks, float* found_inf) {
  static_assert(kBlocks == 2 * kTeams && kRows % 2 == 0);
  __shared__ Chunk<1> chunk;
  find_chunk(chunk, work);
  const int first = team_of_block() * 2 * kBlock;
  bool bad = false;
  float sums[2][kFour] = {};
#pragma unroll 1
  for (int row = 0; row < kRows * kLanes; row += 2 * kLanes) {
    // two rows of two blocks; the gradients are read again by the update
    Raw raw[2][2];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        raw[u][block] = load<false>(chunk, 0, first + block * kBlock + row + u * kLanes);
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        const Floats x = unpack(raw[u][block], chunk.operands[0].type);
#pragma unroll
        for (int i = 0; i < kFour; ++i) {
          bad = bad || is_nonfinite(x.values[i]);
          sums[block][i] += Square()(x.values[i]);
        }
      }
    }
  }
#pragma unroll
  for (auto& lanes : sums) {
    // lane i with i + 32, ... i + 4, which other threads have, and then with i + 2 and i + 1
#pragma unroll
    for (int apart = kTeam / 2; apart >= 1; apart /= 2) {
#pragma unroll
      for (float& lane : lanes) lane += __shfl_xor_sync(kAll, lane, apart);
    }
    lanes[0] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  }
  const float sum = sum_of_block(sum_of_warp(sums[0][0] + sums[1][0], kTeam));
  if (threadIdx.x == 0) chunks[chunk.number] = sum;
  raise_flag(bad, found_inf);
}

// One block: the sums of the chunks, which it overwrites, become the norm. They are added in pairs of neighbours, those in
// pairs, and so on.
__global__ void __launch_bounds__(kThreads)
    norm_kernel(float* chunks, std::int64_t count, const float* __restrict__ inverse_scale, float* __restrict__ norm) {
  float sum = 0.0f;
  do {
    const std::int64_t parts = (count + 2 * kThreads - 1) / (2 * kThreads);
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t i = (part * kThreads + thread_of_block()) * 2;
      const float left = i < count ? chunks[i] : 0.0f;
      const float right = i + 1 < count ? chunks[i + 1] : 0.0f;
      sum = sum_of_block(sum_of_warp(left + right, 1));
      // behind the barriers of sum_of_block: this place was read, and is not needed again
      if (threadIdx.x == 0) chunks[part] = sum;
    }
    count = parts;
    __syncthreads();
  } while (count > 1);
  if (threadIdx.x == 0) *norm = sqrtf(sum) * (inverse_scale == nullptr ? 1.0f : *inverse_scale);
}

}  // namespace amp_wrapper::cuda
