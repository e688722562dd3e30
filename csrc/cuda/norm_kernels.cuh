// The CUDA kernels of the norms, in the order of planner.h.
#pragma once

#include "device.cuh"

namespace amp_wrapper::cuda {

// Two kinds of results for each chunk, joined in pairs of neighbours: see planner.h.
struct Sum {
  using Value = float;
  __device__ static float join(float a, float b) { return a + b; }
  __device__ static float norm(float value) { return sqrtf(value); }
  __device__ static bool is_bad(float) { return false; }
};

struct Largest {
  using Value = std::int32_t;
  __device__ static std::int32_t join(std::int32_t a, std::int32_t b) { return a > b ? a : b; }
  __device__ static float norm(std::int32_t value) { return float_of(static_cast<std::uint32_t>(value)); }
  __device__ static bool is_bad(std::int32_t value) { return value >= kExponent; }
};

constexpr unsigned kAll = 0xffffffffu;

// The values of threads that are `first`, 2 * `first`, ... apart, up to half a warp, joined.
template <typename R>
__device__ inline typename R::Value join_warp(typename R::Value value, int first) {
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    if (apart >= first) value = R::join(value, __shfl_xor_sync(kAll, value, apart));
  }
  return value;
}

// The values of all warps joined, in thread 0. Every thread of the block calls it.
template <typename R>
__device__ inline typename R::Value join_block(typename R::Value value) {
  __shared__ typename R::Value of_warp[kWarps];
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    typename R::Value values[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) values[i] = of_warp[i];
#pragma unroll
    for (int apart = 1; apart < kWarps; apart *= 2) {
#pragma unroll
      for (int i = 0; i < kWarps; i += 2 * apart) values[i] = R::join(values[i], values[i + apart]);
    }
    value = values[0];
  }
  // before the next call writes to of_warp
  __syncthreads();
  return value;
}

// The sums of the lanes of a chunk joined, in thread 0. Every thread of the block calls it.
__device__ inline float join_lanes(float (&sums)[kVector]) {
  // lane i with i + 32, i + 16, i + 8, which other threads have, and then with i + 4, i + 2, i + 1
#pragma unroll
  for (int apart = 4; apart >= 1; apart /= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += __shfl_xor_sync(kAll, sums[i], apart);
  }
#pragma unroll
  for (int apart = 4; apart >= 1; apart /= 2) {
#pragma unroll
    for (int i = 0; i < apart; ++i) sums[i] += sums[i + apart];
  }
  // the four blocks of a warp, and then the warps
  return join_block<Sum>(join_warp<Sum>(sums[0], 8));
}

// The sum of squares of a chunk. Eight threads share a block of 1024 elements: each has eight of its 64 lanes.
template <typename T>
__device__ inline float sum_of_chunk(const T* data, int count, bool* bad) {
  const int group = static_cast<int>(threadIdx.x) / 8;
  const int first = group * kBlock + static_cast<int>(threadIdx.x) % 8 * kVector;
  const bool aligned = is_aligned(data);
  float sums[kVector] = {};
#pragma unroll 4
  for (int row = 0; row < kRows; ++row) {
    const int begin = first + row * kLanes;
    if (aligned && begin + kVector <= count) {
      const Pack<T> pack = load_pack(data + begin);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float value = pack.get(i);
        *bad = *bad || is_nonfinite(value);
        sums[i] += Square()(value);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float value = begin + i < count ? to_float(data[begin + i]) : 0.0f;
        *bad = *bad || is_nonfinite(value);
        sums[i] += Square()(value);
      }
    }
  }
  return join_lanes(sums);
}

static_assert(kThreads / 8 == kBlocks, "a block of threads works on one chunk");

__global__ void __launch_bounds__(kThreads)
    sum_of_squares_kernel(const __grid_constant__ Work<1> work, float* chunks, float* found_inf) {
  const auto place = place_of(work);
  bool bad = false;
  const float sum = with_type(place.types[0], [&](auto* t) {
    return sum_of_chunk(data_of<const std::remove_pointer_t<decltype(t)>>(place, 0), place.count, &bad);
  });
  if (threadIdx.x == 0) chunks[blockIdx.x] = sum;
  raise_flag(bad, found_inf);
}

