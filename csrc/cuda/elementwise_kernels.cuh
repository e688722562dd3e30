// The CUDA kernels that work on elements one by one: scale, copy, axpby, refresh, and the loss scale. Kernels need nothing
// besides CUDA's own words.
#pragma once

#include "device.cuh"

namespace amp_wrapper::cuda {

// target = source * scale, and the flag for sources that are not finite. The scale may be missing, and the flag too.
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const __grid_constant__ Work<2> work, const float* scale, float* found_inf) {
  const auto place = place_of(work);
  const Scale function{scale == nullptr ? 1.0f : *scale};
  const void* source = in_global(bytes_of(place, 0));
  void* target = in_global(bytes_of(place, 1));
  const bool aligned = is_aligned(source) && is_aligned(target);
  constexpr int kStride = kThreads * kVector;
  constexpr int kTurns = kUnroll / 2;
  bool bad = false;
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x) * kVector; begin < place.count; begin += kStride * kTurns) {
    Raw<kVector> raw[kTurns];
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      raw[u] = load_raw(source, place.types[0], turn_of<kVector>(begin + u * kStride, place.count, aligned));
    }
#pragma unroll
    for (int u = 0; u < kTurns; ++u) {
      Floats<kVector> x = unpack(raw[u], place.types[0]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        bad = bad || is_nonfinite(x.values[i]);
        x.values[i] = function(x.values[i]);
      }
      store_raw(target, place.types[1], turn_of<kVector>(begin + u * kStride, place.count, aligned), pack(x, place.types[1]));
    }
  }
  raise_flag(bad, found_inf);
}

