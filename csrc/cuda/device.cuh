// What the kernels share: which part of the lists a block works on, and how threads reach its elements. Besides CUDA's own
// words this file needs nothing, so that a header can give those words a meaning on a CPU (tests/cuda_shim).
//
// One block works on one chunk (planner.h), whatever tensor and type it is of: a list of any lengths and types is one launch.
// Types are told apart at run time, the same for the whole block; what lies between is float32, and compiled once.
#pragma once

#include <type_traits>

#include "kernel_args.h"

namespace amp_wrapper::cuda {

constexpr int kThreads = 256;
constexpr unsigned kAll = 0xffffffffu;
// 16 threads, half of a warp, move a row of 64 neighbours at once, four each: 16 bytes of float32, 8 of a 16-bit type
constexpr int kTeam = 16;
constexpr int kTeams = kThreads / kTeam;
constexpr int kFour = kLanes / kTeam;
static_assert(kFour == 4);

__device__ inline int thread_of_block() { return static_cast<int>(threadIdx.x); }
__device__ inline int team_of_block() { return thread_of_block() / kTeam; }
__device__ inline int thread_of_team() { return thread_of_block() % kTeam; }
__device__ inline void sync_team() { __syncwarp(0xffffu << (threadIdx.x & 16u)); }

// The part of a tensor of each list that a block works on, in shared memory.
template <int kLists>
struct Chunk {
  // from the first element on; null stays null
  Operand operands[kLists];
  // whether rows may be moved in vectors
  bool aligned[kLists];
  int count;
  std::int32_t number;
  std::int32_t tensor;
  // where elements change threads
  alignas(16) std::uint32_t stage[kTeams][kLanes];
};

// Every thread of the block calls it. The first warp finds the slot, the last that begins at or before this block.
template <int kLists, int kBytes>
__device__ inline void find_chunk(Chunk<kLists>& chunk, const Work<TensorSlot<kLists>, kBytes>& work) {
  if (thread_of_block() < 32) {
    const TensorSlot<kLists>* slots = work.begin();
    const std::int32_t number = slots[0].start + static_cast<std::int32_t>(blockIdx.x);
    const int lane = thread_of_block();
    int low = 0;
    // 32 places are asked at once
    for (int size = work.size; size > 1;) {
      const int step = (size + 31) / 32;
      const bool before = lane * step < size && slots[low + lane * step].start <= number;
      const int last = (__popc(__ballot_sync(kAll, before)) - 1) * step;
      low += last;
      size = size - last < step ? size - last : step;
    }
    const TensorSlot<kLists>& slot = slots[low];
    const std::int64_t begin = static_cast<std::int64_t>(number - slot.start) * kChunk;
    if (lane < kLists) {
      Operand operand{slot.data[lane], slot.types[lane]};
      if (operand.data != nullptr) operand.data = operand.at(begin);
      chunk.operands[lane] = operand;
      chunk.aligned[lane] = reinterpret_cast<std::uintptr_t>(operand.data) % (kFour * size_of(operand.type)) == 0;
    }
    if (lane == 0) {
      const std::int64_t left = slot.count - begin;
      chunk.count = static_cast<int>(left < kChunk ? left : kChunk);
      chunk.number = number;
      chunk.tensor = slot.tensor;
    }
  }
  __syncthreads();
}

// A maximum, never a sum: the flag stays 0 or 1. Every thread of the block calls it.
__device__ inline void raise_flag(bool bad, float* found_inf) {
  if (__syncthreads_or(bad) && threadIdx.x == 0 && found_inf != nullptr) {
    atomicMax(reinterpret_cast<int*>(found_inf), static_cast<int>(bits_of(1.0f)));
  }
}

// -- elements in memory

// Tells the compiler that a pointer out of a table leads to no shared memory.
template <typename T>
__device__ inline T* in_global(char* place) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(place));
#endif
  return reinterpret_cast<T*>(place);
}

// kOnce: nobody reads it again soon, so that it need not take the place of others in the caches.
template <bool kOnce, typename T>
__device__ inline T read(const T* from) {
  if constexpr (kOnce) {
    return __ldcs(from);
  } else {
    return *from;
  }
}

// Four elements as they lie in memory; 16-bit types fill the first half.
struct Raw {
  std::uint32_t words[kFour];
};

