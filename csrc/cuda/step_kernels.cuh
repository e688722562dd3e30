// The CUDA kernels of an optimizer step: a prologue that decides, and one pass over gradient, weight and state. What they
// compute is described in amp_wrapper/ops/optimizer_step.py.
//
// Types are told apart at run time (device.cuh): one kernel serves every mixture of them.
#pragma once

#include "../common/split.h"
#include "device.cuh"
#include "step_kernel_args.h"

namespace amp_wrapper::cuda {

// few, so that the parameters of a model keep many multiprocessors busy
constexpr int kPrologueThreads = 32;
// blocks that a multiprocessor has room for: 64 registers for each thread
constexpr int kBlocksAtOnce = 4;

__global__ void __launch_bounds__(kPrologueThreads) prologue_kernel(const __grid_constant__ PrologueWork work) {
  const std::int32_t i = static_cast<std::int32_t>(blockIdx.x) * kPrologueThreads + static_cast<std::int32_t>(threadIdx.x);
  if (i < work.parameters) {
    const std::int32_t group = work.group_of()[i];
    // whether the step is taken is read anew: blocks do not wait for one another
    fill_row(work.kind, work.hyper(group), work.rates()[group], work.steps()[i], !work.decide.skips(),
             work.rows + static_cast<std::int64_t>(i) * kRow);
  }
  if (i == 0 && work.decides) work.decide(work.decision);
}

template <typename T, int N>
__device__ inline Floats<N> join_raw(const Raw<N>& weights, const Raw<N>& remainders) {
  Floats<N> x;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    x.values[i] = join_master<Single>(part_of(weights, i), static_cast<std::int16_t>(part_of(remainders, i)),
                                      static_cast<const T*>(nullptr));
  }
  return x;
}

template <typename T, int N>
__device__ inline void split_raw(const Floats<N>& x, Raw<N>* weights, Raw<N>* remainders) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Parts<Single> parts = split_master<Single>(x.values[i], static_cast<const T*>(nullptr));
    weights->words[i / 2] |= (static_cast<std::uint32_t>(parts.weight) & 0xffffu) << (i % 2 * 16);
    remainders->words[i / 2] |= (static_cast<std::uint32_t>(parts.remainder) & 0xffffu) << (i % 2 * 16);
  }
}

// What all threads of a block need at every turn. In registers it would leave too few for the elements, so it is kept in
// shared memory and read anew.
template <int kLists>
struct Common {
  // where the lists of this block begin; null stays null
  void* data[kLists];
  std::uint8_t types[kLists];
  bool aligned;
  int count;
  alignas(16) float row[kRow];
  alignas(16) float decision[kDecision];

  template <int N>
  __device__ Raw<N> load(int list, const Turn<N>& turn) const {
    return load_raw(in_global(data[list]), types[list], turn);
  }
  template <int N>
  __device__ void store(int list, const Turn<N>& turn, const Floats<N>& x) const {
    store_raw(in_global(data[list]), types[list], turn, pack(x, types[list]));
  }
  __device__ bool has(int list) const { return data[list] != nullptr; }
  __device__ bool is_split(int partner) const { return has(partner) && static_cast<Type>(types[partner]) == Type::kShort; }
};

// Every thread of the block calls it. The last list holds the rows.
template <int kLists>
__device__ inline void set_common(Common<kLists>* common, const Work<kLists>& work, const float* decision) {
  if (threadIdx.x == 0) {
    const auto place = place_of(work);
    common->aligned = true;
#pragma unroll
    for (int list = 0; list < kLists - 1; ++list) {
      void* data = bytes_of(place, list);
      common->data[list] = data;
      common->types[list] = place.types[list];
      common->aligned = common->aligned && is_aligned(data);
    }
    common->count = place.count;
    const float* row = static_cast<const float*>(place.data[kLists - 1]);
    for (int i = 0; i < kRow; ++i) common->row[i] = row[i];
    for (int i = 0; i < kDecision; ++i) common->decision[i] = decision[i];
  }
  __syncthreads();
}

// What was read from memory is not held in registers beyond this line.
__device__ inline void forget() { asm volatile("" ::: "memory"); }

template <int N>
__device__ inline Floats<N> master_of(const Raw<N>& weights, std::uint8_t type, const Raw<N>& remainders, bool is_split) {
  if (!is_split) return unpack(weights, type);
  return static_cast<Type>(type) == Type::kHalf ? join_raw<Half>(weights, remainders) : join_raw<Bfloat>(weights, remainders);
}

