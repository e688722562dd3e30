// The CUDA kernels of an optimizer step: a prologue that decides, and one pass over gradient, weight and state.
#pragma once

#include "../common/split.h"
#include "../common/step_lists.h"
#include "device.cuh"

namespace amp_wrapper::cuda {

// blocks that a multiprocessor has room for: 64 registers for each thread
constexpr int kBlocksAtOnce = 4;

// Rows of some parameters, and in the last launch the decision.
template <int kBytes>
__global__ void __launch_bounds__(kPrologueThreads)
    prologue_kernel(const __grid_constant__ Work<ParameterSlot, kBytes> work, const __grid_constant__ Decide decide, Kind kind,
                    float* __restrict__ rows, float* __restrict__ decision, int parameters) {
  const int i = static_cast<int>(blockIdx.x) * kPrologueThreads + thread_of_block();
  if (i < work.size) {
    const ParameterSlot& slot = work.begin()[i];
    // whether the step is taken is read anew: blocks do not wait for one another
    fill_row(kind, slot.hyper, slot.rate, slot.step, !decide.skips(), rows + static_cast<std::int64_t>(work.first + i) * kRow);
  }
  // the scale moves once, however many launches there are
  if (i == 0 && work.first + work.size == parameters) decide(decision);
}

// Numbers that all threads of a block need at every turn. In registers they would leave too few for the elements, so they are
// kept in shared memory and read anew.
struct Numbers {
  alignas(16) float row[kRow];
  alignas(16) float decision[kDecision];
};

// Every thread of the block calls it.
__device__ inline void load_numbers(Numbers& numbers, const float* row, const float* decision) {
  const int i = thread_of_block();
  if (i < kRow) numbers.row[i] = row[i];
  if (i < kDecision) numbers.decision[i] = decision[i];
  __syncthreads();
}

// What was read from memory is not held in registers beyond this line.
__device__ inline void forget() { asm volatile("" ::: "memory"); }

template <typename T>
__device__ inline Floats join(const Raw& weights, const Raw& remainders) {
  Floats x;
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    x.values[i] = join_master<Single>(part_of(weights, i), static_cast<std::int16_t>(part_of(remainders, i)),
                                      static_cast<const T*>(nullptr));
  }
  return x;
}

template <typename T>
__device__ inline void split(const Floats& x, Raw& weights, Raw& remainders) {
#pragma unroll
  for (int i = 0; i < kFour; ++i) {
    const Parts<Single> parts = split_master<Single>(x.values[i], static_cast<const T*>(nullptr));
    set_part(weights, i, static_cast<std::uint32_t>(parts.weight) & 0xffffu);
    set_part(remainders, i, static_cast<std::uint32_t>(parts.remainder) & 0xffffu);
  }
}

// A parameter together with its partner, which may be missing.
__device__ inline Floats unpack_master(const Raw& weights, Type type, const Raw& remainders, Type partner) {
  if (partner != Type::kShort) return unpack(weights, type);
  return type == Type::kHalf ? join<Half>(weights, remainders) : join<Bfloat>(weights, remainders);
}

template <int kLists>
__device__ inline void store_master(Chunk<kLists>& chunk, int list, int partner, int row, const Floats& x) {
  const Type type = chunk.operands[list].type;
  const Operand other = chunk.operands[partner];
  if (other.type != Type::kShort) {
    store(chunk, list, row, pack(x, type));
    if (other.data != nullptr) store(chunk, partner, row, pack(x, other.type));
    return;
  }
  Raw weights = {};
  Raw remainders = {};
  if (type == Type::kHalf) {
    split<Half>(x, weights, remainders);
  } else {
    split<Bfloat>(x, weights, remainders);
  }
  store(chunk, list, row, weights);
  store(chunk, partner, row, remainders);
}