__device__ inline std::uint16_t part_of(const Raw& raw, int i) {
  return static_cast<std::uint16_t>(raw.words[i / 2] >> (i % 2 * 16));
}
__device__ inline void set_part(Raw& raw, int i, std::uint32_t bits) { raw.words[i / 2] |= bits << (i % 2 * 16); }

// The elements of this thread among the 64 from `row` on; zeros behind the last. Every thread of a team calls it. A list that
// is not aligned, and the last elements, are read by neighbours next to one another, and then change threads.
template <bool kOnce, int kLists>
__device__ inline Raw load(Chunk<kLists>& chunk, int list, int row) {
  Raw raw = {};
  if (row >= chunk.count) return raw;
  const bool wide = chunk.operands[list].type == Type::kFloat;
  char* data = chunk.operands[list].at(row);
  if (chunk.aligned[list] && row + kLanes <= chunk.count) {
    if (wide) {
      const uint4 four = read<kOnce>(in_global<const uint4>(data) + thread_of_team());
      return {{four.x, four.y, four.z, four.w}};
    }
    const uint2 four = read<kOnce>(in_global<const uint2>(data) + thread_of_team());
    return {{four.x, four.y}};
  }
  const int left = chunk.count - row - thread_of_team();
  std::uint32_t bits[kFour] = {};
#pragma unroll
  for (int k = 0; k < kFour; ++k) {
    const int i = k * kTeam + thread_of_team();
    if (k * kTeam < left) bits[k] = wide ? in_global<const std::uint32_t>(data)[i] : in_global<const std::uint16_t>(data)[i];
  }
  std::uint32_t* stage = chunk.stage[team_of_block()];
#pragma unroll
  for (int k = 0; k < kFour; ++k) stage[k * kTeam + thread_of_team()] = bits[k];
  sync_team();
#pragma unroll
  for (int k = 0; k < kFour; ++k) {
    const std::uint32_t mine = stage[thread_of_team() * kFour + k];
    if (wide) {
      raw.words[k] = mine;
    } else {
      set_part(raw, k, mine);
    }
  }
  sync_team();
  return raw;
}

template <int kLists>
__device__ inline void store(Chunk<kLists>& chunk, int list, int row, const Raw& raw) {
  if (row >= chunk.count) return;
  const bool wide = chunk.operands[list].type == Type::kFloat;
  char* data = chunk.operands[list].at(row);
  if (chunk.aligned[list] && row + kLanes <= chunk.count) {
    if (wide) {
      in_global<uint4>(data)[thread_of_team()] = {raw.words[0], raw.words[1], raw.words[2], raw.words[3]};
    } else {
      in_global<uint2>(data)[thread_of_team()] = {raw.words[0], raw.words[1]};
    }
    return;
  }
  std::uint32_t* stage = chunk.stage[team_of_block()];
#pragma unroll
  for (int k = 0; k < kFour; ++k) stage[thread_of_team() * kFour + k] = wide ? raw.words[k] : part_of(raw, k);
  sync_team();
#pragma unroll
  for (int k = 0; k < kFour; ++k) {
    const int i = k * kTeam + thread_of_team();
    if (row + i < chunk.count) {
      if (wide) {
        in_global<std::uint32_t>(data)[i] = stage[i];
      } else {
        in_global<std::uint16_t>(data)[i] = static_cast<std::uint16_t>(stage[i]);
      }
    }
  }
  sync_team();
}

// -- elements as floats

struct Floats {
  float values[kFour];
};

__device__ inline Floats unpack(const Raw& raw, Type type) {
  Floats x;
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (type == Type::kFloat) {
      x.values[i] = float_of(raw.words[i]);
    } else {
      x.values[i] = type == Type::kHalf ? to_float(Half{part_of(raw, i)}) : to_float(Bfloat{part_of(raw, i)});
    }
  }
  return x;
}

__device__ inline Raw pack(const Floats& x, Type type) {
  Raw raw = {};
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    if (type == Type::kFloat) {
      raw.words[i] = bits_of(x.values[i]);
    } else {
      set_part(raw, i, type == Type::kHalf ? from_float<Half>(x.values[i]).bits : from_float<Bfloat>(x.values[i]).bits);
    }
  }
  return raw;
}

}  // namespace amp_wrapper::cuda