// Bits of one type as they are: a conversion there and back would change the payload of a NaN.
template <typename T>
__device__ inline void copy_bits(const T* source, T* target, int count) {
  int done = 0;
  if (is_aligned(source) && is_aligned(target)) {
    const int vectors = count / kVector;
    done = vectors * kVector;
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads * kUnroll) {
      Pack<T> x[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (v + u * kThreads < vectors) x[u] = load_pack(source + (v + u * kThreads) * kVector);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (v + u * kThreads < vectors) store_pack(target + (v + u * kThreads) * kVector, x[u]);
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) target[i] = source[i];
}

template <typename S, typename T>
__device__ inline void convert_elements(const S* source, T* target, int count) {
  int done = 0;
  if (is_aligned(source) && is_aligned(target)) {
    const int vectors = count / kVector;
    done = vectors * kVector;
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads * kUnroll) {
      Pack<S> x[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (v + u * kThreads < vectors) x[u] = load_pack(source + (v + u * kThreads) * kVector);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (v + u * kThreads < vectors) {
          Pack<T> result;
#pragma unroll
          for (int i = 0; i < kVector; ++i) result.set(i, x[u].get(i));
          store_pack(target + (v + u * kThreads) * kVector, result);
        }
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) target[i] = from_float<T>(to_float(source[i]));
}

// target = source, rounded where the target is narrower.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Work<2> work) {
  const auto place = place_of(work);
  with_type(place.types[0], [&](auto* s) {
    with_type(place.types[1], [&](auto* t) {
      using S = std::remove_pointer_t<decltype(s)>;
      using T = std::remove_pointer_t<decltype(t)>;
      const S* source = data_of<const S>(place, 0);
      T* target = data_of<T>(place, 1);
      if constexpr (std::is_same_v<S, T>) {
        copy_bits(source, target, place.count);
      } else {
        convert_elements(source, target, place.count);
      }
    });
  });
}

// target[i] = x[i] * a + y[i] * b. Bit 0 of the result: an x is not finite, bit 1: a y.
template <typename X, typename Y, typename T>
__device__ inline int axpby_elements(const X* x, const Y* y, T* target, int count, Axpby function) {
  int bad = 0;
  int done = 0;
  if (is_aligned(x) && is_aligned(y) && is_aligned(target)) {
    // two vectors under way, of two lists
    constexpr int kPairs = kUnroll / 2;
    const int vectors = count / kVector;
    done = vectors * kVector;
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads * kPairs) {
      Pack<X> a[kPairs];
      Pack<Y> b[kPairs];
#pragma unroll
      for (int u = 0; u < kPairs; ++u) {
        if (v + u * kThreads < vectors) {
          a[u] = load_pack(x + (v + u * kThreads) * kVector);
          b[u] = load_pack(y + (v + u * kThreads) * kVector);
        }
      }
#pragma unroll
      for (int u = 0; u < kPairs; ++u) {
        if (v + u * kThreads < vectors) {
          Pack<T> result;
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            bad |= (is_nonfinite(a[u].get(i)) ? 1 : 0) | (is_nonfinite(b[u].get(i)) ? 2 : 0);
            result.set(i, function(a[u].get(i), b[u].get(i)));
          }
          store_pack(target + (v + u * kThreads) * kVector, result);
        }
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    const float a = to_float(x[i]);
    const float b = to_float(y[i]);
    bad |= (is_nonfinite(a) ? 1 : 0) | (is_nonfinite(b) ? 2 : 0);
    target[i] = from_float<T>(function(a, b));
  }
  return bad;
}

// `checked`: which bits of axpby_elements raise the flag.
__global__ void __launch_bounds__(kThreads)
    axpby_kernel(const __grid_constant__ Work<3> work, const float* a, const float* b, float* found_inf, int checked) {
  const auto place = place_of(work);
  const Axpby function{a == nullptr ? 1.0f : *a, b == nullptr ? 1.0f : *b};
  const int bad = with_type(place.types[0], [&](auto* x) {
    return with_type(place.types[1], [&](auto* y) {
      return with_type(place.types[2], [&](auto* t) {
        using X = std::remove_pointer_t<decltype(x)>;
        using Y = std::remove_pointer_t<decltype(y)>;
        using T = std::remove_pointer_t<decltype(t)>;
        return axpby_elements(data_of<const X>(place, 0), data_of<const Y>(place, 1), data_of<T>(place, 2), place.count,
                              function);
      });
    });
  });
  raise_flag((bad & checked) != 0, found_inf);
}

// Which of many NaN a rounding gives depends on the device: any is the rounded other.
__device__ inline bool both_nan(float a, float b) { return magnitude_of(a) > kExponent && magnitude_of(b) > kExponent; }

// master[i] = weight[i] where the weight is not the rounded master, bit for bit. The third list holds a byte for each tensor,
// which is set where there was one.
template <typename W>
__device__ inline bool refresh_elements(const W* weight, float* master, int count) {
  bool found = false;
  int done = 0;
  if (is_aligned(weight) && is_aligned(master)) {
    const int vectors = count / kVector;
    done = vectors * kVector;
    for (int v = static_cast<int>(threadIdx.x); v < vectors; v += kThreads) {
      const Pack<W> present = load_pack(weight + v * kVector);
      Pack<float> old = load_pack(master + v * kVector);
      Pack<W> rounded;
#pragma unroll
      for (int i = 0; i < kVector; ++i) rounded.set(i, old.get(i));
      bool edited = false;
#pragma unroll
      for (int k = 0; k < 4; ++k) edited = edited || rounded.quads[0].words[k] != present.quads[0].words[k];
      if (edited) {
        edited = false;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          const std::uint32_t differs = (rounded.quads[0].words[i / 2] ^ present.quads[0].words[i / 2]) >> (i % 2 * 16);
          if ((differs & 0xffffu) && !both_nan(old.get(i), present.get(i))) {
            old.set(i, present.get(i));
            edited = true;
          }
        }
        if (edited) store_pack(master + v * kVector, old);
        found = found || edited;
      }
    }
  }
  for (int i = done + static_cast<int>(threadIdx.x); i < count; i += kThreads) {
    if (from_float<W>(master[i]).bits != weight[i].bits && !both_nan(master[i], to_float(weight[i]))) {
      master[i] = to_float(weight[i]);
      found = true;
    }
  }
  return found;
}

__global__ void __launch_bounds__(kThreads) refresh_kernel(const __grid_constant__ Work<3> work) {
  const auto place = place_of(work);
  float* master = data_of<float>(place, 1);
  const bool found = static_cast<Type>(place.types[0]) == Type::kHalf
                         ? refresh_elements(data_of<const Half>(place, 0), master, place.count)
                         : refresh_elements(data_of<const Bfloat>(place, 0), master, place.count);
  // blocks of one tensor may all write it; it is the same byte
  if (__syncthreads_or(found) && threadIdx.x == 0) *static_cast<std::uint8_t*>(place.data[2]) = 1;
}

__global__ void update_scale_kernel(ScaleUpdate rule, float* scale, std::int32_t* growth_tracker,
                                    std::int32_t* hysteresis_tracker, const float* found_inf) {
  rule(scale, growth_tracker, hysteresis_tracker, *found_inf);
}

}  // namespace amp_wrapper::cuda