// A parameter and its partner, which may be missing.
template <int kLists, int N>
__device__ inline void store_master(const Common<kLists>& common, int list, int partner, const Turn<N>& turn,
                                    const Floats<N>& x) {
  if (common.is_split(partner)) {
    Raw<N> weights = {};
    Raw<N> remainders = {};
    if (static_cast<Type>(common.types[list]) == Type::kHalf) {
      split_raw<Half>(x, &weights, &remainders);
    } else {
      split_raw<Bfloat>(x, &weights, &remainders);
    }
    store_raw(in_global(common.data[list]), common.types[list], turn, weights);
    store_raw(in_global(common.data[partner]), common.types[partner], turn, remainders);
    return;
  }
  common.store(list, turn, x);
  if (common.has(partner)) common.store(partner, turn, x);
}

// Calls body(turn) for the vectors of this thread.
template <int N, int kLists, typename F>
__device__ inline void for_turns(const Common<kLists>& common, F body) {
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x) * N; first < common.count; first += kThreads * N) {
    body(turn_of<N>(first, common.count, common.aligned));
  }
}

template <bool kAmsgrad>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    adam_kernel(const __grid_constant__ Work<kAdamLists> work, const float* decision) {
  // half of them beside the maxima: registers would not do
  constexpr int kWidth = kAmsgrad ? kVector / 2 : kVector;
  if (decision[kSkip] != 0.0f) return;
  __shared__ Common<kAdamLists> common;
  set_common(&common, work, decision);
  for_turns<kWidth>(common, [&](const Turn<kWidth>& turn) {
    forget();
    // all that is read is under way before the first of it is used
    const Raw<kWidth> raw_g = common.load(kAdamGradient, turn);
    const Raw<kWidth> raw_w = common.load(kAdamParameter, turn);
    const Raw<kWidth> raw_m = common.load(kAdamFirst, turn);
    const Raw<kWidth> raw_v = common.load(kAdamSecond, turn);
    Raw<kWidth> raw_x = {};
    if constexpr (kAmsgrad) raw_x = common.load(kAdamMost, turn);
    Raw<kWidth> raw_r = {};
    if (common.is_split(kAdamPartner)) raw_r = common.load(kAdamPartner, turn);
    const Floats<kWidth> g = unpack(raw_g, common.types[kAdamGradient]);
    Floats<kWidth> w = master_of(raw_w, common.types[kAdamParameter], raw_r, common.is_split(kAdamPartner));
    Floats<kWidth> m = unpack(raw_m, common.types[kAdamFirst]);
    Floats<kWidth> v = unpack(raw_v, common.types[kAdamSecond]);
    Floats<kWidth> x;
    if constexpr (kAmsgrad) x = unpack(raw_x, common.types[kAdamMost]);
    const Adam<Single> adam(common.row, common.decision);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      w.values[i] = adam.update<kAmsgrad>(g.values[i], w.values[i], &m.values[i], &v.values[i], &x.values[i]);
    }
    forget();
    store_master(common, kAdamParameter, kAdamPartner, turn, w);
    common.store(kAdamFirst, turn, m);
    common.store(kAdamSecond, turn, v);
    if constexpr (kAmsgrad) common.store(kAdamMost, turn, x);
  });
}

template <bool kMomentums>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    sgd_kernel(const __grid_constant__ Work<kSgdLists> work, const float* decision) {
  if (decision[kSkip] != 0.0f) return;
  __shared__ Common<kSgdLists> common;
  set_common(&common, work, decision);
  for_turns<kVector>(common, [&](const Turn<kVector>& turn) {
    forget();
    const Raw<kVector> raw_g = common.load(kSgdGradient, turn);
    const Raw<kVector> raw_w = common.load(kSgdParameter, turn);
    Raw<kVector> raw_b = {};
    if constexpr (kMomentums) raw_b = common.load(kSgdBuffer, turn);
    Raw<kVector> raw_r = {};
    if (common.is_split(kSgdPartner)) raw_r = common.load(kSgdPartner, turn);
    const Floats<kVector> g = unpack(raw_g, common.types[kSgdGradient]);
    Floats<kVector> w = master_of(raw_w, common.types[kSgdParameter], raw_r, common.is_split(kSgdPartner));
    Floats<kVector> b;
    if constexpr (kMomentums) b = unpack(raw_b, common.types[kSgdBuffer]);
    const Sgd<Single> sgd(common.row, common.decision);
#pragma unroll
    for (int i = 0; i < kVector; ++i) w.values[i] = sgd.update<kMomentums>(g.values[i], w.values[i], &b.values[i]);
    forget();
    store_master(common, kSgdParameter, kSgdPartner, turn, w);
    if constexpr (kMomentums) common.store(kSgdBuffer, turn, b);
  });
}

}  // namespace amp_wrapper::cuda