template <bool kAmsgrad, int kBytes>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    adam_kernel(const __grid_constant__ Work<TensorSlot<kAdamLists>, kBytes> work, const float* __restrict__ rows,
                const float* __restrict__ decision) {
  if (decision[kSkip] != 0.0f) return;
  __shared__ Chunk<kAdamLists> chunk;
  __shared__ Numbers numbers;
  find_chunk(chunk, work);
  load_numbers(numbers, rows + static_cast<std::int64_t>(chunk.tensor) * kRow, decision);
#pragma unroll 1
  for (int row = team_of_block() * kLanes; row < chunk.count; row += kTeams * kLanes) {
    forget();
    // all that is read is under way before the first of it is used
    const Raw raw_g = load<true>(chunk, kAdamGradient, row);
    const Raw raw_w = load<false>(chunk, kAdamParameter, row);
    const Raw raw_m = load<false>(chunk, kAdamFirst, row);
    const Raw raw_v = load<false>(chunk, kAdamSecond, row);
    Raw raw_x = {};
    if constexpr (kAmsgrad) raw_x = load<false>(chunk, kAdamMost, row);
    Raw raw_r = {};
    const Type partner = chunk.operands[kAdamPartner].type;
    if (partner == Type::kShort) raw_r = load<false>(chunk, kAdamPartner, row);
    const Floats g = unpack(raw_g, chunk.operands[kAdamGradient].type);
    Floats w = unpack_master(raw_w, chunk.operands[kAdamParameter].type, raw_r, partner);
    Floats m = unpack(raw_m, chunk.operands[kAdamFirst].type);
    Floats v = unpack(raw_v, chunk.operands[kAdamSecond].type);
    Floats x = unpack(raw_x, chunk.operands[kAdamMost].type);
    const Adam<Single> adam(numbers.row, numbers.decision);
#pragma unroll
    for (int i = 0; i < kFour; ++i) {
      w.values[i] = adam.update<kAmsgrad>(g.values[i], w.values[i], &m.values[i], &v.values[i], &x.values[i]);
    }
    forget();
    store_master(chunk, kAdamParameter, kAdamPartner, row, w);
    store(chunk, kAdamFirst, row, pack(m, chunk.operands[kAdamFirst].type));
    store(chunk, kAdamSecond, row, pack(v, chunk.operands[kAdamSecond].type));
    if constexpr (kAmsgrad) store(chunk, kAdamMost, row, pack(x, chunk.operands[kAdamMost].type));
  }
}

template <bool kMomentums, int kBytes>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    sgd_kernel(const __grid_constant__ Work<TensorSlot<kSgdLists>, kBytes> work, const float* __restrict__ rows,
               const float* __restrict__ decision) {
  if (decision[kSkip] != 0.0f) return;
  __shared__ Chunk<kSgdLists> chunk;
  __shared__ Numbers numbers;
  find_chunk(chunk, work);
  load_numbers(numbers, rows + static_cast<std::int64_t>(chunk.tensor) * kRow, decision);
#pragma unroll 1
  for (int row = team_of_block() * kLanes; row < chunk.count; row += kTeams * kLanes) {
    forget();
    const Raw raw_g = load<true>(chunk, kSgdGradient, row);
    const Raw raw_w = load<false>(chunk, kSgdParameter, row);
    Raw raw_b = {};
    if constexpr (kMomentums) raw_b = load<false>(chunk, kSgdBuffer, row);
    Raw raw_r = {};
    const Type partner = chunk.operands[kSgdPartner].type;
    if (partner == Type::kShort) raw_r = load<false>(chunk, kSgdPartner, row);
    const Floats g = unpack(raw_g, chunk.operands[kSgdGradient].type);
    Floats w = unpack_master(raw_w, chunk.operands[kSgdParameter].type, raw_r, partner);
    Floats b = unpack(raw_b, chunk.operands[kSgdBuffer].type);
    const Sgd<Single> sgd(numbers.row, numbers.decision);
#pragma unroll
    for (int i = 0; i < kFour; ++i) w.values[i] = sgd.update<kMomentums>(g.values[i], w.values[i], &b.values[i]);
    forget();
    store_master(chunk, kSgdParameter, kSgdPartner, row, w);
    if constexpr (kMomentums) store(chunk, kSgdBuffer, row, pack(b, chunk.operands[kSgdBuffer].type));
  }
}

}  // namespace amp_wrapper::cuda