// The same, and target = source * scale in the same pass. The scale may be missing, and the flag too.
__global__ void __launch_bounds__(kThreads)
    scale_and_sum_kernel(const __grid_constant__ Work<2> work, const float* scale, float* chunks, float* found_inf) {
  const auto place = place_of(work);
  const Scale function{scale == nullptr ? 1.0f : *scale};
  const void* source = in_global(bytes_of(place, 0));
  void* target = in_global(bytes_of(place, 1));
  const bool aligned = is_aligned(source) && is_aligned(target);
  const int group = static_cast<int>(threadIdx.x) / 8;
  const int first = group * kBlock + static_cast<int>(threadIdx.x) % 8 * kVector;
  // fewer vectors under way than elsewhere: the sums need registers too
  constexpr int kRowsAtOnce = kUnroll / 2;
  static_assert(kRows % kRowsAtOnce == 0);
  bool bad = false;
  float sums[kVector] = {};
#pragma unroll 1
  for (int row = 0; row < kRows; row += kRowsAtOnce) {
    Turn<kVector> turns[kRowsAtOnce];
    Raw<kVector> raw[kRowsAtOnce];
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      turns[u] = turn_of<kVector>(first + (row + u) * kLanes, place.count, aligned);
      raw[u] = load_raw(source, place.types[0], turns[u]);
    }
#pragma unroll
    for (int u = 0; u < kRowsAtOnce; ++u) {
      Floats<kVector> x = unpack(raw[u], place.types[0]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float value = x.values[i];
        bad = bad || is_nonfinite(value);
        sums[i] += Square()(value);
        x.values[i] = function(value);
      }
      store_raw(target, place.types[1], turns[u], pack(x, place.types[1]));
    }
  }
  const float sum = join_lanes(sums);
  if (threadIdx.x == 0) chunks[blockIdx.x] = sum;
  raise_flag(bad, found_inf);
}

template <typename T>
__device__ inline std::int32_t largest_of_chunk(const T* data, int count) {
  std::int32_t most = 0;
  int done = 0;
  if (is_aligned(data)) {
    const int vectors = count / kVector;
    done = vectors * kVector;
#pragma unroll 4
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
      const Pack<T> pack = load_pack(data + v * kVector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) most = Largest::join(most, magnitude_of(pack.get(i)));
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    most = Largest::join(most, magnitude_of(to_float(data[i])));
  }
  return join_block<Largest>(join_warp<Largest>(most, 1));
}

// The largest magnitude of each chunk, as an integer; nothing is written where `chunks` is missing.
__global__ void __launch_bounds__(kThreads)
    largest_kernel(const __grid_constant__ Work<1> work, std::int32_t* chunks, float* found_inf) {
  const auto place = place_of(work);
  const std::int32_t most = with_type(place.types[0], [&](auto* t) {
    return largest_of_chunk(data_of<const std::remove_pointer_t<decltype(t)>>(place, 0), place.count);
  });
  if (threadIdx.x == 0 && chunks != nullptr) chunks[blockIdx.x] = most;
  raise_flag(threadIdx.x == 0 && Largest::is_bad(most), found_inf);
}

// Joins `count` values in pairs of neighbours, and those in pairs, and so on, by overwriting them; thread 0 has the result.
template <typename R>
__device__ inline typename R::Value join_all(typename R::Value* values, std::int64_t count) {
  using Value = typename R::Value;
  Value result = Value(0);
  do {
    const std::int64_t parts = (count + 2 * kThreads - 1) / (2 * kThreads);
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t i = part * 2 * kThreads + 2 * static_cast<std::int64_t>(threadIdx.x);
      const Value left = i < count ? values[i] : Value(0);
      const Value right = i + 1 < count ? values[i + 1] : Value(0);
      result = join_block<R>(join_warp<R>(R::join(left, right), 1));
      // behind the barriers of join_block: this place was read, and is not needed again
      if (threadIdx.x == 0) values[part] = result;
    }
    count = parts;
    __syncthreads();
  } while (count > 1);
  return result;
}

// One block for each tensor: its chunks become one value.
template <typename R>
__global__ void __launch_bounds__(kThreads)
    join_tensors_kernel(const __grid_constant__ Segments segments, typename R::Value* chunks, typename R::Value* tensors) {
  const int tensor = static_cast<int>(blockIdx.x);
  const std::int32_t* starts = segments.table != nullptr ? segments.table : segments.starts;
  const std::int32_t begin = starts[tensor];
  const typename R::Value value = join_all<R>(chunks + begin, starts[tensor + 1] - begin);
  if (threadIdx.x == 0) tensors[tensor] = value;
}

// One block: the values of the tensors become the norms. `each` may be missing; the values are overwritten.
template <typename R>
__global__ void __launch_bounds__(kThreads)
    join_norms_kernel(typename R::Value* tensors, std::int64_t count, const float* inverse_scale, float* total, float* each,
                      float* found_inf) {
  const float factor = inverse_scale == nullptr ? 1.0f : *inverse_scale;
  if (each != nullptr) {
    for (std::int64_t i = threadIdx.x; i < count; i += kThreads) each[i] = R::norm(tensors[i]) * factor;
    __syncthreads();
  }
  const typename R::Value value = join_all<R>(tensors, count);
  if (threadIdx.x == 0) *total = R::norm(value) * factor;
  raise_flag(threadIdx.x == 0 && R::is_bad(value), found_inf);
}

}  // namespace amp_wrapper::cuda
